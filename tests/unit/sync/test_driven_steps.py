"""Steps of the training loop in which the method asks for the batch's gradients itself, by a closure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinwire.methods import masha2
from thinwire.recording.metrics import Meter
from thinwire.recording.recorder import Recorder
from thinwire.runlog.run_folder import read_files
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.build import make_inner_optimizer
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import TrainConfig
from thinwire.training.loop import Passes, Training
from thinwire.transport.loopback import single
from thinwire.transport.recording import RecordingTransport
from thinwire.workloads.language import Sampler

VOCABULARY, SEQ_LEN = 20, 4
TOKENS = np.random.Philox(key=1).random_raw(2000).astype(np.uint16) % VOCABULARY


class Watched(nn.Module):
    """A language model with dropout that notes where it was asked, on what, for which loss."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)
        self.calls: list[tuple[Tensor, Tensor, float]] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.dropout(self.embedding(tokens)))
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.calls.append((self.head.weight.detach().clone(), tokens.clone(), nll.item()))
        return nll, nll


def training_of(
    run_dir: Path, model: nn.Module, *, seen: Callable[[Any, int], None] = lambda loss, tokens: None,
    recorder: Recorder | None = None, **options: Any,
) -> Training:  # fmt: skip
    config = TrainConfig.of(
        replicas=1, steps=4, batch_size=2, seq_len=SEQ_LEN, inner_optimizer="plain-sgd", warmup_steps=0,
        schedule="constant", out=run_dir, **options,
    )  # fmt: skip
    transport = RecordingTransport(single())
    optimizer = DistributedOptimizer(
        model, make_inner_optimizer(config, model), method=masha2(refresh_probability=1.0), transport=transport
    )
    meter = Meter(run_dir, replica=0, log=transport.log)
    meter.train_step = lambda loss, samples: seen(loss, samples)  # type: ignore[method-assign]
    identity = {"run": "r", "replica": 0, "num_replicas": 1, "config_digest": config.digest()}
    return Training(
        config=config, model=model, optimizer=optimizer, meter=meter, device=torch.device("cpu"), recorder=recorder,
        batches=Sampler(TOKENS, replica=0, num_replicas=1, batch_size=2, seq_len=SEQ_LEN, seed=0),
        held_out=lambda count: [], checkpoints=ReplicaCheckpoints(run_dir, **identity),
    )  # fmt: skip


def steps(training: Training, count: int) -> None:
    training.model.train()
    for _ in range(count):
        training.step += 1
        training._train_step()


def test_both_evaluations_of_a_step_see_one_batch_and_one_dropout_and_those_of_the_next_step_others(
    tmp_path: Path,
) -> None:
    # so small a step that the point does not move in float32: then the loss moves by dropout alone
    model = Watched(dropout=0.5)
    steps(training_of(tmp_path, model, lr=1e-30, weight_decay=0.0), 3)
    pairs = [model.calls[n : n + 2] for n in range(0, 6, 2)]
    assert len(model.calls) == 6
    for one, other in pairs:
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[2] == other[2]
    again, _ = model.loss(model.calls[0][1], model.calls[0][1])
    assert len({pair[0][2] for pair in pairs} | {again.item()}) == 4


def test_the_loss_of_a_step_is_the_last_evaluations_and_its_tokens_count_once(tmp_path: Path) -> None:
    told: list[tuple[float, int]] = []
    model = Watched(dropout=0.0)
    training = training_of(
        tmp_path, model, lr=0.5, seen=lambda loss, tokens: told.append((float(loss), tokens)), weight_decay=0.0
    )
    steps(training, 2)
    first, half = model.calls[:2]
    assert half[2] < first[2] and not torch.equal(first[0], half[0])
    assert told == [(half[2], 2 * SEQ_LEN), (model.calls[3][2], 2 * SEQ_LEN)]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("clip_norm", [0.0, 1e-3])
def test_every_evaluation_is_clipped_before_the_method_reads_it(tmp_path: Path, clip_norm: float) -> None:
    model = Watched(dropout=0.0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    # the reference point is the present one, so a step is lr times the gradient at the half step
    training = training_of(tmp_path, model, lr=0.5, weight_decay=0.0, clip_norm=clip_norm)
    steps(training, 1)
    moved = (nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm().item()
    assert (moved <= 0.5 * 3 * 1e-3) == (clip_norm > 0)
    assert moved > 0


class Weighted(Watched):
    """Takes its time, a known one in each direction."""

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        loss, nll = super().loss(tokens, targets)
        loss.register_hook(lambda gradient: time.sleep(0.03))
        return loss, nll


def test_a_step_tells_what_its_forward_and_its_backward_passes_took_of_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    steps(training_of(tmp_path, Weighted(dropout=0.0), recorder=recorder, lr=1e-3, weight_decay=0.0), 3)
    recorder.close()
    spans = read_files([tmp_path]).spans
    assert [(span.kind, span.step) for span in spans] == [("compute", step) for step in (1, 2, 3)]
    for span in spans:  # the method evaluates twice in a step
        assert span.forward_s is not None and span.backward_s is not None
        assert span.forward_s >= 0.02 and span.backward_s >= 0.06
        assert span.forward_s + span.backward_s <= span.done_s - span.started_s + 1e-5


def test_passes_on_a_gpu_are_not_timed_since_their_calls_return_before_it_has_computed() -> None:
    passes = Passes(torch.device("cuda"), clock=lambda: pytest.fail("timed"))
    with passes.forward(), passes.backward():
        pass
    assert passes.take() == (None, None)
