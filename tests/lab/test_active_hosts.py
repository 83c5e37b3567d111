"""`thinwire diagnose test` on wires that the lab shapes: it names what was made slow."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.lab.machine import skip_where_labs_are_impossible
from thinwire.cli.diagnose_test import FOUND
from thinwire.lab import Lab

WORDS = [sys.executable, "-m", "thinwire.cli.main", "diagnose", "test", "--json", "--budget", "1s"]
# A rate measured while other processes take the cores is too low: measure again, at most so often.
MOST_MEASUREMENTS = 4


def ask(lab: Lab) -> dict[str, Any]:
    """Run the command on all hosts, and return what the first one reports."""
    results = lab.run(WORDS, deadline_s=200, environment={"OMP_NUM_THREADS": "1"})
    assert [result.exit_code for result in results] == [FOUND] * 3, results[0].stderr
    told: dict[str, Any] = json.loads(results[0].stdout)
    return told


def test_a_sender_that_the_lab_made_slow_is_named() -> None:
    skip_where_labs_are_impossible()
    with Lab(hosts=3, rate="40mbit") as lab:
        lab.set_rate(0, "40mbit/5mbit")
        for _ in range(MOST_MEASUREMENTS):
            told = ask(lab)
            slow = told["findings"][0]
            assert slow["kind"] == "communication slow" and slow["where"] == "sender rank 0", told["findings"]
            if 5 < slow["evidence"]["times_slower"] < 12:
                break
    assert 5 < slow["evidence"]["times_slower"] < 12 and "(host-0)" in slow["text"]
    assert told["measured"]["hosts"] == ["host-0", "host-1", "host-2"]
