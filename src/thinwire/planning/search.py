"""Search for a plan: estimates all candidates, simulates the best of them, and ranks these.

The order is that of the time to the loss that data-parallel training has with the same tokens: a penalty in loss is
paid for with compute, along the compute-optimal front (see `loss_penalty.compute_worth`). What has no published loss is
simulated too where it is asked for, and stands last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

from thinwire.planning.candidates import (
    COMPARED,
    INTERVALS,
    LAYERS,
    OVERLAPS,
    Candidate,
    CandidateTimes,
    candidates,
    machine_sets,
    step_times,
)
from thinwire.planning.cluster import Cluster
from thinwire.planning.loss_penalty import LossPenalty, compute_worth, loss_penalty
from thinwire.planning.plan import Needs, Outlook, Plan, Rejection, UnevenBatches
from thinwire.planning.predict import MAX_EXTENSION
from thinwire.planning.training_task import TrainingTask
from thinwire.units import format_bytes

# Simulated: the best by the quick look, and of each method and interval the best one.
_SIMULATED = 8
# Utilisation if none is asked for, and the range of wires and intervals to search.
_USUAL_UTILISATION = 0.95
_SLOWEST_WIRES, _FASTEST_WIRES = 1e-3, 1e4
_LONGER = (1000, 2000)
# Resolution of the wires' factor.
_STEP = 1.02
# Times to equal loss that differ by less are the same: published losses of the same settings differ by as much.
_SAME = 0.005
# Batches by speed are proposed from such a gain on: below it, measured speeds differ by as much.
_LEAST_GAIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """Constraints of a plan.

    Raises:
        ValueError: A number is out of its range.
    """

    methods: Sequence[str] = COMPARED  # the methods to choose from
    min_utilisation: float = 0.0  # the least compute utilisation; 0 for any
    max_penalty: float = 0.05  # the largest loss penalty, as a share of the loss
    intervals: Sequence[int] = INTERVALS  # H to choose from
    overlaps: Sequence[int] = OVERLAPS  # tau to choose from
    layers: Sequence[int] = LAYERS  # blocks a fragment to choose from
    codecs: Sequence[str] = ()  # codes to choose from; none for all that a method goes with
    min_replicas: int = 1  # the fewest machines
    is_by_store: bool = False  # whether payloads travel through a store: uploaded once, read by many

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.min_utilisation < 1:
            raise ValueError(f"min_utilisation must be in [0, 1), got {self.min_utilisation}; 0.95 is usual")
        if not -1 < self.max_penalty < float("inf"):
            raise ValueError(f"max_penalty must be a share of the loss, got {self.max_penalty}; 0.05 is 5 %")
        for name in ("intervals", "overlaps", "layers", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one, got none")
        if min(*self.intervals, *self.overlaps, *self.layers, self.min_replicas) < 1:
            raise ValueError(
                f"intervals, overlaps, layers and min_replicas must be at least 1, got {list(self.intervals)}, "
                f"{list(self.overlaps)}, {list(self.layers)} and {self.min_replicas}"
            )


def make_plan(workload: TrainingTask, cluster: Cluster, constraints: PlanConstraints | None = None) -> Plan:
    """Find what to run.

    Returns:
        The plan; all that it claims was simulated.

    Raises:
        ValueError: Nothing is left that could run; names the reasons.
    """
    return _Search(workload, cluster, constraints or PlanConstraints()).plan()


@dataclass(slots=True)
class _Guess:
    """A candidate after the quick look."""

    candidate: Candidate
    penalty: LossPenalty | None
    total_s: float

    @property
    def order(self) -> tuple[float, float]:
        if self.penalty is None:
            return float("inf"), self.total_s
        return self.total_s * compute_worth(self.penalty.share), self.total_s


class _Search:
    def __init__(self, workload: TrainingTask, cluster: Cluster, constraints: PlanConstraints) -> None:
        self.workload, self.cluster, self.constraints = workload, cluster, constraints
        self._reasons: dict[str, tuple[str, int]] = {}
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._times = CandidateTimes(workload, cluster, is_by_store=constraints.is_by_store)
        self._penalties: dict[tuple[object, ...], LossPenalty | None] = {}
        self._micro_batches: dict[tuple[int, float], int] = {}

    def plan(self) -> Plan:
        names = self._able_machines()
        times = step_times(self.cluster, self.workload, names, num_replicas=len(names))
        sets = machine_sets(self.cluster, names, step_s=times)
        wanted = [chosen for chosen in sets if len(chosen) >= self.constraints.min_replicas]
        constraints = self.constraints
        found = candidates(
            self.workload, wanted, names=constraints.methods, intervals=constraints.intervals,
            overlaps=constraints.overlaps, layers=constraints.layers, codec_names=constraints.codecs,
        )  # fmt: skip
        looks = [self._evaluate(self._fitted(candidate)) for candidate in found]
        outlooks = [
            Outlook(candidate=one.candidate, prediction=self._times.simulated(one.candidate), penalty=one.penalty)
            for one in _chosen([guess for guess in looks if guess is not None])
        ]
        if not outlooks:
            raise ValueError(f"nothing is left to run: {self._why()}")
        # first what computes for long enough, then what has a published loss, then what is fast
        outlooks.sort(key=lambda one: (
            one.prediction.compute_utilisation < constraints.min_utilisation, one.equal_loss_s, one.prediction.total_s
        ))  # fmt: skip
        alike = _as_good_as(outlooks, min_utilisation=constraints.min_utilisation)
        best = min(alike, key=lambda one: one.prediction.sent_bytes_per_step)
        outlooks = [best, *(one for one in outlooks if one is not best)]
        work = self.workload
        return Plan(
            model=work.name, num_parameters=work.num_parameters, tokens=work.tokens, seq_len=work.seq_len,
            min_utilisation=constraints.min_utilisation, outlooks=tuple(outlooks),
            alone=next((one for one in outlooks if one.candidate.num_replicas == 1), None),
            rejections=tuple(Rejection(what=what, reason=why, count=n) for why, (what, n) in self._reasons.items()),
            needs=self._needs(best), uneven=self._uneven(best.candidate, names),
        )  # fmt: skip

    def _uneven(self, best: Candidate, names: Sequence[str]) -> UnevenBatches | None:
        """Return batches by speed of all machines that can train the model, where they gain."""
        count = len(names)
        speeds = {name: self._machines[name].flops_per_s or 0.0 for name in names}
        if count == 1:
            return None
        together = count * self.workload.sequences(count)
        sequences = {name: max(1, round(together * speed / sum(speeds.values()))) for name, speed in speeds.items()}
        # sequences a second: all wait for the machine that ends last
        uneven = sum(sequences.values()) / max(sequences[name] / speeds[name] for name in names)
        equal = best.num_replicas * min(speeds[name] for name in best.replicas)
        return UnevenBatches(sequences=sequences, speedup=uneven / equal) if uneven > _LEAST_GAIN * equal else None

    def _fitted(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the sequences of a forward pass that fit all its machines.

        Activations are computed again only where not even one sequence fits otherwise.
        """
        known = [self._machines[name].memory_bytes for name in candidate.replicas]
        least = min((memory for memory in known if memory is not None), default=float("inf"))
        found = self._micro_batches.get((candidate.num_replicas, least))
        if found is None:
            found = self.workload.micro_batch(candidate.num_replicas, memory_bytes=least)
            self._micro_batches[candidate.num_replicas, least] = found
        return dataclasses.replace(
            candidate, micro_batch=found if found < candidate.batch_size else None,
            recompute=self.workload.must_recompute(memory_bytes=least),
        )  # fmt: skip

    def _able_machines(self) -> list[str]:
        """Return the machines whose memory the model fits into, with one sequence in a forward pass and recompute."""
        needed = self.workload.memory_bytes(micro_batch=1, recompute=True)
        able = []
        for machine in self.cluster.machines:
            if machine.memory_bytes is not None and machine.memory_bytes < needed:
                short = format_bytes(machine.memory_bytes)
                self._reject(machine.name, f"needs about {format_bytes(needed)} of memory, has {short}")
            else:
                able.append(machine.name)
        if not able:
            raise ValueError(
                f"no machine has the memory for {self.workload.name}: {self._why()}; state what the machines have "
                f"(--memory, or memory_bytes of the cluster file), or take a smaller model or a shorter sequence"
            )
        return able

    def _evaluate(self, candidate: Candidate) -> _Guess | None:
        """Return a candidate with its guessed time, None where it is refused."""
        penalty = self._penalty(candidate)
        if penalty is not None and penalty.share > self.constraints.max_penalty:
            self._reject(candidate.describe(), f"its loss would be more than {self.constraints.max_penalty:.1%} higher")
            return None
        try:
            return _Guess(candidate=candidate, penalty=penalty, total_s=self._times.guess_s(candidate))
        except ValueError as error:
            self._reject(candidate.describe(), str(error))
            return None

    def _needs(self, best: Outlook) -> Needs | None:
        """Return what it would take to let the machines of the best candidate compute nearly all the time."""
        candidate, wanted = best.candidate, self.constraints.min_utilisation or _USUAL_UTILISATION
        if candidate.num_replicas == 1:
            return None

        def utilisation(factor: float, *, patience: int = MAX_EXTENSION) -> float:
            return self._times.simulated(candidate, rate_factor=factor, patience=patience).compute_utilisation

        # machines that differ in speed wait for each other on any wire
        limit = utilisation(_FASTEST_WIRES)
        # a short look does not see links that fall behind by little, and the closed form sees nothing else
        least = max(wanted * limit * self._times.wire_share(candidate), _SLOWEST_WIRES)
        factor = _least_factor(lambda factor: utilisation(factor, patience=1) >= wanted * limit, least=least)
        while utilisation(factor) < wanted * limit and factor < _FASTEST_WIRES:
            factor *= _STEP
        interval, penalty = self._least_interval(candidate, wanted * limit)
        return Needs(
            compute_utilisation=wanted, limit=limit, rate_factor=factor, sync_interval=interval,
            penalty=None if penalty is None else penalty.share,
        )  # fmt: skip

    def _least_interval(self, candidate: Candidate, wanted: float) -> tuple[int | None, LossPenalty | None]:
        """Return the least H with which a candidate's method computes for long enough, and what its loss pays."""
        if candidate.sync_interval is None:
            return None, None
        for interval in sorted({*self.constraints.intervals, *_LONGER}):
            other = dataclasses.replace(candidate, sync_interval=interval)
            if (candidate.overlap_steps or 0) >= interval or self._times.wire_share(other) * wanted > 1:
                continue
            if self._times.simulated(other).compute_utilisation >= wanted:
                return interval, self._penalty(other)
        return None, None

    def _penalty(self, candidate: Candidate) -> LossPenalty | None:
        how = (candidate.method, candidate.num_replicas, candidate.sync_interval, candidate.overlap_steps)
        key = (*how, candidate.codec)
        if key not in self._penalties:
            self._penalties[key] = loss_penalty(
                candidate.method, num_parameters=self.workload.num_parameters, num_replicas=candidate.num_replicas,
                sync_interval=candidate.sync_interval or 1, overlap_steps=candidate.overlap_steps or 0,
                codec=candidate.codec,
            )  # fmt: skip
        return self._penalties[key]

    def _reject(self, what: str, reason: str) -> None:
        first, count = self._reasons.get(reason, (what, 0))
        self._reasons[reason] = (first, count + 1)

    def _why(self) -> str:
        if self._reasons:
            return "; ".join(f"{what}: {why}" for why, (what, _) in list(self._reasons.items())[:4])
        if self.constraints.min_replicas > self.cluster.num_replicas:
            return (
                f"min_replicas is {self.constraints.min_replicas}, and there are {self.cluster.num_replicas} machines"
            )
        return "no method goes with these intervals, overlaps and codecs"


