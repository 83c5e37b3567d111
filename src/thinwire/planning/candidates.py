"""Candidates of a plan: methods with settings on sets of machines, and the time that each takes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch

from thinwire import codecs, methods, simulate
from thinwire.planning.cluster import Cluster
from thinwire.planning.predict import (
    MAX_EXTENSION,
    RECOMPUTE_FACTOR,
    Prediction,
    alone,
    inner_step_s,
    interval_coding_s,
    interval_outer_s,
    predict,
)
from thinwire.planning.simulator_adapter import (
    Traffic,
    condensed,
    faster,
    simulated_cluster,
    stages_of,
    through_store,
    traffic_of,
)
from thinwire.planning.training_task import TrainingTask
from thinwire.sync.method import Method
from thinwire.sync.schedule import Schedule

# Every how many steps, and how many of them an exchange may last. Beyond 10, no cost of overlap is published.
INTERVALS = (10, 20, 30, 50, 100, 200, 300, 500)
OVERLAPS = (1, 2, 5, 10)
LAYERS = (1, 3, 6)
# Methods with a known loss, so that a plan can choose between them. Streaming DiLoCo has the traffic of IsoLoCo and a
# higher loss (benchmarks/quality).
COMPARED = ("all-reduce", "diloco", "iso-loco")
_Found = TypeVar("_Found")
# What of a candidate is an option of a method.
_CHOSEN = ("sync_interval", "overlap_steps", "codec", "exchange", "layers_per_fragment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train."""

    method: str  # its name
    replicas: tuple[str, ...]  # the machines' names, in the replicas' order
    batch_size: int  # sequences of a step of each replica
    sync_interval: int | None = None  # H; None where the method exchanges at every step
    overlap_steps: int | None = None  # tau; None where nothing overlaps
    codec: str | None = None  # None for the method's own
    exchange: str | None = None  # how payloads travel; None for the cheaper one
    layers_per_fragment: int | None = None  # None where the model is exchanged whole
    micro_batch: int | None = None  # sequences in a forward pass; None for the whole batch
    # whether activations are computed again in the backward pass, since they do not fit the memory
    recompute: bool = False

    @property
    def num_replicas(self) -> int:
        """Number of machines."""
        return len(self.replicas)

    def settings(self) -> dict[str, Any]:
        """Return the options of `thinwire train` beside the method, by their names."""
        found = {name: getattr(self, name) for name in (*_CHOSEN, "micro_batch")}
        found |= {"batch_size": self.batch_size, "recompute": self.recompute or None}
        return {name: value for name, value in found.items() if value is not None}

    def make(self) -> Method:
        """Return the method.

        Raises:
            ValueError: A setting is out of its range.

        Example:
            >>> Candidate(method="diloco", replicas=("a", "b"), batch_size=8, sync_interval=50).make().name
            'diloco'
        """
        found = {name: getattr(self, name) for name in _CHOSEN if name != "codec"}
        arguments = {name: value for name, value in found.items() if value is not None}
        if self.codec is not None:
            arguments["codec"] = codecs.by_name(self.codec)
        return methods.recipe(self.method)(**arguments)

    def describe(self) -> str:
        """Say it in a line.

        Example:
            >>> Candidate(method="diloco", replicas=("a", "b"), batch_size=8, sync_interval=50, codec="e3m0").describe()
            'diloco, H 50, e3m0, 2 replicas'
        """
        words = [self.method]
        if self.sync_interval is not None:
            words.append(f"H {self.sync_interval}")
        if self.overlap_steps is not None:
            words.append(f"tau {self.overlap_steps}")
        if self.layers_per_fragment is not None:
            words.append(f"{self.layers_per_fragment} layers a fragment")
        words += [word for word in (self.codec, self.exchange) if word]
        return ", ".join([*words, "1 machine" if self.num_replicas == 1 else f"{self.num_replicas} replicas"])


