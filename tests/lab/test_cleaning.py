"""However a lab ends, nothing of it is left: no process, namespace, device or folder. And nothing else is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_processes import DEADLINE_S, until
from remains import Remains, devices

from thinwire.errors import LabError
from thinwire.lab import Lab, Link

# A lab in a process of its own: with a daemon on each host that has left its command's session and its environment.
HOLD = """
import os, sys, time
from thinwire.errors import LabError
from thinwire.lab import Lab, Link
with Lab(hosts=2, rate="20mbit", link=Link(latency_s=0.005)) as lab:
    for host in range(2):
        lab.start(["sh", "-c", "setsid env -i sleep 600 & exec sleep 600"], host=host)
    print("ready", flush=True)
    if sys.argv[1] == "exit":
        sys.exit(3)
    if sys.argv[1] == "raise":
        raise KeyError("a fault of the user's")
    while sys.argv[1] == "hold":
        time.sleep(0.02)
        try:
            lab.check()
        except LabError as error:
            print(error, flush=True)
            break
    if sys.argv[1] == "abort":
        os._exit(4)
print("closed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def remains(tmp_path: Path) -> Remains:
    return Remains(temporary=tmp_path)


@contextlib.contextmanager
def process(remains: Remains, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has a lab, and wait until all of it is there."""
    started = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **remains.environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = threading.Timer(60, started.kill)  # so that no line is waited for without end
    deadline.start()
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        deadline.cancel()
        started.kill()
        started.communicate(timeout=DEADLINE_S)


def hold(remains: Remains, how: str = "hold") -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process(remains, "-c", HOLD, how)


def test_nothing_is_left_of_a_closed_lab(remains: Remains, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in remains.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    with Lab(hosts=3, rate="20mbit", link=Link(latency_s=0.005)) as lab:
        for host in range(3):
            lab.start(["sh", "-c", "setsid env -i sleep 600 & exec sleep 600"], host=host)
        end_s = time.monotonic() + 10
        while len(remains.members() - remains.processes()) < 3:
            assert time.monotonic() < end_s, "daemons without our variable are seen, too"
            namespaces = remains.note()
        assert len(namespaces) >= 3 * 3, "the hosts' namespaces are seen"
        assert len(remains.processes()) == 2 + 1 + 3, "the daemon's two, the relay, the commands"
        lab.stop_host(1)
        assert devices() == remains._devices, "a lab's devices are in namespaces of its own"
    remains.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["exit", "raise", "abort"])
def test_nothing_is_left_where_the_labs_process_ends_in_the_midst(remains: Remains, how: str) -> None:
    with hold(remains, how) as lab:
        remains.note()
        assert lab.wait(timeout=DEADLINE_S) == {"exit": 3, "raise": 1, "abort": 4}[how]
        remains.assert_nothing_is_left()


def test_nothing_is_left_after_the_labs_process_is_killed(remains: Remains) -> None:
    with hold(remains) as lab:
        remains.note()
        lab.kill()
        assert lab.wait(timeout=DEADLINE_S) == -signal.SIGKILL
        remains.assert_nothing_is_left()


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_nothing_is_left_after_the_daemon_is_killed_and_the_lab_tells(remains: Remains, which: str) -> None:
    with hold(remains) as lab:
        remains.note()
        os.kill(dict(zip(("outer", "inner"), remains.daemons(), strict=True))[which], signal.SIGKILL)
        assert lab.stdout is not None
        assert lab.stdout.readline() == "the lab's daemon has ended; make the lab again\n"
        assert lab.stdout.readline() == "closed\n"
        end_s = time.monotonic() + 10
        while remains.processes() - {lab.pid} and time.monotonic() < end_s:
            time.sleep(0.05)
        assert remains.processes() == {lab.pid}, "the hosts ended though the lab's process goes on"
        lab.kill()
        lab.wait(timeout=DEADLINE_S)
        remains.assert_nothing_is_left()


def test_a_lab_whose_relay_is_killed_tells_and_leaves_nothing(remains: Remains) -> None:
    with hold(remains) as lab:
        remains.note()
        os.kill(remains.relay(), signal.SIGKILL)
        assert lab.stdout is not None
        told = lab.stdout.readline()
        assert "the relay of delays ended with exit code -9" in told and "make the lab again" in told
        assert lab.stdout.readline() == "closed\n"
        lab.kill()
        lab.wait(timeout=DEADLINE_S)
        remains.assert_nothing_is_left()


def test_a_command_that_waits_is_told_when_the_daemon_is_killed(
    remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in remains.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    with Lab(hosts=2) as lab:
        sleeper = lab.start(["sleep", "600"], host=1)
        remains.note()
        os.kill(remains.daemons()[1], signal.SIGKILL)
        with pytest.raises(LabError, match="the lab's daemon has ended; make the lab again"):
            sleeper.wait(deadline_s=20)
        with pytest.raises(LabError, match="make the lab again"):
            lab.counters()
        with pytest.raises(LabError, match="make the lab again"):
            lab.start(["true"], host=0)
    remains.assert_nothing_is_left()


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.5])
def test_nothing_runs_on_where_the_lab_is_killed_while_it_is_made(remains: Remains, after_s: float) -> None:
    words = "from thinwire.lab import Lab, Link; lab = Lab(hosts=12, link=Link(latency_s=0.01)); input()"
    made = subprocess.Popen(
        [sys.executable, "-c", words],
        env={**os.environ, **remains.environment}, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        end_s = time.monotonic() + after_s
        while time.monotonic() < end_s:
            remains.note()
            time.sleep(0.01)
    finally:
        made.kill()
        said = made.communicate(timeout=DEADLINE_S)[1].decode()
    remains.assert_nothing_is_left()
    assert "Traceback" not in said


def test_a_lab_that_cannot_be_made_says_why_and_leaves_nothing(
    remains: Remains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "tc").write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    (programs / "tc").chmod(0o755)
    for name, value in {**remains.environment, "PATH": f"{programs}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(LabError, match="tc refused a part of the lab: out of order"):
        Lab(hosts=2, rate="5mbit")
    remains.assert_nothing_is_left()


def test_a_lab_that_is_killed_leaves_another_one_alone(remains: Remains, tmp_path: Path) -> None:
    with Lab(hosts=2, rate="20mbit", folder=tmp_path / "other") as other:
        sleeper = other.start(["sleep", "600"], host=0)
        with hold(remains) as lab:
            remains.note()
            lab.kill()
            remains.assert_nothing_is_left()
        assert sleeper.exit_code is None
        assert [result.stdout for result in other.run(["hostname"], deadline_s=20)] == ["host-0\n", "host-1\n"]
        other.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [True, False])
def test_ctrl_c_reaches_the_hosts_ends_the_lab_and_leaves_nothing(
    remains: Remains, tmp_path: Path, number: int, to_group: bool
) -> None:
    words = ["-m", "thinwire.cli.main", "lab", "--latency", "5ms", "--out", str(tmp_path / "out")]
    command = ["sh", "-c", "trap 'echo asked; exit 5' INT TERM; echo ready; while :; do sleep 0.05; done"]
    with process(remains, *words, "--", *command) as lab:
        of_other = tmp_path / "out" / "host-1.out"
        until(lambda: of_other.exists() and of_other.read_text() == "ready\n")
        remains.note()
        # a terminal sends it to the whole group
        (os.killpg if to_group else os.kill)(lab.pid, number)
        assert lab.wait(timeout=DEADLINE_S) == 128 + number
        assert lab.stdout is not None
        assert lab.stdout.read() == "asked\n"
        assert (tmp_path / "out" / "host-1.out").read_text() == "ready\nasked\n"
        assert (tmp_path / "out" / "summary.json").exists()
        remains.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_is_left_where_the_command_line_is_killed(remains: Remains, tmp_path: Path, number: int) -> None:
    words = ["-m", "thinwire.cli.main", "lab", "--out", str(tmp_path / "out"), "--"]
    with process(remains, *words, "sh", "-c", "echo ready; sleep 600") as lab:
        remains.note()
        lab.send_signal(number)
        lab.wait(timeout=DEADLINE_S)
        remains.assert_nothing_is_left()


def test_a_command_that_is_killed_ends_alone() -> None:
    with Lab(hosts=2) as lab:
        victim, other = (lab.start(["sleep", "600"], host=host) for host in range(2))
        victim.kill()
        assert victim.wait(deadline_s=20) == -signal.SIGKILL
        assert other.exit_code is None
        lab.check()
