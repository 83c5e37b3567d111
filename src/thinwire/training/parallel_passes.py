"""Replica of several ranks with fixed replicas: the degrees of `ParallelConfig` on a model, and the passes on it.

All ranks run the same loop on the same batches, and each takes its own rows. Other replicas are met shard by shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import refusal
from thinwire.models.transformer import Transformer, join_heads, split_heads
from thinwire.shared_random import derive_seed
from thinwire.training.config import TrainConfig
from thinwire.training.loop import Passes
from thinwire.transport.replica_mesh import ReplicaMesh, named_failures
from thinwire.transport.shards import local_shard

# Layers of a block whose output or input features the ranks of tp share.
_COLUMNS, _ROWS = ("attention.query_key_value", "up"), ("attention.out", "down")
# Gains that each rank of tp applies to its own heads: their gradients are parts of a sum.
_GAINS_OF_HEADS = "query_key_norm.gain"


def make_mesh(config: TrainConfig, *, device: torch.device) -> ReplicaMesh:
    """Return the mesh of this replica's ranks, which the default group holds."""
    own = config.parallel
    return ReplicaMesh(device=device, dp_replicate=own.dp_replicate, dp_shard=own.dp_shard, tp=own.tp, pp=own.pp)


def cut_model(model: nn.Module, config: TrainConfig, mesh: ReplicaMesh) -> nn.Module:
    """Leave each rank its part of a model that all ranks hold whole and alike before.

    Args:
        model: One of thinwire's own.
        config: Resolved options.
        mesh: The replica's ranks.

    Raises:
        ValueError: The model's shape is not divided by a degree.
    """
    if not isinstance(model, Transformer):
        raise refusal("replicas of several ranks shard thinwire's own models", got=type(model).__name__,
                      allowed="a preset or a size", remedy="--model 35m")  # fmt: skip
    own = config.parallel
    if own.recompute_layers > model.config.layers // own.pp:
        raise refusal("--recompute-layers is more than the layers of a stage", got=own.recompute_layers,
                      allowed=f"0 to {model.config.layers // own.pp}", remedy="--recompute")  # fmt: skip
    model.recomputed_blocks = own.recompute_layers
    if own.tp > 1:
        split_heads(model, own.tp)
        mesh.split_layers(list(model.blocks), columns=_COLUMNS, rows=_ROWS)
    mesh.shard(model, blocks=list(model.blocks), is_freed_after_forward=own.zero_stage == 3)
    if mesh.data_rank:  # ranks see other rows, and drop out other numbers
        torch.manual_seed(derive_seed(config.run.seed, "rank", mesh.data_rank))
    return model


def whole_parameters(model: nn.Module, mesh: ReplicaMesh) -> dict[str, Tensor]:
    """Return all parameters as an uncut model has them, on the CPU of every rank; all ranks call it."""
    found = mesh.whole(dict(model.named_parameters()))
    return {name: join_heads(name, tensor, parts=mesh.size_of("tp")) for name, tensor in found.items()}


class ParallelPasses:
    """Passes of a model that the ranks of a replica share; see `ModelPasses`.

    Args:
        config: Resolved options.
        model: As `cut_model` leaves it.
        mesh: The replica's ranks.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: ReplicaMesh) -> None:
        self.timing = Passes(mesh.device)
        self._config, self._mesh = config, mesh
        self._model: Any = model

    def backward(self, tokens: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        """See `ModelPasses`; every rank gets the whole batch, and the mean over it."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        passes = list(self._own_passes(tokens, targets))
        with named_failures():
            for number, (rows, row_targets, share) in enumerate(passes):
                self._prepare_pass(is_last=number == len(passes) - 1)
                with self.timing.forward(), self._autocast():
                    loss, nll = self._model.loss(rows, row_targets)
                # FSDP2 averages over the data-parallel ranks, so each weighs its own by its share of the batch
                with self.timing.backward():
                    (loss * (share * self._mesh.data_ranks)).backward()
                sums += share * torch.stack([loss.detach(), nll.detach()])
        self._sum_gains()
        loss, nll = self._mesh.sum_over_data(sums).float()
        return loss, nll

    def clip(self) -> None:
        """Shorten the gradient of all ranks' parts together to `clip_norm`."""
        limit = self._config.optimizer.clip_norm
        if limit <= 0:
            return
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        gradients = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                gradients.append(local_shard(parameter.grad))
                squares += gradients[-1].double().square().sum() / self._mesh.num_copies(parameter)
        norm = self._mesh.sum(squares).sqrt()
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))

    def held_out(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See `ModelPasses`; a batch of any number of rows."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with named_failures():
            for rows, row_targets, share in self._own_passes(tokens, targets):
                with self._autocast():
                    total += share * self._model.loss(rows, row_targets)[1]
        return self._mesh.sum_over_data(total).float()

    def _own_passes(self, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield this rank's parts of a batch, equally many on all ranks, each with its share of the batch.

        A rank without rows takes the first one with weight 0: a model cannot run on an empty batch.
        """
        count, ranks, rank = len(tokens), self._mesh.data_ranks, self._mesh.data_rank
        per_rank = -(-count // ranks)
        size = min(self._config.data.micro_batch or per_rank, per_rank)
        for start in range(0, per_rank, size):
            first, end = rank * per_rank + start, min(count, rank * per_rank + min(start + size, per_rank))
            rows = slice(first, end) if first < end else slice(0, 1)
            yield tokens[rows], targets[rows], max(0, end - first) / count

    def _prepare_pass(self, *, is_last: bool) -> None:
        """Set what FSDP2 does after this pass: whether gradients are summed, and parameters freed."""
        if self._mesh.data_ranks == 1:
            return
        stage = self._config.parallel.zero_stage
        # ZeRO-1 keeps whole gradients and sums them once a step; the others sum into shards at every pass
        self._model.set_requires_gradient_sync(is_last or stage > 1)
        self._model.set_is_last_backward(is_last)
        if stage < 3:
            self._model.set_reshard_after_backward(is_last)

    def _sum_gains(self) -> None:
        if self._mesh.size_of("tp") == 1:
            return
        for name, parameter in self._model.named_parameters():
            if name.endswith(_GAINS_OF_HEADS) and parameter.grad is not None:
                self._mesh.sum_over_tp(local_shard(parameter.grad))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self._config.model.autocast == "bf16"
        return torch.autocast(self._mesh.device.type, dtype=torch.bfloat16, enabled=enabled)
