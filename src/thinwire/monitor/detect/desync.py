"""Desync detector: ranks whose sequence of calls differs from the others', and losses that diverge."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from thinwire.monitor.detect.call_alignment import Call, Deviation, align, call_of, is_proved
from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place
from thinwire.runlog.records import Operation, Span


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
    ("round", "is in round {own} where the others are in {others}"),
    ("kind", "calls {own} where the others call {others}"),
    ("dtype", "brings elements of {own} where the others bring {others}"),
    ("count", "brings {own} elements where the others bring {others}"),
)
# Ranks call these at one place in the code; a root of the others may have a place of its own.
_ONE_PLACE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_MOST_CALLS = 6

_Own = Mapping[int, Operation]


def find_desync(job: Job) -> list[Finding]:
    """Return the first mismatch of each communicator: later ones follow from it."""
    found: dict[str, Finding] = {}
    shared = _shared_sites(job)
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        if communicator not in found and len(own) > 1:
            finding = None
            for name, words in _COMPARED:
                values = {rank: getattr(operation, name) for rank, operation in own.items()}
                differing = {rank: value for rank, value in values.items() if value not in (-1, "")}
                if finding is None and len(set(differing.values())) > 1:
                    finding = _mismatch(job, own, sequence, name, differing, words)
            if finding is None and len({op.site for op in own.values()} & shared.get(communicator, set())) > 1:
                finding = _other_order(job, own, sequence)
            if finding is not None:
                found[communicator] = finding
    return list(found.values())


def _shared_sites(job: Job) -> dict[str, set[str]]:
    """Return the places in the code at which all ranks of a communicator call; more than one counts."""
    sites: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for (communicator, _), own in job.operations.items():
        for rank, op in own.items():
            if op.site and op.kind in _ONE_PLACE:
                sites[communicator][rank].add(op.site)
    return {name: set.intersection(*by_rank.values()) for name, by_rank in sites.items()}


def _calls(job: Job, communicator: str, ranks: Collection[int], sequence: int) -> tuple[dict[int, list[Call]], int]:
    """Return the calls of ranks from the first one that all have recorded in a row, and the index of one of them."""
    first = sequence
    while first > 0 and all(rank in job.operations.get((communicator, first - 1), {}) for rank in ranks):
        first -= 1
    calls: dict[int, list[Call]] = {}
    for rank in ranks:
        own = (job.operations.get((communicator, number), {}).get(rank) for number in count(first))
        calls[rank] = []
        for operation in own:
            if operation is None:
                break
            calls[rank].append(call_of(operation))
    return calls, sequence - first


def _other_order(job: Job, own: _Own, sequence: int) -> Finding | None:
    """Return that calls of equal size are made in another order, if the calls that follow prove it."""
    sites = {rank: operation.site for rank, operation in own.items()}
    culprits, usual = _minority(sites)
    communicator = own[min(own)].communicator
    calls, at = _calls(job, communicator, own, sequence)
    other = max((rank for rank in own if rank not in culprits), key=lambda rank: len(calls[rank]))
    if not all(is_proved(calls[rank], calls[other], at) for rank in culprits):
        return None
    words = f"calls {own[min(own)].kind} at {{own}} where the others call it at {usual}"
    return _mismatch(job, own, sequence, "site", sites, words)


def _mismatch(
    job: Job, own: _Own, sequence: int, name: str, known: Mapping[int, Hashable], words: str
) -> Finding:  # fmt: skip
    culprits, usual = _minority(known)
    differs = words.format(own=", ".join(sorted({str(known[rank]) for rank in culprits})), others=usual)
    is_sure = len(culprits) * 2 < len(known)
    first = own[min(own)]
    deviation = _deviation(job, own, sequence, culprits)
    if not is_sure and len(set(known.values())) == 2:
        # of two sides as large as each other, the one that departs from the past of both by fewer calls
        rest = tuple(sorted(set(known) - set(culprits)))
        other = _deviation(job, own, sequence, rest)
        if other is not None and (deviation is None or len(other.calls) < len(deviation.calls)):
            differs = words.format(own=known[rest[0]], others=known[culprits[0]])
            culprits, deviation = rest, other
    place, at = Place(kind="rank", ranks=culprits), f"operation {sequence} of {job.group_name(first.communicator)}"
    text, remedy = f"At {at} {place} {differs}.", _REMEDY
    if deviation is not None:
        text, remedy = f"{place.title} {_described(deviation)} at {at}: it {differs}.", _remedy(deviation)
    elif name == "round":
        is_ahead = known[culprits[0]] == max(known.values(), key=lambda value: int(str(value)))
        text = f"At {at} {place} {differs}; it {'left out' if is_ahead else 'repeated'} an operation."
    round = first.round if first.round >= 0 else sequence
    return Finding(
        kind="desync",
        places=(place,) if is_sure else tuple(Place(kind="rank", ranks=(rank,)) for rank in sorted(known)),
        since_s=min(operation.posted_s for operation in own.values()), since_round=round, seen_round=round,
        evidence=Evidence(
            "desync", communicator=first.communicator, operation=sequence, differs_in=name,
            by_rank=[f"{rank}: {known[rank]}" for rank in sorted(known)][:16],
            **({} if deviation is None else {
                "deviation": deviation.kind, "calls": [str(call) for call in deviation.calls[:_MOST_CALLS]],
                "steps_early": deviation.steps or None, "steps_done": deviation.steps_done or None,
            }),
        ),
        text=text,
        confidence=(0.97 if is_sure else 0.6) * job.trust,
        remedy=remedy,
        probe="" if is_sure else "run with one more rank: the side with most ranks is right",
    )  # fmt: skip


_REMEDY = (
    "compare the code paths of these ranks before this operation: a branch on data, a rank number or an "
    "exception that was swallowed"
)


def _deviation(job: Job, own: _Own, sequence: int, culprits: Collection[int]) -> Deviation | None:
    """Return how the calls of the deviating ranks differ, where it is the same for all of them."""
    calls, at = _calls(job, own[min(own)].communicator, own, sequence)
    other = max((rank for rank in own if rank not in culprits), key=lambda rank: len(calls[rank]))
    found = {align(calls[rank], calls[other], at) for rank in culprits}
    if len(found) != 1:
        return None
    deviation = found.pop()
    # steps that were made before the first record are not counted
    return deviation if deviation is None or at == sequence else replace(deviation, steps_done=0)


def _described(deviation: Deviation) -> str:
    shown = ", ".join(map(str, deviation.calls[:_MOST_CALLS]))
    shown += " and more" if len(deviation.calls) > _MOST_CALLS else ""
    if deviation.kind == "early end":
        steps = f"{deviation.steps} step{'s' * (deviation.steps != 1)} early" if deviation.steps else "early"
        return f"ended its loop {steps}"
    if deviation.kind == "new call":
        done = f" after {deviation.steps_done} step{'s' * (deviation.steps_done != 1)}" if deviation.steps_done else ""
        return f"left its loop{done}, at least 1 step before the others, or made a call that no rank has made, {shown},"
    twice = ", ".join(map(str, deviation.or_extra[:_MOST_CALLS]))
    return {
        "left out": f"left out {shown}" + (f", or made {twice} twice" if twice else ""),
        "extra": f"made an extra call, {shown},",
        "swapped": f"made {shown} in another order than the others",
    }[deviation.kind]


def _remedy(deviation: Deviation) -> str:
    if deviation.kind in ("early end", "new call"):
        return (
            "give each rank the same number of batches (drop_last, a sampler that pads), or make this call on all ranks"
        )
    if deviation.kind == "swapped":
        return "make these calls in one order on all ranks; a set or a dict of hooks has no order"
    return _REMEDY


def _minority(known: Mapping[int, Hashable]) -> tuple[tuple[int, ...], Hashable]:
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
    for step in sorted(by_step):
        bad = tuple(sorted(r for r, span in by_step[step].items() if span.loss is None or not math.isfinite(span.loss)))
        if bad:
            everyone = len(bad) == len(by_step[step]) > 1
            return [Finding(
                kind="non-finite loss",
                places=(Place(kind="job"),) if everyone else (Place(kind="rank", ranks=bad),),
                since_s=min(by_step[step][rank].done_s for rank in bad), since_round=step, seen_round=step,
                evidence=Evidence("loss", losses=[str(by_step[step][rank].loss) for rank in bad][:16]),
                text=f"The loss is no number since step {step}.",
                confidence=0.99 * job.trust,
                remedy="lower the learning rate if it is all ranks; if it is one, look at its data and its memory",
            )]  # fmt: skip
    return _parted(job, by_step)


def _parted(job: Job, by_step: dict[int, dict[int, Span]]) -> list[Finding]:
    """Return a rank whose loss is far from the median of all ranks, several steps in a row."""
    # all of these steps are on one side: a small batch makes a loss jump to both
    runs: dict[int, list[tuple[int, float]]] = defaultdict(list)
    usual: list[float] = []
    for step in sorted(by_step):
        losses = {rank: span.loss for rank, span in by_step[step].items() if span.loss is not None}
        finite = {rank: loss for rank, loss in losses.items() if math.isfinite(loss)}
        if len(finite) < 3:
            continue
        middle = median(list(finite.values()))
        least = LOSSES.min_share * abs(middle) / LOSSES.far_scores
        scale = max(1.4826 * median(usual), least) if len(usual) >= 8 else None
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
                first = by_step[run[0][0]][rank]
                return [Finding(
                    kind="loss divergence", places=(Place(kind="rank", ranks=(rank,)),),
                    since_s=first.done_s, since_round=first.step, seen_round=step,
                    evidence=Evidence(
                        "loss_divergence", loss_then=first.loss, deviations_from_the_others=round(abs(apart) / scale, 1)
                    ),
                    text=f"The loss of rank {rank} has parted from the others' since step {first.step}.",
                    confidence=0.85 * job.trust,
                    remedy="compare its parameters with the others' by a hash; look at its data order and its memory",
                )]  # fmt: skip
        # the spread changes as losses fall
        del usual[: -LOSSES.history]
    return []
