"""What a code costs is measured without a wire, and held against what it saves on one."""

from __future__ import annotations

import pytest
import torch

import thinwire
from thinwire.codecs import e3m0
from thinwire.methods import RECIPES, recipe
from thinwire.training.cost_check import CodeCost, measure_code, measure_rate
from thinwire.transport.loopback import LoopbackTransport

CPU = torch.device("cpu")
SHAPES = [torch.Size([48, 20]), torch.Size([48])]


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
