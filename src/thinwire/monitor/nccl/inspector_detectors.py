"""Detectors on NCCL Inspector files: late ranks (C4, arXiv 2406.04594), slow collectives and messages, missing files.

All ranks leave an operation at about the same time if none can end before all have come. So the difference of two
ranks' kernel durations is the difference of their arrivals, and no clocks are compared.

Who waits least came last. A rank that is late again and again, by more than it was or than the operation itself
takes, keeps the others waiting: its own work is slow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from thinwire.monitor.detect.change_points import CUSUM, Change, ChangePointDetector, median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, Explanation, probe_for, slower_than_peers
from thinwire.monitor.detect.link_history import size_class
from thinwire.monitor.findings import Evidence, Finding, Place, joined, link_names
from thinwire.runlog.nccl_values import TOGETHER, Numbers, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorConfig:
    """Constants of the detectors on Inspector files; not measured on a GPU job."""

    many_ranks: int = 8  # from this on a rank is compared with the median of all: one more is little among them
    min_late_s: float = 0.0005  # lateness that is reported
    min_late_share: float = 0.02  # of the time between two operations
    look: int = 24  # operations after an alarm that tell the ratio
    often: float = 0.7  # share of operations in which a rank is late from the start
    alike: float = 0.6  # least over most lateness of the ranks of a late host
    follows: float = 0.5  # of a rank's lateness; one that is waited for elsewhere and is this late explains it
    peers_ratio: float = 3.0  # of a link that was slow from the start
    min_left: int = 8  # operations of others after a file ends: one dump may be lost
    min_left_s: float = 10.0  # the same in seconds
    dumps: float = 3.0  # longest times between two own operations
    max_named: int = 64  # ranks in a finding


INSPECTOR = InspectorConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeries:
    """Operations of one kind in one communicator."""

    communicator: str  # the begin of its hash
    kind: str  # NCCL's name of it
    num_ranks: int  # how many ranks the communicator has
    # sequence number and what each rank wrote, in order; those that at least two ranks wrote
    operations: list[tuple[int, dict[int, Timing]]] = field(default_factory=list)
    # host and process of each rank that wrote anything
    locations: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def unrecorded(self) -> int:
        """Number of ranks without records."""
        return max(0, self.num_ranks - len(self.locations))

    @property
    def period_s(self) -> float:
        """Seconds from one operation to the next, by the ranks' own clocks; NaN if unknown."""
        first, last = self.operations[0], self.operations[-1]
        both = first[1].keys() & last[1].keys()
        spans = [last[1][rank].at_s - first[1][rank].at_s for rank in both]
        return median([span / (last[0] - first[0]) for span in spans if span > 0 and last[0] > first[0]])

    def usual_s(self) -> dict[int, float]:
        """Return the usual duration of an operation of each size: the median over operations of the shortest kernel."""
        shortest: dict[int, list[float]] = defaultdict(list)
        for _, own in self.operations:
            shortest[class_of(own)].append(shortest_s(own))
        return {classed: median(times) for classed, times in shortest.items()}


def class_of(own: Mapping[int, Timing]) -> int:
    """Return the size class of an operation."""
    return 2 * size_class(next(iter(own.values())).num_bytes)


def shortest_s(own: Mapping[int, Timing]) -> float:
    """Return the operation's own duration: the time of the rank that came last."""
    return min(one.time_s for one in own.values())


def late_s(own: Mapping[int, Timing]) -> dict[int, float]:
    """Return the seconds by which each rank came later than the median of the others; at least 0.

    Example:
        >>> kernel = dict(communicator="0x1", num_ranks=3, host="a", pid=1, kind="AllReduce", sequence=0, num_bytes=8)
        >>> times = {0: 0.5, 1: 0.125, 2: 0.5}
        >>> late_s({rank: Timing(rank=rank, time_s=time_s, at_s=0.0, **kernel) for rank, time_s in times.items()})
        {0: 0.0, 1: 0.375, 2: 0.0}
    """
    if len(own) > INSPECTOR.many_ranks:
        middle = median([one.time_s for one in own.values()])
        return {rank: max(0.0, middle - one.time_s) for rank, one in own.items()}
    return {
        rank: max(0.0, median([other.time_s for peer, other in own.items() if peer != rank]) - one.time_s)
        for rank, one in own.items()
    }


def is_usable(timing: Timing) -> bool:
    """Return whether a duration is the kernel's own: that of the CPU includes time in the queue."""
    return timing.time_s > 0 and timing.source != "collective_cpu"


