"""Write a job's records as dumps that the analyser of torch's Flight Recorder reads, also of gloo.

`python -m torch.distributed.flight_recorder.fr_trace FOLDER` reads one pickle a rank, and ends with a KeyError on the
dumps that torch 2.13 writes of gloo, which do not name their groups. Ours name all groups, and hold messages between
two ranks and the times of the end, which torch's do not.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

from thinwire.monitor.runlog.reader import Records
from thinwire.monitor.runlog.records import Communicator, Operation

VERSION = "2.10"
_MESSAGE = re.compile(r"(?P<group>.*) (?P<source>\d+)->(?P<destination>\d+)(?: tag \d+)?")
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip


def write_dumps(records: Records, folder: Path) -> list[Path]:
    """Write `trace_N` for torch's analyser and `rank_N.json`, the same as JSON, for each rank N that has a file.

    What the records do not hold is left at its default: stacks, and the shapes of tensors beyond their size.

    Args:
        records: Of one job.
        folder: Where to; made where it is not there.

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
    entries = []
    for number, operation in enumerate(sorted(operations, key=lambda operation: operation.posted_s)):
        match = _MESSAGE.fullmatch(operation.communicator)
        group = operation.communicator if match is None else match["group"]
        members = communicators.get(group)
        entry = _entry(operation, number, group, len(members.ranks) if members is not None else 1)
        if match is not None:
            entry |= _as_message(operation, match, members)
        entries.append(entry)
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            _name_of(name)[0]: {"name": _name_of(name)[0], "desc": _name_of(name)[1], "ranks": str(list(one.ranks))}
            for name, one in groups.items()
        },
        "pg_status": {
            str(number): _status([operation for operation in operations if operation.communicator == name])
            for number, name in enumerate(groups)
        },
        "entries": entries,
    }


def _as_message(operation: Operation, match: re.Match[str], members: Communicator | None) -> dict[str, Any]:
    """Return what makes an entry one of a message; its ends are told by their place in the group."""
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


def _status(operations: list[Operation]) -> dict[str, int]:
    posted = [operation.sequence + 1 for operation in operations]
    done = [operation.sequence + 1 for operation in operations if operation.done_s is not None]
    return {
        "last_enqueued_collective": max(posted, default=-1),
        "last_started_collective": max(posted, default=-1),
        "last_completed_collective": max(done, default=-1),
    }


def _entry(operation: Operation, number: int, group: str, size: int) -> dict[str, Any]:
    count = max(operation.count, 0)
    brought, taken = [[count]], [[_taken(operation.kind, count, size)]]
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


def _taken(kind: str, count: int, size: int) -> int:
    """Return how many elements a rank takes from an operation to which it brings `count`."""
    if kind == "all_gather":
        return count * size
    return count // size if kind == "reduce_scatter" else count


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
