"""Reader of findings, actions and downtime in a run's files: checked, cut to size, bounded in number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from thinwire.runlog.reader import converted
from thinwire.runlog.records import CountOrUnknown, Duration, Rank, Seconds

_MOST_OPEN, _MOST_OVER, _MOST_ACTIONS = 60, 40, 100
_MOST_TEXT, _MOST_EVIDENCE = 1200, 24
_Name = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceEntry:
    """A place of a finding, see `thinwire.monitor.findings.Place`."""

    kind: str = ""
    ranks: list[Rank] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEntry:
    """A finding as `Finding.to_json` writes it."""

    kind: _Name
    where: _Name
    text: str = ""
    remedy: str = ""
    probe: str = ""
    confidence: Annotated[float, Meta(ge=0, le=1)] = 0.0
    since_s: Seconds | None = None
    since_round: CountOrUnknown = -1
    is_ambiguous: bool = False
    places: list[PlaceEntry] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEvent:
    """A line of `findings.jsonl`: a finding is new, updated, or over."""

    at: Duration
    state: Literal["new", "over"]
    finding: dict[str, Any]
    case: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionEvent:
    """A line of `actions.jsonl`."""

    at: Duration
    action: _Name
    target: str = ""
    dry_run: bool = False
    finding: Any = None
    why: str = ""
    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DowntimeEntry:
    """The rows of `downtime.json`."""

    post_checkpoint_s: Duration | None = None
    detection_s: Duration | None = None
    diagnosis_s: Duration | None = None
    reinitialisation_s: Duration | None = None
    total_s: Duration | None = None
    run_s: Duration | None = None
    num_incidents: Annotated[int, Meta(ge=0, lt=1_000_000_000)] | None = None


class Findings:
    """Open and ended findings, from the lines of `findings.jsonl` in order.

    A finding is identified by its `case`, or by kind and place if it has none. A later line replaces an earlier one,
    and a finding that is over may come back.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all."""
        self._open: dict[tuple[object, ...], dict[str, Any]] = {}
        self._over: deque[dict[str, Any]] = deque(maxlen=_MOST_OVER)

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line; a ValueError if a field is missing or invalid."""
        event = converted(line, FindingEvent)
        finding = {**finding_row(event.finding), "at": event.at}
        key: tuple[object, ...] = (event.case,)
        if event.case is None:
            key = (finding["kind"], finding["where"])
        known = self._open.pop(key, None)
        if event.state == "over":
            self._over.append({**finding, "over_at": event.at, "at": known["at"] if known is not None else None})
            return
        self._open[key] = finding
        if len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open)))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the open findings, the surest first, then those that are over, the latest first."""
        open_ones = sorted(self._open.values(), key=lambda finding: (-finding["confidence"], -finding["at"]))
        return [*({**finding, "is_over": False} for finding in open_ones),
                *({**finding, "is_over": True} for finding in reversed(self._over))]  # fmt: skip


def finding_row(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finding as pages and tables show it; a ValueError if a field is missing or invalid."""
    entry = converted(finding, FindingEntry)
    places = entry.places[:_MOST_EVIDENCE]
    return {
        "kind": text(entry.kind), "where": text(entry.where), "text": text(entry.text), "remedy": text(entry.remedy),
        "probe": text(entry.probe), "confidence": entry.confidence, "since_s": entry.since_s,
        "since_round": entry.since_round, "is_ambiguous": entry.is_ambiguous,
        "ranks": sorted({rank for place in places for rank in place.ranks[:_MOST_EVIDENCE]}),
        "cells": [cell for place in places for cell in _cells(place)],
        "evidence": [[text(name), _value(value)] for name, value in list(entry.evidence.items())[:_MOST_EVIDENCE]],
    }  # fmt: skip


def _cells(place: PlaceEntry) -> list[list[int | None]]:
    """Return the directed links that a place names, as pairs of ranks; None stands for any rank."""
    match place.kind, place.ranks:
        case "link" | "path", [source, destination]:
            return [[source, destination]]
        case "link both ways", [source, destination]:
            return [[source, destination], [destination, source]]
        case "sender", [rank]:
            return [[rank, None]]
        case "receiver", [rank]:
            return [[None, rank]]
        case "endpoint", [rank]:
            return [[rank, None], [None, rank]]
    return []


class LatestRows:
    """The latest lines of a file, as rows; `row` raises a ValueError where a field is missing or invalid."""

    def __init__(self, row: Callable[[Mapping[str, Any]], dict[str, Any]], *, most: int) -> None:
        self._row = row
        self._latest: deque[dict[str, Any]] = deque(maxlen=most)

    def restart(self) -> None:
        """Forget all."""
        self._latest.clear()

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        self._latest.append(self._row(line))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows, the latest first."""
        return list(reversed(self._latest))


def latest_actions() -> LatestRows:
    """Return a reader of the lines of `actions.jsonl`."""

    def row(line: Mapping[str, Any]) -> dict[str, Any]:
        event = converted(line, ActionEvent)
        return {
            "at": event.at, "action": text(event.action), "target": text(event.target), "is_dry_run": event.dry_run,
            "finding": _value(event.finding), "why": text(event.why), "result": _value(event.result),
        }  # fmt: skip

    return LatestRows(row, most=_MOST_ACTIONS)


def downtime_rows(values: Mapping[str, Any] | None, refuse: Callable[[str, str], None]) -> dict[str, float] | None:
    """Return the rows of `downtime.json` that are present; None without the file, or if a row is refused."""
    if values is None:
        return None
    try:
        rows = {name: value for name, value in asdict(converted(values, DowntimeEntry)).items() if value is not None}
        if not rows:
            raise ValueError("no row of a downtime budget")
        return rows
    except ValueError as error:
        refuse("downtime.json", str(error))
        return None


def text(value: object) -> str:
    """Return a text cut to size, without control characters; empty for other values."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in value[:_MOST_TEXT])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return text(", ".join(_value(one) for one in value[:_MOST_EVIDENCE]))
    if value is None or isinstance(value, dict):
        return "" if value is None else text(str(list(value)[:_MOST_EVIDENCE]))
    return text(str(value)) if not isinstance(value, int) or abs(value) < 1 << 63 else "a number too long"
