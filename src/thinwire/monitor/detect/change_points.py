"""Change-point detector for durations that vary: a CUSUM over clipped robust scores.

Shared machines have heavy-tailed times: one round of a hundred takes ten times as long and means nothing. So each
value is scored by the median and the median absolute deviation (MAD) of its own history, on a logarithmic scale and
clipped: a single round adds little, however long it was, and only several rounds close together make an alarm.

Reference:
    E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954: the cumulative sum. The clip and the scores are
    ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePointConfig:
    """Constants of the change-point detector; ratios are natural logarithms unless a comment says otherwise."""

    # values until a baseline is used; eight gave false alarms of 1.1 to 1.3 times (LOG 2026-11-22)
    min_history: int = 12
    max_history: int = 64  # values in a baseline: a few minutes of rounds
    min_scale: float = 0.08  # spread of log durations that is assumed at least, so that a steady link raises no alarm
    clip: float = 3.0  # limit of one score, in spreads: one round says little, however long it was
    drift: float = 1.0  # score that is taken off each value; the k of Page's CUSUM
    # sum that is an alarm; the h of Page's CUSUM. 0 false alarms in 8,000 clean rounds (LOG 2026-11-22)
    alarm: float = 10.0
    min_ratio: float = 1.2  # ratio (no logarithm) below which a change is not reported
    min_samples: int = 4  # long values in a change
    min_time_s: float = 1e-6  # shortest duration, so that the logarithm is finite
    refresh: int = 8  # new values until the median is computed again: sorting at each value is too dear
    often: int = 5  # values of `long` or more that make a link or rank a candidate for intermittent faults
    long: float = math.log(2.0)  # a long value
    record: float = math.log(2.0)  # a value above this and above all own recent ones is a record
    record_history: int = 48  # own recent values that a record needs
    record_samples: int = 4  # records in a row that are an alarm
    far: float = math.log(6.0)  # a value above this and `far_margin` above the longest usual one of all peers is far
    far_samples: int = 3  # far values in a row that are an alarm
    far_margin: float = math.log(2.0)  # margin of a far value over the longest usual one
    min_known: int = 200  # usual values of all peers until far and paired values count
    pair_samples: int = 2  # values in a row, each begun after the last had ended, that are an alarm (LOG 2026-11-24)
    pair_long: float = math.log(2.0)  # least value of a pair; one pause cannot make two such values
    pair_margin: float = math.log(1.5)  # margin of a paired value over the longest usual one of all peers


CUSUM = ChangePointConfig()


class _Usual(Protocol):
    @property
    def count(self) -> int: ...

    longest: float


class _Knows(Protocol):
    def bases(self) -> Collection[_Usual]: ...


class PeerGroup:
    """Watches of one kind, which know together how long times get without any fault.

    What they know is looked up once for as many values as there are watches, about once a round.
    """

    __slots__ = ("_count", "_fresh", "_longest", "_watches")

    def __init__(self) -> None:
        self._watches: list[_Knows] = []
        self._fresh = self._count = 0
        self._longest = 0.0

    def join(self, watch: _Knows) -> None:
        """Take a watch in."""
        self._watches.append(watch)

    def is_far(self, excess: float) -> bool:
        """Return whether a logarithm over the usual time is far beyond all that was usual in any of the watches.

        To be asked once for each value.
        """
        self._fresh -= 1
        if excess < CUSUM.pair_long:
            return False
        if self._fresh <= 0:
            bases = [base for watch in self._watches for base in watch.bases()]
            self._fresh, self._count = len(self._watches), sum(base.count for base in bases)
            self._longest = max((base.longest for base in bases), default=0.0)
        return self.was_far(excess)

    def was_far(self, excess: float) -> bool:
        """Return the same by what was known when it was last looked up."""
        return excess >= CUSUM.far and self._count >= CUSUM.min_known and excess >= CUSUM.far_margin + self._longest

    def was_long(self, excess: float) -> bool:
        """Return whether it is well beyond all that was usual then."""
        return (
            excess >= CUSUM.pair_long and self._count >= CUSUM.min_known and excess >= CUSUM.pair_margin + self._longest
        )


class Pair:
    """Two times of one watch, one after the other, that are well beyond all that was usual in any of its kind.

    Attributes:
        begin: The round of the first one, and when it was.
    """

    __slots__ = ("_company", "_count", "_done_s", "begin")

    def __init__(self, company: PeerGroup) -> None:
        self._company = company
        self._count, self._done_s = 0, -math.inf
        self.begin = (-1, 0.0)

    def add(self, round: int, begin_s: float, end_s: float, excess: float) -> bool:
        """Return whether a time makes the pair whole.

        Args:
            round: Its number.
            begin_s: When it began.
            end_s: When it was over.
            excess: Its logarithm over the usual time; `PeerGroup.is_far` was asked about it.
        """
        if not self._company.was_long(excess):
            self._count = 0
        elif not self._count:
            self._count, self._done_s, self.begin = 1, end_s, (round, end_s)
        elif begin_s >= self._done_s:
            self._count, self._done_s = self._count + 1, end_s
        return self._count >= CUSUM.pair_samples


def median(values: Sequence[float]) -> float:
    """Return the middle of values that need no order; NaN where there are none.

    Example:
        >>> median([3.0, 1.0, 2.0]), median([1.0, 2.0])
        (2.0, 1.5)
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float], middle: float) -> float:
    """Return the median absolute deviation from `middle`, scaled to be a normal distribution's standard deviation."""
    return 1.4826 * median([abs(value - middle) for value in values])


