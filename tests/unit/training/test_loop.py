"""Passes of the training loop: micro-batches, and checkpoints beside frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.methods import diloco
from thinwire.recording.metrics import Meter
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.build import make_inner_optimizer
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import TrainConfig
from thinwire.training.loop import LocalPasses, Training
from thinwire.transport.loopback import single
from thinwire.transport.recording import RecordingTransport
from thinwire.workloads.language import Sampler, TransformerConfig, build_transformer

SHAPE = TransformerConfig(vocab_size=31, dim=16, layers=2, heads=2, max_seq_len=8)
TOKENS = np.random.default_rng(0).integers(31, size=999).astype(np.uint16)


def passes_of(model: Any, **options: Any) -> LocalPasses:
    return LocalPasses(TrainConfig.of(batch_size=5, **options), model, device=torch.device("cpu"))


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 9])
def test_micro_batches_give_the_gradient_and_the_losses_of_the_whole_batch(micro_batch: int) -> None:
    windows = torch.from_numpy(TOKENS[:45].astype(np.int64)).view(5, 9)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    found = []
    for options in ({}, {"micro_batch": micro_batch}):
        model = build_transformer(SHAPE, seed=0)
        passes = passes_of(model, **options)
        losses = passes.backward(tokens, targets, factor=1.0)
        held_out = passes.held_out(tokens, targets)
        found.append((*losses, held_out.detach(), *(p.grad for p in model.parameters())))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_at_most_a_micro_batch_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_transformer(SHAPE, seed=0)
    plain, seen = model.loss, list[int]()
    monkeypatch.setattr(model, "loss", lambda tokens, *more, **how: (seen.append(len(tokens)), plain(tokens, *more))[1])
    tokens = torch.zeros(5, 8, dtype=torch.int64)
    passes_of(model, micro_batch=2).backward(tokens, tokens, factor=1.0)
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_documents_give_the_gradient_of_their_tokens_one_by_one(micro_batch: int | None) -> None:
    tokens = np.concatenate([TOKENS[:18] % 30 + 1, [0], TOKENS[18:21] % 30 + 1, [0], TOKENS[21:26] % 30 + 1, [0]])
    batches = Sampler(tokens, replica=0, num_replicas=1, batch_size=5, seq_len=8, seed=0, end_of_text=0)
    model, reference = (build_transformer(SHAPE, seed=0).double() for _ in range(2))
    passes = passes_of(model, sequences="documents", seq_len=8, micro_batch=micro_batch)
    inputs, targets = next(batches)
    loss, nll = passes.backward(inputs, targets, factor=1.0)
    rows = [(row[wanted >= 0], wanted[wanted >= 0]) for row, wanted in zip(inputs, targets, strict=True)]
    assert sorted(len(row) for row, _ in rows) == [2, 3, 5, 8, 8]
    losses = [reference.loss(row.unsqueeze(0), wanted.unsqueeze(0)) for row, wanted in rows]
    means = [sum(len(row) * one[n] for (row, _), one in zip(rows, losses, strict=True)) / 26 for n in (0, 1)]
    means[0].backward()
    # losses are added up in float32
    torch.testing.assert_close((loss.double(), nll[0].double()), (means[0].detach(), means[1]), rtol=1e-6, atol=0)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-14)


def training_of(run_dir: Path, *, frozen_seed: int) -> Training:
    config = TrainConfig.of(
        replicas=1, steps=2, batch_size=2, seq_len=8, lr=0.01, warmup_steps=0, eval_every=0, checkpoint_every=0,
        out=run_dir,
    )  # fmt: skip
    model = build_transformer(SHAPE, seed=0)
    frozen = build_transformer(SHAPE, seed=frozen_seed).embedding
    with torch.no_grad():
        model.embedding.weight.copy_(frozen.weight)
    model.embedding.requires_grad_(False)
    transport = RecordingTransport(single())
    optimizer = DistributedOptimizer(
        model, make_inner_optimizer(config, model), method=diloco(sync_interval=2), transport=transport
    )
    identity = {"run": "r", "replica": 0, "num_replicas": 1, "config_digest": config.digest()}
    return Training(
        config=config, model=model, optimizer=optimizer, meter=Meter(run_dir, replica=0, log=transport.log),
        batches=Sampler(TOKENS, replica=0, num_replicas=1, batch_size=2, seq_len=8, seed=0),
        held_out=lambda count: [], device=torch.device("cpu"),
        checkpoints=ReplicaCheckpoints(run_dir, **identity),
    )  # fmt: skip


def test_a_checkpoint_leaves_frozen_weights_out_and_goes_on_beside_the_same_ones_only(tmp_path: Path) -> None:
    first = training_of(tmp_path, frozen_seed=1)
    first.run()
    identity = {"run": "r", "replica": 0, "num_replicas": 1, "config_digest": first.config.digest()}
    state = ReplicaCheckpoints(tmp_path, **identity).load(2)
    assert "embedding.weight" not in state["model"] and "norm.gain" in state["model"]
    training_of(tmp_path, frozen_seed=1).load(state)
    with pytest.raises(CheckpointError, match="the frozen weights are not those it was trained beside"):
        training_of(tmp_path, frozen_seed=2).load(state)
