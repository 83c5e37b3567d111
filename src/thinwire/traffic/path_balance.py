"""C4P's dynamic balancing (arXiv 2406.04594): shares of a flow's connections follow their measured rates.

The connections of a flow take fixed paths, and the flow is complete when the slowest of them is. After each round the
rate of a path, completed bytes a second, enters an exponentially weighted mean. If shares in proportion to these means
would complete the flow more than 10 % sooner, twice in a row, the shares move there (hysteresis). If a path fails, its
share moves to the other paths at once, and theirs keep their proportions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from thinwire.traffic.planner import PathPiece, TrafficPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    """Constants of the balancing.

    Attributes:
        weight: Of the latest round in a path's mean rate.
        min_gain: Shares move if the flow completes sooner by more than this share of its time.
        num_in_row: So many rounds in a row must promise the gain.
        min_share: No path goes below this share, so that its rate stays known.
    """

    weight: float = 0.5
    min_gain: float = 0.10
    num_in_row: int = 2
    min_share: float = 1e-3


class PathBalancer:
    """Shares of the paths of one flow.

    Args:
        num_paths: Number of paths.
        rules: The constants.

    Attributes:
        shares: Each path's part of the bytes; they add up to 1.
        num_moves: How often the shares have moved.

    Example:
        >>> balancer = PathBalancer(2)
        >>> for _ in range(2):
        ...     balancer.observe([3e9, 1e9])
        >>> balancer.shares
        [0.75, 0.25]
    """

    def __init__(self, num_paths: int, *, rules: BalanceRules | None = None) -> None:
        self._rules = rules or BalanceRules()
        self.shares = [1 / num_paths] * num_paths
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

    def _move(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        if not total:
            return  # every path has failed: nothing is better than what there is
        shares = [max(self._rules.min_share, weight / total) if weight else 0.0 for weight in weights]
        self.shares = [share / sum(shares) for share in shares]
        self._num_promising = 0
        self.num_moves += 1


def balanced_rounds(
    plan: TrafficPlan, *, num_rounds: int, rules: BalanceRules | None = None
) -> list[Mapping[str, float]]:
    """Repeat the flows of a plan, with shares that follow the measured rates of their pieces.

    Returns:
        For each round, the seconds until each job was complete.
    """
    balancers = [PathBalancer(len(pieces), rules=rules) for pieces in plan.pieces]
    found: list[Mapping[str, float]] = []
    for _ in range(num_rounds):
        pieces = [
            [
                dataclasses.replace(piece, share=Fraction(share).limit_denominator(10**6))
                for piece, share in zip(row, balancer.shares, strict=True)
            ]
            for row, balancer in zip(plan.pieces, balancers, strict=True)
        ]
        round_plan = dataclasses.replace(plan, pieces=pieces)
        found.append(round_plan.completion_s)
        for flow, row, ends, balancer in zip(plan.flows, pieces, round_plan.piece_completion_s, balancers, strict=True):
            rates = [float(piece.share) * flow.num_bytes / end_s for piece, end_s in zip(row, ends, strict=True)]
            balancer.observe(rates)
    return found


def after_failure(plan: TrafficPlan, failed: Sequence[str], *, seed: int = 0) -> TrafficPlan:
    """Return a plan after cables have failed: pieces on them take a path by hash, all others stay.

    Raises:
        ValueError: Two leaves have no path left, or a name is no cable.
    """
    fabric = plan.paths.fabric
    paths = dataclasses.replace(plan.paths, failed=plan.paths.failed | fabric.cables(failed))
    random = Random(seed)

    def moved(source: str, destination: str, piece: PathPiece) -> PathPiece:
        ends = fabric.hosts[source][piece.rail], fabric.hosts[destination][piece.destination_rail]
        if piece.spine is None or piece.spine in (healthy := paths.healthy(*ends)):
            return piece
        return dataclasses.replace(piece, spine=random.choice(healthy))

    pieces = [
        [moved(flow.source, flow.destination, piece) for piece in row]
        for flow, row in zip(plan.flows, plan.pieces, strict=True)
    ]
    return dataclasses.replace(plan, paths=paths, pieces=pieces)
