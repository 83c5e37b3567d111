"""A bucket whose store throttles, refuses, lies and redirects; addresses; the budget of requests."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import traceback
from pathlib import Path

import pytest
from s3_server import CREDENTIALS, S3Server, error, s3_server

from thinwire.carriers.base import Carrier, as_bytes
from thinwire.carriers.bucket import BucketCarrier
from thinwire.carriers.cost import PART_BYTES, PRICES, RequestBudget, round_cost
from thinwire.carriers.open import CarrierAddress, open_carrier, read_address
from thinwire.errors import (
    AccessRefused,
    ConnectError,
    MissingExtra,
    NotThere,
    PayloadError,
    Throttled,
    TransportError,
    WrongSecret,
)
from thinwire.transport.secret import Secret

SECRET = Secret(key=bytes(range(32)))
SLOW = error("503 Slow Down", "SlowDown", **{"Retry-After": "1"})
EXPIRED = error("403 Forbidden", "ExpiredToken")


@pytest.fixture
def server() -> S3Server:
    return s3_server()


def bucket(server: S3Server, slept: list[float], **others: float) -> BucketCarrier:
    url = f"s3://{server.reset()}/prefix"
    return BucketCarrier(url, options=server.options(), sleep=slept.append, **others)


def read(carrier: Carrier, name: str) -> bytes:
    return bytes(as_bytes(carrier.get(name, most_bytes=1000, deadline_s=30)))


def test_throttling_is_waited_out_and_named_if_it_lasts(server: S3Server) -> None:
    slept: list[float] = []
    carrier = bucket(server, slept)
    server.answers += [SLOW, SLOW, None]
    assert carrier.put("round/1", b"x", only_new=True) and read(carrier, "round/1") == b"x"
    assert 0.5 <= slept[0] <= 1.0 <= slept[1] <= 2.0 and carrier.cost().puts == 3
    server.answers += [SLOW] * 4
    with pytest.raises(Throttled, match="fewer requests") as raised:
        carrier.listing("round")
    assert raised.value.retry_after_s == 16.0
    assert [entry.name for entry in carrier.listing("round")] == ["round/1"]  # and the run goes on


def test_credentials_that_expire_in_mid_run_are_one_error_after_which_all_goes_on(server: S3Server) -> None:
    slept: list[float] = []
    carrier = bucket(server, slept)
    carrier.put("journal/00000000", b"one", only_new=True)
    steps = (
        lambda: carrier.append("journal", 1, b"two"), lambda: read(carrier, "journal/00000000"),
        lambda: carrier.listing("journal"), lambda: carrier.delete(["none"]), carrier.now,
    )  # fmt: skip
    for step in steps:
        server.answers += [EXPIRED]
        with pytest.raises(AccessRefused, match=r"ExpiredToken.*renew"):
            step()
        step()
    assert carrier.entry("journal", 1) == b"two" and not slept


def test_a_lost_answer_is_tried_again_and_its_entry_is_known_for_the_own(server: S3Server) -> None:
    slept: list[float] = []
    carrier = bucket(server, slept)
    server.after += [error("500 Internal Server Error", "InternalError")]
    assert carrier.append("journal", 0, b"mine") and not carrier.append("journal", 0, b"other")
    conflict = error("409 Conflict", "ConditionalRequestConflict")
    server.answers += [conflict]  # another write was under way, and failed
    assert carrier.append("journal", 1, b"mine too") and len(slept) == 2
    server.answers += [error("500 Internal Server Error", "InternalError")] * 4
    with pytest.raises(TransportError, match="failed 4 times"):
        carrier.put("x", b"", only_new=True)


def test_a_store_without_create_only_writes_is_refused_by_name_at_start(server: S3Server) -> None:
    for fault in ("fakes", "501"):
        name = server.reset()
        server.is_faking = fault == "fakes"
        server.answers += [error("501 Not Implemented", "NotImplemented")] * (fault == "501")
        address = CarrierAddress(place=f"s3://{name}/run", secret=SECRET)
        with pytest.raises(ValueError, match=rf"s3://{name}/run has no create-only writes.*try S3"):
            open_carrier(address, may_create=True, options=server.options())


def test_a_wrong_region_and_a_missing_bucket_are_named_with_the_remedy(server: S3Server) -> None:
    carrier = bucket(server, [])
    malformed = error("400 Bad Request", "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")
    for answer in (error("301 Moved Permanently", "PermanentRedirect"), malformed):
        server.answers += [answer]
        with pytest.raises(ConnectError, match=r"another region.*set AWS_REGION"):
            carrier.listing("x")
    missing = BucketCarrier("s3://no-such-bucket/p", options=server.options())
    for step in (lambda: missing.put("x", b"", only_new=True), lambda: read(missing, "x")):
        with pytest.raises(ConnectError, match="there is no bucket"):
            step()
    with pytest.raises(PayloadError, match="at most 3"):
        carrier.put("large", bytes(5), only_new=True)
        carrier.get("large", most_bytes=3, deadline_s=30)


def test_two_runs_in_one_prefix_and_foreign_objects(server: S3Server) -> None:
    place = f"s3://{server.reset()}/run"
    ada = open_carrier(CarrierAddress(place=place, secret=SECRET), may_create=True, options=server.options())
    raw = BucketCarrier(place, options=server.options())
    raw.put("notes.txt", b"foreign", only_new=True)
    ada.put("state/1", b"mine", only_new=True)
    bob = open_carrier(CarrierAddress(place=place, secret=SECRET).text(), may_create=False, options=server.options())
    assert read(bob, "state/1") == b"mine" and abs(bob.now() - ada.now()) < 5
    with pytest.raises(WrongSecret, match="another prefix"):
        open_carrier(CarrierAddress(place=place, secret=Secret(key=bytes(32))), may_create=True,
                     options=server.options())  # fmt: skip
    bob.delete(["state/1"])
    assert read(raw, "notes.txt") == b"foreign"
    with pytest.raises(NotThere, match="no run"):
        open_carrier(CarrierAddress(place=f"{place}-2", secret=SECRET), may_create=False, options=server.options())


def test_credentials_and_secrets_are_in_no_text(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    address = CarrierAddress(place=f"s3://{server.reset()}/run", secret=SECRET)
    carrier = open_carrier(address, may_create=True, options=server.options())
    texts = [repr(carrier), repr(address), repr(read_address(address.text()))]
    for answer in (EXPIRED, *[SLOW] * 0, error("301 Moved", "PermanentRedirect"), error("501 No", "NotImplemented")):
        server.answers += [answer]
        with pytest.raises((TransportError, ValueError)) as raised:
            carrier.put("x", b"", only_new=True)
        texts.append("".join(traceback.format_exception(raised.value)))
    for wrong in ("s3://AKIDOFTESTS:SECRETOFTESTS@bucket/run", "az://c/run?sig=SECRETOFTESTS#x"):
        with pytest.raises(ValueError, match="the address holds") as refused:
            read_address(wrong)
        texts.append("".join(traceback.format_exception(refused.value)).replace(f"read_address({wrong!r})", ""))
    seen = "".join(texts) + caplog.text
    for hidden in (*list(CREDENTIALS.values())[:2], SECRET.key.hex(), address.text().partition("#")[2]):
        assert hidden not in seen


def test_wrong_addresses_are_refused_with_the_right_form(tmp_path: Path) -> None:
    full = CarrierAddress(place="file:///x", secret=SECRET).text()
    wrong = {
        "bucket/run": "cannot be read", "s3://": "cannot be read", full[:-1]: "cut or changed", full + "1": "cannot",
        "": "cannot be read", "file://host/x#" + full[-52:]: "from the root", "file:///x": "no secret",
        "nosuch://x#" + full[-52:]: "no store has this kind", "file:///no/such/x#" + full[-52:]: "mkdir -p /no/such",
    }  # fmt: skip
    for text, expected in wrong.items():
        with pytest.raises(ValueError, match=expected):
            open_carrier(text, may_create=True)
    with pytest.raises(MissingExtra, match="sftp"):
        open_carrier("sftp://host/x#" + full[-52:], may_create=True)
    place = f"file://{tmp_path}/run#" + full[-52:]
    open_carrier(place, may_create=True).put("x", b"1", only_new=True)
    assert read(open_carrier(place, may_create=False), "x") == b"1"
    assert open_carrier("memory://a#" + full[-52:], may_create=True).put("x", b"1", only_new=True)
    assert not open_carrier("memory://a#" + full[-52:], may_create=False).put("x", b"2", only_new=True)


def test_no_hour_has_more_requests_than_the_budget_and_a_twentieth() -> None:
    budget, now_s, sent = RequestBudget(1000), 0.0, []
    for _ in range(3000):  # a member that asks as fast as it may
        now_s += budget.take(now_s=now_s)
        sent.append(now_s)
    most = max(sum(begin <= one < begin + 3600 for one in sent) for begin in sent[::50])
    assert 1000 <= most <= 1051
    budget, now_s = RequestBudget(1000), 0.0
    polls = 0
    while now_s < 3600:  # a member that only polls, every second if it may
        budget.take(now_s=now_s)
        polls += 1
        now_s += max(1.0, budget.poll_wait_s(now_s=now_s))
    assert 950 <= polls <= 1001
    with pytest.raises(ValueError, match="above 0"):
        RequestBudget(0)


def test_rounds_cost_what_their_requests_and_bytes_do() -> None:
    free = dataclasses.replace(PRICES["s3"], egress=0.0)
    naive = round_cost("all-gather", members=8, payload_bytes=PART_BYTES)
    assert (60 * naive.puts, 60 * naive.gets) == (480, 3360)
    assert 60 * dataclasses.replace(naive, polls=0).usd(free) == pytest.approx(0.003744)
    both = round_cost("two-phase", members=8, payload_bytes=PART_BYTES)
    assert (both.puts, both.gets, both.egress_bytes) == (64, 112, 14 * PART_BYTES)
    assert round_cost("all-gather", members=2, payload_bytes=PART_BYTES + 1).puts == 2 * 3  # two parts and an index


def test_polls_of_a_bucket_keep_to_the_budget(server: S3Server) -> None:
    slept: list[float] = []
    carrier = bucket(server, slept, requests_per_hour=360)
    for _, pause_s in zip(range(3), itertools.repeat(1.0)):
        carrier.listing("round")
        carrier.pause(pause_s)
    assert 9 < slept[0] <= 10 and 19 < slept[1] <= 20 and 29 < slept[2] <= 30  # the clock stood still
