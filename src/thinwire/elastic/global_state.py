"""Global state of an elastic run, as a value and as bytes: what all replicas share after a step.

One vector of bytes serves replicas that join, and is the same bits on every replica: tensors go by name, JSON has one
spelling, and unused bytes are zero. Arrived bytes are untrusted input: each length is checked against the vector before
it is used, and nothing but what `pack` would have written is taken. The layout, little endian:

| offset | bytes | field |
| --- | --- | --- |
| 0 | 8 | magic `THWSTATE` |
| 8 | 4 | version, 1 |
| 12 | 4 | zero |
| 16 | 8 | bytes of the header |
| 24 | 8 | bytes of everything |
| 32 | 32 | SHA-256 of the header |
| 64 | | the header: JSON that holds the step, the note and each tensor's name, dtype, shape and SHA-256 |
| | | the tensors in the header's order, each at the next multiple of 64 bytes |
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import PayloadError

MAGIC = b"THWSTATE"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s")
_ALIGNED = 64
# bounds what a hostile header can cost to read; ten thousand tensors take two of these sixteen million bytes
MOST_HEADER_BYTES = 1 << 24
_MOST_NUMBER = 1 << 62
_GROUPS = ("parameters", "outer")
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalState:
    """State that all replicas of an elastic run share after a step; it does not depend on their number.

    Two states are the same where `sha256` of both is.

    Raises:
        ValueError: A field holds what the bytes cannot; names it.
    """

    step: int  # the cut: all rounds that were to be applied up to this step have been
    # the global parameters by the model's names, in its shapes, on the CPU. Tied parameters may stand under each of
    # their names
    parameters: Mapping[str, Tensor]
    # state of the outer optimizer, by names such as `momentum.0`, on the CPU
    outer: Mapping[str, Tensor] = field(default_factory=dict)
    # all else, as plain JSON: dicts with texts as keys, lists, texts, finite numbers, bools and None
    note: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what bytes can hold."""
        if isinstance(self.step, bool) or not isinstance(self.step, int) or not 0 <= self.step < _MOST_NUMBER:
            raise ValueError(f"step must be a whole number from 0 to {_MOST_NUMBER - 1}, got {self.step!r}")
        for group in _GROUPS:
            for name, tensor in getattr(self, group).items():
                if not isinstance(name, str) or not name:
                    raise ValueError(f"names of {group} must be texts that are not empty, got {name!r}")
                if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES:
                    raise ValueError(
                        f"{group}[{name!r}] must be a dense tensor on the CPU of one of {', '.join(_DTYPES)}, got "
                        f"{tensor.dtype} on {tensor.device}; convert it first"
                    )
        if not isinstance(self.note, Mapping):
            raise ValueError(f"note must be a dict, got {type(self.note).__name__}")
        _check_json(self.note, where="note")

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in _GROUPS for tensor in getattr(self, group).values())


