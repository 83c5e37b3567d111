"""Dumps of torch's Flight Recorder, read as records: the JSON form, one file a rank.

On gloo such a dump says when a rank called each collective and whether it has ended, not when; messages between two
ranks are left out. So it shows who has not come, and who calls something else, but no slowness.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.runlog.reader import Records, parse_line
from thinwire.monitor.runlog.records import Beat, Communicator, Operation, to_line

MOST_BYTES = 256 * 1024 * 1024
_RANK = re.compile(r"(\d+)(?:\.json)?$")
_DONE = ("completed",)
HOW_TO_JSON = "torch._C._distributed_c10d._dump_fr_trace_json() in each rank, written to RANK.json, makes JSON"


def is_pickle(first: bytes) -> bool:
    """Return whether a file that begins so is a pickle, as dumps of the watchdog are."""
    return first[:1] == b"\x80"


def is_dump(first: bytes) -> bool:
    """Return whether a file that begins so may be a dump: one JSON object with entries, and no file of records."""
    return first.lstrip()[:1] == b"{" and b'"format"' not in first.split(b"\n", 1)[0]


def read_dump(records: Records, path: Path) -> int:
    """Read the dump of one rank, whose number is in the dump or ends the file's name, and return it.

    Raises:
        DataError: The file is too long, no dump, or nobody's.
    """
    told = _content(path)
    rank = _rank_of(told, path)
    entries = told.get("entries")
    if not isinstance(entries, list):
        raise DataError(f"{path} is no dump of the Flight Recorder: it has no list of entries")
    own: list[Operation] = []
    for number, entry in enumerate(entries, start=1):
        records.num_lines += 1
        try:
            operation = _operation(entry, rank)
            if operation is None:
                continue
            records.add(parse_line(to_line(operation).encode()))
            own.append(operation)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            records.refuse(path.name, number, str(error) if type(error) is ValueError else "fields are missing")
    for communicator in _members(told, own):
        try:
            records.add(communicator)
        except ValueError as error:
            records.refuse(path.name, 1, str(error))
    return rank


def read_dumps(records: Records, paths: Sequence[Path]) -> None:
    """Read the dumps of all ranks; all ranks lived when the last of them was written.

    Raises:
        DataError: See `read_dump`.
    """
    ranks = [read_dump(records, path) for path in paths]
    _reopen(records, set(ranks))
    latest_s = max((path.stat().st_mtime for path in paths), default=0.0)
    # an operation that ended after its file was written was recorded by another clock, or the file was changed
    posted_s = max((operation.posted_s for operation in records.operations), default=0.0)
    for rank in ranks:
        records.add(Beat(rank=rank, at_s=max(latest_s, posted_s)))


def _reopen(records: Records, ranks: set[int]) -> None:
    """Take back that a collective has ended where it has failed: gloo calls both retired, and gives neither a time.

    What others have not called cannot have ended well.
    """
    furthest: dict[str, dict[int, int]] = {}
    for operation in records.operations:
        own = furthest.setdefault(operation.communicator, {})
        own[operation.rank] = max(own.get(operation.rank, -1), operation.sequence)
    for index, operation in enumerate(records.operations):
        own = furthest[operation.communicator]
        known = records.communicators.get(operation.communicator)
        members = set(own) if known is None else set(known.ranks)
        is_last = operation.sequence == max(own.values())
        is_timeless = operation.done_s == operation.posted_s
        if is_last and is_timeless and any(own.get(rank, -1) < operation.sequence for rank in members):
            records.operations[index] = replace(operation, done_s=None)


def _members(told: dict[str, Any], operations: list[Operation]) -> list[Communicator]:
    """Return who belongs to the groups whose ranks the dump tells; with one group its name may be empty."""
    config = told.get("pg_config")
    names = {operation.communicator for operation in operations}
    found = []
    for key, group in (config if isinstance(config, dict) else {}).items():
        try:
            ranks = json.loads(str(group["ranks"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        own = names if key == "" else {name for name in names if name.split(" ")[0] == key}
        if len(own) == 1 and isinstance(ranks, list) and ranks:
            hosts = [f"rank-{rank}" for rank in ranks]
            line = json.dumps({"record": "communicator", "communicator": own.pop(), "ranks": ranks, "hosts": hosts})
            made = parse_line(line.encode())
            assert isinstance(made, Communicator)
            found.append(made)
    return found


def _content(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES} bytes")
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {type(error).__name__}") from error
    if not isinstance(told, dict):
        raise DataError(f"{path} is no dump of the Flight Recorder: it is no JSON object")
    return told


def _rank_of(told: dict[str, Any], path: Path) -> int:
    rank = told.get("rank")
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 20:
        return rank
    match = _RANK.search(path.name)
    if match is None or len(match.group(1)) > 6:
        raise DataError(f"{path} does not say whose dump it is; let its name end with the rank, as trace_3.json does")
    return int(match.group(1))


def _operation(entry: Any, rank: int) -> Operation | None:
    """Return a collective, or none for a message between two ranks, which has a numbering of its own."""
    if not isinstance(entry, dict):
        raise ValueError("an entry is no JSON object")
    if entry.get("is_p2p"):
        return None
    group = entry.get("process_group") or entry.get("pg_id", "")
    kind = str(entry["profiling_name"]).rpartition(":")[2]
    posted_s = float(entry["time_created_ns"]) / 1e9
    completed = entry.get("time_discovered_completed_ns") or 0
    is_done = bool(entry.get("retired")) or entry.get("state") in _DONE
    done_s = max(posted_s, float(completed) / 1e9) if is_done else None
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return Operation(
        communicator=" ".join(map(str, group)) if isinstance(group, list) else str(group),
        rank=rank, sequence=int(entry["collective_seq_id"]), kind=kind, dtype=str(types[0]) if types else "",
        count=_count(kind, sizes), posted_s=posted_s, done_s=done_s,
    )  # fmt: skip


def _count(kind: str, sizes: list[list[int]]) -> int:
    """Return how many elements a rank brings; unknown where ranks may bring different numbers."""
    if not sizes or "v" in kind.rpartition("_")[2][-1:] or kind in ("gather", "scatter", "all_to_all"):
        return -1
    total = 0
    for shape in sizes:
        elements = 1
        for length in shape:
            elements *= int(length)
        total += elements
    return total
