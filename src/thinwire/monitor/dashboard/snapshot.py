"""Snapshot of a run folder as JSON: state, replicas, findings, charts and data gaps; untrusted, read-only."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.dashboard.chart_data import delay_matrix, timeline
from thinwire.monitor.dashboard.findings_reader import downtime_told, finding_told, text
from thinwire.monitor.dashboard.sources import MOST_RANKS, ObjectFile, Sources, links_told
from thinwire.monitor.dashboard.window import joined
from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.diagnose import DetectorState, diagnose, findings_of
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Finding
from thinwire.monitor.heat import heat_maps
from thinwire.monitor.runlog.run_folder import RECORDS, join_evaluations, read_files

_NO_METRICS = "No metrics-replica-N.jsonl yet: no replica has written a line about its steps."
_OTHER_HOSTS = "Loss and throughput of replicas on other hosts stand in the folders of the run on those hosts."
_NO_LINKS = "No transfers-replica-N.jsonl or records-rank-N.jsonl with transfers yet."
_OTHER_LINKS = "Links between other hosts stand in the folders of the run on those hosts."
_ONE_END = (
    "Replicas of an elastic run fetch each other's parts, and each host's folder holds one end only; a link's own time "
    "needs both."
)
_FEW_MESSAGES = (
    "A link is shown when both ends of several of its messages are known, or what its connections did between hosts."
)
_NO_WORK = "No rank has told what it computes yet."
_NO_ROUNDS = "No rounds were written down yet."
_FROM_METRICS = (
    "Drawn from metrics and finished transfers: waiting is known a line of metrics at a time, and shown at its end; "
    "what stands still now cannot be seen."
)
_NOBODY = (
    "No findings.jsonl and no records-rank-N.jsonl: nobody judges this run while it goes on. thinwire diagnose reads "
    "what is there."
)
_PAGE = "Judged from the latest records by who shows them; the run itself wrote no findings.jsonl."
_RECORDS = "Judged from all records, as `thinwire diagnose` does; what is over is from findings.jsonl."
_NO_ACTIONS = "No actions.jsonl: nothing acts on findings in this run, or nothing was done yet."
_NO_DOWNTIME = "No downtime.json: lost time is not accounted in this run, or not yet."


def what_is_missing(sources: Sources, told: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each section that has less than it could have."""
    is_elastic, is_recorded = told["run"]["is_elastic"], any(one.is_recorded for one in sources.windows.values())
    left_out = f"Files of {sources.num_left_out} more ranks are there; {MOST_RANKS} are followed."
    no_matrix = _ONE_END if is_elastic and not is_recorded else _FEW_MESSAGES
    has_lanes = bool(told["timeline"] and told["timeline"]["lanes"])
    found = {
        "replicas": left_out if sources.num_left_out else "",
        "curves": _first(not sources.replicas, _NO_METRICS, is_elastic, _OTHER_HOSTS),
        "links": _first(not sources.links, _NO_LINKS, is_elastic, _OTHER_LINKS),
        "matrix": _first(told["matrix"] is None, no_matrix),
        "heat": _first(not told["heat"], _NO_WORK),
        "timeline": _first(not has_lanes, _NO_ROUNDS, not is_recorded, _FROM_METRICS),
        "findings": {"nobody": _NOBODY, "page": _PAGE, "records": _RECORDS}.get(told["findings"]["told_by"], ""),
        "actions": _first(not told["actions"]["is_there"], _NO_ACTIONS),
        "downtime": _first(told["downtime"] is None, _NO_DOWNTIME),
    }
    return {name: words for name, words in found.items() if words}


def _first(is_one: bool, one: str, is_other: bool = False, other: str = "") -> str:
    """Return the words of the first that is so, or nothing."""
    return one if is_one else other if is_other else ""


# A recorder writes that it lives every second.
_BEAT_SILENCE_S = 5.0
_MOST_REPLICAS = 256


def run_state(
    folder: Path, config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None, sources: Sources, *, now: float
) -> dict[str, Any]:
    """Return what the run is and how it stands.

    Returns:
        Among others `state`: `waiting` before the first line, `training`, `silent` where nobody has written for too
        long, `failed`, or `finished`.
    """
    settings = config or {}
    changed_at = sources.changed_at()
    is_failed = bool(sources.replicas) and all(one.error for one in sources.replicas.values())
    if summary is not None or sources.journal.is_finished:
        state = "finished"
    elif is_failed:
        state = "failed"
    elif changed_at is None:
        state = "waiting"
    else:
        patience_s = min((_patience(sources, rank) for rank in sources.windows), default=60.0)
        state = "training" if now - changed_at <= patience_s else "silent"
    told = summary or {}
    return {
        "name": text(folder.resolve().name), "state": state, "changed_at": changed_at,
        "method": text(settings.get("method")), "model": text(settings.get("model")),
        "data": text(settings.get("data")), "steps": _whole(settings.get("steps")),
        "num_replicas": _whole(settings.get("replicas")),
        "is_elastic": sources.journal.is_there or bool(sources.rounds),
        "step": max((one.last.step for one in sources.replicas.values() if one.last is not None), default=0),
        "val_loss": _number(told.get("val_loss")), "wall_s": _number(told.get("wall_s")),
        "times_fewer_bytes": _number(told.get("times_fewer_bytes")),
    }  # fmt: skip


