"""Synthetic jobs: scenes with faults, and the records that their ranks would write.

Ranks compute and exchange in rounds, in virtual seconds, on hosts whose clocks show different times and drift.
Durations vary as on shared cores. The same scene gives the same records.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from thinwire.monitor.findings import Place
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

FaultKind = Literal[
    "slow link", "slow work", "growing work", "paused", "killed", "black hole", "flapping",
    "skipped", "wrong shape", "stalls",
]  # fmt: skip
Pattern = Literal["all_gather", "two_phase", "ring", "rotating_ring", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault.

    Attributes:
        kind: Of the fault.
        place: Links, endpoints or hosts for links; ranks or hosts for compute and processes.
        begin: First round with it.
        severity: Factor on durations.
        period: Rounds between stalls.
        end: First round without it.
    """

    kind: FaultKind
    place: Place
    begin: int
    severity: float = 1.0
    period: int = 6
    end: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Variation of durations.

    Attributes:
        sigma: Standard deviation of log durations.
        spikes: Share of durations that are much longer.
        tail: Pareto exponent of the spikes; smaller is longer.
        bursts: Share of rounds in which other load begins on a host, for one or two rounds.
        unevenness: Largest ratio between links.
    """

    sigma: float = 0.1
    spikes: float = 0.0
    tail: float = 1.5
    bursts: float = 0.0
    unevenness: float = 1.5


NOISES: dict[str, Noise] = {
    "calm": Noise(sigma=0.04),
    "shared": Noise(sigma=0.12, spikes=0.02),
    "heavy": Noise(sigma=0.2, spikes=0.05, tail=1.2),
    "bursts": Noise(sigma=0.12, spikes=0.02, bursts=0.02, unevenness=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A job to synthesize.

    Attributes:
        hosts: The host of each rank.
        pattern: How ranks exchange; `torch` is a collective whose messages nobody records.
        rounds: How many.
        seed: For all that is drawn.
        noise: How times vary.
        faults: Injected faults.
        compute_s: Usual seconds of work in a round.
        message_s: Usual seconds of a message between hosts.
        watched_s: Seconds that records go on after the job stands still.
    """

    hosts: tuple[str, ...]
    pattern: Pattern = "all_gather"
    rounds: int = 60
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    faults: tuple[InjectedFault, ...] = ()
    compute_s: float = 0.2
    message_s: float = 0.05
    watched_s: float = 5.0

    def orders(self) -> list[list[int]]:
        """Return the orders of the ranks in a ring; a rotating one takes them in turns."""
        draw = random.Random(self.seed + 1)
        first, other = (draw.sample(range(len(self.hosts)), len(self.hosts)) for _ in range(2))
        # back and forth, so that clocks are bounded from both sides
        return [first, first[::-1], other] if self.pattern == "rotating_ring" else [first]

    def uses(self, place: Place) -> bool:
        """Return whether messages take the way that a fault of wires is on, in both directions where it has two."""
        ranks = range(len(self.hosts))
        pairs = [(i, j) for i in ranks for j in ranks if i != j]
        if self.pattern in ("ring", "rotating_ring", "torch"):
            pairs = [(order[i - 1], order[i]) for order in self.orders() for i in ranks]
        hit = {pair for pair in pairs if affects(place, *pair, self.hosts)}
        is_both = any((destination, source) in hit for source, destination in hit)
        return bool(hit) and (is_both or not place.kind.endswith("both ways"))


def affects(place: Place, source: int, destination: int, hosts: tuple[str, ...]) -> bool:
    """Return whether a fault of wires at `place` is on the way from one rank to another."""
    pair, sites = (source, destination), (hosts[source], hosts[destination])
    if place.kind in ("link", "host link"):
        return pair == place.ranks or sites == place.hosts
    if place.kind in ("link both ways", "host link both ways"):
        return {*pair} == {*place.ranks} or {*sites} == {*place.hosts}
    if place.kind == "sender":
        return source in place.ranks
    if place.kind == "receiver":
        return destination in place.ranks
    is_between = sites[0] != sites[1]
    if place.kind == "host sender":
        return is_between and sites[0] in place.hosts
    if place.kind == "host receiver":
        return is_between and sites[1] in place.hosts
    return bool({*pair} & {*place.ranks}) or (is_between and bool({*sites} & {*place.hosts}))


