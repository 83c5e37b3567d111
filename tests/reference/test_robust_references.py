"""Each robust rule against a slow and obvious one, written from its paper with loops in float64, and all on a task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.attacks import ATTACKS, Attack, attack
from thinwire.averaging.aggregation_rules import (
    Aggregate,
    CoordinateMedian,
    Mean,
    MedianNormClip,
    TrimmedMean,
    WeightedMean,
    token_weight,
)
from thinwire.methods.robust import Krum, MultiKrum
from thinwire.methods.robust.flag import FlagAggregator

Rows = list[list[float]]


def sent(num_replicas: int, numel: int, *, seed: int = 0, num_bad: int = 0) -> torch.Tensor:
    """Make vectors with a common direction, ties, and far outliers among them."""
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(numel, generator=generator) + torch.randn(num_replicas, numel, generator=generator)
    stack[:num_bad] *= 50
    return (stack * 64).round() / 64 if seed % 2 else stack


def by_columns(rule: Callable[[list[float]], float]) -> Callable[[Rows], list[float]]:
    return lambda rows: [rule([row[column] for row in rows]) for column in range(len(rows[0]))]


def average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def trimmed(values: Sequence[float], num_bad: int) -> float:
    rest = sorted(values)
    for _ in range(num_bad):
        rest.remove(max(rest))
        rest.remove(min(rest))
    return average(rest)


def square_distance(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(first, second, strict=True))


def krum_scores(rows: Rows, among: Sequence[int], num_bad: int) -> dict[int, tuple[float, list[float], int]]:
    scores = {}
    for one in among:
        distances = sorted(square_distance(rows[one], rows[other]) for other in among if other != one)
        count = max(1, len(among) - num_bad - 2)
        scores[one] = (math.fsum(distances[:count]), distances[count:], one)
    return scores


def slow_krum(rows: Rows, num_bad: int, num_kept: int) -> list[float]:
    scores = krum_scores(rows, range(len(rows)), num_bad)
    kept = sorted(scores, key=lambda one: scores[one])[:num_kept]
    return [average([rows[one][column] for one in kept]) for column in range(len(rows[0]))]


def slow_clip(rows: Rows) -> list[float]:
    lengths = [math.sqrt(math.fsum(value**2 for value in row)) for row in rows]
    limit = statistics.median_low(lengths)
    scaled = [[value * min(1.0, limit / length) for value in row] for row, length in zip(rows, lengths, strict=True)]
    return by_columns(average)(scaled)


def slow_weighted(rows: Rows, weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return by_columns(lambda values: math.fsum(map(math.prod, zip(weights, values, strict=True))) / total)(rows)


def slow_flag(rows: Rows, *, num_columns: int, pair_weight: float, lengths: str, num_iterations: int) -> list[float]:
    """Decompose the columns themselves, which are as long as the vectors, as the paper's code does."""
    stack = torch.tensor(rows, dtype=torch.float64)
    norms = stack.norm(dim=1)
    units = stack / norms[:, None]
    count = len(rows)
    columns, factors = [*units], [1.0] * count
    for first in range(count):
        for second in range(count):
            if first != second and pair_weight:
                columns.append((units[first] - units[second]) / (units[first] - units[second]).norm())
                factors.append(pair_weight / (count * (count - 1)))
    weights, best, least = list(factors), None, math.inf
    for _ in range(num_iterations):
        scaled = torch.stack([math.sqrt(weight) * column for weight, column in zip(weights, columns, strict=True)], 1)
        basis = torch.linalg.svd(scaled, full_matrices=False)[0][:, :num_columns]
        misses = [max(0.0, 1 - float((basis.T @ column).square().sum())) for column in columns]
        objective = sum(factor * math.sqrt(miss) for factor, miss in zip(factors, misses, strict=True))
        if objective >= least * (1 - 1e-6):
            break
        best, least = basis, objective
        weights = [factor / math.sqrt(miss + 1e-7) for factor, miss in zip(factors, misses, strict=True)]
    assert best is not None
    scale = {"unit": torch.ones(count), "given": norms, "median": torch.full((count,), float(norms.median()))}[lengths]
    mean = (units * scale[:, None]).mean(dim=0)
    values: list[float] = (best @ (best.T @ mean)).tolist()
    return values


WEIGHTS = tuple(token_weight(num_tokens=100 * (replica + 1), num_steps=replica % 3 + 1) for replica in range(15))
REFERENCES: list[tuple[Aggregate, Callable[[Rows], list[float]]]] = [
    (Mean(), by_columns(average)),
    (CoordinateMedian(), by_columns(statistics.median)),
    (TrimmedMean(num_bad=3), by_columns(lambda values: trimmed(values, 3))),
    (TrimmedMean(num_bad=7), by_columns(lambda values: trimmed(values, 7))),
    (Krum(num_bad=3), lambda rows: slow_krum(rows, 3, 1)),
    (MultiKrum(num_bad=3), lambda rows: slow_krum(rows, 3, 10)),
    (MultiKrum(num_bad=2, num_kept=4), lambda rows: slow_krum(rows, 2, 4)),
    (MedianNormClip(), slow_clip),
    (WeightedMean(weights=WEIGHTS), lambda rows: slow_weighted(rows, WEIGHTS)),
]


