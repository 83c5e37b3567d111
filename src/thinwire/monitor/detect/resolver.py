"""Resolver of findings: a table of which evidence explains which, and the findings that nothing explains.

A detector sees its own records only, so one fault shows in several of them. Each row of `RULES` names the evidence that
is explained, the evidence that explains it, the condition, and the reason. Order has no meaning: a finding is reported
if and only if no reported finding explains it. The table has no cycles, so that this is well defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from thinwire.monitor.detect.change_points import is_at_once
from thinwire.monitor.detect.collectives import COLLECTIVES
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import STANDSTILLS, EvidenceKind, Finding, ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolverConfig:
    """Constants of the conditions."""

    echo_share: float = 0.2  # of the seconds that compute became longer: a rank that waits for long wakes up late
    as_slow: float = 1.2  # ratio of links over compute up to which slow compute explains them


RESOLVER = ResolverConfig()

Pairwise = Callable[[Finding, Finding, Job], bool]
Condition = Callable[[Finding, Sequence[Finding], Job], bool]

_SLOW_LINKS: tuple[EvidenceKind, ...] = ("slow_link", "link_peers")
_SLOW_COMPUTE: tuple[EvidenceKind, ...] = ("slow_compute", "compute_peers")
_SLOW_OPERATIONS: tuple[EvidenceKind, ...] = ("slow_operation", "placed_operation")
_MOMENTS: tuple[EvidenceKind, ...] = (*STANDSTILLS, "slow_transfer", "slow_step")
_WAITS: tuple[EvidenceKind, ...] = ("own_error", *_MOMENTS)
_RAS: tuple[EvidenceKind, ...] = (
    "ras_lost", "ras_error", "ras_state", "ras_suspect", "ras_desync", "ras_lagging", "ras_standstill",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: evidence of some kinds is explained by evidence of others."""

    explained: tuple[EvidenceKind, ...]  # of the findings that are left out
    by: tuple[EvidenceKind, ...]  # of the findings that explain them
    when: Condition  # on a finding and all reported findings of the kinds in `by`; there is at least one
    reason: str


def _any(pairwise: Pairwise) -> Condition:
    return lambda finding, causes, job: any(pairwise(finding, cause, job) for cause in causes)


def _ranks(finding: Finding, job: Job) -> set[int]:
    is_of_all = any(place.kind == "job" for place in finding.places)
    return set(job.host_of) if is_of_all else ranks_of(finding.places, job.host_of)


def _is_slow(finding: Finding) -> bool:
    return "hang" not in finding.kind


def _shares_rank(finding: Finding, cause: Finding, job: Job) -> bool:
    return bool(_ranks(finding, job) & _ranks(cause, job))


def _shares_place_and_lasts(finding: Finding, cause: Finding, job: Job) -> bool:
    same = finding.kind == cause.kind and set(finding.places) & set(cause.places)
    return _is_slow(finding) and cause.until_s is None and bool(same)


def _lacks_time(finding: Finding, cause: Finding, job: Job) -> bool:
    """Return whether the slow end of links is a rank whose compute is as slow, at the same time."""
    if any("link" in place.kind for place in finding.places) or cause.places[0].kind == "job" or cause.since_round <= 0:
        return False
    own = _ranks(finding, job)
    is_as_slow = RESOLVER.as_slow * (cause.times_longer or 0.0) >= (finding.times_longer or 0.0)
    return bool(own) and is_as_slow and own <= _ranks(cause, job) and is_at_once(finding, cause)


def _is_slow_enough(finding: Finding, cause: Finding, job: Job) -> bool:
    """Return whether bytes are slow enough to make the operations slow."""
    own, bytes_longer = finding.times_longer or 1.0, cause.times_longer or 1.0
    return is_at_once(finding, cause) and math.log(bytes_longer) >= COLLECTIVES.min_share * math.log(own)


def _are_lost(finding: Finding, causes: Sequence[Finding], job: Job) -> bool:
    ranks = set(finding.evidence["ranks"])
    return bool(ranks) and ranks <= {rank for cause in causes for rank in cause.evidence.get("ranks", ())}


