"""Findings from NCCL RAS: missing processes, lagging ranks, inconsistent states and errors.

One answer of RAS is no picture of one moment: ranks that count differently may all be on their way. Only where a
second answer counts the same have they stopped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.monitor.findings import Evidence, Finding, Place
from thinwire.runlog.nccl_values import CommunicatorState, Numbers, Process, RankState, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RasConfig:
    """Constants of the detectors on RAS answers; not measured on a GPU job."""

    min_apart_s: float = 1.0  # between answers of different moments
    long_s: float = 30.0  # standstill of a whole job that is reported
    max_named: int = 64  # ranks in a finding


RAS = RasConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """Time for which a state has not changed."""

    num: int  # how many answers show it so, the latest included
    since_s: float  # when the first of them was, in seconds of RAS's clock; 0 where unknown
    apart_s: float  # seconds from the first of them to the latest; NaN where unknown
    has_moved: bool  # whether an earlier answer shows it otherwise

    @property
    def has_stood(self) -> bool:
        """Whether two answers of different moments show it so."""
        return self.num > 1 and not self.apart_s < RAS.min_apart_s

    @property
    def is_long(self) -> bool:
        """Whether it is known to have stood for half a minute."""
        return self.has_stood and self.apart_s >= RAS.long_s

    @property
    def lasted(self) -> float | str:
        """Seconds without a change, for a finding."""
        if self.num == 1:
            return "one answer only"
        return "unknown" if math.isnan(self.apart_s) else round(self.apart_s, 3)

    @property
    def said(self) -> str:
        """The same as text."""
        how_long = "between them" if math.isnan(self.apart_s) else f"in {self.apart_s:.0f} s"
        return f"nothing of it has changed {how_long} ({self.num} answers)"


class RasHistory:
    """All answers of RAS, in order."""

    def __init__(self, snapshots: Sequence[Snapshot], trust: float) -> None:
        self.snapshots = snapshots
        self.latest = snapshots[-1]
        self.trust = trust
        self._numbers = Numbers(
            (one.communicator, one.size, rank, member.location)
            for snapshot in snapshots
            for one in snapshot.communicators
            for rank, member in one.members.items()
        )

    def number(self, one: CommunicatorState, rank: int) -> int:
        """Return the job's own number of a rank, or the communicator's where nothing better is known."""
        return self._numbers.of(one.communicator, rank)

    def locations(self, ranks: Iterable[tuple[CommunicatorState, int]]) -> list[str]:
        """Return host, process and GPU of the first 16 ranks as texts."""
        told: list[str] = []
        for one, rank in ranks:
            member = one.members.get(rank)
            if member is not None and member.location is not None and len(told) < 16:
                gpu = f", GPU {member.gpu}" if member.gpu >= 0 else ""
                told.append(f"rank {rank} of {one.communicator}: {member.host}, process {member.pid}{gpu}")
        return told

    def has_trouble(self, one: CommunicatorState) -> bool:
        """Return whether members of a communicator are lost or have failed, which explains other oddities."""
        return any(member.lost or member.init_error or member.async_error for member in one.members.values())

    def first_s(self, shows: Callable[[Snapshot], bool]) -> float:
        """Return the time of the first of the latest answers that show something; 0 if unknown."""
        first = self.latest
        for snapshot in reversed(self.snapshots):
            if not shows(snapshot):
                break
            first = snapshot
        return first.at_s or 0.0

    def unchanged(self, one: CommunicatorState, value: Callable[[RankState], Any]) -> Unchanged:
        """Return the time for which a communicator's members have not changed."""
        num, first, has_moved = 1, self.latest, False
        for snapshot in reversed(self.snapshots[:-1]):
            earlier = next((other for other in snapshot.communicators if other.communicator == one.communicator), None)
            same = None if earlier is None else _is_same(one, earlier, value)
            if not same:
                # the text format leaves healthy communicators out: their counts then are unknown
                has_moved = same is False
                break
            num, first = num + 1, snapshot
        known = first.at_s is not None and self.latest.at_s is not None
        apart_s = (self.latest.at_s or 0.0) - (first.at_s or 0.0) if known else math.nan
        return Unchanged(num=num, since_s=first.at_s or 0.0, apart_s=apart_s, has_moved=has_moved)


