"""What a code costs is measured without a wire, and held against what it saves on one."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.averaging.cost import ExchangeCost, measure_exchange
from thinwire.averaging.exchange import AllGather, Exchange, Shapes, cheapest
from thinwire.codecs import bfloat16, e3m0, float32, top_k
from thinwire.codecs.dense import Dense
from thinwire.errors import PayloadError
from thinwire.methods import RECIPES, recipe
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.schedule import Staggered
from thinwire.sync.views import PseudoGradient
from thinwire.training import cost_check, worker
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.cost_check import CodeCost, complain, measure_codes, measure_rate
from thinwire.training.worker import ReplicaStart
from thinwire.transport.base import Transport, all_gather_json
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

CPU = torch.device("cpu")
SHAPES = [torch.Size([48, 20]), torch.Size([48])]
NUMEL = 48 * 20 + 48


def _fields(codec: Any) -> dict[str, Any]:
    return {field.name: getattr(codec, field.name) for field in fields(codec)}


def test_a_code_that_costs_more_than_it_saves_is_named_with_both_numbers_and_what_to_do() -> None:
    cost = CodeCost(extra_s=0.030, saved_bytes=1_000_000)
    assert cost.complaint(rate_bits_per_s=100e6) == ""
    said = cost.complaint(rate_bits_per_s=1e9)
    assert "30.0 ms a round" in said and "8.0 ms of sending at the 1,000 Mbit/s" in said and "--codec float32" in said
    assert cost.complaint(rate_bits_per_s=1e9, steps_between=30) == "", "less than a millisecond a step"
    assert CodeCost(extra_s=-0.001, saved_bytes=0).complaint(rate_bits_per_s=1e9) == ""


# The channels of the methods whose own codes are smaller than float32; those of the others are dense by default.
CODED = {
    "iso-loco": [(0,)], "streaming-sparse-loco": [(0,)],
    "streaming-diloco": [(0,)], "muloco": [(0,)], "sparse-loco": [(0,)], "power-sgd": [(0,)], "dgc": [(0,)],
    "decoupled-diloco": [(0,)], "demo": [(0,)], "ef21": [(0,)], "masha1": [(0,)], "masha2": [(0,)],
    "one-bit-adam": [(1,)], "zero-one-adam": [(1, 2)], "one-bit-lamb": [(1,)],
}  # fmt: skip


def costs_of(method: Method, *, num_replicas: int) -> list[CodeCost]:
    shapes = [SHAPES] * len(method.exchanges(num_replicas))
    return measure_codes(method, shapes, num_replicas=num_replicas, device=CPU)


@pytest.mark.parametrize("name", RECIPES)
def test_every_method_can_be_measured_before_it_runs(name: str) -> None:
    found = costs_of(recipe(name)(), num_replicas=3)
    assert [cost.channels for cost in found] == CODED.get(name, [])
    assert all(cost.saved_bytes > 0 for cost in found)


def test_plain_payloads_save_nothing_and_coded_ones_their_bytes() -> None:
    assert costs_of(recipe("diloco")(), num_replicas=2) == []
    (found,) = costs_of(recipe("diloco")(codec=e3m0()), num_replicas=2)
    assert found.saved_bytes == 4 * NUMEL - e3m0().payload_bytes(NUMEL)


def test_a_channel_is_measured_with_the_tensors_that_it_sends() -> None:
    shapes = [SHAPES, [torch.Size([640])]]
    (found,) = measure_codes(recipe("one-bit-adam")(codec=e3m0()), shapes, num_replicas=2, device=CPU)
    assert found.saved_bytes == 4 * 640 - e3m0().payload_bytes(640)


def test_a_channel_that_sends_nothing_is_no_code() -> None:
    found = costs_of(recipe("eager")(codec=e3m0()), num_replicas=2)
    assert [cost.channels for cost in found] == [(0,)]


@pytest.mark.parametrize("num_replicas", [4, 8, 12])
def test_pairs_are_measured_as_pairs_among_any_number_of_replicas(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_bytes = []

    def told(*args: Any, **rest: Any) -> ExchangeCost:
        found = measure_exchange(*args, **rest)
        sent_bytes.append(found.sent_bytes)
        return found

    monkeypatch.setattr(cost_check, "measure_exchange", told)
    (found,) = costs_of(recipe("noloco")(codec=e3m0()), num_replicas=num_replicas)
    assert found.channels == (1,)
    assert sent_bytes == [e3m0().payload_bytes(NUMEL), 4 * NUMEL]
    assert found.saved_bytes == sent_bytes[1] - sent_bytes[0]


def test_a_method_that_refuses_few_replicas_is_measured_with_all_of_them() -> None:
    method = recipe("robust")(rule="krum", num_bad=3, codec=e3m0())
    (found,) = costs_of(method, num_replicas=9)
    assert found.saved_bytes == 8 * (4 * NUMEL - e3m0().payload_bytes(NUMEL))
    with pytest.raises(ValueError, match="krum"):
        costs_of(method, num_replicas=5)


def test_bytes_are_compared_among_all_replicas_also_where_few_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def told(exchange: Exchange, shapes: Shapes, *, num_replicas: int, **rest: Any) -> ExchangeCost:
        timed.append((type(exchange).__name__, num_replicas))
        return measure_exchange(exchange, shapes, num_replicas=num_replicas, **rest)

    monkeypatch.setattr(cost_check, "measure_exchange", told)
    (found,) = costs_of(recipe("diloco")(codec=top_k()), num_replicas=16)
    plain = cheapest(float32(), num_replicas=16).sent_bytes(NUMEL, num_replicas=16)
    assert found.saved_bytes == plain - 15 * top_k().payload_bytes(NUMEL)
    assert timed == [("AllGather", 8), ("TwoPhase", 8)]


def test_a_code_by_which_more_is_sent_is_named_too() -> None:
    (found,) = costs_of(recipe("muloco")(), num_replicas=64)
    assert found.saved_bytes < 0
    said = CodeCost(extra_s=0.001, saved_bytes=-1_000_000).complaint(rate_bits_per_s=1e9)
    assert "1.0 ms a round more" in said and "adds 8.0 ms of sending" in said


class SlowHalf(Dense):
    """bfloat16 that takes its time."""

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        time.sleep(0.05)
        return super().encode(tensor, seed=seed)


def complaints_of(method: Method, *, num_steps: int) -> list[str]:
    """Check a method's codes on three replicas of a small model, without a wire."""

    def replica_main(transport: LoopbackTransport) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(2, 40), torch.nn.Linear(40, 30))
        adam = torch.optim.AdamW(model.parameters())
        optimizer = thinwire.DistributedOptimizer(model, adam, method=method, transport=transport)
        return complain(optimizer, num_steps=num_steps, number=3, deadline_s=10, device=CPU)

    return list(thinwire.run_replicas(3, replica_main))


