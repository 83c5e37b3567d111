"""From timed transfers to a wire's bandwidth and latency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTransfer:
    """One timed transfer: its payload, and seconds until the receiver's word that it is there had come back."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFit:
    """What transfers say of a wire: `seconds = overhead_s + 8 num_bytes / bandwidth_bits_per_s`.

    Attributes:
        bandwidth_bits_per_s: The median of what any two transfers of unlike sizes say.
        low_bits_per_s: Lower end of its 95 % interval.
        high_bits_per_s: Upper end; infinite where the transfers are too short to bound it.
        overhead_s: What an empty transfer takes, there and back.
    """

    bandwidth_bits_per_s: float
    low_bits_per_s: float
    high_bits_per_s: float
    overhead_s: float


def fit_wire(transfers: Sequence[TimedTransfer]) -> WireFit:
    """Fit a line through sizes and times by the median of pairwise slopes (Theil and Sen).

    A transfer that something else disturbed counts as one of many, however late it came. The interval follows from the
    ranks of the slopes (Sen 1968, with the variance of Kendall's statistic where sizes repeat).

    Args:
        transfers: At least three, of at least two sizes.

    Raises:
        ValueError: They are fewer, or larger ones took no longer than smaller ones.

    Example:
        >>> fit_wire([TimedTransfer(num_bytes=n, seconds=0.01 + 8 * n / 5e6) for n in (0, 10_000, 100_000)])
        WireFit(bandwidth_bits_per_s=5000000.0, low_bits_per_s=5000000.0, high_bits_per_s=5000000.0, overhead_s=0.01)
    """
    sizes = [transfer.num_bytes for transfer in transfers]
    if len(transfers) < 3 or len(set(sizes)) < 2:
        raise ValueError(
            f"a wire is fitted through at least 3 transfers of at least 2 sizes, got {len(transfers)} of "
            f"{len(set(sizes))}"
        )
    slopes = sorted(
        (one.seconds - other.seconds) / (one.num_bytes - other.num_bytes)
        for place, one in enumerate(transfers)
        for other in transfers[:place]
        if one.num_bytes != other.num_bytes
    )
    middle = statistics.median(slopes)
    if middle <= 0:
        raise ValueError(f"transfers of {max(sizes)} bytes took no longer than those of {min(sizes)}; time larger ones")
    fastest, slowest = _interval(slopes, sizes)
    overhead_s = statistics.median(transfer.seconds - middle * transfer.num_bytes for transfer in transfers)
    return WireFit(
        bandwidth_bits_per_s=_rate(middle), low_bits_per_s=_rate(slowest), high_bits_per_s=_rate(fastest),
        overhead_s=_rounded(max(0.0, overhead_s)),
    )  # fmt: skip


def _interval(slopes: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    count = len(sizes)
    ties = sum(same * (same - 1) * (2 * same + 5) for same in (sizes.count(size) for size in set(sizes)))
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    reach = statistics.NormalDist().inv_cdf(0.975) * math.sqrt(variance)
    low = max(0, math.floor((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return slopes[low], slopes[high]


def _rate(seconds_a_byte: float) -> float:
    return _rounded(8 / seconds_a_byte) if seconds_a_byte > 0 else math.inf


def _rounded(value: float) -> float:
    # what lies beyond is the clock's, and would only be noise in a file that people read
    return float(f"{value:.6g}")
