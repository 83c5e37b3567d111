"""An elastic run whose first host is lost: a survivor goes on with it, and the others join that one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_processes import DEADLINE_S, environment_of, kill, marked, until, words_of
from training_runs import DOCUMENTS, MARK, OPTIONS, with_slow_steps

from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.runlog.run_identity import read_identity
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.elastic.job import LocalSettings
from thinwire.training.elastic.local_snapshot import newest_snapshot
from thinwire.transport.secret import read_secret

STEP_S, STEPS, SYNC_INTERVAL = 0.1, 120, 12
HELD = "held"  # file with the step that no replica begins while it is there


class Host:
    """One host's command, and all processes that it started."""

    def __init__(self, folder: Path, words: Sequence[str], *, cwd: Path, typed: str = "") -> None:
        self.folder, self.mark = folder, f"{folder.name}-{time.monotonic_ns()}"
        self.log = cwd / f"{self.mark}.err"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.cli.main", *words], cwd=cwd, stdin=subprocess.PIPE, stdout=log,
                stderr=log, text=True, start_new_session=True,
                env={**os.environ, **with_slow_steps(STEP_S, held_at=cwd / HELD), MARK: self.mark},
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(typed)
        self.process.stdin.close()

    def family(self) -> list[psutil.Process]:
        return marked(MARK, self.mark)

    def kill(self) -> None:
        """Kill every process of the host at once, as a loss of power does."""
        self.process.kill()
        kill(self.family())
        self.process.wait(timeout=DEADLINE_S)

    def said(self) -> str:
        logs = [self.log, *sorted(self.folder.glob("logs/*.err"))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    def end(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)


class Hosts:
    """Commands of hosts whose folders lie beside each other.

    Args:
        root: The folder of these folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[Host] = []

    def start(self, name: str, *words: str, typed: str = "") -> Host:
        self.started.append(Host(self.root / name, words, cwd=self.root, typed=typed))
        return self.started[-1]

    def join(self, name: str, address: str) -> Host:
        words = ["--cache-dir", "texts/.cache", "--data", "texts", "--threads", "1", "--own-address", "127.0.0.1"]
        return self.start(name, "join", "-", "--out", name, *words, typed=address + "\n")

    def kill(self) -> None:
        for host in self.started:
            host.kill()


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """What is left of a run whose three hosts have all lost power.

    Attributes:
        root: Holds their folders.
        address: Of its coordinator.
        seen: Command line and environment of each process, as anybody on the host could see them.
    """

    root: Path
    address: str
    seen: list[tuple[str, ...]]


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Start a run on three hosts, and kill all when both that joined hold a state and a checkpoint of it."""
    root = tmp_path_factory.mktemp("hosts")
    (root / "texts").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (root / "texts" / f"{number}.txt").write_text(text)
    (root / HELD).write_text("60")
    hosts = Hosts(root)
    try:
        first = hosts.start("first", *first_words(root / "first"))
        address = address_of(first)
        for other in [hosts.join(name, address) for name in ("second", "third")]:
            wait_for(lambda other=other: list(other.folder.glob("checkpoints/step-*/checkpoint.json")), other)
        wait_for(lambda: status(address)["step"] > 45, first)
        family = [process for host in hosts.started for process in host.family()]
        seen = [(*words_of(process), *itertools.chain(*environment_of(process).items())) for process in family]
    finally:
        hosts.kill()
    return Lost(root, address, seen)


@pytest.fixture
def hosts(lost: Lost, tmp_path: Path) -> Iterator[Hosts]:
    """Give folders as the loss left them."""
    shutil.copytree(lost.root, tmp_path, dirs_exist_ok=True)
    (tmp_path / HELD).write_text("100")
    yield (made := Hosts(tmp_path))
    made.kill()


def wait_for(what: Callable[[], Any], host: Host) -> Any:
    def look() -> Any:
        has_ended = host.process.poll() is not None
        with contextlib.suppress(OSError):  # a file that is not there yet
            if found := what():
                return found
        assert not has_ended, host.said()
        return None

    return until(look, host.said)


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

    return str(wait_for(lambda: (host.folder / "coordinator.json").exists() and found(), host))


def status(address: str) -> dict[str, Any]:
    place = read_invitation(address)
    assert place.secret is not None
    answer = send_command(place, secret=place.secret, deadline_s=DEADLINE_S / 4, verb="status", target="")
    found: dict[str, Any] = answer["status"]
    return found


def newest_step(folder: Path) -> int:
    run = read_identity(folder)
    found = GlobalCheckpoints(folder / "checkpoints", run=run).latest(), newest_snapshot(folder, run=run)
    return max(0 if one.state is None else one.state.step for one in found)


def test_a_survivor_goes_on_with_the_run_and_the_others_join_it(hosts: Hosts, lost: Lost, tmp_path: Path) -> None:
    before, second, third = read_identity(tmp_path / "first"), tmp_path / "second", tmp_path / "third"
    had = newest_step(second)
    assert had >= 20
    kept = newest_snapshot(third, run=before).state
    holds_it = (kept is not None and kept.step == had) or (third / f"checkpoints/step-{had:08d}").exists()
    again = hosts.start("second", "train", "--elastic", "--resume", "second", "--json")
    new_address = address_of(again)
    new_place, old_place = read_invitation(new_address), read_invitation(lost.address)
    assert new_place.secret != old_place.secret
    assert b"" != new_place.coordinator_key != old_place.coordinator_key != b""
    other = hosts.join("third", new_address)
    # the step is 0 until a replica has reported one
    found = wait_for(
        lambda: (now := status(new_address))["started"] and len(now["members"]) == 2 and now["step"] and now, again
    )
    (tmp_path / HELD).unlink()
    assert found["step"] >= had
    assert (again.end(), other.end()) == (0, 0), again.said() + other.said()
    if holds_it:
        log = other.said()
        # whichever host comes first: it continues the run from its checkpoint, or meets one that has done so
        ways = ("its own state of step {}", "the checkpoint of step {}, as this host holds it")
        assert any(f"going on from {way.format(had)}" in log for way in ways), log
    said = again.log.read_text()
    assert f"going on with run {before.run} from step {had}" in said, said
    run = read_identity(second)
    assert run.run == before.run and run.descends_from(before) and run == read_identity(third)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["steps"] == STEPS and summary["replicas"] == 2, "the summary is refused where hashes differ"
    assert math.isfinite(summary["val_loss"])
    ends = [GlobalCheckpoints(folder / "checkpoints", run=run).load(STEPS) for folder in (second, third)]
    assert all(ends[0].parameters[name].equal(ends[1].parameters[name]) for name in ends[0].parameters)
    journal = [json.loads(line) for line in (second / "coordinator.jsonl").read_text().splitlines()]
    assert [line["what"] for line in journal[:3]] == ["run", "leases", "numbers"]
    assert journal[0]["run"] == before.run and journal[1]["counted"] > 0


def test_two_survivors_that_go_on_apart_are_never_mixed(hosts: Hosts, tmp_path: Path) -> None:
    apart = [hosts.start(name, "train", "--elastic", "--resume", name) for name in ("second", "third")]
    addresses = [address_of(host) for host in apart]
    for host, address in zip(apart, addresses, strict=True):
        wait_for(lambda address=address: status(address)["step"] > 0, host)
    apart[1].kill()
    runs = [read_identity(host.folder) for host in apart]
    assert runs[0].run == runs[1].run and runs[0].incarnation != runs[1].incarnation
    content = (tmp_path / "third" / "elastic.json").read_bytes()
    refused = hosts.join("third", addresses[0])
    assert refused.end() == 1
    said = refused.log.read_text()
    assert f"incarnation {runs[1].incarnation} of run {runs[1].run}" in said and runs[0].incarnation in said, said
    assert (tmp_path / "third" / "elastic.json").read_bytes() == content, "a refused folder is left as it is"
    busy = hosts.start("second", "train", "--elastic", "--resume", "second")
    assert busy.end() == 1 and "is in use by another thinwire command, process" in busy.log.read_text()


def test_no_process_of_any_host_shows_the_secret_in_its_arguments(lost: Lost) -> None:
    secret = lost.address.rsplit("/", 1)[1]
    assert len(lost.seen) >= 7, "three launchers, a coordinator and three replicas"
    assert all(any("thinwire" in text for text in texts) for texts in lost.seen)
    for texts in lost.seen:
        assert not any(secret in text for text in texts), texts