def test_of_several_codes_the_one_that_loses_most_is_named_rather_than_the_one_that_saves_most() -> None:
    codes = AllGather(codec=e3m0()), AllGather(codec=SlowHalf(**_fields(bfloat16())))
    method = replace(recipe("power-sgd")(), exchange=lambda num_replicas: codes)
    for said in complaints_of(method, num_steps=10):
        cost_ms, saved_ms = re.findall(r"([0-9.]+) ms (?:a round more|of sending)", said)
        assert float(cost_ms) > 40 and float(saved_ms) < 10


def test_a_code_that_the_run_never_comes_to_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_check, "_LEAST_LOSS_S", -1e9)
    method = recipe("one-bit-adam")(warmup_steps=20)
    assert complaints_of(method, num_steps=20) == [""] * 3
    assert all("coding costs" in said for said in complaints_of(method, num_steps=21))


@pytest.mark.parametrize(
    ("method", "channels", "is_told"),
    [
        (recipe("diloco")(sync_interval=20), (0,), True),  # 5 rounds in 100 steps
        (recipe("diloco")(sync_interval=25), (0,), False),
        (recipe("one-bit-adam")(warmup_steps=95), (1,), True),
        (recipe("one-bit-adam")(warmup_steps=96), (1,), False),
        # 4 or 5 rounds after the first phase; in it many more, which count where they are in the same code
        (recipe("zero-one-adam")(variance_steps=96, variance_updates=1, max_local_steps=1), (2,), False),
        (recipe("zero-one-adam")(variance_steps=95, variance_updates=1, max_local_steps=1), (2,), True),
        (recipe("zero-one-adam")(variance_steps=96, variance_updates=1, max_local_steps=1), (1, 2), True),
    ],
)
def test_a_loss_is_spread_over_the_steps_between_the_rounds_that_the_run_has(
    method: Method, channels: tuple[int, ...], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = CodeCost(extra_s=0.0301, saved_bytes=1_250_000, channels=channels)  # 20.1 ms are lost a round
    monkeypatch.setattr(cost_check, "measure_codes", lambda *args, **rest: [cost])
    monkeypatch.setattr(cost_check, "measure_rate", lambda *args, **rest: 1e9)
    assert [bool(said) for said in complaints_of(method, num_steps=100)] == [is_told] * 3


@pytest.mark.parametrize(("extra_s", "is_told"), [(0.0103, True), (0.0098, False)])
def test_the_largest_fragment_is_measured_and_the_others_rounds_count_by_their_size(
    extra_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(method: Method, shapes: list[Shapes], **rest: Any) -> list[CodeCost]:
        assert shapes == [((30, 40), (30,))]
        return [CodeCost(extra_s=extra_s, saved_bytes=0)]

    monkeypatch.setattr(cost_check, "measure_codes", told)
    monkeypatch.setattr(cost_check, "measure_rate", lambda *args, **rest: 1e9)
    # in 100 steps 10 rounds of 120 elements and 9 of 1,230, which are worth 9.98 of the larger ones
    view = PseudoGradient(fragments=Pattern(order="sequential", num_fragments=2))
    method = replace(recipe("diloco")(), schedule=Staggered(sync_interval=10), view=view)
    assert [bool(said) for said in complaints_of(method, num_steps=100)] == [is_told] * 3


@pytest.mark.slow
def test_a_run_writes_its_complaint_down_where_the_view_of_the_run_finds_it_and_a_resumed_one_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("a thin wire carries little. " * 200)
    given = TrainConfig.of(
        replicas=2, steps=2, data=str(tmp_path / "text.txt"), tokenizer="bytes", batch_size=1, seq_len=16,
        checkpoint_every=1, out=tmp_path / "run", cache_dir=tmp_path / "cache",
    )  # fmt: skip
    config = resolve(given, world_size=None, cores=2, home=tmp_path)
    complaints = iter(["coding costs"] * 2 + ["coding still costs"] * 2)
    monkeypatch.setattr(worker, "complain", lambda *args, **rest: next(complaints))

    def run(*, is_resumed: bool) -> None:
        def replica_main(transport: LoopbackTransport) -> None:
            monkeypatch.setattr(worker, "connect", lambda **rest: RecordingTransport(transport))
            worker.run_replica(config, place=ReplicaStart(local_rank=transport.replica, is_resumed=is_resumed))

        thinwire.run_replicas(2, replica_main)

    run(is_resumed=False)
    run(is_resumed=True)
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(config.run_dir.glob("metrics-replica-*.jsonl"))
    ]
    found = [[(line["step"], line["message"]) for line in own if line["kind"] == "warning"] for own in lines]
    assert found == [[(1, "coding costs"), (3, "coding still costs")], []]


def test_the_rate_is_the_same_on_all_replicas() -> None:
    def replica_main(transport: LoopbackTransport) -> float:
        return measure_rate(transport, number=3, deadline_s=10)

    rates = thinwire.run_replicas(3, replica_main)
    assert len(set(rates)) == 1 and rates[0] > 0


def rates_where_a_replica_says(note: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    def lying(told: Mapping[str, Any], *, transport: Transport, **rest: Any) -> list[dict[str, Any]]:
        return all_gather_json(note if told and transport.replica == 1 else told, transport=transport, **rest)

    monkeypatch.setattr(cost_check, "all_gather_json", lying)
    return list(thinwire.run_replicas(2, lambda transport: measure_rate(transport, number=3, deadline_s=10)))


NO_TIMES = [None, "0.1", True, [1.0], math.nan, math.inf, -math.inf, 0, 0.0, -0.5, 10**400]


@pytest.mark.parametrize("note", [{"other": 1.0}, *({"taken_s": value} for value in NO_TIMES)], ids=repr)
def test_a_time_that_is_none_is_refused_with_its_replica_and_what_to_do(
    note: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PayloadError, match=r"replica 1 says that its probe .*; run the same thinwire on all hosts"):
        rates_where_a_replica_says(note, monkeypatch)


def test_the_slowest_replica_s_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_where_a_replica_says({"taken_s": 2}, monkeypatch) == [8 * 2**14 / 2] * 2


def test_a_clock_that_stands_still_divides_nothing_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_check.time, "perf_counter", lambda: 7.0)
    rates = thinwire.run_replicas(2, lambda transport: measure_rate(transport, number=3, deadline_s=10))
    assert rates[0] == rates[1] and 0 < rates[0] < math.inf
