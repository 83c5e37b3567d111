"""A run that is stopped after any step and resumed computes what a run that was never stopped does, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.methods import one_bit_adam, one_bit_lamb, zero_one_adam
from thinwire.recording.metrics import Meter
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.build import make_inner_optimizer, make_method
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import TrainConfig
from thinwire.training.loop import Training
from thinwire.training.summary import parameters_sha256
from thinwire.transport.loopback import LoopbackTransport, run_replicas
from thinwire.transport.recording import RecordingTransport
from thinwire.workloads.language import Sampler, TransformerConfig, build_transformer, validation_batches

TOKENS = np.random.Philox(key=1).random_raw(4000).astype(np.uint16) % 50
SHAPE = TransformerConfig(vocab_size=50, dim=8, layers=4, heads=2, max_seq_len=8)
STEPS = 13
PHASES = 6  # one more than the longest interval
METHODS: dict[str, dict[str, Any]] = {
    "streaming": {"sync_interval": 5, "overlap_steps": "3", "num_fragments": 3},
    "unequal overlaps": {"sync_interval": 5, "overlap_steps": "0,4", "num_fragments": 3},
    "stochastic codec": {"sync_interval": 4, "overlap_steps": "3", "codec": "e3m0-stochastic"},
    "diloco": {"method": "diloco", "sync_interval": 4},
    "all-reduce": {"method": "all-reduce"},
    "dimat": {"method": "dimat", "sync_interval": 5},
    "ef21": {"method": "ef21", "codec": "top-k"},
    "masha1": {"method": "masha1", "inner_optimizer": "plain-sgd", "method_option": ("refresh_probability=0.4",)},
    "masha2": {"method": "masha2", "inner_optimizer": "plain-sgd", "method_option": ("refresh_probability=0.4",)},
    "noloco": {"method": "noloco", "sync_interval": 5, "overlap_steps": "3"},
    "noloco without overlap": {"method": "noloco", "sync_interval": 5, "codec": "e3m0-stochastic"},
    "co2": {"method": "co2", "sync_interval": 5},
    "one-bit-adam": {"method": "one-bit-adam"},
    "one-bit-lamb": {"method": "one-bit-lamb"},
    "zero-one-adam": {"method": "zero-one-adam"},
    "sgd": {"method": "local-sgd", "sync_interval": 4, "inner_optimizer": "sgd"},
}
# Methods whose phases pass too late for a run this short if the options of a run made them.
SHORT: dict[str, Callable[[], Method]] = {
    "one-bit-adam": lambda: one_bit_adam(warmup_steps=9),
    "one-bit-lamb": lambda: one_bit_lamb(warmup_steps=10),
    "zero-one-adam": lambda: zero_one_adam(
        variance_steps=9, variance_updates=2, local_doubling_steps=1, max_local_steps=4
    ),
}


class _StoppedOnPurpose(Exception):
    pass


def config_for(run_dir: Path, **options: Any) -> TrainConfig:
    return TrainConfig.of(
        replicas=2, steps=STEPS, batch_size=2, seq_len=8, lr=0.01, warmup_steps=3, eval_every=4, eval_batches=2,
        final_eval_batches=2, log_every=3, checkpoint_every=1, out=run_dir, **options,
    )  # fmt: skip


def run(config: TrainConfig, *, start: int = 0, stop: int | None = None) -> list[str]:
    """Train two replicas from the checkpoint of `start`; `stop` ends them after that step's checkpoint."""

    def replica_main(loopback: LoopbackTransport) -> str:
        transport = RecordingTransport(loopback)
        model = build_transformer(SHAPE, seed=0)
        method = SHORT.get(config.sync.method, lambda: make_method(config))()
        optimizer = DistributedOptimizer(model, make_inner_optimizer(config, model), method=method, transport=transport)
        meter = Meter(config.run_dir, replica=transport.replica, log=transport.log)
        identity = {"run": "r", "replica": transport.replica, "num_replicas": 2, "config_digest": config.digest()}
        checkpoints = ReplicaCheckpoints(config.run_dir, **identity)
        training = Training(
            config=config, model=model, optimizer=optimizer, meter=meter, device=torch.device("cpu"),
            batches=Sampler(TOKENS, replica=transport.replica, num_replicas=2, batch_size=2, seq_len=8, seed=0),
            held_out=lambda count: validation_batches(TOKENS, batch_size=2, seq_len=8, max_batches=count),
            checkpoints=checkpoints,
        )  # fmt: skip
        if start:
            training.load(checkpoints.load(start))
        meter.start()
        save = training.save

        def save_and_stop() -> None:
            save()
            if training.step == stop:
                raise _StoppedOnPurpose

        training.save = save_and_stop  # type: ignore[method-assign]
        try:
            training.run()
        except _StoppedOnPurpose:
            pass
        finally:
            meter.close()
        with optimizer.global_parameters():
            return parameters_sha256(model)

    config.run_dir.mkdir(exist_ok=True)
    return list(run_replicas(2, replica_main))


@pytest.mark.slow
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS.keys())
def test_a_run_resumed_after_any_step_ends_with_the_bits_of_one_never_stopped(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    config = config_for(tmp_path, **options)
    unbroken = run(config)
    assert unbroken[0] == unbroken[1]
    # newest first: a resumed run writes its last checkpoint only, and leaves the earlier ones
    resumed = config.replace(checkpoint_every=0)
    kept = sorted(int(folder.name.removeprefix("step-")) for folder in (tmp_path / "checkpoints").iterdir())
    assert len(kept) >= (PHASES if config.sync.sync_interval else 3)
    # a stop in every phase of a round; where each step has a round, one before, one in, and one after each phase
    interval = config.sync.sync_interval
    for step in reversed(kept[-interval - 1 :] if interval else kept[-PHASES::2]):
        assert run(resumed, start=step) == unbroken, f"resumed after step {step}"


@pytest.mark.slow
def test_a_run_resumed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = METHODS["streaming"]
    unbroken = run(config_for(tmp_path / "unbroken", **options))
    config = config_for(tmp_path / "stopped", **options)
    for step in range(0, 12, 4):
        run(config, start=step, stop=step + 4)
    assert run(config, start=12) == unbroken


@pytest.mark.slow
def test_a_resumed_run_tells_each_step_once_and_loses_no_count(tmp_path: Path) -> None:
    options = METHODS["streaming"]
    run(config_for(tmp_path / "unbroken", **options))
    config = config_for(tmp_path / "stopped", **options)
    run(config, stop=9)
    run(config, start=7)
    for name in ("metrics-replica-0.jsonl", "metrics-replica-1.jsonl"):
        told = [_without_times(line) for line in _lines(tmp_path / "stopped" / name)]
        assert told == [_without_times(line) for line in _lines(tmp_path / "unbroken" / name)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in line.items() if name in ("kind", "step", "loss", "tokens", "val_loss")}
    return kept | {"has_sent": line.get("sent_bytes", 0) > 0}
