"""Plans that rank 0 sends to the ranks of an active test, and their untrusted results.

A plan is one JSON object: what to do, and with whom. A note is one too: what came out, or the fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.errors import PayloadError
from thinwire.monitor.active_test.results import Flow, PairTest
from thinwire.monitor.active_test.wire_tests import MOST_BYTES

Cell = tuple[int, int]
_SAID_CHARACTERS = 300
# Also an upper bound on whole numbers, which Python cannot turn into a float above 1e308.
_MOST_SECONDS = 1e9


def rounds_of(ranks: Sequence[int]) -> list[list[Cell]]:
    """Return rounds of pairs in which nobody is twice, until everybody has met everybody: a tournament by circle.

    Example:
        >>> rounds_of([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(one, other) for one, other in met if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def read_object(text: str, *, whose: str) -> dict[str, Any]:
    """Return a plan or a note.

    Raises:
        PayloadError: It is no JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{whose} is no JSON; run the same thinwire on all hosts") from error
    if not isinstance(found, dict):
        raise PayloadError(f"{whose} is no JSON object; run the same thinwire on all hosts")
    return found


def cells_of(plan: Mapping[str, Any], *, world_size: int, parts: int = 2) -> Iterator[tuple[int, ...]]:
    """Return the rows of a plan: (source, destination), or with the bytes too.

    Raises:
        PayloadError: They are none of this job's.
    """
    rows = plan.get("rows")
    if not isinstance(rows, list):
        raise PayloadError("rank 0 left a plan without rows; run the same thinwire on all hosts")
    for row in rows:
        is_row = isinstance(row, list) and len(row) == parts and all(type(value) is int for value in row)
        if not is_row or not all(0 <= rank < world_size for rank in row[:2]) or row[0] == row[1]:
            raise PayloadError(f"rank 0 left a plan with {row!r:.60}; run the same thinwire on all hosts")
        if parts > 2 and not 0 < row[2] <= MOST_BYTES:
            raise PayloadError(f"rank 0 left a plan with {row[2]} bytes, which is not 1 to {MOST_BYTES}")
        yield tuple(row)


def seconds_of(plan: Mapping[str, Any], name: str, *, most: float = 3600.0) -> float:
    """Return a number of seconds of a plan or note.

    Raises:
        PayloadError: It is none.
    """
    value = plan.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise PayloadError(f"{name} is {value!r:.60}, which is no number of 0 to {most:g}")
    return float(value)


def pair_note(found: PairTest) -> dict[str, Any]:
    """Write what a pair measured."""
    return {
        "rate": found.rate_bits_per_s, "overhead_s": found.overhead_s, "latency_s": found.latency_s,
        "fault": found.fault, "detail": found.detail[:_SAID_CHARACTERS],
    }  # fmt: skip


def detail_of(note: Mapping[str, Any]) -> str:
    """Return what a rank says of a fault, cut to what is shown, without what a terminal would obey."""
    told = str(note.get("detail"))[:_SAID_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in told)


def read_pair(note: Mapping[str, Any]) -> PairTest:
    """Read what a pair measured; what makes no sense is a fault of the pair."""
    try:
        rate = seconds_of(note, "rate", most=1e15)
        times = {name: seconds_of(note, name) for name in ("overhead_s", "latency_s")}
    except PayloadError as error:
        return PairTest(fault="dead", detail=str(error))
    fault = note.get("fault")
    fault = fault if fault in ("dead", "corrupt") else "" if rate > 0 else "dead"
    return PairTest(rate_bits_per_s=rate, fault=fault, detail=detail_of(note), **times)


def read_flow(num_bytes: int, seconds: object) -> Flow | None:
    """Read how long one of many transfers took, or None where it did not end."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < _MOST_SECONDS:
        return None
    return Flow(num_bytes=num_bytes, seconds=float(seconds))
