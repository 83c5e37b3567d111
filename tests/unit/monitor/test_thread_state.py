"""What a rank does that others wait for: a loop, a lock, a worker and a disk are told apart by its training thread."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.live import RecordWindow
from thinwire.recording.recorder import Recorder
from thinwire.recording.thread_state import LONG_S, TrainingThread
from thinwire.runlog.process_state import SilentProcesses, write_process
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, ProcessState, Record
from thinwire.runlog.run_folder import read_files
from thinwire.runlog.writer import process_path, record_paths
from thinwire.transport.call_sites import user_site

MEASURED_S = 0.3


def sample_of(work: Callable[[], object]) -> Beat:
    """Return what is seen of a thread that made a call and has worked on something ever since."""
    made: list[TrainingThread] = []

    def run() -> None:
        thread = TrainingThread(7, 0.0)
        thread.note_call(10.0)
        made.append(thread)
        work()

    threading.Thread(target=run, daemon=True).start()
    while not made:
        time.sleep(0.01)
    (thread,) = made
    assert thread.sample(10.0 + LONG_S - 0.1) is None and thread.sample(10.0 + LONG_S) is None, (
        "a share takes two samples"
    )
    began_s = time.monotonic()
    time.sleep(MEASURED_S)
    seen_s = 10.0 + LONG_S + time.monotonic() - began_s
    beat = thread.sample(seen_s)
    assert beat is not None and (beat.rank, beat.at_s) == (7, seen_s)
    assert thread.sample(seen_s + 0.1) is None and thread.sample(10.0 + 2 * LONG_S) is None, "the next sample is later"
    return beat


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a thread is read from /proc")
def test_a_loop_and_a_lock_are_told_apart_by_the_share_of_a_core_and_the_sleep() -> None:
    stop, lock = threading.Event(), threading.Lock()
    lock.acquire()

    def loop() -> None:
        while not stop.is_set():
            pass

    looping, locked = sample_of(loop), sample_of(lock.acquire)
    stop.set()
    lock.release()
    assert looping.cpu >= 0.5 > locked.cpu
    assert not looping.sleeps_in.startswith("disk") and locked.sleeps_in
    assert any("test_thread_state.py" in frame and frame.endswith(" in loop") for frame in looping.stack)
    assert locked.stack[0].endswith(" in run")


def test_a_call_site_is_the_innermost_place_of_own_code() -> None:
    line = sys._getframe().f_lineno + 1
    assert user_site() == f"test_thread_state.py:{line}"
    assert [user_site() for _ in range(2)] == [f"test_thread_state.py:{line + 1}"] * 2, "also the second time"
    for number in range(50):  # of codes that are gone, whose place in memory others take
        made = {"user_site": user_site}
        exec(compile("\n" * number + "site = user_site()", f"/home/me/run{number}.py", "exec"), made)
        assert made["site"] == f"run{number}.py:{number + 1}"


def hang(**state: object) -> list[Record]:
    """Return records of three ranks, of which rank 1 does not come to the last operation."""
    records: list[Record] = [Communicator(communicator="0", ranks=(0, 1, 2), hosts=("a",) * 3)]
    records += [
        Operation(communicator="0", rank=rank, sequence=step, kind="all_reduce", posted_s=float(step),
                  done_s=step + 0.1 if step < 8 else None)
        for step in range(9) for rank in range(3) if (step, rank) != (8, 1)
    ]  # fmt: skip
    records += [Beat(rank=rank, at_s=half / 2) for rank in range(3) for half in range(60)]
    records += [Beat(rank=1, at_s=12.0, **state)]  # type: ignore[arg-type]
    return records


def hang_of(**state: object) -> tuple[str, str, float]:
    """Return text, remedy and confidence of the finding about rank 1, which was seen in some state."""
    (finding,) = diagnose(from_records(hang(**state)))
    assert finding.where == "rank 1" and finding.kind == "non-communication hang"
    return finding.text, finding.remedy, finding.confidence


@pytest.mark.parametrize(
    ("state", "text", "remedy"),
    [
        ({"cpu": 0.98, "stack": ("python/re.py:9 in match", "run.py:5 in clean")},
         "runs in its own code with 98% of a core, at run.py:5 in clean", "endless loop"),
        ({"cpu": 0.0, "sleeps_in": "futex_wait", "stack": ("run.py:6 in step",)},
         "sleeps (futex_wait), at run.py:6 in step", "a lock"),
        ({"cpu": 0.0, "sleeps_in": "poll", "workers": ("42 sleeps in futex_wait",),
          "stack": ("python/selectors.py:4 in select", "torch/utils/data/dataloader.py:9 in _try", "run.py:7 in main")},
         "waits for a DataLoader worker (process 42 sleeps in futex_wait), at run.py:7 in main", "worker's stack"),
        ({"cpu": 0.0, "sleeps_in": "disk: io_schedule", "stack": ("run.py:8 in save",)},
         "waits in the kernel (io_schedule), at run.py:8 in save", "the disk"),
    ],
)  # fmt: skip
def test_a_hang_tells_what_the_missing_rank_does(state: dict[str, object], text: str, remedy: str) -> None:
    said, advice, _ = hang_of(**state)
    assert f"Rank 1 {text}." in said and remedy in advice


def test_a_sample_from_before_the_wait_says_nothing() -> None:
    text, remedy, _ = hang_of(stack=())
    assert "sleeps" not in text and "py-spy" in remedy


def test_a_sample_outlives_the_heartbeats_that_a_running_diagnosis_keeps() -> None:
    sampled = hang(cpu=1.0, stack=("run.py:5 in clean",))
    window = RecordWindow()
    for record in sorted(sampled, key=lambda one: one.at_s if isinstance(one, Beat) else -1.0):
        window.add(record)
    assert sum(beat.rank == 0 for beat in window.records().beats) < 20, "of 60"
    (finding,) = diagnose(window.records())
    assert "runs in its own code" in finding.text


def test_a_recorder_of_training_samples_the_thread_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.recording.thread_state.LONG_S", 0.1)
    recorder = Recorder(tmp_path, rank=0)
    found: list[Beat] = []
    while not found:
        time.sleep(0.05)
        found = [beat for beat in read_files([tmp_path]).beats if beat.stack]
    recorder.close()
    assert any("test_thread_state.py" in frame for frame in found[0].stack)
    if sys.platform == "linux":
        assert f" {os.getpid()} " in process_path(tmp_path, rank=0).read_text()


SILENT = """
import ctypes, os, re, sys, threading, time
def beat():
    while True:
        print("{}", file=file, flush=True)
        time.sleep(0.02)
