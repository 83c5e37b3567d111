"""Loss penalty of a method, from published numbers, and from our own where there are none.

All-reduce at every step is the measure. The penalty of DiLoCo and Streaming DiLoCo at equal tokens has three parts:

- replicas: training M replicas apart at H = 30, by model size (arXiv 2503.09799, tables 4 and 5). One replica gains:
  there DiLoCo is Nesterov every H steps on top of plain training.
- interval: exchanging more rarely than every 30 steps (arXiv 2501.18512, tables 5 and 6).
- overlap: applying what comes tau steps late (arXiv 2501.18512, section 3.3.2: below 0.2 % up to tau = 10).

IsoLoCo has no published table. Its replicas' part is what `benchmarks/quality` measured on a small model, at least 0
and at most the published part of DiLoCo; a note says so.

E3M0, bfloat16 and float32 cost nothing measurable (arXiv 2501.18512, section 3.3.3). The parts are added: they were
published one at a time, and their products are smaller than what they are rounded to. Other methods and codecs have no
such table that we know of: they get no number, and no zero either.

How far to trust it: where both papers trained the same size, replicas and interval, what is said here lies within 0.7 %
of the loss of the second paper's own runs. Two replicas agree to 0.2 % (1B: 0.6 %); four did up to 0.7 % worse there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thinwire.units import format_count

_Point = tuple[float, float]

# arXiv 2503.09799, table 4 (35M to 2.4B, everything tuned) and table 5 (4B and 10B, settings from its scaling laws):
# parameters, evaluation loss of data-parallel training, and of DiLoCo at H = 30 with 1, 2, 4 and 8 replicas.
_LOSSES: tuple[tuple[float, ...], ...] = (
    (35e6, 3.485, 3.482, 3.508, 3.554, 3.621),
    (90e6, 3.167, 3.162, 3.182, 3.213, 3.265),
    (180e6, 2.950, 2.943, 2.957, 2.981, 3.019),
    (335e6, 2.784, 2.777, 2.788, 2.808, 2.841),
    (550e6, 2.653, 2.645, 2.657, 2.673, 2.698),
    (1.3e9, 2.460, 2.451, 2.464, 2.472, 2.493),
    (2.4e9, 2.326, 2.317, 2.323, 2.332, 2.351),
    (4e9, 2.224, 2.219, 2.220, 2.230),  # not trained with 8 replicas
    (10e9, 2.090, 2.086, 2.086, 2.096),
)
# arXiv 2501.18512, tables 5 and 6: parameters, and the loss of Streaming DiLoCo (E3M0, tau = 1) with 2 replicas at
# H = 30 and 100, and with 4 at H = 30 and 100.
_INTERVAL_LOSSES: tuple[tuple[float, ...], ...] = (
    (35e6, 3.53, 3.56, 3.60, 3.64),
    (100e6, 3.21, 3.22, 3.25, 3.29),
    (200e6, 2.98, 3.00, 3.02, 3.05),
    (300e6, 2.81, 2.83, 2.84, 2.87),
    (500e6, 2.67, 2.69, 2.70, 2.73),
    (1e9, 2.48, 2.50, 2.50, 2.53),
)
_BASE_INTERVAL, _LAST_INTERVAL = 30, 100
# arXiv 2311.08105, section 3 and figure 4: "very mild up to H = 1000", 2.9 % of perplexity (1.1 % of the loss) above
# H = 50, with 8 replicas of 150M. The interval's part grows by 2.7 % there, so it errs on the safe side.
_MILD_INTERVAL = 1000
# arXiv 2501.18512, section 3.3.2, figure 8 (500M): below 0.2 % up to 10 steps. The bound is taken for the value.
_SHARE_A_LATE_STEP, _LAST_OVERLAP = 0.0002, 10
# arXiv 2503.09799, table 10: loss = 19.226 N^-0.0985 M^0.0116, batch = 0.00709 N^0.4695 M^0.3399.
_LOSS_EXPONENT = 0.0985
_SEQUENCE_TOKENS = 2048

_EVERY_STEP = ("all-reduce",)
_PUBLISHED = ("diloco", "streaming-diloco")
_MEASURED = "iso-loco"
# IsoLoCo's loss against data-parallel training by replicas: benchmarks/quality, rung B (0.49M parameters, H 30, tau 1,
# E3M0, both sides tuned, medians of 3 seeds); `python benchmarks/quality/report.py --json`.
_ISO_SHARES: tuple[_Point, ...] = ((1.0, 0.0), (2.0, -0.0104), (4.0, 0.0027), (8.0, 0.0118))
# DiLoCo sends float32, Streaming DiLoCo E3M0, and every step of data-parallel training was in bfloat16.
_LOSSLESS = {"all-reduce": (None, "float32", "bfloat16"), "local-sgd": (None, "float32")}
_LOSSLESS_PSEUDO_GRADIENTS = (None, "float32", "bfloat16", "e3m0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPenalty:
    """By how much a method's final loss lies above that of data-parallel training, at equal tokens."""

    share: float  # of the loss: 0.01 is 1 % above, -0.001 is 0.1 % below
    # what it is the sum of, each a name and its share: `replicas`, `interval`, `overlap`
    parts: tuple[tuple[str, float], ...]
    # where it leaves what was published, each a sentence for the user; empty where it does not
    notes: tuple[str, ...] = ()


