"""Shard of a parameter on this rank: itself, or the local shard of a DTensor (FSDP2, tensor parallelism)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import TransportError


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that holds this rank's part; writing into it changes the parameter.

    Args:
        tensor: A plain tensor or a DTensor, of any shape; a shard may be empty.

    Returns:
        The tensor itself, or the DTensor's local tensor, without a gradient graph.
    """
    sharded: Any = tensor
    return sharded.to_local().detach() if is_a("torch.distributed.tensor", "DTensor", tensor) else tensor.detach()


def real_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as `local_shard` does, of complex numbers their real and imaginary parts, `(..., 2)`.

    Writing into it changes the parameter.

    Example:
        >>> real_shard(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
    """
    shard = local_shard(tensor)
    return torch.view_as_real(shard.resolve_conj()) if shard.is_complex() else shard


def gradient_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, dense and real (see `real_shard`); zeros where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(real_shard(parameter))
    return real_shard(gradient if gradient.layout == torch.strided else gradient.to_dense())


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, which ranks hold together."""
    return is_a("torch.distributed.tensor", "DTensor", tensor)


def placed(shard: torch.Tensor, *, like: Any) -> torch.Tensor:
    """Return a shard as the DTensor that a parameter is; itself beside a plain parameter."""
    if not is_distributed(like):
        return shard.contiguous()
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor.from_local(
        shard.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def cut(whole: torch.Tensor, *, like: Any) -> torch.Tensor:
    """Return a whole tensor, which every rank holds, as the DTensor that a parameter is; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    if whole.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} stands for a parameter of {tuple(like.shape)}")
    whole = whole.to(like.device)
    found: torch.Tensor = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this rank holds less than the whole of a tensor."""
    return local_shard(tensor).shape != tensor.shape


def gather_over_shards(number: torch.Tensor, *, parameter: torch.Tensor) -> torch.Tensor:
    """Gather one number from each rank that holds a shard of a parameter, in the order of the shards.

    Every rank that holds one must call it, also where its shard is empty; along axes of the mesh on which the parameter
    is replicated nothing is gathered, because the number is the same there.

    Args:
        number: Of this rank's shard, zero-dimensional, on the parameter's device.
        parameter: A plain tensor or a DTensor.

    Returns:
        `(number of shards,)`, the same on all ranks; of a plain tensor `(1,)`.

    Raises:
        TransportError: A rank of this replica is gone or hangs.
    """
    found, sharded = number.reshape(1), parameter
    if not is_a("torch.distributed.tensor", "DTensor", parameter):
        return found
    mesh: Any = sharded.device_mesh  # type: ignore[attr-defined]
    placements: Any = sharded.placements  # type: ignore[attr-defined]
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():  # a shard of a shard is no `Shard`
            parts = [torch.empty_like(found) for _ in range(mesh.size(axis))]
            with named_failures():
                dist.all_gather(parts, found, group=mesh.get_group(axis))
            found = torch.cat(parts)
    return found


def as_shard(part: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor as the DTensor of which it is this rank's part; itself where the other one is plain.

    Args:
        part: Of the local shape of the other one, else it is returned as it is.
        like: A plain tensor or a DTensor.
    """
    if not is_a("torch.distributed.tensor", "DTensor", like) or part.shape != local_shard(like).shape:
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    found: torch.Tensor = DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    return found


def whole_tensor(shard: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that lies in shards as a DTensor does; all ranks that hold one must call it together.

    Args:
        shard: This rank's part, on the DTensor's device.
        like: The DTensor.

    Returns:
        The whole tensor, in the shard's dtype.

    Raises:
        TransportError: A rank of this replica is gone or hangs.
    """
    placed: Any = as_shard(shard.contiguous(), like=like)
    with named_failures():
        whole: torch.Tensor = placed.full_tensor()
    return whole


def own_part(whole: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, cut as a DTensor is; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    placed: Any = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    part: torch.Tensor = placed.to_local()
    return part


def own_rows(whole: torch.Tensor, group: Any, *, rank: int, size: int) -> torch.Tensor:
    """Return a copy of a rank's equal part along the first axis of a tensor that all ranks hold; sends nothing.

    Returns:
        A DTensor, `Shard(0)`, where the group is a `DeviceMesh`, which knows the whole shape; else a plain tensor.
    """
    count = whole.shape[0] // size
    part = whole.detach()[rank * count : (rank + 1) * count].clone()
    if not hasattr(group, "get_group"):
        return part
    from torch.distributed.tensor import DTensor, Shard

    placed: torch.Tensor = DTensor.from_local(
        part, group, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return placed


def drop_gathered(model: nn.Module) -> None:
    """Discard whole parameters that FSDP2 gathered, so that the next forward reads the current shards.

    After a forward without a backward, FSDP2 keeps its root's parameters gathered; a change of the shards would go
    unnoticed. A model without FSDP2 is left alone.
    """
    for module in model.modules():
        if is_a("torch.distributed.fsdp", "FSDPModule", module):
            sharded: Any = module
            sharded.reshard()


def flatten(
    tensors: Sequence[torch.Tensor], *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Copy tensors, one behind the other in row-major order, into one new vector.

    Args:
        tensors: Any shapes, real dtypes and layouts; may be empty.
        device: Where the vector is made; the first tensor's device by default.
        dtype: The vector's.

    Returns:
        `(sum of the tensors' elements,)`.
    """
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=device)
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        part.view(tensor.shape).copy_(tensor)
        start += tensor.numel()
    return flat


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write a vector made by `flatten` back into the tensors, in their own dtypes."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    assert start == flat.numel(), "the vector must have exactly the tensors' elements"


def is_a(module: str, name: str, value: object) -> bool:
    """Return whether a value is of a class whose module takes a second to import, without importing it.

    Nothing can be of a class whose module was never imported.

    Example:
        >>> is_a("collections", "Counter", {})
        False
    """
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


@contextmanager
def named_failures() -> Iterator[None]:
    """Raise the failure of a collective inside the replica as one of thinwire's.

    Raises:
        TransportError: A rank of this replica is gone or hangs.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransportError) or not any(word in str(error).lower() for word in ("gloo", "nccl")):
            raise
        reason = str(error).strip().splitlines()[0]
        raise TransportError(
            f"a rank of this replica is gone or hangs ({reason}); see the logs of its ranks"
        ) from error
