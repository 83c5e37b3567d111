"""What is read of a run's folder, whatever stands in it."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsed_run import finding_line, write_records
from tests.sample_runs import append, step_line, write_run
from tests.synthetic_jobs import InjectedFault
from thinwire.errors import DataError
from thinwire.monitor.dashboard.chart_data import Curve
from thinwire.monitor.dashboard.snapshot import RunFollower, snapshot
from thinwire.monitor.dashboard.sources import RunWindow
from thinwire.monitor.detect.live import RecordWindow
from thinwire.monitor.findings import Place
from thinwire.runlog.reader import MOST_LINE_BYTES
from thinwire.runlog.records import Operation, TransferEnd
from thinwire.runlog.tailer import JsonlTailer

SLOW = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=30, severity=5.0)


def cell(found: dict[str, Any], source: int, destination: int) -> dict[str, Any]:
    (one,) = [one for one in found["matrix"]["cells"] if (one["from"], one["to"]) == (source, destination)]
    return dict(one)


def test_a_slow_link_is_the_hot_cell_of_the_matrix_and_the_headline(tmp_path: Path) -> None:
    found = snapshot(write_records(tmp_path, SLOW))
    assert 4 < cell(found, 0, 2)["times_longer"] < 6
    assert max(one["times_longer"] for one in found["matrix"]["cells"] if (one["from"], one["to"]) != (0, 2)) < 1.5
    headline = found["headline"]
    assert headline | {"level": "trouble", "text": "communication slow: link 0 -> 2", "ranks": [0, 2]} == headline
    assert "Remedy: " in headline["detail"] and headline["detail"].endswith(".")
    assert found["findings"]["source"] == "page" and found["findings"]["findings"][0]["cells"] == [[0, 2]]
    json.dumps(found, allow_nan=False)


def test_what_has_healed_is_told_as_over_and_no_trouble_any_more(tmp_path: Path) -> None:
    place = Place(kind="link", ranks=(0, 2))
    fault = InjectedFault(kind="slow link", place=place, begin=20, end=34, severity=6.0)
    found = snapshot(write_records(tmp_path / "healed", fault, rounds=80))
    assert [(one["where"], one["is_over"]) for one in found["findings"]["findings"]] == [("link 0 -> 2", True)]
    assert "link 0 -> 2" not in found["headline"]["text"]


def test_a_calm_run_is_told_to_be_well(tmp_path: Path) -> None:
    found = snapshot(write_records(tmp_path))
    assert found["headline"] == {
        "level": "healthy", "text": "healthy", "ranks": [],
        "detail": "No fault found on 6 links or in any replica's work.",
    }  # fmt: skip
    assert found["findings"]["findings"] == []
    assert [lane["rank"] for lane in found["timeline"]["lanes"]] == [0, 1, 2]
    for lane in found["timeline"]["lanes"]:
        assert lane["num_open"] == 0 and lane["computing"] + lane["waiting"] <= 1.0 + 1e-6


def test_a_round_that_stands_still_is_open_to_the_end_of_its_lane(tmp_path: Path) -> None:
    found = snapshot(
        write_records(tmp_path, InjectedFault(kind="killed", place=Place(kind="rank", ranks=(1,)), begin=20))
    )
    lanes = {lane["rank"]: lane for lane in found["timeline"]["lanes"]}
    assert lanes[0]["num_open"] == lanes[2]["num_open"] == 1
    assert lanes[0]["work"][-1][0] == "waiting" and lanes[0]["work"][-1][2] == 0.0
    assert "rank 1" in found["headline"]["text"]


def test_the_usual_time_of_a_link_outlives_the_window_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.monitor.dashboard.sources.MOST_RECORDS", 600)
    monkeypatch.setattr("thinwire.monitor.dashboard.snapshot._MOST_SHARE", 1e9)
    whole = {path.name: path.read_text().splitlines(keepends=True) for path in
             write_records(tmp_path / "all", SLOW, rounds=120, hosts=("a", "a", "a")).iterdir()}  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    follower = RunFollower(run)
    for part in range(8):
        for name, lines in whole.items():
            begin, end = (len(lines) * edge // 8 for edge in (part, part + 1))
            with (run / name).open("a") as file:
                file.writelines(lines[begin:end])
        follower.poll()
        found = follower.sections()
    assert cell(found, 0, 2)["times_longer"] > 3.5  # though all that is still there is slow


HOSTS = tuple("abcdefghijkl")
# of twelve hosts that all exchange, the page keeps the latest 45 rounds of those that it follows
HEALED = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=20, end=34, severity=6.0)


def _told(sections: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(one["where"], one["is_over"]) for one in sections["findings"]["findings"]]


@pytest.mark.slow
def test_a_page_that_judges_itself_remembers_what_the_records_that_it_keeps_tell_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.monitor.dashboard.snapshot._MOST_SHARE", math.inf)
    whole = write_records(tmp_path / "whole", HEALED, rounds=90, hosts=HOSTS)
    written = {path.name: path.read_text().splitlines(keepends=True) for path in whole.glob("records-rank-*.jsonl")}
    run = tmp_path / "run"
    run.mkdir()
    follower = RunFollower(run)
    for part in range(4):
        for name, lines in written.items():
            with (run / name).open("a") as file:
                file.writelines(lines[part * len(lines) // 4 : (part + 1) * len(lines) // 4])
        while follower.poll():
            pass
        found = follower.sections()
    assert ("link 0 -> 2", True) in _told(found)
    latest = tmp_path / "latest"  # what it keeps of them
    latest.mkdir()
    for name, lines in written.items():
        (latest / name).write_text("".join([*lines[:2], *lines[len(lines) // 2 :]]))
    assert _told(snapshot(latest)) == []


@pytest.mark.slow
def test_a_run_that_is_over_is_judged_by_all_of_its_records_unless_they_are_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_records(tmp_path, HEALED, rounds=90, hosts=HOSTS)
    write_run(tmp_path / "other")
    (run / "summary.json").write_text((tmp_path / "other" / "summary.json").read_text())
    assert ("link 0 -> 2", True) in _told(snapshot(run))
    slow = write_records(tmp_path / "slow", SLOW)
    (slow / "summary.json").write_text((run / "summary.json").read_text())
    monkeypatch.setattr("thinwire.monitor.dashboard.snapshot._MOST_DIAGNOSED_BYTES", 1000)
    assert _told(snapshot(slow)) == [("link 0 -> 2", False)], "what is kept is judged"


def test_a_run_without_a_recorder_is_drawn_from_its_metrics_and_transfers(tmp_path: Path) -> None:
    found = snapshot(write_run(tmp_path / "demo"))
    assert found["run"] | {"name": "demo", "state": "finished", "steps": 300, "step": 300} == found["run"]
    assert [one["state"] for one in found["replicas"]] == ["finished", "finished"]
    links = {(link["from"], link["to"]): link for link in found["links"]["links"]}
    told = [json.loads(line) for line in (tmp_path / "demo" / "transfers-replica-0.jsonl").read_text().splitlines()]
    sent = [line["wire_bytes"] for line in told if line["direction"] == "sent"]
    assert (
        links[0, 1]["bytes"] == sum(sent) and links[0, 1]["messages"] == len(sent) and links[0, 1]["reported_by"] == 0
    )
    both = [
        line for replica in (0, 1)
        for line in map(json.loads, (tmp_path / "demo" / f"transfers-replica-{replica}.jsonl").read_text().splitlines())
        if line["direction"] == "sent" and not line["error"]
    ]  # fmt: skip
    rows = {row["stream"]: row for row in found["links"]["streams"]}
    assert set(rows) == {line["kind"] for line in both}
    for name, row in rows.items():
        sizes = [line["wire_bytes"] for line in both if line["kind"] == name]
        assert (row["messages"], row["bytes"], row["most_bytes"]) == (len(sizes), sum(sizes), max(sizes))
        assert 8 * max(sizes) <= row["peak_bits_per_s"] <= 8 * sum(sizes)
    assert found["curves"]["evaluations"] and len(found["curves"]["loss"]) == 2
    assert "metrics and finished transfers" in found["notes"]["missing"]["timeline"]


def test_the_runs_own_findings_stand_until_they_are_over(tmp_path: Path) -> None:
    write_records(tmp_path)
    path = tmp_path / "findings.jsonl"
    path.write_text(
        finding_line(where="rank 1", places=[{"kind": "rank", "ranks": [1]}], confidence=0.6) + finding_line()
    )
    found = snapshot(tmp_path)
    assert [one["where"] for one in found["findings"]["findings"]] == ["link 0 -> 2", "rank 1"]
    assert found["headline"]["text"] == "communication slow: link 0 -> 2, and 1 more"
    with path.open("a") as file:
        file.write(finding_line(state="over", at=2e9))
    found = snapshot(tmp_path)
    assert [(one["where"], one["is_over"]) for one in found["findings"]["findings"]] == [
        ("rank 1", False), ("link 0 -> 2", True),
    ]  # fmt: skip
    assert found["findings"]["findings"][1]["over_at"] == 2e9 and found["findings"]["findings"][1]["at"] == 1e9


def test_actions_and_the_downtime_budget_are_told(tmp_path: Path) -> None:
    action = {"at": 5.0, "action": "exclude", "target": "replica 1", "dry_run": True, "finding": 0, "result": "none"}
    (tmp_path / "actions.jsonl").write_text(json.dumps(action) + "\n[]\n" + '{"action": 3}\n')
    (tmp_path / "downtime.json").write_text('{"detection_s": 1.5, "total_s": 2, "run_s": 60, "more": "x"}')
    found = snapshot(tmp_path)
    assert found["actions"]["actions"] == [
        {
            "at": 5.0,
            "action": "exclude",
            "target": "replica 1",
            "is_dry_run": True,
            "finding": "0",
            "why": "",
            "result": "none",
        }
    ]
    assert found["downtime"] == {"detection_s": 1.5, "total_s": 2.0, "run_s": 60.0}
    assert len(found["notes"]["refused"]) == 2 and "actions.jsonl:2: no JSON object" in found["notes"]["refused"][0]


def test_an_elastic_folder_tells_who_takes_part_and_no_secret(tmp_path: Path) -> None:
    member = {
        "what": "member", "host": "h", "address": "10.0.0.7", "port": 5, "step": 9, "step_s": 0.1, "paused": False,
        "steps_per_interval": 1.0, "tokens_s": 50.0, "loss": 3.5, "token": "very secret", "held_step": 0,
    }  # fmt: skip
    append(
        tmp_path / "coordinator.jsonl",
        *({**member, "replica": number, "state": "active"} for number in (0, 1, 2)),
        {"what": "gone", "replica": 2}, {"what": "finding", "text": "replica 2 is gone"},
    )  # fmt: skip
    append(tmp_path / "metrics-replica-0.jsonl", step_line(20))
    rounds = {
        "round": 4,
        "fragment": 1,
        "launch_step": 20,
        "members": [0, 1],
        "is_counted": True,
        "crc": 1,
        "at_s": 7.5,
    }
    append(tmp_path / "rounds-replica-0.jsonl", rounds)
    found = snapshot(tmp_path)
    assert [(one["replica"], one["state"]) for one in found["replicas"]] == [
        (0, "training"), (1, "elsewhere"), (2, "gone"),
    ]  # fmt: skip
    assert found["run"]["is_elastic"] and found["elastic"]["messages"] == ["replica 2 is gone"]
    assert found["elastic"]["rounds"][0]["members"] == [0, 1]
    assert "other hosts" in found["notes"]["missing"]["loss"] and "one end only" in found["notes"]["missing"]["matrix"]
    assert "very secret" not in json.dumps(found) and "10.0.0.7" not in json.dumps(found)


def test_who_says_nothing_any_more_is_trouble_and_a_run_that_is_over_is_not(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False)
    for path in tmp_path.glob("metrics-*"):
        path.write_text(path.read_text().replace('"step": 300', '"step": 299'))
    now = time.time()
    for path in tmp_path.glob("*-replica-1.jsonl"):
        os.utime(path, (now - 600, now - 600))
    found = snapshot(tmp_path, now=now)
    assert [one["state"] for one in found["replicas"]] == ["training", "silent"]
    assert found["headline"]["text"] == "replica 1 is silent" and found["headline"]["level"] == "trouble"
    write_run(tmp_path)
    assert snapshot(tmp_path, now=now + 1e6)["headline"]["text"] == "finished, healthy"


def test_healthy_tells_what_was_not_checked(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False)
    headline = snapshot(tmp_path)["headline"]
    assert headline["level"] == "healthy" and "this run records no rounds" in headline["detail"]
    (tmp_path / "config.json").write_text('{"run": {"replicas": 1, "steps": 300}}')
    assert "One replica has no links" in snapshot(tmp_path)["headline"]["detail"]


def test_a_run_is_starting_until_its_first_step(tmp_path: Path) -> None:
    config = {"run": {"replicas": 2, "steps": 300}, "output": {"log_every": 10}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    append(tmp_path / "metrics-replica-0.jsonl", {"kind": "warning", "step": 0, "message": "slow disk"})
    headline = snapshot(tmp_path)["headline"]
    assert headline["level"] == headline["text"] == "starting"
    assert headline["detail"] == "Waiting for 2 replicas. Numbers appear after step 10."
    append(tmp_path / "metrics-replica-0.jsonl", step_line(10))
    assert snapshot(tmp_path)["headline"]["level"] == "healthy"


def test_an_empty_folder_waits_and_no_folder_is_refused(tmp_path: Path) -> None:
    found = snapshot(tmp_path)
    assert found["run"]["state"] == "waiting" and found["headline"]["level"] == "starting"
    assert set(found["notes"]["missing"]) >= {
        "loss",
        "speed",
        "links",
        "matrix",
        "timeline",
        "actions",
        "downtime",
    }
    with pytest.raises(DataError, match="there is no folder"):
        snapshot(tmp_path / "none")


def test_a_replica_that_was_resumed_writes_its_curve_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics-replica-0.jsonl"
    follower = RunFollower(tmp_path)
    append(path, *(step_line(step, loss=float(step)) for step in (10, 20, 30)))
    follower.poll()
    path.write_text("")
    append(path, step_line(10, loss=10.0), step_line(20, loss=1.5))
    follower.poll()
    (curve,) = follower.sections()["curves"]["loss"]
    assert curve["points"] == [[10.0, 10.0], [20.0, 1.5]]


@pytest.mark.parametrize("seed", range(4))
def test_garbage_is_told_and_never_more(tmp_path: Path, seed: int) -> None:
    write_run(tmp_path, steps=60)
    write_records(tmp_path, rounds=8)
    (tmp_path / "findings.jsonl").write_text(
        finding_line() + finding_line(evidence=[1], confidence="x", places={"a": 1})
    )
    append(tmp_path / "coordinator.jsonl", {"what": "member", "replica": -1}, {"what": "gone"}, {"what": ["a"]})
    append(tmp_path / "rounds-replica-0.jsonl", {"round": 1e999, "members": [None]}, {"round": "x", "members": []})
    chance = random.Random(seed)
    for path in sorted(tmp_path.iterdir()):
        raw = bytearray(path.read_bytes())
        for _ in range(12):
            at = chance.randrange(len(raw) + 1)
            raw[at:at] = chance.choice((b"\n", b"1e999", b"NaN", b"-1", b"[" * 2000, b"\xff\x00", b'"}\n{"', b"null"))
        path.write_bytes(raw)
    found = snapshot(tmp_path)
    json.dumps(found, allow_nan=False)
    assert found["notes"]["refused"]


def test_lines_that_are_told_twice_or_too_long_or_by_another_rank(tmp_path: Path) -> None:
    path = tmp_path / "metrics-replica-0.jsonl"
    path.write_bytes(b'{"x":"' + b"y" * (2 * MOST_LINE_BYTES) + b'"}\n')
    append(path, step_line(10))
    write_records(tmp_path, rounds=3)
    (tmp_path / "records-rank-2.jsonl").write_text((tmp_path / "records-rank-1.jsonl").read_text())
    found = snapshot(tmp_path)
    assert found["replicas"][0]["step"] == 10
    assert any("metrics-replica-0.jsonl:1: longer than" in words for words in found["notes"]["refused"])
    assert any("a record of rank 1 in the file of rank 2" in words for words in found["notes"]["refused"])


def test_a_case_that_becomes_exact_is_no_second_finding(tmp_path: Path) -> None:
    lines = [
        json.loads(finding_line(where=where)) | {"case": 4} for where in ("ambiguous: link 0 -> 2 or rank 2", "rank 2")
    ]
    append(tmp_path / "findings.jsonl", *lines)
    assert [one["where"] for one in snapshot(tmp_path)["findings"]["findings"]] == ["rank 2"]
    append(tmp_path / "findings.jsonl", lines[0] | {"state": "over"})
    assert [one["is_over"] for one in snapshot(tmp_path)["findings"]["findings"]] == [True]


def test_who_is_at_the_last_step_is_not_called_silent_while_others_evaluate(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False)
    now = time.time() + 600
    os.utime(tmp_path / "metrics-replica-0.jsonl", (now, now))
    found = snapshot(tmp_path, now=now)
    assert [one["state"] for one in found["replicas"]] == ["finished", "finished"]
    assert found["headline"]["text"] == "healthy"


def test_records_that_were_put_aside_are_no_new_beginning(tmp_path: Path) -> None:
    write_records(tmp_path, rounds=30)
    follower = RunFollower(tmp_path)
    follower.poll()

    def num_ends() -> int:
        return sum(end.rank == 0 for end in follower._sources.window.records().transfers)

    before = num_ends()
    path = tmp_path / "records-rank-0.jsonl"
    head = path.read_text().splitlines(keepends=True)[:2]
    path.rename(tmp_path / "records-rank-0.old.jsonl")
    path.write_text("".join(head))
    follower.poll()
    assert num_ends() == before > 0
    (tmp_path / "records-rank-0.old.jsonl").unlink()
    path.write_text(head[0])  # a new run in this folder
    follower.poll()
    assert num_ends() == 0


def test_pipes_in_the_folder_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("config.json", "summary.json", "findings.jsonl", "metrics-replica-0.jsonl"):
        os.mkfifo(tmp_path / name)
    assert snapshot(tmp_path)["run"]["state"] == "waiting"
    assert JsonlTailer(tmp_path / "findings.jsonl").poll() == (False, [])


def test_memory_is_bounded_however_long_a_run_is() -> None:
    curve, window = Curve(most=100), RecordWindow(most_records=50)
    for number in range(5000):
        curve.add(float(number), 1.0)
        window.add(Operation(communicator="w", rank=0, sequence=number, kind="k", posted_s=float(number)))
        end = TransferEnd(
            communicator="w", rank=0, peer=1, direction="sent", operation=number, num_bytes=1, posted_s=0.0
        )
        window.add(end)
    assert len(curve.points()) <= 101 and curve.points()[0][0] == 0.0 and curve.points()[-1][0] == 4999.0
    kept = window.records()
    assert len(kept.operations) == 50 and len(kept.transfers) == 100


def test_an_end_that_was_done_is_not_undone_by_a_line_that_comes_late() -> None:
    window = RunWindow()
    words: dict[str, Any] = {"communicator": "w", "rank": 0, "sequence": 1, "kind": "k", "posted_s": 1.0}
    for done_s in (None, 2.0, None):
        window.add_record(0, Operation(**words, done_s=done_s))
    assert [one.done_s for one in window.records().operations] == [2.0]
