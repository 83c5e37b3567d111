"""`thinwire train` with real processes: stopped in every way it can be, resumed, and never leaving anything behind."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_processes import POLL_S, is_listening, is_running, kill, send, until
from processes import free_port
from rich.console import Console
from training_runs import (
    DEADLINE_S,
    DOCUMENTS,
    OPTIONS,
    Started,
    finish,
    metrics,
    result,
    sent_in_rounds,
    with_slow_steps,
    worker_of,
)

from thinwire.cli.tables import final_table
from thinwire.monitor.dashboard.snapshot import snapshot
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.report.comparison import compare_runs
from thinwire.runlog.run_folder import Summary, parse, read_files
from thinwire.runlog.run_numbers import RunNumbers
from thinwire.transport.base import JSON_BYTES
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.secret import make_secret


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Started, Path]:
    """Return a run that nothing disturbed, with its folder: what all others must come to."""
    folder = tmp_path_factory.mktemp("unbroken")
    return finish(start(texts, folder, steps=20)), folder / "run"


@pytest.fixture(scope="module")
def unbroken(whole: tuple[Started, Path]) -> dict[str, Any]:
    return result(whole[0])


def start(
    texts: Path, folder: Path, *, steps: int, replicas: int = 2, more: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Started:  # fmt: skip
    words = ["--replicas", str(replicas), "--steps", str(steps), "--data", str(texts), "--out", str(folder / "run")]
    return Started([*words, "--cache-dir", str(texts / ".cache"), *OPTIONS, *more], environment=environment)


def checkpoint(run: Path, step: int, *, replica: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}" / f"replica-{replica}.json"


def wait_for_checkpoints(started: Started, run: Path, step: int) -> None:
    """Wait until there is a step that the run can go on from, which takes the checkpoints of all replicas."""
    for replica in (0, 1):
        started.wait_for(checkpoint(run, step, replica=replica))


@pytest.fixture
def nothing_left() -> Iterator[Callable[[Started], None]]:
    """Note commands while they run, and hold at the end that nothing is left of them.

    Who carries a command's mark is asked, not who listens on its ports: a port that came free may be another's by then.
    """
    commands: list[Started] = []

    def note(started: Started) -> None:
        family = started.family()
        assert len(family) > 2, "the launcher and two replicas carry the mark"
        assert any(map(is_listening, family)), "the replicas' gloo groups listen while they run"
        commands.append(started)

    yield note
    left = [process for started in commands for process in started.family()]
    try:
        until(lambda: not any(map(is_running, left)), lambda: left)
    finally:
        kill(left)


def test_a_run_ends_with_one_object_on_stdout_and_a_whole_folder(whole: tuple[Started, Path]) -> None:
    started, run = whole
    assert len(started.stdout.splitlines()) == 1
    found = result(started)
    assert found["tokens"] == 2 * 20 * 16
    assert json.loads((run / "summary.json").read_text()) == found
    for name in (
        "config.json",
        "report.html",
        "model/model.safetensors",
        "model/config.json",
        "model/tokenizer.json",
        "samples.json",
    ):
        assert (run / name).stat().st_size > 0, name
    for replica in (0, 1):
        assert [line["step"] for line in metrics(run, replica) if line["kind"] == "step"] == [4, 8, 12, 16, 20]
        transfers = [json.loads(line) for line in (run / f"transfers-replica-{replica}.jsonl").read_text().splitlines()]
        sent = sum(line["wire_bytes"] for line in transfers if line["direction"] == "sent")
        # all that was counted, and the note at the end that carries the count itself
        assert sent == found["wire_bytes_sent"] + JSON_BYTES + HEADER_BYTES
        assert found["wire_bytes_sent"] > found["payload_bytes"] > 0


def test_every_place_shows_the_same_numbers_of_a_run(whole: tuple[Started, Path], tmp_path: Path) -> None:
    """The terminal, `--json`, `report.html`, the dashboard (at the end and from the lines alone) and `compare`."""
    started, run = whole
    summary = result(started)
    numbers = RunNumbers.of_summary(parse(Summary, summary, source="stdout"))
    texts, values = numbers.texts(), numbers.to_json()
    assert all(value is not None for value in values.values()), values
    assert (summary["mean_bits_per_s"], summary["step_s"]) == (
        pytest.approx(values["mean_bits_per_s"], abs=0.1), pytest.approx(values["step_s"], abs=1e-5)
    )  # fmt: skip

    console = Console(file=io.StringIO(), width=200)
    with console.capture() as capture:
        console.print(final_table(summary))
    terminal, page = capture.get(), html.unescape((run / "report.html").read_text())
    shown = snapshot(run)["run"]["numbers"]
    for row in shown:
        assert row["text"] == texts[row["name"]] and row["value"] == values[row["name"]], row
        assert re.search(rf"{re.escape(row['label'])}\s+{re.escape(row['text'])}", terminal), row
        assert f'<th scope="row">{row["label"]}</th><td>{row["text"]}</td>' in page, row
    assert texts["sent_bytes"] in page.partition("Figures")[0] and texts["times_fewer_bytes"] in page

    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "summary.json").unlink()
    before_the_end = {row["name"]: row for row in snapshot(unfinished)["run"]["numbers"]}
    for name in ("sent_bytes", "received_bytes", "peak_bits_per_s", "step_s", "waiting", "wall_s"):
        assert before_the_end[name]["text"] == texts[name], name
    rows = snapshot(run)["replicas"]
    assert sum(row["sent_bytes"] for row in rows) / 2 == pytest.approx(values["sent_bytes"], abs=0.5)
    assert max(row["peak_bits_per_s"] for row in rows) == values["peak_bits_per_s"]

    (compared,) = compare_runs([run]).to_json()["runs"]
    assert {name: compared[name] for name in values} == values


def test_a_run_stopped_by_every_kind_of_signal_ends_with_the_bits_of_one_never_stopped(
    texts: Path, tmp_path: Path, unbroken: dict[str, Any], nothing_left: Callable[[Started], None]
) -> None:
    run = tmp_path / "run"
    resume = ["--resume", str(run), "--json", "--quiet"]
    held_at = tmp_path / "held"
    held = with_slow_steps(held_at=held_at)

    # a replica dies: the others end, and one error names it
    held_at.write_text("6")
    started = start(texts, tmp_path, steps=20, environment=held)
    wait_for_checkpoints(started, run, 4)
    nothing_left(started)
    assert send(worker_of(started, 1), signal.SIGKILL)
    assert started.end() == 1
    assert "replica 1 was ended by SIGKILL" in started.stderr
    assert f"thinwire train --resume {run}" in started.stderr
    assert "Traceback" not in started.stderr and len(started.stderr.splitlines()) == 1
    assert started.stdout == ""
    (finding,) = diagnose(read_files([run]))
    assert finding.where == "rank 1" and "ended by SIGKILL" in finding.text

    for step, number, code in (
        (8, signal.SIGTERM, 128 + signal.SIGTERM),
        (12, signal.SIGINT, 128 + signal.SIGINT),
        (16, signal.SIGKILL, -signal.SIGKILL),
    ):
        held_at.write_text(f"{step + 2}")
        started = Started(resume, environment=held)
        wait_for_checkpoints(started, run, step)
        nothing_left(started)
        # SIGTERM comes to the launcher alone, SIGINT to its replicas too
        for worker in started.workers() if number == signal.SIGINT else []:
            send(worker, number)
        started.process.send_signal(number)
        assert started.end() == code, started.stderr
        if number != signal.SIGKILL:
            # a machine that was busy may have made the run say before that a replica kept the other waiting
            told = re.fullmatch(
                rf"thinwire: stopped by {number.name}; all replicas have ended. Go on from step (\d+) with: "
                rf"thinwire train --resume {re.escape(str(run))}",
                started.stderr.splitlines()[-1],
            )
            assert told and f"a checkpoint of step {told[1]} is saved first" in started.stderr, started.stderr
            assert step < int(told[1]) < step + 4, "of the step it was at, not of the last multiple of four"
            assert all(checkpoint(run, int(told[1]), replica=replica).exists() for replica in (0, 1))
            assert "Traceback" not in started.stderr
        assert not (run / "summary.json").exists()

    found = result(finish(Started(resume)))
    assert found["global_parameters_sha256"] == unbroken["global_parameters_sha256"]
    assert found["val_loss"] == unbroken["val_loss"]
    assert found["tokens"] == unbroken["tokens"]
    for replica in (0, 1):
        assert [line["step"] for line in metrics(run, replica) if line["kind"] == "step"] == [4, 8, 12, 16, 20]


def joined(texts: Path, folder: Path, port: int, rank: int, *words: str) -> Started:
    """One host of a run, as torchrun starts it: with a folder of its own."""
    environment = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        **with_slow_steps(held_at=folder / "held"),
    }  # fmt: skip
    out = ["--out", str(folder / f"host-{rank}")] if "--resume" not in words else []
    return Started([*words, *out], environment=environment)


def test_hosts_with_folders_of_their_own_resume_from_their_newest_common_step(
    texts: Path, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    words = [*OPTIONS, "--steps", "20", "--data", str(texts), "--cache-dir", str(texts / ".cache")]
    port = free_port()
    (tmp_path / "held").write_text("14")
    hosts = [joined(texts, tmp_path, port, rank, *words) for rank in (0, 1)]
    for rank, host in enumerate(hosts):
        host.wait_for(checkpoint(tmp_path / f"host-{rank}", 12, replica=rank))
    for host in hosts:
        host.process.kill()
        host.end()
    (tmp_path / "held").unlink()
    # host 1 loses its newest checkpoint, so that host 0 has one that it must not use
    checkpoint(tmp_path / "host-1", 12, replica=1).write_text("{}")
    port = free_port()
    hosts = [
        joined(texts, tmp_path, port, rank, "--resume", str(tmp_path / f"host-{rank}"), "--quiet", "--json")
        for rank in (0, 1)
    ]
    assert [host.end() for host in hosts] == [0, 0], hosts[0].stderr + hosts[1].stderr
    assert "is damaged" in hosts[0].stderr and "going on from step 8" in hosts[0].stderr
    assert hosts[1].stdout == ""
    assert result(hosts[0])["global_parameters_sha256"] == unbroken["global_parameters_sha256"]
    assert (tmp_path / "host-0" / "summary.json").exists() and not (tmp_path / "host-1" / "summary.json").exists()


def test_hosts_with_other_options_refuse_each_other_by_name(texts: Path, tmp_path: Path) -> None:
    words = [*OPTIONS, "--steps", "20", "--data", str(texts), "--cache-dir", str(texts / ".cache")]
    port = free_port()
    hosts = [joined(texts, tmp_path, port, rank, *words, "--lr", f"0.00{rank + 1}") for rank in (0, 1)]
    for host in hosts:
        assert host.end() == 1
        assert "replica 1 runs with lr 0.002, replica 0 with 0.001" in host.stderr
        assert "Traceback" not in host.stderr
    assert not (tmp_path / "host-0").exists() and not (tmp_path / "host-1").exists()


def test_torchrun_joins_ranks_into_the_run_that_a_local_launch_makes(
    texts: Path, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    words = [*OPTIONS, "--steps", "20", "--data", str(texts), "--cache-dir", str(texts / ".cache")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "thinwire.cli.main", "train", *words, "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["global_parameters_sha256"] == unbroken["global_parameters_sha256"]


def test_a_signal_to_torchrun_saves_one_step_on_all_replicas_and_a_resumed_run_goes_on_from_it(
    texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*OPTIONS, "--steps", "1000000", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--out", run]
    saved = 0
    for number, more in ((signal.SIGTERM, words), (signal.SIGINT, ["--resume", run, "--quiet"])):
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
             "thinwire.cli.main", "train", *map(str, more)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **with_slow_steps(0.1)},
        )  # fmt: skip
        while max(steps_of(run), default=0) <= saved:
            assert agent.poll() is None, agent.communicate()
            time.sleep(POLL_S)
        agent.send_signal(number)
        _, told = agent.communicate(timeout=DEADLINE_S)
        found = re.search(r"stopped by a signal after step (\d+), which all replicas have saved.*--resume", told)
        assert found is not None, told
        assert int(found[1]) > saved and "damaged" not in told
        saved = int(found[1])
        assert steps_of(run) & steps_of(run, replica=1) >= {saved}
        assert max(steps_of(run)) == max(steps_of(run, replica=1)) == saved


def steps_of(run: Path, *, replica: int = 0) -> set[int]:
    """Return the steps of checkpoints."""
    paths = (run / "checkpoints").glob(f"step-*/replica-{replica}.json")
    return {int(path.parent.name.removeprefix("step-")) for path in paths}


def test_a_disk_without_room_stops_the_run_with_the_folders_name_and_keeps_what_was_there(
    texts: Path, tmp_path: Path
) -> None:
    words = [
        "train",
        *OPTIONS,
        "--replicas",
        "2",
        "--steps",
        "20",
        "--data",
        str(texts),
        "--out",
        str(tmp_path / "run"),
    ]
    # a limit on the size of a file stands in for the disk: the write fails half way, as on a full one
    limited = ["bash", "-c", 'ulimit -f 4000; exec "$@"', "bash", sys.executable, "-m", "thinwire.cli.main"]
    done = subprocess.run(
        [*limited, *words, "--cache-dir", str(texts / ".cache")], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert re.search(r"replica [01]: cannot write the checkpoint of step 4 to .*checkpoints: .*make room", done.stderr)
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not [name for name in left if name.endswith((".partial", ".safetensors"))]
    assert "summary.json" not in left


def test_a_run_with_a_secret_comes_to_the_same_result(texts: Path, tmp_path: Path, whole: tuple[Started, Path]) -> None:
    make_secret(tmp_path / "job.secret")
    found = result(finish(start(texts, tmp_path, steps=20, more=("--secret", str(tmp_path / "job.secret")))))
    for name in ("global_parameters_sha256", "val_loss"):
        assert found[name] == result(whole[0])[name], name
    assert sent_in_rounds(tmp_path / "run") == sent_in_rounds(whole[1]) > 0
