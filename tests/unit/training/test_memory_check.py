"""Runs that cannot fit the memory of a machine are refused from shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.training import build
from thinwire.training.build import check, check_memory, device_memory_bytes, estimate_memory, make_method
from thinwire.training.config import TrainConfig, resolve
from thinwire.workloads.language.workload import make_model


def config_of(**options: object) -> TrainConfig:
    given = TrainConfig.of(**{"model": "35m", "replicas": 2, **options})
    return resolve(given, world_size=None, cores=2, home=Path("/nowhere"))


def needed_bytes(**options: object) -> float:
    config = config_of(**options)
    model = make_model(config, vocab_size=None, device="meta")
    found = estimate_memory(config, model, make_method(config))
    return found.states + found.activations + found.host_copies


def test_the_states_are_sixteen_bytes_a_parameter_and_eight_of_global_values() -> None:
    config = config_of()
    model = make_model(config, vocab_size=None, device="meta")
    num_parameters = sum(p.numel() for p in model.parameters())
    found = estimate_memory(config, model, make_method(config))
    assert (found.states, found.host_copies) == (16 * num_parameters, 8 * num_parameters)
    every_step = estimate_memory(config, model, make_method(config_of(method="all-reduce")))
    assert every_step.host_copies == 0


def test_frozen_parameters_need_no_gradient_and_no_optimizer() -> None:
    config = config_of()
    model = make_model(config, vocab_size=None, device="meta")
    model.embedding.weight.requires_grad_(False)  # type: ignore[union-attr]
    trained, frozen = (
        sum(p.numel() for p in model.parameters() if p.requires_grad is wanted) for wanted in (True, False)
    )
    assert estimate_memory(config, model, make_method(config)).states == 16 * trained + 4 * frozen


def test_smaller_passes_need_less() -> None:
    whole = needed_bytes(batch_size=8)
    assert needed_bytes(batch_size=8, micro_batch=2) < whole
    assert needed_bytes(batch_size=8, autocast="bf16") < whole
    assert needed_bytes(batch_size=8, seq_len=256) < whole
    assert needed_bytes(batch_size=8, micro_batch=64) == whole


def refused_at(**options: object) -> float:
    """Return the least memory, in bytes, that lets a run on GPUs start."""
    config = config_of(device="cuda", batch_size=8, **options)
    model = make_model(config, vocab_size=None, device="meta")
    low, high = 0.0, 1e12
    for _ in range(60):
        middle = (low + high) / 2
        try:
            check_memory(config, model, make_method(config), num_local=1, limit_bytes=middle)
            high = middle
        except ValueError:
            low = middle
    return high


def test_the_ranks_of_a_replica_share_states_and_rows() -> None:
    config = config_of(batch_size=8)
    found = estimate_memory(config, make_model(config, vocab_size=None, device="meta"), make_method(config))
    assert refused_at() == pytest.approx(found.states + found.activations)
    # activations grow with the rows of a rank
    assert refused_at(dp_shard=4) == pytest.approx((found.states + found.activations) / 4)
    assert refused_at(dp_replicate=4) == pytest.approx(found.states + found.activations / 4)
    assert refused_at(tp=2, pp=2) == pytest.approx(found.states / 4 + found.activations / 2)


def test_recomputed_layers_need_less_down_to_all_of_them() -> None:
    none, half, every = (refused_at(dp_shard=2, recompute_layers=layers) for layers in (0, 3, 6))
    assert half == pytest.approx((none + every) / 2) and every == pytest.approx(refused_at(dp_shard=2, recompute=True))


def test_kept_attention_needs_a_value_more_of_each_token_width_and_layer() -> None:
    plain, kept = (needed_bytes(recompute=True, keep_attention=keeps) for keeps in (False, True))
    shape = make_model(config_of(), vocab_size=None, device="meta").config
    assert kept - plain == 4 * 8 * 1024 * shape.dim * shape.layers  # type: ignore[operator, union-attr]


def test_a_streamed_backward_needs_less_than_recomputing() -> None:
    again, streamed = (needed_bytes(seq_len=32_768, **how) for how in ({"recompute": True}, {"stream_backward": 8}))
    states = needed_bytes(seq_len=1, batch_size=1)
    assert 0.1 < (streamed - states) / (again - states) < 0.35
    # the six layers keep what their attention needs too
    shared = needed_bytes(seq_len=32_768, stream_backward=8, cp=2)
    assert 1.2 < (shared - states) / (streamed - states) < 5


def test_what_cannot_fit_is_refused_with_the_need_the_limit_and_a_remedy() -> None:
    config = config_of()
    model = make_model(config, vocab_size=None, device="meta")
    method, needed = make_method(config), needed_bytes()
    check_memory(config, model, method, num_local=2, limit_bytes=2 * needed)
    check_memory(config, model, method, num_local=1, limit_bytes=needed)
    with pytest.raises(
        ValueError, match=r"does not fit .*; got about .* for 2 replicas.*; allowed 1\.00 GB.*; try .*--micro-batch"
    ):
        check_memory(config, model, method, num_local=2, limit_bytes=1e9)
    with pytest.raises(ValueError, match="for one replica"):
        check_memory(config, model, method, num_local=1, limit_bytes=needed - 1)


def test_check_compares_with_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(model="nano"))
    monkeypatch.setattr(build, "device_memory_bytes", lambda device: 1e6)
    with pytest.raises(
        ValueError, match=r"--model nano does not fit the memory of this machine; got .*; allowed 1\.00 MB"
    ):
        check(config_of(model="nano"))


@pytest.mark.parametrize(("limit", "expected"), [("1000000\n", 1e6), ("max\n", None), (None, None)])
def test_the_limit_of_a_container_counts(
    limit: str | None, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    monkeypatch.setattr(build, "_LIMITS", (path,))
    found = device_memory_bytes("cpu")
    assert found == expected if expected else found > 1e8
