"""The Flag Aggregator: project what the replicas sent on the subspace that reconstructs most of it (arXiv 2302.05865).

A subspace of a few dimensions is sought in which as many vectors as possible lie nearly whole. The share of a unit
vector `x_i` that the subspace `Y` holds is `v_i = |Y^T x_i|^2`; taken as a draw of the density Beta(1, 1/2), the
likelihood of all shares is largest where

    sum_i sqrt(1 - v_i) + pair_weight / (p (p - 1)) sum_{i != j} sqrt(1 - |Y^T (x_i - x_j)|^2 / |x_i - x_j|^2)

is smallest. The square root makes it a median of subspaces: a few vectors that do not fit pay once, and do not turn it.
The result is `(1 / p) Y Y^T sum_i x_i` times a length.

It is computed on the p by p matrix of inner products, in float64, in one fixed order, and with eigenvectors of our own
(see `gram`, `eigenvectors`): everything is a combination of the p vectors, so nothing larger is ever decomposed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from thinwire.averaging.aggregation_rules import check_stack
from thinwire.averaging.reductions import combine, gram

Matrix = list[list[float]]

_MOST_SWEEPS = 60
_PRECISION = 2.0**-53


def eigenvectors(matrix: Sequence[Sequence[float]]) -> tuple[list[float], Matrix]:
    """Decompose a symmetric matrix by cyclic Jacobi rotations, with the same bits on every machine.

    A linear algebra library picks its own order of operations for each processor and number of threads, so replicas
    that use its last bits would drift apart. Rotations on Python's floats round alike everywhere; they cost about
    10 ms for 15 rows and grow with the cube.

    Args:
        matrix: Square, symmetric, finite.

    Returns:
        The eigenvalues, the largest first, and for each of them its eigenvector of length 1. Of equal eigenvalues the
        one that ends at the lower place of the diagonal comes first.

    Example:
        >>> values, vectors = eigenvectors([[2.0, 1.0], [1.0, 2.0]])
        >>> [round(value, 12) for value in values]
        [3.0, 1.0]
        >>> [round(abs(entry), 6) for entry in vectors[0]]
        [0.707107, 0.707107]
    """
    size = len(matrix)
    work = [list(row) for row in matrix]
    vectors = [[float(row == column) for column in range(size)] for row in range(size)]
    for _ in range(_MOST_SWEEPS):
        num_rotations = 0
        for first in range(size):
            for second in range(first + 1, size):
                num_rotations += _rotate(work, vectors, first, second)
        if not num_rotations:
            break
    order = sorted(range(size), key=lambda place: -work[place][place])
    return [work[place][place] for place in order], [vectors[place] for place in order]


def _rotate(work: Matrix, vectors: Matrix, first: int, second: int) -> bool:
    """Rotate two axes so that their off-diagonal entry becomes 0; return whether that was needed."""
    beside = work[first][second]
    if abs(beside) <= _PRECISION * math.sqrt(abs(work[first][first] * work[second][second])) or abs(beside) < 1e-300:
        return False
    slope = (work[second][second] - work[first][first]) / (2 * beside)
    tangent = math.copysign(1.0, slope) / (abs(slope) + math.sqrt(slope * slope + 1))
    cosine = 1 / math.sqrt(tangent * tangent + 1)
    sine = tangent * cosine
    for row in work:
        row[first], row[second] = cosine * row[first] - sine * row[second], sine * row[first] + cosine * row[second]
    for rows in (work, vectors):
        pairs = list(zip(rows[first], rows[second], strict=True))
        rows[first] = [cosine * a - sine * b for a, b in pairs]
        rows[second] = [sine * a + cosine * b for a, b in pairs]
    work[first][second] = work[second][first] = 0.0
    return True


Lengths = Literal["median", "unit", "given"]
LENGTHS: tuple[Lengths, ...] = ("median", "unit", "given")

# Directions that hold less than this share of the vectors' squares are rounding errors.
_LEAST_SHARE = 1e-12
# Keeps the weight of a vector that the subspace holds whole from becoming infinite.
_SMOOTHING = 1e-7
_LEAST_PROGRESS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagAggregator:
    """Project the mean on the subspace that reconstructs most replicas, by iteratively reweighted least squares.

    Each iteration gives the vectors the weights `1 / sqrt(1 - v + 1e-7)` of the last subspace, and takes the leading
    eigenvectors of their weighted scatter; the first weights are all 1. It ends early when the objective stops falling.
    A vector that is 0, or not finite, counts as 0. Among vectors without any common direction (all orthogonal, of one
    length) every subspace is as good, and the replicas' order decides.

    The equations are recalled from the paper and agree with what its code, hamidralmasi/FlagAggregator at 1ae2c45,
    computes; the paper's text was not at hand, in particular on whether the sum takes the vectors with their lengths
    (`lengths="given"`) or as unit vectors. The code differs from what is here: it stops after one iteration from a
    random subspace; weights a pair by the square of `pair_weight / (p (p - 1))` and does not divide it by the pair's
    distance; and divides the sum of projected unit vectors by the number of columns, not of replicas, so that its
    step is `p / num_columns` times `lengths="unit"`.

    Attributes:
        num_columns: Dimensions of the subspace; `floor(M / 2) + 1` by default, the 8 of 15 of the paper's scripts.
        pair_weight: The paper's lambda: how much the differences of the replicas count.
        num_iterations: The most iterations.
        lengths: What a projected unit vector is multiplied by. `"median"`: the median length, so that the step scales
            with the vectors and no replica counts for more than another. `"unit"`: nothing. `"given"`: its own length,
            so that a single long vector of an honest direction, or of the opposite one, outweighs all others.

    Raises:
        ValueError: A number is out of its range, or `lengths` unknown.

    Example:
        >>> stack = torch.tensor([[1.0, 0.0, 0.1], [1.0, 0.1, 0.0], [0.0, 9.0, 9.0]])
        >>> FlagAggregator(num_columns=1)(stack)[0] > 0.6
        tensor(True)
    """

    name: ClassVar[str] = "flag"

    num_columns: int | None = None
    pair_weight: float = 0.0
    num_iterations: int = 20
    lengths: Lengths = "median"

    def __post_init__(self) -> None:
        if self.num_columns is not None and self.num_columns < 1:
            raise ValueError(f"num_columns must be at least 1, got {self.num_columns}; leave it out for M // 2 + 1")
        if not 0 <= self.pair_weight < math.inf:
            raise ValueError(f"pair_weight must be at least 0 and finite, got {self.pair_weight}; the paper tries 0-64")
        if self.num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1, got {self.num_iterations}; 5 to 20 are usual")
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {self.lengths!r}")

    def check(self, num_replicas: int) -> None:
        if num_replicas < max(1, self.num_columns or 1):
            raise ValueError(
                f"num_columns must be at most the number of replicas, got {self.num_columns} for "
                f"num_replicas={num_replicas}; lower it or leave it out"
            )

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        num_replicas = check_stack(self, stack)
        products = gram(stack)
        lengths = [math.sqrt(row[place]) if math.isfinite(row[place]) else 0.0 for place, row in enumerate(products)]
        scales = [1 / length if length else 0.0 for length in lengths]
        count = range(num_replicas)
        # a product beside a vector that is not finite is not either, and counts as 0 like that vector
        units = [
            [products[a][b] * scales[a] * scales[b] if scales[a] * scales[b] else 0.0 for b in count] for a in count
        ]
        values, vectors = eigenvectors(units)
        kept = [place for place in count if values[place] > _LEAST_SHARE * values[0]]
        if not kept:
            return combine(stack, [0.0] * num_replicas)
        # each unit vector in an orthonormal basis of what they span, and what its coordinates are of that basis
        points = [[math.sqrt(values[place]) * vectors[place][row] for place in kept] for row in count]
        duals = [[vectors[place][row] / math.sqrt(values[place]) for place in kept] for row in count]
        num_columns = self.num_columns or num_replicas // 2 + 1
        points, duals = _aligned(points, duals, flag=self, num_columns=num_columns)
        factors = {"median": [statistics.median_low(lengths)] * num_replicas, "unit": [1.0] * num_replicas}
        factor = factors.get(self.lengths, lengths)
        axes = range(min(num_columns, len(kept)))
        projected = [sum(factor[row] * points[row][axis] for row in count) for axis in axes]
        coefficients = [scales[row] * sum(duals[row][axis] * projected[axis] for axis in axes) for row in count]
        return combine(stack, coefficients, divisor=num_replicas)


def _aligned(points: Matrix, duals: Matrix, *, flag: FlagAggregator, num_columns: int) -> tuple[Matrix, Matrix]:
    """Turn the coordinates so that the first `num_columns` axes span the best subspace."""
    best, least = (points, duals), math.inf
    terms = _terms(points, pair_weight=flag.pair_weight)
    weights = [weight for weight, _ in terms]
    for _ in range(flag.num_iterations):
        axes = eigenvectors(_scatter([point for _, point in terms], weights))[1]
        # From turn to turn there is less left to turn, so each decomposition is cheaper than the one before.
        points, duals = _turned(points, axes), _turned(duals, axes)
        terms = _terms(points, pair_weight=flag.pair_weight)
        misses = [_square(point[num_columns:]) for _, point in terms]
        objective = sum(weight * math.sqrt(miss) for (weight, _), miss in zip(terms, misses, strict=True))
        if objective >= least * (1 - _LEAST_PROGRESS):
            break
        best, least = (points, duals), objective
        weights = [weight / math.sqrt(miss + _SMOOTHING) for (weight, _), miss in zip(terms, misses, strict=True)]
    return best


def _terms(points: Matrix, *, pair_weight: float) -> list[tuple[float, list[float]]]:
    """Return the unit vectors whose shares count, with their weight; a pair stands for both of its directions."""
    terms = [(1.0, point) for point in points if any(point)]
    if not pair_weight:
        return terms
    for number, first in enumerate(points):
        for second in points[:number]:
            between = [a - b for a, b in zip(first, second, strict=True)]
            length = math.sqrt(_square(between))
            if length > math.sqrt(_LEAST_SHARE):
                weight = 2 * pair_weight / (len(points) * (len(points) - 1))
                terms.append((weight, [entry / length for entry in between]))
    return terms


def _scatter(points: Sequence[Sequence[float]], weights: Sequence[float]) -> Matrix:
    size = len(points[0])
    rows = [[0.0] * size for _ in range(size)]
    for point, weight in zip(points, weights, strict=True):
        for place, entry in enumerate(point):
            scaled, row = weight * entry, rows[place]
            for other in range(place, size):
                row[other] += scaled * point[other]
    return [[rows[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]


def _turned(points: Matrix, axes: Matrix) -> Matrix:
    return [[sum(a * b for a, b in zip(point, axis, strict=True)) for axis in axes] for point in points]


def _square(point: Sequence[float]) -> float:
    return sum(entry * entry for entry in point)
