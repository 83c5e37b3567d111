"""Prediction of a run on a cluster: a few intervals are simulated, and the rest repeats the last ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from thinwire import simulate
from thinwire.planning.cluster import Machine
from thinwire.planning.simulator_adapter import Traffic
from thinwire.sync.schedule import Schedule

# Operations of a step a parameter and token: two forward, four backward.
FLOPS_PER_PARAMETER = 6
# Of a step whose backward pass repeats the forward pass.
RECOMPUTE_FACTOR = 4 / 3
# At the end of a run, so many intervals are looked at; before them it has come to rest. Where it has not, so many times
# as many are simulated, and so many times as many at most.
_INTERVALS, _FEWEST_STEPS = 2, 8
_LONGER, MAX_EXTENSION = 4, 64
# Periods that differ by less, as a part of the simulated time, are the same.
_SAME = 1e-9
# Of a schedule that does not repeat itself all steps are simulated; so many pairs of steps are compared to tell.
_MOST_STEPS, _LOOKS = 20_000, 200
_FLOAT_BYTES = 4
# Of the operations a second of training, what float64 products reach where nobody has measured them: a sixth on an H100
# by its data sheet, a half on a CPU.
_FLOAT64_SHARE = 1 / 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and traffic of a run, extrapolated from a simulation."""

    num_steps: int  # inner steps of the real run
    simulated_steps: int  # how many of them were simulated; the others are taken to be like the last intervals of these
    total_s: float  # seconds of the real run, without its start and its final exchange
    step_s: float  # seconds of an inner step in the end, with its share of what is waited for
    compute_s: float  # of these, seconds in which the average replica computes
    # what the busiest replica sends an inner step in the end: in a staggered schedule's first interval fewer rounds are
    # launched. Over all steps where the schedule does not repeat itself
    sent_bytes_per_step: float
    peak_bits_per_s: float  # the highest rate on any link that has a limit
    # the part of the time in which the busiest link carries something, if it carries it at its full rate
    busiest: float

    @property
    def compute_utilisation(self) -> float:
        """The part of all replicas' time in which they compute, in the end."""
        return min(1.0, self.compute_s / self.step_s)

    @property
    def stall_s(self) -> float:
        """Seconds of a step in which the average replica waits."""
        return max(0.0, self.step_s - self.compute_s)


def inner_step_s(machine: Machine, *, num_parameters: float, tokens: float) -> float:
    """Return the seconds of a replica's inner step.

    Args:
        machine: Whose `flops_per_s` counts.
        num_parameters: Of the model.
        tokens: Of one step of this replica.

    Raises:
        ValueError: The machine's speed is unknown.

    Example:
        >>> inner_step_s(Machine(name="a", flops_per_s=6e12), num_parameters=1e9, tokens=1000)
        1.0
    """
    if machine.flops_per_s is None:
        raise ValueError(
            f"nothing says how fast {machine.name!r} computes; give it flops_per_s in the cluster file, or measure it "
            f"with thinwire probe"
        )
    return FLOPS_PER_PARAMETER * num_parameters * tokens / machine.flops_per_s


def interval_coding_s(machine: Machine, traffic: Traffic) -> float:
    """Return the seconds of a whole interval in which a replica encodes and decodes, 0 if unknown.

    The machine's `encode_bytes_per_s` counts: that of E3M0, which stands for all codes. Every fragment counts once, in
    what is sent at the end: the last channel that sends anything.
    """
    if machine.encode_bytes_per_s is None:
        return 0.0
    return _FLOAT_BYTES * traffic.coded_elements / machine.encode_bytes_per_s


def interval_outer_s(machine: Machine, traffic: Traffic) -> float:
    """Return the seconds of a whole interval in which a replica computes outer steps that multiply matrices.

    The machine's `float64_flops_per_s` counts; where it is unknown, a sixth of its `flops_per_s`.
    """
    rate = machine.float64_flops_per_s or _FLOAT64_SHARE * (machine.flops_per_s or inf)
    return traffic.outer_operations / rate


