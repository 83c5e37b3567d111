"""Aggregation rules: plain and weighted means, and robust rules that work coordinate by coordinate.

A mean follows a single replica wherever it goes. The rules here stay near the honest replicas as long as only
`num_bad` of them send arbitrary values. Rules that compare whole vectors are in
`thinwire.methods.robust`. Every rule gives the same bits on every replica that holds the same stack, on a CPU or a GPU.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from thinwire.averaging.reductions import combine, mean_of, median_of, norms, over_sorted_columns


@runtime_checkable
class Aggregate(Protocol):
    """A rule that turns what the replicas sent into one vector. A frozen value without memory.

    Attributes:
        name: Short name, such as `"median"`.
    """

    __slots__ = ()

    @property
    def name(self) -> str: ...

    def check(self, num_replicas: int) -> None:
        """Refuse a number of replicas that the rule cannot work with; by default none.

        Raises:
            ValueError: There are too few replicas; the text names the limit and what to do.
        """
        require(self, num_replicas, at_least=1)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """Aggregate.

        Args:
            stack: float32, `(num_replicas, numel)`, the replicas in the order of their numbers.

        Returns:
            float32, `(numel,)`, on the stack's device.

        Raises:
            ValueError: The stack has another form, or `check` refuses its number of replicas.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Aggregate):
    """The plain mean, summed in float64 in the order of the replicas. One bad replica moves it anywhere.

    Example:
        >>> Mean()(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        tensor([2., 4.])
    """

    name: ClassVar[str] = "mean"

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        num_replicas = check_stack(self, stack)
        return combine(stack, [1.0] * num_replicas, divisor=num_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian(Aggregate):
    """The median of each coordinate; of an even number, the mean of the two central values (arXiv 1803.01498).

    It stays between honest values as long as fewer than half of the replicas are bad.

    Example:
        >>> CoordinateMedian()(torch.tensor([[1.0], [2.0], [1e9]]))
        tensor([2.])
    """

    name: ClassVar[str] = "median"

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        check_stack(self, stack)
        return over_sorted_columns(stack, median_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Aggregate):
    """The mean of each coordinate without its `num_bad` smallest and `num_bad` largest values (arXiv 1803.01498).

    Attributes:
        num_bad: How many replicas may be bad; the rule needs more than twice as many.

    Raises:
        ValueError: `num_bad` is negative.

    Example:
        >>> TrimmedMean(num_bad=1)(torch.tensor([[-1e9], [1.0], [2.0], [3.0]]))
        tensor([1.5000])
    """

    name: ClassVar[str] = "trimmed-mean"

    num_bad: int

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)

    def check(self, num_replicas: int) -> None:
        require(self, num_replicas, at_least=2 * self.num_bad + 1, num_bad=self.num_bad)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        kept = slice(self.num_bad, check_stack(self, stack) - self.num_bad)
        return over_sorted_columns(stack, lambda values: mean_of(values[kept]))


def check_stack(aggregate: Aggregate, stack: torch.Tensor) -> int:
    """Return how many replicas a stack holds.

    Raises:
        ValueError: It is not a stack, or not of a number of replicas that the rule can work with.
    """
    if stack.dim() != 2 or stack.dtype != torch.float32:
        raise ValueError(
            f"stack must be float32 of the shape (num_replicas, numel), got {stack.dtype} of {tuple(stack.shape)}; "
            f"decode the payloads and use torch.stack"
        )
    aggregate.check(stack.shape[0])
    return int(stack.shape[0])


def check_num_bad(num_bad: int) -> None:
    """Refuse a number of bad replicas that makes no sense.

    Raises:
        ValueError: It is negative.
    """
    if num_bad < 0:
        raise ValueError(f"num_bad must be at least 0, got {num_bad}; it is how many replicas may send anything")


def require(aggregate: Aggregate, num_replicas: int, *, at_least: int, num_bad: int = 0) -> None:
    """Refuse too few replicas.

    Raises:
        ValueError: There are fewer than `at_least`.
    """
    if num_replicas < at_least:
        remedy = "lower num_bad or add replicas" if num_bad else "add replicas"
        reason = f" for num_bad={num_bad}" if num_bad else ""
        raise ValueError(
            f"{aggregate.name} needs at least {at_least} replicas{reason}, got num_replicas={num_replicas}; {remedy}"
        )


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
class WeightedMean(Aggregate):
    """The mean with a weight for each replica.

    It does not withstand a vector of ordinary length that points the wrong way; `thinwire.methods.robust` does.

    Attributes:
        weights: One for each replica in their order, not negative, not all zero; such as `token_weight`.

    Raises:
        ValueError: A weight is negative or not finite, or all are zero.

    Example:
        >>> WeightedMean(weights=(1.0, 3.0))(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([0.2500, 0.7500])
    """

    name: ClassVar[str] = "weighted-mean"

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or not sum(self.weights) > 0:
            raise ValueError(
                f"weights must be finite, at least 0 and not all 0, got {self.weights}; use the tokens that each "
                f"replica saw"
            )

    def check(self, num_replicas: int) -> None:
        if num_replicas != len(self.weights):
            raise ValueError(
                f"weights must have one entry for each of {num_replicas} replicas, got {len(self.weights)}; make the "
                f"rule anew when the members of a round change"
            )

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        check_stack(self, stack)
        return combine(stack, self.weights, divisor=sum(self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianNormClip(Aggregate):
    """Shorten every vector that is longer than the median length to that length, then average.

    This is the safeguard of SparseLoCo's public run (arXiv 2508.15706). Of an even number of lengths the median is the
    lower central one. A vector with infinity or NaN counts as infinitely long and adds nothing.

    Example:
        >>> MedianNormClip()(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-9e9, 0.0]]))
        tensor([-0.3333,  0.6667])
    """

    name: ClassVar[str] = "median-norm-clip"

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        num_replicas = check_stack(self, stack)
        lengths = norms(stack)
        limit = statistics.median_low(lengths)
        scales = [1.0 if norm <= limit < math.inf else limit / norm if norm < math.inf else 0.0 for norm in lengths]
        return combine(stack, scales, divisor=num_replicas)