def numbers_of(timings: Iterable[Timing]) -> Numbers:
    """Return the job's own number of each rank."""
    return Numbers(sorted({(one.communicator, one.num_ranks, one.rank, (one.host, one.pid)) for one in timings}))


def series_of(timings: Iterable[Timing]) -> list[CollectiveSeries]:
    """Return the operations in which all ranks end together, by communicator and kind."""
    found: dict[tuple[str, str], dict[int, dict[int, Timing]]] = defaultdict(lambda: defaultdict(dict))
    size_of: dict[str, int] = {}
    locations: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
    for one in timings:
        if one.kind in TOGETHER:
            size_of[one.communicator] = max(one.num_ranks, size_of.get(one.communicator, 0))
            locations[one.communicator].setdefault(one.rank, (one.host, one.pid))
            if is_usable(one):
                # replayed CUDA graphs may repeat a number: the first one counts
                found[one.communicator, one.kind][one.sequence].setdefault(one.rank, one)
    series = [
        CollectiveSeries(
            communicator=name, kind=kind, num_ranks=size_of[name], locations=locations[name],
            # different sizes at one number are different operations: the ranks' counts diverge
            operations=[(sequence, by_rank) for sequence, by_rank in sorted(own.items(), key=lambda item: item[0])
                        if len(by_rank) > 1 and len({one.num_bytes for one in by_rank.values()}) == 1],
        )
        for (name, kind), own in sorted(found.items(), key=lambda item: item[0])
    ]  # fmt: skip
    return [one for one in series if one.operations]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """A rank, or all ranks of a host, that came late to operations."""

    series: CollectiveSeries
    ranks: tuple[int, ...]
    host: str = ""
    change: Change | None
    late_s: float
    usual_s: float
    since: tuple[int, float]
    share_last: float


