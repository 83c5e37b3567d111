"""A process that has imported all it needs and waits for work: takes the place of a replica's process that died.

Importing torch takes seconds, in which a replica that was killed could be training again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# A spare that is still importing when it is needed is no slower than a process that begins then.
_STOP_S = 5.0


class StandbyProcess:
    """Keeps one process waiting for work.

    Args:
        module: What `python -m` runs: it waits in `read_work`, and does what comes; "" keeps none.
        run_dir: The run's folder; what the process prints while it waits goes to `logs/spare.err` there.
    """

    def __init__(self, module: str, *, run_dir: Path) -> None:
        self._module = module
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_there(self) -> bool:
        """Whether a process waits."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Let a process wait, unless one does."""
        if self.is_there or not self._module:
            return
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", self._module, str(self._run_dir.resolve()), str(os.getpid())]
        with log_path(logs / "spare.err").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def assign(self, *, log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Give the waiting process work; return it, None where none waits.

        Args:
            log: Takes what it prints from now on.
            arguments: Of the process.
        """
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"log": str(log), "arguments": list(arguments)}).encode() + b"\n")
            process.stdin.close()
        except OSError:  # it died just now
            return None
        return process

    def stop(self) -> None:
        """Let no process wait any more."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # which it takes for the end
        try:
            self._process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def log_path(path: Path) -> Path:
    """Return where a process may write what it prints: nowhere where there is no room for a file of its own."""
    with contextlib.suppress(OSError):
        path.open("ab").close()
        return path
    return Path(os.devnull)


def read_work() -> list[str] | None:
    """Wait for work on stdin, and send what is printed from then on where the launcher wants it.

    Returns:
        The arguments, None where there is no work any more.
    """
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    work = json.loads(line)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(work["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    return [str(argument) for argument in work["arguments"]]
