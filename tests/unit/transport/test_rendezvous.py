"""Rendezvous of ranks: a rank that is late, lies or has another secret is named in one line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from thinwire.errors import ConnectError
from thinwire.transport import connect as connect_module
from thinwire.transport import rendezvous as rendezvous_module
from thinwire.transport.addresses import RankEndpoint
from thinwire.transport.rendezvous import MAX_TEXT_BYTES, Rendezvous


def rendezvous_of(store: HashStore, rank: int, *, count: int = 2) -> Rendezvous:
    return Rendezvous(store, rank=rank, world_size=count, place="here")


def endpoint(rank: int, **changes: str) -> RankEndpoint:
    fields = {"hostname": f"h{rank}", "host": "x", "address": "127.0.0.1", "secret": "", **changes}
    return RankEndpoint(rank=rank, replica=rank, port=1, **fields)  # type: ignore[arg-type]


def meet(store: HashStore, *endpoints: RankEndpoint, count: int) -> list[dict[int, RankEndpoint]]:
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(
                connect_module._gather_endpoints, one, rendezvous_of(store, one.rank, count=count), deadline_s=0.3
            )
            for one in endpoints
        ]
        return [one.result() for one in runs]


def test_who_does_not_come_in_time_is_left_out_by_all() -> None:
    found = meet(HashStore(), endpoint(0), endpoint(2), count=3)
    assert [sorted(one) for one in found] == [[0, 2], [0, 2]] and found[0] == found[1]


def test_another_secret_is_refused_by_the_names_of_both_hosts() -> None:
    with pytest.raises(ConnectError, match=r"rank 1 on host h1 and rank 0 on host h0 do not have the same secret"):
        meet(HashStore(), endpoint(0), endpoint(1, secret="other"), count=2)


def test_a_rank_that_comes_after_the_others_began_says_so() -> None:
    store = HashStore()
    meet(store, endpoint(0), count=2)
    with pytest.raises(ConnectError, match="rank 1 came after the others had begun"):
        meet(store, endpoint(1), count=2)


@pytest.mark.parametrize("present", ["0 7", "all", "0 -1", "0 1.5", "1", "0 \u0661", "9" * 5000])
def test_a_list_of_ranks_that_is_none_is_refused(present: str) -> None:
    store = HashStore()
    rendezvous_of(store, 0).post("endpoint/0", endpoint(0).to_json())
    rendezvous_of(store, 0).post("present", present)
    with pytest.raises(ConnectError, match="rank 0 posted a list of ranks that is none"):
        meet(store, endpoint(1), count=2)


@pytest.mark.parametrize("key", ["", "xy", "00"])
def test_a_key_that_is_none_is_refused_and_rank_0_is_waited_for_no_longer_than_the_deadline(key: str) -> None:
    store = HashStore()
    with pytest.raises(ConnectError, match=r"rank 0 did not begin within 0.1 s"):
        connect_module._shared_key(rendezvous_of(store, 1), deadline_s=0.1)
    rendezvous_of(store, 0).post("key", key)
    with pytest.raises(ConnectError, match="rank 0 posted a key that is none"):
        connect_module._shared_key(rendezvous_of(store, 1), deadline_s=0.1)


def test_a_text_that_is_too_long_is_refused() -> None:
    rendezvous = Rendezvous(HashStore(), rank=0, world_size=2, place="here", max_bytes=10)
    rendezvous.post("said/1/1", "x" * 11)
    with pytest.raises(ConnectError, match="a text at here has 11 bytes, at most 10"):
        rendezvous.read("said/1/1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("1 5.5", 5.5), ("", 0), ("1", 0), ("1 x", 0), ("1 -3", 0), ("1 1e9", 3600)]
)
def test_a_promise_is_read_as_seconds_and_never_believed_for_long(text: str, seconds: float) -> None:
    assert rendezvous_module._promised_s(text) == seconds


def test_a_failure_that_another_rank_tells_is_shown_without_what_a_terminal_obeys() -> None:
    store = HashStore()
    store.set("failure", "no\x1b[2J")
    rendezvous = Rendezvous(store, rank=0, world_size=2, deadline_s=0.1, place="here")
    with pytest.raises(ConnectError, match=r"^no\?\[2J$"):
        rendezvous.collect_all("endpoint")


def test_a_note_of_a_rank_that_is_too_long_is_refused_before_it_is_read() -> None:
    store = HashStore()
    store.set("endpoint/0", "x" * (MAX_TEXT_BYTES + 1))
    rendezvous = Rendezvous(store, rank=0, world_size=1, deadline_s=0.1, place="here")
    with pytest.raises(ConnectError, match=f"a text at here has {MAX_TEXT_BYTES + 1} bytes, at most {MAX_TEXT_BYTES}"):
        rendezvous.collect_all("endpoint")
