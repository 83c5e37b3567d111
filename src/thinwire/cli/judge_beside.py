"""Judges a run that torchrun started: a process of its own beside a host's first rank, which warns.

Nobody else owns such a run, and a thread of a rank that is stopped would be stopped with it. The process ends with the
rank that started it, which holds the other end of its input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.cli.output import protect_output
from thinwire.training.config import TrainConfig

_MODULE = "thinwire.cli.judge_beside"
# What the ranks wrote at their end is read once more.
_LAST_S = 0.5
_END_S = 5.0


@contextlib.contextmanager
def judged_beside(config: TrainConfig) -> Iterator[None]:
    """Have what runs inside judged by a process beside the first rank of each host."""
    if config.run.on_finding == "off" or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    line = [sys.executable, "-m", _MODULE, str(config.run_dir), os.environ["RANK"], str(os.getpid())]
    try:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:  # the run is worth more than what is said of it
        _say(f"warning: the run is not judged while it goes on: {error.strerror}")
        yield
        return
    with process:
        try:
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main(arguments: Sequence[str]) -> int:
    """Judge a run until the rank beside it ends.

    Args:
        arguments: The run's folder, the rank and its process id.
    """
    run_dir, rank, parent = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    # whoever ends the run ends the rank, and that ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from thinwire.cli.launcher_end import end_with
    from thinwire.cli.steered import diagnosis_of
    from thinwire.monitor.live_diagnosis import end_report

    end_with(parent)
    first = run_dir / "records-rank-0.jsonl"
    diagnosis = diagnosis_of(
        run_dir, on_finding="warn", is_dry_run=False, hands=_Nobody(), say=_say,
        # hosts that share a folder are judged by the first one's process, which sees all ranks
        is_mine=lambda: rank == 0 or not first.exists(),
    )  # fmt: skip
    assert diagnosis is not None
    with diagnosis:
        while sys.stdin.buffer.read(1):
            pass
        time.sleep(_LAST_S)
    for line in end_report(diagnosis):
        _say(line)
    return 0


class _Nobody:
    """See `thinwire.monitor.live_diagnosis.Hands`: all take part, and nothing can be done."""

    def members(self) -> None:
        """Return that all take part."""
        return

    def act(self, action: object) -> str:
        """Say that nothing is done."""
        return f"nothing: {action} is not possible under torchrun"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone; `judged_beside` calls this in the rank's process
        print(f"thinwire: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    protect_output()
    sys.exit(main(sys.argv[1:]))
