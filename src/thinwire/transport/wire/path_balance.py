"""Shares of a peer's paths by their measured rates: C4P's dynamic balancing (arXiv 2406.04594).

The connections of a flow take fixed paths, and the flow is complete when the slowest of them is. After each round the
rate of a path, completed bytes a second, enters an exponentially weighted mean. If shares in proportion to these means
would complete the flow more than 10 % sooner, twice in a row, the shares move there (hysteresis). If a path fails, its
share moves to the other paths at once, and theirs keep their proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    """Constants of the balancing."""

    weight: float = 0.5  # of the latest round in a path's mean rate
    min_gain: float = 0.10  # shares move if the flow completes sooner by more than this share of its time
    num_in_row: int = 2  # so many rounds in a row must promise the gain
    min_share: float = 1e-3  # no path goes below this share, so that its rate stays known


class PathBalancer:
    """Shares of the paths of one flow.

    Example:
        >>> balancer = PathBalancer(2)
        >>> for _ in range(2):
        ...     balancer.observe([3e9, 1e9])
        >>> balancer.shares
        [0.75, 0.25]
    """

    def __init__(
        self, num_paths: int, *, rules: BalanceRules | None = None, shares: Sequence[float] | None = None
    ) -> None:
        self._rules = rules or BalanceRules()
        self.shares = [1 / num_paths] * num_paths if shares is None else [share / sum(shares) for share in shares]
        self.num_moves = 0
        self._rates: list[float] | None = None
        self._num_promising = 0

    def observe(self, rates: Sequence[float]) -> None:
        """Take the rates of a round, in bytes or bits a second, 0 for a failed path; move the shares if that pays."""
        weight = self._rules.weight
        before = self._rates or list(rates)
        self._rates = [
            weight * new + (1 - weight) * old if new else 0.0 for new, old in zip(rates, before, strict=True)
        ]
        if any(share and not rate for share, rate in zip(self.shares, self._rates, strict=True)):
            self._move([share if rate else 0.0 for share, rate in zip(self.shares, self._rates, strict=True)])
            return
        total = sum(self._rates)
        now_s = max(share / rate for share, rate in zip(self.shares, self._rates, strict=True) if share)
        is_promising = now_s * total > 1 + self._rules.min_gain
        self._num_promising = self._num_promising + 1 if is_promising else 0
        if self._num_promising >= self._rules.num_in_row:
            self._move(self._rates)

    def scale(self, path: int, factor: float) -> None:
        """Multiply a path's mean rate, or its share if none is known, and move the shares at once."""
        weights = list(self._rates or self.shares)
        weights[path] *= factor
        if self._rates is not None:
            self._rates = weights
        self._move(weights)

    def _move(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        if not total:
            return  # every path has failed: nothing is better than what there is
        shares = [max(self._rules.min_share, weight / total) if weight else 0.0 for weight in weights]
        self.shares = [share / sum(shares) for share in shares]
        self._num_promising = 0
        self.num_moves += 1
