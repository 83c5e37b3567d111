"""History of each link, built from all records at once or incrementally while a job runs.

A running job is judged again and again. What its links showed is remembered here, so that each message is looked at
once, and a history does not end where the records end that are kept. Nothing is taken in before it is settled: before
all ranks have written of that time, and before what crossed the same access then has come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from thinwire.monitor.detect.change_points import LEAST_HISTORY, Change, Watch
from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.endpoint_detector import End, EndHistory
from thinwire.monitor.detect.peer_baseline import Company
from thinwire.monitor.detect.sharing import alone_s
from thinwire.monitor.detect.timeline import Job, Message

_LEAST_SHARE = 0.1
_MOST_ERROR = 8.0
# So long a message that has not come shares the access that it crosses with others: later it counts as lost.
_LOST_S = 10.0
# A round is done where all links that take part have shown it, or some have shown so many later ones.
_LATER = 3
_RECENT = 8
_MOST_CLASSES = 1024
# Ends are watched together once links have shown so many values beside their history.
_RIPE = 8


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
        soon: Alarms of links whose latest messages were far beyond the usual, and the next one is so before it has
            come.
    """

    watches: dict[Cell, Watch] = field(default_factory=dict)
    alone: dict[Cell, Watch] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    retries: dict[Cell, int] = field(default_factory=dict)
    times: dict[tuple[Cell, int], list[float]] = field(default_factory=dict)
    soon: dict[Cell, Change] = field(default_factory=dict)


_Group = list[Message]  # of one link in one round
_Sample = tuple[Cell, int, int, Message]  # link, round, size class and the middle message


def size_class(num_bytes: int) -> int:
    """Return the power of two nearest to a size: only messages of about one size are compared.

    Example:
        >>> size_class(1_000_000), size_class(1_048_576), size_class(0)
        (20, 20, 0)
    """
    return round(math.log2(num_bytes)) if num_bytes > 0 else 0


def link_times(job: Job) -> LinkTimes:
    """Watch every link, one value a round: the middle of its messages of the class with the most bytes."""
    return LinkHistory().take(job)


class LinkHistory:
    """Remembers what each link showed.

    Attributes:
        newest: The latest round that was taken in, -1 before there is one.
    """

    def __init__(self) -> None:
        self._times = LinkTimes()
        self._plain, self._shared = Company(), Company()
        self._taken: dict[Cell, int] = {}
        self._missing: dict[Cell, set[int]] = {}  # rounds before that one which may still come
        self._parts: dict[Cell, int] = {}
        self._bytes: dict[Cell, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._classes: dict[int, int] = {}
        self._open: list[Message] = []
        self._ends = EndHistory()
        self.newest = -1

    def take(self, job: Job, *, settled_s: float | None = None) -> LinkTimes:
        """Take in what is new, and return all that is known of the links whose ends are in the job.

        Args:
            job: What was recorded lately.
            settled_s: Until when all ranks have written; None where nothing more will come.
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
        for number in [*self._classes][:-_MOST_CLASSES]:
            del self._classes[number]
        self._watch_ends(is_all=settled_s is None)
        self._times.soon = {} if settled_s is None else self._soon(job, settled_s)
        return _within(self._times, job)

    def _fresh(self, job: Job, settled_s: float | None) -> list[tuple[Cell, int, _Group]]:
        """Return what is settled and was not taken in before, in the order of rounds."""
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
        """Return the middle message of the class with the most bytes, where that class carries enough of the link's."""
        found = []
        for cell, round, group in fresh:
            classes: dict[int, _Group] = defaultdict(list)
            for message in group:
                classes[size_class(message.num_bytes)].append(message)
            classed = max(classes, key=lambda one: (len(classes[one]) * 2.0**one, one))
            # small messages of a link that carries large ones tell of what they wait behind
            if self._bytes[cell][classed] >= _LEAST_SHARE * sum(self._bytes[cell].values()):
                ordered = sorted(classes[classed], key=lambda message: message.transfer_s or 0.0)
                found.append((cell, round, classed, ordered[len(ordered) // 2]))
        return found

    def _add(self, job: Job, cell: Cell, round: int, classed: int, message: Message, share_s: float) -> None:
        times, time_s, at_s = self._times, max(message.transfer_s or 0.0, 0.0), message.received_done_s or 0.0
        if cell not in times.watches:
            times.watches[cell], times.alone[cell] = Watch(company=self._plain), Watch(company=self._shared)
        watch, alone = times.watches[cell], times.alone[cell]
        classed_so, error_s = _measured(job, message, classed)
        if error_s > _MOST_ERROR * time_s:
            return  # not even who was late is known
        watch.add(round, at_s, time_s, size_class=classed_so, margin_s=error_s, begin_s=at_s - time_s)
        alone.add(round, at_s, share_s, size_class=classed_so, margin_s=error_s, begin_s=at_s - time_s)
        first = times.times.setdefault((cell, classed), [])
        if len(first) < 4 * LEAST_HISTORY:
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

    def _watch_ends(self, *, is_all: bool) -> None:
        if is_all:
            self._times.ends = self._ends.take(self._times.alone, self._classes)
            return
        if max((len(watch.excess) for watch in self._times.alone.values()), default=0) < _RIPE:
            return
        recent = [
            min(self._missing[cell], default=number + 1) - 1
            for cell, number in self._taken.items()
            if number >= self.newest - _RECENT
        ]
        until = max(min(recent), self.newest - _LATER)
        self._times.ends = self._ends.take(self._times.alone, self._classes, until=until)


def _measured(job: Job, message: Message, classed: int) -> tuple[int, float]:
    """Return the class of a message's time by its size and by how it is measured, and the error of the latter.

    A time from the sender's word to the receiver's holds the error of both clocks, one from the receiver's own word
    holds none: where another end is late than before, it changes without any change of the link.
    """
    ends = message.source, message.destination
    if job.clock_of.get(ends[0]) == job.clock_of.get(ends[1]):
        return 2 * classed, 0.0
    is_late = (message.begin_s or 0.0) > (message.received_posted_s or 0.0)
    return 2 * classed + is_late, sum(job.error_s.get(end, 0.0) for end in ends)


def _is_settled(job: Job, group: _Group, settled_s: float, least: int) -> bool:
    """Return whether no message of a link and round will come any more, where `least` have come in earlier rounds."""
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
    """Return the messages that may have crossed an access together with some new ones."""
    # forged ones may be there before they were sent
    since_s = min((min(one.begin_s or 0.0, one.received_done_s or 0.0) for one in fresh), default=math.inf)
    return [
        one
        for one in job.messages
        if (not is_all and _may_come(one, job.now_s) if one.received_done_s is None else one.received_done_s >= since_s)
    ]


def _may_come(message: Message, now_s: float) -> bool:
    begin_s = message.begin_s
    return begin_s is not None and not message.error and begin_s > now_s - _LOST_S


def _within(times: LinkTimes, job: Job) -> LinkTimes:
    """Return what is known of the links whose ends take part, and whose clocks nobody set."""

    def kept(watches: Mapping[Cell, Watch]) -> dict[Cell, Watch]:
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
