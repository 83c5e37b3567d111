"""What the chaos benchmark says of a run's files: it finds a replica that differs, and a time without rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "chaos"))
    import chaos_checks

    return chaos_checks


def line(round: int, *, crc: int, at_s: float, members: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return {"round": round, "crc": crc, "at_s": at_s, "members": list(members)}


def test_rounds_that_two_replicas_hold_differently_are_found(checks: Any, tmp_path: Path) -> None:
    for replica, crc in ((0, 5), (1, 6)):
        folder = tmp_path / f"host-{replica}"
        folder.mkdir()
        lines = [line(0, crc=7, at_s=1.0), line(1, crc=crc, at_s=2.0), line(2 + replica, crc=replica, at_s=3.0)]
        text = "\n".join(json.dumps(one) for one in lines)
        (folder / f"rounds-replica-{replica}.jsonl").write_text(text + '\n{"half a line')
    rounds = checks.applied(tmp_path)
    compared, odd = checks.desyncs(rounds)
    assert compared == 2 and [one["round"] for one in odd] == [1]
    rounds[1][1]["crc"] = 5
    assert checks.desyncs(rounds) == (2, [])
    rounds[1][1]["members"] = [0]
    assert [one["round"] for one in checks.desyncs(rounds)[1]] == [1]


def test_the_longest_time_without_a_round_comes_first(checks: Any) -> None:
    rounds = {0: [line(0, crc=0, at_s=1.0), line(1, crc=0, at_s=9.0)], 1: [line(1, crc=0, at_s=4.0)]}
    rounds[1].append(line(2, crc=0, at_s=10.0))
    assert checks.gaps(rounds) == [(4.0, 6.0), (1.0, 3.0)]


def test_coming_back_is_over_when_a_round_counts_the_replica(checks: Any) -> None:
    import chaos_job

    back = chaos_job.Life(host=0, began_s=100.0, replica=3, live_s=104.0, state_bytes=1_000_000)
    never = chaos_job.Life(host=0, began_s=200.0, replica=4, live_s=204.0, state_bytes=1_000_000)
    rounds = {0: [line(0, crc=0, at_s=105.0, members=(0,)), line(1, crc=0, at_s=108.0, members=(0, 3))]}
    found = checks.rejoins([back, never], rounds, rates=["4mbit"])
    assert [(one["took_s"], one["transfer_s"], one["is_in_time"]) for one in found] == [(8, 2, True), (None, 2, False)]
    assert checks.live_s([back, never], end_s=210.0) == 106.0 + 6.0