def _is_same(one: CommunicatorState, other: CommunicatorState, value: Callable[[RankState], Any]) -> bool | None:
    """Return whether two answers agree about a communicator; None if they share no value."""
    told, then = ({(kind, count): num for kind, count, num in state.unlisted} for state in (one, other))
    both = [told == then] if told and then else []
    for rank in one.members.keys() & other.members.keys():
        now, before = value(one.members[rank]), value(other.members[rank])
        if isinstance(now, dict) and isinstance(before, dict):
            both += [now[kind] == before[kind] for kind in now.keys() & before.keys()]
        elif now and before:
            both.append(now == before)
    return all(both) if both else None


_ASK_AGAIN = "ask RAS again after some seconds, and diagnose both answers together"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """Ranks of a communicator that have launched the fewest collectives of a kind."""

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


def find_behind(history: RasHistory) -> list[Finding]:
    """Return the lagging ranks, and those that call other collectives."""
    found: list[tuple[Finding, set[object], set[object]]] = []
    for one in history.latest.communicators:
        behind = list(_behind(one))
        # lost or failed members explain why counts differ
        if not behind or history.has_trouble(one):
            continue
        unchanged = history.unchanged(one, lambda member: dict(member.counts))
        if (swapped := _swapped(behind)) is not None:
            found.append((_desync(history, *swapped), set(), set()))
        elif not unchanged.has_moved or unchanged.has_stood:
            first = max(behind, key=lambda own: own.highest - own.lowest)
            ranks, others = (_locations(one, own) for own in (first.ranks, first.others))
            found.append((_not_come(history, first, unchanged), ranks, others))
    return [finding for finding, ranks, waiting in found if not _waits(ranks, waiting, found)]


def _waits(
    ranks: set[object], for_them: set[object], found: Sequence[tuple[Finding, set[object], set[object]]]
) -> bool:
    """Return whether the lagging ranks of one communicator wait in another one for other ranks."""
    return bool(ranks) and any(
        ranks <= waiting and not behind <= for_them for _, behind, waiting in found if behind and not behind & ranks
    )


def _locations(one: CommunicatorState, ranks: frozenset[int]) -> set[object]:
    """Return the locations of ranks; none if one is unknown."""
    locations = [one.members[rank].location for rank in ranks]
    return set(locations) if None not in locations else set()


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
    """Return two kinds of which one rank has launched fewer of the first and more of the second than another."""
    # of ranks that all call the same in the same order, one is never ahead in one kind and behind in another
    for one in behind:
        for other in behind:
            if one.kind < other.kind and one.ranks & other.others and other.ranks & one.others:
                return one, other
    return None


def _desync(history: RasHistory, one: _Behind, other: _Behind) -> Finding:
    few, many = sorted((one.ranks & other.others, other.ranks & one.others), key=len)
    # of two sides of equal size either may be wrong
    is_sure = len(few) < len(many)
    calls, lacks = (other, one) if few <= one.ranks else (one, other)
    ranks = few if is_sure else few | many
    numbers = tuple(sorted(history.number(one.one, rank) for rank in ranks))[: RAS.max_named]
    places = [numbers] if is_sure else [(number,) for number in numbers]
    return Finding(
        kind="desync",
        places=tuple(Place(kind="rank", ranks=own) for own in places),
        since_s=history.latest.at_s or 0.0, since_round=lacks.lowest + 1,
        evidence=Evidence(
            "ras_desync", communicators=[one.one.communicator], ranks=list(numbers),
            locations=history.locations([(one.one, rank) for rank in sorted(ranks)]),
            launched=[f"{own.kind}: {own.lowest} to {own.highest}" for own in (one, other)],
        ),
        text=f"{Place(kind='rank', ranks=numbers).title} of communicator {one.one.communicator}: more {calls.kind} and "
        f"fewer {lacks.kind} launched than by others, so they call different collectives.",
        confidence=(0.8 if is_sure else 0.5) * history.trust,
        remedy="compare the code paths of these ranks: a branch on data, a rank number or an exception that was "
        "swallowed",
        probe="" if is_sure else "run with one more rank: the side with most ranks is right",
    )  # fmt: skip


