"""Sets of indices as bytes: any set comes back, other bytes are refused, and few bits are spent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs.sparse_payload import (
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


def slow_bits(gaps: list[int], parameter: int) -> tuple[str, str]:
    low = "".join("".join(str(gap >> place & 1) for place in range(parameter)) for gap in gaps)
    return low, "".join("0" * (gap >> parameter) + "1" for gap in gaps)


def slow_encode(indices: Indices) -> bytes:
    """Write a set as the format says, bit by bit, with the best of all parameters."""
    gaps = (np.diff(indices, prepend=-1) - 1).tolist()
    written, low, high = len(indices).to_bytes(5, "little"), "", ""
    for start in range(0, len(gaps), 256):
        choices = [slow_bits(gaps[start : start + 256], parameter) for parameter in range(16)]
        sizes = [len(choice[0]) + len(choice[1]) for choice in choices]
        best = sizes.index(min(sizes))
        written, low, high = written + bytes([best]), low + choices[best][0], high + choices[best][1]
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
        assert (
            len(written)
            <= max_index_bytes(len(indices), numel=numel)
            <= HEADER_BYTES + math.ceil(numel / 8) + 1 + -(-len(indices) // 256)
        )


def test_the_bound_is_nearly_reached_by_the_worst_set() -> None:
    worst = np.arange(50, dtype=np.int64) * 20 + 19  # all gaps are as long as they can be together
    assert max_index_bytes(50, numel=1000) - len(encode_indices(worst, numel=1000)) <= 8


@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.1, 0.3, 0.7, 1.0])
def test_sets_are_the_bytes_of_the_slow_implementation(density: float) -> None:
    for seed in range(3):
        indices = random_indices(3000 + seed, density=density, seed=seed)
        indices = indices[(indices < 1000) | (indices % 7 == 0)]  # groups that differ
        assert bytes(encode_indices(indices, numel=3000 + seed)) == slow_encode(indices)


def test_where_many_are_chosen_a_bitmap_is_sent() -> None:
    indices = random_indices(800, density=0.6, seed=1)
    bitmap = bytes(sum((8 * byte + bit in indices) << bit for bit in range(8)) for byte in range(100)).rstrip(b"\0")
    header = len(indices).to_bytes(5, "little") + bytes(2)
    assert bytes(encode_indices(indices, numel=800)) == header + bitmap


@pytest.mark.parametrize(("density", "limit"), [(0.1, 1.03), (0.01, 1.01), (0.001, 1.02)])
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
    assert costs[0] < 0.7 * costs[1]


def damaged(written: Bytes, changes: dict[int, int]) -> Bytes:
    copy = written.copy()
    for place, byte in changes.items():
        copy[place] = byte
    return copy


# r = 4: the low parts 3, 2, 0 in 12 bits, the high parts 0, 4, 0
GOOD = encode_indices(index_set(3, 70, 71), numel=100)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (GOOD[:4], "header"),
        (GOOD[:5], "parameters"),
        (damaged(GOOD, {5: 60}), "parameters"),
        (damaged(GOOD, {5: 5}), "lead out of the tensor"),
        (damaged(GOOD, {0: 101}), "101 indices of 100"),
        (damaged(GOOD, {0: 4}), "3 gaps instead of 4"),
        (damaged(GOOD, {0: 2}), "3 gaps instead of 2"),
        (GOOD[:7], "3 gaps in 1 bytes"),
        (GOOD[:8], "0 gaps instead of 3"),
        (damaged(GOOD, {7: 128}), "fills up a byte"),
        (damaged(GOOD, {6: 0xFF, 7: 0x0F}), "lead out of the tensor"),
        (np.append(GOOD, np.uint8(0)), "bytes follow the last gap"),
    ],
)
def test_other_bytes_are_refused(data: Bytes, match: str) -> None:
    with pytest.raises(PayloadError, match=f"^x: .*{match}"):
        decode_indices(data, numel=100, name="x")


@given(data=st.binary(max_size=60), numel=st.integers(1, 10**12), count=st.integers(0, 9), parameter=st.integers(0, 50))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_an_ascending_set_or_refused(data: bytes, numel: int, count: int, parameter: int) -> None:
    body = count.to_bytes(5, "little") + bytes([parameter]) * bool(count) + data
    try:
        indices = decode_indices(np.frombuffer(body, dtype=np.uint8), numel=numel, name="x")
    except PayloadError:
        return
    assert (np.diff(indices) > 0).all()
    assert len(indices) == count
    assert not count or (indices[0] >= 0 and indices[-1] < numel)