def predict(
    schedule: Schedule, traffic: Traffic, *, links: simulate.SimCluster, replicas: Sequence[simulate.SimReplica],
    num_steps: int, seed: int = 0, patience: int = MAX_EXTENSION,
) -> Prediction:  # fmt: skip
    """Simulate the beginning of a run, and say what the whole of it will take.

    Args:
        schedule: When rounds are launched and applied.
        traffic: What they send.
        links: Between those that take part; see `simulated_cluster`.
        replicas: How fast each of them computes, with coding.
        num_steps: Inner steps of the real run.
        seed: Of step times that vary.
        patience: Where rounds have not come to rest, so many times as many steps are simulated at most; 1 for a look
            that takes what there is.

    Raises:
        ValueError: The schedule never repeats itself, and the run is too long to be simulated as a whole.

    Example:
        >>> from thinwire.methods import diloco
        >>> from thinwire.planning.simulator_adapter import traffic_of
        >>> import torch
        >>> model = torch.nn.Linear(1000, 1000, bias=False, device="meta")
        >>> method, thin = diloco(sync_interval=10), simulate.star([simulate.SimLink(bandwidth_bits_per_s=32e6)] * 2)
        >>> found = predict(method.schedule, traffic_of(method, model, num_replicas=2), links=thin,
        ...                 replicas=[simulate.SimReplica(step_s=0.1)] * 2, num_steps=1000)
        >>> round(found.compute_utilisation, 3), round(found.total_s, 1)  # 32 Mbit take a second, once in 10 steps
        (0.5, 200.0)
    """
    are_steady = not any(replica.sigma or replica.outages for replica in replicas)
    acting = list(replicas)
    if traffic.exchange.fixed_stages is not None and are_steady:
        # All take part in every round and steps do not vary, so no replica launches later than the slowest. Rounds
        # start when it launches them: it stands for all, twice, as a round has two ends.
        acting = [max(replicas, key=lambda replica: replica.step_s)] * 2

    def simulated(steps: int) -> simulate.SimRun:
        return simulate.simulate_training(
            schedule, cluster=links, replicas=acting, payload_bytes=traffic.payload_bytes, num_steps=steps,
            exchange=traffic.exchange, seed=seed,
        )  # fmt: skip

    counts = {"num_fragments": traffic.num_fragments, "num_replicas": len(replicas)}
    run, steps, last, alike = _until_it_rests(simulated, schedule, num_steps, patience=patience, **counts)
    last_s = run.total_s - (max(ends[-1 - last] for ends in run.step_ends_s) if last else 0.0)
    step_s = last_s / (last or steps)
    # the first interval has fewer rounds, so what the last steps launched counts
    sent = _launched_bytes(schedule, traffic, first=steps - (alike or steps) + 1, last=steps) / (alike or steps)
    share = sent * (last or steps) / (_launched_bytes(schedule, traffic, first=1, last=steps) or 1.0) if last else 1.0
    busy = LinkUsage(links, run)
    # of all replicas, also where few of them acted
    compute_s = fmean(replica.step_s for replica in replicas) if are_steady else fmean(run.compute_s) / steps
    return Prediction(
        num_steps=num_steps, simulated_steps=steps, total_s=run.total_s + (num_steps - steps) * step_s,
        step_s=step_s, compute_s=compute_s,
        sent_bytes_per_step=sent * traffic.times_sent, peak_bits_per_s=busy.peak_bits_per_s,
        busiest=min(1.0, busy.longest_s * share / last_s),
    )  # fmt: skip


def _launched_bytes(schedule: Schedule, traffic: Traffic, *, first: int, last: int) -> float:
    """Return the payloads that a replica launches after some steps, each counted once."""
    return sum(
        traffic.payload_bytes[round.fragment][round.channel]
        for step in range(first, last + 1)
        for round in schedule.launches(step, num_fragments=traffic.num_fragments)
    )


def alone(num_steps: int, *, step_s: float) -> Prediction:
    """Return the prediction of a single machine, which only computes.

    Example:
        >>> alone(100, step_s=0.5).total_s, alone(100, step_s=0.5).compute_utilisation
        (50.0, 1.0)
    """
    return Prediction(
        num_steps=num_steps, simulated_steps=num_steps, total_s=num_steps * step_s, step_s=step_s, compute_s=step_s,
        sent_bytes_per_step=0.0, peak_bits_per_s=0.0, busiest=0.0,
    )  # fmt: skip


class LinkUsage:
    """Traffic on the links with a limit; links without one stand for delays.

    Attributes:
        peak_bits_per_s: The highest rate on any of them.
        most_bytes: The most that one of them carried.
        longest_s: The longest time that one of them takes for what it carried, at its full rate.
    """

    def __init__(self, cluster: simulate.SimCluster, run: simulate.SimRun) -> None:
        limited = [(n, link.bandwidth_bits_per_s) for n, link in enumerate(cluster.links)]
        limited = [(number, rate) for number, rate in limited if 0 < rate < inf]
        self.peak_bits_per_s = max((run.peak_bits_per_s[number] for number, _ in limited), default=0.0)
        self.most_bytes = max((run.link_bits[number] for number, _ in limited), default=0.0) / 8
        self.longest_s = max((run.link_bits[number] / rate for number, rate in limited), default=0.0)


