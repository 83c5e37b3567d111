"""Ranks that have launched fewer collectives than others of their communicator, and jobs of which none moves.

RAS prints the few, who are often those that are ahead; here those are named that have not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.progress import Standing, Unchanged
from thinwire.monitor.nccl.values import CommunicatorState

_MOST_NAMED = 64
_ASK_AGAIN = "ask RAS again after some seconds, and diagnose both answers together: one that moves is well"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """Those of a communicator that have launched least of a kind."""

    one: CommunicatorState
    kind: str
    ranks: frozenset[int]
    others: frozenset[int]
    lowest: int
    highest: int
    num_unlisted: int

    @property
    def num(self) -> int:
        return len(self.ranks) or self.num_unlisted

    @property
    def num_others(self) -> int:
        return max(len(self.others), self.one.size - self.num)


def find_behind(standing: Standing) -> list[Finding]:
    """Return the ranks that have not come, and those that call something else than the others."""
    found: list[tuple[Finding, set[object], set[object]]] = []
    for one in standing.latest.communicators:
        behind = list(_behind(one))
        if not behind or standing.has_trouble(one):
            continue
        unchanged = standing.unchanged(one, lambda member: dict(member.counts))
        if (swapped := _swapped(behind)) is not None:
            found.append((_desync(standing, *swapped), set(), set()))
        elif not unchanged.has_moved or unchanged.has_stood:
            first = max(behind, key=lambda own: own.highest - own.lowest)
            ranks, others = (_seats(one, own) for own in (first.ranks, first.others))
            found.append((_not_come(standing, first, unchanged), ranks, others))
    return [finding for finding, ranks, waiting in found if not _waits(ranks, waiting, found)]


def _waits(
    ranks: set[object], for_them: set[object], found: Sequence[tuple[Finding, set[object], set[object]]]
) -> bool:
    """Return whether those that are behind in one communicator wait in another one, for somebody else."""
    return bool(ranks) and any(
        ranks <= waiting and not behind <= for_them for _, behind, waiting in found if behind and not behind & ranks
    )


def _seats(one: CommunicatorState, ranks: frozenset[int]) -> set[object]:
    """Return where ranks run; none where that is not known of all."""
    seats = [one.members[rank].seat for rank in ranks]
    return set(seats) if None not in seats else set()


def _behind(one: CommunicatorState) -> Iterator[_Behind]:
    kinds = {kind for member in one.members.values() for kind in member.counts} | {kind for kind, _, _ in one.unlisted}
    for kind in sorted(kinds):
        counts = {rank: member.counts[kind] for rank, member in one.members.items() if kind in member.counts}
        unlisted = {count: num for name, count, num in one.unlisted if name == kind}
        told = {*counts.values(), *unlisted}
        if len(told) > 1:
            lowest = min(told)
            ranks = frozenset(rank for rank, count in counts.items() if count == lowest)
            yield _Behind(
                one=one, kind=kind, ranks=ranks, others=frozenset(counts) - ranks, lowest=lowest, highest=max(told),
                num_unlisted=unlisted.get(lowest, 0),
            )  # fmt: skip


def _swapped(behind: Sequence[_Behind]) -> tuple[_Behind, _Behind] | None:
    """Return two kinds of which a rank has launched fewer of the one and more of the other than another rank has.

    Of ranks that all call the same in the same order, one is never ahead in one kind and behind in another.
    """
    for one in behind:
        for other in behind:
            if one.kind < other.kind and one.ranks & other.others and other.ranks & one.others:
                return one, other
    return None


def _desync(standing: Standing, one: _Behind, other: _Behind) -> Finding:
    few, many = sorted((one.ranks & other.others, other.ranks & one.others), key=len)
    is_sure = len(few) < len(many)
    calls, lacks = (other, one) if few <= one.ranks else (one, other)
    ranks = few if is_sure else few | many
    numbers = tuple(sorted(standing.number(one.one, rank) for rank in ranks))[:_MOST_NAMED]
    places = [numbers] if is_sure else [(number,) for number in numbers]
    return Finding(
        kind="desync",
        places=tuple(Place(kind="rank", ranks=own) for own in places),
        since_s=standing.latest.at_s or 0.0, since_round=lacks.lowest + 1,
        evidence={
            "communicators": [one.one.communicator], "ranks": list(numbers),
            "launched": [f"{own.kind}: {own.lowest} to {own.highest}" for own in (one, other)],
            "seats": standing.seats([(one.one, rank) for rank in sorted(ranks)]),
        },
        text=f"{Place(kind='rank', ranks=numbers).title} of communicator {one.one.communicator}: more {calls.kind} and "
        f"fewer {lacks.kind} launched than by others, so they call different collectives.",
        confidence=(0.8 if is_sure else 0.5) * standing.trust,
        remedy="compare the code paths of these ranks: a branch on data, a rank number or an exception that was "
        "swallowed",
        probe="" if is_sure else "run with one more rank: the side with most ranks is right",
    )  # fmt: skip


def _not_come(standing: Standing, behind: _Behind, unchanged: Unchanged) -> Finding:
    one = behind.one
    numbers = tuple(sorted(standing.number(one, rank) for rank in behind.ranks))
    named = numbers[:_MOST_NAMED] if behind.ranks else ()
    place = _place(standing, one, behind, named)
    is_few = behind.num < behind.num_others
    stood = 0.9 if unchanged.is_long else 0.75
    sure = (stood if is_few else 0.6) if unchanged.has_stood else 0.35
    verb = "have" if behind.num > 1 and place.kind != "host" else "has"
    who = place.title if named else f"A group of {behind.num} ranks, which RAS did not name,"
    return Finding(
        kind="non-communication hang",
        places=(place,),
        since_s=unchanged.since_s, since_round=behind.lowest + 1,
        evidence={
            "communicators": [one.communicator], "kind": behind.kind, "launched": behind.lowest,
            "others_launched": behind.highest, "num_behind": behind.num, "ranks": list(named),
            "num_others": behind.num_others, "unchanged_s": unchanged.lasted, "answers": unchanged.num,
            "seats": standing.seats([(one, rank) for rank in sorted(behind.ranks)]),
        },
        text=f"{who} {verb} not come to {behind.kind} {behind.lowest + 1} of communicator {one.communicator}, which "
        f"others have launched up to {behind.highest}"
        + (f"; {unchanged.said}." if unchanged.has_stood else "; they may be on their way.")
        + ("" if is_few else " As these are most of them, the others may have called it once too often instead."),
        confidence=(sure if named else min(sure, 0.5)) * standing.trust,
        remedy="take the stacks of these ranks (py-spy dump): they hang in their own code, or wait for somebody else"
        if unchanged.has_stood else _ASK_AGAIN,
        probe="" if named else "ask RAS for all ranks: ncclras -f json",
    )  # fmt: skip


def _place(standing: Standing, one: CommunicatorState, behind: _Behind, numbers: tuple[int, ...]) -> Place:
    """Return the host whose ranks these are, where all hosts are known, or the ranks."""
    if not numbers:
        return Place(kind="communicator")
    hosts = {one.members[rank].host for rank in behind.ranks}
    (host, *others) = sorted(hosts)
    beside = [member for rank, member in one.members.items() if member.host == host and rank not in behind.ranks]
    if host and len(behind.ranks) > 1 and not others and not beside and standing.latest.is_whole:
        return Place(kind="host", hosts=(host,))
    return Place(kind="rank", ranks=numbers)


def find_still(standing: Standing) -> list[Finding]:
    """Return that no communicator of the job has moved for half a minute, where all ranks count alike.

    Only RAS's JSON tells counts of communicators that are well. It does not count messages (Send, Recv).
    """
    counting = [one for one in standing.latest.communicators if any(_total(one))]
    stood = [standing.unchanged(one, lambda member: dict(member.counts)) for one in counting]
    if not counting or not standing.latest.is_whole or not all(one.is_long for one in stood):
        return []
    least = min(stood, key=lambda one: one.apart_s)
    counts: Mapping[str, list[int]] = {one.communicator: [max(_total(one))] for one in counting[:16]}
    return [Finding(
        kind="communication hang", places=(Place(kind="job"),), since_s=least.since_s,
        evidence={"unchanged_s": least.lasted, "answers": least.num, "communicators": [*counts],
                  "launched": [max(own) for own in counts.values()]},
        text=f"No rank has launched a collective in {least.apart_s:.0f} s, and all have launched as many: either all "
        "are in one that does not end, which is a wire or a GPU, or all do something else, such as a checkpoint.",
        confidence=0.4 * standing.trust,
        remedy="take the stacks of some ranks (py-spy dump): those in a wait of CUDA are in the collective",
        probe="run `thinwire diagnose test` on these hosts",
    )]  # fmt: skip


def _total(one: CommunicatorState) -> list[int]:
    return [sum(member.counts.values()) for member in one.members.values()]
