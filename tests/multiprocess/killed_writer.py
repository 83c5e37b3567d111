"""A program that writes checkpoints in processes of its own, kills each at another line, and looks at what is left.

Its arguments: the kind of place, a folder, what is written, the first line at which a writer dies, and how many lines
on the next one does. It prints how many writers died.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem

import thinwire.files
import thinwire.training.checkpoints.global_checkpoints as subject
from thinwire.elastic.global_state import GlobalState, sha256
from thinwire.training.checkpoints import checkpoint_files

WATCHED = {
    module.__file__
    for module in (
        thinwire.files,
        checkpoint_files,
        subject,
    )
}


def state_of(step: int, **note: Any) -> GlobalState:
    return GlobalState(
        step=step, parameters={"w": torch.full((300,), float(step))}, outer={"m": torch.ones(9)}, note=note
    )


def opened(kind: str, folder: Path, keep_last: int) -> subject.GlobalCheckpoints:
    checkpoints = subject.GlobalCheckpoints(folder, keep_last=keep_last)
    if kind == "url":
        checkpoints._files = subject.global_files(checkpoint_files.UrlStorage(LocalFileSystem(), str(folder)))
    return checkpoints


def write_until(line: int, checkpoints: subject.GlobalCheckpoints, state: GlobalState) -> bool:
    """Let a child write, and die by SIGKILL before its `line`-th line; tell whether it died."""
    child = os.fork()
    if child == 0:
        left = line

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in WATCHED:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        checkpoints.write(state)
        sys.settrace(None)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"a writer ended with {status}"
    return status != 0


def check(kind: str, checkpoints: subject.GlobalCheckpoints, allowed: list[GlobalState]) -> None:
    latest = checkpoints.latest()
    assert latest.state is not None
    assert sha256(latest.state) in {sha256(state) for state in allowed}, latest.state
    problems = [problem for step in checkpoints.steps() if (problem := checkpoints.problem(step))]
    assert len(problems) == len(latest.warnings)
    # where files come to be bit by bit, the last one may have been begun: then it is told, and does not count
    assert not problems or (kind == "url" and len(problems) == 1 and "checkpoint.json" in problems[0]), problems


def main(kind: str, root: Path, what: str, line: int, stride: int) -> int:
    folder = root / "run"
    died = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        before = [state_of(10)] if what == "next" else [state_of(10), state_of(20)]
        for state in before:
            opened(kind, folder, 2).write(state)
        new = state_of(20, more=1) if what == "again" else state_of(20)
        if what == "other":
            new = GlobalState(step=20, parameters={"w": torch.zeros(7)})
        # one that removes the older ones at its end, where there is a newer one that verifies
        has_died = write_until(line, opened(kind, folder, 1), new)
        allowed = [before[-1], new] if kind == "folder" and what == "again" else [*before, new]
        check(kind, opened(kind, folder, 1), allowed if has_died else [new])
        following = opened(kind, folder, 1)
        following.write(state_of(30))
        assert following.steps() == [30]
        left = [path.name for path in folder.rglob("*") if path.is_file()]
        assert sorted(left) == ["checkpoint.json", "model.safetensors", "outer.safetensors"], left
        if not has_died:
            return died
        died += 1
        line += stride


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
