"""Attempts of a resumed run: begin, first step and end of each, the cost of faults, and the checkpoint interval.

The process that starts the run writes `parts.jsonl` in its folder. If that process was killed, the next one derives the
end of the attempt from the run's files.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from thinwire.files import write_whole
from thinwire.runlog.downtime import Downtime, Incident, account
from thinwire.runlog.reader import last_lines, parse_object
from thinwire.runlog.writer import JsonlWriter

# Stands for what is not known yet: one failure in a day.
PRIOR_MTBF_S = 24 * 3600.0


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval between checkpoints, see `daly_s`: the first-order optimum.

    Raises:
        ValueError: A time is not positive.

    Example:
        >>> young_s(2.0, 3600.0)
        120.0

    Reference:
        J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974.
    """
    if not 0 < cost_s < math.inf or not 0 < mtbf_s < math.inf:
        raise ValueError(f"cost_s and mtbf_s must be positive, got {cost_s} and {mtbf_s}")
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval: seconds of training from the end of one checkpoint to the begin of the next.

    Args:
        cost_s: Seconds that one checkpoint keeps the run from training.
        mtbf_s: Mean seconds between failures that lose what no checkpoint holds.

    Raises:
        ValueError: A time is not positive.

    Example:
        >>> round(daly_s(2.0, 3600.0), 2)
        118.67

    Reference:
        J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
        Computer Systems 22, 2006, equation 37: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2M, and
        M else.
    """
    first_order_s = young_s(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return first_order_s * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def mtbf_s(*, run_s: float, num_failures: int, prior_s: float = PRIOR_MTBF_S) -> float:
    """Return the mean time between failures, as far as a run has shown it.

    The prior counts as one failure in `prior_s` seconds that were seen before (the mean of a gamma prior of weight
    one): with no failure yet the time grows with the run, and after many the prior is forgotten.

    Args:
        run_s: Seconds that the run has been going on, all its parts together.
        num_failures: Failures in them.
        prior_s: Seconds between failures that are believed before anything was seen.

    Raises:
        ValueError: A number is negative, or the prior not positive.

    Example:
        >>> mtbf_s(run_s=0.0, num_failures=0, prior_s=1000.0), mtbf_s(run_s=1000.0, num_failures=9, prior_s=1000.0)
        (1000.0, 200.0)
    """
    if run_s < 0 or num_failures < 0 or not 0 < prior_s < math.inf:
        raise ValueError(
            f"run_s and num_failures must be at least 0 and prior_s positive, got {run_s}, {num_failures} and {prior_s}"
        )
    return (prior_s + run_s) / (1 + num_failures)


def interval_steps(*, cost_s: float, write_s: float, step_s: float, mtbf_s: float) -> int:
    """Return the steps between two checkpoints: Daly's interval, and never less than writing two takes.

    Args:
        cost_s: Seconds that one checkpoint keeps the run from training.
        write_s: Seconds that writing it takes behind the back of training; 0 where training waits for it.
        step_s: Seconds of a step.
        mtbf_s: Mean seconds between failures.

    Example:
        >>> interval_steps(cost_s=2.0, write_s=0.0, step_s=0.5, mtbf_s=3600.0)
        237
    """
    wished_s = daly_s(max(cost_s, 1e-3), mtbf_s)
    return max(1, round(max(wished_s, 2 * write_s) / max(step_s, 1e-6)))


PARTS_FILE = "parts.jsonl"
COST_FILE = "checkpoint-cost.json"
_METRICS = "metrics-replica-0.jsonl"
_TAIL_BYTES = 1 << 16
_MOST_PARTS_BYTES = 1 << 22

How = Literal["finished", "stopped", "failed", "lost"]


class RunParts:
    """Writer of one attempt's lines; the clock counts seconds since 1970."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._seen: tuple[float, int] | None = None
        self._is_working = False
        self._file: JsonlWriter | None = None
        self._began_s = clock()

    def begin(self, *, step: int) -> None:
        """Note that a part begins after `step`; before the replicas cut off what they wrote since."""
        before = read_parts(self._run_dir)
        if not before and step == 0:
            (self._run_dir / PARTS_FILE).unlink(missing_ok=True)
        elif before and before[-1]["what"] != "ended":
            last = _last_step(self._run_dir)
            self._write("ended", {"how": "lost", **last}, at_s=last.get("last_s") or before[-1]["at"])
        self._began_s = self._clock()
        self._seen = _size(self._run_dir / _METRICS)
        self._write("begun", {"step": step})

    def poll(self) -> None:
        """Note the first sign of work, and write what a full disk kept waiting; called now and then."""
        if self._file is not None:
            self._file.flush()
        if not self._is_working and _size(self._run_dir / _METRICS) != self._seen:
            last = _last_step(self._run_dir)
            if last.get("last_s", 0.0) > self._began_s and last.get("step", 0) > 0:
                self._is_working = True
                self._write("working", {}, at_s=last["last_s"])

    def end(self, how: How, *, found_s: float | None = None) -> None:
        """Note how the part ended, and when the fault that ended it was found, where that was before the end."""
        self.poll()
        found = {} if found_s is None else {"found_s": round(found_s, 3)}
        self._write("ended", {"how": how, **found, **_last_step(self._run_dir)})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, what: str, fields: Mapping[str, Any], *, at_s: float | None = None) -> None:
        line = {"what": what, "at": round(self._clock() if at_s is None else at_s, 3), **fields}
        with contextlib.suppress(OSError):  # what matters more reports it
            if self._file is None:
                self._file = JsonlWriter(self._run_dir / PARTS_FILE)
            self._file.write(json.dumps(line, separators=(",", ":")), is_last=True)


