"""Four faults that the nearest neighbour was found to have; each is a promise here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from thinwire.averaging.exchange import AllGather, TwoPhase
from thinwire.codecs import NAMES, by_name, e3m0, float32
from thinwire.methods import diloco, streaming_diloco
from thinwire.sync.outer_optimizer import PlainSGD


class Tensors(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


@pytest.mark.parametrize("sizes", [(6, 6, 6), (12, 3), (1,), (100_003, 1, 1), (64, 64, 64, 1)])
@pytest.mark.parametrize("exchange", [AllGather, TwoPhase])
def test_no_tensor_is_left_out_of_the_average_whatever_its_size(sizes, exchange):
    def replica_main(transport):
        model = Tensors(sizes)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = diloco(sync_interval=1, outer_optimizer=PlainSGD(lr=1.0))
        parts = {field: getattr(method, field) for field in ("name", "schedule", "topology", "view", "update")}
        whole = thinwire.Method(**parts, exchange=lambda replicas: exchange(codec=float32()))
        optimizer = thinwire.DistributedOptimizer(model, inner, method=whole, transport=transport)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -float(1 + transport.replica))
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for result in thinwire.run_replicas(3, replica_main):
        for tensor in result:
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))


def test_each_of_several_rounds_in_flight_is_applied_to_its_own_fragment():
    def replica_main(transport):
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
        with torch.no_grad():
            for layer in model:
                layer.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = streaming_diloco(
            sync_interval=4, overlap_steps=3, blend=0, num_fragments=4, codec=float32(),
            outer_optimizer=PlainSGD(lr=1.0),
        )  # fmt: skip
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        for step in range(11):
            for number, layer in enumerate(model):
                # only the steps before any launch move anything, each layer by an amount of its own
                move = -float(10**number) * (1 + transport.replica) if step < 4 else 0.0
                layer.weight.grad = torch.full_like(layer.weight, move)
            optimizer.step()
            assert len(optimizer.rounds_in_flight) <= 3
        optimizer.close()
        with optimizer.global_parameters():
            return [float(layer.weight.detach()) for layer in model]

    for result in thinwire.run_replicas(2, replica_main):
        assert result == [4 * 1.5 * 10**number for number in range(4)]


def test_payloads_are_really_coded_on_a_cpu():
    recordings = []

    def replica_main(transport):
        model = nn.Linear(64, 64, bias=False)
        recording = thinwire.RecordingTransport(transport)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = thinwire.DistributedOptimizer(
            model, inner, method=streaming_diloco(sync_interval=1, overlap_steps=0), transport=recording
        )
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        recordings.append(recording)

    thinwire.run_replicas(2, replica_main)
    for recording in recordings:
        sent = [t.payload_bytes for t in recording.log if t.kind == "round" and t.direction == "sent"]
        assert sent == [64 * 64 * 33 // 64], "4.125 bits an element"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1,), (5,), (4096,), (64, 64), (3, 5, 7, 11), ()])
def test_the_shape_of_a_tensor_changes_neither_its_bytes_nor_its_size(name, shape):
    codec = by_name(name)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(tensor)
    assert torch.equal(payload, codec.encode(tensor.reshape(-1)))
    block_bytes = codec.payload_bytes(codec.block)
    assert payload.numel() <= tensor.numel() * codec.bits_per_element / 8 + block_bytes


def test_a_tensor_of_one_dimension_shrinks_as_one_of_two_does():
    assert e3m0().encode(torch.randn(6400)).numel() * 8 / 6400 == pytest.approx(4.125)
