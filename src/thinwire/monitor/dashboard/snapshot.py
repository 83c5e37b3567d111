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
from thinwire.monitor.dashboard.sources import MOST_RANKS, ObjectFile, Sources, link_table, path_table
from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.diagnose import DetectorState, diagnose, findings_of
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Finding
from thinwire.monitor.heat import heat_maps
from thinwire.runlog.measures import shown_metric
from thinwire.runlog.reader import converted
from thinwire.runlog.records import Count
from thinwire.runlog.run_folder import RECORDS, SUMMARY, Summary, parse, read_files, setting
from thinwire.runlog.run_numbers import RunNumbers, number_rows, time_left_s

VERSION = 1
Entry = TypeVar("Entry")
_MOST_CURVES = 32
_MOST_MAPS = 4
_MOST_DIAGNOSED_BYTES = 48 << 20
# Share of the time that analysis may take, so that a page never slows down the run that it shows.
_MOST_SHARE = 0.1

_NO_LOSS = "The loss appears after the first logged step."
_NO_SPEED = "The throughput appears after the first logged step."
_NO_REPLICAS = "No replica has written anything yet."
_OTHER_HOSTS = "Replicas on other hosts write to the run's folders on those hosts."
_NO_LINKS = "No message has crossed a link yet."
_NO_PEER = "A run of one replica has no links."
_OTHER_LINKS = "Links between other hosts are in the run's folders on those hosts."
_ONE_END = (
    "Replicas of an elastic run fetch each other's parts, and each host's folder holds one end only; a link's own time "
    "needs both."
)
_FEW_MESSAGES = "A link's delay appears once both ends have recorded several of its messages."
_NO_WORK = "No rank has recorded its computing yet."
_NO_ROUNDS = "No round has been recorded yet."
_FROM_METRICS = (
    "Drawn from metrics and finished transfers: waiting is known once a line of metrics, and shown at its end; a "
    "present standstill is not visible."
)
_PAGE = "Found by this page in the latest records; the run itself has reported none."
_RECORDS = "Found in all records, as `thinwire diagnose` does; resolved ones were reported by the run."
_NO_ACTIONS = "Nothing has acted on a finding."
_NO_DOWNTIME = "No time lost to faults is recorded."
_NOTHING_LOST = "No time was lost to faults."
# A recorder writes a heartbeat twice a second.
_BEAT_SILENCE_S = 5.0
_DEFAULT_SILENCE_S = 60.0
_MOST_REPLICAS = 256


