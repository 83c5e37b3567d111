"""Dumps of torch's Flight Recorder: reader of pickles and JSON, and writer for torch's analyser, also for gloo.

On gloo a dump shows when a rank called each collective and whether it has ended, not when; messages between two ranks
are left out. So it shows missing ranks and mismatched calls, but no slowness.

`python -m torch.distributed.flight_recorder.fr_trace FOLDER` reads one pickle a rank, and ends with a KeyError on the
dumps that torch 2.13 writes of gloo, which do not name their groups. Ours name all groups, and hold messages between
two ranks and the times of the end, which torch's do not.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.runlog.plain_pickle import plain_value
from thinwire.runlog.reader import Records, parse_line
from thinwire.runlog.records import Beat, Communicator, Operation, to_line

MOST_BYTES = 256 * 1024 * 1024
_RANK = re.compile(r"(\d+)(?:\.json)?$")


def is_pickle(first: bytes) -> bool:
    """Return whether a file that begins so is a pickle, as dumps of the watchdog are."""
    return first[:1] == b"\x80"


def is_dump(first: bytes) -> bool:
    """Return whether a file that begins so may be a dump: a pickle, or one JSON object and no file of records."""
    return is_pickle(first) or (first.lstrip()[:1] == b"{" and b'"format"' not in first.split(b"\n", 1)[0])


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
    """Reopen collectives that have failed: gloo marks ended and failed ones as retired, without a time.

    A collective that other ranks have not called cannot have ended well.
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
    """Return the members of the groups whose ranks are in the dump; a single group may have an empty name."""
    config = told.get("pg_config")
    names = {operation.communicator for operation in operations}
    found = []
    for key, group in (config if isinstance(config, dict) else {}).items():
        try:
            ranks = json.loads(_text(group["ranks"]))
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
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        told = plain_value(data) if is_pickle(data) else json.loads(data)
    except (ValueError, RecursionError) as error:
        said = f"no pickle of data: {error}" if is_pickle(data) else f"no JSON: {type(error).__name__}"
        raise DataError(f"{path} is {said}") from error
    if not isinstance(told, dict):
        raise DataError(f"{path} is no dump of the Flight Recorder: it holds no object with names")
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
    kind = _text(entry["profiling_name"]).rpartition(":")[2]
    posted_s = float(entry["time_created_ns"]) / 1e9
    completed = entry.get("time_discovered_completed_ns") or 0
    is_done = bool(entry.get("retired")) or entry.get("state") == "completed"
    done_s = max(posted_s, float(completed) / 1e9) if is_done else None
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return Operation(
        communicator=" ".join(map(_text, group)) if isinstance(group, (list, tuple)) else _text(group),
        rank=rank, sequence=int(entry["collective_seq_id"]), kind=kind, dtype=_text(types[0]) if types else "",
        count=_count(kind, sizes), posted_s=posted_s, done_s=done_s,
    )  # fmt: skip


def _text(value: Any) -> str:
    """Return a text or a number as text; in a pickle a list may hold itself, or another one 2**60 times."""
    if not isinstance(value, (str, int)):
        raise ValueError(f"a {type(value).__name__} stands in place of a text")
    return str(value)


def _count(kind: str, sizes: list[list[int]]) -> int:
    """Return the elements that a rank brings; -1 if ranks may bring different numbers."""
    if not sizes or "v" in kind.rpartition("_")[2][-1:] or kind in ("gather", "scatter", "all_to_all"):
        return -1
    return sum(math.prod(map(int, shape)) for shape in sizes)


VERSION = "2.10"
_MESSAGE = re.compile(r"(?P<group>.*) (?P<source>\d+)->(?P<destination>\d+)(?: tag \d+)?")
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip


