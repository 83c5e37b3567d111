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

from thinwire.monitor.findings import Finding


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


def median(values: Sequence[float]) -> float:
    """Return the median; NaN without values.

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
    """Return the median absolute deviation from `middle`, scaled to a normal distribution's standard deviation."""
    return 1.4826 * median([abs(value - middle) for value in values])


def at_least(hits: int, trials: int, chance: float) -> float:
    """Return the binomial probability of at least so many hits.

    Example:
        >>> at_least(1, 2, 0.5)
        0.75
    """
    chance = min(1.0, chance)
    return math.fsum(
        math.comb(trials, count) * chance**count * (1 - chance) ** (trials - count) for count in range(hits, trials + 1)
    )


def is_at_once(one: Change | Finding, other: Change | Finding) -> bool:
    """Return whether the times of two changes or findings overlap."""
    return all(
        first.until_s is None or first.until_s >= second.since_s for first, second in ((one, other), (other, one))
    )


class Baseline:
    """Usual duration: median and spread of the logarithms of the latest values that were not suspicious."""

    __slots__ = ("_config", "_fresh", "_values", "longest", "middle", "scale", "shift")

    def __init__(self, config: ChangePointConfig = CUSUM) -> None:
        self._config = config
        self._values: deque[float] = deque(maxlen=config.max_history)
        self._fresh = 0
        self.middle = math.nan  # median
        self.scale = config.min_scale  # spread
        self.shift = self.longest = 0.0  # longest value over the median

    @property
    def is_known(self) -> bool:
        """Whether there is enough history."""
        return len(self._values) >= self._config.min_history

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self._values)

    def is_record(self, value: float) -> bool:
        """Return whether a logarithm is well above the median, and above all recent values."""
        config = self._config
        return self.count >= config.record_history and value - self.middle >= max(config.record, self.longest)

    def learn(self, value: float) -> None:
        """Take a logarithm in."""
        config, values = self._config, self._values
        values.append(value)
        self._fresh += 1
        # a young baseline follows each value, an old one is sorted less often
        is_due = len(values) <= 2 * config.min_history or self._fresh >= max(config.refresh, len(values) // 16)
        if not self.is_known or not is_due:
            return
        self._fresh = 0
        self.middle = median(values)
        self.longest = max(values) - self.middle
        # few values may lie close together by chance
        unsure = 1 + 8 / len(values)
        self.scale = max(config.min_scale, unsure * spread(values, self.middle))
        # a history with many long rounds scores above zero without any fault
        low, high = self.middle - config.clip * self.scale, self.middle + config.clip * self.scale
        clipped = [low if value < low else high if value > high else value for value in values]
        self.shift = max(0.0, (sum(clipped) / len(clipped) - self.middle) / self.scale)

    def score(self, value: float) -> float:
        """Return the clipped score of a logarithm, in spreads."""
        clip = self._config.clip
        return max(-clip, min(clip, (value - self.middle) / self.scale))


@dataclass(slots=True)
class Change:
    """Durations that became longer for good."""

    since_round: int  # first round of the change
    since_s: float  # its time
    seen_round: int  # round of the alarm
    until_round: int = -1  # first round in which durations were usual again; -1 while they are not
    until_s: float | None = None  # its time; None while they are not

    @property
    def is_over(self) -> bool:
        """Whether durations are usual again."""
        return self.until_s is not None

    def last_round(self, look: int) -> int:
        """Return the last round that shows by how much durations grew: some rounds after the alarm at most."""
        return self.until_round - 1 if self.is_over else self.seen_round + look


class PeerGroup:
    """Detectors of one kind, whose baselines show together how long durations get without a fault.

    Their longest value is computed once for as many values as there are detectors, which is about once a round.
    """

    __slots__ = ("_count", "_detectors", "_fresh", "_longest")

    def __init__(self) -> None:
        self._detectors: list[ChangePointDetector] = []
        self._fresh = self._count = 0
        self._longest = 0.0

    def join(self, detector: ChangePointDetector) -> None:
        """Add a detector."""
        self._detectors.append(detector)

    def is_far(self, excess: float) -> bool:
        """Return whether a log ratio is far beyond all usual values of the group; call it once for each value."""
        self._fresh -= 1
        if excess < CUSUM.pair_long:
            return False
        if self._fresh <= 0:
            bases = [base for detector in self._detectors for base in detector.bases()]
            self._fresh, self._count = len(self._detectors), sum(base.count for base in bases)
            self._longest = max((base.longest for base in bases), default=0.0)
        return self.was_far(excess)

    def was_far(self, excess: float) -> bool:
        """Return the same from the values of the last call of `is_far`."""
        return excess >= CUSUM.far and self._count >= CUSUM.min_known and excess >= CUSUM.far_margin + self._longest

    def was_long(self, excess: float) -> bool:
        """Return whether a log ratio is well beyond all usual values of that call."""
        is_known = self._count >= CUSUM.min_known
        return is_known and excess >= CUSUM.pair_long and excess >= CUSUM.pair_margin + self._longest


class _Pair:
    """Consecutive values of one detector that are well beyond all usual values of its peers, and do not overlap."""

    __slots__ = ("_count", "_done_s", "_peers", "begin")

    def __init__(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._count, self._done_s = 0, -math.inf
        self.begin = (-1, 0.0)  # round and time of the first

    def add(self, round: int, begin_s: float, end_s: float, excess: float) -> bool:
        """Add a value after `PeerGroup.is_far` has seen it, and return whether the pair is complete."""
        if not self._peers.was_long(excess):
            self._count = 0
        elif not self._count:
            self._count, self._done_s, self.begin = 1, end_s, (round, end_s)
        elif begin_s >= self._done_s:
            self._count, self._done_s = self._count + 1, end_s
        return self._count >= CUSUM.pair_samples


class ChangePointDetector:
    """CUSUM over one duration, of one or several size classes, that finds a lasting growth and its end.

    Args:
        config: Constants.
        peers: Detectors of the same kind; with them, a few values beyond all usual ones of the group are an alarm.

    Example:
        >>> detector = ChangePointDetector()
        >>> for round in range(40):
        ...     detector.add(round, float(round), 0.1 if round < 30 else 0.3)
        >>> detector.change.since_round, detector.change.seen_round
        (30, 35)
    """

    __slots__ = ("_bases", "_begin", "_config", "_early", "_held", "_level", "_long", "_newest", "_num_late",
                 "_num_values", "_pair", "_peers", "_record", "_records", "_return", "_sum", "change",
                 "excess")  # fmt: skip

    def __init__(self, config: ChangePointConfig = CUSUM, *, peers: PeerGroup | None = None) -> None:
        self._config = config
        self._peers = peers
        self._pair = None if peers is None else _Pair(peers)
        if peers is not None:
            peers.join(self)
        self._bases: dict[int, Baseline] = {}
        self._early: list[tuple[int, float, float, Baseline]] = []
        self._sum, self._records = 0.0, 0
        self._begin: tuple[int, float] = (-1, 0.0)
        self._record = self._begin
        self._level = 0.0
        self._return = 0.0
        self._held: list[tuple[Baseline, float]] = []  # values of a sum that has not decided yet
        self._newest, self._num_late, self._num_values = -1, 0, 0
        self._long: deque[int] = deque(maxlen=config.often)
        self.change: Change | None = None  # latest alarm, which lasts or has ended; None without one
        # four times the default baseline, whatever the own one holds
        # round, time and log ratio to the usual duration, of each value with a baseline
        self.excess: deque[tuple[int, float, float]] = deque(maxlen=4 * CUSUM.max_history)

    def add(
        self, round: int, at_s: float, time_s: float, *, size_class: int = 0, margin_s: float = 0.0,
        begin_s: float | None = None,
    ) -> None:  # fmt: skip
        """Take the duration of a round in.

        Args:
            round: Its number; rounds come in order, or a little late.
            at_s: Its time.
            time_s: Duration.
            size_class: Durations of one class are comparable; 2 n and 2 n + 1 are one size, measured in two ways.
            margin_s: Largest difference between these two ways.
            begin_s: Begin, if it is known: two values that do not overlap may suffice.
        """
        config = self._config
        value = math.log(max(time_s, config.min_time_s))
        base = self._bases.get(size_class) or self._bases.setdefault(size_class, Baseline(config))
        if not base.is_known:
            other = self._bases.get(size_class ^ 1)
            sure = max(time_s - margin_s, config.min_time_s)
            if other is None or not other.is_known or math.log(sure) < other.middle + math.log(config.min_ratio):
                base.learn(value)
                self._early.append((round, at_s, value, base))
                return
            # suspicious by the other way of measuring: it must not become the baseline of this one
            value, base = math.log(sure), other
        excess = value - base.middle
        if excess >= config.long:
            self._long.append(self._num_values)
        self._num_values += 1
        self._num_late += round <= self._newest
        self._newest = max(round, self._newest)
        self.excess.append((round, at_s, excess))
        if self.change is None or self.change.is_over:
            self._detect(round, at_s, value, base, begin_s)
        else:
            self._detect_return(self.change, round, at_s, value, base)

    def _detect(self, round: int, at_s: float, value: float, base: Baseline, begin_s: float | None) -> None:
        config = self._config
        if self._sum == 0.0:
            self._begin = (round, at_s)
            # the values before were no change: they are history now
            for old, held in self._held:
                old.learn(held)
            self._held.clear()
        excess = value - base.middle
        is_far = self._peers is not None and self._peers.is_far(excess)
        # Page's CUSUM: S = max(0, S + score - k); `far_samples` far values reach the alarm at once
        gained = config.alarm / config.far_samples if is_far else base.score(value) - config.drift - base.shift
        self._sum = max(0.0, self._sum + gained)
        self._records = self._records + 1 if base.is_record(value) else 0
        if self._records == 1:
            self._record = (round, at_s)
        if len(self._held) < CUSUM.max_history:
            self._held.append((base, value))
        is_pair = False
        if base.count >= 2 * config.min_history and self._pair is not None and begin_s is not None:
            is_pair = self._pair.add(round, begin_s, at_s, excess)
        # noise before a fault may have begun the sum, and is not part of the change
        if self._sum >= config.alarm:
            self._raise_alarm(self._begin, round, least=config.min_samples)
        if self._records >= config.record_samples:
            self._raise_alarm(self._record, round, least=config.min_samples)
        if is_pair and self._pair is not None:
            self._raise_alarm(self._pair.begin, round, least=config.pair_samples)

    def _raise_alarm(self, begin: tuple[int, float], round: int, *, least: int) -> None:
        """Set `change` if the values since its begin are long and enough, and there is none yet."""
        config = self._config
        if self.change is not None and not self.change.is_over:
            return
        ratios = sorted(excess for number, _, excess in self.excess if number >= begin[0])
        enough = min(least, config.far_samples) if ratios and ratios[0] >= config.far else least
        # the lower quartile: a change makes most rounds longer, noise a few
        if len(ratios) >= enough and ratios[len(ratios) // 4] >= math.log(config.min_ratio):
            self.change = Change(since_round=begin[0], since_s=begin[1], seen_round=round)
            self._level, self._return = median(ratios), 0.0

    def _detect_return(self, change: Change, round: int, at_s: float, value: float, base: Baseline) -> None:
        """Run the CUSUM of the other direction: scores below the middle between the change and the baseline."""
        if self._return == 0.0:
            self._begin = (round, at_s)
        clip = self._config.clip
        score = max(-clip, min(clip, (base.middle + self._level / 2 - value) / base.scale))
        self._return = max(0.0, self._return + score)
        if self._return >= self._config.alarm:
            change.until_round, change.until_s = self._begin
            self._sum = 0.0
            self._held.clear()

    def soon(self, round: int, time_s: float, *, size_class: int = 0) -> Change | None:
        """Return the alarm that a value will raise which has not ended, and is far beyond all usual ones already."""
        base, peers = self._bases.get(size_class), self._peers
        if peers is None or base is None or not base.is_known:
            return None
        if self.change is not None and not self.change.is_over and self._level >= self._config.far:
            return None  # it has been raised
        far = list(takewhile(lambda one: peers.was_far(one[2]), reversed(self.excess)))
        open_excess = math.log(max(time_s, self._config.min_time_s)) - base.middle
        if len(far) < self._config.far_samples - 1 or not peers.was_far(open_excess):
            return None
        since_round, since_s, _ = far[-1]
        return Change(since_round=since_round, since_s=since_s, seen_round=round)

    def bases(self) -> Collection[Baseline]:
        """Return the baselines of all size classes."""
        return self._bases.values()

    def history(self) -> list[tuple[int, float, float]]:
        """Return `excess` with the values before it, from which the baselines were learnt."""
        early = [(number, at_s, value - base.middle) for number, at_s, value, base in self._early if base.is_known]
        return sorted([*early, *self.excess])

    def since(self, first: int) -> list[tuple[int, float, float]]:
        """Return `excess` from a round on, the latest first."""
        return [one for one in islice(reversed(self.excess), self._most_since(first)) if one[0] >= first]

    def _most_since(self, first: int) -> int:
        """Return the largest number of values from a round on; some came late or twice."""
        return max(0, self._newest - first + 1 + self._num_late)

    @property
    def was_long(self) -> bool:
        """Whether any value was long."""
        return bool(self._long)

    def is_often_long(self, *, of: int) -> bool:
        """Return whether `often` of the latest values are long."""
        return len(self._long) == self._config.often and self._num_values - self._long[0] < of

    def num_long(self, *, of: int) -> int:
        """Return the number of long values among the latest, `often` at most."""
        return sum(self._num_values - one <= of for one in self._long)

    def values_in(self, first: int, last: int) -> list[float]:
        """Return the log ratios of rounds first to last, the latest first."""
        latest = islice(reversed(self.excess), self._most_since(first))
        return [excess for number, _, excess in latest if first <= number <= last]

    def excess_in(self, first: int, last: int) -> float:
        """Return the median log ratio of rounds first to last; NaN without values."""
        return median(self.values_in(first, last))

    @property
    def usual(self) -> Baseline:
        """Baseline of the size class with the most values."""
        return max(self._bases.values(), key=lambda one: one.count, default=Baseline())

    @property
    def usual_s(self) -> float:
        """Usual duration of the size class with the longest."""
        known = [base.middle for base in self._bases.values() if base.is_known]
        return math.exp(max(known)) if known else math.nan
