"""What the chaos benchmark reads from torchft's replicas: who takes part, and where a job began again from nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "chaos"))
    import torchft_checks

    return torchft_checks


def line(round: int, *, at_s: float, members: tuple[int, ...], crc: int = 1) -> dict[str, Any]:
    return {"round": round, "crc": crc, "at_s": at_s, "members": list(members), "tokens": 1280}


def test_a_job_that_begins_again_is_no_desync_and_its_steps_count_on(checks: Any) -> None:
    import chaos_checks

    first = {
        0: [line(0, at_s=1, members=(0, 1)), line(1, at_s=2, members=(0, 1))],
        1: [line(0, at_s=1, members=(0, 1))],
    }
    again = {2: [line(0, at_s=9, members=(2, 3), crc=5), line(1, at_s=10, members=(2, 3), crc=6)]}
    rounds, num_eras = checks.in_eras(first | again)
    assert num_eras == 2
    assert [one["round"] for one in rounds[2]] == [2, 3]
    assert chaos_checks.desyncs(rounds) == (1, [])
    assert chaos_checks.gaps(rounds)[0] == (2, 7)


def test_a_late_commit_of_a_member_is_no_beginning(checks: Any) -> None:
    import chaos_checks

    late = {
        0: [line(0, at_s=1, members=(0, 1)), line(1, at_s=2, members=(0, 1))],
        1: [line(0, at_s=3, members=(0, 1), crc=7)],
    }
    rounds, num_eras = checks.in_eras(late)
    assert num_eras == 1
    compared, odd = chaos_checks.desyncs(rounds)
    assert compared == 1 and [one["round"] for one in odd] == [0]


def test_half_a_line_of_a_killed_replica_is_passed_over(checks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "host-1"
    folder.mkdir()
    whole = json.dumps({"event": "joined", "at_s": 5.0, "step": 3})
    (folder / "events-replica-4.jsonl").write_text(whole + '\n{"event": "quo')
    assert checks.said(tmp_path) == {4: [{"event": "joined", "at_s": 5.0, "step": 3}]}


def test_a_replica_takes_part_from_its_first_quorum_without_an_error(checks: Any) -> None:
    import chaos_job
    import torchft_chaos_job

    life = chaos_job.Life(host=0, began_s=1.0, replica=0)
    for event in (
        {"event": "joined", "at_s": 2.0, "step": 4},
        {"event": "quorum", "at_s": 3.0, "error": "timed out"},
        {"event": "quorum", "at_s": 4.0, "error": None},
        {"event": "quorum", "at_s": 5.0, "error": None},
    ):
        torchft_chaos_job.take_event(life, event)
    assert life.has_own and life.live_s == 4.0
