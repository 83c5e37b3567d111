"""Eigenvectors of a small symmetric matrix, the same bits on every machine.

A library for linear algebra picks its own order of operations for each processor and number of threads; replicas
that use its last bits would drift apart. Jacobi's rotations on Python's floats round the same everywhere. They cost
about 10 ms for 15 rows and grow with the cube.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = list[list[float]]

_MOST_SWEEPS = 60
_PRECISION = 2.0**-53


def eigenvectors(matrix: Sequence[Sequence[float]]) -> tuple[list[float], Matrix]:
    """Decompose a symmetric matrix by cyclic Jacobi rotations.

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
    """Turn two axes so that their entry beside the diagonal becomes 0; tell whether there was anything to do."""
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
