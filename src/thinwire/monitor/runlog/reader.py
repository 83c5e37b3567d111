"""Files of records, read as what strangers wrote: each line is checked, and what is refused is counted and named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.nccl.values import NcclRecords
from thinwire.monitor.runlog.records import (
    FORMAT,
    KINDS,
    VERSION,
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    Probe,
    Record,
    Span,
    TransferEnd,
)

MOST_LINE_BYTES = 256 * 1024
MOST_RECORDS = 4_000_000
MOST_RANKS = 1 << 20
_MOST_WHOLE = 1 << 53
_MOST_SECONDS = 1e12
_MOST_TEXT = 500
_MOST_NAMED = 20
# So many later operations of a rank must be done before one that is not counts as given up.
_LATER_DONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line that was not taken.

    Attributes:
        source: Its file.
        line: Its number, from 1.
        reason: Why.
    """

    source: str
    line: int
    reason: str


@dataclass(slots=True)
class Records:
    """What was read of one job, from any number of files.

    Attributes:
        communicators: By name.
        operations: In the order they were read.
        transfers: Ends of transfers.
        spans: Work.
        beats: Signs of life.
        arrivals: How much had come while messages were open.
        flows: How the connections between hosts did.
        probes: How long bytes took that were sent only to be timed.
        nccl: What NCCL's own tools wrote.
        num_lines: Lines looked at, without headers.
        num_refused: Lines not taken.
        refusals: The first of them.
        reasons: How often each reason was given.
        removed: Replicas that were removed from the run while it went on: they are judged no more.
    """

    communicators: dict[str, Communicator] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    transfers: list[TransferEnd] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    nccl: NcclRecords = field(default_factory=NcclRecords)
    num_lines: int = 0
    num_refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    removed: frozenset[int] = frozenset()

    def add(self, record: Record) -> None:
        """Take one record in.

        Raises:
            ValueError: It contradicts what is known, or there are too many.
        """
        if isinstance(record, Communicator):
            known = self.communicators.setdefault(record.communicator, record)
            if known != record:
                self.communicators[record.communicator] = _united(known, record)
            return
        self.check_room()
        place: dict[type[Record], list[Any]] = {
            Operation: self.operations, TransferEnd: self.transfers, Span: self.spans, Beat: self.beats,
            Arrival: self.arrivals, Flow: self.flows, Probe: self.probes,
        }  # fmt: skip
        place[type(record)].append(record)

    @property
    def num_records(self) -> int:
        """How many records there are, without communicators."""
        own = len(self.operations) + len(self.transfers) + len(self.spans)
        of_wires = len(self.arrivals) + len(self.flows) + len(self.probes)
        return own + len(self.beats) + of_wires + len(self.nccl)

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
        """Return the records without those of removed replicas, and without what others wrote of them."""
        if not self.removed:
            return self
        found = replace(self, communicators={}, removed=frozenset())
        for name, one in self.communicators.items():
            if (left := members_of(one, without=self.removed)) is not None:
                found.communicators[name] = left
        found.operations = without_given_up([op for op in self.operations if op.rank not in self.removed])
        found.spans = [span for span in self.spans if span.rank not in self.removed]
        found.beats = [beat for beat in self.beats if beat.rank not in self.removed]
        found.transfers = [one for one in self.transfers if self.removed.isdisjoint((one.rank, one.peer))]
        found.arrivals = [one for one in self.arrivals if self.removed.isdisjoint((one.rank, one.peer))]
        found.flows = [one for one in self.flows if self.removed.isdisjoint((one.rank, one.peer))]
        found.probes = [one for one in self.probes if self.removed.isdisjoint((one.rank, one.peer))]
        return found

    def refuse(self, source: str, line: int, reason: str) -> None:
        """Count a line that is not taken, and name it where it is among the first."""
        self.num_refused += 1
        # a reason tells of values after the colon: they would make every reason another one
        self.reasons[reason.partition(":")[0]] += 1
        if len(self.refusals) < _MOST_NAMED:
            self.refusals.append(Refusal(source=source, line=line, reason=reason))


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


def _united(known: Communicator, told: Communicator) -> Communicator:
    """Return a communicator with the members that two records of it name: a rank may know itself only.

    Raises:
        ValueError: They contradict each other.
    """
    places = _places(known)
    for rank, place in _places(told).items():
        if places.setdefault(rank, place) != place:
            raise ValueError(f"a communicator of this name has other members: rank {rank} is somewhere else")
    ranks = tuple(sorted(places))
    clocks = tuple(places[rank][1] for rank in ranks)
    return Communicator(
        communicator=known.communicator, ranks=ranks, hosts=tuple(places[rank][0] for rank in ranks), clocks=clocks
    )


def _places(communicator: Communicator) -> dict[int, tuple[str, str]]:
    clocks = communicator.clocks or communicator.hosts
    return dict(zip(communicator.ranks, zip(communicator.hosts, clocks, strict=True), strict=True))


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
    """Take one line in, or refuse it."""
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


def check_header(line: bytes | None, path: Path) -> None:
    """Check the first line of a file of records.

    Raises:
        DataError: It is none of this version.
    """
    try:
        told = parse_object(line)
    except ValueError as error:
        raise DataError(f"{path} is no file of records: its first line: {error}") from error
    if told.get("format") != FORMAT:
        raise DataError(f'{path} is no file of records: its first line has no "format": "{FORMAT}"')
    if told.get("version") != VERSION:
        raise DataError(f"{path} holds records of version {short(told.get('version'))}; this thinwire reads {VERSION}")


