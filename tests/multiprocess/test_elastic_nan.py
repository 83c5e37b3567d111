"""Elastic runs with real processes whose parts are bad, by NaN or by their size: of one replica, and of all."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from live_processes import named_in, read_pid
from test_elastic_run import active, pid_file, rounds, runs, start, texts, wait_until
from training_runs import Started

from thinwire.training.elastic.coordinator_process import JOURNAL_FILE

__all__ = ["runs", "texts"]

INTERVAL = 20


def started_with_nan(
    runs: list[Started], texts: Path, run: Path, folder: Path, *, replicas: int, variable: str = "CHAOS_NAN"
) -> Started:
    folder.mkdir()
    more = ("--sync-interval", str(INTERVAL))
    environment = {variable: str(folder)}
    return start(runs, texts, run, steps=100_000, replicas=replicas, more=more, environment=environment)


def journal(run: Path) -> list[dict[str, Any]]:
    lines = (run / JOURNAL_FILE).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def decisions(run: Path) -> list[dict[str, Any]]:
    return [line for line in journal(run) if line["what"] == "decision"]


def nan_findings(found: dict[str, Any]) -> list[str]:
    return [text for text in found["findings"] if "NaN" in text]


def counted_windows(run: Path) -> Counter[tuple[int, int]]:
    """Return how often each window, by shard and number, was in the part of a replica that a round counted."""
    counts: Counter[tuple[int, int]] = Counter()
    at: dict[tuple[int, int], int] = {}  # by replica and shard: the first window that no round has counted
    for line in journal(run):
        if line["what"] == "leases":
            for replica, leases in line["leases"].items():
                for lease in leases:
                    at.setdefault((int(replica), lease["shard"]), lease["start"])
        if line["what"] == "decision":
            for replica, used in line["used"].items():
                for shard, until in used.items():
                    key = int(replica), int(shard)
                    counts.update((key[1], window) for window in range(at[key], until))
                    at[key] = max(at[key], until)
    return counts


def lives(log: Path) -> list[tuple[int, int]]:
    """Return under which numbers, and from which steps on, a process has taken part."""
    found = re.findall(r"replica (\d+) takes part from step (\d+)", log.read_text())
    return [(int(replica), int(step)) for replica, step in found]


def test_a_replica_with_nan_is_dropped_fetches_the_state_and_what_it_trained_on_is_trained_again(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "nan"
    started = started_with_nan(runs, texts, run, folder, replicas=3)
    wait_until(run, lambda found: len(active(found)) == 3 and found["rounds"] > 6, started)
    process = named_in(pid_file(run, 2))
    log = run / "logs" / "replica-process-2.err"
    ((first, _),) = lives(log)
    (folder / str(process.pid)).touch()
    wait_until(run, lambda found: "was dropped" in log.read_text(), started)
    (folder / str(process.pid)).unlink()
    dropped = wait_until(run, lambda found: True, started)["step"]
    # the lives before were bad from their beginning: who takes part in a mean from here on is finite again
    wait_until(run, lambda found: any(max(line["members"]) > 2 for line in decisions(run)), started)
    found = wait_until(run, lambda found: found["step"] > dropped + 4 * INTERVAL, started)
    assert len(active(found)) == 3
    number, begin = lives(log)[-1]
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    said = log.read_text()
    assert "going on from its own state" not in said and "fetched the state of step" in said
    assert read_pid(pid_file(run, 2)) == process.pid, "the same process came back"
    # on a busy machine the first part of a later life, before any step, may have counted: that ends a finding
    later = {replica for replica, _ in lives(log)[1:-1]}
    has_counted = any(later & set(line["members"]) for line in decisions(run))
    told = nan_findings(found)
    assert len(told) == 1 or has_counted, told
    of_first = [text for text in told if f"replica {first} on" in text]
    assert of_first and "2 of its parts in a row hold NaN or infinity" in of_first[0]
    # no part of a bad life counted: between the drop and the first finite part there are none of its number
    own = [line for line in decisions(run) if number in line["members"]]
    assert own[0]["launch_step"] <= begin + INTERVAL
    last = max(line["launch_step"] for line in decisions(run) if first in line["members"])
    # two rounds with bad parts, then at most three intervals
    assert own[0]["launch_step"] <= last + 5 * INTERVAL
    counts = counted_windows(run)
    assert set(counts.values()) == {1}, "each window counted once"
    # all windows before those that are lent now have been counted: what the bad lives had went to others
    state = [line for line in journal(run) if line["what"] == "leases"][-1]
    lent = {lease["shard"] for leases in state["leases"].values() for lease in leases}
    open_shards = {int(shard) for shard in state["returned"]} | lent
    for shard in range(state["next"]):
        windows = sorted(window for of, window in counts if of == shard)
        assert windows == list(range(len(windows))), f"shard {shard} has a gap"
        assert shard in open_shards or len(windows) == state["shard_windows"]
    lines = journal(run)
    gone = next(n for n, line in enumerate(lines) if line["what"] == "gone" and line["replica"] == first)
    returned = next(line["returned"] for line in lines[gone:] if line["what"] == "leases")
    assert returned and all((int(shard), start) in counts for shard, start in returned.items())
    alike = {(line["round"], line["crc"]) for replica in (0, 1, number) for line in rounds(run, replica)}
    assert len(alike) == len({number for number, _ in alike}), "all replicas hold the same parameters"


def test_parts_of_one_replica_that_are_8_bytes_short_end_no_process_and_it_comes_back(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "short"
    started = started_with_nan(runs, texts, run, folder, replicas=3, variable="CHAOS_SHORT")
    wait_until(run, lambda found: len(active(found)) == 3 and found["rounds"] > 2, started)
    pids = [named_in(pid_file(run, index)).pid for index in range(3)]
    log = run / "logs" / "replica-process-2.err"
    ((first, _),) = lives(log)
    (folder / str(pids[2])).touch()
    wait_until(run, lambda found: "was dropped" in log.read_text(), started)
    (folder / str(pids[2])).unlink()
    wait_until(run, lambda found: any(max(line["members"]) > 2 for line in decisions(run)), started)
    found = wait_until(run, lambda found: len(active(found)) == 3, started)
    assert [read_pid(pid_file(run, index)) for index in range(3)] == pids
    told = [text for text in found["findings"] if "are malformed (" in text]
    assert "without the part of replica" in told[0] and f"replica {first} on" in told[0]
    assert f"replica {first} on" in told[1] and "was dropped: 2 of its parts in a row are malformed (" in told[1]
    alike = {(line["round"], line["crc"]) for replica in range(3) for line in rounds(run, replica)}
    assert len(alike) == len({number for number, _ in alike}), "all replicas hold the same parameters"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_in_which_all_replicas_have_nan_ends_with_one_error(
    texts: Path, tmp_path: Path, runs: list[Started], replicas: int
) -> None:
    run, folder = tmp_path / "run", tmp_path / "nan"
    started = started_with_nan(runs, texts, run, folder, replicas=replicas)
    wait_until(run, lambda found: len(active(found)) == replicas and found["rounds"] > 2, started)
    for index in range(replicas):
        (folder / str(named_in(pid_file(run, index)).pid)).touch()
    assert started.end() == 1
    errors = [line for line in started.stderr.splitlines() if line.startswith("thinwire: error")]
    assert len(errors) == 1 and "NaN or infinity; the model has diverged" in errors[0], started.stderr
    assert not [line for line in journal(run) if line["what"] == "finding" and "was dropped" in line["text"]]