def data_gaps(sources: Sources, sections: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each section that has less than it could have, so that empty is not read as good."""
    is_elastic, is_recorded = sections["run"]["is_elastic"], bool(sources.window.recorded)
    left_out = f"{sources.num_left_out} more ranks have files here; {MOST_RANKS} are followed."
    is_alone = sections["run"]["num_replicas"] == 1 and not is_elastic
    no_matrix = _NO_PEER if is_alone else _ONE_END if is_elastic and not is_recorded else _FEW_MESSAGES
    has_lanes = bool(sections["timeline"] and sections["timeline"]["lanes"])
    has_lines = any(one.last is not None for one in sources.replicas.values())
    lost = sections["downtime"] or {}
    source = sections["findings"]["source"] if sections["findings"]["findings"] else ""
    found = {
        "replicas": _first(not sections["replicas"], _NO_REPLICAS, sources.num_left_out > 0, left_out),
        "loss": _first(not has_lines, _NO_LOSS, is_elastic, _OTHER_HOSTS),
        "speed": _first(not has_lines, _NO_SPEED, is_elastic, _OTHER_HOSTS),
        "links": _first(not sources.links, _NO_PEER if is_alone else _NO_LINKS, is_elastic, _OTHER_LINKS),
        "matrix": _first(sections["matrix"] is None, no_matrix),
        "heat": _first(not sections["heat"], _NO_WORK),
        "timeline": _first(not has_lanes, _NO_ROUNDS, not is_recorded, _FROM_METRICS),
        "findings": {"page": _PAGE, "records": _RECORDS}.get(source, ""),
        "actions": _first(not sections["actions"]["is_there"], _NO_ACTIONS),
        "downtime": _first(not lost, _NO_DOWNTIME, lost.get("total_s") == 0, _NOTHING_LOST),
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
    log_every: Count | None = None


_OPTIONS = {
    "method": ("sync", "method"), "model": ("model", "name"), "data": ("data", "source"),
    "steps": ("run", "steps"), "replicas": ("run", "replicas"), "log_every": ("output", "log_every"),
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
        long, `failed`, or `finished`; `numbers`, rows of `thinwire.runlog.run_numbers` (name, label, value, text);
        and `time_left_s`, None where unknown.
    """
    result = _lenient(_Result, summary)
    settings = _lenient(_Config, {name: setting(config or {}, *place) for name, place in _OPTIONS.items()})
    changed_at, evaluated = sources.changed_at(), sources.evaluations()
    is_failed = bool(sources.replicas) and all(one.error for one in sources.replicas.values())
    if summary is not None or sources.journal.is_finished:
        state = "finished"
    elif is_failed:
        state = "failed"
    elif changed_at is None:
        state = "waiting"
    else:
        limit_s = min((_silence_limit_s(sources, rank) for rank in sources.window.ranks), default=_DEFAULT_SILENCE_S)
        state = "training" if now - changed_at <= limit_s else "silent"
    metric = evaluated[-1].metric if evaluated else None
    lines = [one.last for one in sources.replicas.values() if one.last is not None]
    left_s = None
    if settings.steps is not None and state == "training":
        known = [(one.first, one.last) for one in sources.replicas.values()]
        spans = [(first, last) for first, last in known if first is not None and last is not None]
        left_s = time_left_s(spans, total_steps=settings.steps)
    return {
        "name": text(folder.resolve().name), "state": state, "changed_at": changed_at,
        "method": text(settings.method), "model": text(settings.model), "data": text(settings.data),
        "steps": settings.steps, "num_replicas": settings.replicas, "log_every": settings.log_every,
        "is_elastic": sources.journal.is_there or bool(sources.rounds),
        "step": max((line.step for line in lines), default=0),
        "loss": math.fsum(line.loss for line in lines) / len(lines) if lines else None,
        "val_loss": result.val_loss if summary is not None else evaluated[-1].val_loss if evaluated else None,
        "unit": lines[0].unit if lines else "tokens",
        "metric": None if metric is None else {"name": metric[0], "value": metric[2], "text": shown_metric(metric)},
        "wall_s": result.wall_s, "times_fewer_bytes": result.times_fewer_bytes,
        "numbers": _numbers(summary, sources), "time_left_s": left_s,
    }  # fmt: skip


def _numbers(summary: Mapping[str, Any] | None, sources: Sources) -> list[dict[str, Any]]:
    """Return the run's numbers: of its summary, or of the replicas' latest lines while it goes on."""
    numbers = None
    if summary is not None:
        with contextlib.suppress(DataError):  # damaged, or of another version
            numbers = RunNumbers.of_summary(parse(Summary, summary, source=SUMMARY))
    if numbers is None:
        numbers = RunNumbers.of_lines([one.last for one in sources.replicas.values() if one.last is not None])
    return [] if numbers is None else number_rows(numbers)


def replica_rows(sources: Sources, run: Mapping[str, Any], *, now: float) -> list[dict[str, Any]]:
    """Return each replica with its `state`.

    Returns:
        Among others `state`: `waiting`, `training`, `silent`, `paused`, `failed`, `gone`, `finished`, or `elsewhere`
        for one whose files are on another host. A replica of a finished run is never `silent`.
    """
    members = sources.journal.members
    written = {*sources.replicas, *sources.window.ranks, *sources.links}
    expected = range(0 if run["is_elastic"] else min(_MOST_REPLICAS, run["num_replicas"] or 0))
    found = []
    for number in sorted({*written, *expected, *members})[:_MOST_REPLICAS]:
        own = sources.replicas.get(number)
        member = members.get(number)
        row: dict[str, Any] = own.to_json() if own is not None else {"replica": number, "error": ""}
        if member is not None:
            row = {**row, "host": member["host"]}
            if own is None or own.last is None:
                # the journal writes 0 for unknown values
                row |= {name: member[name] or None for name in ("step", "loss")}
                row |= {"unit": run["unit"], f"{run['unit']}_per_s": member["samples_per_s"] or None}
        row["changed_at"] = sources.changed_at(number)
        row["state"] = _state(number, sources, run, row, now)
        found.append(row)
    return found


def _state(number: int, sources: Sources, run: Mapping[str, Any], row: Mapping[str, Any], now: float) -> str:
    member = sources.journal.members.get(number)
    if row["error"]:
        return "failed"
    if member is not None and member["state"] == "gone":
        return "gone"
    if run["state"] == "finished" or (member is not None and member["state"] == "done"):
        return "finished"
    if member is not None and member["is_paused"]:
        return "paused"
    if row["changed_at"] is None:
        return "waiting" if member is None else "elsewhere"
    if run["steps"] and (row.get("step") or 0) >= run["steps"]:
        return "finished"  # others still evaluate, or write the last checkpoint
    return "silent" if now - row["changed_at"] > _silence_limit_s(sources, number) else "training"


def _silence_limit_s(sources: Sources, rank: int) -> float:
    if rank in sources.window.recorded:
        return _BEAT_SILENCE_S
    return sources.replicas[rank].silence_s if rank in sources.replicas else _DEFAULT_SILENCE_S


_SILENT = "Check that its process still runs and that its host can be reached."
_UNCHECKED = "Slow links cannot be found: this run records no rounds."
_TOO_FEW = "Links were not checked: that takes several rounds."
_NOT_YET = "Links are not checked yet: that takes several rounds."


def headline(
    run: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]], *,
    source: str, num_links: int, has_begun: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the state of the run in a few words, and a sentence on it.

    Returns:
        `level` (`starting`, `healthy` or `trouble`), `text`, `detail`, and the `ranks` that it is about.
    """
    open_ones = [finding for finding in findings if not finding["is_over"]]
    if open_ones:
        first = open_ones[0]
        more = f", and {len(open_ones) - 1} more" if len(open_ones) > 1 else ""
        remedy = f" Remedy: {first['remedy'].rstrip('.')}." if first["remedy"] else ""
        found = f"{first['kind']}: {first['where']}{more}"
        return {"level": "trouble", "text": found, "detail": f"{first['text']}{remedy}", "ranks": first["ranks"]}
    for state, one, many in (("failed", "has failed", "have failed"), ("silent", "is silent", "are silent")):
        rows = [row for row in replicas if row["state"] == state]
        if rows:
            ranks = [row["replica"] for row in rows]
            named = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
            sentence = f"replica {named} {one}" if len(ranks) == 1 else f"replicas {named} {many}"
            return {"level": "trouble", "text": sentence, "detail": rows[0]["error"] or _SILENT, "ranks": ranks}
    is_finished = run["state"] == "finished"
    if not is_finished and not has_begun:
        if run["steps"] is None:
            detail = "This folder holds no run yet. It is shown here as soon as it begins to write."
        else:
            who = "the replicas" if run["num_replicas"] is None else _count(run["num_replicas"], "replica")
            after = f" Numbers appear after step {run['log_every']}." if run["log_every"] else ""
            detail = f"Waiting for {who}.{after}"
        return {"level": "starting", "text": "starting", "detail": detail, "ranks": []}
    text = "finished, healthy" if is_finished else "healthy"
    return {"level": "healthy", "text": text, "detail": _coverage(run, source=source, num_links=num_links), "ranks": []}


def _coverage(run: Mapping[str, Any], *, source: str, num_links: int) -> str:
    """Return what was checked, and what was not: no fault found is worth as much as that."""
    if run["num_replicas"] == 1 and not run["is_elastic"]:
        return "No fault found. One replica has no links to check."
    if source == "none":
        return f"All replicas report steps. {_UNCHECKED}"
    if not num_links:
        return f"No fault found. {_TOO_FEW if run['state'] == 'finished' else _NOT_YET}"
    return f"No fault found on {_count(num_links, 'link')} or in any replica's work."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
        """Return the state of the run by section, as JSON types."""
        at = time.time() if now is None else now
        sources, (config, summary, downtime) = self._sources, (one.value for one in self._objects.values())
        self._analyse()
        findings, source = self._findings(is_over=summary is not None)
        run = run_state(self._folder, config, summary, sources, now=at)
        replicas, known = replica_rows(sources, run, now=at), sorted(sources.replicas.items())
        matrix, lanes = self._charts["matrix"], self._charts["timeline"] and self._charts["timeline"]["lanes"]
        # a job of torch has rounds and no steps
        has_begun = any(row.get("step") for row in replicas) or (run["steps"] is None and bool(lanes))
        num_links = 0 if matrix is None else len(matrix["cells"])
        sections: dict[str, Any] = {
            "run": run,
            "headline": headline(run, replicas, findings, source=source, num_links=num_links, has_begun=has_begun),
            "replicas": replicas,
            "curves": {
                "loss": [{"replica": number, "points": one.loss.points()} for number, one in known[:_MOST_CURVES]],
                "speed": [{"replica": number, "points": one.speed.points()} for number, one in known[:_MOST_CURVES]],
                "evaluations": [[one.step, one.val_loss] for one in sources.evaluations()][-200:],
                "num_left_out": max(0, len(known) - _MOST_CURVES),
            },
            "links": link_table(sources.links),
            "paths": path_table(sources.paths),
            **self._charts,
            "findings": {"source": source, "findings": findings},
            "actions": {"is_there": sources.has("actions"), "actions": sources.actions.to_json()},
            "downtime": downtime_rows(downtime, sources.refused.add),
            "elastic": self._elastic(),
        }
        sections["notes"] = {
            "missing": data_gaps(sources, sections), "refused": sources.refused.quoted(),
            "warnings": [[number, step, message] for number, one in sorted(sources.replicas.items())
                         for step, message in one.warnings][-20:],
        }  # fmt: skip
        return dict(_clean(sections))

    def _analyse(self) -> None:
        """Update the charts after new records, unless that would take too much of the time."""
        begun = time.monotonic()
        if self._sources.changes == self._analysed or begun < self._next_analysis_s:
            return
        self._analysed = self._sources.changes
        job = build(self._sources.window.records(), self._book)
        if job.messages or job.operations or job.spans:
            matrix = delay_matrix(job, self._usual)
            heat = [one.to_json() for one in heat_maps(job)[:_MOST_MAPS]]
            shown = matrix if matrix["cells"] else None
            self._charts = {"matrix": shown, "timeline": timeline(job), "heat": heat}
            if self._sources.window.recorded and not self._sources.has("findings"):
                self._own = [_page_row(finding) for finding in findings_of(job, self._history)]
        self._next_analysis_s = time.monotonic() + (time.monotonic() - begun) / _MOST_SHARE

    def _findings(self, *, is_over: bool) -> tuple[list[dict[str, Any]], str]:
        """Return the findings, and their source: `run`, `page` (this process), `records` (all of them), or `none`."""
        sources = self._sources
        is_recorded = bool(sources.window.recorded)
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

    def _elastic(self) -> dict[str, Any] | None:
        sources = self._sources
        if not sources.journal.is_there and not sources.rounds:
            return None
        rounds = [round for _, one in sorted(sources.rounds.items()) for round in one.to_json()]
        latest = {round["round"]: round for round in sorted(rounds, key=lambda round: -round["reported_by"])}
        return {
            "messages": list(reversed(sources.journal.messages)),
            "rounds": [latest[number] for number in sorted(latest)[:-13:-1]],
        }


def snapshot(folder: Path, *, now: float | None = None, diagnoses_all: bool = False) -> dict[str, Any]:
    """Return the state of a run's folder as JSON types.

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