def parse_object(line: bytes | None) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: It holds none.
    """
    if line is None:
        raise ValueError(f"longer than {MOST_LINE_BYTES} bytes")
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON; the file may be cut off here") from None
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    return told


def parse_line(line: bytes | None) -> Record:
    """Return the record of a line.

    Raises:
        ValueError: It is none, or holds values that cannot be.

    Example:
        >>> parse_line(b'{"record":"beat","rank":1,"at_s":2.5}')
        Beat(rank=1, at_s=2.5, is_last=False, error='')
        >>> parse_line(b'{"record":"beat","rank":-1,"at_s":2.5}')
        Traceback (most recent call last):
            ...
        ValueError: rank is no whole number from 0 to 1048575: -1
    """
    told = parse_object(line)
    name = told.pop("record", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"no kind of record: {short(name)}")
    values = {}
    for one in fields(kind):
        if one.name in told:
            values[one.name] = _CHECKS[one.name](one.name, told.pop(one.name))
        elif one.default is MISSING:
            raise ValueError(f"{one.name} is missing")
    record = kind(**values)
    _check_whole(record)
    return record


def _check_whole(record: Record) -> None:
    """Check what the fields say together."""
    if isinstance(record, Communicator):
        if len(record.ranks) != len(record.hosts) or len(record.clocks) not in (0, len(record.ranks)):
            raise ValueError("hosts or clocks are not as many as ranks")
        if not record.ranks or len(set(record.ranks)) != len(record.ranks):
            raise ValueError("ranks are none, or some are there twice")
        return
    if isinstance(record, TransferEnd | Arrival | Flow | Probe) and record.peer == record.rank:
        raise ValueError("a transfer of a rank with itself")
    if isinstance(record, Beat | Arrival | Flow | Probe):
        return
    begin = record.started_s if isinstance(record, Span) else record.posted_s
    if isinstance(record, Span) and (record.started_s is None or record.done_s is None):
        raise ValueError("a span has no end")
    started_s = begin if record.started_s is None else record.started_s
    if started_s < begin or (record.done_s is not None and record.done_s < started_s):
        raise ValueError("times run backwards; a clock was set, or the line is forged")


def whole(name: str, found: object, *, least: int = 0, most: int = _MOST_WHOLE) -> int:
    """Return a whole number; ValueError where it is none from `least` to `most`."""
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise ValueError(f"{name} is no whole number from {least} to {most}: {short(found)}")
    return found


def _rank(name: str, found: object) -> int:
    return whole(name, found, most=MOST_RANKS - 1)


def _or_unknown(name: str, found: object) -> int:
    return whole(name, found, least=-1)


def _seconds(name: str, found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= _MOST_SECONDS:
        raise ValueError(f"{name} is no number of seconds: {short(found)}")
    return float(found)


def _maybe_seconds(name: str, found: object) -> float | None:
    return None if found is None else _seconds(name, found)


def _length(name: str, found: object) -> float:
    length_s = _seconds(name, found)
    if length_s < 0:
        raise ValueError(f"{name} is less than nothing: {short(found)}")
    return length_s


def _maybe_length(name: str, found: object) -> float | None:
    length_s = _maybe_seconds(name, found)
    if length_s is not None and length_s < 0:
        raise ValueError(f"{name} is less than nothing: {short(found)}")
    return length_s


def _loss(name: str, found: object) -> float | None:
    if found is None:
        return None
    if isinstance(found, str) and found in ("nan", "inf", "-inf"):
        return float(found)
    if isinstance(found, float):
        return found
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) > _MOST_WHOLE:
        raise ValueError(f"{name} is no number: {short(found)}")
    return float(found)


def text(name: str, found: object) -> str:
    """Return a text; ValueError where it is none, or longer than 500 letters."""
    if not isinstance(found, str) or len(found) > _MOST_TEXT:
        raise ValueError(f"{name} is no text of at most {_MOST_TEXT} letters: {short(found)}")
    return found


def _flag(name: str, found: object) -> bool:
    if not isinstance(found, bool):
        raise ValueError(f"{name} is neither true nor false: {short(found)}")
    return found


def _direction(name: str, found: object) -> str:
    if found not in ("sent", "received"):
        raise ValueError(f"{name} is neither sent nor received: {short(found)}")
    return str(found)


def _ranks(name: str, found: object) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list: {short(found)}")
    return tuple(_rank(name, one) for one in found)


def _texts(name: str, found: object) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list: {short(found)}")
    return tuple(text(name, one) for one in found)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "communicator": text, "ranks": _ranks, "hosts": _texts, "clocks": _texts,
    "rank": _rank, "peer": _rank, "direction": _direction, "sequence": whole, "operation": whole, "part": whole,
    "kind": text, "dtype": text, "count": _or_unknown, "round": _or_unknown, "num_bytes": whole, "retries": whole,
    "step": whole, "error": text, "loss": _loss, "is_last": _flag, "has_signs": _flag,
    "forward_s": _maybe_length, "backward_s": _maybe_length, "num_beside": whole,
    "busy_s": _length, "held_s": _length, "silence_s": _maybe_length, "unanswered": whole, "took_s": _length,
    "posted_s": _seconds, "started_s": _maybe_seconds, "done_s": _maybe_seconds, "at_s": _seconds,
}  # fmt: skip


def short(found: object) -> str:
    """Return a value as text of at most 60 letters, whatever it is."""
    try:
        told = repr(found)
    except (RecursionError, ValueError):  # nested too deep, or a number with too many digits
        told = f"a {type(found).__name__} of too many parts"
    return told if len(told) <= 60 else told[:57] + "..."
