"""The fit of a wire finds what made the times, and is honest about how sure it is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.planning.probe import TimedTransfer, fit_wire


def times(
    *, rate: float, overhead_s: float, sizes: list[int], noise: float = 0.0, seed: int = 0
) -> list[TimedTransfer]:
    draw = random.Random(seed)
    return [
        TimedTransfer(num_bytes=n, seconds=(overhead_s + 8 * n / rate) * (1 + noise * draw.expovariate(1)))
        for n in sizes
    ]


@given(
    rate=st.floats(1e5, 1e11), overhead_s=st.floats(0, 1), sizes=st.lists(st.integers(0, 10**9), min_size=3, max_size=9)
)
def test_without_noise_the_wire_itself_is_found(rate: float, overhead_s: float, sizes: list[int]) -> None:
    if len(set(sizes)) < 2 or 8 * (max(sizes) - min(sizes)) / rate < 1e-6 * (overhead_s + 8 * max(sizes) / rate):
        return  # float64 has no digits left for the difference
    steps = [abs(a - b) for a in sizes for b in sizes if a != b]
    if 8 * min(steps) / rate < 1e-6 * (overhead_s + 8 * max(sizes) / rate):
        return
    found = fit_wire(times(rate=rate, overhead_s=overhead_s, sizes=sizes))
    assert found.bandwidth_bits_per_s == pytest.approx(rate, rel=1e-3)
    assert found.low_bits_per_s <= found.bandwidth_bits_per_s <= found.high_bits_per_s


def test_one_transfer_that_was_held_up_changes_nothing_much() -> None:
    sizes = [2**14, 2**16, 2**18] * 4
    transfers = times(rate=5e6, overhead_s=0.04, sizes=sizes)
    transfers[7] = TimedTransfer(num_bytes=transfers[7].num_bytes, seconds=9.0)
    found = fit_wire(transfers)
    assert found.bandwidth_bits_per_s == pytest.approx(5e6, rel=0.01) and found.overhead_s == pytest.approx(
        0.04, rel=0.01
    )


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    sizes = [2**16, 2**17, 2**18] * 4
    draw = random.Random(4)
    held = 0
    for _ in range(400):
        transfers = [TimedTransfer(num_bytes=n, seconds=0.02 + 8 * n / 20e6 + draw.gauss(0, 0.004)) for n in sizes]
        found = fit_wire(transfers)
        held += found.low_bits_per_s <= 20e6 <= found.high_bits_per_s
    assert 0.92 <= held / 400 <= 0.995


def test_times_that_do_not_bound_the_rate_say_so() -> None:
    transfers = [TimedTransfer(num_bytes=n, seconds=s) for n, s in [(1, 1.0), (2, 1.1), (3, 0.9), (4, 1.2)]]
    assert fit_wire(transfers).high_bits_per_s == math.inf


@pytest.mark.parametrize(
    ("transfers", "said"),
    [
        (times(rate=1e6, overhead_s=0, sizes=[1, 2]), "got 2 of 2"),
        (times(rate=1e6, overhead_s=0, sizes=[5, 5, 5]), "got 3 of 1"),
        ([TimedTransfer(num_bytes=n, seconds=1.0 - n / 10) for n in (1, 2, 3)], "time larger ones"),
    ],
)
def test_too_few_or_too_small_transfers_are_refused(transfers: list[TimedTransfer], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_wire(transfers)
