"""Journal of a coordinator on a carrier, and the terms of the processes that lead by it.

Each position of the journal is one create-only object, so two processes cannot both write it: that is all the
consensus there is. A process leads once it has claimed a term, has read all positions, and has written an opening
entry of its own behind them. Whoever led before finds its next position taken, and stops. No clock is trusted for
that: clocks decide only when a process tries.

Every `SNAPSHOT_EVERY`-th position holds all lines that a replay needs, so a new leader reads few positions. Those
before the last but one snapshot are deleted after a time; snapshots are replaced by an empty mark, and never deleted.
So the newest one is found by name alone, and no list of the store need be complete.

Every procedure is a generator of operations on the carrier. `run` executes them; a test can put those of several
processes in any order, and stop one anywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from thinwire.errors import NotThere, ThinwireError, refusal

if TYPE_CHECKING:
    from thinwire.carriers.base import Carrier

SNAPSHOT_EVERY = 64
# A leader that wrote nothing for this long stops: positions that it may still write are deleted later than that.
STALE_S, DELETE_AFTER_S = 300.0, 900.0
MOST_ENTRY_BYTES = 64 << 20
_MOST_TERMS = 1 << 40

T = TypeVar("T")
Operation = Callable[[], Any]
Procedure = Generator[Operation, Any, T]


class LostLeadership(ThinwireError):
    """Another process leads the run: it has written the position that was this one's next."""


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a position."""

    term: int
    holder: str
    lines: list[dict[str, Any]]
    is_snapshot: bool = False  # the lines are all that a replay needs


def run(procedure: Procedure[T]) -> T:
    """Execute a procedure's operations one after the other, and return its result."""
    step: Callable[[], Operation] = lambda: next(procedure)  # noqa: E731
    while True:
        try:
            operation = step()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            found = operation()
        except Exception as error:
            step = _thrower(procedure, error)
        else:
            step = _sender(procedure, found)


def _sender(procedure: Procedure[Any], found: Any) -> Callable[[], Operation]:
    return lambda: procedure.send(found)


def _thrower(procedure: Procedure[Any], error: Exception) -> Callable[[], Operation]:
    return lambda: procedure.throw(error)


def position_name(position: int) -> str:
    """Return the name of a position's object."""
    return f"journal/{position:010d}"


def term_name(term: int) -> str:
    """Return the name of the object that claims a term."""
    return f"lease/{term:010d}"


