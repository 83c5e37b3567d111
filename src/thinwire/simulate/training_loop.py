"""Step loop of a method in virtual time: computing, launches, transfers in flight, waits at apply.

The schedule is the one that the engine runs. Every replica computes its steps one after another; after each it launches
what the schedule says and waits for what it must apply, and a round under way costs computing nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from thinwire.shared_random import derive_seed
from thinwire.simulate.cluster import SimCluster
from thinwire.simulate.exchange_model import ExchangeModel, RoundTimes
from thinwire.simulate.fluid_network import FluidFlow, FluidNetwork
from thinwire.simulate.rounds_in_flight import DirectRoundTracker, GroupRoundTracker
from thinwire.simulate.virtual_clock import VirtualClock
from thinwire.sync.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReplica:
    """Speed and outages of a simulated replica.

    Raises:
        ValueError: A number is out of its range.
    """

    step_s: float  # seconds of an inner step: of each, or the median where `sigma` is above 0
    sigma: float = 0.0  # steps vary log-normally, by so much in their logarithm
    # pairs of the times at which it dies and returns, ascending; infinity for one that does not return. What it was
    # computing is lost. It returns into the step that the fastest replica is in
    outages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and isfinite(self.step_s) and self.sigma >= 0 and isfinite(self.sigma)):
            raise ValueError(
                f"step_s must be above 0 and sigma at least 0, both finite, got {self.step_s} and {self.sigma}"
            )
        times = [time_s for outage in self.outages for time_s in outage]
        if not all(before < after for before, after in zip([-1.0, *times], times, strict=False)):
            raise ValueError(f"outages must be pairs of times from 0 on that grow, got {self.outages}")


class Stall(NamedTuple):
    """A wait for rounds that were not done when they had to be applied."""

    replica: int  # who waited
    step: int  # after which inner step
    seconds: float  # how long


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRecovery:
    """Time and bytes that the death and the return of a replica cost.

    Raises:
        ValueError: A number is negative or not finite.
    """

    detection_s: float = 0.0  # from a replica's death until the others go on without it: their rounds with it restart
    # what a replica that returns loads before it goes on, from the first replica that is alive
    rejoin_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (0 <= self.detection_s < inf and 0 <= self.rejoin_bytes < inf):
            raise ValueError(
                f"detection_s and rejoin_bytes must be finite and at least 0, got {self.detection_s} and "
                f"{self.rejoin_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """Result of a simulated training."""

    # for each replica, when each of its steps was done, with what was applied after it. Steps that it was gone for are
    # missing
    step_ends_s: tuple[tuple[float, ...], ...]
    last_step: tuple[int, ...]  # for each replica, the number of its last step
    compute_s: tuple[float, ...]  # for each replica, the seconds in which it computed steps that it finished
    finished_s: tuple[float, ...]  # for each replica, when its last step was done
    stalls: tuple[Stall, ...]  # all waits, in the order of their ends
    rounds: tuple[RoundTimes, ...]  # all rounds, in the order of their ends, and then those that never ended
    link_bits: tuple[float, ...]  # the bits that each link of the cluster carried
    peak_bits_per_s: tuple[float, ...]  # the highest rate of each link
    # names of dead links that flows waited for at the end: no other path was left to them
    blocked_links: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """End of the last replica's last step."""
        return max(self.finished_s, default=0.0)

    @property
    def compute_utilisation(self) -> float:
        """The part of all replicas' time until the end in which they computed steps that count."""
        return sum(self.compute_s) / (len(self.compute_s) * self.total_s) if self.total_s else 0.0

    @property
    def stall_s(self) -> tuple[float, ...]:
        """For each replica, the seconds in which it waited for rounds."""
        waited = [0.0] * len(self.compute_s)
        for stall in self.stalls:
            waited[stall.replica] += stall.seconds
        return tuple(waited)


_NORMAL = NormalDist()