def at_least(hits: int, trials: int, chance: float) -> float:
    """Return how likely at least so many hits are.

    Example:
        >>> at_least(1, 2, 0.5)
        0.75
    """
    chance = min(1.0, chance)
    return math.fsum(
        math.comb(trials, count) * chance**count * (1 - chance) ** (trials - count) for count in range(hits, trials + 1)
    )


class Interval(Protocol):
    """What began at a time, and ended at one or goes on."""

    @property
    def since_s(self) -> float:
        """When it began."""
        ...

    @property
    def until_s(self) -> float | None:
        """When it was over; none while it is not."""
        ...


def is_at_once(one: Interval, other: Interval) -> bool:
    """Return whether neither was over when the other one began: what was over explains nothing."""
    return all(
        first.until_s is None or first.until_s >= second.since_s for first, second in ((one, other), (other, one))
    )


class Baseline:
    """What a time usually is: median and spread of the logarithms of the latest values that were not suspicious.

    Args:
        most: How many of them.

    Attributes:
        middle: Their median.
        scale: Their spread.
        shift: The mean of their scores.
        longest: By how much the longest of them is above the middle one.
    """

    __slots__ = ("_fresh", "_values", "longest", "middle", "scale", "shift")

    def __init__(self, most: int = CUSUM.max_history) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self._fresh = 0
        self.middle = math.nan
        self.scale = CUSUM.min_scale
        self.shift = self.longest = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is enough history."""
        return len(self._values) >= CUSUM.min_history

    @property
    def count(self) -> int:
        """How many values are known."""
        return len(self._values)

    def is_record(self, value: float) -> bool:
        """Return whether a logarithm is well above the usual, and above all that was usual lately."""
        return self.count >= CUSUM.record_history and value - self.middle >= max(CUSUM.record, self.longest)

    def learn(self, value: float) -> None:
        """Take a logarithm in."""
        self._values.append(value)
        self._fresh += 1
        if self.is_known and (
            len(self._values) <= 2 * CUSUM.min_history or self._fresh >= max(CUSUM.refresh, len(self._values) // 16)
        ):
            self._fresh = 0
            self.middle = median(self._values)
            self.longest = max(self._values) - self.middle
            # few values may lie close together by chance
            unsure = 1 + 8 / len(self._values)
            self.scale = max(CUSUM.min_scale, unsure * spread(self._values, self.middle))
            # a history with many long rounds scores above zero without any fault
            low, high = self.middle - CUSUM.clip * self.scale, self.middle + CUSUM.clip * self.scale
            clipped = [low if value < low else high if value > high else value for value in self._values]
            self.shift = max(0.0, (sum(clipped) / len(clipped) - self.middle) / self.scale)

    def score(self, value: float) -> float:
        """Return how unusual a logarithm is, clipped."""
        return _clipped((value - self.middle) / self.scale)


@dataclass(slots=True)
class Change:
    """Times that became longer for good.

    Attributes:
        since_round: The first round of the change.
        since_s: When that was.
        seen_round: The round that made it sure.
        until_round: The first round in which times were as before again; -1 while they are not.
        until_s: When that was; None while they are not.
    """

    since_round: int
    since_s: float
    seen_round: int
    until_round: int = -1
    until_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether times are as before again."""
        return self.until_s is not None


