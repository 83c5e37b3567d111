"""Operations and messages of NCCL that take longer on every rank, the one that comes last included: slow wires."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from thinwire.monitor.detect.change_points import LEAST_HISTORY, LEAST_RATIO, Change, Watch, median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, Explanation, probe_for
from thinwire.monitor.detect.link_history import size_class
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.series import Series, class_of, is_usable, shortest_s
from thinwire.monitor.nccl.values import Numbers, Timing

PEERS_RATIO = 3.0
_LOOK = 24
_LEAST_PEERS = 4
_TEST = "run `thinwire diagnose test` on these hosts while the job stands: it measures each wire alone"


def find_slow_collectives(all_series: Iterable[Series], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return that operations take longer for all ranks alike: one finding for those that last, one for what is over.

    Times of collectives do not tell which wire it is.
    """
    slow: dict[bool, dict[str, tuple[Series, Watch]]] = {False: {}, True: {}}
    for series in all_series:
        watch = Watch()
        for sequence, own in series.operations:
            at_s = median([one.at_s for one in own.values()])
            watch.add(sequence, at_s, shortest_s(own), size_class=class_of(own))
        if watch.change is not None and _lasting(watch, watch.change) >= math.log(LEAST_RATIO):
            slow[watch.change.is_over].setdefault(series.communicator, (series, watch))
    return [_slow_collectives(list(own.values()), numbers, trust) for own in slow.values() if own]


def _lasting(watch: Watch, change: Change) -> float:
    return watch.excess_in(change.since_round, change.until_round - 1 if change.is_over else change.seen_round + _LOOK)


def _slow_collectives(slow: list[tuple[Series, Watch]], numbers: Numbers, trust: float) -> Finding:
    series, watch = min(slow, key=lambda pair: pair[1].change.since_s if pair[1].change is not None else math.inf)
    assert watch.change is not None
    hosts = sorted({host for one, _ in slow for host, _ in one.seats.values()})
    is_host = len(hosts) == 1 and not series.unrecorded
    places = [Place(kind="host", hosts=(hosts[0],)) if is_host else Place(kind="communicator")]
    if series.unrecorded:  # who comes last may be a rank that wrote nothing
        gone = sorted(numbers.of(series.communicator, rank) for rank in range(series.num_ranks) if rank not in
                      series.seats) if series.unrecorded <= 64 else []  # fmt: skip
        places.append(Place(kind="rank", ranks=tuple(gone)) if gone else Place(kind="job"))
    ratio = math.exp(_lasting(watch, watch.change))
    return Finding(
        kind="communication slow",
        places=tuple(places),
        since_s=watch.change.since_s, since_round=watch.change.since_round, seen_round=watch.change.seen_round,
        until_s=watch.change.until_s,
        evidence={
            "times_longer": round(ratio, 2), "usual_s": round(watch.usual_s, 6),
            "communicators": [one.communicator for one, _ in slow][:16], "kind": series.kind, "hosts": hosts[:64],
        },
        text=f"{series.kind} of communicator {series.communicator} takes {ratio:.1f} times as long as it did, also for "
        "the rank that comes last" + (f"; so do {len(slow) - 1} other communicators'" if len(slow) > 1 else "")
        + ". The times of collectives do not tell by which wire.",
        confidence=(0.6 if len(places) == 1 else 0.4) * trust,
        remedy="find the wire first: a collective is as slow as its slowest one",
        probe=_TEST if len(places) == 1 else f"{_TEST}; and read the files of all ranks",
    )  # fmt: skip


@dataclass(slots=True)
class _Links:
    """Times of messages by link, in the numbers of one communicator."""

    communicator: str
    watches: dict[Cell, Watch] = field(default_factory=lambda: defaultdict(Watch))
    times: dict[tuple[Cell, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    host_of: dict[int, str] = field(default_factory=dict)
    began_s: float = math.inf


def find_slow_messages(timings: Iterable[Timing], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return the links, senders, receivers or hosts whose messages take longer at both ends than before or than others.

    A message's own time is the shorter one of its two ends': the other end has waited.
    """
    found = []
    for links in _links_of(timings, numbers):
        changed = {cell: watch.change for cell, watch in links.watches.items() if watch.change is not None}
        lasting = {cell: change for cell, change in changed.items() if not change.is_over}
        told = _longer(links, lasting, trust) or _longer(links, changed, trust) or _than_peers(links, trust)
        found += told
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
    """Yield a rank's messages from its first one on, up to where the first is missing.

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
            return  # from here on they are not the same messages
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
        excess[cell] = own if own >= math.log(LEAST_RATIO) else 0.0
    explained = DelayMatrix(excess, links.host_of).explain()
    if explained is None:
        return []
    first = min((change for cell, change in changed.items() if cell in explained.cells), key=lambda one: one.since_s)
    ratio, usual_s = math.exp(explained.excess), median([links.watches[cell].usual_s for cell in explained.cells])
    named = " or ".join(map(str, explained.places))
    return [Finding(
        kind="communication slow", places=explained.places,
        since_s=first.since_s, since_round=first.since_round, seen_round=first.seen_round, until_s=first.until_s,
        evidence={"times_longer": round(ratio, 2), "usual_s": round(usual_s, 6), **_about(links, explained)},
        text=f"Messages over {named} take {ratio:.1f} times as long as they did, at the end that waits less.",
        confidence=(min(0.8, 0.5 + 0.3 * explained.fit) if len(explained.places) == 1 else 0.45) * trust,
        remedy="look at the interface, cable and other traffic there",
        probe=probe_for(explained.places),
    )]  # fmt: skip


def _than_peers(links: _Links, trust: float) -> list[Finding]:
    """Return links that were slow from the start: three times the middle of those like them, or more."""
    groups: dict[tuple[bool, int], dict[Cell, float]] = defaultdict(dict)
    for (cell, classed), times in links.times.items():
        if len(times) >= LEAST_HISTORY:
            groups[links.host_of[cell[0]] == links.host_of[cell[1]], classed][cell] = median(times)
    found: dict[tuple[Place, ...], Finding] = {}
    for _, cells in sorted(groups.items()):
        middle_s = median(list(cells.values()))
        excess = {cell: max(0.0, math.log(time_s / middle_s)) for cell, time_s in cells.items()}
        bare = {cell: one if one >= math.log(PEERS_RATIO) / 2 else 0.0 for cell, one in excess.items()}
        explained = DelayMatrix(bare, links.host_of).explain() if len(cells) >= _LEAST_PEERS else None
        if explained is None or explained.excess < math.log(PEERS_RATIO):
            continue
        ratio, named = math.exp(explained.excess), " or ".join(map(str, explained.places))
        found.setdefault(explained.places, Finding(
            kind="communication slow", places=explained.places, since_s=links.began_s, since_round=0,
            evidence={"times_longer_than_peers": round(ratio, 2), "peers_s": round(middle_s, 6),
                      **_about(links, explained)},
            text=f"Messages over {named} have taken {ratio:.1f} times as long as those of others since the files "
            "begin; it may be the rate of this wire.",
            confidence=0.5 * trust,
            remedy="measure this wire alone",
            probe=probe_for(explained.places) or _TEST,
        ))  # fmt: skip
    return list(found.values())


def _about(links: _Links, explained: Explanation) -> dict[str, object]:
    cells = sorted(explained.cells)
    return {
        "links": [f"{source} -> {destination}" for source, destination in cells][:16],
        "hosts": sorted({links.host_of[rank] for cell in cells for rank in cell})[:16],
        "communicator": links.communicator,
    }
