"""What tests use to look at processes, where one of these ends in the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import live_processes
import psutil
import pytest
from live_processes import (
    descendants,
    environment_of,
    is_listening,
    is_running,
    is_stopped,
    kill,
    marked,
    name_of,
    named_in,
    send,
    send_to_named,
    until,
    words_of,
)  # fmt: skip

MARK = "LIVE_PROCESSES_TEST"


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(os.getpid())}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends_at_first_look(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], look: str) -> None:
    """Let a process end, and be waited for by its parent or not, just before psutil's own look at it."""
    real = getattr(psutil.Process, look)

    def late(self: psutil.Process, *arguments: Any, **more: Any) -> Any:
        if self.pid == process.pid:
            process.kill()
            process.wait()
        return real(self, *arguments, **more)

    monkeypatch.setattr(psutil.Process, look, late)


LOOKS: dict[str, tuple[Callable[[psutil.Process], object], object]] = {
    "cmdline": (words_of, []),
    "environ": (environment_of, {}),
    "name": (name_of, ""),
    "status": (is_running, False),
    "is_running": (is_stopped, False),
    "net_connections": (is_listening, False),
    "send_signal": (lambda process: send(process, signal.SIGTERM), False),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_process_that_ends_while_it_is_looked_at_is_left_out(
    sleeper: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    process = sleeper()
    seen = psutil.Process(process.pid)
    with monkeypatch.context() as patch:
        ends_at_first_look(patch, process, look)
        helper, nothing = LOOKS[look]
        assert helper(seen) == nothing


def test_a_zombie_has_ended(sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    process = sleeper()
    seen = psutil.Process(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent has not asked
    assert seen.status() == psutil.STATUS_ZOMBIE and not is_running(seen)
    assert (words_of(seen), environment_of(seen), is_listening(seen)) == ([], {}, False)
    assert seen not in descendants() and seen not in marked(MARK, str(os.getpid()))
    kill([seen])


@pytest.mark.parametrize("look", ["environ", "status"])
def test_lists_hold_what_still_runs(
    sleeper: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    ending, lasting = sleeper(), sleeper()
    with monkeypatch.context() as patch:
        ends_at_first_look(patch, ending, look)
        pids = [process.pid for process in {"environ": marked(MARK, str(os.getpid())), "status": descendants()}[look]]
    assert lasting.pid in pids and ending.pid not in pids


def test_a_signal_reaches_the_process_that_a_file_names_by_then(
    sleeper: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher has just ended the process that the file names, and then writes the id of the next one."""
    first, second, path = sleeper(), sleeper(), tmp_path / "replica-1.pid"
    path.write_text(f"{first.pid}\n")
    found = named_in(path)
    assert found.pid == first.pid
    real = live_processes.send

    def late(process: psutil.Process, number: int) -> bool:
        if process.pid == first.pid:
            first.kill()
            first.wait()
            path.write_text(f"{second.pid}\n")
        return real(process, number)

    with monkeypatch.context() as patch:
        patch.setattr(live_processes, "send", late)
        stopped = send_to_named(path, signal.SIGSTOP)
    assert stopped.pid == second.pid
    assert until(lambda: is_stopped(stopped))


def test_an_id_that_was_given_to_another_process_is_not_signalled(
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    process = sleeper()
    earlier = psutil.Process(process.pid)
    earlier._ident = (process.pid, earlier.create_time() - 1)
    assert not is_running(earlier) and not send(earlier, signal.SIGKILL) and process.poll() is None
