"""What candidates take on a cluster: a quick guess of thousands, a simulation of few. What they share is made once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean

import torch

from thinwire import simulate
from thinwire.planning.candidates import Candidate, carried_alone_s, quick_step_s, rounds_alone_s, step_times
from thinwire.planning.cluster import Cluster
from thinwire.planning.predict import MAX_EXTENSION, Prediction, alone, interval_coding_s, predict
from thinwire.planning.simulator_adapter import Traffic, condensed, faster, simulated_cluster, traffic_of
from thinwire.planning.workload import Workload
from thinwire.sync.method import Method
from thinwire.sync.views import BoundView


class CandidateTimes:
    """How long the candidates of one workload take on one cluster.

    Args:
        workload: What is to be trained.
        cluster: On what.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.workload, self.cluster = workload, cluster
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._methods: dict[tuple[object, ...], Method] = {}
        self._steps: dict[tuple[str, ...], list[float]] = {}
        self._coding: dict[tuple[object, ...], list[float]] = {}
        self._traffic: dict[tuple[object, ...], Traffic] = {}
        self._condensed: dict[tuple[object, ...], Traffic] = {}
        self._rounds: dict[tuple[object, ...], list[float]] = {}
        self._predictions: dict[tuple[Candidate, float, int], Prediction] = {}
        self._views: dict[str, BoundView] = {}
        self._links: dict[tuple[str, ...], simulate.SimCluster] = {}
        self._exchanges: dict[tuple[tuple[str, ...], simulate.ExchangeModel], simulate.ExchangeModel] = {}

    def guess_s(self, candidate: Candidate) -> float:
        """Return about how long the whole run takes, with all waits.

        Raises:
            ValueError: The method refuses a setting, the model or so many replicas.
        """
        method = self.method(candidate)
        step_s = max(self._computing(candidate))
        if candidate.num_replicas > 1:
            step_s = quick_step_s(method.schedule, self._alone_s(candidate), step_s=step_s)
        return self.workload.num_steps(candidate.num_replicas) * step_s

    def simulated(self, candidate: Candidate, *, rate_factor: float = 1.0, patience: int = MAX_EXTENSION) -> Prediction:
        """Return what the simulator says of a candidate.

        Args:
            candidate: What to run.
            rate_factor: All wires are so many times as fast.
            patience: See `predict`.

        Raises:
            ValueError: The method refuses something, or it can't be simulated for so long.
        """
        key = (candidate, rate_factor, patience)
        if key not in self._predictions:
            self._predictions[key] = self._predict(candidate, rate_factor=rate_factor, patience=patience)
        return self._predictions[key]

    def method(self, candidate: Candidate) -> Method:
        """Return a candidate's method, which is the same whoever takes part.

        Raises:
            ValueError: A setting is out of its range.
        """
        how = (candidate.method, candidate.sync_interval, candidate.overlap_steps, *_coding_of(candidate))
        if how not in self._methods:
            self._methods[how] = candidate.make()
        return self._methods[how]

    def wire_share(self, candidate: Candidate) -> float:
        """Return how long the busiest link carries what a step launches, as a part of the mean time of computing it.

        Where it is above 1, no utilisation above its inverse can be had in the long run.
        """
        traffic, links = self._traffic_among(candidate), self._links_of(candidate.replicas)
        carried_s = carried_alone_s(traffic, links=links, num_replicas=candidate.num_replicas)
        return carried_s / self.method(candidate).schedule.sync_interval / fmean(self._computing(candidate))

    def _predict(self, candidate: Candidate, *, rate_factor: float, patience: int) -> Prediction:
        replicas = [simulate.SimReplica(step_s=time_s) for time_s in self._computing(candidate)]
        num_steps = self.workload.num_steps(candidate.num_replicas)
        if candidate.num_replicas == 1:
            return alone(num_steps, step_s=replicas[0].step_s)
        links, schedule = self._links_of(candidate.replicas), self.method(candidate).schedule
        if rate_factor != 1.0:
            links = faster(links, rate_factor)
        traffic = self._traffic_among(candidate)
        return predict(schedule, traffic, links=links, replicas=replicas, num_steps=num_steps, patience=patience)

    def _computing(self, candidate: Candidate) -> Sequence[float]:
        """Return the seconds in which each replica computes a step and codes its share of a round."""
        names = candidate.replicas
        if names not in self._steps:
            self._steps[names] = step_times(self.cluster, self.workload, names, num_replicas=len(names))
        if candidate.num_replicas == 1:
            return self._steps[names]
        interval = self.method(candidate).schedule.sync_interval
        return [a + b / interval for a, b in zip(self._steps[names], self._interval_coding(candidate), strict=True)]

    def _interval_coding(self, candidate: Candidate) -> list[float]:
        key = _among(candidate)
        if key not in self._coding:
            traffic = self._sent(candidate)
            self._coding[key] = [interval_coding_s(self._machines[name], traffic) for name in candidate.replicas]
        return self._coding[key]

    def _alone_s(self, candidate: Candidate) -> list[float]:
        """Return the seconds of an interval's rounds, each alone on the wires."""
        key = _among(candidate)
        if key not in self._rounds:
            traffic, links = self._traffic_among(candidate), self._links_of(candidate.replicas)
            self._rounds[key] = rounds_alone_s(traffic, links=links, num_replicas=candidate.num_replicas)
        return self._rounds[key]

    def _sent(self, candidate: Candidate) -> Traffic:
        key = _sending(candidate)
        if key not in self._traffic:
            # a view is the same whatever the code and the number of replicas, and takes most of the time to make
            method, model = self.method(candidate), self.workload.model
            kind = repr(method.view)
            if kind not in self._views:
                self._views[kind] = method.view.bind(model, inner=torch.optim.AdamW(model.parameters()))
            self._traffic[key] = traffic_of(
                method, model, num_replicas=candidate.num_replicas, view=self._views[kind]
            )  # fmt: skip
        return self._traffic[key]

    def _traffic_among(self, candidate: Candidate) -> Traffic:
        """Return what is sent, on no more links than its time depends on."""
        key = _among(candidate)
        if key not in self._condensed:
            traffic, links = self._sent(candidate), self._links_of(candidate.replicas)
            where = (candidate.replicas, traffic.exchange)
            if where not in self._exchanges:
                self._exchanges[where] = condensed(traffic.exchange, links, num_replicas=candidate.num_replicas)
            self._condensed[key] = dataclasses.replace(traffic, exchange=self._exchanges[where])
        return self._condensed[key]

    def _links_of(self, names: tuple[str, ...]) -> simulate.SimCluster:
        if names not in self._links:
            self._links[names] = simulated_cluster(self.cluster, names=names)
        return self._links[names]


def _coding_of(candidate: Candidate) -> tuple[object, ...]:
    return candidate.codec, candidate.exchange, candidate.layers_per_fragment


def _sending(candidate: Candidate) -> tuple[object, ...]:
    """Return all that the size of what is sent depends on."""
    return candidate.method, candidate.num_replicas, *_coding_of(candidate)


def _among(candidate: Candidate) -> tuple[object, ...]:
    """Return all that the time of a round depends on."""
    return candidate.replicas, *_sending(candidate)
