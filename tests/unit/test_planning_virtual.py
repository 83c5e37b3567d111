"""What the planner tells the simulator: the bytes that are really sent, the wires' rates, and no more links than count."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.laws.test_method_laws import ARGUMENTS, inner_of, one_step
from tests.reference.loops import wrap
from tests.reference.small_models import Transformer
from thinwire import methods, simulate
from thinwire.codecs import float32
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.predict import predict
from thinwire.planning.virtual import KnownStages, Traffic, condensed, faster, traffic_of, virtual_cluster
from thinwire.sync.schedule import EveryStep, Staggered
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

STEPS = 12
# Past its ramp: what is sent in the ramp is not what is sent for most of a run.
RECIPE_ARGUMENTS: dict[str, dict[str, Any]] = {**ARGUMENTS, "dgc": {"density": 0.1, "warmup_steps": 0}}


def make(name: str) -> thinwire.Method:
    return methods.recipe(name)(**RECIPE_ARGUMENTS.get(name, {}))


def small_model(device: str = "cpu") -> Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(layers=2)


@cache
def really_sent(name: str, num_replicas: int) -> int:
    """Return the bytes of all messages of all rounds, headers and all, of the replica that sends most."""

    def replica_main(loopback: LoopbackTransport) -> int:
        transport, model = RecordingTransport(loopback), small_model()
        optimizer = wrap(model, transport, make(name), inner_of(name, model))
        for step in range(1, STEPS + 1):
            one_step(optimizer, model, data=step, replica=transport.replica)
        optimizer.synchronize() if hasattr(optimizer, "synchronize") else None
        sent = sum(
            record.wire_bytes for record in transport.log if (record.direction, record.kind) == ("sent", "round")
        )
        optimizer.close(final_exchange=False)
        return sent

    return max(thinwire.run_replicas(num_replicas, replica_main))


def planned_to_be_sent(name: str, model: nn.Module, *, num_replicas: int) -> float:
    method = make(name)
    traffic = traffic_of(method, model, num_replicas=num_replicas, inner=inner_of(name, model))
    rounds = [
        round
        for step in range(1, STEPS + 1)
        for round in method.schedule.launches(step, num_fragments=traffic.num_fragments)
    ]
    return sum(traffic.times_sent * traffic.payload_bytes[round.fragment][round.channel] for round in rounds)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", methods.RECIPES)
def test_what_is_planned_to_be_sent_is_what_a_run_really_sends_to_the_byte(name: str, num_replicas: int) -> None:
    planned = planned_to_be_sent(name, small_model(), num_replicas=num_replicas)
    assert planned == pytest.approx(really_sent(name, num_replicas), rel=1e-12)
