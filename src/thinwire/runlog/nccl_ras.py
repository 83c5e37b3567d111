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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import DataError, warn_untested
from thinwire.runlog.nccl_values import CommunicatorState, Process, RankState, Snapshot
from thinwire.runlog.reader import MOST_LINE_BYTES, Records, numbered_lines, short, text, whole
from thinwire.runlog.records import MOST_RANKS

HEADER = re.compile(r"^NCCL version \S+ compiled with CUDA", re.MULTILINE)
# Numbers are of at most 18 digits, so that none is too long to be one.
_ROW = re.compile(
    r"\s*(?P<group>\d{1,9})\s+\d{1,9}\s+\d{1,9}\s+\d{1,9}(?:-\d{1,9})?\s+(?P<size>\d{1,9})\s+\d{1,9}"
    r"\s+[A-Z]{1,20}\s+(?P<errors>[A-Z,]{2,60})"
)
_NO_COMMUNICATORS = "No communicator data collected!"
_COMMUNICATOR = re.compile(r"#(?P<group>\d{1,9})-(?P<number>\d{1,9}) \((?P<hash>[0-9a-f]{1,16})\) (?P<state>[A-Z]+)")
_PROCESS = re.compile(r"Process (?P<pid>\d{1,18}) on node (?P<host>\S{1,200}) managing GPUs? (?P<gpus>.{1,400})")
_RANK = re.compile(
    r"Rank (?P<rank>\d{1,9})(?: has status (?P<status>[A-Z]{1,20})| has launched up to operation (?P<count>\d{1,18})"
    r"| (?P<none>has not launched any operations)| reported (?P<error>.{1,60}?))?"
    r"(?: -- (?:GPU (?P<gpu>\d{1,6})(?: \(NVML \d{1,6}\))? managed by process (?P<pid>\d{1,18}) on node "
    r"(?P<host>\S{1,200})|\[process information not found\]))?"
)
_GROUP = re.compile(
    r"(?P<num>\d{1,9}) ranks (?:have status (?P<status>[A-Z]{1,20})|have launched up to operation (?P<count>\d{1,18})"
    r"|(?P<none>have not launched any operations)|reported (?P<error>.{1,60}))"
)
_DIFFERENT = re.compile(r"Communicator ranks have different (?:(?P<kind>\w{1,40}) operation counts|(?P<status>status))")
_LISTED = re.compile(r"The (?P<what>missing|unknown) ranks?: (?P<ranks>\d{1,9}(?:,\d{1,9})*)")
_SAID = re.compile(
    r"(Missing communicator data from|Encountered) \d+ |\d+ job process(es are| is) considered dead|\[could not find "
)
_UNKNOWN, _NOCOMM = "UNKNOWN", "NOCOMM"
_ERRORS = ("init_error", "async_error")


@dataclass(slots=True)
class _Group:
    """Ranks of a communicator with one common value, and those of them that are named."""

    value: Any
    num: int
    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Communicator:
    """Lines about one communicator so far."""

    communicator: str
    size: int
    errors: str
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    # by what they differ in: the kind of a collective, or `status`
    groups: dict[str, list[_Group]] = field(default_factory=dict)
    topic: str = ""

    def member(self, rank: int) -> dict[str, Any]:
        if rank >= (self.size if self.size > 0 else MOST_RANKS):
            raise ValueError(f"rank is not below the communicator's size: {rank}")
        return self.members.setdefault(rank, {"rank": rank, "counts": {}})

    def take_rank(self, rank: int, match: re.Match[str]) -> None:
        member, value = self.member(rank), _value_of(match)
        if match["host"] is not None:
            member.update(host=match["host"], pid=int(match["pid"]), gpu=int(match["gpu"]))
        if self.topic == "lost":
            member["lost"] = "unresponsive"
        elif value is not None:
            self.groups.setdefault(self.topic, []).append(_Group(value, 1, [rank]))
        elif self.groups.get(self.topic):
            self.groups[self.topic][-1].ranks.append(rank)
        else:
            raise ValueError(f"a rank of no group: {rank}")