def _until_it_rests(
    simulated: Callable[[int], simulate.SimRun], schedule: Schedule, num_steps: int, *, patience: int,
    num_fragments: int, num_replicas: int,
) -> tuple[simulate.SimRun, int, int, int]:  # fmt: skip
    """Return a run, its steps, and how many of the last ones all later ones are like; 0 where it has all steps.

    The last number is in how many of the last steps the same is launched as in all later ones, also where it has all
    steps because rounds came to rest late; 0 where the schedule does not repeat itself.
    """
    steps, last = _steps_to_simulate(schedule, num_steps, num_fragments, num_replicas=num_replicas)
    run, more = simulated(steps), last
    while last and not _is_at_rest(run, schedule, steps, last=last, num_fragments=num_fragments):
        more *= _LONGER
        if more > patience * last or steps + more > _MOST_STEPS:  # steps that vary, or groups that change
            longer = max(last, steps // 2 // schedule.sync_interval * schedule.sync_interval)
            return run, steps, longer, longer
        if steps + more >= num_steps:
            return simulated(num_steps), num_steps, 0, last
        steps += more
        run = simulated(steps)
    return run, steps, last, last


def _is_at_rest(run: simulate.SimRun, schedule: Schedule, num_steps: int, *, last: int, num_fragments: int) -> bool:
    """Return whether in the last steps every interval took as long as the others, and rounds ended as often.

    Where links are given a little more than they carry, rounds end later and later for many intervals before anyone
    has to wait for them.
    """
    interval = schedule.sync_interval
    steps = range(num_steps - interval + 1, num_steps + 1)
    count = sum(len(schedule.launches(step, num_fragments=num_fragments)) for step in steps)
    ends: dict[int, float] = {}
    for round in run.rounds:
        ends[round.id] = max(ends.get(round.id, 0.0), round.finished_s)
    # after the last step nothing is launched any more, so what ends later ends sooner than it would
    known = sorted(number for number, end_s in ends.items() if end_s <= run.total_s and number - count in ends)
    periods = [ends[number] - ends[number - count] for number in known[-count * last // interval :]]
    for times in run.step_ends_s:
        periods += [times[-1 - after] - times[-1 - after - interval] for after in range(0, last, interval)]
    return max(periods) - min(periods) <= _SAME * run.total_s


def _steps_to_simulate(schedule: Schedule, num_steps: int, num_fragments: int, *, num_replicas: int) -> tuple[int, int]:
    """Return how many steps to simulate at first, and how many of the last ones are like all later ones; 0 for none."""

    def launched(step: int) -> list[tuple[int, int, int]]:
        rounds = schedule.launches(step, num_fragments=num_fragments)
        return [(round.fragment, round.channel, round.apply_step - step) for round in rounds]

    interval = schedule.sync_interval
    first = next((step for step in range(1, 2 * interval + 1) if launched(step)), 1)
    rounds = [
        round
        for replica in range(num_replicas)
        for round in schedule.launches(first, num_fragments=num_fragments, replica=replica)
    ]
    warm = 2 * interval + max((round.apply_step - first for round in rounds), default=0)
    last = max(_INTERVALS, -(-_FEWEST_STEPS // interval)) * interval
    steps = warm + last
    if num_steps <= steps + interval:
        return num_steps, 0
    looked_at = [steps + 1 + (num_steps - steps - 1) * part // _LOOKS for part in range(_LOOKS + 1)]
    looked_at += range(warm + 1, min(steps + interval, num_steps) + 1)
    # each against the same step of the first of these intervals: what changes once, changes for good
    if all(launched(step) == launched(warm + 1 + (step - warm - 1) % interval) for step in looked_at):
        return steps + (num_steps - steps) % interval, last
    if num_steps > _MOST_STEPS:
        raise ValueError(
            f"the schedule changes while training goes on, so all of it must be simulated: at most {_MOST_STEPS:,} "
            f"steps, got {num_steps:,}; give fewer steps, or warm-ups that have ended before them"
        )
    return num_steps, 0
