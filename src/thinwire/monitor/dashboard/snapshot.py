"""A run's folder as one value that a page or a terminal can show; nothing in it is trusted, nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.dashboard.chart_data import delay_matrix, timeline
from thinwire.monitor.dashboard.data_gaps import what_is_missing
from thinwire.monitor.dashboard.findings_reader import downtime_told, finding_told, text
from thinwire.monitor.dashboard.json_file import ObjectFile
from thinwire.monitor.dashboard.links import links_told
from thinwire.monitor.dashboard.run_status import headline, replicas_told, run_state
from thinwire.monitor.dashboard.sources import Sources
from thinwire.monitor.dashboard.window import joined
from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.diagnose import DetectorState, diagnose, findings_of
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Finding
from thinwire.monitor.heat import heat_maps
from thinwire.monitor.runlog.run_folder import join_evaluations
from thinwire.monitor.runlog.sources import RECORDS, read_files

VERSION = 1
_MOST_CURVES = 32
_MOST_MAPS = 4
_MOST_DIAGNOSED_BYTES = 48 << 20
# Analysis may take so much of the time that goes by, so that a page never slows down what it shows.
_MOST_SHARE = 0.1


class RunFollower:
    """Follows one run's folder; see `snapshot` for one look.

    Args:
        folder: The run's folder.
        judges_all: Judge all records at each look, as `thinwire diagnose` does, and not the latest ones; what the run
            itself found is told where it is over.

    Raises:
        DataError: There is no such folder.
    """

    def __init__(self, folder: Path, *, judges_all: bool = False) -> None:
        self._judges_all = judges_all
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; give the folder that `thinwire train --out` writes")
        self._folder = folder
        self._sources = Sources(folder)
        self._objects = {
            name: ObjectFile(folder / f"{name}.json", self._sources.refused)
            for name in ("config", "summary", "downtime")
        }
        self._usual: dict[tuple[int, int], float] = {}
        # what links and work showed from look to look: the records that are kept may be too few to know what is usual
        self._history, self._book = DetectorState(), SightingBook()
        self._analysed = -1
        self._next_analysis_s = -math.inf
        self._pictures: dict[str, Any] = {"matrix": None, "timeline": None, "heat": []}
        self._own: list[dict[str, Any]] = []
        self._of_the_end: list[dict[str, Any]] | None = None

    def look(self) -> bool:
        """Read what is new, a bounded piece of it, and return whether more is there."""
        for one in self._objects.values():
            self._sources.changes += one.look()
        return self._sources.look()

    def sections(self, *, now: float | None = None) -> dict[str, Any]:
        """Return what is known as what JSON can hold, by section.

        Args:
            now: Seconds since 1970; the clock's by default.
        """
        at = time.time() if now is None else now
        sources, (config, summary, downtime) = self._sources, (one.value for one in self._objects.values())
        self._analyse()
        findings, told_by = self._findings(is_over=summary is not None)
        run = run_state(self._folder, config, summary, sources, now=at)
        replicas = replicas_told(sources, run, now=at)
        told: dict[str, Any] = {
            "run": run,
            "headline": headline(
                run, replicas, findings, told_by=told_by, has_links=self._pictures["matrix"] is not None
            ),
            "replicas": replicas,
            "curves": self._curves(),
            "links": links_told(sources.links),
            "matrix": self._pictures["matrix"],
            "timeline": self._pictures["timeline"],
            "heat": self._pictures["heat"],
            "findings": {"told_by": told_by, "findings": findings},
            "actions": {"is_there": sources.has("actions"), "actions": sources.actions.to_json()},
            "downtime": self._downtime(downtime),
            "elastic": self._elastic(),
        }
        told["notes"] = {
            "missing": what_is_missing(sources, told), "refused": sources.refused.told(),
            "warnings": [[number, step, words] for number, one in sorted(sources.replicas.items())
                         for step, words in one.warnings][-20:],
        }  # fmt: skip
        cleaned = _clean(told)
        assert isinstance(cleaned, dict)
        return cleaned

    def _analyse(self) -> None:
        """Make the pictures anew where records came, unless that would take too much of the time."""
        begun = time.monotonic()
        if self._sources.changes == self._analysed or begun < self._next_analysis_s:
            return
        self._analysed = self._sources.changes
        windows = [window for _, window in sorted(self._sources.windows.items())]
        job = build(joined(windows), self._book)
        if job.messages or job.operations or job.spans:
            matrix = delay_matrix(job, self._usual)
            heat = [one.to_json() for one in heat_maps(job)[:_MOST_MAPS]]
            shown = matrix if matrix["cells"] else None
            self._pictures = {"matrix": shown, "timeline": timeline(job), "heat": heat}
            if any(window.is_recorded for window in windows) and not self._sources.has("findings"):
                self._own = [_told_by_page(finding) for finding in findings_of(job, self._history)]
        self._next_analysis_s = time.monotonic() + (time.monotonic() - begun) / _MOST_SHARE

    def _findings(self, *, is_over: bool) -> tuple[list[dict[str, Any]], str]:
        """Return the findings, and who judged: the run itself, this page from the records, or nobody."""
        sources = self._sources
        is_recorded = any(window.is_recorded for window in sources.windows.values())
        if self._judges_all and is_recorded:
            found = self._diagnosed()
            if found is not None:
                told = sources.findings.to_json() if sources.has("findings") else []
                return [*found, *(one for one in told if one["is_over"])], "records"
        if sources.has("findings"):
            return sources.findings.to_json(), "run"
        if is_over and (is_recorded or sources.has("transfers")):
            if self._of_the_end is None:
                self._of_the_end = self._diagnosed()
            return self._own if self._of_the_end is None else self._of_the_end, "page"
        return (self._own, "page") if is_recorded else ([], "nobody")

    def _diagnosed(self) -> list[dict[str, Any]] | None:
        """Return what `thinwire diagnose` says of a run that is over; None where its files are too long for a page."""
        try:
            files = list(self._folder.glob(RECORDS)) or [
                path for path in self._folder.glob("*-replica-*.jsonl") if not path.name.startswith("rounds")
            ]
            if sum(path.stat().st_size for path in files) > _MOST_DIAGNOSED_BYTES:
                return None
            found = diagnose(read_files([self._folder]))
        except (DataError, OSError, ValueError) as error:
            self._sources.refused.add(self._folder.name, str(error))
            return []
        return [_told_by_page(finding) for finding in found]

    def _curves(self) -> dict[str, Any]:
        known = sorted(self._sources.replicas.items())
        evaluations = join_evaluations(part for _, one in known for part in list(one.evaluations.values()))
        return {
            "loss": [{"replica": number, "points": one.loss.points()} for number, one in known[:_MOST_CURVES]],
            "speed": [{"replica": number, "points": one.speed.points()} for number, one in known[:_MOST_CURVES]],
            "evaluations": [[one.step, one.val_loss] for one in evaluations][-200:],
            "num_left_out": max(0, len(known) - _MOST_CURVES),
        }

    def _downtime(self, told: Mapping[str, Any] | None) -> dict[str, float] | None:
        if told is None:
            return None
        try:
            return downtime_told(told)
        except ValueError as error:
            self._sources.refused.add("downtime.json", str(error))
            return None

    def _elastic(self) -> dict[str, Any] | None:
        sources = self._sources
        if not sources.journal.is_there and not sources.rounds:
            return None
        rounds = [round for _, one in sorted(sources.rounds.items()) for round in one.rounds()]
        latest = {round["round"]: round for round in sorted(rounds, key=lambda round: -round["told_by"])}
        return {"said": sources.journal.said(), "rounds": [latest[number] for number in sorted(latest)[:-13:-1]]}


def snapshot(folder: Path, *, now: float | None = None, judges_all: bool = False) -> dict[str, Any]:
    """Return all that a run's folder tells, as what JSON can hold.

    Args:
        folder: The run's folder, of a run that trains or is over.
        now: Seconds since 1970; the clock's by default.
        judges_all: See `RunFollower`.

    Raises:
        DataError: There is no such folder.
    """
    follower = RunFollower(folder, judges_all=judges_all)
    while follower.look():
        pass
    return {"version": VERSION, **follower.sections(now=now)}


def _told_by_page(finding: Finding) -> dict[str, Any]:
    return {**finding_told(finding.to_json()), "is_over": finding.until_s is not None}


def _clean(value: Any) -> Any:
    """Return a value without numbers that JSON lacks and texts that steer."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {key: _clean(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(own) for own in value]
    return value