def _not_come(history: RasHistory, behind: _Behind, unchanged: Unchanged) -> Finding:
    one = behind.one
    numbers = tuple(sorted(history.number(one, rank) for rank in behind.ranks))
    named = numbers[: RAS.max_named] if behind.ranks else ()
    place = _place(history, one, behind, named)
    # a majority that lags may also mean that the others called once too often
    is_few = behind.num < behind.num_others
    stood = 0.9 if unchanged.is_long else 0.75
    sure = (stood if is_few else 0.6) if unchanged.has_stood else 0.35
    verb = "have" if behind.num > 1 and place.kind != "host" else "has"
    who = place.title if named else f"A group of {behind.num} ranks, which RAS did not name,"
    return Finding(
        kind="non-communication hang",
        places=(place,),
        since_s=unchanged.since_s, since_round=behind.lowest + 1,
        evidence=Evidence(
            "ras_lagging", communicators=[one.communicator], ranks=list(named),
            locations=history.locations([(one, rank) for rank in sorted(behind.ranks)]), kind=behind.kind,
            launched=behind.lowest, others_launched=behind.highest, num_behind=behind.num,
            num_others=behind.num_others, unchanged_s=unchanged.lasted, answers=unchanged.num,
        ),
        text=f"{who} {verb} not come to {behind.kind} {behind.lowest + 1} of communicator {one.communicator}, which "
        f"others have launched up to {behind.highest}"
        + (f"; {unchanged.said}." if unchanged.has_stood else "; they may be on their way.")
        + ("" if is_few else " As these are most of them, the others may have called it once too often instead."),
        confidence=(sure if named else min(sure, 0.5)) * history.trust,
        remedy="take the stacks of these ranks (py-spy dump): they hang in their own code, or wait for somebody else"
        if unchanged.has_stood else f"{_ASK_AGAIN}: one that moves is well",
        probe="" if named else "ask RAS for all ranks: ncclras -f json",
    )  # fmt: skip


def _place(history: RasHistory, one: CommunicatorState, behind: _Behind, numbers: tuple[int, ...]) -> Place:
    """Return the host with exactly these ranks, if all hosts are known, or the ranks."""
    if not numbers:
        return Place(kind="communicator")
    hosts = {one.members[rank].host for rank in behind.ranks}
    (host, *others) = sorted(hosts)
    beside = [member for rank, member in one.members.items() if member.host == host and rank not in behind.ranks]
    if host and len(behind.ranks) > 1 and not others and not beside and history.latest.is_whole:
        return Place(kind="host", hosts=(host,))
    return Place(kind="rank", ranks=numbers)


def _find_still(history: RasHistory) -> list[Finding]:
    """Return that no communicator has moved for half a minute, if all ranks have equal counts."""
    # only RAS's JSON tells counts of communicators that are well. It does not count messages (Send, Recv)
    totals = {
        one.communicator: max((sum(member.counts.values()) for member in one.members.values()), default=0)
        for one in history.latest.communicators
    }
    counting = [one for one in history.latest.communicators if totals[one.communicator]]
    stood = [history.unchanged(one, lambda member: dict(member.counts)) for one in counting]
    if not counting or not history.latest.is_whole or not all(one.is_long for one in stood):
        return []
    least = min(stood, key=lambda one: one.apart_s)
    counts = {one.communicator: totals[one.communicator] for one in counting[:16]}
    return [Finding(
        kind="communication hang", places=(Place(kind="job"),), since_s=least.since_s,
        evidence=Evidence(
            "ras_standstill", communicators=[*counts], unchanged_s=least.lasted, answers=least.num,
            launched=[*counts.values()],
        ),
        text=f"No rank has launched a collective in {least.apart_s:.0f} s, and all have launched as many: either all "
        "are in one that does not end, which is a wire or a GPU, or all do something else, such as a checkpoint.",
        confidence=0.4 * history.trust,
        remedy="take the stacks of some ranks (py-spy dump): those in a wait of CUDA are in the collective",
        probe="run `thinwire diagnose test` on these hosts",
    )]  # fmt: skip


REMOTE_ERROR = "Remote process error"
_SYSTEM_ERROR = "System error"


