"""An elastic run whose first host is lost: a survivor goes on with it, and the others join that one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_runs import DEADLINE_S, DOCUMENTS, MARK, OPTIONS, with_slow_steps

from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.runlog.run_identity import read_identity
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.elastic.job import LocalSettings
from thinwire.training.elastic.local_snapshot import newest_snapshot
from thinwire.transport.secret import read_secret

STEP_S, STEPS, SYNC_INTERVAL = 0.25, 160, 12


class Host:
    """One host's command, and all processes that it started."""

    def __init__(self, folder: Path, words: Sequence[str], *, cwd: Path, typed: str = "") -> None:
        self.folder, self.mark = folder, f"{folder.name}-{time.monotonic_ns()}"
        self.log = cwd / f"{self.mark}.err"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.cli.main", *words], cwd=cwd, stdin=subprocess.PIPE, stdout=log,
                stderr=log, text=True, start_new_session=True,
                env={**os.environ, **with_slow_steps(STEP_S), MARK: self.mark},
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(typed)
        self.process.stdin.close()

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def kill(self) -> None:
        """Kill every process of the host at once, as a loss of power does."""
        self.process.kill()
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended with its launcher
                process.kill()
        self.process.wait(timeout=DEADLINE_S)

    def said(self) -> str:
        logs = [self.log, *sorted(self.folder.glob("logs/*.err"))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    def end(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    started: list[Host] = []

    def start(name: str, *words: str, typed: str = "") -> Host:
        started.append(Host(tmp_path / name, words, cwd=tmp_path, typed=typed))
        return started[-1]

    yield start
    for host in started:
        host.kill()


def until(what: Callable[[], Any], host: Host) -> Any:
    until_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if found := what():
                return found
        except OSError:
            pass  # a file that is not there yet
        assert time.monotonic() < until_s and host.process.poll() is None, host.said()
        time.sleep(0.1)


def first_words(folder: Path) -> list[str]:
    texts = folder.parent / "texts"
    options = [*OPTIONS]
    options[options.index("--sync-interval") + 1] = str(SYNC_INTERVAL)
    options[options.index("--checkpoint-every") + 1] = "20"
    return [
        "train", "--elastic", "--replicas", "1", "--begin-with", "3", "--steps", str(STEPS), "--data", str(texts),
        "--out", str(folder), "--port", "0", "--address", "127.0.0.1", "--cache-dir", str(texts / ".cache"), *options,
    ]  # fmt: skip


def address_of(host: Host) -> str:
    """Return the address that the host's folder and secret make."""

    def found() -> str:
        settings = LocalSettings.load(host.folder)
        place, secret = read_invitation(settings.invitation), read_secret(Path(settings.secret))
        return dataclasses.replace(place, secret=secret).text()

    return str(until(lambda: (host.folder / "coordinator.json").exists() and found(), host))


def status(address: str) -> dict[str, Any]:
    place = read_invitation(address)
    assert place.secret is not None
    found: dict[str, Any] = send_command(place, secret=place.secret, deadline_s=60, verb="status", target="")["status"]
    return found


def newest_step(folder: Path) -> int:
    run = read_identity(folder)
    latest, kept = GlobalCheckpoints(folder / "checkpoints", run=run).latest().state, newest_snapshot(folder, run=run)
    return max(0 if latest is None else latest.step, 0 if kept is None else kept.state.step)


def joined(hosts: Callable[..., Host], name: str, address: str) -> Host:
    cache = ["--cache-dir", "texts/.cache", "--data", "texts", "--threads", "1", "--own-address", "127.0.0.1"]
    return hosts(name, "join", "-", "--out", name, *cache, typed=address + "\n")


def started(hosts: Callable[..., Host], tmp_path: Path) -> tuple[Host, Host, Host]:
    """Start a run on three hosts, and wait until both that joined hold a state and a checkpoint of it."""
    first = hosts("first", *first_words(tmp_path / "first"))
    address = address_of(first)
    others = [joined(hosts, name, address) for name in ("second", "third")]
    for other in others:
        until(lambda other=other: list(other.folder.glob("checkpoints/step-*/checkpoint.json")), other)
    until(lambda: status(address)["step"] > 45, first)
    return first, others[0], others[1]


def test_a_survivor_goes_on_with_the_run_and_the_others_join_it(hosts: Callable[..., Host], tmp_path: Path) -> None:
    first, second, third = started(hosts, tmp_path)
    before = read_identity(tmp_path / "first")
    old_address = address_of(first)
    first.kill()
    for host in (second, third):
        host.kill()
    had = newest_step(second.folder)
    assert had >= 20
    kept = newest_snapshot(third.folder, run=before)
    holds_it = (kept is not None and kept.state.step == had) or (third.folder / f"checkpoints/step-{had:08d}").exists()
    again = hosts("second", "train", "--elastic", "--resume", "second", "--json")
    new_address = address_of(again)
    new_place, old_place = read_invitation(new_address), read_invitation(old_address)
    assert new_place.secret != old_place.secret
    assert b"" != new_place.coordinator_key != old_place.coordinator_key != b""
    other = joined(hosts, "third", new_address)
    # the step is 0 until a replica has reported one
    found = until(
        lambda: (now := status(new_address))["started"] and len(now["members"]) == 2 and now["step"] and now, again
    )
    assert found["step"] >= had
    assert (again.end(), other.end()) == (0, 0), again.said() + other.said()
    if holds_it:
        log = other.said()
        # whichever host comes first: it continues the run from its checkpoint, or meets one that has done so
        ways = ("its own state of step {}", "the checkpoint of step {}, as this host holds it")
        assert any(f"going on from {way.format(had)}" in log for way in ways), log
    said = again.log.read_text()
    assert f"going on with run {before.run} from step {had}" in said, said
    run = read_identity(second.folder)
    assert run.run == before.run and run.descends_from(before) and run == read_identity(third.folder)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["steps"] == STEPS and summary["replicas"] == 2, "the summary is refused where hashes differ"
    assert math.isfinite(summary["val_loss"])
    ends = [GlobalCheckpoints(host.folder / "checkpoints", run=run).load(STEPS) for host in (second, third)]
    assert all(ends[0].parameters[name].equal(ends[1].parameters[name]) for name in ends[0].parameters)
    journal = [json.loads(line) for line in (second.folder / "coordinator.jsonl").read_text().splitlines()]
    assert [line["what"] for line in journal[:3]] == ["run", "leases", "numbers"]
    assert journal[0]["run"] == before.run and journal[1]["counted"] > 0


def test_two_survivors_that_go_on_apart_are_never_mixed(hosts: Callable[..., Host], tmp_path: Path) -> None:
    first, second, third = started(hosts, tmp_path)
    for host in (first, second, third):
        host.kill()
    apart = [hosts(name, "train", "--elastic", "--resume", name) for name in ("second", "third")]
    addresses = [address_of(host) for host in apart]
    for host, address in zip(apart, addresses, strict=True):
        until(lambda address=address: status(address)["step"] > 0, host)
    apart[1].kill()
    runs = [read_identity(host.folder) for host in apart]
    assert runs[0].run == runs[1].run and runs[0].incarnation != runs[1].incarnation
    content = (third.folder / "elastic.json").read_bytes()
    refused = joined(hosts, "third", addresses[0])
    assert refused.end() == 1
    said = refused.log.read_text()
    assert f"incarnation {runs[1].incarnation} of run {runs[1].run}" in said and runs[0].incarnation in said, said
    assert (third.folder / "elastic.json").read_bytes() == content, "a refused folder is left as it is"
    busy = hosts("second", "train", "--elastic", "--resume", "second")
    assert busy.end() == 1 and "is in use by another thinwire command, process" in busy.log.read_text()


def test_no_process_of_any_host_shows_the_secret_in_its_arguments(hosts: Callable[..., Host], tmp_path: Path) -> None:
    first, second, third = started(hosts, tmp_path)
    secret = address_of(first).rsplit("/", 1)[1]
    seen = [process for host in (first, second, third) for process in host.family()]
    assert len(seen) >= 7, "three launchers, a coordinator and three replicas"
    for process in seen:
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes(), (name, process)
