"""Robust training: gradients at every step, combined by a rule that a few bad replicas cannot steer.

    g_m = gradient of replica m;   g = rule(g_1, ..., g_M);   every replica steps its inner optimizer with g

Rules, each with the paper it is from: the Flag Aggregator (arXiv 2302.05865: the projection on the subspace that
reconstructs most of the gradients), the coordinate-wise median and trimmed mean (arXiv 1803.01498), Krum and Multi-Krum
(NeurIPS 2017), and the mean, which one replica can send anywhere. What a rule withstands: see the page on robust rules.

What we changed: the papers have a server that applies the rule; here every replica gathers all gradients and applies it
itself, to the same bits, so that there is no server to trust. Replicas do not compare hashes of their parameters, which
a bad replica could end a run by. It still can with a malformed message: that is an error which names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from thinwire.averaging.aggregation_rules import (
    Aggregate,
    CoordinateMedian,
    Mean,
    TrimmedMean,
    check_num_bad,
    check_stack,
    require,
)
from thinwire.averaging.exchange import AllGather
from thinwire.averaging.reductions import combine, gram
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.methods.robust.flag import FlagAggregator
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

Rule = Literal["flag", "mean", "median", "trimmed-mean", "krum", "multi-krum"]
_RULES: dict[str, Callable[[int], Aggregate]] = {
    "flag": lambda num_bad: FlagAggregator(),
    "mean": lambda num_bad: Mean(),
    "median": lambda num_bad: CoordinateMedian(),
    "trimmed-mean": lambda num_bad: TrimmedMean(num_bad=num_bad),
    "krum": lambda num_bad: Krum(num_bad=num_bad),
    "multi-krum": lambda num_bad: MultiKrum(num_bad=num_bad),
}

ABOUT = About(
    paper="arXiv 2302.05865",
    exchanged="gradients, at every step, joined by a robust rule",
    bits="32 (M - 1)",
    memory="M (everyone's gradients)",
    restrictions="rules need M large enough for num_bad; bytes grow with M",
)


@register(ABOUT)
def robust(*, rule: Rule = "flag", num_bad: int = 0, codec: Codec | None = None) -> Method:
    """Join gradients at every step by a rule that withstands bad replicas.

    Args:
        rule: Which one.
        num_bad: How many replicas may be bad; `flag` and `median` need no number.
        codec: The gradients' code; float32 by default.

    Raises:
        ValueError: The rule is unknown or a number out of its range; when training starts, also where there are too few
            replicas for `num_bad`.

    Example:
        >>> robust(rule="krum", num_bad=1).exchanges(5)[0].aggregate.name
        'krum'
    """
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}, got {rule!r}")
    exchange = AllGather(codec=float32() if codec is None else codec, aggregate=_RULES[rule](num_bad))
    return Method(
        name="robust",
        schedule=EveryStep(),
        view=Gradient(hash_interval=0),
        exchange=lambda num_replicas: exchange,
        update=lambda num_replicas: InnerStep(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Krum:
    """The one vector that is closest to its `M - num_bad - 2` nearest neighbours, by the sum of squared distances.

    Attributes:
        num_bad: How many replicas may be bad; the rule needs `2 num_bad + 3`.

    Raises:
        ValueError: `num_bad` is negative.

    Example:
        >>> Krum(num_bad=1)(torch.tensor([[1.0], [1.5], [2.0], [1.75], [1e9]]))
        tensor([1.7500])
    """

    name: ClassVar[str] = "krum"

    num_bad: int

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)

    def check(self, num_replicas: int) -> None:
        require(self, num_replicas, at_least=2 * self.num_bad + 3, num_bad=self.num_bad)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        check_stack(self, stack)
        return stack[_ranked(squared_distances(stack), num_bad=self.num_bad)[0]].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum:
    """The mean of the vectors with the `num_kept` best scores of `Krum`.

    Attributes:
        num_bad: How many replicas may be bad; the rule needs `2 num_bad + 3`.
        num_kept: How many vectors count, `M - num_bad - 2` by default, which is also the most.

    Raises:
        ValueError: `num_bad` is negative or `num_kept` below 1.

    Example:
        >>> MultiKrum(num_bad=1, num_kept=2)(torch.tensor([[1.0], [1.5], [2.0], [1.75], [1e9]]))
        tensor([1.6250])
    """

    name: ClassVar[str] = "multi-krum"

    num_bad: int
    num_kept: int | None = None

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)
        if self.num_kept is not None and self.num_kept < 1:
            raise ValueError(f"num_kept must be at least 1, got {self.num_kept}; leave it out for M - num_bad - 2")

    def check(self, num_replicas: int) -> None:
        require(self, num_replicas, at_least=2 * self.num_bad + 3, num_bad=self.num_bad)
        most = num_replicas - self.num_bad - 2
        if self.num_kept is not None and self.num_kept > most:
            raise ValueError(
                f"num_kept must be at most {most} for {num_replicas} replicas and num_bad={self.num_bad}, got "
                f"{self.num_kept}; lower it or leave it out"
            )

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        num_replicas = check_stack(self, stack)
        num_kept = num_replicas - self.num_bad - 2 if self.num_kept is None else self.num_kept
        kept = _ranked(squared_distances(stack), num_bad=self.num_bad)[:num_kept]
        return combine(stack, [float(replica in kept) for replica in range(num_replicas)], divisor=num_kept)


def squared_distances(stack: torch.Tensor) -> list[list[float]]:
    """Return the squared distance of each pair of rows, infinity where one of them is not finite.

    Example:
        >>> squared_distances(torch.tensor([[0.0], [3.0]]))
        [[0.0, 9.0], [9.0, 0.0]]
    """
    products = gram(stack)
    count = range(len(products))
    squares = [[products[a][a] + products[b][b] - 2 * products[a][b] for b in count] for a in count]
    return [[max(0.0, square) if math.isfinite(square) else math.inf for square in row] for row in squares]


def _ranked(distances: Sequence[Sequence[float]], *, num_bad: int) -> list[int]:
    """Sort replicas by Krum's score, the best first; Python's sort keeps the order of equals."""
    among = range(len(distances))
    num_near = len(among) - num_bad - 2

    def score(replica: int) -> tuple[float, list[float]]:
        near = sorted(distances[replica][other] for other in among if other != replica)
        # With one neighbour, two that are each other's nearest always have one score; the others then decide.
        return sum(near[:num_near]), near[num_near:]

    return sorted(among, key=score)
