"""Active tests, run: what pairs and rings send over transports in one process, also where those lie or fall silent."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import thinwire
from thinwire.errors import ConnectError, PayloadError
from thinwire.monitor.active_test import active_test
from thinwire.monitor.active_test import wire_tests as active_wires
from thinwire.monitor.active_test.active_test import ActiveRank, Outcome, run_test
from thinwire.monitor.active_test.evaluation import PairTest
from thinwire.monitor.active_test.wire_tests import (
    PairChannel,
    cells_of,
    find_ring,
    follow,
    lead,
    read_flow,
    read_pair,
    ring_all_reduce,
    rounds_of,
    seconds_of,
)
from thinwire.transport import rendezvous as rendezvous_module
from thinwire.transport.addresses import Address, RankEndpoint
from thinwire.transport.base import Transport, read_object
from thinwire.transport.connect import PartialJob
from thinwire.transport.faulty import Fault, FaultyTransport
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.rendezvous import Rendezvous
from thinwire.transport.secret import Secret
from thinwire.transport.wire.wire_transport import WireTransport

RANKS = 3


def promise(seconds: float) -> None:
    """Nobody listens."""


def lie(payload: torch.Tensor, envelope: object) -> torch.Tensor:
    """Flip one bit, which the header's checksum action not show, as it is of the changed bytes."""
    changed = payload.clone()
    changed[-1] ^= 1
    return changed


def test_the_bytes_of_a_pair_are_timed_and_checked() -> None:
    def main(transport: LoopbackTransport) -> Any:
        line = PairChannel(transport, 1 - transport.replica, plan=7, promise=promise)
        return lead(line, seconds=0.01, seed=5) if transport.replica == 0 else follow(line, seed=5)

    times, _ = thinwire.run_replicas(2, main)
    assert len(times.transfers) == 6 and times.rate[0] > 0 and times.latency_s > 0


def test_a_bit_that_changes_behind_the_checksum_is_seen_by_both_ends() -> None:
    def main(transport: LoopbackTransport) -> None:
        fault = Fault(kind="forge", replica=0, direction="sent", forge=lie)
        line = PairChannel(FaultyTransport(transport, [fault]), 1 - transport.replica, plan=7, promise=promise)
        with pytest.raises(PayloadError, match="not those that were sent"):
            lead(line, seconds=0.01, seed=5) if transport.replica == 0 else follow(line, seed=5)

    thinwire.run_replicas(2, main)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_comes_to_the_exact_sum_on_all_ranks(size: int) -> None:
    order = [*range(1, size), 0]

    def main(transport: LoopbackTransport) -> int | None:
        return ring_all_reduce(transport, order, 7 * size, plan=1, repeat=0, limit_s=5, promise=promise)[1]

    assert list(thinwire.run_replicas(size, main)) == [None] * size


@pytest.mark.parametrize("step", range(4))
def test_a_wrong_partial_sum_is_seen_first_by_the_rank_behind_its_sender(step: int) -> None:
    def main(transport: LoopbackTransport) -> int | None:
        def forge(payload: torch.Tensor, envelope: Any) -> torch.Tensor:
            return lie(payload, envelope) if envelope.address.number == step else payload

        fault = Fault(kind="forge", replica=1, direction="sent", forge=forge)
        faulty = FaultyTransport(transport, [fault])
        return ring_all_reduce(faulty, [0, 1, 2], 9, plan=1, repeat=0, limit_s=5, promise=promise)[1]

    seen = thinwire.run_replicas(3, main)
    assert seen[2] == step and all(other is None or other > step for other in (seen[0], seen[1]))


@pytest.mark.parametrize("count", range(2, 9))
def test_everybody_meets_everybody_once_and_nobody_twice_at_a_time(count: int) -> None:
    rounds = rounds_of(range(count))
    met = [frozenset(pair) for one in rounds for pair in one]
    assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(range(count), 2)))
    assert all(len(set(itertools.chain(*one))) == 2 * len(one) for one in rounds)
    assert len(rounds) == count - 1 + count % 2


def test_a_ring_avoids_the_dead_and_there_is_none_where_one_rank_has_one_neighbour() -> None:
    ring = find_ring(range(5), lambda one, other: {one, other} not in ({0, 1}, {2, 3}))
    assert ring is not None and sorted(ring) == list(range(5))
    met = [{one, other} for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert {0, 1} not in met and {2, 3} not in met
    assert find_ring(range(3), lambda one, other: {one, other} != {0, 1}) is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({}, "without rows"), ({"rows": [[0, 0, 5]]}, r"\[0, 0, 5\]"), ({"rows": [[0, 3, 5]]}, r"\[0, 3, 5\]"),
        ({"rows": [[0, 1]]}, r"\[0, 1\]"), ({"rows": [[0, 1, 1 << 40]]}, "1099511627776 bytes"),
        ({"rows": [[0, True, 5]]}, "True"), ({"rows": ["0"]}, "'0'"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, Any], why: str) -> None:
    with pytest.raises(PayloadError, match=why):
        list(cells_of(plan, world_size=3, parts=3))


def test_what_ranks_say_is_not_trusted() -> None:
    for text in ("[]", "nonsense", "[" * 100_000):
        with pytest.raises(PayloadError, match="rank 1 says is no JSON"):
            read_object(text, whose="what rank 1 says")
    for value in (-1, float("nan"), "1", None, True, 1e9):
        with pytest.raises(PayloadError, match="is no number of 0 to 3600"):
            seconds_of({"limit_s": value}, "limit_s")
    assert read_pair({}).fault == "dead" and read_pair({"rate": float("nan")}).fault == "dead"
    assert read_pair({"rate": 5, "overhead_s": 0, "latency_s": 0, "fault": ["x"]}) == PairTest(
        rate_bits_per_s=5, detail="None"
    )
    assert [read_flow(1, value) for value in (None, True, -1, 0, "3", float("inf"))] == [None] * 6


