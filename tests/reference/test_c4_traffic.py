"""C4's figures of traffic planning (arXiv 2406.04594, section on C4P), with the model of docs/benchmarks/traffic.md."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from thinwire.traffic import plan_traffic

C4 = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/traffic/c4_figures.py")))


def test_hashed_jobs_get_what_the_paper_measured_and_planned_ones_the_ceiling() -> None:
    flows = C4.all_reduces(16)
    hashed = [fmean(C4.rates(plan_traffic(C4.bonded(2), flows, method="ecmp", seed=seed))) for seed in range(3)]
    assert 172 <= fmean(hashed) <= 263
    assert C4.rates(plan_traffic(C4.bonded(2), flows, method="c4p")) == pytest.approx([C4.CEILING] * 8)


def test_after_an_uplink_dies_only_balancing_comes_near_seven_eighths() -> None:
    ideal = C4.CEILING * 7 / 8
    dead = C4.after_failure(plan_traffic(C4.bonded(1), C4.all_reduces(8), method="c4p"), ["leaf-0/spine-0"])
    rounds = [
        min(8e-9 * C4.BYTES / seconds for seconds in one.values()) for one in C4.balanced_rounds(dead, num_rounds=25)
    ]
    assert rounds[0] < 0.9 * ideal, "static: the slowest connection holds its job"
    assert 301 <= rounds[-1] <= ideal + 1e-6


def test_the_gain_of_an_application_follows_from_its_share_of_communication() -> None:
    assert C4.speed_up(1 / 3, 1.703) - 1 == pytest.approx(0.1595, abs=2e-4)
    assert C4.speed_up(0.3, 1.703) - 1 == pytest.approx(0.141, abs=1e-3)
    assert C4.speed_up(0.02, 1.703) - 1 < 0.01, "control: planning must change next to nothing"
