"""Watchdog of a static run: warns or ends the run on a finding, and counts lost time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from thinwire.cli.steered import diagnosis_of, tell_end
from thinwire.errors import Stopped
from thinwire.monitor.live_diagnosis import Members
from thinwire.monitor.remediation import Action
from thinwire.training.attempts import RunParts, downtime_of, read_parts
from thinwire.training.config import TrainConfig

_LOOK_S = 0.5
# The launcher has taken the signal by then.
_STOPPED_S = 0.5


class Judgement:
    """Ends a run because of a finding; see `thinwire.monitor.live_diagnosis.Hands`.

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
        threading.Timer(_STOPPED_S, end_stopped, [os.getpid()]).start()
        return "the run ends"


def end_stopped(pid: int) -> None:
    """Kill what a process has started and is stopped (SIGSTOP): it hears of no other signal, and is waited for."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()


@contextlib.contextmanager
def judged(config: TrainConfig, *, step: int, say: Callable[[str], None]) -> Iterator[Judgement]:
    """Judge what runs inside, and say at its end what broke and what it cost."""
    judgement, parts, done = Judgement(), RunParts(config.run_dir), threading.Event()
    diagnosis = diagnosis_of(
        config.run_dir, on_finding=config.run.on_finding, is_dry_run=config.run.on_finding_dry_run, hands=judgement,
        say=say,
        # the launcher ends the run and says why: told once, as one error
        is_said=lambda finding: not finding.is_own_error,
    )  # fmt: skip
    if diagnosis is None:
        yield judgement
        return

    def look() -> None:
        while not done.wait(_LOOK_S):
            parts.look()

    parts.begin(step=step)
    watcher = threading.Thread(target=look, name="thinwire-parts", daemon=True)
    watcher.start()
    how = "failed"
    try:
        with diagnosis:
            yield judgement
        how = "finished"
    except (Stopped, KeyboardInterrupt):
        how = "failed" if judgement.why else "stopped"
        raise
    finally:
        done.set()
        watcher.join()
        told = [line["at"] for line in diagnosis.actions if line["action"] == "abort" and judgement.why]
        parts.end(how, found_s=told[0] if told else None)  # type: ignore[arg-type]
        downtime = downtime_of(read_parts(config.run_dir), now_s=time.time())
        quiet = config.output.quiet and not diagnosis.news
        tell_end(config.run_dir, diagnosis, downtime, say=_nothing if quiet else say)


def _nothing(text: str) -> None:
    """Say nothing of a quiet run in which nothing broke."""