def find_in_snapshots(snapshots: Sequence[Snapshot], *, trust: float) -> list[Finding]:
    """Return the faults in the latest answer of RAS, compared with the earlier ones.

    Args:
        snapshots: Of one job, in any order where they have times, else in the order in which they were asked for.
        trust: Part of the lines that could be used, in [0, 1].
    """
    if not snapshots:
        return []
    has_times = all(one.at_s is not None for one in snapshots)
    history = RasHistory(sorted(snapshots, key=lambda one: one.at_s or 0.0) if has_times else snapshots, trust)
    gone = list(_find_lost(history))
    errors = list(_find_errors(history, is_lost=bool(gone)))
    states = list(_find_states(history))
    behind = find_behind(history)
    found = [*gone, *errors, *behind, *states]
    told = {name for one in found for name in one.evidence["communicators"]}
    bare = [  # RAS calls these faulty, and no finding is about them
        Finding(
            kind="non-communication hang", places=(Place(kind="communicator"),), since_s=history.latest.at_s or 0.0,
            evidence=Evidence("ras_suspect", communicators=[one.communicator], ras_says=one.errors, size=one.size),
            text=f"RAS calls a communicator {one.communicator} {one.errors}, and which ranks is not in what was read.",
            confidence=0.3 * history.trust,
            remedy="ask RAS for all: ncclras -f json, or verbose status",
        )
        for one in history.latest.communicators
        if not one.members and not one.unlisted and one.errors not in ("", "OK") and one.communicator not in told
    ]  # fmt: skip
    return [*found, *bare] or _find_still(history)


def _find_lost(history: RasHistory) -> Iterator[Finding]:
    """Yield processes that RAS cannot reach, those of a host together."""
    processes, ranks = _lost(history.latest)
    for state in ("dead", "unresponsive"):
        hosts = sorted({one.host for one in processes[state]} | {member.host for _, member in ranks[state]})
        for host in hosts:
            own = sorted({(one.pid, one.gpus) for one in processes[state] if one.host == host})
            members = [(name, one) for name, one in ranks[state] if one.host == host]
            if own or members:
                yield _gone(history, state, host, own, members)


_ByState = dict[str, list[tuple[CommunicatorState, RankState]]]


def _lost(latest: Snapshot) -> tuple[dict[str, list[Process]], _ByState]:
    """Return the lost processes and ranks; a rank without a process belongs to the only lost one, if there is one."""
    processes = {"dead": list(latest.dead), "unresponsive": list(latest.unresponsive)}
    ranks: _ByState = {"dead": [], "unresponsive": []}
    known = {*latest.dead, *latest.unresponsive}
    for one in latest.communicators:
        for member in one.members.values():
            if not member.lost:
                continue
            state = member.lost
            if not member.host and len(known) == 1:
                (process,) = known
                member = RankState(rank=member.rank, host=process.host, pid=process.pid, lost=state)
                state = "dead" if latest.dead else state
            ranks[state].append((one, member))
            if member.host and not known:
                processes[state].append(Process(host=member.host, pid=member.pid, gpus=str(member.gpu)))
    return processes, ranks


def _gone(
    history: RasHistory, state: str, host: str, processes: Sequence[tuple[int, str]],
    members: Sequence[tuple[CommunicatorState, RankState]],
) -> Finding:  # fmt: skip
    numbers = sorted({history.number(one, member.rank) for one, member in members})
    everyone = {member.rank for one in history.latest.communicators for member in one.members.values()
                if member.host == host and not member.lost}  # fmt: skip
    is_host = len(numbers) > 1 and not everyone and history.latest.is_whole
    place = Place(kind="host", hosts=(host,)) if is_host or not numbers else Place(kind="rank", ranks=tuple(numbers))
    pids = ", ".join(str(pid) for pid, _ in processes[:8])
    who = f"{place.title} (host {host}, process {pids})" if pids else place.title
    is_dead = state == "dead"
    sure = 0.9 if is_dead else 0.7
    return Finding(
        kind="non-communication hang",
        places=(place,),
        since_s=history.first_s(lambda snapshot: any(
            one.host == host and one.pid in {pid for pid, _ in processes}
            for own in _lost(snapshot)[0].values() for one in own
        )),
        evidence=Evidence(
            "ras_lost", communicators=sorted({one.communicator for one, _ in members})[:16], ranks=numbers[:64],
            state=state, host=host, processes=[f"{pid}, GPU {gpus}" for pid, gpus in processes][:16],
        ),
        text=f"{who} has been given up by RAS, which could not reach it for a minute: it is dead or cut off." if is_dead
        else f"{who} does not answer RAS: it is stopped, killed or cut off, or busy for some seconds.",
        confidence=sure * history.trust,
        remedy="look at its own log and its host's: out of memory, an error of the GPU (dmesg, Xid), a crash; the "
        "others wait for it" if is_dead
        else f"look at the process and its host; {_ASK_AGAIN}: after a minute RAS gives it up",
    )  # fmt: skip


