"""Peer baseline: usual durations of similar links or ranks without a fault, and the outliers among them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

# A time that is so many times the usual, and twice what any watch of its kind has usually seen at the longest, is far:
# so many in a row are an alarm, where so many values are known.
FAR, FAR_SAMPLES = math.log(6.0), 3
_FARTHER, _LEAST_KNOWN = math.log(2.0), 200
# Two are where one begins when the other has ended, which no single pause of a wire can make so long.
_LONG, _LONGER, PAIR = math.log(2.0), math.log(1.5), 2


class _Usual(Protocol):
    @property
    def count(self) -> int: ...

    longest: float


class _Knows(Protocol):
    def bases(self) -> Collection[_Usual]: ...


class Company:
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
        if excess < _LONG:
            return False
        if self._fresh <= 0:
            bases = [base for watch in self._watches for base in watch.bases()]
            self._fresh, self._count = len(self._watches), sum(base.count for base in bases)
            self._longest = max((base.longest for base in bases), default=0.0)
        return self.was_far(excess)

    def was_far(self, excess: float) -> bool:
        """Return the same by what was known when it was last looked up."""
        return excess >= FAR and self._count >= _LEAST_KNOWN and excess >= _FARTHER + self._longest

    def was_long(self, excess: float) -> bool:
        """Return whether it is well beyond all that was usual then."""
        return excess >= _LONG and self._count >= _LEAST_KNOWN and excess >= _LONGER + self._longest


class Pair:
    """Two times of one watch, one after the other, that are well beyond all that was usual in any of its kind.

    Attributes:
        begin: The round of the first one, and when it was.
    """

    __slots__ = ("_company", "_count", "_done_s", "begin")

    def __init__(self, company: Company) -> None:
        self._company = company
        self._count, self._done_s = 0, -math.inf
        self.begin = (-1, 0.0)

    def add(self, round: int, begin_s: float, end_s: float, excess: float) -> bool:
        """Return whether a time makes the pair whole.

        Args:
            round: Its number.
            begin_s: When it began.
            end_s: When it was over.
            excess: Its logarithm over the usual time; `Company.is_far` was asked about it.
        """
        if not self._company.was_long(excess):
            self._count = 0
        elif not self._count:
            self._count, self._done_s, self.begin = 1, end_s, (round, end_s)
        elif begin_s >= self._done_s:
            self._count, self._done_s = self._count + 1, end_s
        return self._count >= PAIR
