"""Partition detector: lowers the confidence of an observer that hears few of its peers.

Records show one side of a partition: those of one host, or those that reached it before the cut. An observer that hears
from no peer may be cut off itself. So its findings name its own host too, and remediation does not act on them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place, ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig:
    """Constants of the partition detector."""

    none_heard: float = 0.3  # confidence if no peer is heard
    few_heard: float = 0.5  # confidence if less than half of the hosts are heard
    one_of_two: float = 0.5  # confidence if one of two sides is at fault
    silent_s: float = 2.5  # silence of a connection with keep-alives each second
    missing_s: float = 1.25  # silence of a rank with two heartbeats a second
    missed_beats: float = 2.5  # the same in its own heartbeats
    at_once_s: float = 3.0  # between silences that one cut makes: bytes in flight arrive after it
    alike: float = 0.5  # share of the longest silence that belongs to the same fault


PARTITION = PartitionConfig()

_REMEDY = "diagnose with the records of all hosts: give all their folders; look at this host's own link first"


def one_sided(job: Job, inside: Collection[int], *, since_s: float) -> Finding | None:
    """Return a standstill seen by ranks whose peers' records are missing; None if all records are there."""
    observers = sorted(set(inside) & set(job.last_seen_s))
    # ranks on other hosts that exchange messages with the observers
    ends = {rank for m in job.messages if {m.source, m.destination} & set(observers)
            for rank in (m.source, m.destination)}  # fmt: skip
    peers = {rank for rank in ends if job.host_of[rank] not in {job.host_of[one] for one in observers}}
    if not observers or not peers or peers & set(job.last_seen_s):
        return None
    incoming = [m for m in job.messages if m.destination in observers and m.source in peers]
    came_s = {m.source: -math.inf for m in incoming if m.received_done_s is None}
    for m in incoming:
        if m.source in came_s and m.received_done_s is not None:
            came_s[m.source] = max(came_s[m.source], m.received_done_s)
    silent_s = {peer: job.now_s - at_s for peer, at_s in came_s.items()}
    longest_s = max(silent_s.values(), default=0.0)
    far = [peer for peer, own_s in silent_s.items() if own_s >= PARTITION.alike * longest_s]
    quiet = tuple(sorted(peer for peer in far if not _is_live(job, peer, observers)))
    # the last message of the peer may have arrived before: then only what was sent to it has an error
    is_given_up = any(
        m.error and m.received_done_s is None for m in job.messages if m.source in peers or m.destination in peers
    )
    if not quiet and len(peers) == 1 and is_given_up:
        quiet = tuple(peers)  # also where its last signs of life are recent
    places, confidence, text = _suspects(job, observers, peers, quiet)
    return Finding(
        kind="communication hang", places=places, since_s=since_s, text=f"{text} {_observer_text(observers)}",
        evidence=Evidence("one_sided", judged_from=observers[:32], not_heard=list(quiet)[:32], num_peers=len(peers)),
        confidence=confidence * job.trust, remedy=_REMEDY,
    )  # fmt: skip


def cut_off(job: Job, inside: Collection[int], *, since_s: float) -> Finding | None:
    """Return that the only host with records hears from none of its peers; None if it hears from one."""
    found = one_sided(job, inside, since_s=since_s)
    return found if found and len(found.evidence["not_heard"]) == found.evidence["num_peers"] > 1 else None


def partitioned(job: Job, finding: Finding) -> Finding:
    """Return a finding about silent ranks, with less confidence if few hosts are heard."""
    named = ranks_of(finding.places, job.host_of)
    hosts = {job.host_of[rank] for rank in job.last_seen_s if rank not in job.goodbyes}
    heard = {
        job.host_of[rank]
        for rank, seen_s in job.last_seen_s.items()
        if rank not in job.goodbyes and rank not in job.unsteady
        and job.now_s - seen_s - job.error_s.get(rank, 0.0)
        <= max(PARTITION.missing_s, PARTITION.missed_beats * job.beat_s.get(rank, 0.0))
    }  # fmt: skip
    # a rank is not cut off if others of its host write on
    if not job.has_beats or len(hosts) < 3 or not heard or {job.host_of[rank] for rank in named} & heard:
        return finding
    lost_s = [
        max(seen_s for rank, seen_s in job.last_seen_s.items() if job.host_of[rank] == host) for host in hosts - heard
    ]
    # a cut silences all of them at once; hosts that stop one after the other fail by themselves
    if 2 * len(heard) >= len(hosts) or max(lost_s) - min(lost_s) > PARTITION.at_once_s:
        return finding
    ranks = sorted(rank for rank in job.last_seen_s if job.host_of[rank] in heard)
    own = Place(kind="host", hosts=tuple(sorted(heard)))
    num_silent = len(hosts - heard)
    is_alone = len(heard) == 1
    return replace(
        finding,
        places=(own, *finding.places),
        confidence=min(finding.confidence, (PARTITION.none_heard if is_alone else PARTITION.few_heard) * job.trust),
        text=f"{own.title} {'hears' if is_alone else 'hear'} from {num_silent} of {len(hosts)} hosts no more: likely "
        f"cut off {'itself' if is_alone else 'themselves'}, or these have stopped. {finding.text} "
        f"{_observer_text(ranks)}",
        evidence=finding.evidence.with_values(judged_from=ranks[:32]),
        remedy=f"{_REMEDY}; then {finding.remedy}",
    )


def _is_live(job: Job, peer: int, observers: Collection[int]) -> bool:
    """Return whether bytes of a peer have arrived lately, of keep-alives or messages."""
    return any(
        later[1] > early[1] and job.now_s - later[0] <= PARTITION.silent_s
        for rank in observers
        for early, later in pairwise(job.arrivals.get((peer, rank), []))
    )


def _suspects(
    job: Job, observers: list[int], peers: Collection[int], quiet: tuple[int, ...]
) -> tuple[tuple[Place, ...], float, str]:
    own = Place(kind="host", hosts=tuple(sorted({job.host_of[rank] for rank in observers})))
    who = _ranks(observers)
    if len(peers) > 1 and len(quiet) == len(peers):
        text = f"Nothing comes from any of the {len(peers)} peers of {who}: likely {own} or its link is cut off"
        if {(peer, rank) for peer in peers for rank in observers} <= job.signalled:
            return (own,), PARTITION.none_heard, f"{text}."
        # without keep-alives, peers that wait for each other are as silent
        return (own, Place(kind="communicator")), PARTITION.none_heard, f"{text}, or its peers wait for each other."
    if not quiet:
        text = f"{who.capitalize()} waits for messages of live peers, which may wait for other ranks themselves."
        return (Place(kind="communicator"),), PARTITION.none_heard, text
    if len(quiet) == 1 and len(observers) == 1:
        link = Place(kind="link both ways", ranks=tuple(sorted((quiet[0], observers[0]))))
        text = f"Nothing comes from rank {quiet[0]} to {who}: that rank has stopped, or {link} is cut."
        return (link, Place(kind="rank", ranks=quiet)), PARTITION.one_of_two, text
    text = (
        f"Nothing comes from {_ranks(quiet)} to {who}: these have stopped or wait themselves, or their links are cut."
    )
    return (Place(kind="rank", ranks=quiet),), PARTITION.none_heard, text


def _observer_text(ranks: Collection[int]) -> str:
    return f"Judged from one side only: the records of {_ranks(ranks)}."


def _ranks(ranks: Collection[int]) -> str:
    named = ", ".join(map(str, list(ranks)[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
