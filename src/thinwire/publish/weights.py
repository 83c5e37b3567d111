"""A model's weights as words: which tensors are published, in which order, and back into a model."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError, refusal
from thinwire.publish.manifest import ITEM_BYTES, TensorSpec, WeightLayout
from thinwire.publish.patch import FRAGMENT_WORDS, Words
from thinwire.transport.shards import gather_over_shards, is_a, local_shard, own_part

Weights = nn.Module | Mapping[str, Tensor]


def tensors_of(weights: Weights, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """Return the tensors to publish by name: parameters and buffers, or the trainable parameters, as of adapters.

    Raises:
        ValueError: There are none, or one cannot be published.
    """
    if not isinstance(weights, nn.Module):
        found = dict(weights)
    elif trainable_only:
        # in the names of the state dict, where tied parameters have two
        named = weights.named_parameters(remove_duplicate=False)
        found = {name: parameter for name, parameter in named if parameter.requires_grad}
    else:
        found = dict(weights.state_dict())
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or _dtype(tensor) not in ITEM_BYTES:
            kind = _dtype(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise refusal(f"{name} cannot be published", got=kind, allowed=f"a tensor of {', '.join(ITEM_BYTES)}",
                          remedy="to pass a dict of the tensors that readers need")  # fmt: skip
    if not found:
        raise refusal("there are no weights to publish", got="no tensors", allowed="one or more",
                      remedy="trainable_only=False")  # fmt: skip
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Place of a process among those that publish one model.

    Attributes:
        count: Processes that publish; 0 in one that holds copies of others' shards alone.
        nonce: Random name, the same in all of them.
    """

    rank: int = 0
    count: int = 1
    nonce: str = ""


def shard_of(tensors: Mapping[str, Tensor]) -> Shard:
    """Return the place of this process; all ranks of a sharded model must call it together.

    Raises:
        ValueError: No tensor is sharded over all axes of the mesh over which any is.
    """
    sharded: list[Any] = [t for t in tensors.values() if is_a("torch.distributed.tensor", "DTensor", t)]
    if not sharded:
        return Shard()

    def axes(tensor: Any) -> set[int]:
        return {axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()}

    widest = max(sharded, key=lambda tensor: len(axes(tensor)))
    mesh, own = widest.device_mesh, axes(widest)
    if any(axes(tensor) - own or tensor.device_mesh != mesh for tensor in sharded):
        raise refusal("no tensor is sharded over all axes of the mesh that others are sharded over", got=own,
                      allowed="one mesh", remedy="to publish a full state dict from one rank")  # fmt: skip
    number = torch.tensor(secrets.randbits(62), device=local_shard(widest).device)
    numbers = gather_over_shards(number, parameter=widest).tolist()
    rank = 0
    for axis in sorted(own):
        rank = rank * mesh.size(axis) + mesh.get_coordinate()[axis]
    is_copy = any(at for axis, at in enumerate(mesh.get_coordinate()) if axis not in own)
    count = 0 if is_copy else math.prod(mesh.size(axis) for axis in own)
    return Shard(rank=rank, count=count, nonce=hashlib.sha256(repr(numbers).encode()).hexdigest()[:32])


def specs_of(tensors: Mapping[str, Tensor], *, is_exact: bool, rank: int = 0) -> tuple[TensorSpec, ...]:
    """Return the specs of what this rank publishes, in the order of its bit patterns.

    Args:
        tensors: Plain ones, which rank 0 publishes, and DTensors, of which each rank publishes its box.
        is_exact: Whether floats keep their type; else they become bfloat16.
        rank: Of this process among those that publish.
    """
    specs: list[TensorSpec] = []
    owners: dict[object, str] = {}
    for name, tensor in tensors.items():
        if (box := _box(tensor, rank)) is None:
            continue
        shard = local_shard(tensor)
        place = (shard.untyped_storage().data_ptr(), shard.storage_offset(), shard.shape, shard.stride(), shard.dtype)
        tied = owners.setdefault(place, name) if shard.numel() else name
        is_float = tensor.is_floating_point() and not is_exact
        specs.append(
            TensorSpec(
                name, "bfloat16" if is_float else _dtype(tensor), tuple(tensor.shape), *box,
                "" if tied == name else tied,
            )
        )  # fmt: skip
    return tuple(sorted(specs, key=lambda spec: spec.dtype != "bfloat16"))


def fragment_sizes(specs: Sequence[TensorSpec]) -> list[tuple[int, bool]]:
    """Return the number of bit patterns of each fragment, and whether they are bfloat16."""
    sizes = []
    for is_float in (True, False):
        left = sum(spec.num_patterns for spec in specs if (spec.dtype == "bfloat16") is is_float)
        while left:
            sizes.append((min(left, FRAGMENT_WORDS), is_float))
            left -= sizes[-1][0]
    return sizes


