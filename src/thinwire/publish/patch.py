"""Patches of weights: the bits of a fragment at one version, given those at the version before.

A fragment is a run of 16-bit words: bfloat16 values as their bits, or any other values as their bytes. Its payload is
one byte for the kind, and a body:

| kind | body |
| --- | --- |
| 0, unchanged | nothing |
| 1, patch | 4 bytes, the size of the index part; the indices of changed words; their steps |
| 2, dense | the words, little endian |
| 3, planes | the exponents of all words, deflated; then sign and mantissa of each, one byte |
| 4, e3m0 | the difference to the words before, in `thinwire.codecs.e3m0`; lossy |

An optimizer's step smaller than a 256th of a weight is mostly rounded away in bfloat16, so few words change, and most
of those by one step. The code uses both:

- Words are numbered in the order of their old exponents, which both ends know. A small weight changes far more often
  than a large one, so that gaps between changed words in this order are much more alike than in memory.
- A step is the difference of two words in the order of their values, modulo 2**16, so that it is never rounded. It is
  zigzag-coded, and less one, because zero is no change: 0 and 1 are one step up and down.

Gaps and steps are both Rice-coded by `thinwire.codecs.sparse_payload`, in groups of 256 with a parameter each.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

from thinwire.codecs.e3m0 import e3m0
from thinwire.codecs.sparse_payload import decode_indices, encode_indices
from thinwire.errors import NonFiniteError, PayloadError

Words = npt.NDArray[np.uint16]

FRAGMENT_WORDS = 1 << 20
_UNCHANGED, _PATCH, _DENSE, _PLANES, _E3M0 = range(5)
_SIZE_BYTES = 4
_NUM_PATTERNS = 1 << 16
_CODEC = e3m0()


def max_payload_bytes(num_patterns: int) -> int:
    """Return the most bytes that the payload of so many words has: the dense one is always among the choices."""
    return 1 + 2 * num_patterns


def encode_fragment(words: Words, *, old: Words | None, is_lossy: bool = False) -> tuple[bytes, Words]:
    """Encode a fragment in the fewest bytes.

    Args:
        words: The fragment now, `(count,)`.
        old: The same before, as receivers hold it; None where they hold nothing, as of an anchor.
        is_lossy: Whether the difference may be sent as E3M0; the words must be bfloat16.

    Returns:
        The payload, and the words that it decodes to: `old` itself where nothing has changed.
    """
    if old is None:
        return _smallest(_dense(words), _planes(words)), words
    changed = words != old
    if not changed.any():
        return bytes([_UNCHANGED]), old
    exact = _patch(words, old, changed)
    if len(exact) > len(words):  # half the dense size, which planes hardly beat
        exact = _smallest(exact, _dense(words), _planes(words))
    if is_lossy and 1 + _CODEC.payload_bytes(len(words)) < len(exact):
        payload = bytes([_E3M0]) + _CODEC.encode(_floats(words) - _floats(old)).numpy().tobytes()
        try:
            return payload, decode_fragment(payload, count=len(words), old=old)
        except NonFiniteError:
            pass  # of a weight that is NaN or infinite, the exact bits are sent
    return exact, words


def decode_fragment(payload: bytes | memoryview, *, count: int, old: Words | None) -> Words:
    """Decode a fragment; nothing is written into `old`.

    Args:
        payload: What arrived.
        count: Words of the fragment.
        old: The fragment before, `(count,)`, None where there is none.

    Raises:
        PayloadError: The payload is none of so many words, or needs the words before.
        NonFiniteError: A difference in E3M0 held NaN or infinity.
    """
    _check(1 <= len(payload) <= max_payload_bytes(count), f"{len(payload)} bytes for {count} words")
    kind, body = payload[0], payload[1:]
    if kind == _DENSE:
        _check(len(body) == 2 * count, f"{len(body)} bytes for {count} dense words")
        return np.frombuffer(body, dtype="<u2").astype(np.uint16)
    if kind == _PLANES:
        return _from_planes(body, count)
    _check(kind in (_UNCHANGED, _PATCH, _E3M0), f"kind {kind}")
    if old is None:
        raise PayloadError("a patch without the words that it changes; fetch the anchor first")
    if kind == _UNCHANGED:
        _check(not body, "bytes follow an unchanged fragment")
        return old
    if kind == _E3M0:
        difference = _CODEC.decode(torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy()), numel=count)
        found: Words = (_floats(old) + difference).to(torch.bfloat16).view(torch.uint16).numpy()
        return found
    return _patched(body, old)


def _patch(words: Words, old: Words, changed: npt.NDArray[np.bool_]) -> bytes:
    order = _order(old)
    indices = np.flatnonzero(changed[order])
    places = order[indices]
    steps = (_by_value(words[places]) - _by_value(old[places])).view(np.int16).astype(np.int64)
    numbers = ((steps << 1) ^ (steps >> 63)) - 1
    index_part = encode_indices(indices, numel=len(words))
    # a set of indices whose gaps are the numbers
    step_part = encode_indices(np.cumsum(numbers + 1) - 1, numel=len(indices) * _NUM_PATTERNS)
    head = bytes([_PATCH]) + len(index_part).to_bytes(_SIZE_BYTES, "little")
    return head + index_part.tobytes() + step_part.tobytes()


def _patched(body: bytes | memoryview, old: Words) -> Words:
    _check(len(body) >= _SIZE_BYTES, "a patch without its sizes")
    split = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
    data = np.frombuffer(body, dtype=np.uint8)
    indices = decode_indices(data[_SIZE_BYTES:split], numel=len(old), name="patch")
    sums = decode_indices(data[split:], numel=len(indices) * _NUM_PATTERNS, name="patch")
    _check(len(sums) == len(indices), f"{len(sums)} steps for {len(indices)} words")
    numbers = np.diff(sums, prepend=-1)
    _check(bool((numbers < _NUM_PATTERNS).all()), "a step of more than 16 bits")
    steps = (numbers >> 1) ^ -(numbers & 1)
    places = _order(old)[indices]
    words = old.copy()
    words[places] = _from_value(_by_value(old[places]) + steps.astype(np.uint16))
    return words


def _dense(words: Words) -> bytes:
    return bytes([_DENSE]) + words.astype("<u2").tobytes()


def _planes(words: Words) -> bytes:
    # exponents need about 3 bits; matches are not searched for, since there are none to speak of
    squeeze = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    exponents = squeeze.compress(_exponents(words).tobytes()) + squeeze.flush()
    return bytes([_PLANES]) + exponents + ((words >> 8 & 0x80) | (words & 0x7F)).astype(np.uint8).tobytes()


def _from_planes(body: bytes | memoryview, count: int) -> Words:
    _check(len(body) >= count, f"{len(body)} bytes for {count} words in planes")
    split = len(body) - count
    stream = zlib.decompressobj()
    try:
        exponents = np.frombuffer(stream.decompress(body[:split], count + 1), dtype=np.uint8).astype(np.uint16)
    except zlib.error as error:
        raise PayloadError(f"patch: exponents that do not inflate: {error}") from error
    _check(stream.eof and not stream.unused_data and len(exponents) == count, f"{len(exponents)} exponents for {count}")
    rest = np.frombuffer(body[split:], dtype=np.uint8).astype(np.uint16)
    return ((rest & 0x80) << 8 | exponents << 7 | (rest & 0x7F)).astype(np.uint16)


def _smallest(*payloads: bytes) -> bytes:
    return min(payloads, key=len)


def _exponents(words: Words) -> npt.NDArray[np.uint8]:
    return (words >> 7).astype(np.uint8)


def _order(old: Words) -> npt.NDArray[np.int64]:
    # stable, hence the same on all hosts; numpy sorts bytes by radix
    return np.argsort(_exponents(old), kind="stable")


def _by_value(words: Words) -> Words:
    """Return the places of bit patterns in the order of their values."""
    return np.where(words & 0x8000, ~words, words | 0x8000)


def _from_value(numbers: Words) -> Words:
    return np.where(numbers & 0x8000, numbers ^ 0x8000, ~numbers)


def _floats(words: Words) -> torch.Tensor:
    return torch.from_numpy(words).view(torch.bfloat16).to(torch.float32)


def _check(is_fine: bool, what: str) -> None:
    if not is_fine:
        raise PayloadError(f"patch: {what}: never sent")
