"""What tests know of the processes that are forked for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import forked_starts
import psutil
from live_processes import DEADLINE_S
from nursery import Child, Nursery
from processes import run, values

# one that prints, one that is refused, one that raises
COMMANDS = (
    ["thinwire.cli.main", "--version"],
    ["thinwire.cli.main", "nonsense"],
    ["thinwire.cli.processes", "nonsense"],
)


def test_a_child_with_the_process_id_of_an_earlier_one_has_not_ended() -> None:
    # the kernel gives process ids out again, and a run of all tests uses many
    nursery = Nursery()
    nursery._connection, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with told, nursery._connection:
        for message in ({"number": 1, "pid": 7}, {"number": 1, "code": 3}, {"number": 2, "pid": 7}):
            told.send(json.dumps(message).encode())
        earlier, later = Child(nursery, 7, 1), Child(nursery, 7, 2)
        assert earlier.poll() == 3 and later.poll() is None
        told.send(json.dumps({"number": 2, "code": -9}).encode())
        assert later.wait(1.0) == -9 and earlier.poll() == 3


def how_commands_end() -> list[list[object]]:
    """Start each command by fork and by exec; return how each ended."""
    assert subprocess.Popen is forked_starts.ForkingPopen, "a child of the nursery forks"
    return [_end(start, words) for words in COMMANDS for start in subprocess.Popen.__mro__[:2]]


def _end(start: type[subprocess.Popen[str]], words: Sequence[str]) -> list[object]:
    with start([sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    return [process.returncode, out, err.splitlines()[-1:]]


def test_a_command_started_by_fork_ends_as_one_started_by_exec() -> None:
    (found,) = values(run(how_commands_end, num_ranks=1))
    assert found[::2] == found[1::2] and [code for code, _, _ in found[::2]] == [0, 2, 1]


def what_a_waiting_process_is() -> list[object]:
    """Start a process that waits for its stdin; return what the kernel shows of it and how it ended."""
    words = ["-m", "thinwire.cli.processes", "standby-replica", "/", str(os.getpid())]
    environment = {**os.environ, "MARK": "here"}
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, cwd="/", env=environment, start_new_session=True
    ) as process:
        seen = psutil.Process(process.pid)
        shown = [
            seen.cmdline()[1:] == words, seen.environ() == environment, seen.cwd(), seen.ppid() == os.getpid(),
            os.getsid(process.pid) == process.pid,
        ]  # fmt: skip
        assert process.stdin is not None
        process.stdin.close()
        return [*shown, process.wait(timeout=DEADLINE_S)]


def test_the_kernel_shows_of_a_forked_process_what_it_was_started_with() -> None:
    (found,) = values(run(what_a_waiting_process_is, num_ranks=1))
    assert found == [True, True, "/", True, True, 0]


SEEN = """
import os, sys
print(os.getppid(), "torch" in sys.modules, __name__, len(sys.argv))
"""


def test_a_program_of_a_test_is_forked_and_other_code_starts_with_nothing_loaded(tmp_path: Path) -> None:
    (tmp_path / "program_of_a_test.py").write_text(SEEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])}
    for words in (["-m", "program_of_a_test"], ["-c", f"{forked_starts.FORKED}{SEEN}"], ["-c", SEEN]):
        done = subprocess.run(
            [sys.executable, *words, "one"], env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        parent, has_torch, name, num_arguments = done.stdout.split()
        is_forked = words[-1] != SEEN
        assert (int(parent) != os.getpid()) == (has_torch == "True") == is_forked, (words, done)
        assert (name, num_arguments) == ("__main__", "2")


def test_python_started_for_thinwire_is_forked_and_an_internal_process_is_not(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "thinwire.cli.main", "--version"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert psutil.Process(process.pid).ppid() != os.getpid()
        assert process.communicate(timeout=DEADLINE_S)[0].startswith("thinwire ") and process.returncode == 0
    line = [sys.executable, "-m", "thinwire.cli.processes", "coordinator"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid(), "it watches its parent"
        assert "IndexError" in process.communicate(timeout=DEADLINE_S)[1] and process.returncode == 1
