"""Active test of a network: starts a process a rank, runs the wire tests and collects their results."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import DeadlineExceeded, PayloadError, PeerLost, TransportError
from thinwire.monitor.active_test.evaluation import (
    LEAST_CROWDED,
    AllReduce,
    FlowTest,
    Measured,
    PairTest,
    all_reduce_s,
    evaluate,
    expected_s,
    reference_rate,
    slow_loopbacks,
    suspects,
)
from thinwire.monitor.active_test.wire_tests import (
    FIRST_DEADLINE_S,
    MOST_BYTES,
    ROUND_TRIPS,
    Cell,
    PairChannel,
    cells_of,
    detail_of,
    find_ring,
    follow,
    lead,
    loopback_times,
    pair_note,
    read_flow,
    read_pair,
    ring_all_reduce,
    rounds_of,
    seconds_of,
    together,
)
from thinwire.monitor.findings import Finding
from thinwire.transport.addresses import Address, clock_name
from thinwire.transport.base import read_object
from thinwire.transport.connect import PartialJob
from thinwire.transport.secret import SECRET_BYTES, Secret

_ALL_REDUCES = 3


class ActiveRank:
    """Executes the plans of rank 0, and reports the results."""

    def __init__(self, gathering: PartialJob) -> None:
        self._own, self._board, self._transport = gathering.rank, gathering.rendezvous, gathering.transport
        self._gathering = gathering

    def follow_plans(self) -> int:
        """Execute the plans of rank 0 to the last; return the number of findings."""
        number = 0
        while True:
            number += 1
            plan = read_object(self._board.wait_for(f"plan/{number}", whom=0), whose="what rank 0 plans")
            if plan.get("do") == "end":
                return int(seconds_of(plan, "num_findings"))
            self.do(plan, number)

    def do(self, plan: Mapping[str, Any], number: int) -> None:
        """Execute one plan and leave the result."""
        action = {
            "hello": self._hello, "loopback": self._loopback, "pairs": self._pairs, "flows": self._flows,
            "all-reduce": self._all_reduce,
        }.get(str(plan.get("do")))  # fmt: skip
        if action is None:
            raise PayloadError(
                f"rank 0 plans {str(plan.get('do'))!r:.40}, which is unknown here; run the same thinwire on all hosts"
            )
        self._board.promise(FIRST_DEADLINE_S)
        note = action(plan, number)
        self._board.post(f"result/{number}/{self._own}", json.dumps(note))

    def _hello(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        return {"clock": clock_name(), "connected": list(self._gathering.connected)}

    def _loopback(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        if [self._own] not in plan.get("ranks", ()):
            return {}
        from thinwire.transport.wire.wire_transport import WireTransport

        key = Secret(key=secrets.token_bytes(SECRET_BYTES))
        pair = [WireTransport(replica=side, num_replicas=2, secret=key, address="127.0.0.1") for side in range(2)]
        try:
            pair[1].dial({0: Address(host="127.0.0.1", port=pair[0].port)}, deadline_s=FIRST_DEADLINE_S)
            seconds = seconds_of(plan, "seconds")
            times = loopback_times((pair[0], pair[1]), seconds=seconds, promise=self._board.promise)
        except TransportError as error:
            return {"rate": 0.0, "detail": str(error)[:300]}
        finally:
            for transport in pair:
                transport.close()
        return {"rate": times.rate[0]}

    def _pairs(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        mine = [cell for cell in cells_of(plan, world_size=self._gathering.world_size) if self._own in cell]
        if not mine:
            return {}
        (source, destination), seconds = mine[0], seconds_of(plan, "seconds", most=60.0)
        peer = destination if self._own == source else source
        line = PairChannel(self._transport, peer, plan=number, promise=self._board.promise)
        try:
            if self._own != source:
                follow(line, seed=number)
                return {"fault": ""}
            times = lead(line, seconds=seconds, seed=number)
        except PayloadError as error:
            return pair_note(PairTest(fault="corrupt", detail=str(error)))
        except DeadlineExceeded:  # its text has the internal number of a message
            said = f"no answer within {line.deadline_s:.3g} s, the deadline that follows from measured times"
            return pair_note(PairTest(fault="dead", detail=said))
        except TransportError as error:
            said = "the connection broke" if isinstance(error, PeerLost) else str(error)
            return pair_note(PairTest(fault="dead", detail=said))
        rate, overhead_s = times.rate
        return pair_note(PairTest(rate_bits_per_s=rate, overhead_s=overhead_s, latency_s=times.latency_s))

    def _flows(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        rows = cells_of(plan, world_size=self._gathering.world_size, parts=3)
        flows = {(source, destination): num_bytes for source, destination, num_bytes in rows}
        limit_s = seconds_of(plan, "limit_s")
        done = together(self._transport, flows, plan=number, limit_s=limit_s, promise=self._board.promise)
        return {"seconds": {str(peer): flow.seconds for peer, flow in done.items()}}

    def _all_reduce(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        rows = list(cells_of(plan, world_size=self._gathering.world_size, parts=3))
        order, numel = [row[0] for row in rows], rows[0][2] if rows else 0
        if self._own not in order:
            return {}
        limit_s = seconds_of(plan, "limit_s")
        best_s, wrong = float("inf"), None
        for again in range(_ALL_REDUCES):
            try:
                seconds, step = ring_all_reduce(
                    self._transport, order, numel, plan=number, repeat=again, limit_s=limit_s,
                    promise=self._board.promise,
                )  # fmt: skip
            except TransportError as error:
                return {"detail": str(error)[:300]}
            best_s, wrong = min(best_s, seconds), step if wrong is None else wrong
        return {"seconds": best_s, "wrong": wrong}


_LEAST_S, _MOST_S = 0.05, 0.3
_LATER = 10.0
_BLOCKS = 5  # what a pair sends takes about so many times its longest transfer, each way
_FLOWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of an active test."""

    rank: int  # this rank
    measured: Measured | None  # on rank 0 only
    findings: tuple[Finding, ...]  # on rank 0 only
    num_findings: int  # the same on all ranks
    seconds: float  # duration since the rendezvous


