"""Standard output and error on a full disk: no process ends by it, and nothing is lost that can be kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.full_disk import file_size_limit
from thinwire.cli.output import DurableStream, ReaderGone


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(path: Path, **more: int | bool) -> DurableStream:
    return DurableStream(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), **more)  # type: ignore[arg-type]


def test_what_has_no_room_is_written_in_order_once_there_is_room(path: Path) -> None:
    stream = opened(path)
    print("before", file=stream)
    with file_size_limit(10):
        for number in range(100):
            print("line", number, file=stream, flush=True)
        assert path.read_text() == "before\nlin" and stream.num_waiting_bytes
    print("after", file=stream)
    lines = ["before", *(f"line {number}" for number in range(100)), "after"]
    assert path.read_text().splitlines() == lines and not stream.num_waiting_bytes


def test_it_is_written_without_another_write_too(path: Path) -> None:
    stream = opened(path)
    written = threading.Event()

    def look() -> None:
        while path.read_text() != "one\n":
            written.wait(0.01)
        written.set()

    with file_size_limit(1):
        print("one", file=stream)
    threading.Thread(target=look, daemon=True).start()
    assert written.wait(60)


def test_beyond_the_bound_the_first_and_the_last_lines_are_kept(path: Path) -> None:
    stream = opened(path, max_waiting_bytes=1000)
    with file_size_limit(1):
        print("the disk is full", file=stream)
        for number in range(10_000):
            print("line", number, file=stream)
        assert stream.num_waiting_bytes <= 1100
    stream.flush()
    lines = path.read_text().splitlines()
    dropped = [line for line in lines if "lines dropped here: no room for this output" in line]
    assert lines[0] == "the disk is full" and lines[-1] == "line 9999" and dropped and stream.num_dropped > 9000


def test_threads_write_whole_lines(path: Path) -> None:
    stream = opened(path)
    threads = [
        threading.Thread(target=lambda letter=letter: [print(letter * 40, file=stream) for _ in range(500)])
        for letter in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text().splitlines()) == [letter * 40 for letter in "abc" for _ in range(500)]


@pytest.mark.parametrize("is_lossy", [False, True])
def test_a_reader_that_has_gone_is_an_error_only_where_output_must_not_be_lost(is_lossy: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = DurableStream(writer, is_lossy=is_lossy)
    if is_lossy:
        print("nobody reads this", file=stream, flush=True)
    else:
        with pytest.raises(ReaderGone):
            print("nobody reads this", file=stream, flush=True)
    assert not stream.num_waiting_bytes
    os.close(writer)


def run(code: str, *, stdout: str, stderr: str) -> int:
    with Path(stdout).open("ab") as out, Path(stderr).open("ab") as err:
        words = [sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False).returncode


@pytest.mark.parametrize(("kind", "words", "code"), [
    # each prints its error and returns a code of its own; one that dies of the print ends with 1
    ("coordinator", "'{run}', str(os.getppid()), '{run}/none', '127.0.0.1', '0', 'start'", 3),
    ("elastic-replica", "'{run}', str(os.getppid()), '0'", 3),
])  # fmt: skip
def test_a_process_of_an_elastic_run_with_stderr_on_a_full_disk_ends_as_it_would(
    tmp_path: Path, kind: str, words: str, code: int
) -> None:
    (tmp_path / "job.json").write_text("no json")
    (tmp_path / "elastic.json").write_text("no json")
    script = f"""
        import os, runpy, sys
        sys.argv = ["processes", "{kind}", {words.format(run=tmp_path)}]
        runpy.run_module("thinwire.cli.processes", run_name="__main__")
    """
    assert run(script, stdout="/dev/full", stderr="/dev/full") == code


def test_a_command_whose_result_is_lost_fails_and_says_so(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "thinwire.cli.main", "--version"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == "thinwire: error: output was lost: no room where stdout goes; make room there\n"
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
        assert done.returncode == 0 and done.stdout.startswith("thinwire ")
    wrong = [*line[:-1], "frobnicate"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *wrong], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, "a closed stdout is no error of a wrong command"


@pytest.mark.parametrize("words", ["--help", "train --help", "recipes ls"])
def test_a_command_whose_reader_has_gone_ends_quietly_as_by_the_signal_for_it(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "thinwire.cli.main", *words.split()]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
