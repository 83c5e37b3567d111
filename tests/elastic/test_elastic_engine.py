"""Elastic rounds through the real engine: the same bits as static ones, and survivors that stay alike."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from relay_tap import HOST, SOON_S, TOKEN, Tap
from torch import nn
from town import Resident, Town, TownShelf

import thinwire
from thinwire.elastic.elastic_method import elastic
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.transport.addresses import Address, free_port
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.loopback import run_replicas
from thinwire.transport.recording import RecordingRequestTransport
from thinwire.transport.wire.wire_transport import WireTransport

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


@contextmanager
def shelves(by: str) -> Iterator[Callable[[Town, int], Any]]:
    """Yield a maker of shelves: in memory, or of real wires that reach each other directly or by a relay alone."""
    if by == "memory":
        yield TownShelf
        return
    with ExitStack() as stack:
        relay = stack.enter_context(closing(Tap())).place if by == "relay" else None
        wires = [
            WireTransport(replica=number, num_replicas=3, secret=TOKEN, address=HOST, is_open=True, relay=relay)
            for number in range(3)
        ]
        stores = [BlobStore(RecordingRequestTransport(wire)) for wire in wires]
        for one in (*wires, *stores):
            stack.callback(one.close)
        for wire in wires:
            for peer in {0, 1, 2} - {wire.replica}:
                # a replica dials those with lower numbers
                port = free_port(HOST) if by == "relay" else wires[peer].port
                wire.add(peer, address=Address(host=HOST, port=port) if peer < wire.replica else None)
        for wire in wires:
            others = tuple(sorted({0, 1, 2} - {wire.replica}))
            assert wire.wait_until_connected(others, deadline_s=SOON_S) == others
            assert wire.relayed_peers() == (others if by == "relay" else ())
        yield lambda town, replica: stores[replica]


@pytest.mark.parametrize(
    ("name", "by"), [("diloco", "memory"), ("streaming", "memory"), ("streaming", "direct"), ("streaming", "relay")]
)
def test_without_faults_an_elastic_run_has_the_bits_of_a_static_one(name: str, by: str) -> None:
    def static(transport: thinwire.transport.base.Transport) -> list[torch.Tensor]:
        model = build()
        optimizer = thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), method=method_of(name), transport=transport
        )
        train(model, optimizer, data=transport.replica)
        optimizer.close(final_exchange=True)
        return global_values(optimizer)

    expected = run_replicas(3, static)
    with shelves(by) as make_shelf:
        found = lived(name, make_shelf)
    assert len(found) == 3
    for replica in range(3):
        for value, wanted in zip(found[replica], expected[0], strict=True):
            assert torch.equal(value, wanted)


def lived(name: str, make_shelf: Callable[[Town, int], Any]) -> dict[int, list[torch.Tensor]]:
    """Train three residents of a town to the end, and return their global parameters."""
    town = Town(planned=3)
    residents = [Resident(town, name=f"host{number}", make_shelf=make_shelf) for number in range(3)]
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
    return found
