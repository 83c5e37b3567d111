"""Means with weights and lengths: for replicas that did unequal work, and against vectors that are too long.

Neither rule withstands a vector that points the wrong way with an ordinary length; `robust`, `krum` and `flag` do.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from thinwire.averaging.aggregation_rules import check_stack, require
from thinwire.averaging.gram import combine, norms

# Directions that cancel to less than this share leave nothing but rounding errors of float32.
_LEAST_DIRECTION = 2.0**-20


def token_weight(*, num_tokens: int, num_steps: int) -> float:
    """Return a replica's weight: the tokens that it saw, times its tokens a step (arXiv 2604.21428).

    Args:
        num_tokens: Tokens since the last round.
        num_steps: Inner steps since the last round.

    Raises:
        ValueError: A number is negative, or there are tokens without steps.

    Example:
        >>> token_weight(num_tokens=1000, num_steps=10)
        100000.0
    """
    if num_tokens < 0 or num_steps < 0 or (num_tokens and not num_steps):
        raise ValueError(
            f"num_tokens must be at least 0 and come from at least one step, got num_tokens={num_tokens} in "
            f"num_steps={num_steps}; give a replica that did nothing 0 for both"
        )
    return num_tokens * num_tokens / num_steps if num_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedMean:
    """The mean with a weight for each replica, and, if wished, with the length of a single vector.

    Vectors that point in unlike directions have a mean that is shorter than each of them, by the square root of their
    number if they are orthogonal. So the step would change whenever another number of replicas makes the quorum.
    With `preserve_norm` the result is the weighted mean of the lengths times the direction of the weighted mean of the
    unit vectors: `(sum w_i |v_i| / sum w_i) phi(sum w_i phi(v_i))` with `phi(v) = v / |v|` and `phi(0) = 0`
    ("radial-directional averaging" of Decoupled DiLoCo, arXiv 2604.21428; read in public code that follows it, not in
    the paper). There it is applied tensor by tensor, and not to embeddings: whoever wants that calls this once for
    each tensor. Where the directions cancel, the plain weighted mean is the result.

    Attributes:
        weights: One for each replica in their order, not negative, not all zero; such as `token_weight`.
        preserve_norm: Whether the length is averaged on its own.

    Raises:
        ValueError: A weight is negative or not finite, or all are zero.

    Example:
        >>> WeightedMean(weights=(1.0, 3.0))(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([0.2500, 0.7500])
        >>> WeightedMean(weights=(1.0, 1.0), preserve_norm=True)(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([0.7071, 0.7071])
    """

    weights: tuple[float, ...]
    preserve_norm: bool = False

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or not sum(self.weights) > 0:
            raise ValueError(
                f"weights must be finite, at least 0 and not all 0, got {self.weights}; use the tokens that each "
                f"replica saw"
            )

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "norm-preserving-mean" if self.preserve_norm else "weighted-mean"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; there must be as many replicas as weights."""
        if num_replicas != len(self.weights):
            raise ValueError(
                f"weights must have one entry for each of {num_replicas} replicas, got {len(self.weights)}; make the "
                f"rule anew when the members of a round change"
            )

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        check_stack(self, stack)
        total = sum(self.weights)
        if self.preserve_norm:
            lengths = norms(stack)
            shares = [weight / total for weight in self.weights]
            length = sum(share * norm for share, norm in zip(shares, lengths, strict=True) if share)
            units = [share / norm if norm else 0.0 for share, norm in zip(shares, lengths, strict=True)]
            direction = combine(stack, units)
            size = norms(direction[None])[0]
            if _LEAST_DIRECTION < size < math.inf and length < math.inf:
                return combine(direction[None], [length / size])
        return combine(stack, self.weights, divisor=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianNormClip:
    """Shorten every vector that is longer than the median length to that length, then average.

    This is the safeguard of SparseLoCo's public run (arXiv 2508.15706). Of an even number of lengths the median is the
    lower of the two in the middle. A vector with infinity or NaN counts as infinitely long and adds nothing.

    Example:
        >>> MedianNormClip()(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-9e9, 0.0]]))
        tensor([-0.3333,  0.6667])
    """

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "median-norm-clip"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; one replica is enough, and fewer than half may send too long a vector."""
        require(self, num_replicas, at_least=1)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        num_replicas = check_stack(self, stack)
        lengths = norms(stack)
        limit = statistics.median_low(lengths)
        scales = [1.0 if norm <= limit < math.inf else limit / norm if norm < math.inf else 0.0 for norm in lengths]
        return combine(stack, scales, divisor=num_replicas)