file, work = open(sys.argv[1], "w"), sys.argv[2]
threading.Thread(target=beat, daemon=True).start()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
if work == "runs":
    re.match("(a+)+$", "a" * 60 + "b")  # C code of hours that never releases the GIL
elif work == "sleeps":
    ctypes.PyDLL(None).sleep(60)
else:
    time.sleep(60)
"""
SEEN = {
    "runs": "runs without releasing the GIL, with ",
    "sleeps": "without releasing the GIL, or its container is frozen",
    "stopped": "is stopped by a signal or a debugger",
    "ended": "is no process any more",
}


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
def test_what_a_rank_does_whose_recorder_cannot_run_is_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.runlog.process_state.LONG_S", 1.5)
    others, found = SilentProcesses(tmp_path, rank=0), dict[int, ProcessState]()
    works, go = [*SEEN, "waits"], tmp_path / "go"  # until it is there, all write
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, work in enumerate(works, start=1):
            line = [sys.executable, "-c", SILENT, str(record_paths(tmp_path, rank=rank)[0]), work, str(go)]
            processes.append(stack.enter_context(subprocess.Popen(line)))
            stack.callback(processes[-1].kill)
            write_process(tmp_path, rank=rank, process=Path(f"/proc/{processes[-1].pid}"))
        while len(others.wrote) < len(works):
            time.sleep(0.05)
            assert not others.sample(), "a rank that has only begun to write is not silent"
        go.touch()
        processes[works.index("stopped")].send_signal(signal.SIGSTOP)
        processes[works.index("ended")].kill()
        for _ in range(1200):
            time.sleep(0.05)
            found |= {one.peer: one for one in others.sample()}
            # its first state may hold time of its start, where this machine let it wait
            if len(found) >= len(SEEN) and (found[1 + works.index("sleeps")].cpu or 0.0) < 0.1:
                break
    assert sorted(found) == [1, 2, 3, 4], "the last one lives, and writes"
    # the records of rank 1 end with its last operation, and those of the others go on
    records = [one for one in hang() if not (isinstance(one, Beat) and one.rank == 1 and one.at_s > 8.0)]
    window = RecordWindow()
    for record in records:
        window.add(record)
    for seen, said in zip(sorted(found), SEEN.values(), strict=True):
        state = replace(found[seen], peer=1, at_s=20.0)
        window.add(state)
        for job in (from_records([*records, state]), window.records()):
            (finding,) = diagnose(job)
            assert finding.where == "rank 1" and "its recorder is silent. Rank 1 " in finding.text
            assert said in finding.text, (state, finding.text)
