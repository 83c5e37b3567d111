"""Adaptive time-outs and deadlines follow measured times, within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.adaptive_timeout import AdaptiveTimeout, Deadlines


@given(st.lists(st.floats(0, 1000), max_size=100))
def test_a_limit_stays_in_its_bounds_and_above_the_median(times: list[float]) -> None:
    timeout = AdaptiveTimeout(least_s=1.0, most_s=30.0)
    for seconds in times:
        timeout.observe(seconds)
    assert 1.0 <= timeout.limit_s <= 30.0
    assert timeout.limit_s >= min(timeout.median_s, 30.0)
    with pytest.raises(ValueError, match="least_s"):
        AdaptiveTimeout(least_s=2.0, most_s=1.0)


def test_deadlines_grow_with_what_was_measured_and_never_fall_below_their_floor() -> None:
    deadlines = Deadlines(minimum_s=5, slack=10, window=3)
    assert deadlines.deadline_s(steps=100) == 5
    for seconds in (9.0, 0.1, 0.3, 0.2):  # the first has left the window
        deadlines.observe_step(seconds)
    assert deadlines.deadline_s(steps=100) == pytest.approx(5 + 10 * 30)
    deadlines.observe_round(2.0)
    assert deadlines.deadline_s(steps=100) == pytest.approx(5 + 10 * 32)
    # bytes beyond what any round has shown are allowed the time of the slowest wire, 100 kbit/s
    deadlines.observe_round(2.0, num_bytes=1_000_000)
    assert deadlines.deadline_s(steps=100, num_bytes=1_000_000) == pytest.approx(5 + 10 * 32)
    assert deadlines.deadline_s(steps=100, num_bytes=2_000_000) == pytest.approx(5 + 80 + 10 * 32)
    with pytest.raises(ValueError, match="slack"):
        Deadlines(slack=0.5)