def write_dumps(records: Records, folder: Path) -> list[Path]:
    """Write `trace_N` for torch's analyser and `rank_N.json`, the same as JSON, for each rank N that has a file.

    What the records do not hold is left at its default: stacks, and the shapes of tensors beyond their size.

    Returns:
        The files for torch's analyser.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    latest: dict[int, dict[tuple[str, int], Operation]] = defaultdict(dict)
    for beat in records.beats:
        latest[beat.rank]
    for operation in records.operations:
        own, key = latest[operation.rank], (operation.communicator, operation.sequence)
        if key not in own or own[key].done_s is None:
            own[key] = operation
    written = []
    for rank, own in sorted(latest.items()):
        dump = _dump(rank, list(own.values()), records.communicators)
        path = folder / f"trace_{rank}"
        path.write_bytes(pickled(dump))
        (folder / f"rank_{rank}.json").write_text(json.dumps({"rank": rank, **dump}))
        written.append(path)
    return written


def _dump(rank: int, operations: list[Operation], communicators: dict[str, Communicator]) -> dict[str, Any]:
    groups = {
        name: one for name, one in communicators.items() if rank in one.ranks and _MESSAGE.fullmatch(name) is None
    }
    config, status = {}, {}
    for number, (group, one) in enumerate(groups.items()):
        name, description = _name_of(group)
        config[name] = {"name": name, "desc": description, "ranks": str(list(one.ranks))}
        own = [operation for operation in operations if operation.communicator == group]
        posted = max((operation.sequence + 1 for operation in own), default=-1)
        done = max((operation.sequence + 1 for operation in own if operation.done_s is not None), default=-1)
        status[str(number)] = {
            "last_enqueued_collective": posted, "last_started_collective": posted, "last_completed_collective": done,
        }  # fmt: skip
    entries = []
    for number, operation in enumerate(sorted(operations, key=lambda operation: operation.posted_s)):
        match = _MESSAGE.fullmatch(operation.communicator)
        group = operation.communicator if match is None else match["group"]
        members = communicators.get(group)
        entry = _entry(operation, number, group, len(members.ranks) if members is not None else 1)
        if match is not None:
            entry |= _as_message(operation, match, members)
        entries.append(entry)
    return {"version": VERSION, "comm_lib_version": "", "pg_config": config, "pg_status": status, "entries": entries}


def _as_message(operation: Operation, match: re.Match[str], members: Communicator | None) -> dict[str, Any]:
    """Return the fields of a message's entry; its ends are named by their place in the group."""
    order = sorted(members.ranks) if members is not None else []
    ends = [int(match[end]) for end in ("source", "destination")]
    is_sent = ends[0] == operation.rank
    source, destination = (order.index(end) if end in order else end for end in ends)
    told = f"send {source}->{destination}" if is_sent else f"recv {destination}<-{source}"
    return {
        "profiling_name": f"gloo:{told}", "is_p2p": True, "p2p_seq_id": operation.sequence + 1, "collective_seq_id": 0
    }  # fmt: skip


def _name_of(communicator: str) -> tuple[str, str]:
    name, _, description = communicator.partition(" ")
    return name, description or "undefined"


def _entry(operation: Operation, number: int, group: str, size: int) -> dict[str, Any]:
    count = max(operation.count, 0)
    # elements that a rank receives where it brings `count`
    received = {"all_gather": count * size, "reduce_scatter": count // size}.get(operation.kind, count)
    brought, taken = [[count]], [[received]]
    dtypes = [_DTYPES.get(operation.dtype, operation.dtype)]
    if operation.kind == "barrier":
        brought, taken, dtypes = [], [], []
    return {
        "record_id": number, "pg_id": 0, "process_group": _name_of(group), "op_id": number + 1,
        "collective_seq_id": operation.sequence + 1, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": f"gloo:{operation.kind}",
        "input_sizes": brought, "output_sizes": taken, "input_dtypes": dtypes, "output_dtypes": dtypes,
        "state": "scheduled" if operation.done_s is None else "completed", "retired": operation.done_s is not None,
        "time_created_ns": _nanoseconds(operation.posted_s),
        "time_discovered_started_ns": _nanoseconds(operation.started_s),
        "time_discovered_completed_ns": _nanoseconds(operation.done_s),
        "timeout_ms": 0, "frames": [], "thread_id": "", "thread_name": "",
    }  # fmt: skip


def _nanoseconds(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s * 1e9)


def pickled(value: Any) -> bytes:
    """Return a plain value as a pickle of protocol 2: numbers, texts, lists, tuples of two, dicts, True, False, None.

    Made by hand, so that nothing here could come to read one, which may run any program.

    Raises:
        TypeError: The value holds something else.

    Example:
        >>> pickled([1, None])
        b'\\x80\\x02](J\\x01\\x00\\x00\\x00Ne.'
    """
    parts = [b"\x80\x02"]
    _add(parts, value)
    return b"".join([*parts, b"."])


def _add(parts: list[bytes], value: Any) -> None:
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, int):
        length = value.bit_length() // 8 + 1
        is_short = -(1 << 31) <= value < 1 << 31
        long = b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)
        parts.append(b"J" + struct.pack("<i", value) if is_short else long)
    elif isinstance(value, str):
        told = value.encode("utf-8", "replace")
        parts.append(b"X" + struct.pack("<I", len(told)) + told)
    elif isinstance(value, dict):
        parts.append(b"}(")
        for pair in value.items():
            for part in pair:
                _add(parts, part)
        parts.append(b"u")
    elif isinstance(value, list | tuple):
        is_pair = isinstance(value, tuple) and len(value) == 2
        parts.append(b"" if is_pair else b"](")
        for part in value:
            _add(parts, part)
        parts.append(b"\x86" if is_pair else b"e")
    else:
        raise TypeError(f"a dump holds plain values only, got {type(value).__name__}")
