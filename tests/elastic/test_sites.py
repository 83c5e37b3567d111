"""Sites: found in measured rates; a far part crosses the wire between them once, whatever becomes of who fetches it."""

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
from town import Resident, Town, live_together

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.join import note_rate
from thinwire.elastic.protocol import decode, encode
from thinwire.elastic.round_driver import Action, CastVote, RequestPart, RoundInputs, RoundStateMachine, round_of_name
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import find_sites, relays, site_of
from thinwire.errors import PayloadError
from thinwire.events import Transfer

FAST, THIN = 1e8, 2e6
TWO_SITES = ((0, 1, 2), (3, 4, 5))


def rates_between(sites: tuple[tuple[int, ...], ...], *, inside: float, between: float) -> dict[int, dict[int, float]]:
    everyone = [one for site in sites for one in site]
    return {
        one: {other: inside if other in site_of(one, sites) else between for other in everyone if other != one}
        for one in everyone
    }


@pytest.mark.parametrize("sites", [((0, 1), (2, 3)), TWO_SITES, ((0, 1), (2, 3, 4), (5, 6)), ((0, 3), (1, 2, 7))])
def test_sites_are_found_where_rates_inside_are_four_times_those_between(sites: tuple[tuple[int, ...], ...]) -> None:
    active = [one for site in sites for one in site]
    assert find_sites(rates_between(sites, inside=4.1 * THIN, between=THIN), active) == tuple(sorted(sites))
    assert find_sites(rates_between(sites, inside=3.9 * THIN, between=THIN), active) == ()


def test_one_that_is_alone_in_its_place_is_in_no_site() -> None:
    assert find_sites(rates_between(((0, 1), (2,)), inside=FAST, between=THIN), (0, 1, 2)) == ((0, 1),)


def test_replicas_alike_single_ones_and_unknown_rates_make_no_site() -> None:
    assert find_sites(rates_between(((0, 1, 2),), inside=FAST, between=THIN), (0, 1, 2)) == ()
    assert find_sites(rates_between(((0,), (1,)), inside=FAST, between=THIN), (0, 1)) == ()
    assert find_sites({}, (0, 1, 2)) == ()


def test_a_chain_of_wires_each_somewhat_thinner_makes_no_site() -> None:
    # 0 and 1 are close, 2 is as close to 1 but far from 0: no cut has all rates inside above all rates between
    rates = {0: {1: FAST, 2: THIN}, 1: {2: FAST, 3: THIN}, 2: {3: THIN}}
    assert find_sites(rates, (0, 1, 2, 3)) == ()


def test_who_has_gone_makes_no_site() -> None:
    assert find_sites(rates_between(TWO_SITES, inside=FAST, between=THIN), (0, 3, 4)) == ((3, 4),)


