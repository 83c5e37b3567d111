"""Snapshot of a run folder as JSON: state, replicas, findings, charts and data gaps; untrusted, read-only."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import DataError
from thinwire.monitor.dashboard.chart_data import delay_matrix, timeline
from thinwire.monitor.dashboard.findings_reader import downtime_rows, finding_row, text
from thinwire.monitor.dashboard.sources import MOST_RANKS, ObjectFile, Sources, link_table
from thinwire.monitor.dashboard.window import joined
from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.diagnose import DetectorState, diagnose, findings_of
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Finding
from thinwire.monitor.heat import heat_maps
from thinwire.monitor.run_numbers import RunNumbers, number_rows, time_left_s
from thinwire.monitor.runlog.reader import converted
from thinwire.monitor.runlog.records import Count
from thinwire.monitor.runlog.run_folder import RECORDS, SUMMARY, Summary, join_evaluations, parse, read_files, setting

VERSION = 1
Entry = TypeVar("Entry")
_MOST_CURVES = 32
_MOST_MAPS = 4
_MOST_DIAGNOSED_BYTES = 48 << 20
# Share of the time that analysis may take, so that a page never slows down the run that it shows.
_MOST_SHARE = 0.1

_NO_METRICS = "No metrics-replica-N.jsonl yet: no replica has written a line about its steps."
_OTHER_HOSTS = "Loss and throughput of replicas on other hosts are in the run's folders on those hosts."
_NO_LINKS = "No transfers-replica-N.jsonl or records-rank-N.jsonl with transfers yet."
_OTHER_LINKS = "Links between other hosts are in the run's folders on those hosts."
_ONE_END = (
    "Replicas of an elastic run fetch each other's parts, and each host's folder holds one end only; a link's own time "
    "needs both."
)
_FEW_MESSAGES = (
    "A link is shown when both ends of several of its messages are known, or the counters of its connections."
)
_NO_WORK = "No rank has recorded its computing yet."
_NO_ROUNDS = "No rounds were recorded yet."
_FROM_METRICS = (
    "Drawn from metrics and finished transfers: waiting is known once a line of metrics, and shown at its end; a "
    "present standstill is not visible."
)
_NO_DIAGNOSIS = (
    "No findings.jsonl and no records-rank-N.jsonl: this run has no live diagnosis. thinwire diagnose reads the files "
    "that it has."
)
_PAGE = "Found by this page in the latest records; the run itself wrote no findings.jsonl."
_RECORDS = "Found in all records, as `thinwire diagnose` does; ended findings are from findings.jsonl."
_NO_ACTIONS = "No actions.jsonl: nothing acts on findings in this run, or nothing was done yet."
_NO_DOWNTIME = "No downtime.json: lost time is not accounted in this run, or not yet."
# A recorder writes a heartbeat twice a second.
_BEAT_SILENCE_S = 5.0
_DEFAULT_SILENCE_S = 60.0
_MOST_REPLICAS = 256


def data_gaps(sources: Sources, sections: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each section that has less than it could have, so that empty is not read as good."""
    is_elastic, is_recorded = sections["run"]["is_elastic"], any(one.is_recorded for one in sources.windows.values())
    left_out = f"Files of {sources.num_left_out} more ranks are there; {MOST_RANKS} are followed."
    no_matrix = _ONE_END if is_elastic and not is_recorded else _FEW_MESSAGES
    has_lanes = bool(sections["timeline"] and sections["timeline"]["lanes"])
    found = {
        "replicas": left_out if sources.num_left_out else "",
        "curves": _first(not sources.replicas, _NO_METRICS, is_elastic, _OTHER_HOSTS),
        "links": _first(not sources.links, _NO_LINKS, is_elastic, _OTHER_LINKS),
        "matrix": _first(sections["matrix"] is None, no_matrix),
        "heat": _first(not sections["heat"], _NO_WORK),
        "timeline": _first(not has_lanes, _NO_ROUNDS, not is_recorded, _FROM_METRICS),
        "findings": {"none": _NO_DIAGNOSIS, "page": _PAGE, "records": _RECORDS}.get(sections["findings"]["source"], ""),
        "actions": _first(not sections["actions"]["is_there"], _NO_ACTIONS),
        "downtime": _first(sections["downtime"] is None, _NO_DOWNTIME),
    }
    return {name: gap for name, gap in found.items() if gap}


def _first(is_one: bool, one: str, is_other: bool = False, other: str = "") -> str:
    """Return the text of the first condition that holds, or an empty text."""
    return one if is_one else other if is_other else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """Options in `config.json` that the page shows."""

    method: Any = None
    model: Any = None
    data: Any = None
    steps: Count | None = None
    replicas: Count | None = None


