"""Findings from NCCL RAS: missing processes, lagging ranks, inconsistent states and errors.

One answer of RAS is no picture of one moment: ranks that count differently may all be on their way. Only where a
second answer counts the same have they stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.lagging import find_behind, find_still
from thinwire.monitor.nccl.progress import Standing, in_order
from thinwire.monitor.nccl.values import CommunicatorState, Member, Process, Snapshot

REMOTE_ERROR = "Remote process error"
_SYSTEM_ERROR = "System error"
_ASK_AGAIN = "ask RAS again after some seconds, and diagnose both answers together"


def find_in_snapshots(snapshots: Sequence[Snapshot], *, trust: float) -> list[Finding]:
    """Return what the latest answer of RAS shows to be wrong, held against the earlier ones.

    Args:
        snapshots: Of one job, in any order where they have times, else in the order in which they were asked for.
        trust: Part of the lines that could be used, in [0, 1].
    """
    if not snapshots:
        return []
    standing = Standing(in_order(snapshots), trust)
    gone = list(_find_lost(standing))
    errors = list(_find_errors(standing, is_lost=bool(gone)))
    states = list(_find_states(standing))
    behind = find_behind(standing)
    found = [*gone, *errors, *behind, *states]
    told = {name for one in found for name in one.evidence.get("communicators", ())}
    bare = [_bare(standing, one) for one in standing.latest.communicators if _is_bare(one, told)]
    return [*found, *bare] or find_still(standing)


def _find_lost(standing: Standing) -> Iterator[Finding]:
    """Yield processes that RAS cannot reach, those of a host together."""
    processes, ranks = _lost(standing.latest)
    for state in ("dead", "unresponsive"):
        hosts = sorted({one.host for one in processes[state]} | {member.host for _, member in ranks[state]})
        for host in hosts:
            own = sorted({(one.pid, one.gpus) for one in processes[state] if one.host == host})
            members = [(name, one) for name, one in ranks[state] if one.host == host]
            if own or members:
                yield _gone(standing, state, host, own, members)


_ByState = dict[str, list[tuple[CommunicatorState, Member]]]


def _lost(latest: Snapshot) -> tuple[dict[str, list[Process]], _ByState]:
    """Return processes and ranks that are lost; a rank whose process is not told is the one process that is, if so."""
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
                member = Member(rank=member.rank, host=process.host, pid=process.pid, lost=state)
                state = "dead" if latest.dead else state
            ranks[state].append((one, member))
            if member.host and not known:
                processes[state].append(Process(host=member.host, pid=member.pid, gpus=str(member.gpu)))
    return processes, ranks


def _gone(
    standing: Standing, state: str, host: str, processes: Sequence[tuple[int, str]],
    members: Sequence[tuple[CommunicatorState, Member]],
) -> Finding:  # fmt: skip
    numbers = sorted({standing.number(one, member.rank) for one, member in members})
    everyone = {member.rank for one in standing.latest.communicators for member in one.members.values()
                if member.host == host and not member.lost}  # fmt: skip
    is_host = len(numbers) > 1 and not everyone and standing.latest.is_whole
    place = Place(kind="host", hosts=(host,)) if is_host or not numbers else Place(kind="rank", ranks=tuple(numbers))
    pids = ", ".join(str(pid) for pid, _ in processes[:8])
    who = f"{place.title} (host {host}, process {pids})" if pids else place.title
    is_dead = state == "dead"
    sure = 0.9 if is_dead else 0.7
    return Finding(
        kind="non-communication hang",
        places=(place,),
        since_s=standing.first_s(lambda snapshot: _is_lost(snapshot, host, [pid for pid, _ in processes])),
        evidence={
            "state": state, "host": host, "processes": [f"{pid}, GPU {gpus}" for pid, gpus in processes][:16],
            "ranks": numbers[:64], "communicators": sorted({one.communicator for one, _ in members})[:16],
        },
        text=f"{who} has been given up by RAS, which could not reach it for a minute: it is dead or cut off." if is_dead
        else f"{who} does not answer RAS: it is stopped, killed or cut off, or busy for some seconds.",
        confidence=sure * standing.trust,
        remedy="look at its own log and its host's: out of memory, an error of the GPU (dmesg, Xid), a crash; the "
        "others wait for it" if is_dead
        else f"look at the process and its host; {_ASK_AGAIN}: after a minute RAS gives it up",
    )  # fmt: skip


def _is_lost(snapshot: Snapshot, host: str, pids: Sequence[int]) -> bool:
    processes, _ = _lost(snapshot)
    return any(one.host == host and one.pid in pids for own in processes.values() for one in own)


def _find_errors(standing: Standing, *, is_lost: bool) -> Iterator[Finding]:
    """Yield the errors that ranks have of their own; those by the loss of others only where there is nothing else."""
    found: dict[tuple[str, str], list[tuple[CommunicatorState, int]]] = defaultdict(list)
    for one in standing.latest.communicators:
        for rank, member in one.members.items():
            for when, error in (("initialising", member.init_error), ("running", member.async_error)):
                if error:
                    found[when, error].append((one, rank))
    own = {key: ranks for key, ranks in found.items() if key[1] != REMOTE_ERROR}
    for (when, error), ranks in (own or ({} if is_lost else found)).items():
        numbers = tuple(sorted({standing.number(one, rank) for one, rank in ranks}))
        place = Place(kind="rank", ranks=numbers)
        is_wire = error in (REMOTE_ERROR, _SYSTEM_ERROR)
        names = sorted({one.communicator for one, _ in ranks})
        yield Finding(
            kind="communication hang" if is_wire else "non-communication hang",
            places=(place,), since_s=standing.latest.at_s or 0.0,
            evidence={"error": error, "while": when, "ranks": list(numbers)[:64], "communicators": names[:16],
                      "seats": standing.seats(ranks)},
            text=f"{place.title} has failed while {when} communicator {names[0]}: {error}"
            + (", which says that another process or the wire to it is lost." if error == REMOTE_ERROR else "."),
            confidence=(0.5 if error == REMOTE_ERROR else 0.85) * standing.trust,
            remedy="read what its own log says with NCCL_DEBUG=WARN" + ("; find who was lost" if is_wire else ""),
            probe="run `thinwire diagnose test` on these hosts" if is_wire else "",
        )  # fmt: skip


def _find_states(standing: Standing) -> Iterator[Finding]:
    """Yield the ranks that are in another state than the rest of their communicator."""
    for one in standing.latest.communicators:
        states: dict[str, list[int]] = defaultdict(list)
        for rank, member in one.members.items():
            if member.status:
                states[member.status].append(rank)
        if len(states) < 2 or standing.has_trouble(one):
            continue
        ranks, said = _odd(states)
        numbers = tuple(sorted(standing.number(one, rank) for rank in ranks))
        place = Place(kind="rank", ranks=numbers)
        same = standing.unchanged(one, lambda member: member.status)
        yield Finding(
            kind="non-communication hang",
            places=(place,), since_s=same.since_s,
            evidence={"states": [f"{name}: {len(own)}" for name, own in sorted(states.items())],
                      "ranks": list(numbers)[:64], "communicators": [one.communicator], "unchanged_s": same.lasted,
                      "seats": standing.seats([(one, rank) for rank in ranks])},
            text=f"{place.title} {said} communicator {one.communicator}, and others are not so far"
            + (f": {same.said}." if same.has_stood else "; this may be on its way."),
            confidence=(0.75 if same.has_stood else 0.3) * standing.trust,
            remedy="take the stacks of these ranks (py-spy dump)" if same.has_stood else _ASK_AGAIN,
        )  # fmt: skip


def _odd(states: dict[str, list[int]]) -> tuple[list[int], str]:
    """Return the ranks that keep a communicator from going on, and what they do."""
    for name, said in (("ABORT", "has aborted"), ("INIT", "is still initialising")):
        if name in states:
            return states[name], said
    ended = [*states.get("FINALIZE", ()), *states.get("NOCOMM", ())]
    running = states.get("RUNNING", [])
    if not running or len(ended) < len(running):
        return (ended, "has ended or left") if running else (states["FINALIZE"], "has not ended with the others of")
    return running, "has not ended, as others have,"


def _is_bare(one: CommunicatorState, told: Iterable[str]) -> bool:
    """Return whether RAS calls a communicator not well, and nothing of it was told."""
    return not one.members and not one.unlisted and one.errors not in ("", "OK") and one.communicator not in told


def _bare(standing: Standing, one: CommunicatorState) -> Finding:
    return Finding(
        kind="non-communication hang", places=(Place(kind="communicator"),), since_s=standing.latest.at_s or 0.0,
        evidence={"communicators": [one.communicator], "ras_says": one.errors, "size": one.size},
        text=f"RAS calls a communicator {one.communicator} {one.errors}, and which ranks is not in what was read.",
        confidence=0.3 * standing.trust,
        remedy="ask RAS for all: ncclras -f json, or verbose status",
    )  # fmt: skip