RULES: tuple[Rule, ...] = (
    Rule(
        explained=STANDSTILLS, by=("desync",),
        when=_any(lambda one, cause, job: bool(one.evidence["communicator"] == cause.evidence["communicator"])),
        reason="Ranks that call different operations wait for each other because of that.",
    ),
    Rule(
        explained=_SLOW_LINKS, by=("flapping",), when=_any(_shares_rank),
        reason="A link that fails in turns is slow in its bad times.",
    ),
    Rule(
        explained=_SLOW_COMPUTE, by=("stall",), when=_any(_shares_rank),
        reason="Compute that stalls at regular steps is slow in these.",
    ),
    Rule(
        explained=_SLOW_LINKS, by=("slow_compute",), when=_any(_lacks_time),
        reason="A rank that lacks processor time answers its peers late, over all its links.",
    ),
    Rule(
        explained=_MOMENTS, by=("flapping",),
        when=_any(lambda one, cause, job: _is_slow(one) and _shares_rank(one, cause, job)),
        reason="Of a link that fails in turns, the flapping detector has seen more than the current operation shows.",
    ),
    Rule(
        explained=_MOMENTS, by=(*_SLOW_LINKS, *_SLOW_COMPUTE), when=_any(_shares_place_and_lasts),
        reason="A change that lasts was measured in many rounds, the current operation is one.",
    ),
    Rule(
        explained=_SLOW_OPERATIONS, by=("slow_compute",),
        when=_any(lambda one, cause, job: is_at_once(one, cause)
                  and RESOLVER.echo_share * cause.slower_by_s > one.slower_by_s),
        reason="A rank that waits for long wakes up late, which makes the operation longer by little.",
    ),
    Rule(
        explained=("slow_bytes",), by=(*_SLOW_LINKS, *_SLOW_COMPUTE, "flapping", "stall"),
        when=_any(lambda one, cause, job: bool(job.messages) and is_at_once(one, cause)),
        reason="Recorded messages show more than the kernel's counters.",
    ),
    Rule(
        explained=("slow_bytes",), by=_WAITS, when=_any(lambda one, cause, job: one.until_s is None),
        reason="While an operation stands still, its ranks and links show the cause.",
    ),
    Rule(
        explained=("slow_bytes",), by=("placed_operation",), when=_any(lambda one, cause, job: is_at_once(one, cause)),
        reason="The operations were placed by these connections.",
    ),
    Rule(
        explained=("slow_operation",), by=("slow_bytes",), when=_any(_is_slow_enough),
        reason="Slow connections make the operations slow that run over them.",
    ),
    Rule(
        explained=("silent_rank",), by=(*_WAITS, *_RAS),
        when=_any(lambda one, cause, job: not _is_slow(cause) and cause.until_s is None
                  and _shares_rank(one, cause, job)),
        reason="A hang of the same rank shows more than its silence.",
    ),
    Rule(
        explained=("ended_file", "missing_file"), by=_RAS, when=_are_lost,
        reason="A process that RAS cannot reach, or that hangs, writes no file.",
    ),
    Rule(
        explained=(*_SLOW_LINKS, "slow_bytes", "slow_transfer"), by=("slow_path",),
        when=_any(lambda one, cause, job: _is_slow(one) and set(cause.places[0].ranks) <= _ranks(one, job)),
        reason="A link whose messages wait for one of its paths is slow because of that path.",
    ),
)  # fmt: skip


def resolve(found: Sequence[Finding], job: Job, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return the findings that no other one explains, in their order."""

    @cache
    def is_reported(index: int) -> bool:
        for rule in rules:
            if found[index].evidence.kind in rule.explained:
                causes = [cause for at, cause in enumerate(found) if cause.evidence.kind in rule.by
                          and is_reported(at)]  # fmt: skip
                if causes and rule.when(found[index], causes, job):
                    return False
        return True

    return [finding for index, finding in enumerate(found) if is_reported(index)]
