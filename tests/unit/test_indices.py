"""Sets of indices as bytes: any set comes back, other bytes are refused, and few bits are spent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs.indices import (
    HEADER_BYTES,
    Bytes,
    Indices,
    decode_indices,
    encode_indices,
    expected_bits_per_index,
    max_index_bytes,
)
from thinwire.errors import PayloadError


def index_set(*indices: int) -> Indices:
    return np.array(indices, dtype=np.int64)


def random_indices(numel: int, *, density: float, seed: int) -> Indices:
    return np.flatnonzero(np.random.default_rng(seed).random(numel) < density)


def entropy_bits_per_index(density: float) -> float:
    rest = 1 - density
    return -math.log2(density) - rest * math.log2(rest) / density


def slow_gaps(indices: Indices, parameter: int) -> bytes:
    """Write a set's Rice-coded gaps as the format says, bit by bit."""
    low, high, before = "", "", -1
    for index in indices.tolist():
        gap, before = index - before - 1, index
        low += "".join(str(gap >> place & 1) for place in range(parameter))
        high += "0" * (gap >> parameter) + "1"
    written = bytes([parameter]) + len(indices).to_bytes(5, "little")
    for bits in (low, high):
        bits += "0" * (-len(bits) % 8)
        written += bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))
    return written


@given(numel=st.integers(1, 3000), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_set_comes_back_within_its_bound(numel: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 400)))
    indices = index_set(*sorted(chosen))
    written = encode_indices(indices, numel=numel)
    assert np.array_equal(decode_indices(written, numel=numel, name="x"), indices)
    for count in (len(indices), min(numel, len(indices) + 1), numel):
        assert len(written) <= max_index_bytes(count, numel=numel)


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 64, 1009])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_every_density_comes_back_within_its_bound(numel: int, density: float) -> None:
    for seed in range(20):
        indices = random_indices(numel, density=density, seed=seed)
        written = encode_indices(indices, numel=numel)
        assert np.array_equal(decode_indices(written, numel=numel, name="x"), indices)
        assert len(written) <= max_index_bytes(len(indices), numel=numel) <= HEADER_BYTES + math.ceil(numel / 8) + 1


def test_the_bound_is_nearly_reached_by_the_worst_set() -> None:
    worst = np.arange(50, dtype=np.int64) * 20 + 19  # all gaps are as long as they can be together
    assert max_index_bytes(50, numel=1000) - len(encode_indices(worst, numel=1000)) <= 8


def test_gaps_are_the_bytes_of_the_slow_implementation() -> None:
    for seed, density in enumerate((0.001, 0.01, 0.05, 0.1)):
        indices = random_indices(5000, density=density, seed=seed)
        written = encode_indices(indices, numel=5000)
        assert bytes(written) == slow_gaps(indices, int(written[0]))
        sizes = [len(slow_gaps(indices, parameter)) for parameter in range(16)]
        assert len(written) <= min(sizes) + 1, "the best parameter, but for the ends at a byte"


def test_where_many_are_chosen_a_bitmap_is_sent() -> None:
    indices = random_indices(800, density=0.6, seed=1)
    bitmap = bytes(sum((8 * byte + bit in indices) << bit for bit in range(8)) for byte in range(100)).rstrip(b"\0")
    header = bytes([0]) + len(indices).to_bytes(5, "little")
    assert bytes(encode_indices(indices, numel=800)) == header + bitmap


@pytest.mark.parametrize(("density", "limit"), [(0.1, 1.02), (0.01, 1.01), (0.001, 1.02)])
def test_random_positions_cost_little_more_than_their_entropy(density: float, limit: float) -> None:
    indices = random_indices(4_000_000, density=density, seed=3)
    bits = 8 * len(encode_indices(indices, numel=4_000_000)) / len(indices)
    assert 1 < bits / entropy_bits_per_index(len(indices) / 4_000_000) < limit
    assert bits == pytest.approx(expected_bits_per_index(density), rel=0.01)


def test_clustered_positions_cost_less_than_random_ones() -> None:
    rows = np.random.default_rng(4).choice(4000, 40, replace=False) * 1000  # 40 rows of 4000 hold all positions
    clustered = np.sort(np.concatenate([row + random_indices(1000, density=0.5, seed=int(row)) for row in rows]))
    spread = random_indices(4_000_000, density=len(clustered) / 4_000_000, seed=5)
    costs = [len(encode_indices(found, numel=4_000_000)) / len(found) for found in (clustered, spread)]
    assert costs[0] < 0.5 * costs[1]


def damaged(written: Bytes, changes: dict[int, int]) -> Bytes:
    copy = written.copy()
    for place, byte in changes.items():
        copy[place] = byte
    return copy


GOOD = encode_indices(index_set(3, 70), numel=100)  # r = 5: 67, 0 are low parts of 5 bits, 9 is the unary part


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (GOOD[:5], "header"),
        (damaged(GOOD, {0: 60}), "parameter 60 is too large"),
        (damaged(GOOD, {0: 7}), "parameter 7 is too large"),
        (damaged(GOOD, {1: 101}), "101 indices of 100"),
        (damaged(GOOD, {1: 3}), "2 gaps instead of 3"),
        (damaged(GOOD, {1: 1}), "2 gaps instead of 1"),
        (GOOD[:7], "2 gaps take more than 1 bytes"),
        (GOOD[:8], "0 gaps instead of 2"),
        (damaged(GOOD, {7: 128}), "fills up a byte"),
        (damaged(GOOD, {8: 0x81}), "lead out of the tensor"),
        (damaged(GOOD, {6: 0xFF, 7: 3}), "lead out of the tensor"),
        (np.append(GOOD, np.uint8(0)), "bytes follow the last gap"),
    ],
)
def test_other_bytes_are_refused(data: Bytes, match: str) -> None:
    with pytest.raises(PayloadError, match=f"^x: .*{match}"):
        decode_indices(data, numel=100, name="x")


@given(data=st.binary(max_size=60), numel=st.integers(1, 10**12), count=st.integers(0, 40), parameter=st.integers(0, 9))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_an_ascending_set_or_refused(data: bytes, numel: int, count: int, parameter: int) -> None:
    body = bytes([parameter]) + count.to_bytes(5, "little") + data
    try:
        indices = decode_indices(np.frombuffer(body, dtype=np.uint8), numel=numel, name="x")
    except PayloadError:
        return
    assert (np.diff(indices) > 0).all()
    assert len(indices) == count
    assert not count or (indices[0] >= 0 and indices[-1] < numel)
