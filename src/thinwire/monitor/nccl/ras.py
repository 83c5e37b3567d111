"""Reader of NCCL RAS `status` answers, as text or JSON, one or several in a file.

Reference:
    github.com/NVIDIA/nccl, src/ras/client_support.cc at 5067397c (NCCL 2.30.7); the text is read as 2.24 and 2.26 wrote
    it too, the JSON is there since 2.28.7.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.nccl.ras_text import HEADER, StatusText
from thinwire.monitor.nccl.values import CommunicatorState, Member, Snapshot
from thinwire.monitor.runlog.reader import MOST_LINE_BYTES, Records, numbered_lines, short, text, whole
from thinwire.monitor.runlog.records import MOST_RANKS
from thinwire.untested import warn_untested

MOST_BYTES = 64 * 1024 * 1024
_JSON = re.compile(rb'"nccl_version"\s*:')
# nccl.h: ncclSuccess and ncclInProgress are no errors; the words are those of RAS's text.
_ERRORS = {
    1: "Unhandled CUDA error", 2: "System error", 3: "Internal error", 4: "Invalid argument", 5: "Invalid usage",
    6: "Remote process error", 8: "Timeout",
}  # fmt: skip
_NO_ERRORS = (0, 7)
_MOST_TORN = 16
_MOST_UNNAMED = 1 << 17


def is_ras(first: bytes) -> bool:
    """Return whether a file that begins so holds answers of RAS.

    Example:
        >>> is_ras(b"NCCL version 2.28.9 compiled with CUDA 12.9"), is_ras(b"{}")
        (True, False)
    """
    return is_json(first) or HEADER.search(first.decode("utf-8", "replace")) is not None


def is_json(first: bytes) -> bool:
    """Return whether a file that begins so holds RAS's JSON."""
    return _JSON.search(first) is not None


def read_ras(records: Records, path: Path) -> None:
    """Read one file; what cannot be understood is refused and counted, and ends no reading.

    Raises:
        DataError: The file cannot be read, or is too long.
    """
    warn_untested("nccl ras")
    try:
        # its text has no time of its own
        written_s = path.stat().st_mtime
        with path.open("rb") as file:
            first = file.read(4096)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    found = _json_snapshots(records, path) if is_json(first) else _text_snapshots(records, path, written_s)
    for snapshot in found:
        try:
            records.check_room()
        except ValueError as error:
            records.refuse(path.name, 1, str(error))
            return
        records.nccl.snapshots.append(snapshot)


def _text_snapshots(records: Records, path: Path, written_s: float) -> list[Snapshot]:
    """Return the answers in a file of text; only where it is one, the file's time is its time."""
    readers: list[StatusText] = []
    budget = [_MOST_UNNAMED]
    for number, line in numbered_lines(path):
        try:
            if line is None:
                raise ValueError(f"longer than {MOST_LINE_BYTES} bytes")
            told = line.decode("utf-8", "replace").rstrip()
            if HEADER.match(told) is not None:
                readers.append(StatusText(path.name, budget))
            elif readers and readers[-1].take(told):
                records.num_lines += 1
        except ValueError as error:
            records.num_lines += 1
            records.refuse(path.name, number, str(error))
    for reader in readers:
        if not reader.is_complete:
            records.num_lines += 1
            records.refuse(path.name, 1, "ends before its list of communicators; ask RAS again")
    at_s = written_s if len(readers) == 1 else None
    return [reader.snapshot(at_s) for reader in readers if reader.is_complete]


def _json_snapshots(records: Records, path: Path) -> Iterator[Snapshot]:
    for number, told in _objects(records, path):
        records.num_lines += 1
        try:
            yield snapshot_of(told, source=path.name)
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error) if type(error) is ValueError else "fields are missing"
            records.refuse(path.name, number, reason)