_OPTIONS = {
    "method": ("sync", "method"), "model": ("model", "name"), "data": ("data", "source"),
    "steps": ("run", "steps"), "replicas": ("run", "replicas"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """Fields of `summary.json` that the page shows."""

    val_loss: float | None = None
    wall_s: float | None = None
    times_fewer_bytes: float | None = None


def _lenient(kind: type[Entry], values: Mapping[str, Any] | None) -> Entry:
    """Return the fields of a file that other versions may have written; nothing if one is invalid."""
    try:
        return converted(values or {}, kind)
    except ValueError:
        return kind()


def run_state(
    folder: Path, config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None, sources: Sources, *, now: float
) -> dict[str, Any]:
    """Return the run's settings, progress and state.

    Returns:
        Among others `state`: `waiting` before the first line, `training`, `silent` if no file was written for too
        long, `failed`, or `finished`; `numbers`, rows of `thinwire.monitor.run_numbers` (name, label, value, text);
        and `time_left_s`, None where unknown.
    """
    result = _lenient(_Result, summary)
    settings = _lenient(_Config, {name: setting(config or {}, *place) for name, place in _OPTIONS.items()})
    changed_at = sources.changed_at()
    is_failed = bool(sources.replicas) and all(one.error for one in sources.replicas.values())
    if summary is not None or sources.journal.is_finished:
        state = "finished"
    elif is_failed:
        state = "failed"
    elif changed_at is None:
        state = "waiting"
    else:
        limit_s = min((_silence_limit_s(sources, rank) for rank in sources.windows), default=_DEFAULT_SILENCE_S)
        state = "training" if now - changed_at <= limit_s else "silent"
    return {
        "name": text(folder.resolve().name), "state": state, "changed_at": changed_at,
        "method": text(settings.method), "model": text(settings.model), "data": text(settings.data),
        "steps": settings.steps, "num_replicas": settings.replicas,
        "is_elastic": sources.journal.is_there or bool(sources.rounds),
        "step": max((one.last.step for one in sources.replicas.values() if one.last is not None), default=0),
        "val_loss": result.val_loss, "wall_s": result.wall_s, "times_fewer_bytes": result.times_fewer_bytes,
        "numbers": _numbers(summary, sources), "time_left_s": _time_left_s(settings.steps, sources, state=state),
    }  # fmt: skip


def _time_left_s(steps: int | None, sources: Sources, *, state: str) -> float | None:
    if steps is None or state != "training":
        return None
    known = [(one.first, one.last) for one in sources.replicas.values()]
    spans = [(first, last) for first, last in known if first is not None and last is not None]
    return time_left_s(spans, total_steps=steps)


def _numbers(summary: Mapping[str, Any] | None, sources: Sources) -> list[dict[str, Any]]:
    """Return the run's numbers: of its summary, or of the replicas' latest lines while it goes on."""
    numbers = None
    if summary is not None:
        with contextlib.suppress(DataError):  # damaged, or of another version
            numbers = RunNumbers.of_summary(parse(Summary, summary, source=SUMMARY))
    if numbers is None:
        lines = [one.last for one in sources.replicas.values() if one.last is not None]
        numbers = RunNumbers.of_lines(lines)
    return [] if numbers is None else number_rows(numbers)


def replica_rows(sources: Sources, run: Mapping[str, Any], *, now: float) -> list[dict[str, Any]]:
    """Return each replica with its `state`.

    Returns:
        Among others `state`: `waiting`, `training`, `silent`, `paused`, `failed`, `gone`, `finished`, or `elsewhere`
        for one whose files are on another host. A replica of a finished run is never `silent`.
    """
    members = sources.journal.members
    written = {*sources.replicas, *sources.windows, *sources.links}
    expected = range(0 if run["is_elastic"] else min(_MOST_REPLICAS, run["num_replicas"] or 0))
    found = []
    for number in sorted({*written, *expected, *members})[:_MOST_REPLICAS]:
        own = sources.replicas.get(number)
        member = members.get(number)
        row: dict[str, Any] = own.to_json() if own is not None else {"replica": number, "error": ""}
        if member is not None:
            row = {**row, "host": member["host"], "standing": member["standing"]}
            if own is None or own.last is None:
                # the journal writes 0 for unknown values
                row |= {name: member[name] or None for name in ("step", "loss", "tokens_per_s")}
        row["changed_at"] = sources.changed_at(number)
        row["state"] = _state(number, sources, run, row, now)
        found.append(row)
    return found


def _state(number: int, sources: Sources, run: Mapping[str, Any], row: Mapping[str, Any], now: float) -> str:
    member = sources.journal.members.get(number)
    if row["error"]:
        return "failed"
    if member is not None and member["standing"] == "gone":
        return "gone"
    if run["state"] == "finished" or (member is not None and member["standing"] == "done"):
        return "finished"
    if member is not None and member["is_paused"]:
        return "paused"
    if row["changed_at"] is None:
        return "waiting" if member is None else "elsewhere"
    if run["steps"] and (row.get("step") or 0) >= run["steps"]:
        return "finished"  # others still evaluate, or write the last checkpoint
    return "silent" if now - row["changed_at"] > _silence_limit_s(sources, number) else "training"


def _silence_limit_s(sources: Sources, rank: int) -> float:
    window, own = sources.windows.get(rank), sources.replicas.get(rank)
    if window is not None and window.is_recorded:
        return _BEAT_SILENCE_S
    return own.silence_s if own is not None else _DEFAULT_SILENCE_S


def headline(
    run: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]], *,
    source: str, has_links: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return one sentence on what is wrong, that nothing is, or that this is unknown.

    Returns:
        `level` (`trouble`, `good` or `unknown`), `text`, and `ranks` that it is about.
    """
    open_ones = [finding for finding in findings if not finding["is_over"]]
    if open_ones:
        first = open_ones[0]
        more = f", and {len(open_ones) - 1} more" if len(open_ones) > 1 else ""
        return {"level": "trouble", "text": f"{first['kind']}: {first['where']}{more}", "ranks": first["ranks"]}
    for state, one, many in (("failed", "has failed", "have failed"), ("silent", "is silent", "are silent")):
        ranks = [row["replica"] for row in replicas if row["state"] == state]
        if ranks:
            named = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
            sentence = f"replica {named} {one}" if len(ranks) == 1 else f"replicas {named} {many}"
            return {"level": "trouble", "text": sentence, "ranks": ranks}
    if run["state"] == "waiting":
        return {"level": "unknown", "text": "nothing has been written yet", "ranks": []}
    finished = "The run has finished. " if run["state"] == "finished" else ""
    if source == "none":
        return {"level": "unknown", "text": f"{finished}No diagnosis of this run yet", "ranks": []}
    if source == "page" and not has_links:
        return {"level": "unknown", "text": f"{finished}No fault found, but links could not be checked", "ranks": []}
    return {"level": "good", "text": f"{finished}No fault found", "ranks": []}


class RunFollower:
    """Follows one run's folder; see `snapshot` for a single reading.

    Args:
        folder: The run's folder.
        diagnoses_all: Diagnose all records at each poll, as `thinwire diagnose` does, and not the latest ones; of the
            run's own findings only the ended ones are kept.

    Raises:
        DataError: There is no such folder.
    """

    def __init__(self, folder: Path, *, diagnoses_all: bool = False) -> None:
        self._diagnoses_all = diagnoses_all
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; give the folder that `thinwire train --out` writes")
        self._folder = folder
        self._sources = Sources(folder)
        self._objects = {
            name: ObjectFile(folder / f"{name}.json", self._sources.refused)
            for name in ("config", "summary", "downtime")
        }
        self._usual: dict[tuple[int, int], float] = {}
        # kept from poll to poll: the latest records alone may be too few for a baseline
        self._history, self._book = DetectorState(), SightingBook()
        self._analysed = -1
        self._next_analysis_s = -math.inf
        self._charts: dict[str, Any] = {"matrix": None, "timeline": None, "heat": []}
        self._own: list[dict[str, Any]] = []
        self._final: list[dict[str, Any]] | None = None

    def poll(self) -> bool:
        """Read what is new, a bounded piece of it, and return whether more is there."""
        for one in self._objects.values():
            self._sources.changes += one.poll()
        return self._sources.poll()

    def sections(self, *, now: float | None = None) -> dict[str, Any]:
        """Return the state of the run by section, as JSON types.

        Args:
            now: Seconds since 1970; the clock's by default.
        """
        at = time.time() if now is None else now
        sources, (config, summary, downtime) = self._sources, (one.value for one in self._objects.values())
        self._analyse()
        findings, source = self._findings(is_over=summary is not None)
        run = run_state(self._folder, config, summary, sources, now=at)
        replicas = replica_rows(sources, run, now=at)
        sections: dict[str, Any] = {
            "run": run,
            "headline": headline(run, replicas, findings, source=source, has_links=self._charts["matrix"] is not None),
            "replicas": replicas,
            "curves": self._curves(),
            "links": link_table(sources.links),
            "matrix": self._charts["matrix"],
            "timeline": self._charts["timeline"],
            "heat": self._charts["heat"],
            "findings": {"source": source, "findings": findings},
            "actions": {"is_there": sources.has("actions"), "actions": sources.actions.to_json()},
            "downtime": self._downtime(downtime),
            "elastic": self._elastic(),
        }
        sections["notes"] = {
            "missing": data_gaps(sources, sections), "refused": sources.refused.quoted(),
            "warnings": [[number, step, message] for number, one in sorted(sources.replicas.items())
                         for step, message in one.warnings][-20:],
        }  # fmt: skip
        cleaned = _clean(sections)
        assert isinstance(cleaned, dict)
        return cleaned

    def _analyse(self) -> None:
        """Update the charts after new records, unless that would take too much of the time."""
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
            self._charts = {"matrix": shown, "timeline": timeline(job), "heat": heat}
            if any(window.is_recorded for window in windows) and not self._sources.has("findings"):
                self._own = [_page_row(finding) for finding in findings_of(job, self._history)]
        self._next_analysis_s = time.monotonic() + (time.monotonic() - begun) / _MOST_SHARE

    def _findings(self, *, is_over: bool) -> tuple[list[dict[str, Any]], str]:
        """Return the findings, and their source: `run`, `page` (this process), `records` (all of them), or `none`."""
        sources = self._sources
        is_recorded = any(window.is_recorded for window in sources.windows.values())
        if self._diagnoses_all and is_recorded:
            found = self._diagnosed()
            if found is not None:
                own = sources.findings.to_json() if sources.has("findings") else []
                return [*found, *(one for one in own if one["is_over"])], "records"
        if sources.has("findings"):
            return sources.findings.to_json(), "run"
        if is_over and (is_recorded or sources.has("transfers")):
            if self._final is None:
                self._final = self._diagnosed()
            return self._own if self._final is None else self._final, "page"
        return (self._own, "page") if is_recorded else ([], "none")

    def _diagnosed(self) -> list[dict[str, Any]] | None:
        """Return the findings of `thinwire diagnose`; None if the files are too long for a page."""
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
        return [_page_row(finding) for finding in found]

    def _curves(self) -> dict[str, Any]:
        known = sorted(self._sources.replicas.items())
        evaluations = join_evaluations(part for _, one in known for part in list(one.evaluations.values()))
        return {
            "loss": [{"replica": number, "points": one.loss.points()} for number, one in known[:_MOST_CURVES]],
            "speed": [{"replica": number, "points": one.speed.points()} for number, one in known[:_MOST_CURVES]],
            "evaluations": [[one.step, one.val_loss] for one in evaluations][-200:],
            "num_left_out": max(0, len(known) - _MOST_CURVES),
        }

    def _downtime(self, values: Mapping[str, Any] | None) -> dict[str, float] | None:
        if values is None:
            return None
        try:
            return downtime_rows(values)
        except ValueError as error:
            self._sources.refused.add("downtime.json", str(error))
            return None

    def _elastic(self) -> dict[str, Any] | None:
        sources = self._sources
        if not sources.journal.is_there and not sources.rounds:
            return None
        rounds = [round for _, one in sorted(sources.rounds.items()) for round in one.rounds()]
        latest = {round["round"]: round for round in sorted(rounds, key=lambda round: -round["reported_by"])}
        return {
            "messages": sources.journal.messages(),
            "rounds": [latest[number] for number in sorted(latest)[:-13:-1]],
        }


def snapshot(folder: Path, *, now: float | None = None, diagnoses_all: bool = False) -> dict[str, Any]:
    """Return the state of a run's folder as JSON types.

    Args:
        folder: The run's folder, in progress or finished.
        now: Seconds since 1970; the clock's by default.
        diagnoses_all: See `RunFollower`.

    Raises:
        DataError: There is no such folder.
    """
    follower = RunFollower(folder, diagnoses_all=diagnoses_all)
    while follower.poll():
        pass
    return {"version": VERSION, **follower.sections(now=now)}


def _page_row(finding: Finding) -> dict[str, Any]:
    return {**finding_row(finding.to_json()), "is_over": finding.until_s is not None}


def _clean(value: Any) -> Any:
    """Return a value without non-finite numbers and control characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {key: _clean(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(own) for own in value]
    return value
