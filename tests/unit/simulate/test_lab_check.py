"""The benchmark that holds the simulator against the lab: what it covers, tells the simulator, and reports."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.settings import parse_access
from thinwire.methods import RECIPES

FOLDER = Path(__file__).parents[3] / "benchmarks" / "simulate"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))  # the scripts there import each other by their bare names
    return importlib.import_module("lab_check")


def line(
    name: str, configuration: Any, *, measured_s: float = 0.1, simulated_s: float = 0.1, stall_s: float = 0.02
) -> dict[str, Any]:
    return {
        "name": name, "configuration": configuration.to_json(),
        "measured_step_s": measured_s, "simulated_step_s": simulated_s,
        "error_percent": 100 * (simulated_s / measured_s - 1), "measured_stall_s": stall_s, "simulated_stall_s": 0.02,
    }  # fmt: skip


def test_every_method_is_run_on_two_to_four_hosts_at_1_to_100_mbit(check: Any) -> None:
    found = check.configurations().values()
    accesses = [parse_access(rate) for configuration in found for rate in configuration.rates]
    rates = [rate for access in accesses for rate in (access.up_bits_per_s, access.down_bits_per_s)]
    assert len(found) >= 24
    assert {configuration.method for configuration in found} == set(RECIPES)
    assert {configuration.num_hosts for configuration in found} == {2, 3, 4}
    assert (min(rates), max(rates)) == (1e6, 100e6)


def test_hosts_directions_pairs_and_steps_differ_in_some(check: Any) -> None:
    found = check.configurations().values()
    assert sum(len(set(configuration.rates)) > 1 for configuration in found) >= 4
    assert any(re.search("/", rate) for configuration in found for rate in configuration.rates)
    assert any(configuration.links for configuration in found)
    assert sum(configuration.latency_s > 0 for configuration in found) >= 3
    assert sum(isinstance(configuration.sleep_s, tuple) for configuration in found) >= 3


def test_every_run_holds_whole_intervals_behind_its_warm_up(check: Any) -> None:
    for configuration in check.configurations().values():
        interval = check.method_of(configuration.method, configuration.arguments).schedule.sync_interval
        for steps in (configuration.steps, configuration.calm_steps or configuration.steps):
            first, last = check.whole_intervals(steps, interval=interval, warm_steps=configuration.warm_steps)
            assert last - first >= 2 * interval


def test_a_rate_counts_for_what_a_frame_holds_of_a_program_s_bytes(check: Any) -> None:
    assert check.payload_share() == (1500 - 52) / 1514
    configuration = check.configurations()["diloco, 4 at 5 to 40"]
    slow = check.cluster_of(configuration).machines[2]
    assert slow.down_bits_per_s == pytest.approx(10e6 * check.payload_share())
    assert slow.up_bits_per_s == pytest.approx(5e6 * check.payload_share())


def test_a_pair_s_own_wire_has_its_own_latency(check: Any) -> None:
    cluster = check.cluster_of(check.configurations()["streaming-diloco, 4 at two sites"])
    assert cluster.wire("host-0", "host-2").bandwidth_bits_per_s == pytest.approx(3e6 * check.payload_share())
    assert cluster.wire("host-3", "host-1").latency_s == 0.015
    assert cluster.wire("host-0", "host-1").latency_s == 0


def test_a_summary_looks_at_whole_intervals_alone(check: Any) -> None:
    ends_s = [9.0, 10.0, 11.0, 12.5, 13.5, 15.0, 99.0]  # steps 3 and 4, 5 and 6
    found = check.summary(ends_s, [0, 9, 0, 0.5, 0, 0.5, 9], first=2, last=6, interval=2)
    assert found == {"step_s": 1.25, "median_step_s": 1.25, "stall_s": 0.25, "compute_s": 1.0}


def test_a_step_is_told_as_it_was_on_calm_wires_without_its_waits(check: Any) -> None:
    configuration = check.configurations()["diloco, 2 at 10"]
    calm = [{"compute_s": 0.05, "stall_s": 0.01}, {"compute_s": 0.04, "stall_s": 0.02}]
    found = check.compared({"name": "x", "calm": calm, "thin": [{"step_s": 0.2, "stall_s": 0.14}] * 2}, configuration)
    alone = check.simulated(configuration, compute_s=[0.05, 0.04])
    assert found["simulated_step_s"] == alone[0]["step_s"] == pytest.approx(alone[1]["step_s"])
    assert found["simulated_stall_s"] == pytest.approx((alone[0]["stall_s"] + alone[1]["stall_s"]) / 2)
    assert found["error_percent"] == pytest.approx(100 * (alone[0]["step_s"] / 0.2 - 1))


def test_the_report_names_the_median_and_the_worst_error(check: Any) -> None:
    (first, one), (second, two), (third, three), (fourth, four), *_ = check.configurations().items()
    lines = [
        line("of long ago", one, simulated_s=9.0), line(third, three), line(first, one, simulated_s=0.102),
        line(second, two, simulated_s=0.09, stall_s=0.03), line(fourth, replace(four, steps=7), simulated_s=9.0),
    ]  # fmt: skip
    *table, _, last = check.report(lines).splitlines()
    # not what is no configuration any more, or was another one
    assert [row.split(" | ")[0].removeprefix("| ") for row in table[2:]] == [first, second, third]
    assert "3 configurations: errors of a step's time of 2.0 % in the median and 10.0 % at worst" in last
    assert second in last
    assert "of its stalls 0.0 ms and 10.0 ms" in last


def test_what_is_stored_last_counts_for_its_congestion_control(check: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert check.read(path) == {}
    entries = [("a", "cubic", 1), ("b", "cubic", 2), ("a", "bbr", 3), ("a", "cubic", 4)]
    lines = [{"name": name, "congestion": congestion, "x": x / 3} for name, congestion, x in entries]
    check.write(path, lines)
    found = check.read(path)
    assert {key: line["x"] for key, line in found.items()} == {
        ("a", "cubic"): 1.33333, ("b", "cubic"): 0.666667, ("a", "bbr"): 1.0,
    }  # fmt: skip