def loss_penalty(
    method: str, *, num_parameters: float, num_replicas: int, sync_interval: int, overlap_steps: int, codec: str | None
) -> LossPenalty | None:
    """Predict by how much a method's final loss exceeds that of an all-reduce at every step.

    It assumes tuned settings, and 20 tokens a parameter: the tables do. Between the table's sizes and replicas it goes
    in straight lines of their logarithms; beyond, it keeps the nearest size, goes on by the last slope in replicas and
    in the interval, and says so in `notes`.

    Args:
        method: The recipe's name.
        num_parameters: N, above 0.
        num_replicas: M, at least 1.
        sync_interval: H, inner steps between two exchanges, at least 1; does not count for `all-reduce`.
        overlap_steps: tau, inner steps from launch to apply, at least 0 and below H.
        codec: The name of the exchange's codec; None for the method's own.

    Returns:
        The penalty; None where nothing is published for this method or this codec.

    Raises:
        ValueError: A number is out of its range; names the value, the limit and the remedy.

    Example:
        >>> penalty = loss_penalty(
        ...     "diloco", num_parameters=35e6, num_replicas=8, sync_interval=30, overlap_steps=0, codec=None
        ... )
        >>> f"{penalty.share:+.1%}", penalty.notes
        ('+3.9%', ())
        >>> loss_penalty("dgc", num_parameters=35e6, num_replicas=8, sync_interval=1, overlap_steps=0, codec=None)

    Reference:
        arXiv 2503.09799, tables 4 and 5; arXiv 2501.18512, tables 5 and 6 and section 3.3.
    """
    _check_size(num_parameters=num_parameters, num_replicas=num_replicas)
    if sync_interval < 1:
        raise ValueError(f"sync_interval must be at least 1, got {sync_interval}; 1 exchanges at every step")
    if overlap_steps < 0:
        raise ValueError(f"overlap_steps must be at least 0, got {overlap_steps}; 0 waits for each exchange")
    method, codec = _key(method), None if codec is None else _key(codec)
    # a mean of one is the thing itself, so local SGD with one replica is plain training
    if (method in _EVERY_STEP or (method == "local-sgd" and num_replicas == 1)) and codec in _LOSSLESS[method]:
        return LossPenalty(share=0.0, parts=(("replicas", 0.0), ("interval", 0.0), ("overlap", 0.0)))
    if method not in (*_PUBLISHED, _MEASURED) or codec not in _LOSSLESS_PSEUDO_GRADIENTS:
        return None
    if overlap_steps >= sync_interval:
        raise ValueError(
            f"overlap_steps must be below sync_interval ({sync_interval}), got {overlap_steps}; a fragment's exchange "
            f"must be applied before its next one starts"
        )
    published = _replicas_share(num_parameters, num_replicas)
    is_measured = method == _MEASURED
    replicas = min(max(0.0, _between(_ISO_SHARES, num_replicas)), published) if is_measured else published
    parts = (
        ("measured replicas" if is_measured else "replicas", replicas),
        ("interval", _interval_share(num_parameters, num_replicas, sync_interval)),
        ("overlap", _SHARE_A_LATE_STEP * overlap_steps),
    )
    notes = [*_replicas_remarks(num_parameters, num_replicas)]
    notes += _interval_remarks(num_parameters, num_replicas, sync_interval)
    if is_measured:
        notes.insert(0, (
            f"the replicas' part of {_MEASURED} was measured on 0.49M parameters (docs/benchmarks.md); DiLoCo's "
            f"published part is {published:+.2%}"
        ))  # fmt: skip
    if overlap_steps > _LAST_OVERLAP:
        notes.append(
            f"no loss with overlap_steps above {_LAST_OVERLAP} is published as a number: 0.02 % a step goes on"
        )
    return LossPenalty(share=sum(share for _, share in parts), parts=parts, notes=tuple(notes))


