"""Status of a run and its replicas: one word each, from their files and the times of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.monitor.dashboard.findings_reader import text
from thinwire.monitor.dashboard.sources import Sources
from thinwire.monitor.runlog.run_folder import setting

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
        "method": text(setting(settings, "sync", "method")), "model": text(setting(settings, "model", "name")),
        "data": text(setting(settings, "data", "source")), "steps": _whole(setting(settings, "run", "steps")),
        "num_replicas": _whole(setting(settings, "run", "replicas")),
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