class StatusText:
    """Parser of one answer, line by line.

    Args:
        budget: How many ranks may still be told that are not named, shared by all answers of a file: a forged size
            would fill the memory else.

    Attributes:
        is_complete: Whether its list of communicators has come.
    """

    def __init__(self, source: str, budget: list[int]) -> None:
        self.is_complete = False
        self._source = source
        self._budget = budget
        self._rows: dict[int, tuple[int, str]] = {}
        self._communicators: dict[tuple[str, str, str], _Communicator] = {}
        self._processes: dict[str, list[Process]] = {"DEAD": [], "INCOMPLETE": []}
        self._section = ""
        self._now: _Communicator | None = None

    def take(self, line: str) -> bool:
        """Parse a line, and return whether it held data.

        Raises:
            ValueError: It belongs to the answer, and cannot be understood.
        """
        told = line.strip()
        if not line.startswith(" "):
            return self._take_title(told)
        if (row := _ROW.fullmatch(line)) is not None and not self._section:
            size = int(row["size"])
            if not 0 < size <= MOST_RANKS:
                raise ValueError(f"a communicator of so many ranks: {size}")
            self._rows[int(row["group"])] = size, row["errors"]
            return True
        if not self._section or _SAID.match(told) is not None:
            return False
        if self._now is None:
            if (process := _PROCESS.fullmatch(told)) is None:
                raise ValueError(f"no process of RAS: {short(told)}")
            made = Process(host=process["host"], pid=int(process["pid"]), gpus=process["gpus"])
            self._processes[self._section].append(made)
            return True
        return self._take_detail(self._now, told)

    def _take_title(self, told: str) -> bool:
        if told in self._processes:
            self._section, self._now = told, None
        elif (match := _COMMUNICATOR.fullmatch(told)) is not None:
            self._section = match["state"]
            size, errors = self._rows.get(int(match["group"]), (-1, ""))
            key = match["group"], match["number"], match["hash"]
            name = f"0x{int(match['hash'], 16):x}"
            self._now = self._communicators.setdefault(key, _Communicator(name, size, errors))
            self._now.topic = "lost" if self._section == "INCOMPLETE" else ""
        elif told.startswith("Group ") or told == _NO_COMMUNICATORS:
            self.is_complete, self._section, self._now = True, "", None
        elif told in ("Errors", "Warnings", "TIMEOUT"):
            self._section, self._now = "", None
        else:
            return False
        return True

    def _take_detail(self, now: _Communicator, told: str) -> bool:
        if (match := _DIFFERENT.match(told)) is not None:
            now.topic = match["kind"] or "status"
            now.groups[now.topic] = []
        elif (match := _RANK.fullmatch(told)) is not None:
            now.take_rank(int(match["rank"]), match)
        elif (match := _GROUP.fullmatch(told)) is not None:
            now.groups.setdefault(now.topic, []).append(_Group(_value_of(match), int(match["num"])))
        elif (match := _LISTED.fullmatch(told)) is not None:
            is_missing = match["what"] == "missing"
            for rank in map(int, match["ranks"].split(",")):
                now.member(rank).update({"lost": "unresponsive"} if is_missing else {"status": _NOCOMM})
        elif told.startswith(("Initialization error", "Asynchronous error")):
            now.topic = "init_error" if told.startswith("I") else "async_error"
        else:
            raise ValueError(f"nothing that RAS is known to say of a communicator: {short(told)}")
        return True

    def snapshot(self, at_s: float | None) -> Snapshot:
        told = {int(group) for group, _, _ in self._communicators}
        # RAS calls these faulty without readable details
        bare = [
            CommunicatorState(communicator=f"of group {group}", size=size, members={}, errors=errors)
            for group, (size, errors) in self._rows.items()
            if errors != "OK" and group not in told
        ]
        return Snapshot(
            source=self._source, at_s=at_s, communicators=(*map(self._state, self._communicators.values()), *bare),
            dead=tuple(self._processes["DEAD"]), unresponsive=tuple(self._processes["INCOMPLETE"]),
        )  # fmt: skip

    def _state(self, told: _Communicator) -> CommunicatorState:
        unlisted = []
        for topic, groups in told.groups.items():
            for group in groups:
                # ranks without a named error are not one group
                ranks = group.ranks or (self._rest(told, groups, group) if topic not in _ERRORS else [])
                for member in map(told.member, ranks):
                    if isinstance(group.value, int):
                        member["counts"][topic] = group.value
                    elif topic in ("status", *_ERRORS):
                        member[topic] = str(group.value)
                if not ranks and isinstance(group.value, int):
                    unlisted.append((topic, group.value, group.num))
        dead = {(process.host, process.pid) for process in self._processes["DEAD"]}
        for member in told.members.values():
            if (member.get("host"), member.get("pid")) in dead:
                member["lost"] = "dead"
        return CommunicatorState(
            communicator=told.communicator, size=told.size, errors=told.errors, unlisted=tuple(unlisted),
            members={rank: RankState(**one) for rank, one in sorted(told.members.items())},
        )  # fmt: skip

    def _rest(self, told: _Communicator, groups: Sequence[_Group], group: _Group) -> list[int]:
        """Return the ranks of the one unnamed group: all but the named and the missing ones."""
        others = [other for other in groups if other is not group]
        if told.size <= 0 or any(len(other.ranks) != other.num for other in others) or told.size > self._budget[0]:
            return []
        named = {rank for other in others for rank in other.ranks}
        is_status = groups is told.groups.get("status")
        gone = {
            rank for rank, one in told.members.items()
            if one.get("lost") or (not is_status and one.get("status") == _NOCOMM)
        }  # fmt: skip
        rest = [rank for rank in range(told.size) if rank not in named and rank not in gone]
        if len(rest) != group.num:
            return []
        self._budget[0] -= len(rest)
        return rest


