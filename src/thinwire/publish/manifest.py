"""Manifests of published weights: what a version consists of, by hashes that form a chain.

A stream holds the versions 0, 1, 2, ... of one model's weights, as named objects of a carrier:

| name | content |
| --- | --- |
| `versions/00000042` | the hash of a version's manifest, created once |
| `head` | the newest version's number and hash; overwritten, hence only a hint |
| `blobs/HASH` | a manifest, a chunk of payloads, a layout or a file, by its SHA-256 |
| `shards/...` | what a rank of a sharded publisher hands to the first one |

Each version has a patch from the version before, an anchor that needs nothing before it, or both. A manifest holds the
hash of the one before it, and of the weights that result. All of it is checked on arrival: sizes before memory is
taken, hashes before anything is decoded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from thinwire.errors import PayloadError, StreamError
from thinwire.files import short

FORMAT = 1
HASH_BYTES = 32
HEAD, HEAD_BYTES = "head", 8 + HASH_BYTES
MOST_CHUNK_BYTES = 8 << 20
MOST_MANIFEST_BYTES, MOST_LAYOUT_BYTES, MOST_FILE_BYTES = 4 << 20, 32 << 20, 32 << 20
MOST_SHARDS = 1 << 12
_MOST_WORDS = 1 << 42  # of a shard
_LEAST_CHUNK_BYTES = 1 << 16
_CHUNKS_WANTED = 1 << 10

_Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Size = Annotated[int, Meta(ge=0, lt=1 << 42)]
_Shape = Annotated[tuple[_Size, ...], Meta(max_length=16)]
_FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")]
Code = Literal["exact-bf16", "exact", "e3m0"]
_Kind = TypeVar("_Kind")

# Bytes of an element by the name of its type; bfloat16 stands for what was a float of any kind.
ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "bool": 1, "uint8": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4,
    "uint64": 8,
}  # fmt: skip


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes by their hash."""

    sha256: _Hash
    size: _Size

    @property
    def name(self) -> str:
        return f"blobs/{self.sha256.hex()}"


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content that a shard sends for a version, in chunks; each fragment is four bytes of its size, and its payload."""

    chunks: Annotated[tuple[Blob, ...], Meta(max_length=1 << 16)]

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor, or the box of it that a shard holds.

    Attributes:
        dtype: Of the words, a key of `ITEM_BYTES`.
        shape: Of the whole tensor.
        start: Where the box begins, `size` its extent.
        tied: Name of the tensor that it shares its memory with, and that holds the words; empty for others.
    """

    name: Annotated[str, Meta(max_length=1 << 10)]
    dtype: str
    shape: _Shape
    start: _Shape
    size: _Shape
    tied: Annotated[str, Meta(max_length=1 << 10)] = ""

    @property
    def num_patterns(self) -> int:
        return 0 if self.tied else -(-math.prod(self.size) * ITEM_BYTES[self.dtype] // 2)

    def describe(self) -> str:
        """Return the spec for an error's text."""
        tied = f", tied to {short(self.tied)}" if self.tied else ""
        box = "" if self.size == self.shape else f", from {self.start} on {self.size}"
        return f"{short(self.name)} {self.dtype} of shape {self.shape}{box}{tied}"


class WeightLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of each shard, in the order of their words: all of bfloat16 before all others."""

    shards: Annotated[tuple[tuple[TensorSpec, ...], ...], Meta(min_length=1, max_length=MOST_SHARDS)]


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of the weights.

    Attributes:
        run: Random name of the stream.
        step: The publisher's own number, such as an optimizer step.
        code: What the stream carries, a key of `thinwire.publish.publisher.CODES`.
        parent: Hash of the manifest before; zeros for version 0.
        result: Hash of the weights of all shards; see `result_hash`.
        anchor: The newest version, this one included, that has anchors.
        patches: Of each shard, from the version before; none where there is only the anchor.
        anchors: Of each shard, without the version before; none for most versions.
        files: Small files beside the weights, such as a tokenizer.
        interval_s: Usual seconds from a version to the next.
    """

    format: int = FORMAT
    run: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    version: _Number
    step: _Number
    code: Code
    layout: Blob
    parent: _Hash
    result: _Hash
    anchor: _Number
    patches: Annotated[tuple[Part, ...], Meta(max_length=MOST_SHARDS)] = ()
    anchors: Annotated[tuple[Part, ...], Meta(max_length=MOST_SHARDS)] = ()
    files: Annotated[dict[_FileName, Blob], Meta(max_length=64)] = {}
    interval_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class ShardReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content that a rank hands to the one that commits a version."""

    tensors: tuple[TensorSpec, ...]
    digest: _Hash
    patch: Part | None
    anchor: Part | None


class _Header(msgspec.Struct):
    format: int


def version_name(version: int) -> str:
    """Return the object's name of a version's manifest.

    Example:
        >>> version_name(42)
        'versions/00000042'
    """
    return f"versions/{version:08d}"


def head_of(version: int, digest: bytes) -> bytes:
    """Return the content of a head."""
    return version.to_bytes(8, "little") + digest


def read_head(data: bytes) -> tuple[int, bytes]:
    """Return a head's version and hash; raises PayloadError."""
    if len(data) != HEAD_BYTES:
        raise PayloadError(f"{HEAD} is damaged: {len(data)} bytes; it was never sent so")
    return int.from_bytes(data[:8], "little"), data[8:]


def encode(content: VersionManifest | WeightLayout | ShardReport) -> bytes:
    """Return the bytes of which the hash names the content."""
    return msgspec.msgpack.encode(content, order="deterministic")


def sha256(*data: bytes | memoryview) -> bytes:
    """Return the SHA-256 of bytes that follow each other."""
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.digest()


def decode(data: bytes, kind: type[_Kind], *, name: str) -> _Kind:
    """Decode what came from a carrier.

    Raises:
        PayloadError: It is no such thing; names the object.
        StreamError: It was written by a newer thinwire.
    """
    try:
        if kind is VersionManifest and (found := msgspec.msgpack.decode(data, type=_Header).format) != FORMAT:
            raise StreamError(f"{name} has format {found}, and this thinwire reads {FORMAT}; update thinwire here")
        content = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PayloadError(f"{name} is damaged: {str(error)[:200]}; it was never sent so") from error
    if isinstance(content, VersionManifest):
        _check_manifest(content, name)
    if isinstance(content, WeightLayout):
        for specs in content.shards:
            _check_specs(specs, name)
        _check_boxes(content, name)
    if isinstance(content, ShardReport):
        _check_specs(content.tensors, name)
    return content


def _check_manifest(found: VersionManifest, name: str) -> None:
    def check(is_fine: bool, what: str) -> None:
        if not is_fine:
            raise PayloadError(f"{name} is damaged: {what}; it was never sent so")

    check(found.anchor <= found.version, "its anchor is newer than itself")
    check(bool(found.anchors) == (found.anchor == found.version), "it has anchors, or claims some, in error")
    check(bool(found.patches or found.anchors), "it has neither patches nor anchors")
    check(not (found.patches and found.anchors) or len(found.patches) == len(found.anchors), "shards without patches")
    check(found.version > 0 or not (found.patches or any(found.parent)), "the first version has one before it")
    parts = (*found.patches, *found.anchors)
    check(all(chunk.size <= MOST_CHUNK_BYTES for part in parts for chunk in part.chunks), "a chunk is too large")
    check(found.layout.size <= MOST_LAYOUT_BYTES, "its layout is too large")
    check(all(blob.size <= MOST_FILE_BYTES for blob in found.files.values()), "a file is too large")


def _check_specs(specs: Sequence[TensorSpec], name: str) -> None:
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        dims = len(spec.shape)
        is_box = len(spec.start) == len(spec.size) == dims and all(
            start + size <= whole for start, size, whole in zip(spec.start, spec.size, spec.shape, strict=True)
        )
        owner = seen.get(spec.tied)
        is_tied = not spec.tied or (
            owner is not None and not owner.tied and (owner.dtype, owner.shape) == (spec.dtype, spec.shape)
        )
        if spec.dtype not in ITEM_BYTES or not is_box or spec.name in seen or not is_tied:
            raise PayloadError(f"{name} is damaged: {spec.describe()} cannot be; it was never sent so")
        seen[spec.name] = spec
    is_float = [spec.dtype == "bfloat16" for spec in specs if not spec.tied]
    if sum(spec.num_patterns for spec in specs) > _MOST_WORDS or sorted(is_float, reverse=True) != is_float:
        raise PayloadError(f"{name} is damaged: its tensors are too large or out of order; it was never sent so")


def _check_boxes(layout: WeightLayout, name: str) -> None:
    """Refuse tensors of which the shards hold no whole, before memory is taken for one."""
    wholes: dict[str, tuple[str, tuple[int, ...]]] = {}
    missing: dict[str, int] = {}
    for spec in [spec for specs in layout.shards for spec in specs]:
        whole = wholes.setdefault(spec.name, (spec.dtype, spec.shape))
        missing.setdefault(spec.name, math.prod(spec.shape))
        missing[spec.name] -= missing[spec.name] if spec.tied else math.prod(spec.size)
        if whole != (spec.dtype, spec.shape):
            raise PayloadError(f"{name} is damaged: {spec.describe()} differs between shards; it was never sent so")
    if wrong := next((one for one, count in missing.items() if count), None):
        raise PayloadError(f"{name} is damaged: the shards of {short(wrong)} do not add up to it; it was never sent so")


def result_hash(layout: Blob, digests: Iterable[bytes]) -> bytes:
    """Return the hash of weights: of the layout's hash, and of each shard's digest.

    A shard's digest is the SHA-256 of the SHA-256 of each of its fragments, so that only changed ones are read again.
    """
    return sha256(layout.sha256, *digests)


def first_difference(own: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> str:
    """Return a description of the first tensor in which two layouts differ; empty where they are equal."""
    for mine, its in zip(own, other, strict=False):
        if mine != its:
            return f"{its.describe()} there, {mine.describe()} here"
    if len(own) != len(other):
        longer, where = (own, "here") if len(own) > len(other) else (other, "there")
        return f"{longer[min(len(own), len(other))].describe()} is only {where}"
    return ""


def cut(data: bytes | bytearray) -> list[memoryview]:
    """Cut bytes into chunks: small enough to come from several sources, and at most about a thousand.

    Example:
        >>> [len(chunk) for chunk in cut(bytes(150_000))]
        [65536, 65536, 18928]
    """
    size = min(max(_LEAST_CHUNK_BYTES, -(-len(data) // _CHUNKS_WANTED)), MOST_CHUNK_BYTES)
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, len(data), size)]


def blob_of(data: bytes | memoryview) -> Blob:
    """Return the name of bytes."""
    return Blob(sha256(data), len(data))


def describe(manifest: VersionManifest) -> dict[str, Any]:
    """Return a version in a form for JSON."""
    return {
        "version": manifest.version, "step": manifest.step, "code": manifest.code,
        "sha256": manifest.result.hex(), "manifest_sha256": sha256(encode(manifest)).hex(),
    }  # fmt: skip
