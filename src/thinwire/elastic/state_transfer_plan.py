"""Plan of a state transfer without I/O: assigns chunks to the peers that hold them.

A holder has a few chunks under way, as many as it brings in a second, and gets the next when one has come, so the
faster one brings more. Whoever takes
longer than its own times allow is slow: its chunks are asked for elsewhere too, and it rests for a while. At the end,
where nothing else is left, the times of the quickest other holder count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

# What a holder brings in `_AHEAD_S` may be under way from it, within these bounds.
LEAST_WINDOW, WINDOW = 4, 12
_AHEAD_S = 1.0
# Of a holder that has brought nothing yet: it may be slow, or bring wrong bytes.
FIRST_WINDOW = 2
# Over all holders, so that memory is bounded however many there are.
MOST_UNDER_WAY = 32
LEAST_LIMIT_S, MOST_LIMIT_S = 2.0, 60.0
# For as long as nothing has been measured.
FIRST_LIMIT_S = 10.0
# A holder whose connection broke is asked again after so long.
REST_S = 1.0
_DEVIATIONS = 8
_LEAST_SAMPLES = 3
# What may be asked for twice because it was slow, as a share of all.
_TWICE_SHARE = 0.03


@dataclass(slots=True, eq=False)
class _Holder:
    under_way: dict[int, float] = field(default_factory=dict)
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    slow: set[int] = field(default_factory=set)
    lost_until_s: float = 0.0
    rests_until_s: float = 0.0
    strikes: int = 0
    width: int = FIRST_WINDOW

    @property
    def window(self) -> int:
        return 1 if self.strikes else self.width

    def observe(self, took_s: float) -> None:
        """Note how long a chunk took, and how many should be under way."""
        self.times_s.append(took_s)
        per_s = self.width / max(1e-3, statistics.median(self.times_s))
        self.width = min(max(LEAST_WINDOW, 2 + round(per_s * _AHEAD_S)), WINDOW)

    def limit_s(self) -> float | None:
        """How long one of its chunks may take, None where too little was measured."""
        return _limit_s(self.times_s) if len(self.times_s) >= _LEAST_SAMPLES else None


class TransferPlan:
    """What is here, what is under way, and what comes next.

    Args:
        num_chunks: How many there are.

    Example:
        >>> plan = TransferPlan(3)
        >>> plan.add_holder(7)
        >>> list(plan.requests(now_s=0.0))
        [(7, 0), (7, 1)]
        >>> plan.on_chunk(7, 0, now_s=0.5), plan.on_chunk(7, 1, now_s=0.6)
        (True, True)
        >>> plan.missing, plan.num_first
        ([2], 2)
    """

    def __init__(self, num_chunks: int) -> None:
        self._is_here = bytearray(num_chunks)
        self._num_here = 0
        self._num_first = 0
        self._left = deque(range(num_chunks))
        self._again: deque[int] = deque()
        self._holders: dict[int, _Holder] = {}
        self._asked_of: dict[int, set[int]] = {}
        self._num_twice = 0
        self._most_holders = 0
        self._all_times_s: deque[float] = deque(maxlen=128)

    @property
    def num_here(self) -> int:
        """Chunks that have come."""
        return self._num_here

    @property
    def num_first(self) -> int:
        """Chunks before the first that has not come."""
        return self._num_first

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return self._num_here == len(self._is_here)

    @property
    def missing(self) -> list[int]:
        """Chunks that have not come."""
        return [chunk for chunk, is_here in enumerate(self._is_here) if not is_here]

    @property
    def holders(self) -> tuple[int, ...]:
        """Those that may be asked."""
        return tuple(self._holders)

    def add_holder(self, holder: int) -> None:
        """Ask one more, or at once again one whose connection broke."""
        self._holders.setdefault(holder, _Holder()).lost_until_s = 0.0
        self._most_holders = max(self._most_holders, len(self._holders))

    def remove_holder(self, holder: int) -> list[int]:
        """Ask one no longer.

        Returns:
            The chunks that were under way from it.
        """
        found = self._holders.pop(holder, None)
        if found is None:
            return []
        for chunk in reversed(found.under_way):
            self._give_up(holder, chunk)
        return list(found.under_way)

    def requests(self, *, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield what is to be asked for now, as holder and chunk; each counts as under way at once.

        Args:
            now_s: Seconds that only grow.
        """
        self._find_slow(now_s)
        while (found := self._next(now_s)) is not None:
            holder, chunk = found
            self._holders[holder].under_way[chunk] = now_s
            self._asked_of.setdefault(chunk, set()).add(holder)
            yield found

    def on_chunk(self, holder: int, chunk: int, *, now_s: float) -> bool:
        """Note that a chunk came and is right; tell whether it is the first such."""
        found = self._holders.get(holder)
        if found is not None and chunk in found.under_way:
            took_s = now_s - found.under_way.pop(chunk)
            found.observe(took_s)
            self._all_times_s.append(took_s)
            found.slow.discard(chunk)
            found.strikes, found.rests_until_s = 0, 0.0
        self._forget(holder, chunk)
        if self._is_here[chunk]:
            return False
        self._is_here[chunk] = 1
        self._num_here += 1
        while self._num_first < len(self._is_here) and self._is_here[self._num_first]:
            self._num_first += 1
        return True

    def superseded(self, chunk: int) -> list[int]:
        """Forget who else is asked for a chunk that is here.

        Returns:
            The holders whose asks can be cancelled.
        """
        holders = sorted(self._asked_of.pop(chunk, ()))
        for holder in holders:
            self._holders[holder].under_way.pop(chunk, None)
            self._holders[holder].slow.discard(chunk)
        return holders

    def on_failure(self, holder: int, chunk: int, *, now_s: float) -> None:
        """Note that a chunk did not come because its holder's connection broke: it is asked again after `REST_S`."""
        found = self._holders.get(holder)
        if found is None or chunk not in found.under_way:
            return
        del found.under_way[chunk]
        found.slow.discard(chunk)
        found.lost_until_s = now_s + REST_S
        self._give_up(holder, chunk)

    def limit_s(self, holder: int) -> float:
        """Return how long a chunk may take from a holder before it is asked for elsewhere too."""
        own = self._holders[holder].limit_s()
        if own is None:
            own = _limit_s(self._all_times_s) if len(self._all_times_s) >= _LEAST_SAMPLES else FIRST_LIMIT_S
        if self._left:
            return own
        others = (found.limit_s() for other, found in self._holders.items() if other != holder and not found.strikes)
        return min((limit_s for limit_s in others if limit_s is not None), default=own)

    def _next(self, now_s: float) -> tuple[int, int] | None:
        if sum(len(found.under_way) for found in self._holders.values()) >= MOST_UNDER_WAY:
            return None
        there = [(holder, found) for holder, found in self._holders.items() if found.lost_until_s <= now_s]
        # where all that are there were slow, they are all that there is
        ready = [(holder, found) for holder, found in there if found.rests_until_s <= now_s] or there
        for holder, found in sorted(ready, key=lambda item: len(item[1].under_way)):
            if len(found.under_way) < found.window and (chunk := self._take_left(holder)) is not None:
                return holder, chunk
        return None

    def _take_left(self, holder: int) -> int | None:
        for chunks in (self._left, self._again):
            for _ in range(len(chunks)):
                chunk = chunks.popleft()
                if self._is_here[chunk]:
                    continue
                if holder not in self._asked_of.get(chunk, ()):
                    return chunk
                chunks.append(chunk)
        return None

    def _find_slow(self, now_s: float) -> None:
        there = {holder for holder, found in self._holders.items() if found.lost_until_s <= now_s}
        for holder, found in self._holders.items():
            if there <= {holder}:  # nobody else to ask
                continue
            limit_s = self.limit_s(holder)
            late = {chunk for chunk, since_s in found.under_way.items() if now_s - since_s > limit_s} - found.slow
            if late:
                found.slow |= late
                found.strikes += 1
                found.rests_until_s = now_s + min(MOST_LIMIT_S, limit_s * 2**found.strikes)
        for chunk in {chunk for found in self._holders.values() for chunk in found.slow}:
            if self._may_ask_again(chunk, there, now_s):
                self._num_twice += 1
                self._again.append(chunk)

    def _may_ask_again(self, chunk: int, there: set[int], now_s: float) -> bool:
        asked = [self._holders[holder] for holder in self._asked_of[chunk]]
        if chunk in self._again or chunk in self._left or any(chunk not in found.slow for found in asked):
            return False
        if there <= self._asked_of[chunk]:
            return False
        # a guess of what is slow may be wrong, and bytes that come twice are lost; but nothing waits without an end
        most = WINDOW * self._most_holders + _TWICE_SHARE * len(self._is_here)
        latest_s = max(found.under_way[chunk] for found in asked)
        return self._num_twice < most or now_s - latest_s > MOST_LIMIT_S

    def _give_up(self, holder: int, chunk: int) -> None:
        self._forget(holder, chunk)
        if not self._is_here[chunk] and chunk not in self._asked_of and chunk not in self._again:
            self._left.appendleft(chunk)  # what comes first in the state is needed first

    def _forget(self, holder: int, chunk: int) -> None:
        holders = self._asked_of.get(chunk, set())
        holders.discard(holder)
        if not holders:
            self._asked_of.pop(chunk, None)


def _limit_s(times_s: deque[float]) -> float:
    median = statistics.median(times_s)
    deviation = statistics.median(abs(took_s - median) for took_s in times_s)
    return min(max(LEAST_LIMIT_S, 2 * median + _DEVIATIONS * deviation), MOST_LIMIT_S)
