"""Elastic rounds through the real engine: the same bits as static ones, and survivors that stay alike."""

import threading

import pytest
import torch
from torch import nn
from town import Resident, Town

import thinwire
from thinwire.elastic.elastic_method import elastic
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.transport.loopback import run_replicas

STEPS = 24


def build(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 5, generator=generator)


def method_of(name: str) -> thinwire.sync.method.Method:
    if name == "diloco":
        return thinwire.methods.diloco(sync_interval=4)
    return thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1, num_fragments=2)


def train(model: nn.Module, optimizer: thinwire.DistributedOptimizer, *, data: int, until: int = STEPS) -> None:
    while optimizer.steps_done < until:
        x, y = batch(data, optimizer.steps_done + 1)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.count_tokens(6)
        optimizer.next_stop = until
        optimizer.step()
        optimizer.zero_grad()


def global_values(optimizer: thinwire.DistributedOptimizer) -> list[torch.Tensor]:
    return [value.clone() for value in optimizer.engine.view.parameters.values]


def resident_optimizer(resident: Resident, name: str) -> tuple[nn.Module, thinwire.DistributedOptimizer]:
    model = build()
    transport = SeatTransport(resident.replica)
    optimizer = thinwire.DistributedOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), method=elastic(method_of(name), session=resident.seat),
        transport=transport,
        # threads are not alike in speed
        catch_up=ElasticDriver(resident.seat.known_step, grace_steps=STEPS),
    )  # fmt: skip
    return model, optimizer


class SeatTransport:
    """Says who this replica is; the parts go over the shelf."""

    runs_in_background = True
    num_replicas = 3

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def send(self, payload: torch.Tensor, **rest: object) -> None:
        raise AssertionError("nothing is sent past the shelf")

    def receive(self, **rest: object) -> None:
        raise AssertionError("nothing is received past the shelf")

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_without_faults_an_elastic_run_has_the_bits_of_a_static_one(name: str) -> None:
    def static(transport: thinwire.transport.base.Transport) -> list[torch.Tensor]:
        model = build()
        optimizer = thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), method=method_of(name), transport=transport
        )
        train(model, optimizer, data=transport.replica)
        optimizer.close(final_exchange=True)
        return global_values(optimizer)

    expected = run_replicas(3, static)
    town = Town(planned=3)
    residents = [Resident(town, name=f"host{number}") for number in range(3)]
    found: dict[int, list[torch.Tensor]] = {}

    built = {resident.replica: resident_optimizer(resident, name) for resident in residents}

    def live(resident: Resident) -> None:
        model, optimizer = built[resident.replica]
        train(model, optimizer, data=resident.replica)
        optimizer.close(final_exchange=True)
        found[resident.replica] = global_values(optimizer)

    for resident in residents:
        resident.begin()
    threads = [threading.Thread(target=live, args=(resident,)) for resident in residents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    town.close()
    assert len(found) == 3
    for replica in range(3):
        for value, wanted in zip(found[replica], expected[0], strict=True):
            assert torch.equal(value, wanted)
