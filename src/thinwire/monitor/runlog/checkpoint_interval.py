"""Checkpoint interval from the cost of a checkpoint and the failure rate. Nothing here imports torch."""

from __future__ import annotations

import math

# Stands for what is not known yet: one failure in a day.
PRIOR_MTBF_S = 24 * 3600.0


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval between checkpoints: the first-order optimum.

    Args:
        cost_s: Seconds that one checkpoint keeps the run from training.
        mtbf_s: Mean seconds between failures that lose what no checkpoint holds.

    Raises:
        ValueError: A time is not positive.

    Example:
        >>> young_s(2.0, 3600.0)
        120.0

    Reference:
        J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974.
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval: seconds of training from the end of one checkpoint to the begin of the next.

    Args:
        cost_s: Seconds that one checkpoint keeps the run from training.
        mtbf_s: Mean seconds between failures that lose what no checkpoint holds.

    Raises:
        ValueError: A time is not positive.

    Example:
        >>> round(daly_s(2.0, 3600.0), 2)
        118.67

    Reference:
        J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
        Computer Systems 22, 2006, equation 37: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2M, and
        M else.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def mtbf_s(*, run_s: float, num_failures: int, prior_s: float = PRIOR_MTBF_S) -> float:
    """Return the mean time between failures, as far as a run has shown it.

    The prior counts as one failure in `prior_s` seconds that were seen before (the mean of a gamma prior of weight
    one): with no failure yet the time grows with the run, and after many the prior is forgotten.

    Args:
        run_s: Seconds that the run has been going on, all its parts together.
        num_failures: Failures in them.
        prior_s: Seconds between failures that are believed before anything was seen.

    Raises:
        ValueError: A number is negative, or the prior not positive.

    Example:
        >>> mtbf_s(run_s=0.0, num_failures=0, prior_s=1000.0), mtbf_s(run_s=1000.0, num_failures=9, prior_s=1000.0)
        (1000.0, 200.0)
    """
    if run_s < 0 or num_failures < 0 or not 0 < prior_s < math.inf:
        raise ValueError(
            f"run_s and num_failures must be at least 0 and prior_s positive, got {run_s}, {num_failures} and {prior_s}"
        )
    return (prior_s + run_s) / (1 + num_failures)


def interval_steps(*, cost_s: float, write_s: float, step_s: float, mtbf_s: float) -> int:
    """Return the steps between two checkpoints: Daly's interval, and never less than writing two takes.

    Args:
        cost_s: Seconds that one checkpoint keeps the run from training.
        write_s: Seconds that writing it takes behind the back of training; 0 where training waits for it.
        step_s: Seconds of a step.
        mtbf_s: Mean seconds between failures.

    Example:
        >>> interval_steps(cost_s=2.0, write_s=0.0, step_s=0.5, mtbf_s=3600.0)
        237
    """
    wished_s = daly_s(max(cost_s, 1e-3), mtbf_s)
    return max(1, round(max(wished_s, 2 * write_s) / max(step_s, 1e-6)))


def _check(cost_s: float, mtbf_s: float) -> None:
    if not 0 < cost_s < math.inf or not 0 < mtbf_s < math.inf:
        raise ValueError(f"cost_s and mtbf_s must be positive, got {cost_s} and {mtbf_s}")
