"""Reader of files of records: untrusted lines become checked records; refused lines are counted and quoted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from thinwire.errors import DataError
from thinwire.runlog.nccl_values import NcclRecords
from thinwire.runlog.records import (
    FORMAT,
    KINDS,
    VERSION,
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    PathReading,
    Probe,
    ProcessState,
    Record,
    Span,
    TransferEnd,
)

MOST_LINE_BYTES = 256 * 1024
MOST_RECORDS = 4_000_000
_MOST_WHOLE = 1 << 53
Value = TypeVar("Value")
AnyRecord = TypeVar("AnyRecord", bound=Record)
_MOST_TEXT = 500
_NO_NUMBERS = ("nan", "inf", "-inf")
_MOST_NAMED = 20
# So many later operations of a rank must be done before one that is not counts as given up.
_LATER_DONE = 3
# Attribute of `Records` that holds the records of a kind.
_PLACES: dict[type[Record], str] = {
    Operation: "operations", TransferEnd: "transfers", Span: "spans", Beat: "beats", ProcessState: "processes",
    Arrival: "arrivals", Flow: "flows", Probe: "probes", PathReading: "paths",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line that was refused: its file, its number from 1, and why."""

    source: str
    line: int
    reason: str


@dataclass(slots=True)
class Records:
    """Records of one job, from any number of files.

    Attributes:
        processes: States of silent ranks' processes.
        arrivals: Bytes received while messages were open.
        flows: Kernel counters of connections between hosts.
        paths: States of planned paths.
        num_lines: Lines read, without headers.
        refusals: The first of them.
        removed: Replicas that were removed from the run while it went on; the diagnosis leaves them out.
    """

    communicators: dict[str, Communicator] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    transfers: list[TransferEnd] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    paths: list[PathReading] = field(default_factory=list)
    nccl: NcclRecords = field(default_factory=NcclRecords)
    num_lines: int = 0
    num_refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    removed: frozenset[int] = frozenset()

    def add(self, record: Record) -> None:
        """Add one record.

        Raises:
            ValueError: It contradicts what is known, or there are too many.
        """
        if isinstance(record, Communicator):
            known = self.communicators.setdefault(record.communicator, record)
            if known != record:
                self.communicators[record.communicator] = _united(known, record)
            return
        self.check_room()
        getattr(self, _PLACES[type(record)]).append(record)

    @property
    def num_records(self) -> int:
        """Number of records, without communicators."""
        return sum(len(getattr(self, place)) for place in _PLACES.values()) + len(self.nccl)

    def check_room(self) -> None:
        """Check that one more record may come.

        Raises:
            ValueError: There are too many.
        """
        if self.num_records >= MOST_RECORDS:
            raise ValueError(f"more than {MOST_RECORDS} records; diagnose a shorter stretch")

    @property
    def refused_share(self) -> float:
        """The part of the lines that was refused, in [0, 1]."""
        return self.num_refused / self.num_lines if self.num_lines else 0.0

    def of_members(self) -> Records:
        """Return the records without those of removed replicas and those of others about them."""
        return self.without(self.removed) if self.removed else self

    def without(self, ranks: Collection[int]) -> Records:
        """Return the records without those of some ranks and those of others about them."""
        gone = frozenset(ranks)
        communicators = {name: members_of(one, without=gone) for name, one in self.communicators.items()}
        return replace(
            self, removed=frozenset(), communicators={name: one for name, one in communicators.items() if one},
            operations=without_given_up([op for op in self.operations if op.rank not in gone]),
            spans=[span for span in self.spans if span.rank not in gone],
            beats=[beat for beat in self.beats if beat.rank not in gone],
            processes=[one for one in self.processes if one.peer not in gone],
            transfers=_between_others(self.transfers, gone), arrivals=_between_others(self.arrivals, gone),
            flows=_between_others(self.flows, gone), probes=_between_others(self.probes, gone),
            paths=_between_others(self.paths, gone),
        )  # fmt: skip

    def refuse(self, source: str, line: int, reason: str) -> None:
        """Count a refused line, and keep the first few."""
        self.num_refused += 1
        # values follow the colon: they would make every reason another one
        self.reasons[reason.partition(":")[0]] += 1
        if len(self.refusals) < _MOST_NAMED:
            self.refusals.append(Refusal(source=source, line=line, reason=reason))