def job(
    monkeypatch: pytest.MonkeyPatch, *, wrap: Callable[[Transport], Transport] = lambda transport: transport,
    follow_plans: tuple[int, ...] = (0, 1, 2), absent: tuple[int, ...] = (), has_loopback: bool = False,
    deadline_s: float = 60.0, grace_s: float = 60.0,
) -> list[Outcome]:  # fmt: skip
    """Run a test between three ranks in threads, over real connections.

    Deadlines are long, as machines are busy, unless a test waits for one on purpose.
    """
    if not has_loopback:
        monkeypatch.setattr(ActiveRank, "_loopback", lambda rank, plan, number: {"rate": 1e9})
    monkeypatch.setattr(active_wires, "FIRST_DEADLINE_S", deadline_s)
    monkeypatch.setattr(active_test, "FIRST_DEADLINE_S", deadline_s)
    monkeypatch.setattr(rendezvous_module, "GRACE_S", grace_s)
    monkeypatch.setattr(active_test, "_LEAST_S", 0.01)
    store = HashStore()
    here = [rank for rank in range(RANKS) if rank not in absent]
    wires = {
        rank: WireTransport(replica=rank, num_replicas=RANKS, secret=Secret(key=bytes(32)), address="127.0.0.1",
                            is_open=True)
        for rank in here
    }  # fmt: skip
    stations = {
        rank: RankEndpoint(rank=rank, replica=rank, hostname=f"h{rank}", host=str(rank), address="127.0.0.1",
                      port=wire.port)
        for rank, wire in wires.items()
    }  # fmt: skip
    for rank, peer in itertools.permutations(here, 2):
        address = Address(host="127.0.0.1", port=wires[peer].port)
        wires[rank].add(peer, address=address if peer < rank else None)
    try:
        gatherings = [
            PartialJob(
                rank=rank, world_size=RANKS, endpoints=stations, transport=wrap(wires[rank]),  # type: ignore[arg-type]
                rendezvous=Rendezvous(store, rank=rank, world_size=RANKS, place="here"),
                connected=wires[rank].wait_until_connected([peer for peer in here if peer != rank], deadline_s=10),
            )
            for rank in here
        ]  # fmt: skip
        with ThreadPoolExecutor() as threads:
            runs = [threads.submit(run_test, one, budget_s=0.1) for one in gatherings if one.rank in follow_plans]
            return [one.result(timeout=240) for one in runs]
    finally:
        for wire in wires.values():
            wire.close()


def test_three_ranks_test_all_their_wires_and_all_know_how_many_findings_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, *others = job(monkeypatch, has_loopback=True)
    measured = leader.measured
    assert measured is not None and set(measured.loopback_bits_per_s) == {0, 1, 2}
    assert set(measured.pairs) == set(measured.everyone) == set(itertools.permutations(range(3), 2))
    assert all(pair.rate_bits_per_s > 0 and not pair.fault for pair in measured.pairs.values())
    assert len(measured.neighbours) == 3 and measured.all_reduce is not None and not measured.all_reduce.wrong
    # wires of one busy machine may be told as slow, and as nothing else
    assert all("slow" in finding.kind for finding in leader.findings)
    assert [other.num_findings for other in others] == [leader.num_findings] * 2


@pytest.mark.slow
def test_a_pair_that_falls_silent_costs_its_deadline_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [
        Fault(kind="drop", replica=rank, peer=peer, direction="sent") for rank, peer in ((0, 1), (1, 0))
    ]  # fmt: skip
    leader = job(monkeypatch, wrap=lambda transport: FaultyTransport(transport, silent), deadline_s=2.0)[0]
    found = leader.findings[0]
    assert found.kind == "communication hang" and found.where == "link 0 <-> 1"
    assert "no answer within 2 s" in found.evidence["said"][0]
    assert leader.measured is not None and leader.measured.all_reduce is None, "there is no ring of three without 0-1"


def test_a_rank_whose_bytes_change_is_named_as_their_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(payload: torch.Tensor, envelope: Any) -> torch.Tensor:
        return lie(payload, envelope) if payload.numel() > 5000 else payload

    fault = Fault(kind="forge", replica=1, direction="sent", forge=forge)
    leader = job(monkeypatch, wrap=lambda transport: FaultyTransport(transport, [fault]))[0]
    assert leader.findings[0].kind == "corrupt data" and leader.findings[0].where == "sender rank 1"


@pytest.mark.slow
def test_a_rank_that_stops_or_never_came_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, other = job(monkeypatch, follow_plans=(0, 1), grace_s=3.0)
    assert leader.findings[0].places[0].ranks == (2,) and "fell silent during hello" in leader.findings[0].text
    assert leader.measured is not None and leader.measured.pairs[0, 1].rate_bits_per_s > 0
    assert other.num_findings == leader.num_findings
    leader, other = job(monkeypatch, absent=(1,))
    assert leader.findings[0].places[0].ranks == (1,) and "did not come" in leader.findings[0].text


def test_a_rank_whose_leader_has_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "GRACE_S", 0.1)
    board = Rendezvous(HashStore(), rank=1, world_size=2, place="here")
    with pytest.raises(ConnectError, match="rank 0, which leads the test, has stopped"):
        board.wait_for("plan/1", whom=0)
    board.post("said/1/1", json.dumps({}))
    assert board.collect_responsive("said/1", [0, 1]) == {1: "{}"}
    assert threading.active_count() < 50
