"""A replica of two ranks in a job with one of one, by the command line: a rank is killed, and all comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_processes import send
from test_elastic_run import STEP_S, active, processes, slower_file, start, wait_until
from test_elastic_run import runs as runs
from test_elastic_run import texts as texts
from training_runs import DEADLINE_S, Started, with_slow_steps

from thinwire.runlog.run_folder import read_files
from thinwire.training.elastic.job import LocalSettings

pytestmark = pytest.mark.multiprocess


@contextlib.contextmanager
def host_that_joins(settings: LocalSettings, folder: Path, *more: str, slower: Path) -> Iterator[subprocess.Popen[str]]:
    words = ["join", settings.invitation, "--secret", settings.secret, "--out", str(folder), "--threads", "1"]
    words += ["--data", str(settings.data), *more]
    joining = subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli.main", *words],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **with_slow_steps(STEP_S, slower_while=slower)},
    )  # fmt: skip
    try:
        yield joining
    finally:
        joining.kill()
        joining.communicate()


def rounds_in(folder: Path) -> dict[int, dict[int, int]]:
    """Return by replica and round what the global parameters were."""
    return {
        int(path.stem.rpartition("-")[2]): {
            line["round"]: line["crc"] for line in map(json.loads, path.read_text().splitlines())
        }
        for path in folder.glob("rounds-replica-*.jsonl")
    }


def test_a_killed_rank_takes_its_replica_out_and_its_return_brings_it_back_beside_one_of_another_number_of_ranks(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run, other, steps = tmp_path / "run", tmp_path / "other", 120
    more = ["--ranks-per-replica", "2", "--batch-size", "2"]
    slower_file(run).touch()  # so that few steps pass before the other host has joined
    started = start(runs, texts, run, steps=steps, replicas=1, more=more)
    started.wait_for(run / "elastic.json")
    with host_that_joins(LocalSettings.load(run), other, "--batch-size", "5", slower=slower_file(run)) as joining:
        step = wait_until(run, lambda found: len(active(found)) == 2, started)["step"]
        slower_file(run).unlink()
        wait_until(run, lambda found: found["step"] > step + 20, started)  # so that each holds all that it needs
        lost, (kept,) = set(rounds_in(run)), rounds_in(other)
        (rank,) = processes(started, "replica-rank")
        leader = rank.parent()
        slower_file(run).touch()
        assert send(rank, signal.SIGKILL)
        wait_until(run, lambda found: not lost & active(found), started)
        found = wait_until(run, lambda found: len(active(found)) == 2, started)
        wait_until(run, lambda _: bool(set(rounds_in(run)) - lost), started)  # it has taken part in a round
        slower_file(run).unlink()
        assert leader is not None and not leader.is_running(), "no rank outlives another"
        assert started.end() == 0 and joining.wait(timeout=DEADLINE_S) == 0, started.stderr
    assert "rank 1 of this replica was ended by SIGKILL" in started.stderr
    is_named = any(f"replica {min(lost)} on " in text and "lost one of its ranks" in text for text in found["findings"])
    assert is_named, found["findings"]
    # it says goodbye; one that falls silent is waited for for longer, and told of as silent
    assert not any("silent" in text for text in found["findings"]), found["findings"]
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    # the one that writes it refuses it where replicas end with different parameters
    assert [(told["steps"], told["replicas"], told["elastic"]["replicas_ever"]) for told in summaries] == [
        (steps, 2, 3)
    ]
    (back,) = set(rounds_in(run)) - lost
    ours, theirs = rounds_in(run)[back], rounds_in(other)[kept]
    assert set(ours) & set(theirs) and all(ours[number] == theirs[number] for number in set(ours) & set(theirs))
    # the first host also knows what the passes of the other one took, and a replica of two ranks tells of its own
    timed = {span.rank for span in read_files([run]).spans if span.forward_s and span.backward_s}
    assert {back, kept} <= timed