_Way = TypeVar("_Way", TransferEnd, Arrival, Flow, Probe, PathReading)


def _between_others(records: list[_Way], gone: frozenset[int]) -> list[_Way]:
    return [one for one in records if gone.isdisjoint((one.rank, one.peer))]


def members_of(one: Communicator, *, without: Collection[int]) -> Communicator | None:
    """Return a communicator without some ranks; None where no other rank is left."""
    kept = [index for index, rank in enumerate(one.ranks) if rank not in without]
    if len(kept) == len(one.ranks):
        return one
    ranks, hosts, clocks = (
        tuple(values[index] for index in kept) if values else () for values in (one.ranks, one.hosts, one.clocks)
    )
    return replace(one, ranks=ranks, hosts=hosts, clocks=clocks) if kept else None  # type: ignore[arg-type]


def without_given_up(operations: Sequence[Operation]) -> list[Operation]:
    """Leave out operations that will never end: their rank has done several later ones since."""
    done: dict[tuple[str, int], list[int]] = {}
    for op in operations:
        if op.done_s is not None:
            done.setdefault((op.communicator, op.rank), []).append(op.sequence)
    limits = {key: sorted(numbers)[-_LATER_DONE] for key, numbers in done.items() if len(numbers) >= _LATER_DONE}
    return [
        op for op in operations if op.done_s is not None or op.sequence > limits.get((op.communicator, op.rank), -1)
    ]


def _united(known: Communicator, other: Communicator) -> Communicator:
    """Return the union of two records of a communicator: a rank may know itself only.

    Raises:
        ValueError: They contradict each other.
    """
    places: dict[int, tuple[str, str]] = {}
    for one in (known, other):
        for rank, *place in zip(one.ranks, one.hosts, one.clocks or one.hosts, strict=True):
            if places.setdefault(rank, (place[0], place[1])) != tuple(place):
                raise ValueError(f"a communicator of this name has other members: rank {rank} is somewhere else")
    ranks = tuple(sorted(places))
    hosts, clocks = zip(*(places[rank] for rank in ranks), strict=True)
    return Communicator(communicator=known.communicator, ranks=ranks, hosts=hosts, clocks=clocks)


def from_records(found: Iterable[Record]) -> Records:
    """Return records that are values already, such as those of a ring."""
    records = Records()
    for record in found:
        records.num_lines += 1
        records.add(record)
    return records


def read_records(paths: Iterable[Path]) -> Records:
    """Read files of records, in any order; a bad line never ends the reading.

    Raises:
        DataError: A file cannot be opened, or is no file of records of this version.
    """
    records = Records()
    for path in paths:
        read_into(records, path)
    return records


def read_into(records: Records, path: Path) -> None:
    """Read one more file, see `read_records`."""
    for number, line in numbered_lines(path):
        if number == 1:
            check_header(line, path)
            continue
        take_line(records, line, source=path.name, number=number)


def take_line(records: Records, line: bytes | None, *, source: str, number: int) -> None:
    """Add the record of one line, or refuse the line."""
    records.num_lines += 1
    try:
        records.add(parse_line(line))
    except ValueError as error:
        records.refuse(source, number, str(error))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the numbers and bytes of a file's lines that are not empty; none for one that is too long.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                elif line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def last_lines(path: Path, *, num_bytes: int) -> list[bytes]:
    """Return the lines in the last bytes of a file, of which the first and the last may be torn.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - num_bytes))
        return file.read(num_bytes).splitlines()


def check_header(line: bytes | None, path: Path) -> None:
    """Check the first line of a file of records.

    Raises:
        DataError: It is none of this version.
    """
    try:
        values = parse_object(line)
    except ValueError as error:
        raise DataError(f"{path} is no file of records: its first line: {error}") from error
    if values.get("format") != FORMAT:
        raise DataError(f'{path} is no file of records: its first line has no "format": "{FORMAT}"')
    if values.get("version") != VERSION:
        raise DataError(
            f"{path} holds records of version {short(values.get('version'))}; this thinwire reads {VERSION}"
        )


def parse_object(line: bytes | None) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: It holds none.
    """
    if line is None:
        raise ValueError(f"longer than {MOST_LINE_BYTES} bytes")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON; the file may be cut off here") from None
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return values