def pack(state: GlobalState) -> Tensor:
    """Return a state's bytes, the same bits on every replica that holds the same state.

    Returns:
        uint8, `(num_bytes,)`, on the CPU: a new tensor, into which each tensor is copied once.

    Raises:
        ValueError: The note is too large.

    Example:
        >>> state = GlobalState(step=3, parameters={"w": torch.ones(2)}, note={"tokens": 64})
        >>> again = unpack(pack(state))
        >>> again.step, again.parameters, again.note
        (3, {'w': tensor([1., 1.])}, {'tokens': 64})
    """
    head = _head(state)
    vector = torch.empty(_total_bytes(state, head), dtype=torch.uint8)
    vector[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    end = len(head)
    for _, _, tensor in _tensors(state):
        begin = _aligned(end)
        vector[end:begin] = 0
        end = begin + tensor.nbytes
        # a whole tensor at once, whatever its strides are, and no second copy on the way
        vector[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return vector


def spans(state: GlobalState) -> Iterator[memoryview]:
    """Yield what `pack` returns in spans, without a second copy of the tensors that are contiguous: for a file.

    Raises:
        ValueError: The note is too large.

    Example:
        >>> state = GlobalState(step=3, parameters={"w": torch.ones(2)})
        >>> b"".join(spans(state)) == bytes(pack(state).numpy())
        True
    """
    head = _head(state)
    end = len(head)
    yield memoryview(head)
    for _, _, tensor in _tensors(state):
        yield memoryview(bytes(_aligned(end) - end))
        end = _aligned(end) + tensor.nbytes
        yield raw_bytes(tensor)


def sha256(state: GlobalState) -> str:
    """Return the SHA-256 of a state, in hexadecimal; of its bytes' head, which holds each tensor's SHA-256.

    Example:
        >>> states = [GlobalState(step=1, parameters={"w": torch.full((2,), value)}) for value in (0.0, -0.0)]
        >>> sha256(states[0]) == sha256(states[1])
        False
    """
    return hashlib.sha256(_head(state)).hexdigest()


def tensors_sha256(state: GlobalState) -> str:
    """Return the SHA-256 of a state's step and tensors, whatever its note says."""
    return sha256(GlobalState(step=state.step, parameters=state.parameters, outer=state.outer))


def non_finite(state: GlobalState) -> str:
    """Return the name of a tensor with values that no training can go on from, "" where there is none.

    NaN anywhere, or infinity in what an optimizer remembers; frozen parameters may hold infinity, as masks do.
    """
    for group, name, tensor in _tensors(state):
        # the sum is finite only if every element is; looking at each of them costs more
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
            continue
        is_bad = torch.isnan(tensor) if group == "parameters" else ~torch.isfinite(tensor)
        if bool(is_bad.any()):
            return name
    return ""


def unpack(vector: Tensor, *, source: str = "the global state") -> GlobalState:
    """Take a state out of untrusted bytes.

    Args:
        vector: uint8, one-dimensional, contiguous, on the CPU: what `pack` returned. The state's tensors are views of
            it, wherever its alignment allows it.
        source: What errors call the bytes.

    Raises:
        PayloadError: They are no state, damaged or of another version; names the field.
        ValueError: The vector is none of bytes on the CPU.
    """
    _check_vector(vector)
    header, at = _read_header(vector, vector.numel(), source)
    found: dict[str, dict[str, Tensor]] = {}
    for group in _GROUPS:
        found[group], at = _read_group(vector, header[group], at, f"{source}: {group}")
    if at != vector.numel():
        raise PayloadError(f"{source}: {vector.numel() - at} bytes follow the last tensor; none are expected")
    try:
        state = GlobalState(step=header["step"], note=header["note"], **found)
        spelled = _header_json(state, digests=_digests_of(header))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{source}: {error}") from error
    # one spelling: what would be packed otherwise is not what a replica wrote, and would have another hash
    if spelled != header["json"]:
        raise PayloadError(f"{source}: the header is not spelled as it is written; run the same thinwire on all hosts")
    return state


def unpack_parameters(vector: Tensor, *, num_bytes: int, source: str = "the global state") -> dict[str, Tensor] | None:
    """Take the parameters out of a state's first bytes, of which the rest is still on its way.

    Args:
        vector: uint8, one-dimensional, contiguous, on the CPU: the first bytes of what `pack` returned, untrusted.
        num_bytes: Of the whole state.
        source: What errors call the bytes.

    Returns:
        The parameters by name, views as in `unpack`; None where the bytes do not reach to their end.

    Raises:
        PayloadError: They are the beginning of no state; names the field.
        ValueError: The vector is none of bytes on the CPU.

    Example:
        >>> state = GlobalState(step=3, parameters={"w": torch.ones(2)}, outer={"momentum.0": torch.zeros(64)})
        >>> vector = pack(state)
        >>> unpack_parameters(vector[:100], num_bytes=vector.numel()) is None
        True
        >>> unpack_parameters(vector[:-64], num_bytes=vector.numel())
        {'w': tensor([1., 1.])}
    """
    _check_vector(vector)
    size = vector.numel()
    if size < _FIELDS.size or size < _FIELDS.size + _FIELDS.unpack(_raw(vector)[: _FIELDS.size])[3]:
        return None
    header, at = _read_header(vector, num_bytes, source)
    entries = header["parameters"]
    end = at
    for entry in entries:
        _, dtype, shape, _ = _read_entry(entry, f"{source}: parameters")
        end = _aligned(end) + math.prod(shape) * dtype.itemsize
    if size < end <= num_bytes:
        return None
    return _read_group(vector, entries, at, f"{source}: parameters")[0]


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in the order of its elements, without a copy where it is contiguous."""
    return _raw(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def _raw(vector: Tensor) -> memoryview:
    return memoryview(vector.numpy().data)


def _tensors(state: GlobalState) -> Iterator[tuple[str, str, Tensor]]:
    for group in _GROUPS:
        members: Mapping[str, Tensor] = getattr(state, group)
        for name in sorted(members):
            yield group, name, members[name].detach()


def _head(state: GlobalState) -> bytes:
    digests = {(group, name): hashlib.sha256(raw_bytes(tensor)).hexdigest() for group, name, tensor in _tensors(state)}
    header = _header_json(state, digests=digests)
    if len(header) > MOST_HEADER_BYTES:
        raise ValueError(
            f"the note and the names take {len(header)} bytes, a header at most {MOST_HEADER_BYTES}; note less"
        )
    size = _FIELDS.size + len(header)
    fields = _FIELDS.pack(
        MAGIC, VERSION, 0, len(header), _total_bytes(state, bytes(size)), hashlib.sha256(header).digest()
    )
    return fields + header


def _header_json(state: GlobalState, *, digests: Mapping[tuple[str, str], str]) -> bytes:
    entries: dict[str, list[Any]] = {group: [] for group in _GROUPS}
    for group, name, tensor in _tensors(state):
        entries[group].append([name, _DTYPE_NAMES[tensor.dtype], list(tensor.shape), digests[group, name]])
    header = {"step": state.step, "note": state.note, **entries}
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict).encode()


def _digests_of(header: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {(group, entry[0]): entry[3] for group in _GROUPS for entry in header[group]}


def _total_bytes(state: GlobalState, head: bytes) -> int:
    end = len(head)
    for _, _, tensor in _tensors(state):
        end = _aligned(end) + tensor.nbytes
    return end


def _check_vector(vector: Tensor) -> None:
    if vector.dtype != torch.uint8 or vector.dim() != 1 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(f"a vector of uint8 on the CPU is unpacked, got {vector.dtype} of {tuple(vector.shape)}")


def _read_group(vector: Tensor, entries: list[Any], at: int, source: str) -> tuple[dict[str, Tensor], int]:
    """Return a group's tensors, whose bytes begin at `at`, and where they end."""
    found: dict[str, Tensor] = {}
    for entry in entries:
        name, dtype, shape, digest = _read_entry(entry, source)
        origin = f"{source}[{name!r}]"
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, end = _aligned(at), _aligned(at) + num_bytes
        if end > vector.numel():
            raise PayloadError(f"{origin} needs {num_bytes} bytes, {max(0, vector.numel() - begin)} are left")
        if vector[at:begin].any():
            raise PayloadError(f"{origin}: the bytes before it are not zero")
        body = vector[begin:end]
        if hashlib.sha256(_raw(body)).hexdigest() != digest:
            raise PayloadError(f"{origin} is damaged: its SHA-256 is not the header's; fetch the state again")
        found[name] = _as_tensor(body, dtype, shape)
        at = end
    return found, at


def _read_header(vector: Tensor, size: int, source: str) -> tuple[dict[str, Any], int]:
    """Return the header of a state of `size` bytes, of which the vector has the first, and where it ends."""
    if size < _FIELDS.size:
        raise PayloadError(f"{source}: {size} bytes arrived, fewer than the {_FIELDS.size} that it begins with")
    view = _raw(vector)
    magic, version, zero, header_bytes, total_bytes, digest = _FIELDS.unpack(view[: _FIELDS.size])
    if magic != MAGIC or version != VERSION or zero:
        raise PayloadError(
            f"{source}: expected a thinwire state of version {VERSION}, found {magic!r} version {version}; run the "
            f"same thinwire on all hosts"
        )
    if total_bytes != size:
        raise PayloadError(f"{source}: {size} bytes arrived, its total is {total_bytes}")
    if header_bytes > min(size - _FIELDS.size, MOST_HEADER_BYTES):
        raise PayloadError(
            f"{source}: its header's {header_bytes} bytes are more than the {size - _FIELDS.size} that arrived, or "
            f"than the {MOST_HEADER_BYTES} of any header"
        )
    end = _FIELDS.size + header_bytes
    content = bytes(view[_FIELDS.size : end])
    if hashlib.sha256(content).digest() != digest:
        raise PayloadError(f"{source}: the header is damaged: its SHA-256 is wrong; fetch the state again")
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{source}: the header is no JSON ({error})") from error
    if not isinstance(header, dict) or set(header) != {"step", "note", *_GROUPS}:
        raise PayloadError(f"{source}: the header must hold step, note, parameters and outer, and nothing else")
    for group in _GROUPS:
        if not isinstance(header[group], list):
            raise PayloadError(f"{source}: {group} must be a list, got {type(header[group]).__name__}")
    return {**header, "json": content}, end


def _read_entry(entry: Any, origin: str) -> tuple[str, torch.dtype, list[int], str]:
    if not isinstance(entry, list) or len(entry) != 4:
        raise PayloadError(f"{origin}: an entry must be a name, a dtype, a shape and a SHA-256, got {str(entry)[:80]}")
    name, dtype, shape, digest = entry
    if not isinstance(name, str) or not isinstance(digest, str):
        raise PayloadError(f"{origin}: a name and a SHA-256 must be texts, got {str(entry)[:80]}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise PayloadError(f"{origin}[{name!r}]: dtype must be one of {', '.join(_DTYPES)}, got {str(dtype)[:80]}")
    is_shape = isinstance(shape, list) and all(type(dim) is int and 0 <= dim < _MOST_NUMBER for dim in shape)
    # strides are whole numbers of 64 bits, also where another dimension is empty
    if not is_shape or math.prod(max(dim, 1) for dim in shape) * 8 >= _MOST_NUMBER:
        raise PayloadError(f"{origin}[{name!r}]: the shape {str(shape)[:80]} is none, or more than any host holds")
    return name, _DTYPES[dtype], shape, digest


def _as_tensor(body: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if body.storage_offset() % dtype.itemsize or body.data_ptr() % dtype.itemsize:
        body = body.clone()
    return body.view(dtype).view(shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _check_json(value: Any, *, where: str) -> None:
    if isinstance(value, Mapping):
        for key, below in value.items():
            if not isinstance(key, str):
                raise ValueError(f"keys of a note must be texts, got {key!r} at {where}")
            _check_json(below, where=f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, below in enumerate(value):
            _check_json(below, where=f"{where}[{index}]")
    elif value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return
    else:
        raise ValueError(
            f"a note holds dicts, lists, texts, finite numbers, bools and None, got {value!r} at {where}; convert it"
        )
