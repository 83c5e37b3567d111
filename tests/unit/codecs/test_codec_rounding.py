"""Rounding at random: the bits it draws from, and that it is unbiased."""

from __future__ import annotations

import math

import torch

from thinwire.codecs import e3m0
from thinwire.codecs.base import Codec
from thinwire.codecs.e3m0 import _stochastic, counter_keys, random_bits


def wide(numel: int, *, seed: int, spread: float = 6.0) -> torch.Tensor:
    """Return normal numbers times log-normal ones: elements of a block differ by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator)
    return normal * torch.exp(spread * torch.randn(numel, generator=generator))


def round_trip(codec: Codec, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, seed=seed), numel=tensor.numel())


def slow_random_bits(keys: list[int], count: int) -> list[int]:
    """Return what `random_bits` should, by Python's integers."""
    first, second, start = (key & 0xFFFFFFFF for key in keys)
    result = []
    for index in range(count):
        word = ((index + start) & 0xFFFFFFFF) ^ first
        word = ((word ^ word >> 15) * 0x6C8E9CF5) & 0xFFFFFFFF
        word ^= second
        word = ((word ^ word >> 13) * 0x3C6EF36B) & 0xFFFFFFFF
        word = ((word ^ word >> 16) * 0x2545F491) & 0xFFFFFFFF
        result.append((word ^ word >> 16) >> 9)
    return result


def test_random_bits_are_those_of_plain_integers() -> None:
    for seed, start in ((0, 0), (1, 5), (-3, 2**31 - 7), (2**70, 2**32 - 3)):
        keys = counter_keys(seed, start=start, device=torch.device("cpu"))
        assert random_bits(keys, count=40).tolist() == slow_random_bits(keys.tolist(), 40)


def test_random_bits_do_not_depend_on_where_a_stream_is_entered() -> None:
    cpu = torch.device("cpu")
    whole = random_bits(counter_keys(9, start=0, device=cpu), count=1000)
    assert torch.equal(whole[640:], random_bits(counter_keys(9, start=640, device=cpu), count=360))


def test_random_bits_are_uniform_and_streams_are_uncorrelated() -> None:
    count, cpu = 1 << 18, torch.device("cpu")
    streams = torch.stack([random_bits(counter_keys(s, start=0, device=cpu), count=count) for s in range(6)])
    for bit in range(23):  # each a mean of 6 * 2**18 coin flips: five standard deviations
        assert abs(((streams >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(streams.numel())
    centred = (streams.double() / 2**23 - 0.5) * math.sqrt(12)
    correlations = centred @ centred.T / count
    assert (correlations - torch.eye(6)).abs().max() < 5 / math.sqrt(count)
    for lag in (1, 32, 64):
        assert (centred[:, lag:] * centred[:, :-lag]).mean().abs() < 5 / math.sqrt(streams.numel())


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.cat([torch.tensor([1.0]), torch.logspace(-4, 0, 30), -torch.logspace(-3.3, -0.01, 33)])
    draws = 2000
    total, squares = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    codec = e3m0("stochastic")
    for seed in range(draws):
        values = round_trip(codec, x, seed=seed).double()
        total += values
        squares += values**2
    mean = total / draws
    standard_error = (squares / draws - mean**2).clamp(min=0).sqrt() / math.sqrt(draws)
    # five standard errors for each of 64 elements; 1e-9 where an element is a value of the code and never moves
    assert ((mean - x.double()).abs() <= 5 * standard_error + 1e-9).all()


def test_stochastic_rounding_goes_to_one_of_the_two_neighbours() -> None:
    x = wide(64 * 300, seed=8, spread=2.0)
    y = round_trip(e3m0("stochastic"), x, seed=4)
    assert ((y == 0) | (y.sign() == x.sign())).all()
    peak = x.view(-1, 64).abs().amax(1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(peak.double()))).expand(-1, 64).reshape(-1)
    magnitude = x.abs().double()
    below = torch.exp2(torch.floor(torch.log2(magnitude)))
    is_small = magnitude < scale / 64
    low = torch.where(is_small, torch.zeros_like(below), below)
    high = torch.where(is_small, scale / 64, torch.where(magnitude == below, below, 2 * below))
    y = y.abs().double()
    assert ((y == low) | (y == high)).all()


def test_stochastic_rounding_draws_by_seed() -> None:
    codec, x = e3m0("stochastic"), wide(10_000, seed=2, spread=1.0)
    assert torch.equal(codec.encode(x, seed=5), codec.encode(x, seed=5))
    assert not torch.equal(codec.encode(x, seed=5), codec.encode(x, seed=6))


def test_stochastic_rounding_leaves_values_of_the_code_as_they_are() -> None:
    x = round_trip(e3m0(), wide(10_000, seed=2, spread=1.0))
    assert torch.equal(round_trip(e3m0("stochastic"), x, seed=11), x)


def test_stochastic_draws_do_not_depend_on_the_size_of_a_chunk() -> None:
    x = wide(2**17 + 1000, seed=1)
    rows = torch.empty((x.numel() + 63) // 64, 33, dtype=torch.uint8)
    padded = torch.cat([x, torch.zeros(-x.numel() % 64)]).view(-1, 64)
    _stochastic(padded, rows, counter_keys(7, start=0, device=x.device))
    assert torch.equal(e3m0("stochastic").encode(x, seed=7), rows.view(-1))
