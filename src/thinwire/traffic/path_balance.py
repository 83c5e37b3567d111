"""C4P's dynamic balancing (arXiv 2406.04594): shares of a flow's connections follow their measured rates.

The rules are those of `thinwire.transport.wire.path_balance`, by which thinwire's own wire shares out its frames; here
they run on simulated rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from random import Random

from thinwire.traffic.planner import PathPiece, TrafficPlan
from thinwire.transport.wire.path_balance import BalanceRules, PathBalancer


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
