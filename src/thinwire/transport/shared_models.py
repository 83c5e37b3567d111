"""Models and collectives that span replicas beneath thinwire, as of DDP or a library: refused, or warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire import compat
from thinwire.errors import refusal
from thinwire.transport.base import Transport, innermost
from thinwire.transport.shards import is_a

# One collective between two steps may be a barrier of a checkpoint; several steps in a row are a loop's own habit.
_STEPS_IN_A_ROW = 3
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
_REMEDY = "transport = thinwire.connect(solo=True) first, so that libraries see one replica"


class SharedCollectivesWarning(UserWarning):
    """Collectives of all replicas between steps, as of a library that averages gradients beneath thinwire."""


def refuse_shared_model(model: nn.Module, *, transport: Transport) -> None:
    """Refuse a model whose gradients or shards are shared by the ranks of several replicas.

    Raises:
        ValueError: DDP, FSDP or a DTensor spans replicas; names the wrapper and the remedy.
    """
    if transport.num_replicas == 1 or not dist.is_available() or not dist.is_initialized():
        return
    ranks_per_replica = getattr(innermost(transport), "ranks_per_replica", 1)
    for name, module in model.named_modules():
        kind = next((kind for place, kind in _WRAPPERS if is_a(place, kind, module)), "")
        group: Any = getattr(module, "process_group", None)
        if kind and group is not None and _spans(dist.get_process_group_ranks(group), ranks_per_replica):
            raise _refusal(f"{name or 'the model'} is wrapped in {kind}", dist.get_process_group_ranks(group))
    for name, parameter in model.named_parameters():
        if is_a("torch.distributed.tensor", "DTensor", parameter):
            ranks = parameter.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
            if _spans(ranks, ranks_per_replica):
                raise _refusal(f"parameter {name} is a DTensor (FSDP2, tensor parallelism)", ranks)


def _refusal(what: str, ranks: Iterable[int]) -> ValueError:
    return refusal(
        f"{what} over ranks of several replicas, so every step would average or gather over all of them",
        got=f"ranks {', '.join(map(str, ranks))}",
        allowed="a plain model, or one wrapped over the ranks of one replica",
        remedy=f"the model without the wrapper; in a library: {_REMEDY}; for FSDP inside a replica, "
        f"connect(solo=True, ranks_per_replica=N)",
    )  # fmt: skip


def _spans(ranks: Iterable[int], ranks_per_replica: int) -> bool:
    # in a solo world the default group holds one replica's ranks, 0 to N - 1, so that none spans
    return len({rank // ranks_per_replica for rank in ranks}) > 1


class SharedCollectives:
    """Counts collectives of a default group that spans replicas, and warns once."""

    def __init__(self, transport: Transport) -> None:
        self._num_ranks = transport.num_replicas * getattr(innermost(transport), "ranks_per_replica", 1)
        self._is_off = transport.num_replicas == 1 or not dist.is_available()
        self._group: Any = None
        self._last = 0
        self._steps = 0
        self._count = 0

    def on_step(self) -> None:
        """Compare the default group's number of calls with that of the last step.

        Warns:
            SharedCollectivesWarning: Calls between the last three steps and this one.
        """
        if self._is_off or (group := dist.group.WORLD) is None:
            return
        if group.size() != self._num_ranks:  # one replica's own world
            return
        if (number := compat.num_collectives(group)) is None:
            self._is_off = True
            return
        if group is not self._group:  # the first step with this group
            self._group, self._last, self._steps, self._count = group, number, 0, 0
            return
        calls, self._last = number - self._last, number
        self._steps, self._count = (self._steps + 1, self._count + calls) if calls else (0, 0)
        if self._steps == _STEPS_IN_A_ROW:
            self._is_off = True
            warnings.warn(
                f"{self._count} collectives of torch's default group, which spans all replicas, ran in the last "
                f"{self._steps} steps. A library beneath thinwire (DDP, accelerate, Lightning) averages or gathers at "
                f"every step over the slow network; got {self._count}; allowed 0; try {_REMEDY}",
                SharedCollectivesWarning, stacklevel=4,
            )  # fmt: skip