def fragments_of(tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> Iterator[Words]:
    """Yield the fragments of weights as they are now; of a large model only one is in memory at a time."""
    pieces = (_patterns_of(tensors[spec.name], spec) for spec in specs if not spec.tied)
    words: Words = np.empty(0, dtype=np.uint16)
    for size, _ in fragment_sizes(specs):
        fragment, have = np.empty(size, dtype=np.uint16), 0
        while have < size:
            if not len(words):
                words = next(pieces)
            taken, words = words[: size - have], words[size - have :]
            fragment[have : have + len(taken)] = taken
            have += len(taken)
        yield fragment


def join_tensors(layout: WeightLayout, fragments: Sequence[Sequence[Words]]) -> dict[str, Tensor]:
    """Return whole tensors, by name, from the fragments of each shard; tied ones are one tensor.

    Raises:
        PayloadError: The boxes of a tensor do not add up to it.
    """
    whole: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    ties: dict[str, str] = {}
    for specs, parts in zip(layout.shards, fragments, strict=True):
        words: Words = np.concatenate([np.empty(0, dtype=np.uint16), *parts])
        for spec in specs:
            if spec.tied:
                ties[spec.name] = spec.tied
                continue
            own, words = words[: spec.num_patterns], words[spec.num_patterns :]
            box = _tensor(own, spec)
            if spec.name not in whole:
                whole[spec.name] = box if spec.size == spec.shape else torch.zeros(spec.shape, dtype=box.dtype)
                missing[spec.name] = math.prod(spec.shape)
            if whole[spec.name] is not box:
                _cut(whole[spec.name], spec.start, spec.size).copy_(box)
            missing[spec.name] -= box.numel()
    for name, count in missing.items():
        if count and name not in ties:  # an empty shard has no ties
            raise PayloadError(f"the shards of {name} do not add up to it: {count} elements are missing")
    whole.update({name: whole[owner] for name, owner in ties.items()})
    return whole


def load_weights(weights: Weights, tensors: Mapping[str, Tensor], layout: WeightLayout) -> None:
    """Copy published tensors into a model, which may be sharded or of another float type.

    Raises:
        ValueError: A tensor is not in the model or has another shape, or is tied to another one there; names the
            first, and nothing is changed.
    """
    own = tensors_of(weights)
    specs = {spec.name: spec for specs in layout.shards for spec in specs}
    here = {spec.name: spec for spec in specs_of(own, is_exact=True)}
    for name, spec in specs.items():
        if name not in own:
            raise _mismatch(spec, "no such tensor")
        is_float = spec.dtype in ("bfloat16", "float16", "float32", "float64")
        is_kind = own[name].is_floating_point() if is_float else _dtype(own[name]) == spec.dtype
        if tuple(own[name].shape) != spec.shape or not is_kind:
            raise _mismatch(spec, here[name].describe() if name in here else f"shape {tuple(own[name].shape)}")
        # tensors that are one there may be two here, with equal values; never the other way round
        tied = here[name].tied if name in here else ""
        if tied in specs and tied and tied != spec.tied:
            raise _mismatch(spec, here[name].describe())
    with torch.no_grad():
        for name, tensor in tensors.items():
            is_sharded = is_a("torch.distributed.tensor", "DTensor", own[name])
            local_shard(own[name]).copy_(own_part(tensor, like=own[name]) if is_sharded else tensor)


def _mismatch(spec: TensorSpec, found: str) -> ValueError:
    return refusal(f"published weights do not fit this model; first in {spec.name}", got=found, allowed=spec.describe(),
                   remedy="the model that the publisher has")  # fmt: skip


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _box(tensor: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return start and size of what this rank holds; None where another rank publishes it."""
    shape = tuple(tensor.shape)
    if not is_a("torch.distributed.tensor", "DTensor", tensor):
        return None if rank else ((0,) * len(shape), shape)
    sharded = tensor
    mesh, placements = sharded.device_mesh, sharded.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise refusal("a tensor that is a sum over ranks cannot be published", got=placements,
                      allowed="shards and copies", remedy="tensor.redistribute first")  # fmt: skip
    coordinate = mesh.get_coordinate()
    is_copy = any(at and placement.is_replicate() for at, placement in zip(coordinate, placements, strict=True))
    if is_copy:
        return None
    chunk = sharded.__create_chunk_list__()[0]  # type: ignore[attr-defined]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _cut(tensor: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def _patterns_of(tensor: Tensor, spec: TensorSpec) -> Words:
    flat = local_shard(tensor).resolve_conj().resolve_neg().reshape(-1)
    if spec.dtype == "bfloat16":
        found: Words = flat.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()
        return found
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).cpu().contiguous().reshape(-1).view(torch.uint8)
    data = raw.numpy().tobytes()
    return np.frombuffer(data + bytes(len(data) % 2), dtype="<u2").astype(np.uint16)


def _tensor(words: Words, spec: TensorSpec) -> Tensor:
    if spec.dtype == "bfloat16":
        return torch.from_numpy(words.copy()).view(torch.bfloat16).view(spec.size)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    data = bytearray(words.astype("<u2").tobytes()[: math.prod(spec.size) * ITEM_BYTES[spec.dtype]])
    return torch.frombuffer(data, dtype=dtype).view(spec.size) if data else torch.empty(spec.size, dtype=dtype)
