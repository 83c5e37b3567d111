"""Watchdog of a run: diagnoses it while it trains, acts on findings, and reports the lost time at its end.

A static run is watched by a thread of its launcher. A run that torchrun started has no such process: the first rank of
each host starts one, since a thread of a rank that is stopped would be stopped with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from thinwire.cli.output import log_if_possible, log_nothing
from thinwire.cli.process_names import process_of
from thinwire.errors import Stopped
from thinwire.files import write_whole
from thinwire.monitor.findings import Finding
from thinwire.monitor.live_diagnosis import Hands, LiveDiagnosis, Members, end_report
from thinwire.monitor.remediation import Action, Policy, Steering
from thinwire.runlog.attempts import RunParts, downtime_of, read_parts
from thinwire.runlog.downtime import Downtime
from thinwire.training.config import TrainConfig

DOWNTIME_FILE = "downtime.json"
_CHECK_S = 0.5
# The launcher has taken the signal by then.
_STOPPED_S = 0.5
_END_S = 5.0


def diagnosis_of(
    run_dir: Path, *, on_finding: str, is_dry_run: bool, hands: Hands, say: Callable[[str], None],
    is_mine: Callable[[], bool] = lambda: True, is_said: Callable[[Finding], bool] = lambda finding: True,
) -> LiveDiagnosis | None:  # fmt: skip
    """Return the live diagnosis of a run, None where it is off; `LiveDiagnosis` describes the last two."""
    if on_finding == "off":
        return None
    steering = Steering(Policy(on_finding=on_finding))  # type: ignore[arg-type]
    return LiveDiagnosis(
        run_dir, say=say, steering=steering, hands=hands, is_dry_run=is_dry_run, is_mine=is_mine, is_said=is_said
    )


def report_end(run_dir: Path, diagnosis: LiveDiagnosis, downtime: Downtime, *, say: Callable[[str], None]) -> None:
    """Report findings, actions and lost time, and write `downtime.json`."""
    for line in end_report(diagnosis):
        say(line)
    say(str(downtime))
    try:
        write_whole(run_dir / DOWNTIME_FILE, json.dumps(downtime.to_json()) + "\n")
    except OSError as error:
        say(f"warning: cannot write {run_dir / DOWNTIME_FILE}: {error.strerror}")


class RunAborter:
    """Ends a static run because of a finding; see `thinwire.monitor.live_diagnosis.Hands`.

    Attributes:
        why: The finding that ended the run, or an empty text.
    """

    def __init__(self) -> None:
        self.why = ""

    def members(self) -> Members | None:
        """Return that all take part."""
        return None

    def act(self, action: Action) -> str:
        """End the run: the launcher takes the signal, as it would a person's."""
        assert action.kind == "abort"
        self.why = action.why
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(_STOPPED_S, kill_stopped_children, [os.getpid()]).start()
        return "the run ends"


class NoHands:
    """Acts on nothing: under torchrun another program owns the processes."""

    def members(self) -> Members | None:
        """Return that all take part."""
        return None

    def act(self, action: object) -> str:
        """Return that nothing is done."""
        return f"nothing: {action} is not possible under torchrun"


def kill_stopped_children(pid: int) -> None:
    """Kill the descendants of a process that are stopped (SIGSTOP), which take no other signal."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()


@contextlib.contextmanager
def watched_run(config: TrainConfig, *, step: int, say: Callable[[str], None]) -> Iterator[RunAborter]:
    """Diagnose the static run inside the block, and report at its end what broke and what it cost."""
    aborter, parts, done = RunAborter(), RunParts(config.run_dir), threading.Event()
    diagnosis = diagnosis_of(
        config.run_dir, on_finding=config.run.on_finding, is_dry_run=config.run.on_finding_dry_run, hands=aborter,
        say=say,
        # the launcher ends the run and reports the reason once, as an error
        is_said=lambda finding: not finding.is_own_error,
    )  # fmt: skip
    if diagnosis is None:
        yield aborter
        return

    def watch_parts() -> None:
        while not done.wait(_CHECK_S):
            parts.poll()

    parts.begin(step=step)
    watcher = threading.Thread(target=watch_parts, name="thinwire-parts", daemon=True)
    watcher.start()
    outcome = "failed"
    try:
        with diagnosis:
            yield aborter
        outcome = "finished"
    except (Stopped, KeyboardInterrupt):
        outcome = "failed" if aborter.why else "stopped"
        raise
    finally:
        done.set()
        watcher.join()
        found_s = [line["at"] for line in diagnosis.actions if line["action"] == "abort" and aborter.why]
        parts.end(outcome, found_s=found_s[0] if found_s else None)  # type: ignore[arg-type]
        downtime = downtime_of(read_parts(config.run_dir), now_s=time.time())
        is_quiet = config.output.quiet and not diagnosis.news
        report_end(config.run_dir, diagnosis, downtime, say=log_nothing if is_quiet else say)


@contextlib.contextmanager
def watchdog_process(config: TrainConfig) -> Iterator[None]:
    """Have the run inside the block diagnosed by a process beside the first rank of each host."""
    if config.run.on_finding == "off" or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    line = [
        sys.executable,
        "-m",
        *process_of("watchdog").split(),
        str(config.run_dir),
        os.environ["RANK"],
        str(os.getpid()),
    ]
    try:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:  # the run is worth more than its diagnosis
        log_if_possible(f"warning: the run is not diagnosed while it trains: {error.strerror}")
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
