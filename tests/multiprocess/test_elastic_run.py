"""`thinwire train --elastic` and its companions with real processes: killed, joined, told to leave, resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_processes import is_running, named_in, read_pid, send, send_to_named, words_of
from training_runs import DEADLINE_S, DOCUMENTS, OPTIONS, Started, with_slow_steps

from tests.untraced.tiny_model import with_tiny
from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.coordinator_server import KEY_FILE, coordinator_keys, own_key
from thinwire.elastic.invitation import read_invitation
from thinwire.inference import load_trained
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.elastic.job import LocalSettings
from thinwire.training.summary import parameters_sha256
from thinwire.transport.secret import read_secret
from thinwire.workloads.language import presets

STEP_S, ANSWER_S = 0.2, DEADLINE_S / 4
PAUSE_S = 0.2  # between two questions to a coordinator, each of which costs it a handshake


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def runs() -> Iterator[list[Started]]:
    started: list[Started] = []
    yield started
    for run in started:
        run.kill_family()


def start(
    runs: list[Started], texts: Path, run: Path, *, steps: int, replicas: int = 2, more: Sequence[str] = (),
    output: Path | None = None, environment: Mapping[str, str] | None = None,
) -> Started:  # fmt: skip
    words = ["--elastic", "--replicas", str(replicas), "--steps", str(steps), "--data", str(texts), "--out", str(run)]
    options = [*OPTIONS]
    options[options.index("--checkpoint-every") + 1] = "20"
    started = Started(
        [*words, "--port", "0", "--cache-dir", str(texts / ".cache"), "--address", "127.0.0.1", *options, *more],
        environment={**with_slow_steps(STEP_S, slower_while=slower_file(run)), **(environment or {})}, output=output,
    )  # fmt: skip
    runs.append(started)
    return started


def slower_file(run: Path) -> Path:
    """Return the file that makes a run slow while it is there, so that nothing ends before what is waited for comes."""
    return run.with_name(f"{run.name}-slower")


def status(run: Path) -> dict[str, Any]:
    settings = LocalSettings.load(run)
    secret = read_secret(Path(settings.secret))
    place = read_invitation(settings.invitation)
    found: dict[str, Any] = send_command(place, secret=secret, deadline_s=ANSWER_S, verb="status", target="")["status"]
    return found


def wait_until(run: Path, what: Callable[[dict[str, Any]], bool], started: Started) -> dict[str, Any]:
    started.wait_for(run / "elastic.json")
    until_s = time.monotonic() + DEADLINE_S
    while True:
        assert started.process.poll() is None, started.process.communicate()
        found = status(run)
        if what(found):
            return found
        assert time.monotonic() < until_s, found
        time.sleep(PAUSE_S)


def active(found: dict[str, Any]) -> set[int]:
    return {one["replica"] for one in found["members"] if one["state"] == "active"}


def rounds(run: Path, replica: int) -> list[dict[str, Any]]:
    path = run / f"rounds-replica-{replica}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def processes(started: Started, kind: str) -> list[psutil.Process]:
    return [one for one in started.workers() if kind in words_of(one)]


def pid_file(run: Path, index: int) -> Path:
    """Return the file with the id of a replica process, which the launcher writes again for each one in its place."""
    return run / "logs" / f"replica-process-{index}.pid"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "thinwire.cli.main", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_killed_replicas_and_a_killed_coordinator_stop_nobody(
    texts: Path, tmp_path: Path, runs: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=150)
    wait_until(run, lambda found: len(active(found)) == 2 and found["step"] > 5, started)
    slower_file(run).touch()
    send_to_named(pid_file(run, 1), signal.SIGKILL)
    wait_until(run, lambda found: len(active(found)) == 2 and max(active(found)) == 2, started)
    (coordinator,) = processes(started, "coordinator")
    assert send(coordinator, signal.SIGKILL)
    slower_file(run).unlink()
    assert started.end() == 0, started.stderr
    key = own_key(run)  # the coordinator that came back proved it to the replicas
    assert key is not None and (run / KEY_FILE).stat().st_mode & 0o777 == 0o600
    proved = coordinator_keys(key).public_bytes
    assert read_invitation(LocalSettings.load(run).invitation).coordinator_key == proved
    summary = json.loads((run / "summary.json").read_text())
    # the summary is refused where replicas end with different parameters
    assert summary["steps"] == 150 and summary["replicas"] == 2
    assert summary["elastic"]["replicas_ever"] == 3
    latest = GlobalCheckpoints(run / "checkpoints").latest().state
    assert latest is not None and latest.step == 150
    assert latest.note["data"]["counted"] > 0
    assert all(sample["before"] and sample["after"] for sample in json.loads((run / "samples.json").read_text()))
    monkeypatch.setattr(presets, "PRESETS", with_tiny(presets.PRESETS))
    assert parameters_sha256(load_trained(run).model) == summary["global_parameters_sha256"]


def test_a_replica_that_was_stopped_for_longer_than_it_can_follow_joins_again_by_itself(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=100_000, replicas=3, more=["--sync-interval", "3"])
    begun = wait_until(run, lambda found: len(active(found)) == 3 and found["step"] > 5, started)
    log = run / "logs" / "replica-process-2.err"

    def lives() -> list[str]:
        return re.findall(r"replica (\d+) takes part from step", log.read_text())

    stopped = send_to_named(pid_file(run, 2), signal.SIGSTOP)
    wait_until(run, lambda found: found["step"] > begun["step"] + 30, started)  # sooner than its silence is too long
    assert send(stopped, signal.SIGCONT)

    def is_back(found: dict[str, Any]) -> bool:
        if len(lives()) > 1:
            return int(lives()[1]) in active(found)
        steps = {line["replica"]: line["step"] for line in found["members"]}
        return bool(steps.get(int(lives()[0]), 0) > found["step"] - 6)  # two intervals

    found = wait_until(run, is_back, started)
    if len(lives()) == 1:  # on a slow machine it can still follow
        return
    # on a busy machine it may find out first that nobody has the parts any more
    gone = f"replica {lives()[0]} on "
    told = [text for text in found["findings"] if text.startswith(gone) and "the others go on without it" in text]
    assert len(told) == 1, found["findings"]
    assert named_in(pid_file(run, 2)) == stopped, "the same process came back"
    number = int(lives()[1])
    wait_until(run, lambda found: any(number in line["members"] for line in rounds(run, 0)), started)


def test_a_host_joins_a_running_job_and_leaves_it_and_a_wrong_secret_does_not_get_in(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run, other, wrong = tmp_path / "run", tmp_path / "other", tmp_path / "wrong.secret"
    started = start(runs, texts, run, steps=100_000, replicas=1)
    wait_until(run, lambda found: found["step"] > 5, started)
    settings = LocalSettings.load(run)
    assert command("secret", str(wrong)).returncode == 0
    told = command("status", settings.invitation, "--secret", str(wrong))
    assert told.returncode == 1 and "no coordinator answered" in told.stderr, told
    joining = subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli.main", "join", settings.invitation, "--secret", settings.secret, "--out",
         str(other), "--threads", "1", "--data", str(texts)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **with_slow_steps(STEP_S)},
    )  # fmt: skip
    try:
        found = wait_until(run, lambda found: active(found) == {0, 1}, started)
        step = found["step"]
        wait_until(run, lambda found: found["step"] > step + 8, started)
        told = command("leave", str(run), "--replica", "1")
        assert told.returncode == 0 and "replica 1" in told.stderr, told
        assert joining.wait(timeout=DEADLINE_S) == 0
    finally:
        joining.kill()
        joining.communicate()
    wait_until(run, lambda found: active(found) == {0}, started)
    assert "was told to leave" in " ".join(status(run)["findings"])
    refused = command("leave", str(run), "--replica", "77")
    assert refused.returncode == 1 and "there is no replica or host '77'" in refused.stderr


def test_a_stopped_run_goes_on_from_its_checkpoint_with_another_number_of_replicas(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=90)
    wait_until(run, lambda found: found["step"] > 42, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    assert not any(map(is_running, started.family()))
    latest = GlobalCheckpoints(run / "checkpoints").latest().state
    assert latest is not None and 0 < latest.step < 90
    told = f"thinwire: go on from step {latest.step} with: thinwire train --resume {run}"
    assert started.stderr.splitlines()[-1] == told, started.stderr
    again = Started(["--resume", str(run), "--quiet", "--json"], environment=with_slow_steps(STEP_S))
    runs.append(again)
    assert again.end() == 0, again.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == 90
    said = " ".join(path.read_text() for path in (run / "logs").glob("replica-process-*.err"))
    steps = set(map(int, re.findall(r"going on from (?:the checkpoint|its own state) of step (\d+)", said)))
    assert steps == {latest.step}, said


def test_a_killed_replica_goes_on_from_its_own_state_in_the_place_that_waits_for_it(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=100_000, more=("--sync-interval", "36"))
    kept, spare = run / "kept" / "replica-process-1.state", run / "logs" / "spare.err"
    wait_until(run, lambda found: kept.exists() and spare.exists() and found["step"] > 10, started)
    slower_file(run).touch()  # so that the other's steps do not leave a state behind before it can be taken up
    wait_until(run, lambda found: bool(processes(started, "standby-replica")), started)
    spares = [process.pid for process in processes(started, "standby-replica")]
    send_to_named(pid_file(run, 1), signal.SIGKILL)
    wait_until(run, lambda found: len(active(found)) == 2 and max(active(found)) == 2, started)
    slower_file(run).unlink()
    assert read_pid(pid_file(run, 1)) in spares

    def shared() -> list[tuple[int, int]]:
        # whichever of the first two was not the one that was killed has gone on; a round is written by each on its own
        crcs = {line["round"]: line["crc"] for replica in (0, 1) for line in rounds(run, replica)}
        return [
            (line["crc"], crcs[line["round"]])
            for line in rounds(run, 2)
            if 2 in line["members"] and line["round"] in crcs
        ]

    wait_until(run, lambda found: len(shared()) > 0, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    said = (run / "logs" / "replica-process-1.err").read_text()
    assert "going on from its own state of step" in said and "fetched the state" not in said, said
    assert all(own == others for own, others in shared())