@dataclass(slots=True, kw_only=True)
class CarriedJournal:
    """The journal as one process sees it.

    Attributes:
        carrier: Where it lies.
        holder: Names this process.
        now: Clock in seconds that never goes back.
        term: The latest term known to be claimed; 0 for none.
        is_leading: Whether this process holds that term, and has written its opening entry.
        position: The next one to write or read.
        lines: Lines read so far, from the newest snapshot on.
    """

    carrier: Carrier
    holder: str
    now: Callable[[], float] = time.monotonic
    term: int = 0
    is_leading: bool = False
    position: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    _written_s: float = 0.0
    _unanswered: JournalEntry | None = None  # of the next position, which may have been written
    _seen: dict[int, float] = field(default_factory=dict)  # by position that may be deleted once it is old

    def read(self) -> Procedure[bool]:
        """Read all positions from the newest snapshot, or from those read before; return whether there are any."""
        if self.position == 0:
            newest = yield from self._newest_snapshot()
            if newest is None:
                return False
            self.position = newest * SNAPSHOT_EVERY
        while (entry := (yield from self._entry(self.position))) is not None:
            self._replay(entry)
        return True

    def lead(self, *, first_lines: Sequence[Mapping[str, Any]] | None = None) -> Procedure[bool]:
        """Claim the next term, and write the opening entry; return whether this process leads.

        Args:
            first_lines: Begin the run with these where the journal is empty; None leaves that to others.
        """
        term, began_s = self.term + 1, self.now()
        claim = msgspec.json.encode({"holder": self.holder})
        is_mine = yield lambda: self.carrier.put(term_name(term), claim, only_new=True)
        if not is_mine:  # the answer of an earlier attempt may have been lost
            with contextlib.suppress(NotThere):
                is_mine = claim == bytes((yield self._get(term_name(term))).numpy())
        self.term = term
        if not is_mine:
            return False
        while True:
            exists = yield from self.read()
            if self.term > term:
                return False
            if not exists and first_lines is None:
                return False
            opening = [] if exists else [dict(line) for line in first_lines or ()]
            if (yield from self._write([*opening, {"what": "term", "term": term}], all_lines=lambda: self.lines)):
                # what it read may have been deleted since; no reader begins there
                self.is_leading = self.now() - began_s < STALE_S
                return self.is_leading

    def append(
        self, lines: Sequence[Mapping[str, Any]], *, all_lines: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> Procedure[None]:
        """Write lines at the next position.

        Args:
            lines: The new ones.
            all_lines: Returns lines whose replay gives the same as that of all so far, the new ones among them.

        Raises:
            LostLeadership: Another process leads.
        """
        self.check()
        is_written = yield from self._write(lines, all_lines=all_lines)
        if not is_written:
            self.is_leading = False
            raise LostLeadership(f"another process leads the run: position {self.position} of the journal is taken")
        self.check()

    def check(self) -> None:
        """Raise where this process has written nothing for `STALE_S`, after which it may lead no more.

        Raises:
            LostLeadership: It has.
        """
        if self.is_leading and self.now() - self._written_s > STALE_S:
            self.is_leading = False
            raise LostLeadership(f"this process stood still for more than {STALE_S:g} s, and another one may lead")

    @property
    def is_refresh_due(self) -> bool:
        """Whether an empty entry is to be written, since nothing else was for a third of `STALE_S`."""
        return self.now() - self._written_s > STALE_S / 3

    def collect(self) -> Procedure[None]:
        """Delete old positions before the last but one snapshot."""
        first_kept = (self.position // SNAPSHOT_EVERY - 1) * SNAPSHOT_EVERY
        old_s = self.now() - DELETE_AFTER_S
        old = [one for one, seen_s in self._seen.items() if one < first_kept and seen_s < old_s]
        if not old:
            return
        empty = msgspec.json.encode(JournalEntry(term=0, holder="", lines=[], is_snapshot=True))
        for one in [one for one in old if one % SNAPSHOT_EVERY == 0]:
            yield partial(self.carrier.put, position_name(one), empty, only_new=False)
        names = [position_name(one) for one in old if one % SNAPSHOT_EVERY]
        if names:
            yield lambda: self.carrier.delete(names)
        for one in old:
            del self._seen[one]

    def _write(
        self, lines: Sequence[Mapping[str, Any]], *, all_lines: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> Procedure[bool]:
        position = self.position
        is_snapshot = position % SNAPSHOT_EVERY == 0
        if is_snapshot and position:
            # an opening entry adds its line to what was read; a leader's state holds its new lines already
            lines = [*all_lines(), *([] if self.is_leading else lines)]
        # an attempt without an answer may have been done, so the same entry is tried again
        entry = self._unanswered or JournalEntry(
            term=self.term, holder=self.holder, lines=[dict(line) for line in lines], is_snapshot=is_snapshot
        )
        self._unanswered = entry
        raw, began_s = msgspec.json.encode(entry), self.now()
        is_new = yield lambda: self.carrier.put(position_name(position), raw, only_new=True)
        if not is_new:
            found = yield from self._entry(position)
            is_new = found is not None and msgspec.json.encode(found) == raw
        self._unanswered = None
        if is_new:
            self._replay(entry)
            self._written_s = began_s
        return bool(is_new)

    def _replay(self, entry: JournalEntry) -> None:
        if entry.is_snapshot:
            self.lines = []
        if not self.is_leading:  # who leads holds the state itself
            self.lines += entry.lines
        self.term = max(self.term, entry.term)
        self._seen[self.position] = self.now()
        self.position += 1

    def _newest_snapshot(self) -> Procedure[int | None]:
        """Return the number of the newest snapshot, by doubling and bisection; they are written one after the other."""
        most = 1
        while (yield from self._entry((most - 1) * SNAPSHOT_EVERY)) is not None:
            most *= 2
        least = most // 2  # so many exist at least, and fewer than `most`
        while most - least > 1:
            middle = (most + least) // 2
            if (yield from self._entry((middle - 1) * SNAPSHOT_EVERY)) is not None:
                least = middle
            else:
                most = middle
        return least - 1 if least else None

    def _entry(self, position: int) -> Procedure[JournalEntry | None]:
        try:
            payload = yield self._get(position_name(position))
        except NotThere:
            return None
        return decode_entry(bytes(payload.numpy()), position=position)

    def _get(self, name: str) -> Operation:
        return lambda: self.carrier.get(name, most_bytes=MOST_ENTRY_BYTES, deadline_s=60.0)


class JournalWriter:
    """A leader's journal as the coordinator writes it: lines wait here for `flush`; see `Journal`.

    Args:
        journal: Led by this process.
        all_lines: Returns lines whose replay gives the same state as that of all written ones.
    """

    def __init__(self, journal: CarriedJournal, *, all_lines: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._journal = journal
        self._all_lines = all_lines
        self._lines: list[dict[str, Any]] = []
        self._batch: list[dict[str, Any]] = []

    @property
    def is_behind(self) -> bool:
        """Whether lines wait."""
        return bool(self._batch or self._lines)

    def write(self, what: str, fields: dict[str, Any]) -> None:
        """Add a line."""
        self._lines.append({"what": what, **fields})

    def flush(self) -> bool:
        """Write the lines as one entry; after an attempt without an answer, the same ones again first.

        Raises:
            LostLeadership: Another process leads.
            TransportError: The carrier does not answer; call it again.
        """
        while self.is_behind or self._journal.is_refresh_due:
            if not self._batch:
                self._batch, self._lines = self._lines, []
            run(self._journal.append(self._batch, all_lines=self._all_lines))
            self._batch = []
            run(self._journal.collect())
        self._journal.check()
        return True


def decode_entry(raw: bytes, *, position: int) -> JournalEntry:
    """Read an entry.

    Raises:
        ValueError: It is none: the objects are not of this run, or of another version.
    """
    try:
        entry = msgspec.json.decode(raw, type=JournalEntry)
        if not 0 <= entry.term < _MOST_TERMS or not all(isinstance(one.get("what"), str) for one in entry.lines):
            raise ValueError(f"term {entry.term}, {len(entry.lines)} lines")
        return entry
    except (ValueError, RecursionError) as error:  # all errors of msgspec are ValueErrors
        raise refusal(
            f"position {position} of the journal is no entry of this thinwire", got=str(error)[:120],
            allowed="what a coordinator of the same version wrote", remedy="the same thinwire on all hosts",
        ) from None  # fmt: skip
