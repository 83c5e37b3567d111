"""Disputes about parts: a member says that another one's part is bad, and the others compare it with their copies.

The coordinator sees no part. It asks every active member what it makes of its own copy: all decode the same bytes
alike. A dispute is settled once all have answered, or their time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from thinwire.elastic.protocol import PART_FAULTS, PartFault, PartVerdict

# Seconds for the answers: who has not applied the round yet answers when it has.
_ANSWER_S = 15.0
_MAX_OPEN, _MAX_OPEN_EACH = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """Report of a member on a part."""

    verdict: PartVerdict  # whether it can be used; unknown to who holds no copy of it
    sha256: str = ""  # hash of the bytes that it saw; empty where they could not be read
    since: int = 0  # where it is bad: the round of the first bad part in a row
    num_parts: int = 0  # how many in a row were bad
    fault: PartFault = "non_finite"  # what is wrong with it
    why: str = ""  # the error's text

    def left_out_text(self, round_id: int, *, of: str, are_two: bool) -> str:
        """Return a finding about a part that was left out."""
        detail = f" ({self.why})" if self.why else ""
        unknown = "; of two replicas it is not known which one is wrong, so neither is dropped" if are_two else ""
        fault = PART_FAULTS[self.fault]
        return f"round {round_id} was applied without the part of {of}: its parts {fault}{detail}{unknown}"


@dataclass(slots=True, kw_only=True)
class PartDispute:
    """One part, and what members say of it."""

    round_id: int
    member: int  # whose part it is
    is_counted: bool  # whether the round's mean was decided with it
    until_s: float
    accusers: dict[int, PartReport] = field(default_factory=dict)
    answers: dict[int, PartReport] = field(default_factory=dict)

    def agreeing(self) -> set[int]:
        """Return the others that found it bad."""
        found = {one for one, answer in self.answers.items() if answer.verdict == "bad"}
        return (found | set(self.accusers)) - {self.member}

    def refuters(self, accuser: int) -> set[int]:
        """Return those that find the very bytes sound that an accuser calls bad."""
        said = self.accusers[accuser].sha256
        # what the mean was decided with has come to all: an accuser without a hash of it has not looked
        is_any = not said and self.is_counted
        sound = {one: answer.sha256 for one, answer in self.answers.items() if answer.verdict == "sound"}
        return {one for one, sha256 in sound.items() if is_any or sha256 == said}

    def has_sound_copy(self) -> bool:
        """Return whether another member than its own sender finds it sound."""
        return any(answer.verdict == "sound" for one, answer in self.answers.items() if one != self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Outcome of a dispute."""

    dispute: PartDispute
    is_bad: bool  # whether its sender is to go
    liars: tuple[int, ...]  # accusers that are to go: most others hold the bytes that they name, and find nothing wrong


class PartDisputes:
    """Open disputes; pure, time comes in as a number.

    Args:
        are_most: Returns whether members are most of others, also by their addresses.

    Example:
        >>> disputes = PartDisputes(lambda some, of: 2 * len(some) > len(of))
        >>> claim = PartReport(verdict="bad", sha256="aa")
        >>> disputes.accuse(2, claim, round_id=7, member=0, is_counted=True, now_s=0.0)
        True
        >>> for replica in (0, 1):
        ...     disputes.answer(replica, PartReport(verdict="sound", sha256="aa"), round_id=7, member=0)
        >>> [(one.is_bad, one.liars) for one in disputes.settle({0, 1, 2}, now_s=1.0)]
        [(False, (2,))]
    """

    def __init__(self, are_most: Callable[[set[int], set[int]], bool]) -> None:
        self._are_most = are_most
        self._open: dict[tuple[int, int], PartDispute] = {}

    def accuse(
        self, accuser: int, report: PartReport, *, round_id: int, member: int, is_counted: bool, now_s: float
    ) -> bool:  # fmt: skip
        """Note that a member found another one's part bad; return whether that begins a dispute."""
        found = self._open.get((round_id, member))
        if found is not None:
            found.accusers[accuser] = report
            return False
        own = sum(accuser in one.accusers for one in self._open.values())
        if len(self._open) >= _MAX_OPEN or own >= _MAX_OPEN_EACH:
            return False
        self._open[round_id, member] = PartDispute(
            round_id=round_id, member=member, is_counted=is_counted, until_s=now_s + _ANSWER_S,
            accusers={accuser: report},
        )  # fmt: skip
        return True

    def answer(self, replica: int, report: PartReport, *, round_id: int, member: int) -> None:
        """Note what a member makes of its own copy; the first answer counts."""
        found = self._open.get((round_id, member))
        if found is not None and replica not in found.accusers:
            found.answers.setdefault(replica, report)

    def settle(self, active: Collection[int], *, now_s: float) -> list[Settled]:
        """Close the disputes that all active members have answered, or whose time has ended."""
        settled = []
        for key, one in list(self._open.items()):
            others = set(active) - {one.member}
            # its sender's own answer matters only beside that of another one that finds it sound
            asked = others | {one.member} if one.has_sound_copy() else others
            if not asked - one.accusers.keys() - one.answers.keys() or now_s >= one.until_s:
                del self._open[key]
                settled.append(self._settle(one, others, active=set(active)))
        return settled

    def _settle(self, one: PartDispute, others: set[int], *, active: set[int]) -> Settled:
        # of two members it is not known which one is wrong
        are_several = len(active) > 2
        is_disputed = one.has_sound_copy() or not one.accusers or not are_several
        is_bad = not is_disputed and self._are_most(one.agreeing() & others, others)
        liars = [
            accuser
            for accuser in sorted(set(one.accusers) & active)
            if are_several and self._are_most(one.refuters(accuser) & active, active - {accuser})
        ]
        return Settled(dispute=one, is_bad=is_bad, liars=tuple(liars))

    def forget(self, replica: int) -> None:
        """Remove a member that has gone."""
        self._open = {key: one for key, one in self._open.items() if one.member != replica}
        for one in self._open.values():
            one.accusers.pop(replica, None)
            one.answers.pop(replica, None)
