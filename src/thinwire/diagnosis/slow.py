"""Slow communication and slow work: what takes longer than it used to, or than its peers, and where.

A message's own time begins when both of its ends are ready, so that a late rank is not taken for a slow wire. A
rank's own time is its work between two exchanges: a rank that is slow itself waits least for the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from thinwire.diagnosis.changes import LEAST_HISTORY, LEAST_RATIO, Change, Company, Watch, median
from thinwire.diagnosis.delay_matrix import Cell, DelayMatrix, Explanation, probe_for
from thinwire.diagnosis.ends import End, watch_ends
from thinwire.diagnosis.findings import Finding, Place
from thinwire.diagnosis.sharing import alone_s
from thinwire.diagnosis.timeline import Job, Message

PEERS_RATIO = 3.0
_LEAST_SAMPLES = 2
_LEAST_SHARE = 0.1
_MOST_ERROR = 8.0
_LOOK_ROUNDS = 24
_MOST_FAULTS = 6
_LEAST_LINKS = 4
# A link that shows less than this part of what another place explains is none beside it.
_OWN = 0.5
_LEAST_HOSTS = 3
_DEVIATIONS = 3.0
_QUARTILE = 0.6745  # of a normal distribution, in standard deviations


@dataclass(slots=True)
class LinkTimes:
    """What is known of each link.

    Attributes:
        watches: Of each (source, destination).
        alone: The same of what its messages would have taken alone: what grows in one only is no fault of the wire.
            A link that is not here is judged by its own times.
        ends: All wires of a rank together.
        retries: Sum of each.
        times: The first seconds of each, by size class.
    """

    watches: dict[Cell, Watch] = field(default_factory=dict)
    alone: dict[Cell, Watch] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    retries: dict[Cell, int] = field(default_factory=dict)
    times: dict[tuple[Cell, int], list[float]] = field(default_factory=dict)


def size_class(num_bytes: int) -> int:
    """Return the power of two nearest to a size: only messages of about one size are compared.

    Example:
        >>> size_class(1_000_000), size_class(1_048_576), size_class(0)
        (20, 20, 0)
    """
    return round(math.log2(num_bytes)) if num_bytes > 0 else 0


def link_times(job: Job) -> LinkTimes:
    """Watch every link, one value a round: the middle of its messages of the class with the most bytes."""
    found = LinkTimes()
    shares, classes = alone_s(job, job.messages), dict[int, int]()
    plain, shared = Company(), Company()
    for cell, round, classed, message in _samples(job):
        classes[round] = max(classed, classes.get(round, 0))
        time_s = max(message.transfer_s or 0.0, 0.0)
        if cell not in found.watches:
            found.watches[cell], found.alone[cell] = Watch(company=plain), Watch(company=shared)
        watch, alone = found.watches[cell], found.alone[cell]
        at_s = message.received_done_s or 0.0
        if job.clock_of.get(cell[0]) == job.clock_of.get(cell[1]):
            watch.add(round, at_s, time_s, size_class=2 * classed)
            alone.add(round, at_s, shares[id(message)], size_class=2 * classed)
        else:
            # a time from the sender's word to the receiver's holds the error of both clocks, one from the receiver's
            # own word holds none: where another end is late than before, it changes without any change of the link
            is_late = (message.begin_s or 0.0) > (message.received_posted_s or 0.0)
            error_s = job.error_s.get(cell[0], 0.0) + job.error_s.get(cell[1], 0.0)
            if error_s > _MOST_ERROR * time_s:
                continue  # not even who was late is known
            watch.add(round, at_s, time_s, size_class=2 * classed + is_late, margin_s=error_s)
            alone.add(round, at_s, shares[id(message)], size_class=2 * classed + is_late, margin_s=error_s)
        times = found.times.setdefault((cell, classed), [])
        if len(times) < 4 * LEAST_HISTORY:
            times.append(time_s)
    for message in job.messages:
        if message.retries:
            cell = (message.source, message.destination)
            found.retries[cell] = found.retries.get(cell, 0) + message.retries
    found.ends = watch_ends(found.alone, classes)
    return found


def _samples(job: Job) -> list[tuple[Cell, int, int, Message]]:
    """Return cell, round, size class and the middle message, in the order of rounds."""
    rounds: dict[tuple[int, int, int], dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for message in job.messages:
        if message.transfer_s is not None and not {message.source, message.destination} & job.unsteady:
            key = (message.operation, message.source, message.destination)
            rounds[key][size_class(message.num_bytes)].append(message)
    told = _telling_sizes(rounds)
    found = []
    for (round, source, destination), classes in sorted(rounds.items()):
        classed = max(classes, key=lambda one: (len(classes[one]) * 2.0**one, one))
        if classed not in told[source, destination]:
            continue
        ordered = sorted(classes[classed], key=lambda message: message.transfer_s or 0.0)
        found.append(((source, destination), round, classed, ordered[len(ordered) // 2]))
    return found


def _telling_sizes(rounds: Mapping[tuple[int, int, int], Mapping[int, list[Message]]]) -> dict[Cell, set[int]]:
    """Return the size classes of each link that carry a tenth of its bytes: others tell of what they wait behind."""
    sums: dict[Cell, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (_, source, destination), classes in rounds.items():
        for classed, messages in classes.items():
            sums[source, destination][classed] += len(messages) * 2.0**classed
    return {
        cell: {classed for classed, own in classes.items() if own >= _LEAST_SHARE * sum(classes.values())}
        for cell, classes in sums.items()
    }


def find_slow_links(job: Job, times: LinkTimes) -> list[Finding]:
    """Return what explains the links that became slower than they were, and those slower than all their peers.

    What is over comes after what lasts.
    """
    lasting, cells = _slow_places(job, times, is_over=False)
    over, _ = _slow_places(job, times, is_over=True, without=cells)
    return lasting + over or _slower_than_peers(job, times)


def _slow_places(
    job: Job, times: LinkTimes, *, is_over: bool, without: Collection[Cell] = frozenset()
) -> tuple[list[Finding], set[Cell]]:
    """Return findings, and the cells that they explain."""
    found: list[Finding] = []
    left = {cell: watch for cell, watch in times.watches.items() if cell not in without}
    told: set[Cell] = set()
    refused: set[frozenset[Cell]] = set()
    while len(found) < _MOST_FAULTS:
        alarmed = {
            frozenset([cell]): change
            for cell, watch in left.items()
            if (change := _change_of(watch, times.alone.get(cell, watch))) is not None and change.is_over == is_over
        }
        for end in times.ends:
            own = end.cells & set(left)
            if (change := end.watch.change) is not None and change.is_over == is_over and len(own) > 1:
                alarmed.setdefault(own, change)
        alarmed = {cells: change for cells, change in alarmed.items() if cells not in refused}
        if not alarmed:
            break
        first = min(alarmed, key=lambda cells: (alarmed[cells].seen_round, sorted(cells)))
        change = alarmed[first]
        last = max(change.since_round + _LOOK_ROUNDS, 2 * change.seen_round - change.since_round)
        last = min(last, change.until_round - 1) if change.is_over else last
        matrix = _matrix(left, times.alone, job.host_of, change.since_round, last)
        least = math.log(LEAST_RATIO)
        bare = {cell: excess if excess >= least / 2 else 0.0 for cell, excess in matrix.items()}
        explained = DelayMatrix(bare, job.host_of).explain()
        is_slow = explained is not None and min(explained.excess, median([bare.get(c, 0.0) for c in first])) >= least
        if explained is None or not is_slow or not _stands_out(matrix, explained, alarmed):
            refused.add(first)
            continue
        cells = _claimed(explained, matrix, first)
        one = _slow_link(job, times, explained, change.since_round, change.since_s, change.seen_round)
        found.append(replace(one, until_s=change.until_s) if is_over else one)
        told |= cells
        left = {cell: watch for cell, watch in left.items() if cell not in cells}
    return found, told


def _claimed(explained: Explanation, matrix: Mapping[Cell, float], first: frozenset[Cell]) -> frozenset[Cell]:
    """Return the cells that a place explains: its own, those that follow it, and the alarm's if it is little beside."""
    is_little = len(first) == 1 and matrix.get(min(first), 0.0) < _OWN * explained.excess
    return explained.cells | explained.following(matrix) | (first if is_little else frozenset())