@pytest.mark.parametrize(("num_bad", "seed"), [(0, 0), (3, 0), (3, 1), (7, 3)])
@pytest.mark.parametrize(("rule", "reference"), REFERENCES, ids=lambda value: getattr(value, "name", ""))
def test_a_rule_is_its_paper(
    rule: Aggregate, reference: Callable[[Rows], list[float]], num_bad: int, seed: int
) -> None:
    for numel in (1, 2, 101):
        stack = sent(15, numel, seed=seed, num_bad=num_bad)
        expected = torch.tensor(reference(stack.double().tolist()), dtype=torch.float64)
        torch.testing.assert_close(rule(stack).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", ["median", "unit", "given"])
@pytest.mark.parametrize(("num_columns", "pair_weight"), [(1, 0.0), (3, 0.0), (8, 0.0), (2, 4.0), (4, 64.0)])
def test_the_flag_aggregator_is_what_a_decomposition_of_the_whole_vectors_gives(
    num_columns: int, pair_weight: float, lengths: str
) -> None:
    # 5 rounds: the fixed point itself is reached by both on a path of their own where two subspaces are nearly as good
    rule = FlagAggregator(num_columns=num_columns, pair_weight=pair_weight, lengths=lengths, num_iterations=5)  # type: ignore[arg-type]
    for numel, num_bad in ((101, 0), (101, 3), (3, 0)):
        stack = sent(15, numel, num_bad=num_bad)
        expected = slow_flag(
            stack.double().tolist(),
            num_columns=num_columns,
            pair_weight=pair_weight,
            lengths=lengths,
            num_iterations=5,
        )
        torch.testing.assert_close(
            rule(stack).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )


ROBUST: list[Aggregate] = [
    CoordinateMedian(),
    TrimmedMean(num_bad=3),
    Krum(num_bad=3),
    MultiKrum(num_bad=3),
    MedianNormClip(),
    FlagAggregator(num_columns=4, num_iterations=4),
]
every_robust_rule = pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)


def distance_left(rule: Aggregate, name: Attack | None, *, strength: float | None = None) -> float:
    """Descend a quadratic with 12 honest gradients and 3 attackers; return the distance left of an initial 1."""
    generator = torch.Generator().manual_seed(5)
    numel, num_bad = 40, 3
    slopes = torch.linspace(0.5, 1.5, numel)
    optimum = torch.randn(numel, generator=generator)
    point = torch.zeros(numel)
    for step in range(40):
        noise = 0.3 * torch.randn(12 + num_bad, numel, generator=generator)
        gradients = slopes * (point - optimum) + noise
        if name is not None:
            gradients[:num_bad] = attack(name, gradients[num_bad:], num_bad=num_bad, strength=strength, seed=step)
        point = point - 0.4 * rule(gradients)
    return float((point - optimum).norm() / optimum.norm())


@every_robust_rule
@pytest.mark.parametrize("name", ATTACKS)
def test_a_robust_rule_comes_near_the_optimum_under_every_attack(rule: Aggregate, name: Attack) -> None:
    # what the noise alone leaves is 0.03 to 0.1, and Krum, which uses one vector of 15, is the noisiest
    assert distance_left(rule, name) < 0.3


@every_robust_rule
def test_a_robust_rule_does_not_care_how_strong_a_coarse_attack_is(rule: Aggregate) -> None:
    assert distance_left(rule, "reverse", strength=1e4) < 0.2
    assert distance_left(rule, "fall-of-empires", strength=1e4) < 0.2


def test_the_mean_diverges_under_a_strong_reversal_though_not_without_it() -> None:
    assert distance_left(Mean(), None) < 0.1
    # 12 honest and 3 times -10: the mean points the wrong way
    assert distance_left(Mean(), "reverse", strength=10.0) > 1e3


def test_keeping_the_given_lengths_makes_the_flag_aggregator_as_weak_as_the_mean_against_long_vectors() -> None:
    assert distance_left(FlagAggregator(num_iterations=4), "reverse", strength=10.0) < 0.1
    given = FlagAggregator(num_columns=4, num_iterations=4, lengths="given")
    assert distance_left(given, "reverse", strength=10.0) > 1e3


def test_only_the_lengths_are_limited_by_clipping() -> None:
    """Seven of 15 that point the wrong way with an ordinary length outvote clipping nearly, and the median not."""
    honest = torch.ones(8, 5)
    stack = torch.cat([honest, -honest[:7]])
    assert torch.equal(CoordinateMedian()(stack), torch.ones(5))
    torch.testing.assert_close(MedianNormClip()(stack), torch.full((5,), 1 / 15))


def test_a_replica_without_tokens_may_send_anything() -> None:
    stack = torch.tensor([[2.0, 0.0], [float("nan"), 1.0]])
    assert torch.equal(WeightedMean(weights=(3.0, 0.0))(stack), stack[0])