def simulate_training(
    schedule: Schedule, *, cluster: SimCluster, replicas: Sequence[SimReplica],
    payload_bytes: Sequence[Sequence[float]], num_steps: int, exchange: ExchangeModel | None = None,
    recovery: SimRecovery | None = None, seed: int = 0,
) -> SimRun:  # fmt: skip
    """Run the step loop of a method in virtual time.

    Args:
        schedule: When rounds are launched and applied.
        cluster: Its first hosts are the replicas, in this order.
        replicas: How fast each computes, and when it is gone.
        payload_bytes: What a replica sends of each fragment, of each channel, in bytes as they cross the wire:
            `payload_bytes[fragment][channel]`.
        num_steps: Inner steps from the start.
        exchange: How rounds cross the links; None for an all-gather among all.
        recovery: How long deaths go unnoticed, and what a return costs; None for no time and no bytes.
        seed: Of the step times that vary.

    Raises:
        ValueError: The cluster has fewer hosts than there are replicas, or a number is out of its range.

    Example:
        >>> from thinwire.simulate import SimLink, star
        >>> from thinwire.sync.schedule import Staggered
        >>> run = simulate_training(
        ...     Staggered(sync_interval=10), cluster=star([SimLink(bandwidth_bits_per_s=8e6)] * 2),
        ...     replicas=[SimReplica(step_s=1.0)] * 2, payload_bytes=[(5e6,)], num_steps=20)
        >>> run.total_s, run.stall_s  # each round takes 5 seconds, and everyone waits for it
        (30.0, (10.0, 10.0))
    """
    if not 0 < len(replicas) <= cluster.num_hosts:
        raise ValueError(f"replicas must be 1 to the cluster's {cluster.num_hosts} hosts, got {len(replicas)}")
    if num_steps < 1 or not payload_bytes:
        raise ValueError(f"num_steps and the fragments must be at least 1, got {num_steps} and {len(payload_bytes)}")
    loop = _Loop(
        schedule, cluster=cluster, replicas=replicas, payload_bytes=payload_bytes, num_steps=num_steps,
        exchange=exchange or ExchangeModel(), recovery=recovery or SimRecovery(), seed=seed,
    )  # fmt: skip
    return loop.run()