def _value_of(match: re.Match[str]) -> Any:
    """Return the count, status or error in a line; None without one."""
    if match["count"] is not None or match["none"] is not None:
        return int(match["count"] or 0)
    status = match["status"]
    return match["error"] or (_NOCOMM if status == _UNKNOWN else status)


MOST_BYTES = 64 * 1024 * 1024
_JSON = re.compile(rb'"nccl_version"\s*:')
# nccl.h: ncclSuccess and ncclInProgress are no errors; the texts are RAS's own.
_ERRORS_RAS = {
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
    """Read one file; lines that cannot be parsed are counted as refused.

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
    for snapshot in _json_snapshots(records, path) if is_json(first) else _text_snapshots(records, path, written_s):
        try:
            records.check_room()
        except ValueError as error:
            records.refuse(path.name, 1, str(error))
            return
        records.nccl.snapshots.append(snapshot)


def _text_snapshots(records: Records, path: Path, written_s: float) -> list[Snapshot]:
    """Return the answers in a text file; a single answer has the file's time."""
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
    """Return the snapshot of one answer in JSON.

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
    communicators = []
    for found in _list("communicators", told["communicators"]):
        size = whole("size", found["size"], least=1, most=MOST_RANKS)
        members: dict[int, RankState] = {}
        missing = map(_missing, _list("missing", found["missing_ranks"]))
        for one in (*map(_member, _list("ranks", found["ranks"])), *missing):
            if one.rank >= size or one.rank in members:
                raise ValueError(f"rank is twice there or not below the communicator's size: {one.rank}")
            members[one.rank] = one
        name = canonical(text("hash", found["hash"]))
        communicators.append(CommunicatorState(communicator=name, size=size, members=members))
    return Snapshot(source=source, at_s=at_s, communicators=tuple(communicators), is_whole=True)


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


def _member(told: dict[str, Any]) -> RankState:
    state, counts = told["status"], told["collective_counts"]
    if not isinstance(state, dict) or not isinstance(counts, dict) or len(counts) > 64:
        raise ValueError(f"status or collective_counts is no JSON object: {short(state)}")
    init, error = (whole(name, state[name], most=1000) for name in ("init_state", "async_error"))
    status = "RUNNING" if init == 0 else "INIT"
    if state["finalize_called"] is True or state["destroy_flag"] is True:
        status = "FINALIZE"
    return RankState(
        **_location(told),
        counts={text("kind", kind): whole("count", count) for kind, count in counts.items()},
        status="ABORT" if state["abort_flag"] is True else status,
        init_error="" if init in _NO_ERRORS else _ERRORS_RAS.get(init, f"error {init}"),
        async_error="" if error in _NO_ERRORS else _ERRORS_RAS.get(error, f"error {error}"),
    )


def _missing(told: dict[str, Any]) -> RankState:
    state = told["status"]
    if not isinstance(state, dict):
        raise ValueError(f"status is no JSON object: {short(state)}")
    lost = "dead" if state["considered_dead"] is True else "unresponsive" if state["unresponsive"] is True else ""
    return RankState(**_location(told), lost=lost, status="" if lost else "NOCOMM")


def _location(told: dict[str, Any]) -> dict[str, Any]:
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