def _objects(records: Records, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the answers in a file, and the line that each begins in; an `OK` before it is no part of it.

    Raises:
        DataError: The file cannot be read, or is too long.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES} bytes; give fewer answers at a time")
        content = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    decoder, at, torn = json.JSONDecoder(), 0, 0
    line, counted = 1, 0
    begins = re.compile(r"^\{", re.MULTILINE)
    while torn < _MOST_TORN and (begin := begins.search(content, at)) is not None:
        line, counted = line + content.count("\n", counted, begin.start()), begin.start()
        try:
            told, at = decoder.raw_decode(content, begin.start())
            yield line, told
        except (ValueError, RecursionError):
            # each of these may have been read to the end of the file
            torn, at = torn + 1, begin.end()
            records.num_lines += 1
            records.refuse(path.name, line, "no JSON; the file may be cut off here")


def snapshot_of(told: dict[str, Any], *, source: str) -> Snapshot:
    """Return what one answer in JSON tells.

    Raises:
        ValueError: It holds what cannot be.
        KeyError: A field is missing.
    """
    text("nccl_version", told["nccl_version"])
    at = text("timestamp", told["timestamp"])
    try:
        # the host's local time, without its zone: good for the time between two answers of one host
        at_s = float(calendar.timegm(time.strptime(at, "%Y-%m-%d %H:%M:%S")))
    except ValueError:
        raise ValueError(f"timestamp is no date and time: {short(at)}") from None
    communicators = tuple(_communicator(one) for one in _list("communicators", told["communicators"]))
    return Snapshot(source=source, at_s=at_s, communicators=communicators, is_whole=True)


def _communicator(told: dict[str, Any]) -> CommunicatorState:
    size = whole("size", told["size"], least=1, most=MOST_RANKS)
    members: dict[int, Member] = {}
    for one in (*map(_member, _list("ranks", told["ranks"])), *map(_missing, _list("missing", told["missing_ranks"]))):
        if one.rank >= size or one.rank in members:
            raise ValueError(f"rank is twice there or not below the communicator's size: {one.rank}")
        members[one.rank] = one
    comm_hash = text("hash", told["hash"])
    return CommunicatorState(communicator=canonical(comm_hash), size=size, members=members)


def canonical(comm_hash: str) -> str:
    """Return a communicator's hash as the JSON writes it; the text pads it with zeros.

    Raises:
        ValueError: It is none.

    Example:
        >>> canonical("0x1f"), canonical("000000000000001f")
        ('0x1f', '0x1f')
    """
    if re.fullmatch(r"(0x)?[0-9a-f]{1,16}", comm_hash) is None:
        raise ValueError(f"hash is none of a communicator: {short(comm_hash)}")
    return f"0x{int(comm_hash, 16):x}"


def _member(told: dict[str, Any]) -> Member:
    state, counts = told["status"], told["collective_counts"]
    if not isinstance(state, dict) or not isinstance(counts, dict) or len(counts) > 64:
        raise ValueError(f"status or collective_counts is no JSON object: {short(state)}")
    init, error = (whole(name, state[name], most=1000) for name in ("init_state", "async_error"))
    status = "RUNNING" if init == 0 else "INIT"
    if state["finalize_called"] is True or state["destroy_flag"] is True:
        status = "FINALIZE"
    return Member(
        **_seat(told),
        counts={text("kind", kind): whole("count", count) for kind, count in counts.items()},
        status="ABORT" if state["abort_flag"] is True else status,
        init_error="" if init in _NO_ERRORS else _ERRORS.get(init, f"error {init}"),
        async_error="" if error in _NO_ERRORS else _ERRORS.get(error, f"error {error}"),
    )


def _missing(told: dict[str, Any]) -> Member:
    state = told["status"]
    if not isinstance(state, dict):
        raise ValueError(f"status is no JSON object: {short(state)}")
    lost = "dead" if state["considered_dead"] is True else "unresponsive" if state["unresponsive"] is True else ""
    return Member(**_seat(told), lost=lost, status="" if lost else "NOCOMM")


def _seat(told: dict[str, Any]) -> dict[str, Any]:
    host = text("host", told["host"])
    return {
        "rank": whole("rank", told["rank"], most=MOST_RANKS - 1),
        "host": "" if host == "unknown" else host,
        "pid": whole("pid", told["pid"], least=-1),
        "gpu": whole("cuda_dev", told["cuda_dev"], least=-1, most=1 << 16),
    }


def _list(name: str, found: object) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} is no list of JSON objects: {short(found)}")
    return found
