"""Profile of a step: parts that add up, memory that can be counted by hand, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.cli import bench
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.step_profile import StepProfile, _activation_bytes, _parts, profile_step
from thinwire.workloads.language import build_model

pytestmark = pytest.mark.slow


def profile(**options: object) -> StepProfile:
    given = TrainConfig.of(method="iso-loco", threads=1, **options)
    return profile_step(resolve(given, world_size=1, cores=1, home=Path("/nowhere")), steps=1)


def test_the_parts_of_a_model_hold_every_parameter_once() -> None:
    model = build_model("nano", max_seq_len=16, device="meta")
    names = [name for name, _ in _parts(model)]
    assert "blocks.0.attention" in names and "embedding" in names and len(set(names)) == len(names)
    held = [parameter for _, part in _parts(model) for parameter in part.parameters()]
    assert len({id(parameter) for parameter in held}) == len(held) == len(list(model.parameters()))


def test_the_parts_of_a_nested_model_are_found() -> None:
    inside = nn.Module()
    inside.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    outside = nn.Module()
    outside.model, outside.head = inside, nn.Linear(2, 2)
    assert [name for name, _ in _parts(outside)] == [
        "model.layers.0.0", "model.layers.0.1", "model.layers.1.0", "model.layers.1.1", "head",
    ]  # fmt: skip


def test_what_is_kept_for_the_backward_pass_is_counted_by_storage() -> None:
    layer, values = nn.Linear(4, 8, bias=False), torch.ones(3, 4, requires_grad=True)
    # the input of the product, and the result that tanh keeps; the weight is no activation
    assert _activation_bytes(layer, lambda: layer(values).tanh().sum()) == 4 * (3 * 4 + 3 * 8)


def test_a_profile_adds_up() -> None:
    found = profile(batch_size=2, seq_len=16)
    assert found.tokens == 32 and sum(one.parameters for one in found.modules) == found.num_parameters
    assert found.parameters_bytes == found.gradients_bytes == 4 * found.num_parameters
    # two moments, and a counter of steps for each parameter
    assert 0 <= found.optimizer_bytes - 8 * found.num_parameters < 4096
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in found.modules)
    assert found.step_s == pytest.approx(found.forward_s + found.backward_s + found.optimizer_s + found.exchange_s)
    assert found.exchange_s > 0
    more = profile(batch_size=4, seq_len=16)
    assert more.activations_bytes == pytest.approx(2 * found.activations_bytes, rel=0.1)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--batch-size", "1", "--seq-len", "16", "--steps", "1", "--threads", "1"]
    assert bench.main(words) == 0
    told = capsys.readouterr().out
    assert re.search(r"^blocks\.\*\.attention +[\d.]+ k", told, flags=re.MULTILINE)
    assert "memory: parameters 12.2 MB" in told and "thinwire plan --flops" in told
    assert bench.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "thinwire-profile" and found["flops_per_s"] > 0 and len(found["modules"]) == 7


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile", "--steps", "0"], "--steps is too small"),
        (["profile", "--model", "7c"], "unknown --model"),
        (["prophile"], "try profile"),
    ],
)
def test_a_wrong_profile_is_refused_in_a_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words) == 2
    told = capsys.readouterr().err
    assert text in told and len(told.splitlines()) == 1, told
