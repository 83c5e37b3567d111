"""The numbers of decision 6 are those of the results that lie beside the benchmark."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "decisions" / "0006-elastic-engine.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "benchmarks/results/elastic_engine.jsonl").read_text().splitlines()]


def rows(**wanted: Any) -> list[dict[str, Any]]:
    return [row for row in ROWS if all({"limit_s": 60, **row}.get(key) == value for key, value in wanted.items())]


def told(values: list[float], *, digits: int = 1, places: str = "") -> str:
    low, high, median = min(values), max(values), statistics.median(values)
    return f"{median:.{digits}f}{places} ({low:.{digits}f} to {high:.{digits}f}, n = {len(values)})"


@pytest.mark.parametrize(
    ("wanted", "key", "digits", "unit"),
    [
        ({"what": "torchft_faults", "fault": "kill"}, "next_commit_s", 1, ""),
        ({"what": "torchft_faults", "fault": "cut", "lost": 2, "limit_s": 60}, "next_commit_s", 1, ""),
        ({"what": "torchft_faults", "fault": "cut", "lost": 0}, "next_commit_s", 1, ""),
        ({"what": "torchft_faults", "fault": "stop", "limit_s": 60}, "next_commit_s", 1, ""),
        ({"what": "torchft_faults", "fault": "cut", "limit_s": 10}, "next_commit_s", 1, ""),
        ({"what": "torchft_faults", "fault": "stop", "limit_s": 10}, "next_commit_s", 1, ""),
        ({"what": "wire_faults", "fault": "kill"}, "noticed_s", 2, ""),
        ({"what": "wire_faults", "fault": "cut"}, "noticed_s", 1, ""),
        ({"what": "wire_faults", "fault": "stop"}, "noticed_s", 1, ""),
        ({"what": "torchft_lighthouse", "away_s": 3, "quorum_retries": 5}, "resumed_after_s", 1, " s"),
        ({"what": "torchft_lighthouse", "away_s": 30}, "resumed_after_s", 1, " s"),
        ({"what": "torchft_rejoin", "state_bytes": 10_000_000}, "first_commit_s", 1, " s"),
    ],
)
def test_each_median_and_range_of_the_page_is_that_of_the_results(
    wanted: dict[str, Any], key: str, digits: int, unit: str
) -> None:
    found = rows(**wanted)
    assert told([row[key] for row in found], digits=digits, places=unit) in PAGE


def test_what_the_page_says_of_the_rest_is_in_the_results() -> None:
    killed, cut = rows(what="torchft_faults", fault="kill"), rows(what="torchft_faults", fault="cut", limit_s=60)
    assert all(row["steps_discarded"] == 1 for row in killed)
    assert sum(row["next_commit_s"] > 30 for row in killed) == 1, "one of seven runs"
    assert all(row["survivors_agree"] for row in rows(what="torchft_faults"))
    assert sum(row["next_commit_s"] > 30 for row in cut) == sum(row["all_commit_again_s"] is None for row in cut) == 4
    ours = rows(what="wire_faults")
    assert len(ours) == 9 and max(row["longest_pause_of_the_others_s"] for row in ours) < 0.165
    assert not any(row["others_failed"] for row in ours)
    lost = rows(what="torchft_lighthouse", quorum_retries=0)
    assert [row["processes_ended"] for row in lost] == [2, 2, 2] and all(row["resumed_after_s"] is None for row in lost)
    assert sum(row["commits_while_away"] for row in rows(what="torchft_lighthouse")) == 0
    (never,) = rows(what="torchft_rejoin", state_bytes=200_000_000, limit_s=60)
    assert never["first_commit_s"] is None and never["steps_discarded"] == 4
    (late,) = rows(what="torchft_rejoin", state_bytes=200_000_000, limit_s=300)
    assert (
        f"{late['first_commit_s']:.1f} s, n = 1" in PAGE and f"step of {late['longest_step_of_others_s']:.1f} s" in PAGE
    )
    strangers = rows(what="torchft_stranger")
    assert len(strangers) == 3 and all(row["members_that_took_its_state"] == 2 for row in strangers)
    assert all(row["state_that_a_stranger_was_given"] > 0 and row["members_ended"] == 1 for row in strangers)
    halts = [row["one_request_halts_members_s"] for row in strangers]
    assert f"{statistics.median(halts):.1f} s ({min(halts):.1f} to {max(halts):.1f})" in PAGE
