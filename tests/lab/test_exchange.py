"""What an exchange does on a thin wire, seen by the kernel's counters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thinwire.lab import Lab
from thinwire.lab.counters import at, peak_rate, sent_by

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).parent / "exchange_script.py"
RATE = 4e6
NUM_BYTES = 500_000


@pytest.mark.parametrize("late_s", [0.0, 0.15])
def test_both_directions_of_an_exchange_are_busy_at_once_also_where_one_replica_comes_late(late_s: float) -> None:
    with Lab(hosts=2, rate="4mbit") as lab:
        results = lab.run([sys.executable, str(SCRIPT), str(NUM_BYTES), str(late_s), "0"], deadline_s=90)
        assert [result.exit_code for result in results] == [0, 0], results
        samples, counters = lab.samples(), lab.counters()
    beat_s, both, one = 0.05, 0, 0
    time_s = samples[0].time_s
    while time_s < samples[-1].time_s:
        now, then = at(samples, time_s=time_s), at(samples, time_s=time_s + beat_s)
        rates = [8 * (last - first) / beat_s for first, last in zip(now.sent_bytes, then.sent_bytes, strict=True)]
        both += min(rates) > RATE / 2
        one += max(rates) > RATE / 2
        time_s += beat_s
    # taking turns would leave both busy in none of the beats
    assert both > 0.5 * one, f"both directions were busy in {both} of {one} beats"
    for count in counters:
        # frames alone are 1.046 of what they carry; acknowledgements of their own would come on top
        assert count.sent_bytes < 1.09 * 3 * NUM_BYTES


def test_a_message_that_is_spread_keeps_its_bytes_and_loses_its_peak() -> None:
    peaks = []
    for spread_s in (0.0, 1.5):
        with Lab(hosts=2) as lab:
            results = lab.run([sys.executable, str(SCRIPT), "3000000", "0", str(spread_s)], deadline_s=90)
            assert [result.exit_code for result in results] == [0, 0], results
            peaks.append(peak_rate(sent_by(lab.samples(), host=0)))
            assert lab.counters()[0].sent_bytes > 3 * 3_000_000
    # at once, 3 MB fall into one window of 100 ms; over 1.5 s, a fifteenth
    assert peaks[0] > 200e6
    assert peaks[1] < peaks[0] / 4
