"""How many vectors become one: the promise of a rule, the mean, and robust rules that look at one coordinate at a time.

A mean follows a single replica wherever it goes. The rules here stay near the honest replicas as long as only
`num_bad` of them send nonsense or lies. Rules that compare whole vectors are in `krum` and `flag`, weighted means in
`weighted`. Every rule gives the same bits on every replica that holds the same stack, on a CPU or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from thinwire.averaging.coordinate_sort import mean_around, mean_of, middle_of, over_sorted_columns
from thinwire.averaging.gram import combine


@runtime_checkable
class Aggregate(Protocol):
    """A rule that turns what the replicas sent into one vector. A frozen value without memory.

    Attributes:
        name: Short name, such as `"median"`.
    """

    @property
    def name(self) -> str:
        """Short name."""
        ...

    def check(self, num_replicas: int) -> None:
        """Refuse a number of replicas that the rule cannot work with.

        Raises:
            ValueError: There are too few replicas; the text names the limit and what to do.
        """
        ...

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """Aggregate.

        Args:
            stack: float32, `(num_replicas, numel)`, the replicas in the order of their numbers.

        Returns:
            float32, `(numel,)`, on the stack's device.

        Raises:
            ValueError: The stack has another form, or `check` refuses its number of replicas.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The plain mean, summed in float64 in the order of the replicas. One bad replica moves it anywhere.

    Example:
        >>> Mean()(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        tensor([2., 4.])
    """

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "mean"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; one replica is enough."""
        require(self, num_replicas, at_least=1)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        num_replicas = check_stack(self, stack)
        return combine(stack, [1.0] * num_replicas, divisor=num_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian:
    """The median of each coordinate; of an even number, the mean of the two in the middle (arXiv 1803.01498).

    It stays between honest values as long as fewer than half of the replicas are bad.

    Example:
        >>> CoordinateMedian()(torch.tensor([[1.0], [2.0], [1e9]]))
        tensor([2.])
    """

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "median"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; one replica is enough, and fewer than half may be bad."""
        require(self, num_replicas, at_least=1)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        check_stack(self, stack)
        return over_sorted_columns(stack, middle_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean:
    """The mean of each coordinate without its `num_bad` smallest and `num_bad` largest values (arXiv 1803.01498).

    Attributes:
        num_bad: How many replicas may be bad; the rule needs more than twice as many.

    Raises:
        ValueError: `num_bad` is negative.

    Example:
        >>> TrimmedMean(num_bad=1)(torch.tensor([[-1e9], [1.0], [2.0], [3.0]]))
        tensor([1.5000])
    """

    num_bad: int

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "trimmed-mean"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; it needs `2 num_bad + 1` replicas."""
        require(self, num_replicas, at_least=2 * self.num_bad + 1, num_bad=self.num_bad)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        kept = slice(self.num_bad, check_stack(self, stack) - self.num_bad)
        return over_sorted_columns(stack, lambda values: mean_of(values[kept]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaMed:
    """The mean of the `M - num_bad` values of each coordinate that lie closest to its median (arXiv 1802.10116).

    Attributes:
        num_bad: How many replicas may be bad; the rule needs more than twice as many.

    Raises:
        ValueError: `num_bad` is negative.

    Example:
        >>> MeaMed(num_bad=1)(torch.tensor([[1.0], [2.0], [1e9]]))
        tensor([1.5000])
    """

    num_bad: int

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "meamed"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; it needs `2 num_bad + 1` replicas."""
        require(self, num_replicas, at_least=2 * self.num_bad + 1, num_bad=self.num_bad)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        num_kept = check_stack(self, stack) - self.num_bad
        return over_sorted_columns(stack, lambda values: mean_around(values, middle_of(values), num_kept=num_kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phocas:
    """The mean of the `M - num_bad` values of each coordinate that lie closest to its trimmed mean (arXiv 1805.09682).

    Attributes:
        num_bad: How many replicas may be bad; the rule needs more than twice as many.

    Raises:
        ValueError: `num_bad` is negative.

    Example:
        >>> Phocas(num_bad=1)(torch.tensor([[1.0], [2.0], [1e9]]))
        tensor([1.5000])
    """

    num_bad: int

    def __post_init__(self) -> None:
        check_num_bad(self.num_bad)

    @property
    def name(self) -> str:
        """See `Aggregate.name`."""
        return "phocas"

    def check(self, num_replicas: int) -> None:
        """See `Aggregate.check`; it needs `2 num_bad + 1` replicas."""
        require(self, num_replicas, at_least=2 * self.num_bad + 1, num_bad=self.num_bad)

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """See `Aggregate.__call__`."""
        num_kept = check_stack(self, stack) - self.num_bad
        inner = slice(self.num_bad, num_kept)
        return over_sorted_columns(stack, lambda values: mean_around(values, mean_of(values[inner]), num_kept=num_kept))


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
