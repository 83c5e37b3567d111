"""History of each link, built from all records at once or incrementally while a job runs.

A running job is diagnosed every half second. Its links' history is kept here, so that each message is read once, and
the history reaches further back than the records that are kept. A message is taken in once it is settled: all ranks
have written up to its time, and the messages that crossed the same access have arrived.

Single messages on busy machines take half to twice their usual time. So the links of an endpoint are also averaged:
their mean over one round says more than one link. The median of all other links is subtracted, since load that slows
everything is no endpoint fault.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from thinwire.monitor.detect.change_points import CUSUM, Change, ChangePointDetector, PeerGroup
from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.timeline import Job, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHistoryConfig:
    """Constants of the history of links and endpoints."""

    min_links: int = 2  # links of an endpoint: one alone cannot be told from it
    many_links: int = 1000  # above this the values before the baselines are left out, so that an update stays short
    # of endpoints: a small lasting fault must not become the baseline before its alarm (LOG 2026-11-23)
    baseline_rounds: int = 256
    min_share: float = 0.1  # of a link's bytes that messages of one size carry; others wait behind large ones
    max_error: float = 8.0  # clock error over duration above which a message says nothing
    lost_s: float = 10.0  # a message in flight for longer does not share its access any more
    later_rounds: int = 3  # later rounds of some links after which a round is complete
    recent_rounds: int = 8  # a link that is further behind takes no part
    max_rounds: int = 1024  # rounds whose size class is kept
    ripe: int = 8  # values of a link beside its history until endpoints are updated


LINKS = LinkHistoryConfig()
ENDPOINT_CUSUM = replace(CUSUM, max_history=LINKS.baseline_rounds)

_Access = tuple[str, str]


class _Shares:
    """Share of one access and direction that one message has: the integral over time of 1 / messages in flight."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        steps: dict[float, int] = defaultdict(int)
        for begin_s, end_s in stretches:
            steps[begin_s] += 1
            steps[end_s] -= 1
        self._times: list[float] = sorted(steps)
        self._counts: list[int] = []
        self._sums: list[float] = []
        count, total, last_s = 0, 0.0, 0.0
        for at_s in self._times:
            total += (at_s - last_s) / max(1, count)
            count += steps[at_s]
            self._counts.append(count)
            self._sums.append(total)
            last_s = at_s

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the seconds of undivided access that one message had from begin to end."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        place = bisect_right(self._times, at_s) - 1
        return self._sums[place] + (at_s - self._times[place]) / max(1, self._counts[place])