def _find_errors(history: RasHistory, *, is_lost: bool) -> Iterator[Finding]:
    """Yield the ranks' own errors; errors by the loss of others only if there is nothing else."""
    found: dict[tuple[str, str], list[tuple[CommunicatorState, int]]] = defaultdict(list)
    for one in history.latest.communicators:
        for rank, member in one.members.items():
            for when, error in (("initialising", member.init_error), ("running", member.async_error)):
                if error:
                    found[when, error].append((one, rank))
    # a remote error follows from the loss of another process
    own = {key: ranks for key, ranks in found.items() if key[1] != REMOTE_ERROR}
    for (when, error), ranks in (own or ({} if is_lost else found)).items():
        numbers = tuple(sorted({history.number(one, rank) for one, rank in ranks}))
        place = Place(kind="rank", ranks=numbers)
        is_wire = error in (REMOTE_ERROR, _SYSTEM_ERROR)
        names = sorted({one.communicator for one, _ in ranks})
        yield Finding(
            kind="communication hang" if is_wire else "non-communication hang",
            places=(place,), since_s=history.latest.at_s or 0.0,
            evidence=Evidence(
                "ras_error", communicators=names[:16], ranks=list(numbers)[:64], locations=history.locations(ranks),
                error=error, **{"while": when},
            ),
            text=f"{place.title} has failed while {when} communicator {names[0]}: {error}"
            + (", which says that another process or the wire to it is lost." if error == REMOTE_ERROR else "."),
            confidence=(0.5 if error == REMOTE_ERROR else 0.85) * history.trust,
            remedy="read what its own log says with NCCL_DEBUG=WARN" + ("; find who was lost" if is_wire else ""),
            probe="run `thinwire diagnose test` on these hosts" if is_wire else "",
        )  # fmt: skip


def _find_states(history: RasHistory) -> Iterator[Finding]:
    """Yield the ranks that are in another state than the rest of their communicator."""
    for one in history.latest.communicators:
        states: dict[str, list[int]] = defaultdict(list)
        for rank, member in one.members.items():
            if member.status:
                states[member.status].append(rank)
        if len(states) < 2 or history.has_trouble(one):
            continue
        # the ranks that block a communicator, and their state
        ended, running = [*states.get("FINALIZE", ()), *states.get("NOCOMM", ())], states.get("RUNNING", [])
        if "ABORT" in states or "INIT" in states:
            ranks = states.get("ABORT") or states["INIT"]
            said = "has aborted" if "ABORT" in states else "is still initialising"
        elif not running:
            ranks, said = states["FINALIZE"], "has not ended with the others of"
        elif len(ended) < len(running):
            ranks, said = ended, "has ended or left"
        else:
            ranks, said = running, "has not ended, as others have,"
        numbers = tuple(sorted(history.number(one, rank) for rank in ranks))
        place = Place(kind="rank", ranks=numbers)
        same = history.unchanged(one, lambda member: member.status)
        yield Finding(
            kind="non-communication hang",
            places=(place,), since_s=same.since_s,
            evidence=Evidence(
                "ras_state", communicators=[one.communicator], ranks=list(numbers)[:64],
                locations=history.locations([(one, rank) for rank in ranks]), unchanged_s=same.lasted,
                states=[f"{name}: {len(own)}" for name, own in sorted(states.items())],
            ),
            text=f"{place.title} {said} communicator {one.communicator}, and others are not so far"
            + (f": {same.said}." if same.has_stood else "; this may be on its way."),
            confidence=(0.75 if same.has_stood else 0.3) * history.trust,
            remedy="take the stacks of these ranks (py-spy dump)" if same.has_stood else _ASK_AGAIN,
        )  # fmt: skip