class _Worker:
    """State of one replica.

    Steps after which nothing is launched or applied are one event: `planned` holds the ends of those that are to come,
    and of the step after which something is.
    """

    __slots__ = (
        "compute_s", "due", "ends_s", "finished_s", "is_alive", "is_done", "life", "missing", "planned", "step",
        "waits_since_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step, self.is_alive, self.is_done, self.missing = 0, True, False, 0
        self.life = 0  # what was asked for in a life that has ended comes too late
        self.compute_s = self.finished_s = self.waits_since_s = 0.0
        self.ends_s: list[float] = []
        self.planned: list[float] = []
        self.due: dict[int, list[int]] = {}  # what is applied after which step


class _StepTimes:
    """Seconds of each step of each replica, drawn in the order of steps whatever happens between them."""

    def __init__(self, replicas: Sequence[SimReplica], seed: int) -> None:
        self._replicas = replicas
        self._draws = [Random(derive_seed(seed, "steps", number)) for number in range(len(replicas))]
        self._factors: list[list[float]] = [[] for _ in replicas]

    def seconds(self, number: int, step: int) -> float:
        replica, factors = self._replicas[number], self._factors[number]
        if not replica.sigma:
            return replica.step_s
        while len(factors) < step:
            uniform = max(self._draws[number].random(), 2**-53)
            factors.append(exp(replica.sigma * _NORMAL.inv_cdf(uniform)))
        return replica.step_s * factors[step - 1]


class _Loop:
    def __init__(
        self, schedule: Schedule, *, cluster: SimCluster, replicas: Sequence[SimReplica],
        payload_bytes: Sequence[Sequence[float]], num_steps: int, exchange: ExchangeModel, recovery: SimRecovery,
        seed: int,
    ) -> None:  # fmt: skip
        self.schedule, self.cluster, self.replicas = schedule, cluster, replicas
        self.num_fragments, self.num_steps = len(payload_bytes), num_steps
        self.recovery = recovery
        self.clock = VirtualClock()
        self.network = FluidNetwork(cluster.links, clock=self.clock)
        self.workers = [_Worker() for _ in replicas]
        self.known = tuple(range(len(replicas)))  # who is alive, as far as the others know
        self.step_times = _StepTimes(replicas, seed)
        # every replica launches a round after the same step, so one of them stands for all
        self.has_launches = [
            bool(schedule.launches(step, num_fragments=self.num_fragments)) for step in range(1, num_steps + 1)
        ]
        self.stalls: list[Stall] = []
        tracker = DirectRoundTracker if exchange.is_direct else GroupRoundTracker
        self.tracker = tracker(
            exchange, cluster=cluster, payload_bytes=payload_bytes, network=self.network, clock=self.clock,
            alive=lambda: self.known, resume=self._resume,
        )  # fmt: skip

    def run(self) -> SimRun:
        for number, replica in enumerate(self.replicas):
            for death_s, return_s in replica.outages:
                self.clock.at(death_s, self._dying(number))
                if return_s < inf:
                    # no replica returns before its death has been noticed
                    self.clock.at(max(return_s, death_s + self.recovery.detection_s), self._returning(number))
            self._compute(number)
        self.clock.run()
        workers = self.workers
        return SimRun(
            step_ends_s=tuple(tuple(worker.ends_s) for worker in workers),
            last_step=tuple(worker.step for worker in workers),
            compute_s=tuple(worker.compute_s for worker in workers),
            finished_s=tuple(worker.finished_s for worker in workers),
            stalls=tuple(self.stalls),
            rounds=(*self.tracker.times, *self.tracker.unfinished()),
            link_bits=tuple(self.network.carried_bits()),
            peak_bits_per_s=tuple(self.network.peak_bits_per_s),
            blocked_links=tuple(map(self.cluster.name_of, self.network.blocked_links())),
        )

    def _compute(self, number: int) -> None:
        """Begin the steps up to the next one after which something is to be done."""
        worker = self.workers[number]
        life, step, end_s = worker.life, worker.step, self.clock.now_s
        while True:
            step += 1
            end_s += self.step_times.seconds(number, step)
            worker.planned.append(end_s)
            if step == self.num_steps or self.has_launches[step - 1] or step in worker.due:
                break

        def end() -> None:
            if worker.life == life:
                self._end_row(number)

        self.clock.at(end_s, end)

    def _count_steps(self, number: int) -> None:
        """Count the planned steps that have ended by now, but for the last one of the row."""
        worker, now_s = self.workers[number], self.clock.now_s
        num_ended = 0
        while num_ended < len(worker.planned) - 1 and worker.planned[num_ended] <= now_s:
            num_ended += 1
            worker.step += 1
            worker.compute_s += self.step_times.seconds(number, worker.step)
        if num_ended:
            worker.ends_s += worker.planned[:num_ended]
            worker.finished_s = worker.ends_s[-1]
            del worker.planned[:num_ended]

    def _end_row(self, number: int) -> None:
        self._count_steps(number)
        worker = self.workers[number]
        worker.planned.clear()
        worker.step += 1
        worker.compute_s += self.step_times.seconds(number, worker.step)
        worker.waits_since_s = self.clock.now_s
        if self.has_launches[worker.step - 1]:
            for round in self.schedule.launches(worker.step, num_fragments=self.num_fragments, replica=number):
                self.tracker.launch(number, round.id, fragment=round.fragment, channel=round.channel)
                worker.due.setdefault(round.apply_step, []).append(round.id)
        # a round that ends at once resumes no replica: the waits are known only after all rounds have been asked for
        worker.missing = 1
        for round_id in worker.due.pop(worker.step, ()):
            worker.missing += not self.tracker.is_collected(number, round_id)
        self._resume(number)

    def _resume(self, number: int) -> None:
        worker = self.workers[number]
        worker.missing -= 1
        if worker.missing:
            return
        now_s = self.clock.now_s
        if now_s > worker.waits_since_s:
            self.stalls.append(Stall(number, worker.step, now_s - worker.waits_since_s))
        worker.ends_s.append(now_s)
        worker.finished_s = now_s
        worker.is_done = worker.step == self.num_steps
        if not worker.is_done:
            self._compute(number)

    def _dying(self, number: int) -> Callable[[], None]:
        def die() -> None:
            worker = self.workers[number]
            worker.life += 1
            if not worker.is_alive or worker.is_done:
                return
            self._count_steps(number)
            worker.is_alive = False
            worker.missing = 0
            worker.planned.clear()
            worker.due.clear()
            self.tracker.break_off(number)
            self.clock.at(self.clock.now_s + self.recovery.detection_s, strike_off)

        def strike_off() -> None:
            self.known = tuple(other for other in self.known if other != number)
            self.tracker.go_on_without(number)

        return die

    def _returning(self, number: int) -> Callable[[], None]:
        worker = self.workers[number]

        def load() -> None:
            now_s, life = self.clock.now_s, worker.life
            if worker.is_alive or any(death <= now_s < end for death, end in self.replicas[number].outages):
                return

            def go_on() -> None:
                if worker.life != life:
                    return
                for other in self.known:
                    self._count_steps(other)
                worker.is_alive = True
                self.known = tuple(sorted((*self.known, number)))
                worker.step = max(other.step for other in self.workers)
                worker.is_done = worker.step == self.num_steps
                if not worker.is_done:
                    self._compute(number)

            source = next((other for other, peer in enumerate(self.workers) if peer.is_alive), None)
            if source is None or not self.recovery.rejoin_bytes:
                go_on()
                return
            loads = self.cluster.route(source, number)
            size_bits = 8 * self.recovery.rejoin_bytes
            flow = FluidFlow(size_bits=size_bits, loads=loads, latency_s=self.cluster.latency_s(loads))
            self.network.start(flow, go_on, reroute=lambda works: self.cluster.route(source, number, is_working=works))

        # once more at the end of the queue: the others may notice its death in the same instant
        return lambda: self.clock.at(self.clock.now_s, load)
