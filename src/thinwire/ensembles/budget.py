"""Compute of each expert from the difficulty of its domain: more steps, or a larger model, for a harder one.

Reference:
    HDEE, arXiv 2502.19385: the hard of three domains gets 5/3 of the easy one's steps, or 3/2 of its size, at the same
    total compute. Here shares are proportional to numbers that the user gives, such as losses of the seed model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import excluded, refusal
from thinwire.files import short

# Forward and backward pass of one token take two and four operations a parameter.
_FLOPS = 6
# Amounts whose products are still numbers.
_LEAST, _MOST = 1e-36, 1e36


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBudget:
    """Size and length of one expert's training."""

    parameters: int
    steps: int


def divide_budget(
    flops: float, difficulty: Mapping[str, float], *, tokens_per_step: int, parameters: int | None = None,
    steps: int | None = None, sizes: Sequence[int] = (),
) -> dict[str, ExpertBudget]:  # fmt: skip
    """Divide a compute budget among domains in proportion to their difficulty.

    Args:
        flops: Floating-point operations of all experts together; a token costs 6 a parameter.
        difficulty: A positive number a domain; only ratios count.
        tokens_per_step: Tokens of a training step.
        parameters: Size of every expert; they train for different numbers of steps.
        steps: About the steps of every expert; they have different sizes, of `sizes` where these alone exist.
        sizes: Numbers of parameters to choose from.

    Raises:
        ValueError: A number is out of its range, or whole steps do not use up the budget to 1 %.

    Example:
        >>> hard = {"easy": 3, "medium": 4, "hard": 5}
        >>> found = divide_budget(7.2e12, hard, tokens_per_step=1000, parameters=1_000_000)
        >>> [one.steps for one in found.values()]
        [300, 400, 500]
    """
    if (parameters is None) == (steps is None):
        raise excluded("parameters", "steps", why="one of them follows from the budget", remedy="parameters alone")
    amounts = [flops, tokens_per_step, steps or parameters or 0, *difficulty.values(), *sizes]
    if not difficulty or not all(_LEAST <= value <= _MOST for value in amounts):
        raise refusal("a budget is no amount", got=short(amounts),
                      allowed=f"{_LEAST:g} to {_MOST:g}, and a domain or more",
                      remedy="divide_budget(1e12, {'prose': 1}, tokens_per_step=1000, parameters=100_000)")  # fmt: skip
    total = sum(difficulty.values())
    wanted = {domain: flops * (value / total) for domain, value in difficulty.items()}
    unit = float(_FLOPS * tokens_per_step)  # of a parameter and step
    chosen = dict.fromkeys(wanted, parameters or 0)
    if steps is not None:
        ideal = {domain: share / (unit * steps) for domain, share in wanted.items()}
        for domain, size in ideal.items():
            there: Sequence[float] = sizes or (size,)
            distances = {abs(math.log(one / size)): one for one in there}
            chosen[domain] = max(1, round(distances[min(distances)]))
        # sizes that exist miss the shares: all train for the steps that use up the whole
        wanted = {domain: flops * size / sum(chosen.values()) for domain, size in chosen.items()}
    exact = {domain: share / (unit * chosen[domain]) for domain, share in wanted.items()}
    found = {domain: math.floor(number + 1e-9) for domain, number in exact.items()}
    left = flops - sum(unit * chosen[domain] * number for domain, number in found.items())
    for domain in sorted(exact, key=lambda name: found[name] - exact[name]):  # largest remainders first
        if unit * chosen[domain] <= left * (1 + 1e-9):
            found[domain] += 1
            left -= unit * chosen[domain]
    if abs(left) > 0.01 * flops or min(found.values()) < 1:
        enough = 100 * unit * sum(chosen.values())
        raise refusal("whole steps do not use up the budget to 1 %", got=f"{flops:.3g}, {left / flops:.1%} unused",
                      allowed=f"100 steps of every expert, {enough:.3g}", remedy=f"flops={enough:.3g}")  # fmt: skip
    return {domain: ExpertBudget(parameters=chosen[domain], steps=found[domain]) for domain in difficulty}