class ChangePointDetector:
    """Watches one time, of one or several size classes, for a lasting growth.

    Args:
        alarm: The sum that is an alarm.
        most_usual: From how many of the latest values that were not suspicious the usual time is learnt.
        company: Watches of the same kind; with them, few values that are far beyond all that these know are an alarm.

    Attributes:
        change: The latest alarm, if any: one that lasts, or is over.
        excess: Of each value with a history: round, seconds of the clock, logarithm of the ratio to the usual time.

    Example:
        >>> watch = ChangePointDetector()
        >>> for round in range(40):
        ...     watch.add(round, float(round), 0.1 if round < 30 else 0.3)
        >>> watch.change.since_round, watch.change.seen_round
        (30, 35)
    """

    __slots__ = ("_alarm", "_bases", "_begin", "_company", "_early", "_held", "_level", "_long", "_most_usual",
                 "_newest", "_num_late", "_num_values", "_pair", "_record", "_records", "_return", "_sum", "change",
                 "excess")  # fmt: skip

    def __init__(
        self,
        *,
        alarm: float = CUSUM.alarm,
        most_usual: int = CUSUM.max_history,
        company: PeerGroup | None = None,
    ) -> None:
        self._company = company
        self._pair = None if company is None else Pair(company)
        if company is not None:
            company.join(self)
        self._alarm = alarm
        self._most_usual = most_usual
        self._bases: dict[int, Baseline] = {}
        self._early: list[tuple[int, float, float, Baseline]] = []
        self._sum, self._records = 0.0, 0
        self._begin: tuple[int, float] = (-1, 0.0)
        self._record = self._begin
        self._level = 0.0
        self._return = 0.0
        self._held: list[tuple[Baseline, float]] = []
        self._newest, self._num_late, self._num_values = -1, 0, 0
        self._long: deque[int] = deque(maxlen=CUSUM.often)
        self.change: Change | None = None
        self.excess: deque[tuple[int, float, float]] = deque(maxlen=4 * CUSUM.max_history)

    def add(
        self, round: int, at_s: float, time_s: float, *, size_class: int = 0, margin_s: float = 0.0,
        begin_s: float | None = None,
    ) -> None:  # fmt: skip
        """Take the time of a round in.

        Args:
            round: Its number; rounds come in order, or a little late.
            at_s: When it was.
            time_s: How long it took.
            size_class: Only times of one class are alike; 2 n and 2 n + 1 are of one size, measured in two ways.
            margin_s: By how much these two ways may differ.
            begin_s: When it began, if that is known: two that do not overlap may be enough.
        """
        value = math.log(max(time_s, CUSUM.min_time_s))
        base = self._base(size_class)
        if not base.is_known:
            twin = self._bases.get(size_class ^ 1)
            sure = max(time_s - margin_s, CUSUM.min_time_s)
            if twin is None or not twin.is_known or math.log(sure) < twin.middle + math.log(CUSUM.min_ratio):
                base.learn(value)
                self._early.append((round, at_s, value, base))
                return
            value, base = math.log(sure), twin
        if value - base.middle >= CUSUM.long:
            self._long.append(self._num_values)
        self._num_values += 1
        self._num_late += round <= self._newest
        self._newest = max(round, self._newest)
        self.excess.append((round, at_s, value - base.middle))
        if self.change is None or self.change.is_over:
            self._step(round, at_s, value, base, begin_s)
        else:
            self._step_back(self.change, round, at_s, value, base)

    def _base(self, size_class: int) -> Baseline:
        base = self._bases.get(size_class)
        if base is None:
            base = self._bases[size_class] = Baseline(self._most_usual)
        return base

    def _step(self, round: int, at_s: float, value: float, base: Baseline, begin_s: float | None) -> None:
        if self._sum == 0.0:
            self._begin = (round, at_s)
            # what went before was no change: it is history now
            for old, held in self._held:
                old.learn(held)
            self._held.clear()
        excess = value - base.middle
        is_far = self._company is not None and self._company.is_far(excess)
        gained = self._alarm / CUSUM.far_samples if is_far else base.score(value) - CUSUM.drift - base.shift
        self._sum = max(0.0, self._sum + gained)
        self._records = self._records + 1 if base.is_record(value) else 0
        if self._records == 1:
            self._record = (round, at_s)
        if len(self._held) < CUSUM.max_history:
            self._held.append((base, value))
        is_pair = self._is_pair(round, begin_s, at_s, excess) if base.count >= 2 * CUSUM.min_history else False
        # noise before a fault may have begun the sum, and is not part of what lasts
        if self._sum >= self._alarm:
            self._alarmed(self._begin, round, least=CUSUM.min_samples)
        if self._records >= CUSUM.record_samples:
            self._alarmed(self._record, round, least=CUSUM.min_samples)
        if is_pair and self._pair is not None:
            self._alarmed(self._pair.begin, round, least=CUSUM.pair_samples)

    def _is_pair(self, round: int, begin_s: float | None, at_s: float, excess: float) -> bool:
        return self._pair is not None and begin_s is not None and self._pair.add(round, begin_s, at_s, excess)

    def _alarmed(self, begin: tuple[int, float], round: int, *, least: int) -> None:
        """Make an alarm of what there is since it began, if that is long and enough, and there is none yet."""
        if self.change is not None and not self.change.is_over:
            return
        ratios = sorted(excess for number, _, excess in self.excess if number >= begin[0])
        enough = min(least, CUSUM.far_samples) if ratios and ratios[0] >= CUSUM.far else least
        if len(ratios) >= enough and ratios[len(ratios) // 4] >= math.log(CUSUM.min_ratio):
            self.change = Change(since_round=begin[0], since_s=begin[1], seen_round=round)
            self._level, self._return = median(ratios), 0.0

    def _step_back(self, change: Change, round: int, at_s: float, value: float, base: Baseline) -> None:
        """Sum up what speaks for times as they were before: scores below the middle between then and now."""
        if self._return == 0.0:
            self._begin = (round, at_s)
        score = _clipped((base.middle + self._level / 2 - value) / base.scale)
        self._return = max(0.0, self._return + score)
        if self._return >= self._alarm:
            change.until_round, change.until_s = self._begin
            self._sum = 0.0
            self._held.clear()

    def soon(self, round: int, time_s: float, *, size_class: int = 0) -> Change | None:
        """Return the alarm that a time will make which is not over yet, and is far beyond all that is usual already.

        Args:
            round: Of what is not over.
            time_s: For how long it has lasted.
            size_class: See `add`.
        """
        base, company = self._bases.get(size_class), self._company
        if company is None or base is None or not base.is_known:
            return None
        if self.change is not None and not self.change.is_over and self._level >= CUSUM.far:
            return None  # it has been made
        far = list(takewhile(lambda one: company.was_far(one[2]), reversed(self.excess)))
        if len(far) < CUSUM.far_samples - 1 or not company.was_far(
            math.log(max(time_s, CUSUM.min_time_s)) - base.middle
        ):
            return None
        since_round, since_s, _ = far[-1]
        return Change(since_round=since_round, since_s=since_s, seen_round=round)

    def bases(self) -> Collection[Baseline]:
        """Return what is usual, by size."""
        return self._bases.values()

    def history(self) -> list[tuple[int, float, float]]:
        """Return `excess` with the values before it, from which the usual time was learnt."""
        early = [(number, at_s, value - base.middle) for number, at_s, value, base in self._early if base.is_known]
        return sorted([*early, *self.excess])

    def since(self, first: int) -> list[tuple[int, float, float]]:
        """Return `excess` from a round on, the latest first."""
        return [one for one in islice(reversed(self.excess), self._most_since(first)) if one[0] >= first]

    def _most_since(self, first: int) -> int:
        """Return how many values there are at most from a round on, where some came late or twice."""
        return max(0, self._newest - first + 1 + self._num_late)

    @property
    def was_long(self) -> bool:
        """Whether any value was twice the usual time or more."""
        return bool(self._long)

    def is_often_long(self, *, of: int) -> bool:
        """Return whether `OFTEN` of the latest values are twice the usual time or more."""
        return len(self._long) == CUSUM.often and self._num_values - self._long[0] < of

    def num_long(self, *, of: int) -> int:
        """Return how many of the latest values are twice the usual time or more, `OFTEN` at the most."""
        return sum(self._num_values - one <= of for one in self._long)

    def values_in(self, first: int, last: int) -> list[float]:
        """Return the logarithms of the ratio in rounds first to last, the latest first."""
        latest = islice(reversed(self.excess), self._most_since(first))
        return [excess for number, _, excess in latest if first <= number <= last]

    def excess_in(self, first: int, last: int) -> float:
        """Return the median logarithm of the ratio in rounds first to last; NaN without values."""
        return median(self.values_in(first, last))

    @property
    def usual(self) -> Baseline:
        """What is usual, of the class with the most values."""
        return max(self._bases.values(), key=lambda one: one.count, default=Baseline())

    @property
    def usual_s(self) -> float:
        """The usual time, of the class with the longest."""
        known = [base.middle for base in self._bases.values() if base.is_known]
        return math.exp(max(known)) if known else math.nan


def _clipped(score: float) -> float:
    return max(-CUSUM.clip, min(CUSUM.clip, score))
