"""Choice of the parts that make a round's mean: a pure function of the votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

# Up to so many voters every group is looked at; from there on the best is sought one by one.
_MOST_EXACT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one replica says of a round.

    Attributes:
        has: Whose parts it holds, its own among them; only parts that refer to the same global value as its own.
        reference_hash: Hash of that value.
    """

    has: frozenset[int]
    reference_hash: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which parts make the mean, and who holds all of them.

    Attributes:
        members: Whose parts, in ascending order.
        holders: All that hold all of these, also those whose own part is not among them; in ascending order.
    """

    members: tuple[int, ...]
    holders: tuple[int, ...]


def decide(votes: Mapping[int, Vote]) -> Choice:
    """Choose the largest group of voters that hold each other's parts; all that the whole group holds is in the mean.

    So a part counts, whatever became of its sender since, as soon as the group holds it, and nobody needs a part that
    only some hold. Where groups are equally large, the one whose parts most voters hold is taken, then the one with the
    most parts, then the one with the lowest numbers; a voter of its own is a group.

    Args:
        votes: By replica, at least one.

    Raises:
        ValueError: There is no vote, or one does not hold its own part.

    Example:
        >>> whole, cut_off = frozenset({0, 1}), frozenset({1, 2})
        >>> decide({0: Vote(has=whole), 1: Vote(has=whole | cut_off), 2: Vote(has=cut_off)})
        Choice(members=(0, 1), holders=(0, 1))
        >>> decide({0: Vote(has=frozenset({0, 7})), 1: Vote(has=frozenset({0, 1, 7}))})  # 1 has not reached 0
        Choice(members=(0, 7), holders=(0, 1))
    """
    if not votes:
        raise ValueError("votes must hold at least one vote, got none")
    for voter, vote in votes.items():
        if voter not in vote.has:
            raise ValueError(f"replica {voter} must hold its own part, got {sorted(vote.has)}")
    choices = [(group, _choice(votes, group)) for group in _groups(votes)]
    return max(choices, key=lambda c: (len(c[0]), len(c[1].holders), len(c[1].members), [-one for one in c[0]]))[1]


def _choice(votes: Mapping[int, Vote], group: Sequence[int]) -> Choice:
    members = _common(votes, group)
    alike = votes[group[0]].reference_hash
    holders = tuple(one for one in sorted(votes) if votes[one].reference_hash == alike and members <= votes[one].has)
    return Choice(members=tuple(sorted(members)), holders=holders)


def _groups(votes: Mapping[int, Vote]) -> list[tuple[int, ...]]:
    voters = sorted(votes)
    if len(voters) > _MOST_EXACT:
        return [_grown(votes, first) for first in voters]
    for size in range(len(voters), 0, -1):
        found = [group for group in combinations(voters, size) if _is_mutual(votes, group)]
        if found:
            return found
    raise AssertionError("a single voter is a group")


def _grown(votes: Mapping[int, Vote], first: int) -> tuple[int, ...]:
    """Return a group around a voter: those first that most others get on with."""
    group = [first]
    ties = {voter: sum(_are_mutual(votes, voter, other) for other in votes if other != voter) for voter in votes}
    for voter in sorted(votes, key=lambda one: (-ties[one], one)):
        if voter != first and all(_are_mutual(votes, voter, member) for member in group):
            group.append(voter)
    return tuple(sorted(group))


def _is_mutual(votes: Mapping[int, Vote], group: Sequence[int]) -> bool:
    return all(_are_mutual(votes, one, other) for one, other in combinations(group, 2))


def _are_mutual(votes: Mapping[int, Vote], one: int, other: int) -> bool:
    first, second = votes[one], votes[other]
    return first.reference_hash == second.reference_hash and other in first.has and one in second.has


def _common(votes: Mapping[int, Vote], group: Sequence[int]) -> frozenset[int]:
    return frozenset.intersection(*(votes[voter].has for voter in group))
