"""Watchdog shared by `thinwire train` and `thinwire join`, and its report at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from thinwire.files import write_whole
from thinwire.monitor.downtime import Downtime
from thinwire.monitor.findings import Finding
from thinwire.monitor.live_diagnosis import Hands, LiveDiagnosis, end_report
from thinwire.monitor.remediation import Policy, Steering

DOWNTIME_FILE = "downtime.json"


def diagnosis_of(
    run_dir: Path, *, on_finding: str, is_dry_run: bool, hands: Hands, say: Callable[[str], None],
    is_mine: Callable[[], bool] = lambda: True, is_said: Callable[[Finding], bool] = lambda finding: True,
) -> LiveDiagnosis | None:  # fmt: skip
    """Return what judges a run, None where that is off; `LiveDiagnosis` tells of the last two."""
    if on_finding == "off":
        return None
    steering = Steering(Policy(on_finding=on_finding))  # type: ignore[arg-type]
    return LiveDiagnosis(
        run_dir, say=say, steering=steering, hands=hands, is_dry_run=is_dry_run, is_mine=is_mine, is_said=is_said
    )


def tell_end(run_dir: Path, diagnosis: LiveDiagnosis, downtime: Downtime, *, say: Callable[[str], None]) -> None:
    """Say what broke, what was done and how much time was lost, and write `downtime.json`."""
    for line in end_report(diagnosis):
        say(line)
    say(str(downtime))
    try:
        write_whole(run_dir / DOWNTIME_FILE, json.dumps(downtime.to_json()) + "\n")
    except OSError as error:
        say(f"warning: cannot write {run_dir / DOWNTIME_FILE}: {error.strerror}")
