"""The latest answer of RAS beside the earlier ones: what has stood still, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.monitor.nccl.values import HASH_LETTERS, CommunicatorState, Member, Numbers, Snapshot

# Answers that are closer together than this are of one moment.
_LEAST_APART_S = 1.0
_LONG_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """For how long something is as it is.

    Attributes:
        num: How many answers show it so, the latest included.
        since_s: When the first of them was, in seconds of RAS's clock; 0 where unknown.
        apart_s: Seconds from the first of them to the latest; NaN where unknown.
        has_moved: Whether an earlier answer shows it otherwise.
    """

    num: int
    since_s: float
    apart_s: float
    has_moved: bool

    @property
    def has_stood(self) -> bool:
        """Whether two answers of different moments show it so."""
        return self.num > 1 and not self.apart_s < _LEAST_APART_S

    @property
    def is_long(self) -> bool:
        """Whether it is known to have stood for half a minute."""
        return self.has_stood and self.apart_s >= _LONG_S

    @property
    def lasted(self) -> float | str:
        """Seconds for which it has been seen so, for a finding."""
        if self.num == 1:
            return "one answer only"
        return "unknown" if math.isnan(self.apart_s) else round(self.apart_s, 3)

    @property
    def said(self) -> str:
        """For how long, in words."""
        how_long = "between them" if math.isnan(self.apart_s) else f"in {self.apart_s:.0f} s"
        return f"nothing of it has changed {how_long} ({self.num} answers)"


class Standing:
    """All answers, in order.

    Args:
        snapshots: At least one, the latest last.
        trust: Part of the lines that could be used, in [0, 1].
    """

    def __init__(self, snapshots: Sequence[Snapshot], trust: float) -> None:
        self.snapshots = snapshots
        self.latest = snapshots[-1]
        self.trust = trust
        self._numbers = Numbers(
            (one.communicator, one.size, rank, member.seat)
            for snapshot in snapshots
            for one in snapshot.communicators
            for rank, member in one.members.items()
        )

    def number(self, one: CommunicatorState, rank: int) -> int:
        """Return the job's own number of a rank, or the communicator's where nothing better is known."""
        return self._numbers.of(one.communicator, rank)

    def seats(self, ranks: Iterable[tuple[CommunicatorState, int]]) -> list[str]:
        """Return where ranks run, in words, of the first 16."""
        told: list[str] = []
        for one, rank in ranks:
            member = one.members.get(rank)
            if member is not None and member.seat is not None and len(told) < 16:
                gpu = f", GPU {member.gpu}" if member.gpu >= 0 else ""
                told.append(f"rank {rank} of {one.communicator}: {member.host}, process {member.pid}{gpu}")
        return told

    def has_trouble(self, one: CommunicatorState) -> bool:
        """Return whether members of a communicator are lost or have failed, which explains what else is odd."""
        return any(member.lost or member.init_error or member.async_error for member in one.members.values())

    def first_s(self, shows: Callable[[Snapshot], bool]) -> float:
        """Return when the first of the latest answers was that show something; 0 where unknown."""
        first = self.latest
        for snapshot in reversed(self.snapshots):
            if not shows(snapshot):
                break
            first = snapshot
        return first.at_s or 0.0

    def unchanged(self, one: CommunicatorState, value: Callable[[Member], Any]) -> Unchanged:
        """Return since when a communicator's members are all as they are, as far as answers tell of both."""
        num, first, has_moved = 1, self.latest, False
        for snapshot in reversed(self.snapshots[:-1]):
            earlier = next((other for other in snapshot.communicators if other.communicator == one.communicator), None)
            same = None if earlier is None else _is_same(one, earlier, value)
            if not same:
                # text leaves out communicators that are well: how far they were then nobody knows
                has_moved = same is False
                break
            num, first = num + 1, snapshot
        known = first.at_s is not None and self.latest.at_s is not None
        apart_s = (self.latest.at_s or 0.0) - (first.at_s or 0.0) if known else math.nan
        return Unchanged(num=num, since_s=first.at_s or 0.0, apart_s=apart_s, has_moved=has_moved)


def _is_same(one: CommunicatorState, other: CommunicatorState, value: Callable[[Member], Any]) -> bool | None:
    """Return whether two answers tell the same of a communicator, where both tell; none where they do not."""
    told, then = ({(kind, count): num for kind, count, num in state.unlisted} for state in (one, other))
    both = [told == then] if told and then else []
    for rank in one.members.keys() & other.members.keys():
        now, before = value(one.members[rank]), value(other.members[rank])
        if isinstance(now, dict) and isinstance(before, dict):
            both += [now[kind] == before[kind] for kind in now.keys() & before.keys()]
        elif now and before:
            both.append(now == before)
    return all(both) if both else None


def in_order(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return answers by their times, or as they came where one has none.

    Example:
        >>> first, second = Snapshot(source="b", at_s=2.0), Snapshot(source="a", at_s=1.0)
        >>> [one.source for one in in_order([first, second])]
        ['a', 'b']
    """
    if any(one.at_s is None for one in snapshots):
        return list(snapshots)
    return sorted(snapshots, key=lambda one: one.at_s or 0.0)


def short_hash(communicator: str) -> str:
    """Return a communicator's hash as the Inspector writes it, which cuts it.

    Example:
        >>> short_hash("0x7f8c496ae9f661a3")
        '0x7f8c496ae9f661'
    """
    return communicator[:HASH_LETTERS]
