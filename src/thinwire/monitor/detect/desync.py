"""Desync detector: operations that differ between ranks at one sequence number, and losses that diverge."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import DesyncEvidence, Finding, LossDivergenceEvidence, LossEvidence, Place
from thinwire.monitor.runlog.records import Operation, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Constants of the detector of diverging losses."""

    far_scores: float = 6.0  # distance from the median loss, in spreads of the ranks
    far_steps: int = 4  # steps in a row on one side; small batches scatter to both (LOG 2026-11-22)
    min_share: float = 0.05  # distance from the median, as a share of it
    history: int = 64  # distances that the spread is taken from: losses scatter less as they fall


LOSSES = LossConfig()


# Compared fields, causes first: a rank in another round has other sizes too.
_COMPARED: tuple[tuple[str, str], ...] = (
    ("round", "is in round {own} where the others are in {others}; it left out or repeated an operation"),
    ("kind", "calls {own} where the others call {others}; it left out, added or swapped an operation"),
    ("dtype", "brings elements of {own} where the others bring {others}"),
    ("count", "brings {own} elements where the others bring {others}"),
)


def find_desync(job: Job) -> list[Finding]:
    """Return the first mismatch of each communicator: later ones follow from it."""
    found: dict[str, Finding] = {}
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        if communicator not in found and len(own) > 1:
            finding = next(_mismatches(job, own, sequence), None)
            if finding is not None:
                found[communicator] = finding
    return list(found.values())


def _mismatches(job: Job, own: dict[int, Operation], sequence: int) -> Iterator[Finding]:
    for name, words in _COMPARED:
        values = {rank: getattr(operation, name) for rank, operation in own.items()}
        known = {rank: value for rank, value in values.items() if value not in (-1, "")}
        if len(set(known.values())) < 2:
            continue
        culprits, usual = _minority(known)
        told = words.format(own=", ".join(sorted({str(known[rank]) for rank in culprits})), others=usual)
        is_sure = len(culprits) * 2 < len(known)
        places = (
            (Place(kind="rank", ranks=culprits),)
            if is_sure
            else tuple(Place(kind="rank", ranks=(rank,)) for rank in sorted(known))
        )
        first = own[min(own)]
        yield Finding(
            kind="desync",
            places=places,
            since_s=min(operation.posted_s for operation in own.values()),
            since_round=first.round if first.round >= 0 else sequence,
            seen_round=first.round if first.round >= 0 else sequence,
            evidence=DesyncEvidence(
                communicator=first.communicator, operation=sequence, differs_in=name,
                by_rank=[f"{rank}: {known[rank]}" for rank in sorted(known)][:16],
            ),
            text=f"At operation {sequence} of {first.communicator} {Place(kind='rank', ranks=culprits)} {told}.",
            confidence=(0.97 if is_sure else 0.6) * job.trust,
            remedy="compare the code paths of these ranks before this operation: a branch on data, a rank number or an "
            "exception that was swallowed",
            probe="" if is_sure else "run with one more rank: the side with most ranks is right",
        )  # fmt: skip


def _minority(known: dict[int, Hashable]) -> tuple[tuple[int, ...], Hashable]:
    """Return the ranks that differ from the majority, and the majority's value."""
    counts = Counter(known.values())
    usual = max(counts, key=lambda value: (counts[value], -min(r for r in known if known[r] == value)))
    return tuple(sorted(rank for rank in known if known[rank] != usual)), usual


def find_losses(job: Job) -> list[Finding]:
    """Return ranks whose loss is not finite, and ranks whose loss diverges from the others'."""
    by_step: dict[int, dict[int, Span]] = defaultdict(dict)
    for span in job.spans:
        if span.loss is not None:
            by_step[span.step][span.rank] = span
    found = {**_parted(job, by_step), **_non_finite(job, by_step)}
    return list(found.values())


def _non_finite(job: Job, by_step: dict[int, dict[int, Span]]) -> dict[str, Finding]:
    for step in sorted(by_step):
        bad = tuple(sorted(r for r, span in by_step[step].items() if span.loss is None or not math.isfinite(span.loss)))
        if bad:
            everyone = len(bad) == len(by_step[step]) > 1
            return {"loss": Finding(
                kind="non-finite loss",
                places=(Place(kind="job"),) if everyone else (Place(kind="rank", ranks=bad),),
                since_s=min(by_step[step][rank].done_s for rank in bad), since_round=step, seen_round=step,
                evidence=LossEvidence(losses=[str(by_step[step][rank].loss) for rank in bad][:16]),
                text=f"The loss is no number since step {step}.",
                confidence=0.99 * job.trust,
                remedy="lower the learning rate if it is all ranks; if it is one, look at its data and its memory",
            )}  # fmt: skip
    return {}


def _parted(job: Job, by_step: dict[int, dict[int, Span]]) -> dict[str, Finding]:
    """Return a rank whose loss is far from the median of all ranks, several steps in a row.

    All of these steps are on one side: a small batch makes a loss jump to both.
    """
    runs: dict[int, list[tuple[int, float]]] = defaultdict(list)
    usual: list[float] = []
    for step in sorted(by_step):
        losses = {rank: span.loss for rank, span in by_step[step].items() if span.loss is not None}
        finite = {rank: loss for rank, loss in losses.items() if math.isfinite(loss)}
        if len(finite) < 3:
            continue
        middle = median(list(finite.values()))
        scale = (
            max(1.4826 * median(usual), LOSSES.min_share * abs(middle) / LOSSES.far_scores) if len(usual) >= 8 else None
        )
        for rank, loss in finite.items():
            apart, run = loss - middle, runs[rank]
            is_far = scale is not None and abs(apart) > LOSSES.far_scores * scale
            if run and (not is_far or run[-1][1] * apart < 0):
                # noise, which shows the spread of the ranks
                usual += [abs(distance) for _, distance in run]
                run.clear()
            if is_far:
                run.append((step, apart))
            elif apart:
                # of an odd number of ranks one is the median itself, at a distance of 0
                usual.append(abs(apart))
            if scale is not None and len(run) >= LOSSES.far_steps:
                return {"loss": _parting(job, rank, by_step[run[0][0]][rank], step, abs(apart) / scale)}
        # the spread changes as losses fall
        del usual[: -LOSSES.history]
    return {}


def _parting(job: Job, rank: int, first: Span, step: int, scores: float) -> Finding:
    return Finding(
        kind="loss divergence",
        places=(Place(kind="rank", ranks=(rank,)),),
        since_s=first.done_s, since_round=first.step, seen_round=step,
        evidence=LossDivergenceEvidence(loss_then=first.loss, deviations_from_the_others=round(scores, 1)),
        text=f"The loss of rank {rank} has parted from the others' since step {first.step}.",
        confidence=0.85 * job.trust,
        remedy="compare its parameters with the others' by a hash; look at its data order and its memory",
    )  # fmt: skip
