"""What the chaos benchmark says of a run's files: it finds a replica that differs, and a time without rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
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


def test_who_has_its_own_state_is_held_against_the_same_bytes(checks: Any) -> None:
    import chaos_job

    fetched = chaos_job.Life(host=0, began_s=100.0, replica=3, live_s=104.0, state_bytes=1_000_000)
    own = chaos_job.Life(host=0, began_s=200.0, replica=4, live_s=201.0, has_own=True)
    rounds = {0: [line(0, crc=0, at_s=108.0, members=(3,)), line(1, crc=0, at_s=209.0, members=(3, 4))]}
    found = checks.rejoins([fetched, own], rounds, rates=["4mbit"])
    assert [(one["has_own"], one["took_s"], one["transfer_s"], one["is_in_time"]) for one in found] == [
        (False, 8, 2, True), (True, 9, 2, False),
    ]  # fmt: skip


def test_what_was_trained_and_waited_is_added_up_over_all_replicas(checks: Any, tmp_path: Path) -> None:
    for replica, fraction in ((0, 1.0), (1, 0.5)):
        folder = tmp_path / f"host-{replica}"
        folder.mkdir()
        lines = [
            {"kind": "step", "time_s": 2.0, "tokens": 100, "compute_fraction": 1.0},
            {"kind": "eval", "time_s": 3.0},
            {"kind": "step", "time_s": 6.0, "tokens": 300, "compute_fraction": fraction},
        ]
        text = "\n".join(json.dumps(one) for one in lines)
        (folder / f"metrics-replica-{replica}.jsonl").write_text(text + '\n{"half a line')
    assert checks.trained(tmp_path) == {"tokens_trained": 600, "loop_s": 12.0, "waited_s": 2.0}


def test_a_process_whose_words_are_read_before_it_is_seen_has_a_life_of_its_own(checks: Any, tmp_path: Path) -> None:
    import chaos_job

    job = chaos_job.ChaosJob(types.SimpleNamespace(num_hosts=1), tmp_path / "run", step_s=0.1, words=[])
    log = job.hosts[0].folder / "logs" / "replica-process-0.err"
    log.parent.mkdir(parents=True)
    there = {0: 11}
    job.processes = lambda: dict(there)
    job.look()
    log.write_text("10:00:00 replica 0 takes part from step 0\n")
    job.look()
    with log.open("a") as more:
        more.write("10:00:09 going on from its own state of step 5\n10:00:09 replica 3 takes part from step 5\n")
    there[0] = 12
    job.look()
    there[0] = 13
    job.look()
    lives = job.hosts[0].lives
    assert [(life.replica, life.has_own, life.ended_s is None) for life in lives] == [
        (0, False, False), (3, True, False), (None, False, True),
    ]  # fmt: skip
    assert all(life.live_s is None or (life.ended_s or 0) >= life.live_s for life in lives)


@pytest.mark.parametrize("kind", ["elastic-replica", "replica"])
def test_what_slows_steps_finds_the_names_that_it_replaces(kind: str) -> None:
    """A renamed method would end every replica of the tests that use it, each after a long wait."""
    patches = Path(__file__).parents[2] / "benchmarks" / "chaos" / "slow_steps" / "sitecustomize.py"
    code = f"import runpy, sys; sys.orig_argv = ['', '-m', 'thinwire.cli.processes', {kind!r}]; "
    code += f"runpy.run_path({str(patches)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CHAOS_STEP_S": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