def alone_s(job: Job, messages: Iterable[Message]) -> dict[int, float]:
    """Return the seconds that each message would have taken without others on its accesses, by `id` of the message.

    Messages share the access of a host while they overlap, so their durations change with the order of the replicas.
    Messages without both ends' times are left out; one that has not arrived occupies its accesses until now.

    Example:
        >>> job = Job(host_of={0: "a", 1: "b", 2: "c"})
        >>> def sent(to, done_s):
        ...     return Message(0, to, "w", 0, 0, 9, sent_posted_s=0.0, received_posted_s=0.0, received_done_s=done_s)
        >>> both = [sent(1, 2.0), sent(2, 3.0)]
        >>> [alone_s(job, both)[id(message)] for message in both]  # they share what rank 0 can send for 2 s
        [1.0, 2.0]
    """
    own: dict[int, tuple[_Access, _Access, float, float]] = {}
    stretches: dict[_Access, list[tuple[float, float]]] = defaultdict(list)
    for message in messages:
        if (begin_s := message.begin_s) is None:
            continue
        done_s = job.now_s if message.received_done_s is None else message.received_done_s
        end_s = begin_s + max(0.0, done_s - begin_s)
        out, into = ("out", job.host_of[message.source]), ("in", job.host_of[message.destination])
        if message.received_done_s is not None:
            own[id(message)] = out, into, begin_s, end_s
        if out[1] != into[1]:
            stretches[out].append((begin_s, end_s))
            stretches[into].append((begin_s, end_s))
    shares = {access: _Shares(found) for access, found in stretches.items()}
    return {
        number: min(shares[access].between(begin_s, end_s) for access in (out, into))
        if out[1] != into[1]
        else end_s - begin_s
        for number, (out, into, begin_s, end_s) in own.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """All links of a rank in use, in one direction or both."""

    rank: int  # the rank
    cells: frozenset[Cell]  # its links
    watch: ChangePointDetector  # detector of their mean log ratio


_Round = dict[Cell, tuple[float, float]]  # time and log ratio
_Ordered = Sequence[tuple[int, _Round, list[float]]]  # number, links, and their log ratios in order


class EndpointHistory:
    """Endpoint detectors: of the links that each rank sends over, receives over, and both."""

    def __init__(self) -> None:
        self._endpoints: dict[tuple[int, frozenset[Cell]], Endpoint] = {}
        self._cells: frozenset[Cell] = frozenset()
        self._taken: dict[frozenset[Cell], int] = {}

    def take(
        self, watches: Mapping[Cell, ChangePointDetector], classes: Mapping[int, int], *, until: int | None = None
    ) -> list[Endpoint]:
        """Take new rounds in, and return all endpoints.

        Args:
            watches: Detectors of the links, without the share of other messages.
            classes: Size class of each round: small messages scatter more than large ones.
            until: Last round that is complete; None if all records are there.
        """
        if len(watches) != len(self._cells):
            self._cells = frozenset(watches)
            named = _endpoints_of(self._cells)
            self._endpoints = {
                (rank, own): self._endpoints.get((rank, own))
                or Endpoint(rank=rank, cells=own, watch=ChangePointDetector(ENDPOINT_CUSUM))
                for rank, own in named
            }
            self._taken = {cells: self._taken.get(cells, -1) for _, cells in named}
        since = min(self._taken.values(), default=-1)
        ordered = _rounds(watches, since=since, until=until)
        for (_, cells), end in self._endpoints.items():
            known = self._taken[cells]
            _feed(end, [one for one in ordered if one[0] > known] if known > since else ordered, classes)
        if ordered:
            self._taken = dict.fromkeys(self._taken, ordered[-1][0])
        return [*self._endpoints.values()]


def _endpoints_of(cells: Collection[Cell]) -> list[tuple[int, frozenset[Cell]]]:
    rows, columns = defaultdict[int, set[Cell]](set), defaultdict[int, set[Cell]](set)
    for cell in cells:
        rows[cell[0]].add(cell)
        columns[cell[1]].add(cell)
    return [
        (rank, own)
        for rank in sorted({rank for cell in cells for rank in cell})
        for own in map(frozenset, (rows[rank], columns[rank], rows[rank] | columns[rank]))
        if len(own) >= LINKS.min_links
    ]


def _rounds(watches: Mapping[Cell, ChangePointDetector], *, since: int, until: int | None) -> _Ordered:
    """Return the rounds after `since`, up to `until`."""
    rounds: dict[int, _Round] = defaultdict(dict)
    # an update must stay short: of very many links, the values before the baselines are left out
    is_whole = since < 0 and (until is None or len(watches) <= LINKS.many_links)
    for cell, watch in watches.items():
        for number, at_s, excess in watch.history() if is_whole else watch.since(since + 1):
            if until is None or number <= until:
                rounds[number][cell] = at_s, excess
    return [(number, own, sorted(excess for _, excess in own.values())) for number, own in sorted(rounds.items())]


def _feed(end: Endpoint, rounds: _Ordered, classes: Mapping[int, int]) -> None:
    for number, own, ordered in rounds:
        ours = [own[cell] for cell in end.cells if cell in own]
        if len(ours) < LINKS.min_links:
            continue
        common = max(0.0, _median_without(ordered, [excess for _, excess in ours]))
        mean = math.fsum(excess for _, excess in ours) / len(ours)
        at_s = max(at_s for at_s, _ in ours)
        end.watch.add(number, at_s, math.exp(mean - common), size_class=2 * classes.get(number, 0))


def _median_without(ordered: list[float], some: list[float]) -> float:
    """Return the median of ordered values without some of them, 0 if none is left; makes no new list."""
    left = len(ordered) - len(some)
    if not left:
        return 0.0
    gone: list[int] = []
    for value in sorted(some):
        place = bisect_left(ordered, value)
        gone.append(max(place, gone[-1] + 1) if gone else place)  # of equal values one after the other

    def at(index: int) -> float:
        for place in gone:
            index += place <= index
        return ordered[index]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2


@dataclass(slots=True)
class LinkTimes:
    """Detectors and counts of all links."""

    watches: dict[Cell, ChangePointDetector] = field(default_factory=dict)  # detector of each (source, destination)
    # the same without the share of other messages: growth in one of both only is no fault of the link. A link that is
    # missing here counts by its own durations
    alone: dict[Cell, ChangePointDetector] = field(default_factory=dict)
    ends: list[Endpoint] = field(default_factory=list)  # endpoints
    retries: dict[Cell, int] = field(default_factory=dict)  # sum for each link
    # first durations in seconds, by link and size class
    times: dict[tuple[Cell, int], list[float]] = field(default_factory=dict)
    # alarms of links whose open message is already far beyond all usual ones, as the latest were
    soon: dict[Cell, Change] = field(default_factory=dict)


_Group = list[Message]  # of one link in one round
_Sample = tuple[Cell, int, int, Message]  # link, round, size class and median message


def size_class(num_bytes: int) -> int:
    """Return the power of two nearest to a size: only messages of about one size are compared.

    Example:
        >>> size_class(1_000_000), size_class(1_048_576), size_class(0)
        (20, 20, 0)
    """
    return round(math.log2(num_bytes)) if num_bytes > 0 else 0


def link_times(job: Job) -> LinkTimes:
    """Return the history of every link from all records: the median message of each round."""
    return LinkHistory().take(job)


class LinkHistory:
    """History of all links, updated with new records."""

    def __init__(self) -> None:
        self._times = LinkTimes()
        self._plain, self._shared = PeerGroup(), PeerGroup()
        self._taken: dict[Cell, int] = {}
        self._missing: dict[Cell, set[int]] = {}  # rounds before that one which may still come
        self._parts: dict[Cell, int] = {}
        self._bytes: dict[Cell, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._classes: dict[int, int] = {}
        self._open: list[Message] = []
        self._endpoints = EndpointHistory()
        self.newest = -1  # latest round taken in; -1 without one

    def take(self, job: Job, *, settled_s: float | None = None) -> LinkTimes:
        """Take new messages in, and return the history of the links whose ends are in the job.

        Args:
            job: Latest records.
            settled_s: Time up to which all ranks have written; None if all records are there.
        """
        fresh = self._fresh(job, settled_s)
        for cell, _, group in fresh:
            for message in group:
                self._bytes[cell][size_class(message.num_bytes)] += 2.0 ** size_class(message.num_bytes)
                if message.retries:
                    self._times.retries[cell] = self._times.retries.get(cell, 0) + message.retries
        new = [message for _, _, group in fresh for message in group]
        shares = alone_s(job, _beside(job, new, is_all=settled_s is None))
        for cell, round, classed, message in self._samples(fresh):
            self._classes[round] = max(classed, self._classes.get(round, 0))
            self._add(job, cell, round, classed, message, shares[id(message)])
        for number in [*self._classes][: -LINKS.max_rounds]:
            del self._classes[number]
        self._update_endpoints(is_all=settled_s is None)
        self._times.soon = {} if settled_s is None else self._soon(job, settled_s)
        return _within(self._times, job)

    def _fresh(self, job: Job, settled_s: float | None) -> list[tuple[Cell, int, _Group]]:
        """Return the settled messages that are new, in the order of rounds."""
        groups: dict[Cell, dict[int, _Group]] = defaultdict(lambda: defaultdict(list))
        for message in job.messages:
            cell = (message.source, message.destination)
            is_new = message.operation > self._taken.get(cell, -1) or message.operation in self._missing.get(cell, ())
            if is_new and not {*cell} & job.unsteady:
                groups[cell][message.operation].append(message)
        found = []
        self._open = []
        for cell, own in groups.items():
            least = self._parts.get(cell, 0)
            for number, group in own.items():
                done = [message for message in group if message.transfer_s is not None]
                if done and (settled_s is None or _is_settled(job, group, settled_s, least)):
                    found.append((cell, number, done))
                elif not done:
                    self._open += [message for message in group if message.is_stuck and not message.error]
        found.sort(key=lambda one: (one[1], one[0]))
        self._note(groups, found)
        return found

    def _note(self, groups: Mapping[Cell, Mapping[int, _Group]], found: Iterable[tuple[Cell, int, _Group]]) -> None:
        taken: dict[Cell, set[int]] = defaultdict(set)
        for cell, number, group in found:
            taken[cell].add(number)
            self._taken[cell], self._parts[cell] = max(number, self._taken.get(cell, -1)), len(group)
            self.newest = max(self.newest, number)
        for cell, own in groups.items():
            last = self._taken.get(cell, -1)
            self._missing[cell] = {number for number in own if number < last and number not in taken[cell]}

    def _samples(self, fresh: Iterable[tuple[Cell, int, _Group]]) -> list[_Sample]:
        """Return the median message of the size class with the most bytes, if it carries enough of the link's."""
        found = []
        for cell, round, group in fresh:
            classes: dict[int, _Group] = defaultdict(list)
            for message in group:
                classes[size_class(message.num_bytes)].append(message)
            classed = max(classes, key=lambda one: (len(classes[one]) * 2.0**one, one))
            # small messages of a link wait behind its large ones
            if self._bytes[cell][classed] >= LINKS.min_share * sum(self._bytes[cell].values()):
                ordered = sorted(classes[classed], key=lambda message: message.transfer_s or 0.0)
                found.append((cell, round, classed, ordered[len(ordered) // 2]))
        return found

    def _add(self, job: Job, cell: Cell, round: int, classed: int, message: Message, share_s: float) -> None:
        times, time_s, at_s = self._times, max(message.transfer_s or 0.0, 0.0), message.received_done_s or 0.0
        if cell not in times.watches:
            times.watches[cell] = ChangePointDetector(peers=self._plain)
            times.alone[cell] = ChangePointDetector(peers=self._shared)
        watch, alone = times.watches[cell], times.alone[cell]
        classed_so, error_s = _measured(job, message, classed)
        if error_s > LINKS.max_error * time_s:
            return  # the clocks do not even show which end was late
        watch.add(round, at_s, time_s, size_class=classed_so, margin_s=error_s, begin_s=at_s - time_s)
        alone.add(round, at_s, share_s, size_class=classed_so, margin_s=error_s, begin_s=at_s - time_s)
        first = times.times.setdefault((cell, classed), [])
        if len(first) < 4 * CUSUM.min_history:
            first.append(time_s)

    def _soon(self, job: Job, settled_s: float) -> dict[Cell, Change]:
        found: dict[Cell, Change] = {}
        for message in self._open:
            cell = (message.source, message.destination)
            if cell in self._times.watches and message.begin_s is not None:
                classed, error_s = _measured(job, message, size_class(message.num_bytes))
                lasted_s = settled_s - message.begin_s - error_s
                change = self._times.watches[cell].soon(message.operation, lasted_s, size_class=classed)
                if change is not None:
                    found[cell] = change
        return found

    def _update_endpoints(self, *, is_all: bool) -> None:
        if is_all:
            self._times.ends = self._endpoints.take(self._times.alone, self._classes)
            return
        if max((len(watch.excess) for watch in self._times.alone.values()), default=0) < LINKS.ripe:
            return
        recent = [
            min(self._missing[cell], default=number + 1) - 1
            for cell, number in self._taken.items()
            if number >= self.newest - LINKS.recent_rounds
        ]
        until = max(min(recent), self.newest - LINKS.later_rounds)
        self._times.ends = self._endpoints.take(self._times.alone, self._classes, until=until)


def _measured(job: Job, message: Message, classed: int) -> tuple[int, float]:
    """Return the class of a duration by size and by the clocks it spans, and the error of these."""
    # a duration from the sender's begin holds the errors of both clocks, one from the receiver's begin holds none. If
    # the late end changes, the duration changes without any fault of the link: hence two classes
    ends = message.source, message.destination
    if job.clock_of.get(ends[0]) == job.clock_of.get(ends[1]):
        return 2 * classed, 0.0
    is_late = (message.begin_s or 0.0) > (message.received_posted_s or 0.0)
    return 2 * classed + is_late, sum(job.error_s.get(end, 0.0) for end in ends)


def _is_settled(job: Job, group: _Group, settled_s: float, least: int) -> bool:
    """Return whether no more messages of a link and round will come; earlier rounds had `least`."""
    if not all(
        one.error or (one.transfer_s is not None and (one.received_done_s or 0.0) <= settled_s) for one in group
    ):
        return False
    if 0 < least <= len(group):
        return True
    own = job.operations.get((group[0].communicator, group[0].operation), {})
    rounds = [own[rank] for rank in (group[0].source, group[0].destination) if rank in own]
    return all(round.done_s is not None and round.done_s <= settled_s for round in rounds)


def _beside(job: Job, fresh: Collection[Message], *, is_all: bool) -> list[Message]:
    """Return the messages that may have shared an access with new ones."""
    # forged records may show an arrival before the begin
    since_s = min((min(one.begin_s or 0.0, one.received_done_s or 0.0) for one in fresh), default=math.inf)
    open_s = math.inf if is_all else job.now_s - LINKS.lost_s
    return [
        one for one in job.messages
        if (one.received_done_s >= since_s if one.received_done_s is not None
            else not one.error and (begin_s := one.begin_s) is not None and begin_s > open_s)
    ]  # fmt: skip


def _within(times: LinkTimes, job: Job) -> LinkTimes:
    """Return the history of the links whose ends take part and have steady clocks."""

    def kept(watches: Mapping[Cell, ChangePointDetector]) -> dict[Cell, ChangePointDetector]:
        return {
            cell: watch
            for cell, watch in watches.items()
            if cell[0] in job.host_of and cell[1] in job.host_of and not {*cell} & job.unsteady
        }

    watches = kept(times.watches)
    if len(watches) == len(times.watches):
        return times
    first = {key: values for key, values in times.times.items() if key[0] in watches}
    soon = {cell: change for cell, change in times.soon.items() if cell in watches}
    return replace(times, watches=watches, alone=kept(times.alone), times=first, soon=soon)
