"""States that replicas show to those that come: which step they are of, who holds them, and whether all hold the same.

A cut is a step: what the global parameters and momenta are there, after all rounds due by then, is the same on every
replica. One for those that come is chosen a little ahead of all, so that each can keep a copy when it gets there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

# Time for the word to reach all before the fastest is there; doubled where that was too short.
_MARGIN_S, _MOST_MARGIN_S = 0.5, 16.0
_KEPT = 4


@dataclass(slots=True, kw_only=True)
class StateSnapshot:
    """One cut.

    Attributes:
        step: Its step.
        holders: By replica, the hash of the state and its size.
        joiners: Who fetches it.
        missed: Who was past it already.
        asked: Who was told to keep it; empty where replicas keep it by themselves, for a checkpoint.
    """

    step: int
    holders: dict[int, tuple[str, int]] = field(default_factory=dict)
    joiners: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    asked: tuple[int, ...] = ()

    @property
    def agreed(self) -> tuple[str, int] | None:
        """The state's hash and size: that of most holders, then that of the one with the lowest number."""
        counts: dict[tuple[str, int], int] = {}
        for replica in sorted(self.holders):
            counts[self.holders[replica]] = counts.get(self.holders[replica], 0) + 1
        return max(counts, key=lambda value: counts[value], default=None)

    def agreeing(self) -> tuple[int, ...]:
        """Return the holders of the agreed state."""
        return tuple(sorted(replica for replica, found in self.holders.items() if found == self.agreed))

    def odd(self) -> tuple[int, ...]:
        """Return the holders of another one."""
        return tuple(sorted(replica for replica, found in self.holders.items() if found != self.agreed))


class StateSnapshots:
    """All cuts that somebody may need; pure.

    Example:
        >>> cuts = StateSnapshots()
        >>> cuts.wait(7)
        >>> cut = cuts.schedule(active=(0, 1), step=10, step_s=0.25)
        >>> cut.step, sorted(cut.joiners)
        (13, [7])
        >>> cuts.hold(13, 0, root="aa", num_bytes=5) is cut
        True
    """

    def __init__(self) -> None:
        self._cuts: dict[int, StateSnapshot] = {}
        self._waiting: set[int] = set()
        self._margin_s = _MARGIN_S

    @property
    def waiting(self) -> frozenset[int]:
        """Who waits for a cut."""
        return frozenset(self._waiting)

    def wait(self, joiner: int) -> None:
        """Note that a replica needs a state."""
        self._waiting.add(joiner)

    def schedule(self, *, active: Iterable[int], step: int, step_s: float) -> StateSnapshot | None:
        """Choose a cut for those that wait, None where there are none.

        Args:
            active: Who keeps the state.
            step: The furthest step that anybody is known to be at.
            step_s: Seconds that an inner step takes, 0 where that is not known.
        """
        if not self._waiting:
            return None
        ahead = math.ceil(self._margin_s / step_s) + 1 if step_s > 0 else 2
        cut = self._cuts.setdefault(step + ahead, StateSnapshot(step=step + ahead))
        cut.joiners |= self._waiting
        cut.asked = tuple(active)
        self._waiting.clear()
        return cut

    def hold(self, step: int, replica: int, *, root: str, num_bytes: int) -> StateSnapshot:
        """Note that a replica holds the state of a cut."""
        cut = self._cuts.setdefault(step, StateSnapshot(step=step))
        cut.holders[replica] = root, num_bytes
        if cut.joiners:
            self._margin_s = max(_MARGIN_S, self._margin_s / 2)
        self._forget_old()
        return cut

    def miss(self, step: int, replica: int) -> None:
        """Note that a replica was past the cut; where all were, those that fetch it wait again."""
        cut = self._cuts.get(step)
        if cut is None:
            return
        cut.missed.add(replica)
        self._give_up(cut)

    def forget(self, replica: int) -> None:
        """Let a replica go."""
        self._waiting.discard(replica)
        for cut in list(self._cuts.values()):
            cut.holders.pop(replica, None)
            cut.joiners.discard(replica)
            cut.asked = tuple(one for one in cut.asked if one != replica)
            self._give_up(cut)

    def loaded(self, joiner: int) -> None:
        """Note that a replica needs no state any more."""
        self._waiting.discard(joiner)
        for cut in self._cuts.values():
            cut.joiners.discard(joiner)

    def wanted(self) -> list[StateSnapshot]:
        """Return the cuts that somebody fetches, or will."""
        return [cut for cut in self._cuts.values() if cut.joiners]

    def of(self, joiner: int) -> StateSnapshot | None:
        """Return the cut whose state a replica is to fetch, None where there is none yet."""
        return next((cut for cut in self._cuts.values() if joiner in cut.joiners), None)

    def needed_step(self) -> int | None:
        """Return the earliest step whose state, and the rounds after it, somebody needs."""
        return min((cut.step for cut in self._cuts.values() if cut.joiners), default=None)

    def _give_up(self, cut: StateSnapshot) -> None:
        """Let those wait again that fetch what nobody will hold."""
        if cut.joiners and not cut.holders and not set(cut.asked) - cut.missed:
            self._waiting |= cut.joiners
            self._margin_s = min(2 * self._margin_s, _MOST_MARGIN_S)
            del self._cuts[cut.step]

    def _forget_old(self) -> None:
        idle = [step for step, cut in sorted(self._cuts.items()) if not cut.joiners]
        for step in idle[:-_KEPT]:
            del self._cuts[step]
