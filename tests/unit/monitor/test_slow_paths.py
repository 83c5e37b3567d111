"""Slow and dead planned paths: who is named, and what is limited because of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinwire.monitor.dashboard.sources import PathTraffic, path_table
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.detect.slow_paths import find_slow_paths
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.live_diagnosis import LiveDiagnosis
from thinwire.monitor.remediation import Action, Policy, Steering
from thinwire.runlog.path_limits import PATH_LIMITS_FILE, PathLimit, PathLimitReader, write_path_limits
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import PathReading, to_line

Rate = Callable[[int, float], float]


def readings(rate: Rate, *, num_paths: int = 3, last_s: float = 20.0, down_s: float = 1e9) -> Iterator[PathReading]:
    """Yield what rank 1 reads twice a second of its paths to rank 0; path 1 may be down from a time on."""
    num_bytes, busy_s = [0.0] * num_paths, [0.0] * num_paths
    for turn in range(int(2 * last_s)):
        at_s = 0.5 * turn
        for path in range(num_paths):
            is_up = path != 1 or at_s < down_s
            busy_s[path] += 0.3
            num_bytes[path] += 0.3 * rate(path, at_s) * is_up
            yield PathReading(
                rank=1, peer=0, path=path, at_s=at_s, num_bytes=int(num_bytes[path]), busy_s=busy_s[path],
                share=1 / num_paths, source_port=17_000 + path, is_up=is_up,
            )  # fmt: skip


def named(rate: Rate, **options: float) -> list[str]:
    return [one.where for one in find_slow_paths(build(from_records(readings(rate, **options))))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (lambda path, at_s: 1e6, []),
        (lambda path, at_s: 1e6 if path != 1 or at_s < 10 else 1e5, ["path 1 of link 1 -> 0"]),
        # all of them: other work on the machine, or the whole link
        (lambda path, at_s: 1e6 if at_s < 10 else 1e5, []),
        # it is slower than the others, and always was
        (lambda path, at_s: 1e6 if path != 1 else 1e5, []),
        (lambda path, at_s: 1e6 if path != 1 or not 10 < at_s < 14 else 1e5, []),
        (lambda path, at_s: 1e6 if path != 1 or at_s < 10 else 5e5, []),
    ],
)
def test_a_path_is_named_if_it_falls_behind_the_others_and_its_own_past(rate: Rate, expected: list[str]) -> None:
    assert named(rate) == expected


def test_a_path_that_is_down_is_named_and_one_path_alone_never_is() -> None:
    assert named(lambda path, at_s: 1e6, down_s=15.0) == ["path 1 of link 1 -> 0"]
    assert named(lambda path, at_s: 1e6, down_s=19.0) == []
    (found,) = find_slow_paths(build(from_records(readings(lambda path, at_s: 1e6, down_s=15.0))))
    assert "source port 17001) delivers nothing" in found.text and found.since_s == pytest.approx(15.0)
    assert named(lambda path, at_s: 1e6 if at_s < 10 else 1e4, num_paths=1) == []


def test_two_slow_paths_of_a_link_are_two_causes() -> None:
    detector = LiveDetector(updates_until_new=1)
    detector.add(readings(lambda path, at_s: 1e6 if path < 3 or at_s < 10 else 1e5, num_paths=5))
    assert [news.finding.where for news in detector.update()] == ["path 3 of link 1 -> 0", "path 4 of link 1 -> 0"]


class NoActions:
    def members(self) -> None:
        return None

    def act(self, action: Action) -> str:
        raise AssertionError(action)


@pytest.mark.parametrize("is_dry_run", [False, True])
def test_a_finding_limits_its_path_until_it_is_over(tmp_path: Path, is_dry_run: bool) -> None:
    said: list[str] = []
    limited: list[tuple[int, int, float]] = []
    reader = PathLimitReader(tmp_path, rank=1, apply=lambda *limit: limited.append(limit))
    diagnosis = LiveDiagnosis(
        tmp_path, say=said.append, steering=Steering(Policy(on_finding="abort")), hands=NoActions(),
        is_dry_run=is_dry_run, judge=LiveDetector(updates_until_new=1, updates_until_over=1),
    )  # fmt: skip
    rows = list(readings(lambda path, at_s: 1e6 if path != 1 or not 10 < at_s < 20 else 1e5, last_s=30.0))
    header = '{"format":"thinwire-records","version":1}\n'
    path = tmp_path / "records-rank-1.jsonl"
    for until_s in (19.0, 30.0):
        path.write_text(header + "".join(to_line(one) + "\n" for one in rows if one.at_s <= until_s))
        diagnosis.poll()
        assert reader.poll() == ""
    diagnosis.stop()
    actions = [json.loads(line) for line in (tmp_path / "actions.jsonl").read_text().splitlines()]
    assert [(one["action"], one["target"]) for one in actions] == [
        ("limit path", "path 1 of link 1 -> 0"), ("lift limit", "path 1 of link 1 -> 0"),
    ]  # fmt: skip
    assert limited == ([] if is_dry_run else [(0, 1, 0.1), (0, 1, 1.0)])
    assert sum(line.startswith("action: ") for line in said) == 2


def test_a_rank_takes_its_own_limits_only_and_reports_a_bad_file_once(tmp_path: Path) -> None:
    limited: list[tuple[int, int, float]] = []
    reader = PathLimitReader(tmp_path, rank=1, apply=lambda *limit: limited.append(limit))
    assert reader.poll() == ""
    limits = [PathLimit(rank=rank, peer=2, path=3, limit=0.5) for rank in (0, 1)]
    write_path_limits(tmp_path, limits)
    assert reader.poll() == "" and limited == [(2, 3, 0.5)]
    write_path_limits(tmp_path, [*limits, PathLimit(rank=1, peer=0, path=0, limit=0.25)])
    assert reader.poll() == "" and limited[1:] == [(0, 0, 0.25)]
    (tmp_path / PATH_LIMITS_FILE).write_text('[{"rank": 1, "peer": 0, "path": 0, "limit": 7}]')
    assert "limit" in reader.poll() and reader.poll() == "" and len(limited) == 2
    (tmp_path / PATH_LIMITS_FILE).unlink()
    assert reader.poll() == "" and sorted(limited[2:]) == [(0, 0, 1.0), (2, 3, 1.0)]


def test_the_page_shows_the_load_of_each_path_and_its_limit() -> None:
    traffic = PathTraffic(1)
    for one in readings(lambda path, at_s: 1e6, down_s=12.0):
        traffic.add(one)
    found = path_table({1: traffic})
    assert found["num_left_out"] == 0 and [row["source_port"] for row in found["paths"]] == [17_000, 17_001, 17_002]
    one, down, _ = found["paths"]
    # 0.3 of each half second in use, at 8 Mbit/s
    assert one["now_bits_per_s"] == pytest.approx(4.8e6, rel=0.01) and one["busy"] == pytest.approx(0.6)
    assert one["limited_by"] == "the path" and down["limited_by"] == "nothing arrives"
    idle = PathTraffic(0)
    for reading in readings(lambda path, at_s: 1e6):
        idle.add(PathReading(rank=0, peer=1, path=0, at_s=reading.at_s, num_bytes=9, busy_s=0.01, limit=1.0))
    assert path_table({0: idle})["paths"][0]["limited_by"] == "what there is to send"