def replicas_told(sources: Sources, run: Mapping[str, Any], *, now: float) -> list[dict[str, Any]]:
    """Return each replica with its `state`.

    Returns:
        Among others `state`: `waiting`, `training`, `silent`, `paused`, `failed`, `gone`, `finished`, or `elsewhere`
        for one whose files are on another host. `silent` is only said of a run that is not over.
    """
    members = sources.journal.members
    written = {*sources.replicas, *sources.windows, *sources.links}
    expected = range(0 if run["is_elastic"] else min(_MOST_REPLICAS, run["num_replicas"] or 0))
    found = []
    for number in sorted({*written, *expected, *members})[:_MOST_REPLICAS]:
        own = sources.replicas.get(number)
        member = members.get(number)
        told: dict[str, Any] = own.to_json() if own is not None else {"replica": number, "error": ""}
        if member is not None:
            told = {**told, "host": member["host"], "standing": member["standing"]}
            if own is None or own.last is None:
                # the journal says 0 of what is not known yet
                told |= {name: member[name] or None for name in ("step", "loss", "tokens_per_s")}
        told["changed_at"] = sources.changed_at(number)
        told["state"] = _state(number, sources, run, told, now)
        found.append(told)
    return found


def _state(number: int, sources: Sources, run: Mapping[str, Any], told: Mapping[str, Any], now: float) -> str:
    member = sources.journal.members.get(number)
    if told["error"]:
        return "failed"
    if member is not None and member["standing"] == "gone":
        return "gone"
    if run["state"] == "finished" or (member is not None and member["standing"] == "done"):
        return "finished"
    if member is not None and member["is_paused"]:
        return "paused"
    if told["changed_at"] is None:
        return "waiting" if member is None else "elsewhere"
    if run["steps"] and (told.get("step") or 0) >= run["steps"]:
        return "finished"  # others still evaluate, or write the last checkpoint
    if now - told["changed_at"] > _patience(sources, number):
        return "silent"
    return "training"


def _patience(sources: Sources, rank: int) -> float:
    window, own = sources.windows.get(rank), sources.replicas.get(rank)
    if window is not None and window.is_recorded:
        return _BEAT_SILENCE_S
    return own.silence_s if own is not None else 60.0


def headline(
    run: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]], *,
    told_by: str, has_links: bool,
) -> dict[str, Any]:  # fmt: skip
    """Say in one sentence what is wrong, or that nothing is, or that nobody knows; `level` is trouble, good or unknown.

    Returns:
        `level`, `text`, and `ranks` that it is about.
    """
    standing = [finding for finding in findings if not finding["is_over"]]
    if standing:
        first = standing[0]
        more = f", and {len(standing) - 1} more" if len(standing) > 1 else ""
        return {"level": "trouble", "text": f"{first['kind']}: {first['where']}{more}", "ranks": first["ranks"]}
    for state, words in (("failed", "has failed"), ("silent", "says nothing any more")):
        ranks = [one["replica"] for one in replicas if one["state"] == state]
        if ranks:
            named = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
            said = f"replica {named} {words}" if len(ranks) == 1 else f"replicas {named} {_many(words)}"
            return {"level": "trouble", "text": said, "ranks": ranks}
    if run["state"] == "waiting":
        return {"level": "unknown", "text": "nothing has been written yet", "ranks": []}
    over = "The run is over. " if run["state"] == "finished" else ""
    if told_by == "nobody":
        return {"level": "unknown", "text": f"{over}Nobody has judged this run yet", "ranks": []}
    if told_by == "page" and not has_links:
        return {"level": "unknown", "text": f"{over}No fault found, but links could not be judged", "ranks": []}
    return {"level": "good", "text": f"{over}No fault found", "ranks": []}


def _many(words: str) -> str:
    return words.replace("has ", "have ").replace("says ", "say ")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None  # type: ignore[arg-type]


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

    def poll(self) -> bool:
        """Read what is new, a bounded piece of it, and return whether more is there."""
        for one in self._objects.values():
            self._sources.changes += one.poll()
        return self._sources.poll()

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
    while follower.poll():
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