def candidates(
    workload: TrainingTask, machines: Sequence[Sequence[str]], *, names: Sequence[str] = COMPARED,
    intervals: Sequence[int] = INTERVALS, overlaps: Sequence[int] = OVERLAPS, layers: Sequence[int] = LAYERS,
    codec_names: Sequence[str] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """Yield all that is worth a look.

    Args:
        workload: What is to be trained.
        machines: The sets of machines that may take part.
        names: The methods.
        intervals: H of methods that have one.
        overlaps: tau of methods that have one; those below H.
        layers: Blocks a fragment, of methods that have fragments.
        codec_names: The codes to choose from; none for all that a method goes with.

    Raises:
        ValueError: No method or no code has a name.
    """
    known = list(dict.fromkeys(name.replace("_", "-").lower() for name in names))
    for name in known:
        methods.recipe(name)
    for name in codec_names:
        codecs.by_name(name)
    for chosen in machines:
        batch_size = workload.sequences(len(chosen))
        if len(chosen) == 1:  # nothing is exchanged, whatever the method
            yield Candidate(method="all-reduce", replicas=tuple(chosen), batch_size=batch_size)
            continue
        for name in known:
            own_codecs = methods.about(name).plan_codecs or (None,)
            choices: dict[str, Sequence[Any]] = {
                "sync_interval": intervals, "overlap_steps": overlaps,
                "codec": [codec for codec in own_codecs if not codec_names or codec is None or codec in codec_names],
                "layers_per_fragment": layers,
                "exchange": ("all-gather", "two-phase") if len(chosen) > 2 else (None,),
            }  # fmt: skip
            takes = inspect.signature(methods.recipe(name)).parameters
            options = [option for option in choices if option in takes]
            for values in itertools.product(*(choices[option] for option in options)):
                settings = dict(zip(options, values, strict=True))
                if settings.get("overlap_steps") is None or settings["overlap_steps"] < settings.get(
                    "sync_interval", 0
                ):
                    yield Candidate(method=name, replicas=tuple(chosen), batch_size=batch_size, **settings)


def machine_sets(cluster: Cluster, names: Sequence[str], *, step_s: Sequence[float]) -> list[tuple[str, ...]]:
    """Return sets of machines that may train together: all, and fewer without the slowest or those on thin wires.

    Every set is a beginning of one of two orders, the machines' own order within it: by the time of a step, and by the
    rate of the thinnest wire to any other. Of many machines, halves and quarters are left out rather than single ones.

    Args:
        cluster: The wires.
        names: Those that can train the model.
        step_s: Of each, seconds of an inner step.
    """
    by_speed = sorted(range(len(names)), key=lambda n: (step_s[n], n))
    rates, most = _thinnest(cluster, names), len(names)
    by_wire = sorted(range(most), key=lambda n: (-rates[n], n))
    counts = {most, most - 1, 3 * most // 4, most // 2, most // 4, 2, 1} if most > 4 else {*range(1, most + 1)}
    found: dict[tuple[str, ...], None] = {}
    for count in sorted(counts, reverse=True):
        for order in (by_speed, by_wire) if count > 1 else (by_speed,):
            found[tuple(names[n] for n in sorted(order[:count]))] = None
    return list(found)


def _thinnest(cluster: Cluster, names: Sequence[str]) -> list[float]:
    """Return for each machine the lowest rate of its accesses and of its wires to the others."""
    chosen = set(names)
    found = {}
    for name in names:
        machine = cluster.machine(name)
        rates = [rate for rate in (machine.up_bits_per_s, machine.down_bits_per_s) if rate is not None]
        found[name] = min(rates, default=float("inf"))
    for wire in cluster.wires:
        if wire.source in chosen and wire.destination in chosen:
            # the faster end should not count as thin because of the slower one
            slow = min((wire.source, wire.destination), key=lambda name: found[name])
            found[slow] = min(found[slow], wire.bandwidth_bits_per_s)
    return [found[name] for name in names]


def quick_step_s(schedule: Schedule, rounds_s: Sequence[float], *, step_s: float) -> float:
    """Return about how long an inner step is with all waits: a first guess, to choose what is worth a simulation.

    Every round takes what its busiest link needs for it alone, of which tau steps are hidden; and all rounds together
    cannot take less than one after the other.

    Args:
        schedule: When.
        rounds_s: Seconds of an interval's rounds, see `rounds_alone_s`.
        step_s: Seconds in which the slowest computes a step.
    """
    interval, hidden_s = schedule.sync_interval, getattr(schedule, "overlap_steps", 0) * step_s
    waits = sum(max(0.0, seconds - hidden_s) for seconds in rounds_s)
    return max(interval * step_s + waits, sum(rounds_s)) / interval


def rounds_alone_s(traffic: Traffic, *, links: simulate.SimCluster, num_replicas: int) -> list[float]:
    """Return the seconds of each fragment's round of so many replicas, were it alone on their links."""
    stages = stages_of(traffic.exchange, links, num_replicas=num_replicas)
    sizes = [8 * channels[traffic.last_channel] for channels in traffic.payload_bytes]
    return [sum(_stage_s(traffic.exchange.flow(s, payload_bits=bits), links) for s in stages) for bits in sizes]


def carried_alone_s(traffic: Traffic, *, links: simulate.SimCluster, num_replicas: int) -> float:
    """Return the seconds that the busiest link carries an interval's rounds: no interval is shorter for long."""
    stages = stages_of(traffic.exchange, links, num_replicas=num_replicas)
    bits = 8 * sum(channels[traffic.last_channel] for channels in traffic.payload_bytes)
    flows = [traffic.exchange.flow(stage, payload_bits=bits) for stage in stages]
    return sum(_stage_s(flow, links) - flow.latency_s for flow in flows)


def _stage_s(flow: simulate.FluidFlow, links: simulate.SimCluster) -> float:
    """Return what a flow takes that is alone: until its busiest link has carried it, and its latency."""
    rates = [(links.links[link].bandwidth_bits_per_s, bits) for link, bits in flow.loads]
    return flow.size_bits * max((bits / rate for rate, bits in rates), default=0.0) + flow.latency_s


def step_times(cluster: Cluster, workload: TrainingTask, names: Sequence[str], *, num_replicas: int) -> list[float]:
    """Return the seconds of an inner step of each machine, were there so many replicas."""
    tokens = workload.step_tokens(num_replicas)
    machines = {machine.name: machine for machine in cluster.machines}
    return [inner_step_s(machines[name], num_parameters=workload.num_parameters, tokens=tokens) for name in names]


class CandidateTimes:
    """Run times of the candidates of one workload on one cluster; shared parts are computed once."""

    def __init__(self, workload: TrainingTask, cluster: Cluster, *, is_by_store: bool = False) -> None:
        self.workload, self.cluster = workload, cluster
        self._is_by_store = is_by_store
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._known: dict[object, Any] = {}

    def guess_s(self, candidate: Candidate) -> float:
        """Return about how long the whole run takes, with all waits.

        Raises:
            ValueError: The method refuses a setting, the model or so many replicas.
        """
        method, count = self.method(candidate), candidate.num_replicas
        step_s = max(self._computing(candidate))
        if count > 1:
            links = self._links_of(candidate.replicas)
            rounds_s = self._once(
                ("rounds", *_among(candidate)),
                lambda: rounds_alone_s(self._traffic_among(candidate), links=links, num_replicas=count),
            )
            step_s = quick_step_s(method.schedule, rounds_s, step_s=step_s)
        return self.workload.num_steps(count) * step_s

    def simulated(self, candidate: Candidate, *, rate_factor: float = 1.0, patience: int = MAX_EXTENSION) -> Prediction:
        """Return what the simulator says of a candidate, on wires so many times as fast; `patience` as in `predict`.

        Raises:
            ValueError: The method refuses something, or it can't be simulated for so long.
        """

        def make() -> Prediction:
            replicas = [simulate.SimReplica(step_s=time_s) for time_s in self._computing(candidate)]
            num_steps = self.workload.num_steps(candidate.num_replicas)
            if candidate.num_replicas == 1:
                return alone(num_steps, step_s=replicas[0].step_s)
            links, schedule = self._links_of(candidate.replicas), self.method(candidate).schedule
            if rate_factor != 1.0:
                links = faster(links, rate_factor)
            traffic = self._traffic_among(candidate)
            return predict(schedule, traffic, links=links, replicas=replicas, num_steps=num_steps, patience=patience)

        return self._once(("prediction", candidate, rate_factor, patience), make)

    def method(self, candidate: Candidate) -> Method:
        """Return a candidate's method, which does not depend on the machines.

        Raises:
            ValueError: A setting is out of its range.
        """
        how = candidate.method, candidate.sync_interval, candidate.overlap_steps, *_coding_of(candidate)
        return self._once(("method", *how), candidate.make)

    def wire_share(self, candidate: Candidate) -> float:
        """Return how long the busiest link carries what a step launches, as a part of the mean time of computing it.

        Where it is above 1, no utilisation above its inverse can be had in the long run.
        """
        traffic, links = self._traffic_among(candidate), self._links_of(candidate.replicas)
        carried_s = carried_alone_s(traffic, links=links, num_replicas=candidate.num_replicas)
        return carried_s / self.method(candidate).schedule.sync_interval / fmean(self._computing(candidate))

    def _once(self, key: tuple[object, ...], make: Callable[[], _Found]) -> _Found:
        """Return what is known under a key; made at its first use."""
        if key not in self._known:
            self._known[key] = make()
        found: _Found = self._known[key]
        return found

    def _computing(self, candidate: Candidate) -> Sequence[float]:
        """Return the seconds of each replica's step, with its share of coding and of outer steps."""
        names = candidate.replicas
        steps = self._once(
            ("steps", names), lambda: step_times(self.cluster, self.workload, names, num_replicas=len(names))
        )
        steps = [step_s * RECOMPUTE_FACTOR if candidate.recompute else step_s for step_s in steps]
        if candidate.num_replicas == 1:
            return steps

        def coding() -> list[float]:
            traffic, machines = self._sent(candidate), [self._machines[name] for name in names]
            return [interval_coding_s(one, traffic) + interval_outer_s(one, traffic) for one in machines]

        interval = self.method(candidate).schedule.sync_interval
        return [
            a + b / interval for a, b in zip(steps, self._once(("coding", *_among(candidate)), coding), strict=True)
        ]

    def _sent(self, candidate: Candidate) -> Traffic:
        def make() -> Traffic:
            # a view is the same whatever the code and the number of replicas, and takes most of the time to make
            method, model = self.method(candidate), self.workload.model
            view = self._once(
                ("view", repr(method.view)),
                lambda: method.view.bind(model, inner=torch.optim.AdamW(model.parameters())),
            )
            traffic = traffic_of(method, model, num_replicas=candidate.num_replicas, view=view)
            return through_store(traffic, num_members=candidate.num_replicas) if self._is_by_store else traffic

        return self._once(("traffic", *_sending(candidate)), make)

    def _traffic_among(self, candidate: Candidate) -> Traffic:
        """Return what is sent, on no more links than its time depends on."""

        def make() -> Traffic:
            traffic, links = self._sent(candidate), self._links_of(candidate.replicas)
            exchange = self._once(
                ("exchange", candidate.replicas, traffic.exchange),
                lambda: condensed(traffic.exchange, links, num_replicas=candidate.num_replicas),
            )
            return dataclasses.replace(traffic, exchange=exchange)

        return self._once(("condensed", *_among(candidate)), make)

    def _links_of(self, names: tuple[str, ...]) -> simulate.SimCluster:
        return self._once(("links", names), lambda: simulated_cluster(self.cluster, names=names))


def _coding_of(candidate: Candidate) -> tuple[object, ...]:
    return candidate.codec, candidate.exchange, candidate.layers_per_fragment


def _sending(candidate: Candidate) -> tuple[object, ...]:
    """Return all that the size of what is sent depends on."""
    return candidate.method, candidate.num_replicas, *_coding_of(candidate)


def _among(candidate: Candidate) -> tuple[object, ...]:
    """Return all that the time of a round depends on."""
    return candidate.replicas, *_sending(candidate)