BEAT_S = 0.5
_WORLD = "world"
_DOWN, _CYCLE = 3, 8  # rounds of a flapping link


def synthesize(scene: Scene) -> list[Record]:
    """Return the records of all ranks of a scene, by their hosts' clocks.

    Example:
        >>> records = synthesize(Scene(hosts=("a", "a", "b"), rounds=2))
        >>> sum(isinstance(record, TransferEnd) for record in records)  # 6 messages with 2 ends in each of 2 rounds
        24
    """
    return _Synthesis(scene).run()


class _Synthesis:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.size = len(scene.hosts)
        self.draw = random.Random(scene.seed)
        self.free = [self.draw.uniform(0, 0.01) for _ in range(self.size)]
        self.stop = [math.inf] * self.size
        self.killed = {rank for fault in scene.faults if fault.kind == "killed" for rank in self._ranks(fault.place)}
        self.sequence = [0] * self.size
        self.records: list[Span | Operation | TransferEnd] = []
        self.stood_s = math.inf
        self.latest_s = 0.0
        self.busy: dict[str, int] = {}
        uneven = scene.noise.unevenness
        self.rates = {
            (i, j): self.draw.uniform(1, uneven) * (1.0 if scene.hosts[i] != scene.hosts[j] else 0.05)
            for i in range(self.size)
            for j in range(self.size)
        }
        names = sorted(set(scene.hosts))
        self.clocks = {name: (self.draw.uniform(-5, 5), self.draw.uniform(-40e-6, 40e-6)) for name in names}
        self.orders = scene.orders()

    def run(self) -> list[Record]:
        """Play the rounds until the job stands still, and return the records."""
        for round in range(self.scene.rounds):
            if any(free == math.inf for free in self.free):
                break
            self._round(round)
        end_s = min(self.latest_s, self.stood_s) + self.scene.watched_s if self.stood_s < math.inf else self.latest_s
        world = Communicator(communicator=_WORLD, ranks=tuple(range(self.size)), hosts=self.scene.hosts)
        return [world, *self._shown(end_s), *self._beats(end_s)]

    def _round(self, round: int) -> None:
        self._burst()
        posted = [self._work(rank, round) for rank in range(self.size)]
        skipped = self._hit("skipped", round)
        odd = self._hit("wrong shape", round)
        kinds = ("all_reduce", "all_gather") if self.scene.pattern == "torch" else (self.scene.pattern,)
        for index, kind in enumerate(kinds):
            if index == 0 and skipped:
                self._skip(round, posted, skipped, kinds)
                return
            posted = self._operate(round, kind, posted, odd if index == 0 else set(), index)
        self.free = posted

    def _work(self, rank: int, round: int) -> float:
        factor = 1.0
        for fault in self.scene.faults:
            if rank not in self._ranks(fault.place) or not fault.begin <= round < fault.end:
                continue
            if fault.kind == "slow work":
                factor *= fault.severity
            elif fault.kind == "growing work":
                factor *= 1 + (fault.severity - 1) * min(1.0, (round - fault.begin + 1) / 40)
            elif fault.kind == "stalls" and (round - fault.begin) % fault.period == 0:
                factor *= fault.severity
            elif fault.kind in ("paused", "killed") and self.stop[rank] == math.inf:
                # some stop in their work, others while they exchange
                within = self.draw.uniform(0.2, 0.9) if rank % 2 else 1.02
                self.stop[rank] = self.free[rank] + within * self.scene.compute_s
                self.stood_s = min(self.stood_s, self.stop[rank])
        time_s = self.scene.compute_s * factor * self._vary(self.scene.hosts[rank])
        begin, done = self.free[rank], self.free[rank] + time_s
        if done > self.stop[rank]:
            return math.inf
        self.records.append(Span(rank=rank, kind="compute", step=round, started_s=begin, done_s=done))
        return done

    def _operate(self, round: int, kind: str, posted: list[float], odd: set[int], index: int) -> list[float]:
        done = self._exchange(round, kind, posted)
        if odd:
            done = [math.inf] * self.size
            self.stood_s = min(self.stood_s, max(posted))
        for rank in range(self.size):
            ended = done[rank] if done[rank] <= self.stop[rank] else math.inf
            count = 1_000_003 + (17 if rank in odd else 0) - index
            if posted[rank] < math.inf:
                self._operation(rank, kind, round, count, posted[rank], ended)
            self.sequence[rank] += 1
            done[rank] = ended
        if math.inf in done:
            self.stood_s = min(self.stood_s, max((time for time in posted if time < math.inf), default=math.inf))
        return done

    def _operation(self, rank: int, kind: str, round: int, count: int, posted_s: float, done_s: float) -> None:
        self._note(posted_s, done_s)
        # torch knows of no rounds
        number = -1 if self.scene.pattern == "torch" else round
        self.records.append(Operation(
            communicator=_WORLD, rank=rank, sequence=self.sequence[rank], kind=kind, dtype="float32", count=count,
            posted_s=posted_s, done_s=done_s, round=number,
        ))  # fmt: skip

    def _skip(self, round: int, posted: list[float], skipped: set[int], kinds: tuple[str, ...]) -> None:
        """Let some ranks go on to their next operation, which the others never come to."""
        for rank in range(self.size):
            number, kind = (round, kinds[0]) if rank not in skipped else (round + 1, kinds[-1])
            later = 0.0 if rank not in skipped else self.scene.compute_s
            count = 1_000_003 - (kinds.index(kind) if rank in skipped else 0)
            if posted[rank] < math.inf:
                self._operation(rank, kind, number, count, posted[rank] + later, math.inf)
        if self.scene.pattern != "torch":
            for source in range(self.size):
                for destination in range(self.size):
                    if source != destination:
                        numbers = [round + (rank in skipped) for rank in (source, destination)]
                        self._add_transfer(
                            source, destination, numbers, 0, (posted[source], posted[destination], math.inf)
                        )
        self.stood_s = min(self.stood_s, max(posted))
        self.free = [math.inf] * self.size

    def _exchange(self, round: int, kind: str, posted: list[float]) -> list[float]:
        """Return the time at which each rank has all of its messages."""
        if kind in ("all_gather", "two_phase") and self.scene.pattern != "torch":
            ready = self._all_to_all(round, 0, posted)
            return self._all_to_all(round, 1, ready) if kind == "two_phase" else ready
        order = self.orders[round % len(self.orders)]
        ready = list(posted)
        for part in range(self.size - 1):
            later = list(ready)
            for index, source in enumerate(order):
                destination = order[(index + 1) % self.size]
                done = self._message(source, destination, round, part, ready)
                later[source], later[destination] = max(later[source], done), max(later[destination], done)
            ready = later
        return ready

    def _all_to_all(self, round: int, part: int, posted: list[float]) -> list[float]:
        ready = list(posted)
        for source in range(self.size):
            for destination in range(self.size):
                if source != destination:
                    done = self._message(source, destination, round, part, posted)
                    ready[source], ready[destination] = max(ready[source], done), max(ready[destination], done)
        return ready

    def _message(self, source: int, destination: int, round: int, part: int, posted: list[float]) -> float:
        begin = max(posted[source], posted[destination])
        factor = 1.0
        for fault in self.scene.faults:
            is_on = fault.begin <= round < fault.end and affects(fault.place, source, destination, self.scene.hosts)
            if is_on and (fault.kind == "slow link" or self._is_down(fault, round)):
                factor *= fault.severity
            elif is_on and fault.kind == "black hole":
                factor = math.inf
        hosts = self.scene.hosts
        small = 1.0 if self.scene.pattern in ("all_gather", "two_phase") else 1 / self.size
        time_s = self.scene.message_s * small * self.rates[source, destination] * factor
        done = begin + time_s * self._vary(hosts[source], hosts[destination])
        if done > min(self.stop[source], self.stop[destination]):
            done = math.inf
        if self.scene.pattern != "torch":
            self._add_transfer(source, destination, [round, round], part, (posted[source], posted[destination], done))
        return done

    def _add_transfer(
        self, source: int, destination: int, numbers: list[int], part: int, times: tuple[float, ...]
    ) -> None:
        """Record both ends of a message; a peer of a killed rank sees a broken connection."""
        lost = {source, destination} & self.killed
        for index, (rank, peer) in enumerate(((source, destination), (destination, source))):
            if times[index] == math.inf:
                continue
            broke = times[2] == math.inf and bool(lost) and rank not in lost and self.stop[min(lost)] < math.inf
            self._note(times[index], times[2])
            self.records.append(TransferEnd(
                communicator=_WORLD, rank=rank, peer=peer, direction="received" if index else "sent",
                operation=numbers[index], part=part, num_bytes=500_009, posted_s=times[index], done_s=times[2],
                error=f"the connection to rank {peer} broke" if broke else "",
            ))  # fmt: skip

    def _vary(self, *hosts: str) -> float:
        noise, draw = self.scene.noise, self.draw
        factor = math.exp(draw.gauss(0.0, noise.sigma))
        if noise.spikes and draw.random() < noise.spikes:
            factor *= min(20.0, 1.5 * draw.paretovariate(noise.tail))
        return factor * (2.5 if any(self.busy.get(host) for host in hosts) else 1.0)

    def _burst(self) -> None:
        for host in sorted(set(self.scene.hosts)):
            left = self.busy.get(host, 0)
            begins = self.scene.noise.bursts and self.draw.random() < self.scene.noise.bursts
            self.busy[host] = left - 1 if left else self.draw.choice((1, 2)) if begins else 0

    def _is_down(self, fault: InjectedFault, round: int) -> bool:
        return fault.kind == "flapping" and (round - fault.begin) % _CYCLE < _DOWN

    def _hit(self, kind: FaultKind, round: int) -> set[int]:
        hit = [fault for fault in self.scene.faults if fault.kind == kind and fault.begin == round]
        return {rank for fault in hit for rank in self._ranks(fault.place)}

    def _ranks(self, place: Place) -> set[int]:
        return set(place.ranks) | {rank for rank, host in enumerate(self.scene.hosts) if host in place.hosts}

    def _note(self, *times: float) -> None:
        self.latest_s = max(self.latest_s, *(time for time in times if time < math.inf), 0.0)

    def _shown(self, end_s: float) -> Iterator[Record]:
        """Yield the records written by `end_s`, by each host's clock."""
        for record in self.records:
            if isinstance(record, Span):
                if record.done_s <= end_s:
                    started_s, ended_s = (self._shift(record.rank, at_s) for at_s in (record.started_s, record.done_s))
                    yield Span(
                        rank=record.rank, kind=record.kind, step=record.step, started_s=started_s, done_s=ended_s
                    )
            elif record.posted_s <= min(end_s, self.stop[record.rank]):
                is_done = record.done_s is not None and record.done_s <= end_s
                done_s = self._shift(record.rank, record.done_s or 0.0) if is_done else None
                yield _with_times(record, self._shift(record.rank, record.posted_s), done_s)

    def _beats(self, end_s: float) -> Iterator[Record]:
        for rank in range(self.size):
            for number in range(int(min(end_s, self.stop[rank]) / BEAT_S) + 1):
                yield Beat(rank=rank, at_s=self._shift(rank, number * BEAT_S))

    def _shift(self, rank: int, time_s: float) -> float:
        """Return a time by the clock of a rank's host."""
        offset_s, drift = self.clocks[self.scene.hosts[rank]]
        return offset_s + time_s * (1 + drift)


def _with_times(record: Operation | TransferEnd, posted_s: float, done_s: float | None) -> Operation | TransferEnd:
    # spelled out, since a job has very many: `dataclasses.replace` takes three times as long
    if isinstance(record, Operation):
        return Operation(
            communicator=record.communicator, rank=record.rank, sequence=record.sequence, kind=record.kind,
            dtype=record.dtype, count=record.count, posted_s=posted_s, done_s=done_s, round=record.round,
        )  # fmt: skip
    return TransferEnd(
        communicator=record.communicator, rank=record.rank, peer=record.peer, direction=record.direction,
        operation=record.operation, part=record.part, num_bytes=record.num_bytes, posted_s=posted_s, done_s=done_s,
        error=record.error,
    )  # fmt: skip
