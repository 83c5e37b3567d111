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
from thinwire.training.assembly import make_inner_optimizer, make_model
from thinwire.training.config import TrainConfig, from_json
from thinwire.transport.shards import drop_gathered, flatten, local_shard, unflatten_into

if TYPE_CHECKING:
    from thinwire.transport.inner_group import InnerGroup  # imports FSDP, which takes a second


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
        self._tensors = dict(self.model.named_parameters())
        self.names = tuple(self._tensors)
        sizes = group.tell_all([local_shard(tensor).numel() for tensor in self._tensors.values()])
        self._sizes = {name: [of_rank[i] for of_rank in sizes] for i, name in enumerate(self.names)}
        self._kept: list[Tensor] = []
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
        with self._autocast():
            loss, nll = self._loss(tokens[rows], targets[rows])
        # FSDP2 averages the ranks' gradients alike, so each weighs its own by its rows
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

    def gather(self, names: Sequence[str]) -> Tensor:
        """Return tensors whole at the rank that leads; see `Pieces.gather`. An empty vector elsewhere."""
        own = flatten([local_shard(self._tensors[name]) for name in names], device=self._group.device)
        by_rank = self._group.gather(own, sizes=self._rank_sizes(names))
        starts = [0] * len(by_rank)
        pieces = []
        for name in names if by_rank else ():
            for rank, size in enumerate(self._sizes[name]):
                pieces.append(by_rank[rank][starts[rank] : starts[rank] + size])
                starts[rank] += size
        return torch.cat(pieces) if pieces else own.new_empty(0)

    def scatter(self, names: Sequence[str], values: Tensor | None, *, blend: float) -> None:
        """Set all ranks' shards from a vector at the one that leads; see `Pieces.scatter`."""
        own = [local_shard(self._tensors[name]) for name in names]
        parts = [] if values is None else self._cut(names, values.to(self._group.device))
        room = torch.empty(sum(t.numel() for t in own), dtype=torch.float32, device=self._group.device)
        target = self._group.deal(parts, own=room)
        if blend > 0:
            target = torch.lerp(flatten(own, device=self._group.device), target, 1 - blend)
        with torch.no_grad():
            unflatten_into(target, own)

    def keep(self) -> None:
        """Copy the shards aside; see `Pieces.keep`."""
        drop_gathered(self.model)
        self._kept = [local_shard(tensor).clone() for tensor in self._tensors.values()]

    def restore(self) -> None:
        """Put back what `keep` copied; see `Pieces.restore`."""
        drop_gathered(self.model)
        with torch.no_grad():
            for tensor, kept in zip(self._tensors.values(), self._kept, strict=True):
                local_shard(tensor).copy_(kept)
        self._kept = []

    def _cut(self, names: Sequence[str], values: Tensor) -> list[Tensor]:
        """Cut whole tensors, one behind the other, into what each rank holds of them."""
        pieces = torch.split(values, [size for name in names for size in self._sizes[name]])
        num_ranks = self._group.size
        return [torch.cat(pieces[rank::num_ranks]) for rank in range(num_ranks)]

    def _rank_sizes(self, names: Sequence[str]) -> list[int]:
        return [sum(self._sizes[name][rank] for name in names) for rank in range(self._group.size)]

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
            _obey(order, shard, group=group, base_lrs=base_lrs)


def _obey(order: dict[str, Any], shard: ModelShard, *, group: InnerGroup, base_lrs: Sequence[float]) -> None:
    names = [shard.names[index] for index in order.get("which", ())]
    match order["do"]:
        case "step":
            shard.backward(*hear_batch(order, group=group))
            shard.step(order["factor"], base_lrs=base_lrs)
        case "held_out":
            shard.held_out(*hear_batch(order, group=group))
        case "gather":
            shard.gather(names)
        case "scatter":
            shard.scatter(names, None, blend=order["blend"])
        case "keep":
            shard.keep()
        case "restore":
            shard.restore()


def hear_batch(order: dict[str, Any], *, group: InnerGroup) -> Sequence[Tensor]:
    """Take over the batch that comes with an order: tokens and targets, (batch, seq) int64 each."""
    return group.spread(torch.empty((2, *order["shape"]), dtype=torch.int64, device=group.device)).unbind()