def compute_worth(share: float) -> float:
    """Return the factor of compute, and so of time, that a loss penalty is worth.

    A run that ends `share` above another one needs that much more compute to end where the other does, as both grow
    along the compute-optimal front: loss falls with N^-0.0985, and 20 tokens a parameter make compute grow with N^2.

    Args:
        share: Of the loss, above -1; 0.01 is 1 % above.

    Raises:
        ValueError: `share` is -1 or below.

    Example:
        >>> round(compute_worth(0.01), 2), compute_worth(0.0)
        (1.22, 1.0)

    Reference:
        arXiv 2503.09799, table 10, with M = 1.
    """
    if not -1 < share < math.inf:
        raise ValueError(f"share must be above -1 and finite, got {share}; 0.01 is a loss 1 % above")
    return float((1 + share) ** (2 / _LOSS_EXPONENT))


def optimal_batch_tokens(*, num_parameters: float, num_replicas: int) -> float:
    """Return the best global batch of DiLoCo, all replicas together, in tokens.

    The paper says that its batches are counted in tokens, but its law gives 119 for 1e9 parameters and one replica: its
    unit must be a sequence, of 2048 tokens there. Where the loss was lowest by its table 9 lies inside every range of
    batches that its figure 14 shows, in tokens, only if the unit is 1390 to 2600 tokens.

    Args:
        num_parameters: N, above 0; the law was fitted from 35M to 2.4B.
        num_replicas: M, at least 1; fitted from 1 to 8.

    Raises:
        ValueError: A number is out of its range; names the value, the limit and the remedy.

    Example:
        >>> round(optimal_batch_tokens(num_parameters=1e9, num_replicas=1), -3)
        244000.0

    Reference:
        arXiv 2503.09799, table 10: 0.00709 N^0.4695 M^0.3399, at H = 30 and 20 tokens a parameter.
    """
    _check_size(num_parameters=num_parameters, num_replicas=num_replicas)
    return float(_SEQUENCE_TOKENS * 0.00709 * num_parameters**0.4695 * num_replicas**0.3399)


def _check_size(*, num_parameters: float, num_replicas: int) -> None:
    if not 0 < num_parameters < math.inf:
        raise ValueError(f"num_parameters must be above 0 and finite, got {num_parameters}; count the model's")
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}; one replica is plain training")


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def _share_by_size(column: int) -> tuple[_Point, ...]:
    return tuple((row[0], row[column] / row[1] - 1) for row in _LOSSES if column < len(row))