def _chosen(guesses: Sequence[_Guess]) -> list[_Guess]:
    """Return what is worth a simulation: the best, the best of each method, and of the best method at each interval."""
    ranked = sorted(guesses, key=lambda guess: guess.order)
    chosen = ranked[:_SIMULATED]
    firsts: dict[tuple[object, ...], _Guess] = {}
    for guess in ranked:
        candidate = guess.candidate
        firsts.setdefault((candidate.method, candidate.num_replicas == 1), guess)
        if candidate.method == ranked[0].candidate.method:
            firsts.setdefault((candidate.sync_interval,), guess)
    return chosen + [guess for guess in firsts.values() if guess not in chosen]


def _as_good_as(ranked: Sequence[Outlook], *, min_utilisation: float) -> list[Outlook]:
    """Return those that a plan cannot distinguish from the best: of them, the one that sends least is the best."""
    best = ranked[0]
    if best.penalty is None:
        return [best]
    least = best.prediction.compute_utilisation - _SAME
    if best.prediction.compute_utilisation >= min_utilisation:  # what was wished is kept to the end
        least = max(least, min_utilisation)
    return [
        one
        for one in ranked
        if one.equal_loss_s <= (1 + _SAME) * best.equal_loss_s and one.prediction.compute_utilisation >= least
    ]


def _least_factor(reaches: Callable[[float], bool], *, least: float) -> float:
    """Return by how much wires must be faster, `least` or more, to within 2 %; the fastest are known to be enough."""
    low = high = log(least)
    stride = log(_STEP)
    while not reaches(exp(high)) and high < log(_FASTEST_WIRES):
        low, high, stride = high, high + stride, 2 * stride
    while high - low > log(_STEP) + 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(exp(middle)) else (middle, high)
    return exp(high)