def parse_line(line: bytes | None) -> Record:
    """Return the record of a line.

    Raises:
        ValueError: It is none, or holds values that cannot be.

    Example:
        >>> parse_line(b'{"record":"arrival","rank":1,"peer":0,"at_s":2.5,"num_bytes":7}')
        Arrival(rank=1, peer=0, at_s=2.5, num_bytes=7, has_signs=False)
        >>> parse_line(b'{"record":"beat","rank":-1,"at_s":2.5}')
        Traceback (most recent call last):
            ...
        ValueError: rank is invalid: Expected `int` >= 0; value -1
    """
    fields = parse_object(line)
    name = fields.get("record")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"no kind of record: {short(name)}")
    return record_of(kind, fields)


def record_of(kind: type[AnyRecord], fields: dict[str, Any]) -> AnyRecord:
    """Return a record of untrusted fields.

    Raises:
        ValueError: A field is missing or invalid, or fields contradict each other.
    """
    if fields.get("loss") in _NO_NUMBERS:  # JSON lacks them
        fields["loss"] = float(fields["loss"])
    record = converted(fields, kind)
    if isinstance(record, Communicator):
        if len(record.ranks) != len(record.hosts) or len(record.clocks) not in (0, len(record.ranks)):
            raise ValueError("hosts or clocks are not as many as ranks")
        if not record.ranks or len(set(record.ranks)) != len(record.ranks):
            raise ValueError("ranks are none, or some are there twice")
    elif isinstance(record, TransferEnd | Arrival | Flow | Probe | PathReading) and record.peer == record.rank:
        raise ValueError("a transfer of a rank with itself")
    if isinstance(record, Operation | TransferEnd | Span):
        begin = record.started_s if isinstance(record, Span) else record.posted_s
        started_s = begin if record.started_s is None else record.started_s
        if started_s < begin or (record.done_s is not None and record.done_s < started_s):
            raise ValueError("times run backwards; a clock was set, or the line is forged")
    return record


def converted(fields: Mapping[str, Any], kind: type[Value]) -> Value:
    """Return a JSON object as a value of a dataclass; unknown fields are left out.

    Raises:
        ValueError: A field is missing, of a wrong type or out of its bounds; names field, bounds and value.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        if missing := re.search(r"required field `(\w+)`", text):
            raise ValueError(f"{missing[1]} is missing") from None
        name = re.split(r"\W", path)[0]
        raise ValueError(f"{name} is invalid: {text}; value {short(fields.get(name))}") from None


def whole(name: str, found: object, *, least: int = 0, most: int = _MOST_WHOLE) -> int:
    """Return a whole number; ValueError where it is none from `least` to `most`."""
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise ValueError(f"{name} is no whole number from {least} to {most}: {short(found)}")
    return found


def text(name: str, found: object) -> str:
    """Return a text; ValueError where it is none, or longer than 500 letters."""
    if not isinstance(found, str) or len(found) > _MOST_TEXT:
        raise ValueError(f"{name} is no text of at most {_MOST_TEXT} letters: {short(found)}")
    return found


def short(found: object) -> str:
    """Return a value as text of at most 60 letters, whatever it is."""
    try:
        values = repr(found)
    except (RecursionError, ValueError):  # nested too deep, or a number with too many digits
        values = f"a {type(found).__name__} of too many parts"
    return values if len(values) <= 60 else values[:57] + "..."
