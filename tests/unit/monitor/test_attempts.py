"""The parts of a run that was resumed, what a fault between them cost, and the checkpoints that they speak for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from thinwire.runlog.attempts import RunParts, chosen_interval, downtime_of, measured_mtbf_s, read_parts


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def write_step(run_dir: Path, *, step: int, time_s: float, at_s: float) -> None:
    path = run_dir / "metrics-replica-0.jsonl"
    with path.open("a") as file:
        file.write("\n" + json.dumps({"kind": "step", "step": step, "time_s": time_s}) + "\n")
        file.write('{"kind": "eval"}\nhalf a li')
    os.utime(path, (at_s, at_s))


def begin(run_dir: Path, clock: Clock, *, step: int, works_after_s: float = 5.0) -> RunParts:
    part = RunParts(run_dir, clock=clock)
    part.begin(step=step)
    part.poll()
    clock.now_s += works_after_s
    write_step(run_dir, step=step + 10, time_s=(step + 10) * 0.5, at_s=clock.now_s)
    part.poll()
    return part


def test_a_part_that_failed_costs_what_was_lost_and_the_time_until_work_went_on(tmp_path: Path) -> None:
    clock = Clock()
    first = begin(tmp_path, clock, step=0)
    clock.now_s = 1095.0
    write_step(tmp_path, step=180, time_s=90.0, at_s=1095.0)
    clock.now_s = 1100.0
    first.end("failed")
    clock.now_s = 1130.0
    second = begin(tmp_path, clock, step=100, works_after_s=8.0)
    clock.now_s = 1200.0
    second.end("finished")
    found = downtime_of(read_parts(tmp_path), now_s=1200.0)
    # 80 steps of half a second again; the last sign at 1095, noticed at 1100, resumed at 1130, at work from 1138 on
    assert found.to_json() == {
        "post_checkpoint_s": 40.0, "detection_s": 5.0, "diagnosis_s": 30.0, "reinitialisation_s": 8.0,
        "total_s": 83.0, "run_s": 200.0, "num_incidents": 1,
    }  # fmt: skip
    assert measured_mtbf_s(read_parts(tmp_path), now_s=1200.0) == ((86400 + 170) / 2, 1)


def test_a_part_whose_process_was_killed_is_found_by_the_next_one(tmp_path: Path) -> None:
    clock = Clock()
    begin(tmp_path, clock, step=0)
    clock.now_s = 2000.0
    begin(tmp_path, clock, step=0)
    ended = [line for line in read_parts(tmp_path) if line["what"] == "ended"]
    assert [(line["how"], line["at"], line["step"]) for line in ended] == [("lost", 1005.0, 10)]
    found = downtime_of(read_parts(tmp_path), now_s=2005.0)
    assert (found.post_checkpoint_s, found.detection_s, found.diagnosis_s) == (5.0, 0.0, 995.0)


def test_a_person_who_stops_a_run_is_no_fault(tmp_path: Path) -> None:
    clock = Clock()
    began_s = clock.now_s
    begin(tmp_path, clock, step=0).end("stopped")
    clock.now_s += 40_000.0  # a night, which is no time of the run
    begin(tmp_path, clock, step=10).end("finished")
    found = downtime_of(read_parts(tmp_path), now_s=clock.now_s)
    assert found.num_incidents == 0 and found.run_s == clock.now_s - began_s - 40_000.0
    assert measured_mtbf_s(read_parts(tmp_path), now_s=clock.now_s)[1] == 0


def test_broken_files_tell_nothing_and_end_nothing(tmp_path: Path) -> None:
    assert read_parts(tmp_path) == [] and downtime_of([], now_s=1.0).total_s == 0 and chosen_interval(tmp_path) is None
    (tmp_path / "parts.jsonl").write_bytes(
        b'[]\n{"what":"begun"}\n{"what":"odd","at":1}\n\xff\n{"what":"ended","at":9}'
    )
    assert [line["what"] for line in read_parts(tmp_path)] == ["ended"]
    for text in (
        "",
        "{}",
        '{"cost_s": "x", "step_s": 1}',
        '{"cost_s": 1, "step_s": 0}',
        '{"cost_s": NaN}',
    ):
        (tmp_path / "checkpoint-cost.json").write_text(text)
        assert chosen_interval(tmp_path) is None
    blocked = tmp_path / "file"
    blocked.touch()
    RunParts(blocked).end("failed")


@pytest.mark.parametrize(("failures", "steps", "seen"), [(0, 831, "no failure seen"), (15, 207, "15 failures seen")])
def test_checkpoints_come_closer_with_failures(tmp_path: Path, failures: int, steps: int, seen: str) -> None:
    lines = [{"what": "begun", "at": 1.0}, {"what": "ended", "at": 1.5, "how": "failed"}] * failures
    (tmp_path / "parts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoint-cost.json").write_text('{"cost_s": 1.0, "step_s": 0.5}')
    found = chosen_interval(tmp_path)
    assert found is not None and found[0] == pytest.approx(steps, abs=2) and seen in found[1]
