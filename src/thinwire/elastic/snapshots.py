"""Snapshots of the global state for joining replicas: their steps, holders and hashes.

At a step, after all rounds due by then, the global parameters and momenta are the same on every replica. A snapshot for
joining replicas is scheduled a little ahead of all, so that each can keep a copy when it gets there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

# Seconds for the message to reach all before the fastest is there; doubled where that was too short.
_MARGIN_S, _MAX_MARGIN_S = 0.5, 16.0
_KEPT = 4
# A state is asked for once a second; after so many times it is given without those that do not answer.
_MAX_REPEATS = 10


@dataclass(slots=True, kw_only=True)
class StateSnapshot:
    """One snapshot."""

    step: int
    holders: dict[int, tuple[str, int]] = field(default_factory=dict)  # by replica, the state's hash and size
    joiners: set[int] = field(default_factory=set)  # replicas that fetch it
    missed: set[int] = field(default_factory=set)  # replicas that were past its step already
    asked: tuple[int, ...] = ()  # replicas to keep it; empty where they do so by themselves, for a checkpoint
    num_repeats: int = 0  # how often it was asked for again since a first replica held it

    @property
    def agreed(self) -> tuple[str, int] | None:
        """The hash and size that most holders have; ties go to the holder with the lowest number."""
        counts: dict[tuple[str, int], int] = {}
        for replica in sorted(self.holders):
            counts[self.holders[replica]] = counts.get(self.holders[replica], 0) + 1
        return max(counts, key=lambda value: counts[value], default=None)

    def is_sure(self, *, num_active: int) -> bool:
        """Return whether the agreed state is that of most replicas, or no more of them will say which is theirs."""
        most = sum(found == self.agreed for found in self.holders.values())
        num_asked = len(self.asked) or num_active
        num_answered = len(set(self.holders) | self.missed)
        return 2 * most > num_asked or num_answered >= num_asked or self.num_repeats >= _MAX_REPEATS

    def agreeing(self) -> tuple[int, ...]:
        """Return the holders of the agreed state."""
        return tuple(sorted(replica for replica, found in self.holders.items() if found == self.agreed))

    def odd(self) -> tuple[int, ...]:
        """Return the holders of another state."""
        return tuple(sorted(replica for replica, found in self.holders.items() if found != self.agreed))


class StateSnapshots:
    """All snapshots that a replica may need; pure.

    Attributes:
        waiting: Replicas that wait for a snapshot.

    Example:
        >>> snapshots = StateSnapshots()
        >>> snapshots.waiting.add(7)
        >>> one = snapshots.schedule(active=(0, 1), step=10, step_s=0.25)
        >>> one.step, sorted(one.joiners)
        (13, [7])
        >>> snapshots.hold(13, 0, root="aa", num_bytes=5) is one
        True
    """

    def __init__(self) -> None:
        self._snapshots: dict[int, StateSnapshot] = {}
        self.waiting: set[int] = set()
        self._margin_s = _MARGIN_S

    def schedule(self, *, active: Iterable[int], step: int, step_s: float) -> StateSnapshot | None:
        """Choose a step for those that wait, None where none does.

        Args:
            active: Replicas that keep the state.
            step: The furthest known step of any replica.
            step_s: Seconds of an inner step, 0 where it is unknown.
        """
        if not self.waiting:
            return None
        ahead = math.ceil(self._margin_s / step_s) + 1 if step_s > 0 else 2
        snapshot = self._snapshots.setdefault(step + ahead, StateSnapshot(step=step + ahead))
        snapshot.joiners |= self.waiting
        snapshot.asked = tuple(active)
        self.waiting.clear()
        return snapshot

    def hold(self, step: int, replica: int, *, root: str, num_bytes: int) -> StateSnapshot:
        """Note that a replica holds the state of a step."""
        snapshot = self._snapshots.setdefault(step, StateSnapshot(step=step))
        snapshot.holders[replica] = root, num_bytes
        if snapshot.joiners:
            self._margin_s = max(_MARGIN_S, self._margin_s / 2)
        idle = [step for step, one in sorted(self._snapshots.items()) if not one.joiners]
        for old in idle[:-_KEPT]:
            del self._snapshots[old]
        return snapshot

    def miss(self, step: int, replica: int) -> None:
        """Note that a replica was past the step; where all were, those that fetch it wait again."""
        if (snapshot := self._snapshots.get(step)) is not None:
            snapshot.missed.add(replica)
            self._give_up(snapshot)

    def forget(self, replica: int) -> None:
        """Remove a replica."""
        self.waiting.discard(replica)
        for snapshot in list(self._snapshots.values()):
            snapshot.holders.pop(replica, None)
            snapshot.joiners.discard(replica)
            snapshot.asked = tuple(one for one in snapshot.asked if one != replica)
            self._give_up(snapshot)

    def loaded(self, joiner: int) -> None:
        """Note that a replica needs no state any more."""
        self.waiting.discard(joiner)
        for snapshot in self._snapshots.values():
            snapshot.joiners.discard(joiner)

    def wanted(self) -> list[StateSnapshot]:
        """Return the snapshots that a replica fetches, or will."""
        return [snapshot for snapshot in self._snapshots.values() if snapshot.joiners]

    def of(self, joiner: int) -> StateSnapshot | None:
        """Return the snapshot that a replica is to fetch, None where there is none yet."""
        return next((snapshot for snapshot in self._snapshots.values() if joiner in snapshot.joiners), None)

    def needed_step(self) -> int | None:
        """Return the earliest step whose state, and the rounds after it, a joining replica needs."""
        return min((snapshot.step for snapshot in self._snapshots.values() if snapshot.joiners), default=None)

    def _give_up(self, snapshot: StateSnapshot) -> None:
        """Let those wait again that fetch a state that no replica will hold."""
        if snapshot.joiners and not snapshot.holders and not set(snapshot.asked) - snapshot.missed:
            self.waiting |= snapshot.joiners
            self._margin_s = min(2 * self._margin_s, _MAX_MARGIN_S)
            del self._snapshots[snapshot.step]