def run_test(
    gathering: PartialJob, *, budget_s: float = 10.0, expect_bits_per_s: float | None = None,
    report: Callable[[str], None] = lambda line: None, show: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:  # fmt: skip
    """Test all links of a job after its rendezvous; all ranks must call this together.

    Args:
        gathering: The ranks that joined.
        budget_s: Approximate time for all pairs on healthy links.
        expect_bits_per_s: Expected rate of each link alone.
        report: Receives the name of each test on rank 0.
        show: Receives the outcome on rank 0 before the others end: torchrun ends rank 0 with the first of them.

    Raises:
        TransportError: The store, or rank 0, is gone.
    """
    rank, began_s = ActiveRank(gathering), time.monotonic()
    if gathering.rank != 0:
        count = rank.follow_plans()
        return Outcome(
            rank=gathering.rank, measured=None, findings=(), num_findings=count, seconds=time.monotonic() - began_s
        )  # fmt: skip
    leader = _Leader(gathering, rank, budget_s=budget_s, expect_bits_per_s=expect_bits_per_s, report=report)
    measured = leader.measure()
    findings = evaluate(measured, expect_bits_per_s=expect_bits_per_s)
    outcome = Outcome(
        rank=0, measured=measured, findings=tuple(findings), num_findings=len(findings),
        seconds=time.monotonic() - began_s,
    )  # fmt: skip
    show(outcome)
    leader.end(len(findings))
    return outcome


class _Leader:
    """Plans one test after the other from the results so far."""

    def __init__(
        self, gathering: PartialJob, rank: ActiveRank, *, budget_s: float, expect_bits_per_s: float | None,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._gathering, self._rank, self._log = gathering, rank, report
        self._expect = expect_bits_per_s
        self._number = 0
        stations = gathering.endpoints
        self._alive = sorted(stations)
        hosts = [stations[rank].hostname if rank in stations else "" for rank in range(gathering.world_size)]
        kernels = [stations[rank].host if rank in stations else "" for rank in range(gathering.world_size)]
        names = [
            f"{host}-{rank}" if any(hosts[other] == host and kernels[other] != kernels[rank] for other in stations)
            else host for rank, host in enumerate(hosts)
        ]  # fmt: skip
        absent = {
            rank: "did not come to the meeting point in time" for rank in range(len(hosts)) if rank not in stations
        }
        self._found = Measured(hosts=tuple(names), absent=absent)
        rounds = max(1, len(rounds_of(self._alive)))
        self._seconds = min(_MOST_S, max(_LEAST_S, budget_s / (2 * _BLOCKS * rounds)))

    def measure(self) -> Measured:
        """Run all tests."""
        clocks = self._meet()
        self._log("loopback: each host alone")
        self._loopbacks(clocks)
        self._log(f"pairs: {len(self._alive) * (len(self._alive) - 1)} ways between {len(self._alive)} ranks")
        for met in rounds_of(self._alive):
            for way in (met, [(other, one) for one, other in met]):
                self._pairs([cell for cell in way if self._is_open(cell)])
        self._again()
        ring = find_ring(self._alive, lambda one, other: self._is_whole((one, other)))
        if ring is not None:
            self._log("neighbours: a ring, all at once")
            cells = list(zip(ring, [*ring[1:], ring[0]], strict=True))
            self._found.neighbours = self._flows(cells, share=1)
        whole = [cell for cell in self._found.pairs if self._is_whole(cell)]
        if len(self._alive) > 2 and whole:
            self._log("all-to-all: everyone to everyone, all at once")
            self._found.everyone = self._flows(whole, share=len(self._alive) - 1)
        if ring is not None and all(self._is_whole((one, other)) for one, other in itertools.pairwise(ring)):
            self._log("all-reduce: around the ring, against the exact sum")
            self._all_reduce(ring)
        return self._found

    def end(self, num_findings: int) -> None:
        """Send the last plan."""
        self._number += 1
        plan = {"do": "end", "num_findings": num_findings}
        self._gathering.rendezvous.post(f"plan/{self._number}", json.dumps(plan))

    def _is_open(self, cell: Cell) -> bool:
        found = self._found.pairs.get(cell)
        return set(cell) <= set(self._alive) and (found is None or not found.fault)

    def _is_whole(self, cell: Cell) -> bool:
        """Return whether a pair carries the right bytes both ways: a broken connection is left out of the rest."""
        ways = (self._found.pairs.get(cell), self._found.pairs.get((cell[1], cell[0])))
        return self._is_open(cell) and all(way is not None and way.rate_bits_per_s > 0 for way in ways)

    def _ask(self, plan: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Send a plan to all ranks and return their results; silent ranks are left out from then on."""
        self._number += 1
        board, number = self._gathering.rendezvous, self._number
        text = json.dumps(plan)
        board.post(f"plan/{number}", text)
        self._rank.do(json.loads(text), number)
        texts = board.collect_responsive(f"result/{number}", self._alive)
        silent = [rank for rank in self._alive if rank not in texts]
        self._found.absent |= dict.fromkeys(silent, f"fell silent during {plan['do']}")
        self._alive = [rank for rank in self._alive if rank in texts]
        return {rank: read_object(text, whose=f"what rank {rank} says") for rank, text in texts.items()}

    def _meet(self) -> dict[int, str]:
        said = self._ask({"do": "hello"})
        reached = {rank: note.get("connected") for rank, note in said.items()}
        for one, other in itertools.permutations(self._alive, 2):
            knows = zip((reached[one], reached[other]), (other, one), strict=True)
            if not all(isinstance(known, list) and peer in known for known, peer in knows):
                self._found.pairs[one, other] = PairTest(fault="dead", detail="no connection came about")
        clocks = {rank: str(note.get("clock"))[:80] for rank, note in said.items()}
        self._found.machines = tuple(clocks.get(rank, "") for rank in range(len(self._found.hosts)))
        return clocks

    def _loopbacks(self, clocks: Mapping[int, str]) -> None:
        """Test each machine's loopback; ranks of one machine share its processor, so they take turns."""
        turns: dict[str, list[int]] = {}
        for rank in self._alive:
            turns.setdefault(clocks[rank], []).append(rank)
        for turn in range(max(map(len, turns.values()))):
            self._loopback([own[turn] for own in turns.values() if turn < len(own)], seconds=_LEAST_S)
        for seconds in (2 * _LEAST_S, 4 * _LEAST_S):  # a single measurement is no finding
            for rank in sorted(slow_loopbacks(self._found)):
                self._loopback([rank], seconds=seconds)

    def _loopback(self, ranks: Sequence[int], *, seconds: float) -> None:
        said = self._ask({"do": "loopback", "ranks": [[rank] for rank in ranks], "seconds": seconds})
        known = self._found.loopback_bits_per_s
        for rank in ranks:
            rate = read_pair({"overhead_s": 0, "latency_s": 0, **said.get(rank, {})}).rate_bits_per_s
            if rate > 0:
                known[rank] = max(rate, known.get(rank, 0.0))

    def _pairs(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        said = self._ask({"do": "pairs", "rows": cells, "seconds": self._seconds})
        pairs = self._found.pairs
        for source, destination in cells:
            if source not in said or destination not in said:
                continue  # reported as absent
            found, heard = read_pair(said[source]), said[destination].get("fault")
            if heard == "corrupt":  # the receiver knows best
                found = PairTest(fault="corrupt", detail=detail_of(said[destination]))
            before = pairs.get((source, destination))
            if before is None or found.fault or found.rate_bits_per_s > before.rate_bits_per_s:
                pairs[source, destination] = found

    def _again(self) -> None:
        """Test the pairs that seem slow once more, each alone: a single measurement is no finding."""
        # those below half of the usual rate need no third test
        for is_last in (False, True):
            pairs, usual = self._found.pairs, reference_rate(list(self._found.rates.values()))
            slow = [cell for cell in suspects(self._found, expect_bits_per_s=self._expect) if self._is_open(cell)]
            slow = [cell for cell in slow if not is_last or 2 * pairs[cell].rate_bits_per_s > usual]
            if slow:
                self._log(f"pairs again: {len(slow)} that look slow")
            for cell in slow:
                self._pairs([cell])

    def _flows(self, cells: Sequence[Cell], *, share: int) -> dict[Cell, FlowTest]:
        """Send over all cells at once for about the time of a pair; return the transfers that ended in time."""
        pairs = self._found.pairs
        longest_s = max(2 * self._seconds, ROUND_TRIPS * 2 * max(pairs[cell].latency_s for cell in cells))
        sizes = {
            cell: max(1 << 14, min(MOST_BYTES, int(pairs[cell].rate_bits_per_s * longest_s / 8 / share)))
            for cell in cells
        }
        flows = {cell: FlowTest(num_bytes=size, seconds=1.0) for cell, size in sizes.items()}
        due = expected_s(flows, self._found)
        limit_s = FIRST_DEADLINE_S + _LATER * max(due.values())
        best: dict[Cell, FlowTest] = {}
        for turn in range(_FLOWS):  # the best of them: other work can hold a transfer up
            if turn > 1 and all(cell in best and best[cell].seconds < LEAST_CROWDED * due[cell] for cell in cells):
                break
            said = self._ask({"do": "flows", "rows": [[*cell, sizes[cell]] for cell in cells], "limit_s": limit_s})
            for source, destination in cells:
                seconds = said.get(source, {}).get("seconds")
                value = seconds.get(str(destination)) if isinstance(seconds, dict) else None
                flow = read_flow(sizes[source, destination], value)
                before = best.get((source, destination))
                if flow is not None and (before is None or flow.seconds < before.seconds):
                    best[source, destination] = flow
            if not set(self._gathering.endpoints) <= set(self._alive):
                break
        late = {cell: FlowTest(num_bytes=sizes[cell], seconds=limit_s) for cell in cells}
        return {cell: flow for cell, flow in (late | best).items() if set(cell) <= set(self._alive)}

    def _all_reduce(self, ring: Sequence[int]) -> None:
        pairs = self._found.pairs
        links = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        slowest = min(pairs[link].rate_bits_per_s for link in links)
        numel = int(slowest * self._seconds / 8 / 4 / 2) // len(ring) * len(ring)
        numel = min(MOST_BYTES // 4 // len(ring), max(1024, numel // len(ring))) * len(ring)
        due_s = all_reduce_s(AllReduce(order=tuple(ring), num_bytes=4 * numel, seconds=0.0), self._found)
        rows = [[source, destination, numel] for source, destination in links]
        said = self._ask({"do": "all-reduce", "rows": rows, "limit_s": FIRST_DEADLINE_S + _LATER * due_s})
        times = [read_flow(1, said.get(rank, {}).get("seconds")) for rank in ring]
        if any(time is None for time in times):
            return
        steps = {link: said[link[1]].get("wrong") for link in links}
        wrong = {link: step for link, step in steps.items() if isinstance(step, int) and not isinstance(step, bool)}
        first = tuple(sorted(link for link, step in wrong.items() if step == min(wrong.values())))
        self._found.all_reduce = AllReduce(
            order=tuple(ring), num_bytes=4 * numel, wrong=first,
            seconds=max(time.seconds for time in times if time is not None),
        )  # fmt: skip