def find_late(all_series: Iterable[CollectiveSeries], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return one finding for each rank or host that others wait for and that does not wait for another."""
    told: dict[tuple[str, tuple[int, ...]], list[_Late]] = defaultdict(list)
    for series in all_series:
        for late in _late_in(series):
            job_ranks = tuple(sorted(numbers.of(series.communicator, rank) for rank in late.ranks))
            told[late.host, job_ranks].append(late)
    findings = [_finding(lates, ranks, numbers, trust) for (_, ranks), lates in told.items()]
    left = [
        one for one in findings
        if not any(other is not one and _follows(one.evidence, other.evidence) for other in findings)
    ]  # fmt: skip
    return sorted(left, key=lambda one: (one.until_s is not None, -one.evidence["late_s"]))


def _follows(one: Evidence, other: Evidence) -> bool:
    """Return whether ranks are late because they have waited elsewhere, for others that are later still."""
    return (
        set(one["late"]) <= set(other["waiting"])
        and not set(other["late"]) <= set(one["waiting"])
        and bool(other["late_s"] >= INSPECTOR.follows * one["late_s"])
    )


class _LateTimes:
    """Lateness of each rank, operation by operation."""

    def __init__(self, series: CollectiveSeries) -> None:
        self.series = series
        self.usual = series.usual_s()
        self.watches: dict[int, ChangePointDetector] = defaultdict(ChangePointDetector)
        self.rows: dict[int, list[tuple[int, float, bool]]] = defaultdict(list)
        for sequence, own in series.operations:
            classed = class_of(own)
            for rank, by_s in (late := late_s(own)).items():
                # added to the operation's own duration, so that a small lateness is no change
                time_s = self.usual[classed] + by_s
                self.watches[rank].add(sequence, own[rank].at_s, time_s, size_class=classed)
                self.rows[rank].append((sequence, by_s, by_s > 0 and by_s == max(late.values())))
        period_s = series.period_s
        self.least_s = max(INSPECTOR.min_late_s, INSPECTOR.min_late_share * period_s if period_s > 0 else 0.0)

    def late(self, ranks: Sequence[int], change: Change | None, host: str = "") -> _Late:
        """Return the lateness of ranks since a change, or since the begin."""
        first = self.series.operations[0][0] if change is None else change.since_round
        last = None if change is None else change.last_round(INSPECTOR.look)
        rows = [
            row for rank in ranks for row in self.rows[rank] if first <= row[0] and (last is None or row[0] <= last)
        ]
        began_s = min(own[rank].at_s for _, own in self.series.operations[:1] for rank in own)
        return _Late(
            series=self.series, ranks=tuple(ranks), host=host, change=change, usual_s=median(list(self.usual.values())),
            late_s=median([by_s for _, by_s, _ in rows]) if rows else 0.0,
            since=(first, began_s if change is None else change.since_s),
            share_last=sum(is_last for _, _, is_last in rows) / max(1, len(rows)),
        )  # fmt: skip


def _late_in(series: CollectiveSeries) -> list[_Late]:
    """Return the late ranks or hosts; those late from the start only without a lasting change."""
    lateness = _LateTimes(series)
    changed = {rank: lateness.late([rank], one.change) for rank, one in lateness.watches.items() if one.change}
    alarmed = {rank: late for rank, late in changed.items() if late.late_s >= lateness.least_s}
    if not any(late.change is not None and not late.change.is_over for late in alarmed.values()):
        for rank, rows in lateness.rows.items():
            late = lateness.late([rank], None)
            often = sum(by_s >= 0.5 * late.usual_s for _, by_s, _ in rows) >= INSPECTOR.often * len(rows)
            if len(rows) >= CUSUM.min_history and often and late.late_s >= max(lateness.least_s, late.usual_s):
                alarmed[rank] = late
    return _by_host(lateness, alarmed)


def _by_host(lateness: _LateTimes, alarmed: dict[int, _Late]) -> list[_Late]:
    """Return hosts whose ranks in this communicator are all late alike, and single ranks else."""
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in lateness.series.locations.items():
        ranks_on[host].append(rank)
    found = []
    for host, ranks in sorted(ranks_on.items()):
        late = [alarmed[rank] for rank in ranks if rank in alarmed]
        alike = bool(late) and min(one.late_s for one in late) >= INSPECTOR.alike * max(one.late_s for one in late)
        if len(ranks) == len(late) > 1 and len(ranks_on) > 1 and alike:
            first = min(late, key=lambda one: one.since)
            found.append(lateness.late(sorted(ranks), first.change, host))
        else:
            found += late
    return found


def _finding(lates: Sequence[_Late], ranks: tuple[int, ...], numbers: Numbers, trust: float) -> Finding:
    late = max(lates, key=lambda one: one.late_s)
    series, change = late.series, late.change
    place = Place(kind="host", hosts=(late.host,)) if late.host else Place(kind="rank", ranks=ranks)
    others = sorted(
        {numbers.of(one.series.communicator, rank) for one in lates for rank in one.series.locations} - set(ranks)
    )
    sure = 0.5 if change is None else 0.85
    where = [(rank, *series.locations[rank]) for rank in late.ranks]
    locations = [f"rank {rank} of {series.communicator}: {host}, process {pid}" for rank, host, pid in where]
    finding = Finding(
        kind="non-communication slow",
        places=(place,),
        since_s=late.since[1], since_round=late.since[0],
        evidence=Evidence(
            "late_rank", late_s=round(late.late_s, 6), operation_takes_s=round(late.usual_s, 6),
            came_last=round(late.share_last, 3), late=list(ranks), waiting=others[:64], locations=locations[:16],
            communicators=sorted({one.series.communicator for one in lates})[:16],
            kinds=sorted({one.series.kind for one in lates}), ranks_without_files=series.unrecorded,
        ),
        text=f"{place.title} comes late to {series.kind} of communicator {series.communicator}: the "
        f"others' kernels wait {late.late_s * 1e3:.3g} ms for it, where the operation itself takes "
        f"{late.usual_s * 1e3:.3g} ms" + (", since the files begin." if change is None else "."),
        # a rank without records may have been later still
        confidence=(sure if not series.unrecorded else 0.7 * sure) * trust,
        remedy="look at this rank's own work: other load, thermal limits, data that comes late, more work than others "
        "have" + (" from the start" if change is None else ""),
    )  # fmt: skip
    if change is None:
        return finding
    return replace(finding, seen_round=change.seen_round, until_s=change.until_s)


_TEST = "run `thinwire diagnose test` on these hosts while the job stands: it measures each wire alone"


def find_slow_collectives(all_series: Iterable[CollectiveSeries], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return that operations take longer for all ranks: one finding for lasting slowdowns, one for ended ones.

    Times of collectives do not tell which wire it is.
    """
    slow: dict[bool, dict[str, tuple[CollectiveSeries, ChangePointDetector]]] = {False: {}, True: {}}
    for series in all_series:
        watch = ChangePointDetector()
        for sequence, own in series.operations:
            at_s = median([one.at_s for one in own.values()])
            watch.add(sequence, at_s, shortest_s(own), size_class=class_of(own))
        if watch.change is not None and _lasting(watch, watch.change) >= math.log(CUSUM.min_ratio):
            slow[watch.change.is_over].setdefault(series.communicator, (series, watch))
    return [_slow_collectives(list(own.values()), numbers, trust) for own in slow.values() if own]


def _lasting(watch: ChangePointDetector, change: Change) -> float:
    return watch.excess_in(change.since_round, change.last_round(INSPECTOR.look))


def _slow_collectives(
    slow: list[tuple[CollectiveSeries, ChangePointDetector]], numbers: Numbers, trust: float
) -> Finding:
    series, watch = min(slow, key=lambda pair: pair[1].change.since_s if pair[1].change is not None else math.inf)
    assert watch.change is not None
    hosts = sorted({host for one, _ in slow for host, _ in one.locations.values()})
    is_host = len(hosts) == 1 and not series.unrecorded
    places = [Place(kind="host", hosts=(hosts[0],)) if is_host else Place(kind="communicator")]
    if series.unrecorded:  # the last rank may be one without records
        gone = sorted(numbers.of(series.communicator, rank) for rank in range(series.num_ranks) if rank not in
                      series.locations) if series.unrecorded <= 64 else []  # fmt: skip
        places.append(Place(kind="rank", ranks=tuple(gone)) if gone else Place(kind="job"))
    ratio = math.exp(_lasting(watch, watch.change))
    return Finding(
        kind="communication slow",
        places=tuple(places),
        since_s=watch.change.since_s, since_round=watch.change.since_round, seen_round=watch.change.seen_round,
        until_s=watch.change.until_s,
        evidence=Evidence(
            "slow_nccl", times_longer=round(ratio, 2), usual_s=round(watch.usual_s, 6),
            communicators=[one.communicator for one, _ in slow][:16], kind=series.kind, hosts=hosts[:64],
        ),
        text=f"{series.kind} of communicator {series.communicator} takes {ratio:.1f} times as long as it did, also for "
        "the rank that comes last" + (f"; so do {len(slow) - 1} other communicators'" if len(slow) > 1 else "")
        + ". The times of collectives do not tell by which wire.",
        confidence=(0.6 if len(places) == 1 else 0.4) * trust,
        remedy="find the wire first: a collective is as slow as its slowest one",
        probe=_TEST if len(places) == 1 else f"{_TEST}; and read the files of all ranks",
    )  # fmt: skip


@dataclass(slots=True)
class _Links:
    """Durations of messages by link, in the rank numbers of one communicator."""

    communicator: str
    watches: dict[Cell, ChangePointDetector] = field(default_factory=lambda: defaultdict(ChangePointDetector))
    times: dict[tuple[Cell, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    host_of: dict[int, str] = field(default_factory=dict)
    began_s: float = math.inf


def find_slow_messages(timings: Iterable[Timing], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return the places whose messages take longer at both ends than before, or than others.

    A message's own time is the shorter one of its two ends': the other end has waited.
    """
    found = []
    for links in _links_of(timings, numbers):
        changed = {cell: watch.change for cell, watch in links.watches.items() if watch.change is not None}
        lasting = {cell: change for cell, change in changed.items() if not change.is_over}
        found += _longer(links, lasting, trust) or _longer(links, changed, trust) or _than_peers(links, trust)
    return found


def _links_of(timings: Iterable[Timing], numbers: Numbers) -> list[_Links]:
    own: dict[tuple[str, int], dict[int, Timing]] = defaultdict(dict)
    for one in timings:
        if one.kind in ("Send", "Recv"):
            own[one.communicator, one.rank].setdefault(one.sequence, one)
    made: dict[str, _Links] = {}
    ends: dict[tuple[str, int, int, str], list[Timing]] = defaultdict(list)
    for (name, rank), messages in sorted(own.items()):
        links = made.setdefault(name, _Links(name))
        links.host_of[numbers.of(name, rank)] = next(iter(messages.values())).host
        for one in without_gap(messages):
            way = (rank, one.peer) if one.kind == "Send" else (one.peer, rank)
            ends[name, *way, one.kind].append(one)
    for (name, source, destination, kind), sent in sorted(ends.items()):
        received = ends.get((name, source, destination, "Recv"), [])
        if kind == "Send" and source != destination:
            cell = numbers.of(name, source), numbers.of(name, destination)
            _take(made[name], cell, zip(sent, received, strict=False))
    return list(made.values())


def without_gap(messages: Mapping[int, Timing]) -> Iterator[Timing]:
    """Yield a rank's messages up to the first gap in their numbers.

    The Inspector counts a rank's messages to all peers together, from 1, so both ends of one have other numbers: the
    n-th one to a peer is the n-th that this peer receives. After a gap nobody knows to whom those went that it lacks.

    Example:
        >>> list(without_gap({})), list(without_gap({2: None}))
        ([], [])
    """
    number = 1
    while number in messages:
        yield messages[number]
        number += 1


def _take(links: _Links, cell: Cell, pairs: Iterable[tuple[Timing, Timing]]) -> None:
    for number, (sent, received) in enumerate(pairs):
        if sent.num_bytes != received.num_bytes:
            return  # from here on the two ends count different messages
        if is_usable(sent) and is_usable(received):
            time_s, classed = min(sent.time_s, received.time_s), size_class(sent.num_bytes)
            links.watches[cell].add(number, sent.at_s, time_s, size_class=2 * classed)
            links.times[cell, classed].append(time_s)
            links.began_s = min(links.began_s, sent.at_s)


def _longer(links: _Links, changed: Mapping[Cell, Change], trust: float) -> list[Finding]:
    if not changed:
        return []
    excess = dict.fromkeys(links.watches, 0.0)
    for cell, change in changed.items():
        own = _lasting(links.watches[cell], change)
        excess[cell] = own if own >= math.log(CUSUM.min_ratio) else 0.0
    explained = DelayMatrix(excess, links.host_of).explain()
    if explained is None:
        return []
    first = min((change for cell, change in changed.items() if cell in explained.cells), key=lambda one: one.since_s)
    ratio, usual_s = math.exp(explained.excess), median([links.watches[cell].usual_s for cell in explained.cells])
    named = joined(explained.places)
    return [Finding(
        kind="communication slow", places=explained.places,
        since_s=first.since_s, since_round=first.since_round, seen_round=first.seen_round, until_s=first.until_s,
        evidence=Evidence(
            "slow_nccl_message", times_longer=round(ratio, 2), usual_s=round(usual_s, 6),
            links=link_names(explained.cells), hosts=_hosts(links, explained), communicator=links.communicator,
        ),
        text=f"Messages over {named} take {ratio:.1f} times as long as they did, at the end that waits less.",
        confidence=(min(0.8, 0.5 + 0.3 * explained.fit) if len(explained.places) == 1 else 0.45) * trust,
        remedy="look at the interface, cable and other traffic there",
        probe=probe_for(explained.places),
    )]  # fmt: skip


def _than_peers(links: _Links, trust: float) -> list[Finding]:
    """Return links that were slow from the start: three times the median of similar ones, or more."""
    groups: dict[tuple[bool, int], dict[Cell, float]] = defaultdict(dict)
    for (cell, classed), times in links.times.items():
        if len(times) >= CUSUM.min_history:
            groups[links.host_of[cell[0]] == links.host_of[cell[1]], classed][cell] = median(times)
    found: dict[tuple[Place, ...], Finding] = {}
    for _, explained, middle_s in slower_than_peers(groups, links.host_of, ratio=INSPECTOR.peers_ratio):
        ratio, named = math.exp(explained.excess), joined(explained.places)
        found.setdefault(explained.places, Finding(
            kind="communication slow", places=explained.places, since_s=links.began_s, since_round=0,
            evidence=Evidence(
                "nccl_peers", times_longer_than_peers=round(ratio, 2), peers_s=round(middle_s, 6),
                links=link_names(explained.cells), hosts=_hosts(links, explained), communicator=links.communicator,
            ),
            text=f"Messages over {named} have taken {ratio:.1f} times as long as those of others since the files "
            "begin; it may be the rate of this wire.",
            confidence=0.5 * trust,
            remedy="measure this wire alone",
            probe=probe_for(explained.places) or _TEST,
        ))  # fmt: skip
    return list(found.values())


def _hosts(links: _Links, explained: Explanation) -> list[str]:
    return sorted({links.host_of[rank] for cell in explained.cells for rank in cell})[:16]


def find_gaps(all_series: Sequence[CollectiveSeries], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return ranks whose files end long before the others', and ranks without a file if most have one.

    Neither says that a rank did not come: what it had not come to cannot end, and so is in nobody's file.
    """
    found = {finding.places: finding for series in all_series for finding in _ended(series, numbers, trust)}
    absent = [series for series in all_series if series.unrecorded and 2 * len(series.locations) >= series.num_ranks]
    if absent:
        series = max(absent, key=lambda one: (one.num_ranks, one.communicator))
        found.setdefault((), _absent(series, numbers, trust))
    return list(found.values())


def _ended(series: CollectiveSeries, numbers: Numbers, trust: float) -> list[Finding]:
    own: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for sequence, timings in series.operations:
        for rank, one in timings.items():
            own[rank].append((sequence, one.at_s))
    newest = series.operations[-1][0]
    early = [rank for rank, rows in own.items() if newest - rows[-1][0] >= INSPECTOR.min_left]
    ended = {rank: left_s for rank in early if (left_s := _left_s(rank, own)) is not None}
    found = []
    for place, ranks in _places(series, sorted(ended), numbers):
        last = min(own[rank][-1] for rank in ranks)
        left_s = max(ended[rank] for rank in ranks)
        found.append(Finding(
            kind="no records", places=(place,), since_s=last[1], since_round=last[0],
            evidence=Evidence(
                "ended_file", communicator=series.communicator, last_operation=last[0],
                ranks=[numbers.of(series.communicator, rank) for rank in ranks][:INSPECTOR.max_named],
                others_last=max(rows[-1][0] for rows in own.values()), others_went_on_s=round(left_s, 3),
                locations=[": process ".join(map(str, series.locations[rank])) for rank in ranks][:16],
            ),
            text=f"The file of {place} ends with {series.kind} {last[0]} of communicator {series.communicator}, and "
            f"others have written for {left_s:.0f} s more. They could not have ended these without it, so it took "
            "part: its disk is full, the Inspector's thread has ended, or its file was copied sooner.",
            confidence=0.5 * trust,
            remedy="copy all files anew; look for room on its disk and for its process",
        ))  # fmt: skip
    return found


def _left_s(rank: int, own: Mapping[int, Sequence[tuple[int, float]]]) -> float | None:
    """Return the seconds that others went on after a rank's last operation; None if they did not."""
    rows = own[rank]
    after = [one[bisect_left(one, (rows[-1][0], -math.inf)) :] for other, one in own.items() if other != rank]
    went_on = [one[-1][1] - one[0][1] if one else 0.0 for one in after]
    dumps_s = max((late_s - early_s for (_, early_s), (_, late_s) in pairwise(rows)), default=0.0)
    long_s, num_more = median(went_on), median([float(len(one)) for one in after])
    is_over = num_more > INSPECTOR.min_left and long_s >= max(INSPECTOR.min_left_s, INSPECTOR.dumps * dumps_s)
    return long_s if is_over else None


def _places(series: CollectiveSeries, ranks: Sequence[int], numbers: Numbers) -> Iterable[tuple[Place, list[int]]]:
    """Yield hosts whose ranks are all among some, and single ranks else."""
    on: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        on[series.locations[rank][0]].append(rank)
    for host, gone in sorted(on.items()):
        everyone = [rank for rank, location in series.locations.items() if location[0] == host]
        if len(everyone) == len(gone) > 1:
            yield Place(kind="host", hosts=(host,)), gone
        else:
            yield from ((Place(kind="rank", ranks=(numbers.of(series.communicator, rank),)), [rank]) for rank in gone)


def _absent(series: CollectiveSeries, numbers: Numbers, trust: float) -> Finding:
    gone = [rank for rank in range(series.num_ranks) if rank not in series.locations][: INSPECTOR.max_named]
    first: Timing = next(iter(series.operations[0][1].values()))
    place = Place(kind="rank", ranks=tuple(numbers.of(series.communicator, rank) for rank in gone))
    return Finding(
        kind="no records", places=(place,), since_s=first.at_s, since_round=series.operations[0][0],
        evidence=Evidence(
            "missing_file", communicator=series.communicator, ranks=list(place.ranks), num_ranks=series.num_ranks,
            with_files=len(series.locations),
        ),
        text=f"Of {series.num_ranks} ranks of communicator {series.communicator} {series.unrecorded} wrote nothing "
        f"that was read ({place}): their files were not given, or the Inspector is not on there.",
        confidence=0.3 * trust,
        remedy="read the files of all ranks: without them none of these can be named as the late one",
    )  # fmt: skip