def _change_of(watch: Watch, alone: Watch) -> Change | None:
    """Return the change of a link: an alarm of either of its times, which is over as soon as one is as before.

    What a message would have taken alone varies less where many share an access, and its own time where few do.
    Whether both became longer is told by their medians, see `_matrix`.
    """
    changes = [one.change for one in (watch, alone) if one.change is not None]
    over = [change for change in changes if change.is_over]
    lasting = [change for change in changes if not change.is_over]
    fresh = [change for change in lasting if all(change.since_round > past.until_round for past in over)]
    # of two that last, the later one began with the fault, and not with noise before it
    return max(fresh or over, key=lambda one: one.since_round, default=None)


def _matrix(
    watches: Mapping[Cell, Watch], alone: Mapping[Cell, Watch], host_of: Mapping[int, str], first: int, last: int
) -> dict[Cell, float]:
    """Return the logarithm by which each link takes longer, less what even the links with least show."""
    found = {}
    for cell, watch in watches.items():
        values = [excess for number, _, excess in watch.excess if first <= number <= last]
        if len(values) >= _LEAST_SAMPLES:
            found[cell] = min(median(values), alone.get(cell, watch).excess_in(first, last))
    # a busy machine slows all wires; one slow host of three leaves a quarter of them as they were, one of two none
    has_others = len(found) >= _LEAST_LINKS and len({host_of[rank] for cell in found for rank in cell}) >= _LEAST_HOSTS
    common = max(0.0, sorted(found.values())[len(found) // 4]) if has_others else 0.0
    return {cell: excess - common for cell, excess in found.items()}


def _stands_out(matrix: Mapping[Cell, float], explained: Explanation, alarmed: Collection[frozenset[Cell]]) -> bool:
    """Return whether links take longer by more than the others differ among each other."""
    # what waits for acknowledgements is neither at fault nor as usual
    beside = explained.cells | explained.following(matrix)
    # and who has an alarm of its own and is half as slow has another fault
    alone = {min(cells) for cells in alarmed if len(cells) == 1}
    beside |= {cell for cell in alone if matrix.get(cell, 0.0) >= explained.excess / 2}
    others = sorted(excess for cell, excess in matrix.items() if cell not in beside)
    if len(others) < _LEAST_LINKS:
        return True
    # the lower half tells how links differ that have no fault, where others have one too
    middle = median(others)
    deviation = (middle - others[len(others) // 4]) / _QUARTILE
    return explained.excess >= middle + _DEVIATIONS * deviation / math.sqrt(len(explained.cells))


def _slow_link(
    job: Job, times: LinkTimes, explained: Explanation, since_round: int, since_s: float, seen_round: int
) -> Finding:
    usual_s = median([times.watches[cell].usual_s for cell in explained.cells])
    ratio, named = math.exp(explained.excess), " or ".join(map(str, explained.places))
    retries = sum(times.retries.get(cell, 0) for cell in explained.cells)
    is_one = len(explained.places) == 1
    return Finding(
        kind="communication slow",
        places=explained.places,
        since_s=since_s, since_round=since_round, seen_round=seen_round,
        evidence={
            "times_longer": round(ratio, 2), "usual_s": round(usual_s, 6), "now_s": round(usual_s * ratio, 6),
            "links": [f"{source} -> {destination}" for source, destination in sorted(explained.cells)][:16],
            "explained": round(explained.fit, 3), "retries": retries,
            "clock_error_s": round(job.alignment.error_s, 6),
        },
        text=f"Messages over {named} take {ratio:.1f} times as long as they did, counted from when both ends are "
        "ready.",
        confidence=min(0.97, (0.5 + 0.3 * explained.fit + 0.2 * min(1.0, 2 * explained.lead)) if is_one else 0.5)
        * job.trust,
        remedy="look at the interface, cable and other traffic there; until then send less over it: larger "
        "sync_interval, "
        "a smaller codec, other partners",
        probe=probe_for(explained.places),
    )  # fmt: skip


def _slower_than_peers(job: Job, times: LinkTimes) -> list[Finding]:
    """Return links that were slow from the start: three times as long as the middle of those like them, or more."""
    groups: dict[tuple[bool, int], dict[Cell, float]] = defaultdict(dict)
    quartiles: dict[tuple[bool, int], dict[Cell, tuple[float, float]]] = defaultdict(dict)
    for (cell, classed), values in times.times.items():
        if len(values) >= LEAST_HISTORY:
            is_near = job.host_of[cell[0]] == job.host_of[cell[1]]
            ordered = sorted(values)
            groups[is_near, classed][cell] = median(ordered)
            quartiles[is_near, classed][cell] = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    found = []
    for (is_near, classed), cells in sorted(groups.items()):
        middle = median(list(cells.values()))
        ratios = {cell: math.log(max(time_s, 1e-6) / max(middle, 1e-6)) for cell, time_s in cells.items()}
        if is_near or len(cells) < 4 or max(ratios.values()) < math.log(PEERS_RATIO):
            continue
        bare = {cell: ratio if ratio >= math.log(PEERS_RATIO) / 2 else 0.0 for cell, ratio in ratios.items()}
        explained = DelayMatrix(bare, job.host_of).explain()
        if explained is None or explained.excess < math.log(PEERS_RATIO):
            continue
        # small messages on busy machines take ten times as long or none: the middle of a dozen says little
        own = quartiles[is_near, classed]
        others = [own[cell][1] for cell in cells if cell not in explained.cells]
        if others and median([own[cell][0] for cell in explained.cells]) > median(others):
            found.append(_always_slow(job, explained, middle))
    return found


def _always_slow(job: Job, explained: Explanation, middle_s: float) -> Finding:
    ratio, named = math.exp(explained.excess), " or ".join(map(str, explained.places))
    return Finding(
        kind="communication slow", places=explained.places, since_s=min((message.sent_posted_s or 0.0 for message in
        job.messages), default=0.0), since_round=0, seen_round=-1, evidence={"times_longer_than_peers": round(ratio,
        2), "peers_s": round(middle_s, 6),
                  "clock_error_s": round(job.alignment.error_s, 6)},
        text=f"Messages over {named} have taken {ratio:.1f} times as long as those between other hosts since the "
        "records begin; "
        "it may be the rate of this wire.",
        confidence=0.5 * job.trust,
        remedy="measure this wire with thinwire probe; if it is its own rate, let thinwire plan know",
        probe=probe_for(explained.places),
    )  # fmt: skip


def find_slow_operations(job: Job) -> list[Finding]:
    """Return communicators whose operations take longer, where nothing was recorded by peer.

    The rank that waited least came last, and what it waited is the operation's own time, on one clock.
    """
    seen = {message.communicator for message in job.messages}
    watches: dict[str, Watch] = defaultdict(Watch)
    classes: dict[tuple[str, str, int], int] = {}
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        waits = [op.done_s - op.posted_s for op in own.values() if op.done_s is not None]
        if communicator in seen or len(waits) < len(own) or len(own) < 2:
            continue
        first = next(iter(own.values()))
        classed = classes.setdefault((communicator, first.kind, size_class(first.count)), len(classes))
        watches[communicator].add(sequence, first.posted_s, max(0.0, min(waits)), size_class=classed)
    slow = [(name, watch) for name, watch in sorted(watches.items()) if watch.change is not None]
    return [_slow_operation(job, name, watch) for name, watch in slow if _lasting(watch) >= math.log(LEAST_RATIO)]


def _lasting(watch: Watch) -> float:
    assert watch.change is not None
    last = watch.change.seen_round + _LOOK_ROUNDS
    return watch.excess_in(watch.change.since_round, watch.change.until_round - 1 if watch.change.is_over else last)


def _slow_operation(job: Job, communicator: str, watch: Watch) -> Finding:
    assert watch.change is not None
    ratio = math.exp(_lasting(watch))
    return Finding(
        kind="communication slow",
        places=(Place(kind="communicator"),),
        since_s=watch.change.since_s, since_round=watch.change.since_round, seen_round=watch.change.seen_round,
        until_s=watch.change.until_s,
        evidence={"communicator": communicator, "times_longer": round(ratio, 2), "usual_s": round(watch.usual_s, 6)},
        text=f"Operations of {communicator} take {ratio:.1f} times as long as they did, also for the rank that "
        "comes last; the "
        "records do not tell by which link.",
        confidence=0.6 * job.trust,
        remedy="find the link first",
        probe="exchange messages in pairs of ranks, or use exchanges that are recorded by peer",
    )  # fmt: skip
