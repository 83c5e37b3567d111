"""Manifests: what a version claims is bounded and consistent before anything is fetched for it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.strangers import memory_is_bounded
from thinwire.errors import PayloadError, StreamError, ThinwireError
from thinwire.publish.manifest import (
    Blob,
    Part,
    TensorSpec,
    VersionManifest,
    WeightLayout,
    blob_of,
    decode,
    encode,
    first_difference,
)

BLOB = blob_of(b"anything")
PART = Part((BLOB,))
VALID = VersionManifest(
    run="a" * 32, version=3, step=40, code="exact-bf16", layout=BLOB, parent=bytes(32), result=bytes(32), anchor=3,
    patches=(PART,), anchors=(PART,), files={"tokenizer.json": BLOB}, interval_s=1.5,
)  # fmt: skip
LAYOUT = WeightLayout(((TensorSpec("w", "bfloat16", (4, 2), (0, 0), (4, 2)), TensorSpec("n", "int64", (), (), ())),))


def test_what_is_encoded_comes_back() -> None:
    """VersionManifest and layout."""
    assert decode(encode(VALID), VersionManifest, name="head") == VALID
    assert decode(encode(LAYOUT), WeightLayout, name="layout") == LAYOUT


def with_fields(**fields: object) -> bytes:
    return encode(msgspec.structs.replace(VALID, **fields))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (b"\xc1" * 50, "malformed"),
        (with_fields(version=-1), "version"),
        (with_fields(anchor=4), "newer than itself"),
        (with_fields(anchor=2), "in error"),
        (with_fields(patches=(), anchors=(), anchor=2), "neither"),
        (with_fields(patches=(PART, PART)), "shards without patches"),
        (with_fields(version=0, anchor=0), "one before it"),
        (with_fields(files={"../escape": BLOB}), "files"),
        (with_fields(files={".bashrc": BLOB}), "files"),
        (with_fields(layout=Blob(bytes(31), 5)), "layout"),
        (with_fields(anchors=(Part((Blob(bytes(32), 1 << 40),)),)), "chunk is too large"),
        (with_fields(layout=Blob(bytes(32), 1 << 40)), "layout is too large"),
        (with_fields(run="../../x"), "run"),
        (with_fields(interval_s=float("nan")), "interval_s"),
        (with_fields(code="pickle"), "code"),
    ],
)
def test_claims_that_cannot_be_are_refused(data: bytes, match: str) -> None:
    """The error names the object and the field, before anything is fetched."""
    with pytest.raises(PayloadError, match=f"head is damaged.*{match}"):
        decode(data, VersionManifest, name="head")


def test_tensors_that_shards_do_not_hold_whole_are_refused_before_memory_is_taken() -> None:
    """Of 4 TB each, in two types, or tied to what is tied or has another shape."""

    def spec(
        name: str, shape: int, start: int = 0, size: int = 2, dtype: str = "bfloat16", tied: str = ""
    ) -> TensorSpec:
        return TensorSpec(name, dtype, (shape,), (start,), (size,), tied)

    whole = spec("w", 2)
    good = [
        [(spec("w", 4),), (spec("w", 4, start=2),)],
        [(whole, spec("t", 2, tied="w")), (spec("w", 2, size=0), spec("t", 2, size=0))],
    ]
    for shards in good:
        decode(encode(WeightLayout(tuple(shards))), WeightLayout, name="layout")
    bad = [
        [(spec("w", 1 << 41),)],
        [(spec("w", 4),), (spec("w", 8, start=4),)],
        [(spec("w", 4),), (spec("w", 4, start=2, dtype="int16"),)],
        [(whole, spec("t", 2, tied="w"), spec("u", 2, tied="t"))],
        [(whole, spec("t", 3, size=3, tied="w"))],
    ]
    for shards in bad:
        with memory_is_bounded(64 << 20), pytest.raises(PayloadError, match="layout is damaged"):
            decode(encode(WeightLayout(tuple(shards))), WeightLayout, name="layout")


def test_a_newer_format_is_refused_with_the_remedy() -> None:
    """It may have any other fields."""
    newer = msgspec.msgpack.encode({"format": 2, "anything": [1, 2]})
    with pytest.raises(StreamError, match="format 2, and this thinwire reads 1; update thinwire"):
        decode(newer, VersionManifest, name="head")


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("w", "object", (2,), (0,), (2,)),
        TensorSpec("w", "bfloat16", (2,), (1,), (2,)),
        TensorSpec("w", "bfloat16", (2, 2), (0,), (2,)),
        TensorSpec("w", "bfloat16", (2,), (0,), (2,), "missing"),
        TensorSpec("w", "bfloat16", (1 << 41, 1 << 41), (0, 0), (1 << 41, 1 << 41)),
    ],
)
def test_tensors_that_cannot_be_are_refused(spec: TensorSpec) -> None:
    """Unknown types, boxes outside of a tensor, ties to nothing, and what no memory holds."""
    with pytest.raises(PayloadError, match="layout is damaged"):
        decode(encode(WeightLayout(((spec,),))), WeightLayout, name="layout")


def test_mutated_manifests_are_refused_or_read() -> None:
    """No other error, and within bounded memory."""
    rng = np.random.default_rng(0)
    refused = 0
    with memory_is_bounded():
        for _ in range(400):
            for content, kind in ((VALID, VersionManifest), (LAYOUT, WeightLayout)):
                data = bytearray(encode(content))
                for _ in range(int(rng.integers(1, 4))):
                    data[int(rng.integers(len(data)))] = int(rng.integers(256))
                try:
                    decode(bytes(data), kind, name="head")
                except ThinwireError:
                    refused += 1
    assert refused > 200


def test_the_first_tensor_that_differs_is_named() -> None:
    """By name, type and shape on both sides; also where one side has more."""
    other = (TensorSpec("w", "bfloat16", (4, 3), (0, 0), (4, 3)), LAYOUT.shards[0][1])
    assert first_difference(LAYOUT.shards[0], LAYOUT.shards[0]) == ""
    assert first_difference(LAYOUT.shards[0], other) == (
        "'w' bfloat16 of shape (4, 3) there, 'w' bfloat16 of shape (4, 2) here"
    )
    assert first_difference(LAYOUT.shards[0], other[:0]) == "'w' bfloat16 of shape (4, 2) is only here"
