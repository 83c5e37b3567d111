"""Findings, actions and the downtime budget as a run's files tell them: checked, cut to size, bounded in number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

_MOST_STANDING, _MOST_OVER, _MOST_ACTIONS = 60, 40, 100
_MOST_TEXT, _MOST_EVIDENCE = 1200, 24
DOWNTIME = (
    "post_checkpoint_s", "detection_s", "diagnosis_s", "reinitialisation_s", "total_s", "run_s",
)  # fmt: skip


class Findings:
    """What is wrong now and what was, from the lines of `findings.jsonl` in order.

    A finding is known by its `case`, where it has none by its kind and place; one that is told again takes the place of
    what was told of it, and one that is over may come back.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all."""
        self._standing: dict[tuple[object, ...], dict[str, Any]] = {}
        self._over: deque[dict[str, Any]] = deque(maxlen=_MOST_OVER)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take a line in.

        Raises:
            ValueError: It tells of no finding.
        """
        state = line.get("state")
        if state not in ("new", "over"):
            raise ValueError(f"state is neither new nor over: {str(state)[:40]!r}")
        finding = {**finding_told(line.get("finding")), "at": seconds(line.get("at"), "at")}
        case = line.get("case")
        key: tuple[object, ...] = (finding["kind"], finding["where"])
        if isinstance(case, int) and not isinstance(case, bool):
            key = (case,)
        known = self._standing.pop(key, None)
        if state == "over":
            began = known["at"] if known is not None else None
            self._over.append({**finding, "over_at": finding["at"], "at": began})
            return
        self._standing[key] = finding
        if len(self._standing) > _MOST_STANDING:
            self._standing.pop(next(iter(self._standing)))

    def to_json(self) -> list[dict[str, Any]]:
        """Return what is wrong now, the surest first, then what is over, the latest first."""
        standing = sorted(self._standing.values(), key=lambda finding: (-finding["confidence"], -finding["at"]))
        return [*({**finding, "is_over": False} for finding in standing),
                *({**finding, "is_over": True} for finding in reversed(self._over))]  # fmt: skip


def finding_told(told: object) -> dict[str, Any]:
    """Return a finding with known fields of known types only, as `Finding.to_json` writes it.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(told, dict):
        raise ValueError("finding is no object")
    kind, where = text(told.get("kind")), text(told.get("where"))
    if not kind or not where:
        raise ValueError("a finding without kind or where")
    confidence = told.get("confidence")
    sure = confidence if isinstance(confidence, int | float) and not isinstance(confidence, bool) else 0.0
    evidence = told.get("evidence")
    pairs = list(evidence.items())[:_MOST_EVIDENCE] if isinstance(evidence, dict) else []
    return {
        "kind": kind, "where": where, "text": text(told.get("text")), "remedy": text(told.get("remedy")),
        "probe": text(told.get("probe")), "confidence": min(1.0, max(0.0, sure)) if math.isfinite(sure) else 0.0,
        "since_s": _maybe_number(told.get("since_s")), "since_round": _round(told.get("since_round")),
        "is_ambiguous": told.get("is_ambiguous") is True, "ranks": sorted(_ranks(told.get("places"))),
        "cells": [list(cell) for cell in _cells(told.get("places"))],
        "evidence": [[text(name), _value(value)] for name, value in pairs],
    }  # fmt: skip


class Actions:
    """The latest of what was done about findings, from the lines of `actions.jsonl`."""

    def __init__(self) -> None:
        self._latest: deque[dict[str, Any]] = deque(maxlen=_MOST_ACTIONS)

    def restart(self) -> None:
        """Forget all."""
        self._latest.clear()

    def take(self, line: Mapping[str, Any]) -> None:
        """Take a line in.

        Raises:
            ValueError: It tells of no action.
        """
        action = text(line.get("action"))
        if not action:
            raise ValueError("an action without a name")
        self._latest.append({
            "at": seconds(line.get("at"), "at"), "action": action, "target": text(line.get("target")),
            "is_dry_run": line.get("dry_run") is True, "finding": _value(line.get("finding")),
            "why": text(line.get("why")), "result": _value(line.get("result")),
        })  # fmt: skip

    def to_json(self) -> list[dict[str, Any]]:
        """Return them, the latest first."""
        return list(reversed(self._latest))


def downtime_told(told: Mapping[str, Any]) -> dict[str, float]:
    """Return the rows of `downtime.json` in seconds.

    Raises:
        ValueError: One is there that is no time, or none is.
    """
    rows = {name: seconds(told[name], name) for name in DOWNTIME if name in told}
    if not rows:
        raise ValueError(f"none of {', '.join(DOWNTIME)}")
    incidents = told.get("num_incidents")
    return rows | ({"num_incidents": float(incidents)} if isinstance(incidents, int) and 0 <= incidents < 1e9 else {})


def seconds(value: object, name: str) -> float:
    """Return a number of seconds from 0.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        raise ValueError(f"{name} is no number of seconds: {str(value)[:40]!r}")
    return float(value)


def text(value: object) -> str:
    """Return a text cut to size, without letters that no text has; nothing for what is no text."""
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


def _maybe_number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e12
    return float(value) if is_number else None  # type: ignore[arg-type]


def _round(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else -1


def _places(places: object) -> Iterable[tuple[str, list[int]]]:
    for place in places[:_MOST_EVIDENCE] if isinstance(places, list) else []:
        ranks = place.get("ranks") if isinstance(place, dict) else None
        if isinstance(ranks, list):
            own = [rank for rank in ranks[:_MOST_EVIDENCE] if isinstance(rank, int) and 0 <= rank < 1 << 20]
            yield text(place.get("kind")), own


def _ranks(places: object) -> set[int]:
    return {rank for _, ranks in _places(places) for rank in ranks}


def _cells(places: object) -> list[tuple[int, int]]:
    """Return the links that places name as links."""
    found: list[tuple[int, int]] = []
    for kind, ranks in _places(places):
        if kind.startswith("link") and len(ranks) == 2:
            found.append((ranks[0], ranks[1]))
            if kind == "link both ways":
                found.append((ranks[1], ranks[0]))
    return found
