"""One rank's part of a replica that several ranks hold together, and what a rank does that does not lead."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.shared_random import derive_seed
from thinwire.sync.blocks import find_blocks
from thinwire.training.build import make_inner_optimizer, make_model
from thinwire.training.config import TrainConfig, from_json
from thinwire.training.step_timing import Passes
from thinwire.transport.sharded_parameters import ShardedParameters

if TYPE_CHECKING:
    from thinwire.transport.replica_group import InnerGroup


class ModelShard:
    """A model of which each rank holds a shard (FSDP2), and what all ranks do with it at the same time.

    Every method is called by all ranks of the replica, in the same order.

    Args:
        group: The replica's ranks.
        config: The job's options on this host.
        vocab_size: Tokens of the job's tokenizer.

    Attributes:
        model: This rank's part; its parameters are DTensors.
        inner: Over it.
        parameters: The shards of all ranks.
        passes: What times this rank's passes, its waits for other ranks' shards among them.
    """

    def __init__(self, group: InnerGroup, config: TrainConfig, *, vocab_size: int) -> None:
        self._group = group
        self._config = config
        group.use(config.device)
        torch.manual_seed(config.seed)
        # every rank makes the same weights from the seed, and keeps its shard of them
        self.model = make_model(config, vocab_size=vocab_size, device=group.device)
        group.shard(self.model, blocks=block_modules(self.model))
        self.inner = make_inner_optimizer(config, self.model)
        self.parameters = ShardedParameters(group, self.model)
        self.passes = Passes(group.device)
        if group.rank:  # ranks see other rows, and drop out other numbers
            torch.manual_seed(derive_seed(config.seed, "rank", group.rank))

    def backward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put the mean gradient over the replica's whole batch into each rank's shards.

        Args:
            tokens: (batch, seq) int64: the replica's whole batch, the same on all ranks, no fewer rows than ranks.
            targets: The token that follows each.

        Returns:
            Loss and nll of the whole batch, the same on all ranks.
        """
        self.model.train()
        rows, share = own_rows(tokens.shape[0], rank=self._group.rank, size=self._group.size)
        with self.passes.forward(), self._autocast():
            loss, nll = self._loss(tokens[rows], targets[rows])
        # FSDP2 averages the ranks' gradients alike, so each weighs its own by its rows
        with self.passes.backward():
            (loss * (share * self._group.size)).backward()  # type: ignore[no-untyped-call]
        both = self._group.add_up(torch.stack([loss.detach() * share, nll.detach() * share]))
        return both[0], both[1]

    def held_out(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean nll of a batch that nobody trains on, of any number of rows; see `backward`."""
        rows, share = own_rows(tokens.shape[0], rank=self._group.rank, size=self._group.size)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            nll = self._loss(tokens[rows], targets[rows])[1]
        return self._group.add_up(nll.detach() * share)

    def step(self, factor: float, *, base_lrs: Sequence[float]) -> None:
        """Clip, step and clear, as the training loop does at the rank that leads."""
        for group, base_lr in zip(self.inner.param_groups, base_lrs, strict=True):
            group["lr"] = base_lr * factor
        self.clip()
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def clip(self) -> None:
        """Shorten the gradient of all shards together to `clip_norm`."""
        if self._config.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)

    def _loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss: tuple[Tensor, Tensor] = self.model.loss(tokens, targets)  # type: ignore[operator]
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self._config.autocast == "bf16"
        return torch.autocast(self._group.device.type, dtype=torch.bfloat16, enabled=enabled)


def own_rows(num_rows: int, *, rank: int, size: int) -> tuple[slice, float]:
    """Return which rows of a batch are a rank's, and what share of all of them.

    A rank that is left without one takes the first, for a share of nothing: a model does not run on no row.

    Example:
        >>> [own_rows(5, rank=rank, size=2) for rank in range(2)]
        [(slice(0, 3, None), 0.6), (slice(3, 5, None), 0.4)]
        >>> own_rows(1, rank=1, size=2)
        (slice(0, 1, None), 0.0)
    """
    few, more = divmod(num_rows, size)
    start = rank * few + min(rank, more)
    count = few + (rank < more)
    return (slice(start, start + count), count / num_rows) if count else (slice(0, 1), 0.0)


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model repeats, as `find_blocks` finds them; none of a model of one part."""
    found = []
    for names in find_blocks(model).blocks:
        paths = [name.split(".")[:-1] for name in names]
        shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        if shared:
            found.append(model.get_submodule(".".join(shared)))
    return found


def follow(group: InnerGroup) -> None:
    """Do what the rank that leads says, until it says that this is the end or is gone.

    Raises:
        RuntimeError: It is gone, or another rank is.
    """
    shard: ModelShard | None = None
    base_lrs: list[float] = []
    while (order := json.loads(group.hear()))["do"] != "end":
        if order["do"] == "assemble":
            del shard
            shard = ModelShard(group, from_json(order["config"]), vocab_size=order["vocab_size"])
            base_lrs = [param_group["lr"] for param_group in shard.inner.param_groups]
        else:
            assert shard is not None, "there is a model before it is worked on"
            _execute(order, shard, group=group, base_lrs=base_lrs)


def _execute(order: dict[str, Any], shard: ModelShard, *, group: InnerGroup, base_lrs: Sequence[float]) -> None:
    names = [shard.parameters.names[index] for index in order.get("which", ())]
    match order["do"]:
        case "step":
            shard.backward(*receive_batch(order, group=group))
            shard.step(order["factor"], base_lrs=base_lrs)
        case "held_out":
            shard.held_out(*receive_batch(order, group=group))
        case "gather":
            shard.parameters.gather(names)
        case "scatter":
            shard.parameters.scatter(names, None, blend=order["blend"])
        case "keep":
            shard.parameters.keep()
        case "restore":
            shard.parameters.restore()


def receive_batch(order: dict[str, Any], *, group: InnerGroup) -> Sequence[Tensor]:
    """Take over the batch that comes with an order: tokens and targets, (batch, seq) int64 each."""
    return group.spread(torch.empty((2, *order["shape"]), dtype=torch.int64, device=group.device)).unbind()