def _rate_by_size(column: int) -> tuple[_Point, ...]:
    """Relative increase of the loss from this column to the next, a natural log of H."""
    span = math.log(_LAST_INTERVAL / _BASE_INTERVAL)
    return tuple((row[0], (row[column + 1] / row[column] - 1) / span) for row in _INTERVAL_LOSSES)


_SHARES = {1: _share_by_size(2), 2: _share_by_size(3), 4: _share_by_size(4), 8: _share_by_size(5)}
_RATES = {2: _rate_by_size(1), 4: _rate_by_size(3)}


def _replicas_share(num_parameters: float, num_replicas: int) -> float:
    by_replicas = [(float(count), _between(points, num_parameters)) for count, points in _SHARES.items()]
    (before, low), (last, high) = by_replicas[-2:]
    if num_replicas <= last:
        return _between(by_replicas, num_replicas)
    return high + (high - low) * math.log(num_replicas / last) / math.log(last / before)


def _interval_share(num_parameters: float, num_replicas: int, sync_interval: int) -> float:
    # Below H = 30 the gain is shown in figures only, and H = 1 is worst of all (arXiv 2503.09799, figure 9).
    if sync_interval <= _BASE_INTERVAL:
        return 0.0
    # The nearest count outside 2 to 4: the rate is smaller for 1 (figure 9), and for 8 in the one ablation there is.
    rate = _between(
        [(float(count), _between(points, num_parameters)) for count, points in _RATES.items()], num_replicas
    )
    return rate * math.log(sync_interval / _BASE_INTERVAL)


def _between(points: Sequence[_Point], at: float) -> float:
    """Interpolate in a straight line of the logarithm; the first and the last point hold beyond them."""
    place = bisect.bisect_right(points, at, key=lambda point: point[0])
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (left, low), (right, high) = points[place - 1 : place + 1]
    return low + (high - low) * math.log(at / left) / math.log(right / left)


def _replicas_remarks(num_parameters: float, num_replicas: int) -> Iterator[str]:
    most = max(_SHARES)
    # between two columns both are needed, and the one with more replicas has the fewer sizes
    column = min((count for count in _SHARES if count >= num_replicas), default=most)
    yield from _size_remarks(f"what num_replicas = {column} costs", _SHARES[column], num_parameters)
    if num_replicas > most:
        yield (
            f"no loss with more than {most} replicas is published: the replicas' part goes on as from 4 to {most}, "
            f"which is rather too low"
        )


def _interval_remarks(num_parameters: float, num_replicas: int, sync_interval: int) -> Iterator[str]:
    if sync_interval < _BASE_INTERVAL:
        worse = "; an outer step at every step does worse" if sync_interval == 1 else ""
        yield (
            f"no loss with a sync_interval below {_BASE_INTERVAL} is published as a number: the one at "
            f"{_BASE_INTERVAL} is taken{worse}"
        )
    if sync_interval <= _BASE_INTERVAL:
        return
    yield from _size_remarks("what sync_interval costs", _RATES[2], num_parameters)
    least, most = min(_RATES), max(_RATES)
    if not least <= num_replicas <= most:
        yield (
            f"what sync_interval costs is published for {least} to {most} replicas: the interval's part is that of "
            f"{min(max(num_replicas, least), most)}"
        )
    if sync_interval > _MILD_INTERVAL:
        yield (
            f"published losses are called mild up to a sync_interval of {_MILD_INTERVAL}: beyond, the interval's part "
            f"goes on with its logarithm and may be too low"
        )
    elif sync_interval > _LAST_INTERVAL:
        yield (
            f"no loss with a sync_interval above {_LAST_INTERVAL} is published by size: the interval's part goes on "
            f"with its logarithm"
        )


def _size_remarks(what: str, points: Sequence[_Point], num_parameters: float) -> Iterator[str]:
    least, most = points[0][0], points[-1][0]
    if not least <= num_parameters <= most:
        nearest = format_count(min(max(num_parameters, least), most))
        yield (
            f"{what} is published for {format_count(least)} to {format_count(most)} parameters: that of {nearest} is "
            f"taken"
        )
