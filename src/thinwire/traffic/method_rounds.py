"""Flows of a recorded run, and of a method over time: the messages of each round, as its exchange states them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import DataError, refusal
from thinwire.runlog.run_folder import read_files
from thinwire.simulate import ExchangeModel
from thinwire.sync.schedule import Schedule
from thinwire.traffic.fabric import Fabric, FabricFlow
from thinwire.traffic.planner import TrafficPlan


@dataclass(frozen=True, kw_only=True)
class RoundFlows:
    """Messages of the rounds that are launched after one step."""

    step: int
    fragments: tuple[int, ...]  # the fragments that are exchanged
    num_steps: int  # steps until the first of them is applied
    stages: tuple[tuple[FabricFlow, ...], ...]  # flows of each stage; a stage begins when the one before has arrived

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(flow.num_bytes for stage in self.stages for flow in stage)


def rounds_of_method(
    schedule: Schedule, payload_bytes: Sequence[Sequence[float]], exchange: ExchangeModel, *, fabric: Fabric,
    num_replicas: int,
) -> list[RoundFlows]:  # fmt: skip
    """Return the rounds of the second interval, which is like all later ones; replica n runs on the n-th host.

    Raises:
        ValueError: A replica has no host.
    """
    hosts = list(fabric.hosts)
    if not 2 <= num_replicas <= len(hosts):
        raise refusal("replicas do not fit the fabric", got=f"{num_replicas} replicas and {len(hosts)} hosts",
                      allowed=f"2 to {len(hosts)} replicas", remedy=f"--replicas {len(hosts)}")  # fmt: skip
    found = []
    for step in range(schedule.sync_interval + 1, 2 * schedule.sync_interval + 1):
        rounds = schedule.launches(step, num_fragments=len(payload_bytes))
        stages: defaultdict[int, defaultdict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
        for one in rounds:
            size = payload_bytes[one.fragment][one.channel]
            for members, senders in exchange.parts(one.id, alive=range(num_replicas)):
                if exchange.is_direct:
                    for sender in set(senders) - {members[0]}:
                        stages[0][sender, members[0]] += size
                    continue
                for number, stage in enumerate(exchange.pattern.stages(senders=senders, members=members)):
                    for message in stage.messages():
                        stages[number][message] += size / stage.num_shards
        flows = tuple(
            tuple(
                FabricFlow(source=hosts[a], destination=hosts[b], num_bytes=round(size), job=f"step {step}")
                for (a, b), size in sorted(stages[number].items())
                if round(size)
            )
            for number in sorted(stages)
        )
        if any(flows):
            found.append(RoundFlows(
                step=step, fragments=tuple(one.fragment for one in rounds),
                num_steps=min(one.apply_step for one in rounds) - step, stages=flows,
            ))  # fmt: skip
    return found


def flows_of_rounds(rounds: Sequence[RoundFlows]) -> list[FabricFlow]:
    """Return one flow for each pair of hosts, with the bytes of all rounds: a pair's connections serve all of them."""
    sent: Counter[tuple[str, str]] = Counter()
    for one in rounds:
        for stage in one.stages:
            for flow in stage:
                sent[flow.source, flow.destination] += flow.num_bytes
    return [FabricFlow(source=a, destination=b, num_bytes=size) for (a, b), size in sent.items()]


def round_seconds(plan: TrafficPlan, one: RoundFlows) -> float:
    """Return the seconds that the rounds of one step take over the paths of a plan, stage by stage."""
    pieces = {(flow.source, flow.destination): own for flow, own in zip(plan.flows, plan.pieces, strict=True)}
    seconds = 0.0
    for stage in one.stages:
        own = [pieces[flow.source, flow.destination] for flow in stage]
        seconds += max(dataclasses.replace(plan, flows=stage, pieces=own).completion_s.values(), default=0.0)
    return seconds


def rounds_to_json(plan: TrafficPlan, rounds: Sequence[RoundFlows]) -> list[dict[str, Any]]:
    """Return each step's rounds with their bytes and seconds over a plan's paths."""
    return [
        {"step": one.step, "fragments": list(one.fragments), "bytes": one.num_bytes,
         "seconds": round_seconds(plan, one), "steps_until_applied": one.num_steps}
        for one in rounds
    ]  # fmt: skip


def flows_of_run(run: Path, fabric: Fabric) -> list[FabricFlow]:
    """Return one flow for each pair of ranks, with all bytes of the run; rank n runs on the fabric's n-th host.

    Raises:
        DataError: The folder cannot be read or holds no sent messages.
        ValueError: A rank has no host.
    """
    if not run.exists():
        raise DataError(f"there is no run {run}; give the folder of `thinwire train --out`")
    sent: Counter[tuple[int, int]] = Counter()
    for end in read_files([run]).transfers:
        if end.direction == "sent" and end.rank != end.peer:
            sent[end.rank, end.peer] += end.num_bytes
    found = [(pair, size) for pair, size in sorted(sent.items()) if size]
    if not found:
        raise DataError(f"{run} records no sent messages; `thinwire train` writes them with two replicas or more")
    hosts = list(fabric.hosts)
    if (last := max(max(pair) for pair, _ in found)) >= len(hosts):
        raise refusal("a rank of the run has no host", got=f"rank {last} and {len(hosts)} hosts",
                      allowed=f"ranks 0 to {len(hosts) - 1}", remedy="a fabric of more hosts")  # fmt: skip
    return [FabricFlow(source=hosts[a], destination=hosts[b], num_bytes=size, job=run.name) for (a, b), size in found]
