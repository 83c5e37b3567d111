"""What a round of an exchange costs a replica is measured in part, counted whole, and over whoever takes part."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch

import thinwire
from thinwire.averaging import cost
from thinwire.averaging.cost import measure_exchange, most_members, sent_bytes_of
from thinwire.averaging.exchange import AllGather, Exchange, Gossip, Ramp, TwoPhase, cheapest
from thinwire.averaging.mixing import Neighbours, RandomPairs, Ring
from thinwire.averaging.round_context import Average, RoundContext, Steps, Wait
from thinwire.averaging.topology import AllReplicas, Participation, Peers, Topology
from thinwire.codecs import bfloat16, dct_top_k, e3m0, float32
from thinwire.codecs.dense import Dense
from thinwire.methods.masha import Star
from thinwire.methods.power_sgd import LowRank
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.loopback import LoopbackTransport

SHAPES = [torch.Size([48, 20]), torch.Size([48])]


class Measured(Dense):
    """float32 that notes what it codes, and takes a fixed time a call and an element on a clock of its own.

    Nothing else moves that clock, so what is measured does not depend on the machine.
    """

    sizes: ClassVar[list[int]] = []
    call_s: ClassVar[float] = 0.0
    element_s: ClassVar[float] = 0.0
    now_s: ClassVar[float] = 0.0

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        self.sizes.append(tensor.numel())
        Measured.now_s += self.call_s + self.element_s * tensor.numel()
        return super().encode(tensor, seed=seed)


def clock() -> float:
    return Measured.now_s


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    for name, value in (("sizes", []), ("call_s", 0.0), ("element_s", 0.0), ("now_s", 0.0)):
        monkeypatch.setattr(Measured, name, value)
    return Measured(**_fields(float32()))


def _fields(codec: Any) -> dict[str, Any]:
    return {field.name: getattr(codec, field.name) for field in fields(codec)}


def test_the_time_of_coding_is_in_the_cost_and_the_bytes_are_the_exchange_s(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Measured, "call_s", 0.02)
    slow, quick = AllGather(codec=measured), AllGather(codec=float32())
    costs = [measure_exchange(exchange, SHAPES, num_replicas=3, clock=clock) for exchange in (slow, quick)]
    assert costs[0].computing_s == pytest.approx(0.02) and costs[1].computing_s == 0
    assert costs[0].sent_bytes == 2 * 4 * (48 * 20 + 48)


def test_time_passes_on_the_machine_s_clock_where_no_other_is_given() -> None:
    assert measure_exchange(AllGather(codec=float32()), SHAPES, num_replicas=3).computing_s > 0


def test_long_tensors_are_measured_in_part_and_counted_whole() -> None:
    shapes = [torch.Size([3000, 1000]), torch.Size([7, 1000])]
    exchange = cheapest(e3m0(), num_replicas=2)
    assert measure_exchange(exchange, shapes, num_replicas=2).sent_bytes == exchange.sent_bytes(
        3_007_000, num_replicas=2
    )


@pytest.mark.parametrize("shape", [(3000, 1000), (1, 3_000_000), (2, 1, 5, 900_000), (3_000_000,)])
def test_a_part_of_a_long_tensor_is_measured_however_it_is_shaped(measured: Measured, shape: tuple[int, ...]) -> None:
    measure_exchange(AllGather(codec=measured), [torch.Size(shape), torch.Size([7])], num_replicas=2, clock=clock)
    assert 2**20 < max(measured.sizes) <= 2**21


def test_no_more_is_measured_than_tells_the_time(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "element_s", 4e-6)
    found = measure_exchange(AllGather(codec=measured), [torch.Size([3000, 1000])], num_replicas=2, clock=clock)
    assert 2**14 < max(measured.sizes) <= 2**15
    assert found.computing_s == pytest.approx(12.0)


def test_among_many_replicas_less_is_measured_so_that_their_messages_fit_into_memory(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_LONG_ENOUGH_S", math.inf)
    monkeypatch.setattr(cost, "_MOST_ELEMENTS_IN_FLIGHT", 2**20)
    measure_exchange(AllGather(codec=measured), [torch.Size([3000, 1000])], num_replicas=3)
    assert 2**14 < max(measured.sizes) <= 2**20 // 9


def counted(exchange: Exchange, topology: Topology, *, num_replicas: int) -> int:
    """Run a round late in a run, and return the payload bytes of the replica that sends most."""

    def replica_main(transport: LoopbackTransport) -> int:
        recording = thinwire.RecordingTransport(transport)
        peers = topology.peers(round_id=0, me=transport.replica, alive=range(num_replicas))
        bound = exchange.bind([SHAPES], replica=transport.replica, num_replicas=num_replicas)
        tensor = torch.randn(48 * 20 + 48, generator=torch.Generator().manual_seed(transport.replica))
        steps = bound.steps(tensor, RoundContext(peers=peers, transport=recording, round_id=0, step=10_000))
        round = Round(id=0, fragment=0, launch_step=1, apply_step=1)
        launch(steps, round=round, deadline_s=5, in_background=False).result()
        return recording.log.totals("sent").payload_bytes

    return max(thinwire.run_replicas(num_replicas, replica_main))


EVERYONE = AllReplicas()
RAMP = Ramp(codecs=((1, dct_top_k(k=32)), (100, dct_top_k(k=4))))


@pytest.mark.parametrize(
    ("exchange", "topology", "num_replicas"),
    [
        (LowRank(rank=2), EVERYONE, 2),
        (LowRank(rank=2), EVERYONE, 5),
        (LowRank(rank=40), EVERYONE, 2),  # nothing becomes smaller
        (AllGather(codec=dct_top_k(k=8)), EVERYONE, 3),
        (AllGather(codec=RAMP), EVERYONE, 3),
        (TwoPhase(codec=e3m0()), EVERYONE, 3),
        (Star(codec=dct_top_k(k=8), server_codec=RAMP), EVERYONE, 3),
        (Gossip(codec=dct_top_k(k=8), graph=Ring()), Neighbours(graph=Ring()), 5),
        (AllGather(codec=e3m0()), RandomPairs(seed=3), 6),
        (AllGather(codec=e3m0()), RandomPairs(seed=3), 5),
    ],
    ids=repr,
)
def test_the_bytes_of_a_round_late_in_a_run_are_those_that_are_counted(
    exchange: Exchange, topology: Topology, num_replicas: int
) -> None:
    members = most_members(topology, num_replicas=num_replicas)
    expected = counted(exchange, topology, num_replicas=num_replicas)
    assert sent_bytes_of(exchange, SHAPES, num_members=members) == expected
    found = measure_exchange(exchange, SHAPES, num_replicas=num_replicas, topology=topology)
    assert found.sent_bytes == expected and found.computing_s > 0


def test_a_replica_that_may_be_absent_is_measured_as_present(measured: Measured) -> None:
    seldom = Participation(probability=1e-9)
    measure_exchange(AllGather(codec=measured), SHAPES, num_replicas=3, topology=seldom)
    assert len(measured.sizes) == 3 * 4


class Deaf(AllGather):
    """Replica 0 sends nothing, and the others wait for it."""

    def bind(self, shapes: Any, *, replica: int, num_replicas: int) -> Any:
        return self

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        peers: Peers = context.peers
        expected = context.receiving(bfloat16(), numel=tensor.numel())
        awaited = (0, 3 if peers.me < 3 else 2) if peers.me else ()
        receives = tuple(context.transport.receive(source=peer, envelope=expected) for peer in awaited)
        yield Wait(receives=receives, sends=())
        return Average(mean=tensor, reference_hashes={})


def test_an_exchange_that_does_not_end_is_named_with_who_waits_for_what_and_what_to_do() -> None:
    with pytest.raises(ValueError) as refusal:
        measure_exchange(Deaf(codec=bfloat16()), SHAPES, num_replicas=4)
    said = str(refusal.value)
    assert said.startswith(
        "3 of 4 replicas wait for 6 messages that nobody sends, replica 1 for round 0 (fragment 0) from replica 0,"
    )
    assert "Deaf(codec=" in said and "let its steps() send every message that they receive" in said