def asked_first(round_id: int, *, active: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> dict[tuple[int, int], int]:
    """Return by asking replica and part who is asked first."""
    return {
        (one, member): relays(TWO_SITES, replica=one, round_id=round_id, active=active).get(member, member)
        for one in active
        for member in active
        if member != one
    }


def test_of_a_site_one_fetches_a_far_part_itself_and_the_others_ask_that_one() -> None:
    for round_id in range(50):
        asked = asked_first(round_id)
        for member in range(6):
            for site in TWO_SITES:
                sources = {asked[one, member] for one in site if one != member}
                if member in site:
                    assert sources == {member}
                else:
                    (relay,) = sources - {member}
                    assert relay in site and asked[relay, member] == member


def test_the_load_spreads_and_when_one_goes_only_its_parts_change_hands() -> None:
    def relay(round_id: int, active: tuple[int, ...]) -> int:
        asked = asked_first(round_id, active=active)
        return next(one for one in (0, 1, 2) if one in active and asked[one, 3] == 3)

    everyone = (0, 1, 2, 3, 4, 5)
    before = [relay(round_id, everyone) for round_id in range(600)]
    assert all(150 < count < 250 for count in Counter(before).values())
    after = [relay(round_id, (0, 2, 3, 4, 5)) for round_id in range(600)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 1)


def seen(called: tuple[int, ...] | None, decision: Decision | None = None) -> RoundInputs:
    return RoundInputs(
        called=called, decision=decision, active=(0, 1, 2, 3), neighbours=(0, 1, 2, 3), limit_s=10.0,
        relays={2: 1, 3: 1}, relay_limit_s=1.0, near=(0, 1),
    )  # fmt: skip


def asks(actions: list[Action]) -> set[tuple[int, int]]:
    return {(action.source, action.member) for action in actions if isinstance(action, RequestPart)}


def test_a_relay_has_a_measured_time_and_then_the_origin_is_asked_too() -> None:
    machine = RoundStateMachine(replica=0, has_part=True)
    assert asks(machine.advance(seen(None), now_s=0.0)) == {(1, 1), (1, 2), (1, 3)}
    assert not asks(machine.advance(seen(None), now_s=50.0)), "before the call nobody is late"
    machine.advance(seen((0, 1, 2, 3)), now_s=50.0)
    machine.on_part(1)
    machine.on_part(3)
    assert not asks(machine.advance(seen((0, 1, 2, 3)), now_s=50.9))
    assert asks(machine.advance(seen((0, 1, 2, 3)), now_s=51.0)) == {(2, 2)}
    assert not machine.advance(seen((0, 1, 2, 3)), now_s=60.5), "the origin has as much time as any"
    assert machine.advance(seen((0, 1, 2, 3)), now_s=61.5) == [CastVote(has=(0, 1, 3))]


def test_a_relay_that_takes_no_part_in_the_round_or_fails_is_not_waited_for() -> None:
    machine = RoundStateMachine(replica=0, has_part=True)
    machine.advance(seen(None), now_s=0.0)
    machine.advance(seen((0, 2, 3)), now_s=1.0)  # relay 1 has not launched it: noted
    assert asks(machine.advance(seen((0, 2, 3)), now_s=1.1)) == {(2, 2), (3, 3)}
    machine = RoundStateMachine(replica=0, has_part=True)
    machine.advance(seen(None), now_s=0.0)
    machine.on_failure(2, now_s=1.0, source=1)
    assert asks(machine.advance(seen(None), now_s=1.3)) == {(2, 2)}


def test_of_many_that_hold_a_decided_part_those_of_the_own_site_are_asked_first() -> None:
    decision = Decision(round_id=0, launch_step=10, members=(2,), holders=(1, 2, 3), step=10)
    machine = RoundStateMachine(replica=0, has_part=False)
    assert asks(machine.advance(seen((1, 2, 3), decision), now_s=0.0)) == {(1, 2)}
    assert asks(machine.advance(seen((1, 2, 3), decision), now_s=11.0)) < {(2, 2), (3, 2)}
    machine = RoundStateMachine(replica=0, has_part=False)
    machine.advance(seen((1, 2, 3), decision), now_s=0.0)
    asked: set[tuple[int, int]] = set()
    for number in range(3):  # who does not give it is not asked for ever
        for source in (1, 2, 3):
            machine.on_failure(2, now_s=float(number), source=source)
        asked |= asks(machine.advance(seen((1, 2, 3), decision), now_s=number + 0.5))
    assert asked >= {(2, 2), (3, 2)}


def test_only_what_was_sent_well_and_is_large_enough_tells_a_rate() -> None:
    session = CoordinatorSession(replica=0, interval_steps=4, send=lambda kind, **fields: None)
    common = {"peer": 1, "kind": "blob", "round_id": 0, "fragment": 0, "phase": 0, "started_s": 1.0}
    for direction, num_bytes, error in (("received", 1 << 20, ""), ("sent", 1 << 20, "lost"), ("sent", 100, "")):
        note_rate(session, Transfer(
            direction=direction, payload_bytes=num_bytes, wire_bytes=num_bytes, finished_s=2.0, error=error, **common
        ))  # type: ignore[arg-type]  # fmt: skip
    assert session.link_rates.report() == {}
    note_rate(session, Transfer(
        direction="sent", payload_bytes=1 << 20, wire_bytes=1 << 20, finished_s=1.5, **common
    ))  # type: ignore[arg-type]  # fmt: skip
    assert session.link_rates.report() == {"1": 1 << 21}
    session.link_rates.retain(())
    assert session.link_rates.report() == {}


@pytest.mark.parametrize("bad", [[], {"a": 1}, {"1": -1}, {"1": 0.5}, {"1": True}, {"1" * 20: 1}, {"\u0661": 1}])
def test_rates_that_cannot_be_are_refused(bad: object) -> None:
    with pytest.raises(PayloadError, match=r"\$\.rates"):
        decode(encode("rates", rates=bad, latest={}, probes={}), to_member=False)
    for probe in (7, [7], [7, -1], [7, 9, 9], [7, 0.5]):
        with pytest.raises(PayloadError, match=r"\$\.probes"):
            decode(encode("rates", rates={}, latest={}, probes={"3": probe}), to_member=False)
    found = decode(encode("rates", rates={"3": 7}, latest={}, probes={"3": (7, 9)}), to_member=False)
    assert (found["rates"], found["probes"]) == ({3: 7}, {3: (7, 9)})


class Site:
    """A town of two sites of two, in which each ask for a part from elsewhere is counted."""

    SITES = ((0, 1), (2, 3))

    def __init__(self, *, knows_sites: bool) -> None:
        self.town = Town(planned=4)
        self.crossed: Counter[tuple[int, int, int]] = Counter()
        self.applied: list[bytes] = []
        self._lock = threading.Lock()
        self.residents = [Resident(self.town, name=f"host{number}") for number in range(4)]
        for resident in self.residents:
            resident.shelf.get = partial(self._get, resident.replica, resident.shelf.get)  # type: ignore[method-assign]
            for peer in range(4 if knows_sites else 0):
                seconds = 0.01 if peer in site_of(resident.replica, self.SITES) else 1.0
                resident.session.link_rates.observe(peer, num_bytes=1 << 20, seconds=seconds)
            resident.begin()
        expected = self.SITES if knows_sites else ()
        for resident in self.residents:
            active = resident.session.active
            resident.session.wait_for(
                lambda view, active=active: len(active()) == 4 and view.sites == expected, deadline_s=20, why=""
            )

    def _get(self, me: int, get: Any, source: int, name: bytes, *, most_bytes: int) -> Any:
        if source not in site_of(me, self.SITES):
            with self._lock:
                self.crossed[round_of_name(name) or 0, int.from_bytes(name[9:], "little"), me // 2] += 1
        return get(source, name, most_bytes=most_bytes)

    def run(self) -> None:
        self.applied = live_together(self.town, self.residents, 3)


def test_through_relays_all_apply_the_same_bytes_and_each_part_comes_to_a_site_once() -> None:
    plain, relayed = Site(knows_sites=False), Site(knows_sites=True)
    plain.run()
    relayed.run()
    assert plain.applied == relayed.applied == [plain.applied[0]] * 4 and len(plain.applied[0]) == 3 * 4 * 10
    told = relayed.town.coordinator.admin.status()
    assert told["sites"] == [[0, 1], [2, 3]] and any("replicas 0, 1; 2, 3" in found for found in told["findings"])
    assert set(plain.crossed.values()) == {2} and set(relayed.crossed.values()) == {1}
    assert len(relayed.crossed) == 3 * 4, "each part of each round comes to the one site that it is not from"
