"""Virtual clock: runs actions in the order of their times, and those of one instant in the order of their requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf, isnan

Action = Callable[[], None]


class VirtualClock:
    """A clock that jumps from one action to the next; nothing in it looks at the time of day.

    Attributes:
        now_s: The virtual time, in seconds from 0.

    Example:
        >>> clock, seen = VirtualClock(), []
        >>> clock.at(2.0, lambda: seen.append(clock.now_s))
        >>> clock.at(1.0, lambda: clock.at(clock.now_s, lambda: seen.append(clock.now_s)))
        >>> clock.run()
        >>> seen
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._num_asked = 0
        self._settling: list[Action] = []
        self._is_unsettled = False

    def at(self, time_s: float, action: Action) -> None:
        """Run `action` at `time_s`, which must not be past.

        Raises:
            ValueError: The time is past, or no number.
        """
        if isnan(time_s) or time_s < self.now_s:
            raise ValueError(f"time_s must be at least the clock's {self.now_s}, got {time_s}")
        heapq.heappush(self._heap, (time_s, self._num_asked, action))
        self._num_asked += 1

    def settle_with(self, action: Action) -> None:
        """Run `action` at the end of every instant: once nothing else is left to do at that time."""
        self._settling.append(action)

    def unsettle(self) -> None:
        """Settle this instant once more, also where nothing is asked for at its time."""
        self._is_unsettled = True

    def run(self) -> None:
        """Run until nothing is left; what is due after an infinite time never runs."""
        heap = self._heap
        while True:
            while heap and heap[0][0] == self.now_s:
                heapq.heappop(heap)[2]()
            self._is_unsettled = False
            for action in self._settling:
                action()
            if self._is_unsettled or (heap and heap[0][0] == self.now_s):
                continue
            if not heap or heap[0][0] == inf:
                return
            self.now_s = heap[0][0]
