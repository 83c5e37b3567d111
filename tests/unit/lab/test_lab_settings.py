"""What a lab's settings accept, refuse and remember."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.settings import (
    FASTEST_BITS_PER_S,
    LONGEST_S,
    SLOWEST_BITS_PER_S,
    Access,
    LabSettings,
    Link,
    parse_access,
    parse_host,
    parse_link,
    parse_loss,
)

RATES = st.none() | st.floats(SLOWEST_BITS_PER_S, FASTEST_BITS_PER_S)
ACCESSES = st.builds(Access, up_bits_per_s=RATES, down_bits_per_s=RATES, is_cut=st.booleans())


@st.composite
def links(draw: st.DrawFn) -> Link:
    latency_s = draw(st.floats(0, LONGEST_S))
    return Link(
        rate_bits_per_s=draw(RATES),
        latency_s=latency_s,
        jitter_s=draw(st.floats(0, latency_s)),
        loss=draw(st.floats(0, 1, exclude_max=True)),
        is_cut=draw(st.booleans()),
    )


@st.composite
def labs(draw: st.DrawFn) -> LabSettings:
    accesses = tuple(draw(st.lists(ACCESSES, min_size=1, max_size=5)))
    hosts = st.integers(0, len(accesses) - 1)
    pairs = st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1])
    own = draw(st.dictionaries(pairs, links(), max_size=4)) if len(accesses) > 1 else {}
    return LabSettings(
        accesses=accesses, link=draw(links()), links=MappingProxyType(own), seed=draw(st.integers(0, 2**31))
    )


@given(labs())
def test_settings_survive_their_way_through_json(settings: LabSettings) -> None:
    assert LabSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@given(labs())
def test_a_lab_is_delayed_if_any_of_its_links_is(settings: LabSettings) -> None:
    hosts = range(settings.num_hosts)
    between = [settings.between(source, to) for source in hosts for to in hosts if source != to]
    assert settings.is_delayed >= any(link.is_delayed for link in between)
    if not settings.is_delayed:
        assert all(link.latency_s == 0 and link.loss == 0 for link in between)


@given(labs(), ACCESSES)
def test_one_hosts_access_changes_without_the_others(settings: LabSettings, access: Access) -> None:
    for host in range(settings.num_hosts):
        changed = settings.with_access(host, access)
        assert changed.accesses[host] == access
        assert changed.accesses[:host] == settings.accesses[:host]
        assert changed.accesses[host + 1 :] == settings.accesses[host + 1 :]
        assert (changed.links, changed.link, changed.seed) == (settings.links, settings.link, settings.seed)


def test_a_link_is_one_way() -> None:
    settings = LabSettings(accesses=(Access(),) * 3).with_link(0, 1, Link(latency_s=0.01))
    assert settings.between(0, 1) == Link(latency_s=0.01)
    assert settings.between(1, 0) == settings.between(0, 2) == Link()


@pytest.mark.parametrize("rate", [SLOWEST_BITS_PER_S, FASTEST_BITS_PER_S])
def test_the_limits_of_a_rate_are_within(rate: float) -> None:
    assert Access(up_bits_per_s=rate).up_bits_per_s == Link(rate_bits_per_s=rate).rate_bits_per_s == rate


@pytest.mark.parametrize("rate", [0.0, -1.0, SLOWEST_BITS_PER_S - 1, FASTEST_BITS_PER_S * 1.01, float("inf")])
@pytest.mark.parametrize("name", ["up_bits_per_s", "down_bits_per_s"])
def test_a_rate_out_of_range_is_refused_with_the_range(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=rf"the rate is out of range; got {rate:g} bit/s".replace("+", r"\+")):
        Access(**{name: rate})
    with pytest.raises(ValueError, match="allowed 8kbit to 32gbit"):
        Link(rate_bits_per_s=rate)


def test_not_a_number_is_no_rate_and_no_time_and_no_loss() -> None:
    for name in ("rate_bits_per_s", "latency_s", "jitter_s", "loss"):
        with pytest.raises(ValueError, match="nan"):
            Link(**{name: float("nan")})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"latency_s": -0.001}, "the latency is out of range; got -0.001s; allowed 0s to 60s"),
        ({"latency_s": 60.1}, "the latency is out of range; got 60.1s; allowed 0s to 60s"),
        ({"latency_s": 0.01, "jitter_s": -0.001}, "the jitter is out of range"),
        (
            {"latency_s": 0.01, "jitter_s": 0.011},
            "the jitter exceeds the latency, .*; got 0.011s; allowed 0s to the latency of 0.01s",
        ),
        ({"jitter_s": 0.001}, "the jitter exceeds the latency, .*; allowed 0s to the latency of 0s"),
        ({"loss": 1.0}, r"the loss is no share of the packets; got 1; .*a link that is cut"),
        ({"loss": -0.1}, r"the loss is no share of the packets; got -0.1"),
    ],
)
def test_an_impossible_link_is_refused_with_the_value_and_the_limit(values: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Link(**values)


@pytest.mark.parametrize(
    ("num_hosts", "pairs", "reason"),
    [
        (0, [], "the number of hosts is out of range; got 0; allowed 1 to 200"),
        (201, [], "the number of hosts is out of range; got 201; allowed 1 to 200"),
        (2, [(0, 2)], "this lab has no such host; got 2; allowed 0 to 1"),
        (2, [(-1, 0)], "this lab has no such host; got -1"),
        (2, [(1, 1)], "a link joins a host to itself; got 1-1"),
    ],
)
def test_an_impossible_lab_is_refused(num_hosts: int, pairs: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LabSettings(accesses=(Access(),) * num_hosts, links=dict.fromkeys(pairs, Link()))


def test_an_access_is_one_rate_for_both_ways_or_down_before_up() -> None:
    assert parse_access("5mbit") == Access(up_bits_per_s=5e6, down_bits_per_s=5e6)
    assert parse_access("50mbit/10mbit") == Access(up_bits_per_s=10e6, down_bits_per_s=50e6)
    assert parse_host(" 3=50mbit/10mbit") == (3, parse_access("50mbit/10mbit"))


@pytest.mark.parametrize("text", ["", "/", "5mbit/", "/5mbit", "1mbit/2mbit/3mbit", "5 apples", "-5mbit", "1bit"])
def test_what_is_no_access_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_access(text)


@pytest.mark.parametrize("text", ["", "5mbit", "a=5mbit", "1=", "-1=5mbit", "1:5mbit"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        parse_host(text)


@pytest.mark.parametrize(
    ("text", "pairs", "link"),
    [
        ("0-1=1mbit", [(0, 1), (1, 0)], Link(rate_bits_per_s=1e6)),
        ("0>1=1mbit", [(0, 1)], Link(rate_bits_per_s=1e6)),
        ("2-0=40ms", [(2, 0), (0, 2)], Link(latency_s=0.04)),
        (
            "0-1=20mbit,40ms,5ms,0.1%",
            [(0, 1), (1, 0)],
            Link(rate_bits_per_s=20e6, latency_s=0.04, jitter_s=0.005, loss=0.001),
        ),
        ("0-1 = 0.1% , 40 ms , 20 mbit", [(0, 1), (1, 0)], Link(rate_bits_per_s=20e6, latency_s=0.04, loss=0.001)),
        ("0>1=cut", [(0, 1)], Link(is_cut=True)),
        ("0-1=1s", [(0, 1), (1, 0)], Link(latency_s=1.0)),
        ("10-11=800k", [(10, 11), (11, 10)], Link(rate_bits_per_s=8e5)),
    ],
)
def test_a_link_is_read(text: str, pairs: list[tuple[int, int]], link: Link) -> None:
    assert parse_link(text, base=Link()) == dict.fromkeys(pairs, link)


def test_what_a_link_leaves_out_is_as_between_all_others() -> None:
    base = Link(latency_s=0.03, jitter_s=0.01, loss=0.01)
    assert parse_link("0>1=1mbit", base=base) == {
        (0, 1): Link(rate_bits_per_s=1e6, latency_s=0.03, jitter_s=0.01, loss=0.01)
    }


@pytest.mark.parametrize(
    "text", ["", "0-1", "0-1=", "0=1=5ms", "0-1=5ms,,", "a-b=5ms", "0-1=fast", "0--1=5ms", "0-1=5ms,10ms", "0-1=100%"]
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|the jitter exceeds|the loss is no share"):
        parse_link(text, base=Link())


@given(st.floats(0, 1, exclude_max=True).map(lambda loss: round(loss, 6)))
def test_a_loss_is_a_share_or_a_percentage(loss: float) -> None:
    assert parse_loss(f"{loss:.6f}") == pytest.approx(loss)
    assert parse_loss(f"{loss * 100:.6f} %") == pytest.approx(loss)


@pytest.mark.parametrize("text", ["", "%", "one", "-1%", "1e-3", "0.1%%"])
def test_what_is_no_loss_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the loss cannot be read; got .* try 0.1%"):
        parse_loss(text)
