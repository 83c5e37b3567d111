"""What a run's files say: rounds that hang, replicas that differ, how long coming back took, how much was trained."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos_job import Life

from thinwire.units import parse_rate

# Of nano, where nobody fetched one.
STATE_BYTES = 24_394_944


def applied(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each replica wrote of its rounds."""
    found = {}
    for path in sorted(folder.glob("host-*/rounds-replica-*.jsonl")):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.stem.rpartition("-")[2])] = [json.loads(line) for line in lines]
    return found


def desyncs(rounds: dict[int, list[dict[str, Any]]]) -> tuple[int, list[dict[str, Any]]]:
    """Return how many rounds were compared, and those that two replicas hold differently."""
    by_round: dict[int, dict[int, tuple[Any, ...]]] = {}
    for replica, lines in rounds.items():
        for line in lines:
            by_round.setdefault(line["round"], {})[replica] = (line["crc"], tuple(line["members"]))
    shared = {number: found for number, found in by_round.items() if len(found) > 1}
    odd = [{"round": number, "found": found} for number, found in shared.items() if len(set(found.values())) > 1]
    return len(shared), odd


def gaps(rounds: dict[int, list[dict[str, Any]]]) -> list[tuple[float, float]]:
    """Return when a round was applied first, and the seconds to the next one's first time, longest first.

    After the last round there is none: that the run came to its end is another matter.
    """
    first: dict[int, float] = {}
    for lines in rounds.values():
        for line in lines:
            first[line["round"]] = min(first.get(line["round"], line["at_s"]), line["at_s"])
    times = sorted(first.values())
    found = [(a, b - a) for a, b in pairwise(times)]
    return sorted(found, key=lambda pair: -pair[1])


def rejoins(lives: list[Life], rounds: dict[int, list[dict[str, Any]]], *, rates: list[str]) -> list[dict[str, Any]]:
    """Return, of each life that fetched a state or had its own, how long it took until a round counted it.

    Beside it stands what the state's bytes take at the host's own rate, also where it was not fetched.
    """
    most_bytes = max((life.state_bytes for life in lives), default=0) or STATE_BYTES
    counted: dict[int, float] = {}
    for lines in rounds.values():
        for line in lines:
            for member in line["members"]:
                counted[member] = min(counted.get(member, line["at_s"]), line["at_s"])
    found = []
    for life in lives:
        state_bytes = life.state_bytes or (most_bytes if life.has_own else 0)
        if state_bytes and life.replica is not None:
            transfer_s = state_bytes * 8 / parse_rate(rates[life.host])
            took_s = counted[life.replica] - life.began_s if life.replica in counted else None
            live_s = None if life.live_s is None else round(life.live_s - life.began_s, 2)
            found.append({
                "host": life.host, "replica": life.replica, "has_own": life.has_own,
                "transfer_s": round(transfer_s, 2), "live_s": live_s,
                "took_s": None if took_s is None else round(took_s, 2),
                "is_in_time": took_s is not None and took_s <= 1.5 * transfer_s + 5,
            })  # fmt: skip
    return found


def live_s(lives: list[Life], *, end_s: float) -> float:
    """Return the seconds that replicas took part, without those in which they were stopped."""
    return sum((life.ended_s or end_s) - life.live_s - life.stopped_s for life in lives if life.live_s is not None)


def trained(folder: Path) -> dict[str, float]:
    """Return what all replicas trained, counted or not, for how long their loops ran, and waited in that time."""
    found = [_loop(path) for path in sorted(folder.glob("host-*/metrics-replica-*.jsonl"))]
    return {
        "tokens_trained": sum(one["tokens_trained"] for one in found),
        "loop_s": round(sum(one["loop_s"] for one in found), 1),
        "waited_s": round(sum(one["waited_s"] for one in found), 1),
    }


def accounts(
    folder: Path, lives: list[Life], rounds: dict[int, list[dict[str, Any]]], *, end_s: float
) -> list[dict[str, Any]]:
    """Return, of each life that took part, where its time went: in the loop, waiting there, before and after it."""
    found = []
    for life in lives:
        paths = [*folder.glob(f"host-*/metrics-replica-{life.replica}.jsonl")]
        if life.live_s is None or not paths:
            continue
        loop = _loop(paths[0])
        counted = {line["round"] for lines in rounds.values() for line in lines if life.replica in line["members"]}
        lived_s = live_s([life], end_s=end_s)
        found.append({
            "host": life.host, "replica": life.replica, "live_s": round(lived_s, 1), **loop,
            "beside_loop_s": round(lived_s - (loop["loop_s"] - life.stopped_s), 1), "rounds": len(counted),
        })  # fmt: skip
    return found


def _loop(path: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    steps = [line for line in lines if line["kind"] == "step"]
    waited_s = 0.0
    for before, after in pairwise([{"time_s": 0.0}, *steps]):
        waited_s += (after["time_s"] - before["time_s"]) * (1 - after["compute_fraction"])
    tokens, loop_s = (steps[-1]["tokens"], steps[-1]["time_s"]) if steps else (0, 0.0)
    return {"tokens_trained": tokens, "loop_s": round(loop_s, 1), "waited_s": round(waited_s, 1)}
