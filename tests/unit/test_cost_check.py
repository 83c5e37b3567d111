"""What a code costs is measured without a wire, and held against what it saves on one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import thinwire
from thinwire.averaging.cost import measure_exchange
from thinwire.averaging.exchange import AllGather, cheapest
from thinwire.codecs import e3m0, float32
from thinwire.codecs.dense import Dense
from thinwire.methods import RECIPES, recipe
from thinwire.training.cost_check import CodeCost, measure_code, measure_rate
from thinwire.transport.loopback import LoopbackTransport

CPU = torch.device("cpu")
SHAPES = [torch.Size([48, 20]), torch.Size([48])]


class SlowCodec(Dense):
    """float32 that takes its time."""

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        time.sleep(0.02)
        return super().encode(tensor, seed=seed)


def test_the_time_of_coding_is_in_the_cost_and_the_bytes_are_the_exchange_s() -> None:
    slow = AllGather(codec=SlowCodec(**_fields(float32())))
    quick = AllGather(codec=float32())
    costs = [measure_exchange(exchange, SHAPES, num_replicas=3) for exchange in (slow, quick)]
    assert costs[0].computing_s >= 0.02 > costs[1].computing_s
    assert costs[0].sent_bytes == 2 * 4 * (48 * 20 + 48)


def _fields(codec: Any) -> dict[str, Any]:
    return {name: getattr(codec, name) for name in codec.__dataclass_fields__}


def test_long_tensors_are_measured_in_part_and_counted_whole() -> None:
    shapes = [torch.Size([3000, 1000]), torch.Size([7, 1000])]
    exchange = cheapest(e3m0(), num_replicas=2)
    assert measure_exchange(exchange, shapes, num_replicas=2).sent_bytes == exchange.sent_bytes(
        3_007_000, num_replicas=2
    )


def test_a_code_that_costs_more_than_it_saves_is_named_with_both_numbers_and_what_to_do() -> None:
    cost = CodeCost(extra_s=0.030, saved_bytes=1_000_000)
    assert cost.complaint(rate_bits_per_s=100e6) == ""
    said = cost.complaint(rate_bits_per_s=1e9)
    assert "30.0 ms a round" in said and "8.0 ms of sending at the 1,000 Mbit/s" in said and "--codec float32" in said
    assert cost.complaint(rate_bits_per_s=1e9, steps_between=30) == "", "less than a millisecond a step"
    assert CodeCost(extra_s=-0.001, saved_bytes=0).complaint(rate_bits_per_s=1e9) == ""


@pytest.mark.parametrize("name", RECIPES)
def test_every_method_can_be_measured_before_it_runs(name: str) -> None:
    found = measure_code(recipe(name)(), SHAPES, num_replicas=3, device=CPU)
    assert found.saved_bytes >= 0


def test_plain_payloads_save_nothing_and_coded_ones_their_bytes() -> None:
    assert measure_code(recipe("diloco")(), SHAPES, num_replicas=2, device=CPU).saved_bytes == 0
    found = measure_code(recipe("diloco")(codec=e3m0()), SHAPES, num_replicas=2, device=CPU)
    numel = 48 * 20 + 48
    assert found.saved_bytes == 4 * numel - e3m0().payload_bytes(numel)


def test_the_rate_is_the_same_on_all_replicas() -> None:
    def replica_main(transport: LoopbackTransport) -> float:
        return measure_rate(transport, number=3, deadline_s=10)

    rates = thinwire.run_replicas(3, replica_main)
    assert len(set(rates)) == 1 and rates[0] > 0
