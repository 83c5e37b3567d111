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
from thinwire.monitor.findings import (
    ComputePeersEvidence,
    DesyncEvidence,
    EndedFileEvidence,
    Evidence,
    Finding,
    FlappingEvidence,
    LinkPeersEvidence,
    MissingFileEvidence,
    OwnErrorEvidence,
    PlacedOperationEvidence,
    RasEvidence,
    SilentRankEvidence,
    SlowBytesEvidence,
    SlowComputeEvidence,
    SlowLinkEvidence,
    SlowOperationEvidence,
    SlowPathEvidence,
    SlowStepEvidence,
    SlowTransferEvidence,
    StallEvidence,
    StandstillEvidence,
    ranks_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolverConfig:
    """Constants of the conditions."""

    echo_share: float = 0.2  # of the seconds that compute became longer: a rank that waits for long wakes up late
    as_slow: float = 1.2  # ratio of links over compute up to which slow compute explains them


RESOLVER = ResolverConfig()

Condition = Callable[[Finding, Sequence[Finding], Job], bool]
Pairwise = Callable[[Finding, Finding, Job], bool]


_SLOW_LINKS = (SlowLinkEvidence, LinkPeersEvidence)
_SLOW_COMPUTE = (SlowComputeEvidence, ComputePeersEvidence)
_SLOW_OPERATIONS = (SlowOperationEvidence, PlacedOperationEvidence)
_WAITS = (OwnErrorEvidence, StandstillEvidence, SlowTransferEvidence, SlowStepEvidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: evidence of some kinds is explained by evidence of others.

    Attributes:
        explained: Kinds of the findings that are left out.
        by: Kinds of the findings that explain them.
        when: Condition on a finding and all reported findings of the kinds in `by`; there is at least one.
        reason: For the row.
    """

    explained: tuple[type[Evidence], ...]
    by: tuple[type[Evidence], ...]
    when: Condition
    reason: str


def _ranks(finding: Finding, job: Job) -> set[int]:
    is_of_all = any(place.kind == "job" for place in finding.places)
    return set(job.host_of) if is_of_all else ranks_of(finding.places, job.host_of)


def _any(pairwise: Pairwise) -> Condition:
    return lambda finding, causes, job: any(pairwise(finding, cause, job) for cause in causes)


def _is_slow(finding: Finding) -> bool:
    return "hang" not in finding.kind


def _shares_rank(finding: Finding, cause: Finding, job: Job) -> bool:
    return bool(_ranks(finding, job) & _ranks(cause, job))


def _shares_operations(finding: Finding, cause: Finding, job: Job) -> bool:
    one, other = finding.evidence, cause.evidence
    assert isinstance(one, StandstillEvidence) and isinstance(other, DesyncEvidence)
    return one.communicator == other.communicator


def _shares_rank_and_moves(finding: Finding, cause: Finding, job: Job) -> bool:
    return _is_slow(finding) and _shares_rank(finding, cause, job)


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


def _is_echo(finding: Finding, cause: Finding, job: Job) -> bool:
    return is_at_once(finding, cause) and RESOLVER.echo_share * cause.slower_by_s > finding.slower_by_s


def _is_recorded(finding: Finding, cause: Finding, job: Job) -> bool:
    return bool(job.messages) and is_at_once(finding, cause)


def _lasts(finding: Finding, causes: Sequence[Finding], job: Job) -> bool:
    return finding.until_s is None


def _overlaps(finding: Finding, cause: Finding, job: Job) -> bool:
    return is_at_once(finding, cause)


def _is_slow_enough(finding: Finding, cause: Finding, job: Job) -> bool:
    """Return whether bytes are slow enough to make the operations slow."""
    own, bytes_longer = finding.times_longer or 1.0, cause.times_longer or 1.0
    return is_at_once(finding, cause) and math.log(bytes_longer) >= COLLECTIVES.min_share * math.log(own)


def _is_of_link(finding: Finding, cause: Finding, job: Job) -> bool:
    return _is_slow(finding) and set(cause.places[0].ranks) <= _ranks(finding, job)


def _is_gone(finding: Finding, cause: Finding, job: Job) -> bool:
    return "hang" in cause.kind and cause.until_s is None and _shares_rank(finding, cause, job)


def _are_lost(finding: Finding, causes: Sequence[Finding], job: Job) -> bool:
    assert isinstance(finding.evidence, EndedFileEvidence | MissingFileEvidence)
    lost = {rank for cause in causes if isinstance(cause.evidence, RasEvidence) for rank in cause.evidence.ranks}
    return bool(finding.evidence.ranks) and set(finding.evidence.ranks) <= lost


RULES: tuple[Rule, ...] = (
    Rule(
        explained=(StandstillEvidence,), by=(DesyncEvidence,), when=_any(_shares_operations),
        reason="Ranks that call different operations wait for each other because of that.",
    ),
    Rule(
        explained=_SLOW_LINKS, by=(FlappingEvidence,), when=_any(_shares_rank),
        reason="A link that fails in turns is slow in its bad times.",
    ),
    Rule(
        explained=_SLOW_COMPUTE, by=(StallEvidence,), when=_any(_shares_rank),
        reason="Compute that stalls at regular steps is slow in these.",
    ),
    Rule(
        explained=_SLOW_LINKS, by=(SlowComputeEvidence,), when=_any(_lacks_time),
        reason="A rank that lacks processor time answers its peers late, over all its links.",
    ),
    Rule(
        explained=(StandstillEvidence, SlowTransferEvidence, SlowStepEvidence), by=(FlappingEvidence,),
        when=_any(_shares_rank_and_moves),
        reason="Of a link that fails in turns, the flapping detector has seen more than the current operation shows.",
    ),
    Rule(
        explained=(StandstillEvidence, SlowTransferEvidence, SlowStepEvidence), by=(*_SLOW_LINKS, *_SLOW_COMPUTE),
        when=_any(_shares_place_and_lasts),
        reason="A change that lasts was measured in many rounds, the current operation is one.",
    ),
    Rule(
        explained=_SLOW_OPERATIONS, by=(SlowComputeEvidence,), when=_any(_is_echo),
        reason="A rank that waits for long wakes up late, which makes the operation longer by little.",
    ),
    Rule(
        explained=(SlowBytesEvidence,), by=(*_SLOW_LINKS, *_SLOW_COMPUTE, FlappingEvidence, StallEvidence),
        when=_any(_is_recorded),
        reason="Recorded messages show more than the kernel's counters.",
    ),
    Rule(
        explained=(SlowBytesEvidence,), by=_WAITS, when=_lasts,
        reason="While an operation stands still, its ranks and links show the cause.",
    ),
    Rule(
        explained=(SlowBytesEvidence,), by=(PlacedOperationEvidence,), when=_any(_overlaps),
        reason="The operations were placed by these connections.",
    ),
    Rule(
        explained=(SlowOperationEvidence,), by=(SlowBytesEvidence,), when=_any(_is_slow_enough),
        reason="Slow connections make the operations slow that run over them.",
    ),
    Rule(
        explained=(SilentRankEvidence,), by=(*_WAITS, RasEvidence), when=_any(_is_gone),
        reason="A hang of the same rank shows more than its silence.",
    ),
    Rule(
        explained=(EndedFileEvidence, MissingFileEvidence), by=(RasEvidence,), when=_are_lost,
        reason="A process that RAS cannot reach, or that hangs, writes no file.",
    ),
    Rule(
        explained=(*_SLOW_LINKS, SlowBytesEvidence, SlowTransferEvidence), by=(SlowPathEvidence,),
        when=_any(_is_of_link),
        reason="A link whose messages wait for one of its paths is slow because of that path.",
    ),
)  # fmt: skip


def resolve(found: Sequence[Finding], job: Job, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return the findings that no other one explains, in their order."""

    @cache
    def is_reported(index: int) -> bool:
        evidence = found[index].evidence
        for rule in rules:
            if isinstance(evidence, rule.explained):
                causes = [cause for at, cause in enumerate(found) if isinstance(cause.evidence, rule.by)
                          and is_reported(at)]  # fmt: skip
                if causes and rule.when(found[index], causes, job):
                    return False
        return True

    return [finding for index, finding in enumerate(found) if is_reported(index)]
