"""Which elements the sparse codecs send, and how exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from thinwire.codecs import Codec, block_2bit, chunked_top_k, random_k, threshold, top_k
from thinwire.codecs import codebook2 as two_bits
from thinwire.codecs.base import ordered_sum
from thinwire.codecs.random_k import random_set
from thinwire.codecs.selection import largest, largest_by_sample, largest_of_rows, magnitude_bits
from thinwire.codecs.values import decode_values, encode_values
from thinwire.errors import NonFiniteError, PayloadError


def wide(numel: int, *, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))


def round_trip(codec: Codec, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, seed=seed), numel=tensor.numel())


def slow_largest(x: torch.Tensor, count: int) -> list[int]:
    order = sorted(range(x.numel()), key=lambda i: (-abs(x[i].item()), i))
    return sorted(i for i in order[:count] if x[i] != 0)


# -------------------------------------------------------------------- selection


@pytest.mark.parametrize("numel", [1, 2, 65, 1009])
@pytest.mark.parametrize("values", [3, 20, 10**6])
def test_the_largest_are_taken_and_of_equals_the_first(numel: int, values: int) -> None:
    for seed in range(5):
        x = torch.randint(-values, values + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
        for count in {1, max(1, numel // 10), max(1, numel // 2), numel}:
            assert largest(magnitude_bits(x), count=count).tolist() == slow_largest(x, count)


@pytest.mark.parametrize("kind", ["random", "ties", "one block", "few", "sorted"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_sample_that_speeds_the_exact_selection_up_does_not_show(kind: str, density: float) -> None:
    x = wide(200_003, seed=1)
    if kind == "ties":
        x = (x * 4).round()
    elif kind == "one block":  # the sample misses most of it or finds little else
        x[50:] = x[50:] * 1e-6
    elif kind == "few":
        x[torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.9995] = 0
    elif kind == "sorted":
        x = x.sort().values
    count = math.ceil(density * x.numel())
    stable = x.abs().sort(descending=True, stable=True).indices[:count]
    expected = stable[x[stable] != 0].sort().values
    assert torch.equal(largest(magnitude_bits(x), count=count), expected)


@pytest.mark.parametrize("kind", ["random", "ties", "one block", "few", "heavy", "zeros"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sampled_threshold_takes_four_fifths_to_all_of_the_wanted(kind: str, density: float, seed: int) -> None:
    x = wide(100_003, seed=seed, spread=6.0 if kind == "heavy" else 1.0)
    if kind == "ties":
        x = (x * 4).round()
    elif kind == "one block":
        x[50:] = x[50:] * 1e-6
    elif kind == "few":
        x[torch.rand(x.shape) < 0.9995] = 0
    elif kind == "zeros":
        x.zero_()
    count = math.ceil(density * x.numel())
    found = largest_by_sample(magnitude_bits(x), count=count, density=density, seed=seed)
    assert min(0.8 * count, int(x.count_nonzero())) <= found.numel() <= count
    assert (found[1:] > found[:-1]).all()
    dropped = x.abs().clone()
    dropped[found] = 0
    if found.numel():
        assert dropped.max() <= x[found].abs().min(), "what is taken is larger than what is not"


def test_the_sample_is_drawn_from_the_seed() -> None:
    codec, x = top_k(density=0.001, selection="sampled"), wide(300_000, seed=3)
    payloads = [codec.encode(x, seed=seed) for seed in range(8)]
    assert torch.equal(payloads[3], codec.encode(x, seed=3))
    assert len({bytes(payload.tolist()) for payload in payloads}) > 1


def test_rows_take_their_largest_and_of_equals_the_first() -> None:
    x = torch.randint(-4, 5, (50, 37), generator=torch.Generator().manual_seed(0)).float()
    x[7] = 0
    for count in (1, 5, 36, 37):
        found = largest_of_rows(magnitude_bits(x), count=count)
        for row, indices in zip(x, found, strict=True):
            order = sorted(range(37), key=lambda i: (-abs(row[i].item()), i))
            assert indices.tolist() == sorted(order[:count])


# ----------------------------------------------------------------------- values


@pytest.mark.parametrize("power", [-120, -60, -20, 0, 30, 100])
def test_scaled_float16_keeps_eleven_bits_at_every_magnitude(power: int) -> None:
    x = torch.randn(5, 100, dtype=torch.float64) * 2.0**power
    decoded = decode_values(encode_values(x.float(), values="float16"), count=100, values="float16", name="x")
    error = (decoded.double() - x.float().double()).abs()
    assert (error <= x.abs() * 2.0**-11 + x.abs().amax(dim=1, keepdim=True) * 2.0**-39 + 2.0**-126).all()


def test_scaled_float16_carries_float32_to_both_ends() -> None:
    x = torch.tensor([[3.40e38, -1.0], [2.0**-126, -(2.0**-126)], [2.0**-127, 2.0**-149], [0.0, -0.0]])
    decoded = decode_values(encode_values(x, values="float16"), count=2, values="float16", name="x")
    torch.testing.assert_close(
        decoded[:2], torch.tensor([[3.40e38, 0.0], [2.0**-126, -(2.0**-126)]]), rtol=5e-4, atol=0
    )
    assert decoded[2:].count_nonzero() == 0
    too_large = encode_values(torch.tensor([[3.4028e38, 1.0]]), values="float16")
    with pytest.raises(NonFiniteError, match=r"3\.4e38"):
        decode_values(too_large, count=2, values="float16", name="x")


def test_scaled_float16_refuses_a_number_that_is_never_sent() -> None:
    data = encode_values(torch.ones(1, 3), values="float16")
    for wrong in (2.0**15, math.nan, -math.inf):
        data[0, 3:5] = torch.tensor([wrong], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(PayloadError, match="never sent"):
            decode_values(data, count=3, values="float16", name="x")


def test_two_bits_decode_to_the_means_of_their_bins() -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 3 + torch.tensor([1.0, -1.0]).repeat(32)
    edge = 1.5 * x.square().mean().sqrt()
    decoded = two_bits.decode(two_bits.encode(x), count=64, name="x")
    for inside in (x < -edge, (x >= -edge) & (x < 0), (x >= 0) & (x < edge), x >= edge):
        assert inside.any()
        torch.testing.assert_close(decoded[inside], x[inside].mean().expand(int(inside.sum())), rtol=2**-8, atol=0)


def test_two_bits_keep_zero_zero() -> None:
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([1.0, -2.0, 3.0])
    assert two_bits.decode(two_bits.encode(x), count=64, name="x")[0, :4].tolist() == [2.0, -2.0, 2.0, 0.0]


@pytest.mark.parametrize("mean", [math.nan, -math.inf, 3e38])
def test_two_bits_refuse_a_mean_that_is_never_sent(mean: float) -> None:
    data = two_bits.encode(torch.ones(1, 8))
    data[0, 2:4] = torch.tensor([mean], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(PayloadError, match="never sent"):
        two_bits.decode(data, count=8, name="x")


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 1009, 2**16 + 1, 200_003])
def test_the_ordered_sum_is_a_sum(numel: int) -> None:
    x = torch.randn(2, numel, dtype=torch.float64)
    torch.testing.assert_close(ordered_sum(x), x.sum(dim=1, keepdim=True), rtol=1e-12, atol=1e-9)


# ----------------------------------------------------------------------- codecs


@pytest.mark.parametrize("values", ["float32", "bfloat16", "float16"])
def test_top_k_sends_its_share_rounded_up(values: str) -> None:
    x = wide(1000, seed=0)
    decoded = round_trip(top_k(density=0.0301, values=values), x)  # type: ignore[arg-type]
    kept = decoded.nonzero().view(-1)
    assert kept.tolist() == slow_largest(x, 31)
    precision = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[values]
    torch.testing.assert_close(decoded[kept], x[kept], rtol=precision, atol=0)


def test_top_k_of_everything_in_float32_loses_nothing() -> None:
    x = wide(777, seed=1)
    assert torch.equal(round_trip(top_k(density=1.0, values="float32"), x), x)


def test_top_k_refuses_more_elements_than_its_density() -> None:
    x = wide(1000, seed=2)
    payload = top_k(density=0.01).encode(x)
    with pytest.raises(PayloadError, match="top-k"):
        top_k(density=0.001).decode(payload, numel=1000)


def test_threshold_sends_what_reaches_it() -> None:
    x = torch.tensor([0.1, -0.5, 0.49999, 0.5, 0.0, 7.0])
    assert round_trip(threshold(value=0.5, values="float32"), x).tolist() == [0.0, -0.5, 0.0, 0.5, 0.0, 7.0]


def test_random_k_is_unbiased_when_scaled_and_draws_with_the_seed() -> None:
    codec, x = random_k(density=0.1, values="float32", scale=True), wide(50, seed=3)
    # 20,000 draws of each element, 20 at a time
    drawn = [round_trip(codec, x.repeat(20), seed=seed).reshape(20, 50) for seed in range(1000)]
    mean = torch.cat(drawn).mean(dim=0)
    # the deviation of an element's mean is |x| sqrt(9 / 20000)
    assert ((mean - x).abs() <= 5 * 3 / math.sqrt(20_000) * x.abs()).all()
    assert not torch.equal(codec.encode(x, seed=1), codec.encode(x, seed=2))


@pytest.mark.parametrize(("count", "numel"), [(0, 5), (1, 2), (500, 1000), (33_000, 3_300_000)])
def test_random_sets_are_distinct_ascending_and_even(count: int, numel: int) -> None:
    found = random_set(7, count=count, numel=numel)
    assert len(found) == count
    assert (np.diff(found) > 0).all()
    assert not count or (found[0] >= 0 and found[-1] < numel)
    if count > 400:
        assert abs(found.mean() / numel - 0.5) < 5 / math.sqrt(12 * count)


def test_random_k_refuses_a_seed_that_is_never_sent() -> None:
    payload = random_k().encode(torch.ones(100))
    payload[7] = 0x80
    with pytest.raises(PayloadError, match="2\\*\\*63 or more"):
        random_k().decode(payload, numel=100)


def test_chunked_top_k_sends_the_largest_of_each_chunk_and_a_share_of_the_last() -> None:
    x = wide(4096 * 3 + 100, seed=4)
    decoded = round_trip(chunked_top_k(values="float32"), x)
    for start in range(0, x.numel(), 4096):
        part = x[start : start + 4096]
        kept = slow_largest(part, 64 if part.numel() == 4096 else 2)
        assert decoded[start : start + 4096].nonzero().view(-1).tolist() == kept
        assert torch.equal(decoded[start : start + 4096][kept], part[kept])


def test_chunked_top_k_with_two_bits_is_the_size_of_sparse_loco() -> None:
    codec = chunked_top_k(values="codebook2")
    assert codec.payload_bytes(4096) == 64 * 12 // 8 + 64 * 2 // 8 + 4 * 2
    x = torch.randn(4096 * 4, generator=torch.Generator().manual_seed(5))
    exact = round_trip(chunked_top_k(values="float32"), x)
    coarse = round_trip(codec, x)
    assert torch.equal(coarse != 0, exact != 0)
    assert (coarse - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("wrong", ["order", "range"])
def test_chunked_top_k_refuses_indices_that_are_never_sent(wrong: str) -> None:
    codec = chunked_top_k(k=2, chunk=100, values="float32")  # indices of 7 bits
    payload = codec.encode(torch.randn(100))
    payload[0], payload[1] = (0x05, 0x02) if wrong == "order" else (0x05, 0x3F)  # 5, 4 and 5, 126
    with pytest.raises(PayloadError, match="do not ascend, or are 100 or more"):
        codec.decode(payload, numel=100)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: top_k(density=1.5), r"density must be in \(0, 1\], got 1.5; 0.001 to 0.01 is usual"),
        (lambda: random_k(density=0.0), r"density must be in \(0, 1\], got 0.0"),
        (lambda: top_k(values="float64"), "values must be one of float16, bfloat16, float32, got 'float64'"),
        (lambda: top_k(values="codebook2"), "got 'codebook2'"),
        (lambda: top_k(selection="random"), "selection must be 'exact' or 'sampled', got 'random'"),
        (lambda: threshold(value=-1.0), "value must be above 0 and finite, got -1.0"),
        (lambda: chunked_top_k(k=65, chunk=64), r"k must be 1 to chunk \(64\), got 65"),
        (lambda: chunked_top_k(chunk=0), "chunk must be 1 to"),
        (lambda: chunked_top_k(values="int8"), "codebook2, got 'int8'"),
    ],
)
def test_wrong_arguments_are_named(make, match) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_two_bits_of_every_element_are_the_rows_of_the_codebook_and_a_wrong_block_is_refused() -> None:
    codec = block_2bit(block=64)
    x = torch.randn(130)
    rows = torch.cat([x, torch.zeros(62)]).view(3, 64)
    assert torch.equal(codec.encode(x), two_bits.encode(rows).view(-1))
    assert codec.bits_per_element == 3.0 and block_2bit().bits_per_element == 2.0625
    for block in (0, 6, -4):
        with pytest.raises(ValueError, match=f"multiple of 4, got {block}"):
            block_2bit(block=block)
