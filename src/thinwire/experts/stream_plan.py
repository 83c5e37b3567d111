"""Plan of the experts whose weights are streamed to a rank for a step, since its tokens would be more; no torch."""

from __future__ import annotations

from collections.abc import Sequence


def plan_streams(
    counts: Sequence[Sequence[int]], *, row_bytes: float, expert_bytes: float, most_streamed: int
) -> tuple[tuple[int, int], ...]:
    """Choose the experts that each rank gets a copy of for a step.

    A copy costs the weights on their way in, and their gradient on its way back. It spares each of the rank's tokens
    for that expert four crossings: to the expert and back, forward and backward.

    Args:
        counts: Rows of each rank, for each of all experts, in the step before; rank r holds the r-th of equal parts.
        row_bytes: Of a row in its four crossings together.
        expert_bytes: Of the weights of one expert.
        most_streamed: Copies that a rank holds at most.

    Returns:
        Expert and rank of each copy, in one order on all ranks.

    Example:
        >>> plan_streams([[9, 0, 50, 7], [90, 8, 0, 0]], row_bytes=8, expert_bytes=40, most_streamed=1)
        ((0, 1), (2, 0))

    Reference:
        Break-even and limit are ours; one copy a chosen rank, for one step, as in arXiv 2502.02581.
    """
    found = []
    for rank, rows in enumerate(counts):
        per_rank = len(rows) // len(counts)
        remote = [
            (-number, expert) for expert, number in enumerate(rows)
            if expert // per_rank != rank and number * row_bytes > 2 * expert_bytes
        ]  # fmt: skip
        found += [(expert, rank) for _, expert in sorted(remote)[:most_streamed]]
    return tuple(sorted(found))