def read_parts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `parts.jsonl` that can be read, in their order."""
    found = []
    with contextlib.suppress(OSError), (run_dir / PARTS_FILE).open("rb") as file:
        for line in file.read(_MOST_PARTS_BYTES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                part = parse_object(line)
                if part["what"] in ("begun", "working", "ended") and math.isfinite(float(part["at"])):
                    found.append(part)
    return found


def downtime_of(parts: Sequence[Mapping[str, Any]], *, now_s: float) -> Downtime:
    """Return the cost of faults that ended an attempt, by the lines of `parts.jsonl`; a stop by the user is none."""
    if not parts:
        return Downtime()
    incidents = []
    for index, one in enumerate(parts):
        if one["what"] != "ended" or one.get("how") not in ("failed", "lost"):
            continue
        later = parts[index + 1 :]
        begun = next((other for other in later if other["what"] == "begun"), None)
        working = next((other for other in later if other["what"] == "working"), None)
        again = max(0, _whole(one, "step") - _whole(begun, "step")) if begun is not None else 0
        incidents.append(Incident(
            since_s=float(one.get("last_s") or one["at"]), found_s=float(one.get("found_s") or one["at"]),
            acted_s=float(one["at"]) if begun is None else float(begun["at"]),
            back_s=None if working is None else float(working["at"]), lost_work_s=again * float(one.get("step_s") or 0),
        ))  # fmt: skip
    # the seconds between a stop by the user and the part that went on from it are none of the run
    begins_s = [*(float(one["at"]) for one in parts if one["what"] == "begun"), now_s]
    stops_s = [
        float(one["at"]) for one in parts if one["what"] == "ended" and one.get("how") in ("stopped", "finished")
    ]
    paused_s = sum(
        max(0.0, min((at_s for at_s in begins_s if at_s >= stop_s), default=stop_s) - stop_s) for stop_s in stops_s
    )
    return account(incidents, run_s=now_s - float(parts[0]["at"]) - paused_s, end_s=now_s)


def measured_mtbf_s(parts: Sequence[Mapping[str, Any]], *, now_s: float) -> tuple[float, int]:
    """Return the mean seconds between faults that ended a part, as far as the run has shown it, and their number."""
    began_s, run_s, failures = None, 0.0, 0
    for one in parts:
        if one["what"] == "begun":
            began_s = float(one["at"])
        elif one["what"] == "ended" and began_s is not None:
            run_s, began_s = run_s + max(0.0, float(one["at"]) - began_s), None
            failures += one.get("how") in ("failed", "lost")
    if began_s is not None:
        run_s += max(0.0, now_s - began_s)
    return mtbf_s(run_s=run_s, num_failures=failures), failures


def note_cost(run_dir: Path, *, cost_s: float, step_s: float, write_s: float = 0.0) -> None:
    """Write down a checkpoint's cost, for `chosen_interval`; other writers report a full disk."""
    cost = {"cost_s": round(cost_s, 4), "step_s": round(step_s, 4), "write_s": round(write_s, 4)}
    with contextlib.suppress(OSError):
        write_whole(run_dir / COST_FILE, json.dumps(cost) + "\n")


def chosen_interval(run_dir: Path) -> tuple[int, str] | None:
    """Return the steps between checkpoints that earlier parts of a run speak for, and why; None where none tell."""
    try:
        cost = json.loads((run_dir / COST_FILE).read_text())
        cost_s, step_s = float(cost["cost_s"]), float(cost["step_s"])
        write_s = float(cost.get("write_s", 0.0))
        if not (0 <= cost_s < math.inf and 0 < step_s < math.inf and 0 <= write_s < math.inf):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    mean_s, failures = measured_mtbf_s(read_parts(run_dir), now_s=time.time())
    steps = interval_steps(cost_s=cost_s, write_s=write_s, step_s=step_s, mtbf_s=mean_s)
    seen = f"{failures} failures seen" if failures else "no failure seen, one in a day assumed before"
    return steps, (
        f"a checkpoint every {steps} steps: one costs {cost_s:.2g} s, a step takes {step_s:.2g} s, and the mean time "
        f"between failures is {mean_s / 3600:.2g} h ({seen})"
    )


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name, 0)
    return value if isinstance(value, int) else 0


def _size(path: Path) -> tuple[float, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime, found.st_size


def _last_step(run_dir: Path) -> dict[str, Any]:
    """Return the last step that replica 0 wrote, its seconds and its time; nothing if it wrote none."""
    path = run_dir / _METRICS
    with contextlib.suppress(OSError):
        lines, written_s = last_lines(path, num_bytes=_TAIL_BYTES), path.stat().st_mtime
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                values = parse_object(line)
                if values["kind"] == "step" and values["step"] > 0:
                    step_s = round(float(values["time_s"]) / values["step"], 4)
                    return {"step": int(values["step"]), "step_s": step_s, "last_s": round(written_s, 3)}
    return {}
