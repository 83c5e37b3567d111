"""Write-once values on a majority of hosts: single-decree Paxos, one instance a name.

Each host has an `Acceptor`. It promises ballots and accepts values, and writes both down before it answers. A writer
makes a `BallotAttempt`: it asks all hosts for a promise, then to accept a value, and needs a majority each time. Where
a value was accepted before, the attempt completes that one. So two majorities never hold two values of a name,
whichever hosts stop, come back with their file, or answer late (Lamport, The Part-Time Parliament, 1998).

Both are values without network and clock, which a test can put in any order.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from thinwire.errors import PayloadError

# Number of an attempt, and the text that no other writer uses.
Ballot: TypeAlias = tuple[int, str]
NO_BALLOT: Ballot = (0, "")
MOST_NUMBER = 2**62
MOST_WRITER_CHARACTERS = 64


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a host accepted, and by which ballot."""

    ballot: Ballot
    value: bytes


class AcceptorReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host's answer to a promise asked for, or a value to accept.

    Attributes:
        is_granted: Whether it was done.
        promised: The highest ballot that the host has promised.
        accepted: What it holds.
    """

    is_granted: bool
    promised: Ballot
    accepted: Accepted | None = None


class Acceptor:
    """One host's part. Thread-safe.

    Args:
        path: File that outlives the process; None keeps all in memory. A host that lost it must not come back under
            its old place: it would forget its promises.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        try:
            self._base = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
            self._base.execute("PRAGMA synchronous = FULL")
            self._base.execute(
                "CREATE TABLE IF NOT EXISTS held (name TEXT PRIMARY KEY, number INTEGER, writer TEXT,"
                " accepted_number INTEGER, accepted_writer TEXT, value BLOB, written_s REAL) WITHOUT ROWID"
            )
        except sqlite3.DatabaseError as error:
            raise PayloadError(f"{path} does not hold what a host has promised: {error}; give another folder") from None

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def read(self, name: str) -> AcceptorReply:
        """Return what this host holds, and change nothing."""
        with self._lock:
            return self._held(name)

    def prepare(self, name: str, ballot: Ballot) -> AcceptorReply:
        """Promise to accept nothing of lower ballots."""
        with self._lock, self._base:
            held = self._held(name)
            if ballot <= held.promised:
                return msgspec.structs.replace(held, is_granted=False)
            self._base.execute(
                "INSERT INTO held (name, number, writer) VALUES (?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET number = excluded.number, writer = excluded.writer",
                (name, *ballot),
            )
            return msgspec.structs.replace(held, promised=ballot)

    def accept(self, name: str, ballot: Ballot, value: bytes, *, now_s: float = 0.0) -> AcceptorReply:
        """Hold a value, unless a higher ballot was promised."""
        with self._lock, self._base:
            held = self._held(name)
            if ballot < held.promised:
                return msgspec.structs.replace(held, is_granted=False)
            self._base.execute(
                "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, *ballot, *ballot, value, now_s),
            )
            return AcceptorReply(is_granted=True, promised=ballot, accepted=Accepted(ballot=ballot, value=value))

    def forget(self, name: str) -> None:
        """Drop a name. A writer that began before may write it afresh: callers know that there is none."""
        with self._lock, self._base:
            self._base.execute("DELETE FROM held WHERE name = ?", (name,))

    def names(self, prefix: str, *, after: str, most: int) -> list[tuple[str, bytes, float]]:
        """Return names that begin so and come after one, with the first 64 bytes of their values and their times."""
        with self._lock:
            return self._base.execute(
                "SELECT name, substr(value, 1, 64), written_s FROM held WHERE name > ? AND substr(name, 1, ?) = ?"
                " AND value IS NOT NULL ORDER BY name LIMIT ?",
                (after, len(prefix), prefix, most),
            ).fetchall()

    def _held(self, name: str) -> AcceptorReply:
        row = self._base.execute(
            "SELECT number, writer, accepted_number, accepted_writer, value FROM held WHERE name = ?", (name,)
        ).fetchone()
        if row is None:
            return AcceptorReply(is_granted=True, promised=NO_BALLOT)
        accepted = None if row[4] is None else Accepted(ballot=(row[2], row[3]), value=row[4])
        return AcceptorReply(is_granted=True, promised=(row[0], row[1]), accepted=accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotAttempt:
    """One ballot of a writer for one name; a new value after each answer.

    Attributes:
        hosts: Number of hosts.
        ballot: Its ballot; no other attempt may have the same.
        own: The value to write; None only completes what is there.
        replaces: Whether `own` takes the place of a value that is there.
        phase: `prepare` and `accept` wait for answers; `chosen`: a majority holds `value`; `absent`: none was there
            and `own` is None; `beaten`: a host has promised more, so that another attempt is needed.
        value: What is accepted, or to be.
        highest: The highest ballot seen in answers.
    """

    hosts: int
    ballot: Ballot
    own: bytes | None
    replaces: bool = False
    phase: Literal["prepare", "accept", "chosen", "absent", "beaten"] = "prepare"
    value: bytes | None = None
    highest: Ballot = NO_BALLOT
    best: Accepted | None = None
    granted: frozenset[int] = frozenset()

    @property
    def has_ended(self) -> bool:
        return self.phase in ("chosen", "absent", "beaten")

    def take(self, host: int, reply: AcceptorReply, *, phase: str) -> BallotAttempt:
        """Return what the attempt becomes by an answer of a host to its request in a phase."""
        if phase != self.phase or host in self.granted:
            return self  # late, or doubled
        highest = max(self.highest, reply.promised)
        if not reply.is_granted:
            # the others may be away: to wait for a majority of refusals might be for ever
            return replace(self, highest=highest, phase="beaten")
        best = self.best
        if reply.accepted is not None and (best is None or reply.accepted.ballot > best.ballot):
            best = reply.accepted
        after = replace(self, granted=self.granted | {host}, highest=highest, best=best)
        if len(after.granted) < majority_of(self.hosts):
            return after
        if self.phase == "accept":
            return replace(after, phase="chosen")
        value = best.value if best is not None and not self.replaces else self.own
        if value is None:
            return replace(after, phase="absent")
        return replace(after, phase="accept", value=value, granted=frozenset())

    def next(self) -> BallotAttempt:
        """Return the attempt after one that was beaten, or not answered."""
        number = max(self.highest, self.ballot)[0] + 1
        ballot = number, self.ballot[1]
        return BallotAttempt(hosts=self.hosts, ballot=ballot, own=self.own, replaces=self.replaces)


def majority_of(hosts: int) -> int:
    """Return how many of so many hosts are more than half.

    Example:
        >>> [majority_of(hosts) for hosts in (1, 2, 3, 4, 5)]
        [1, 2, 2, 3, 3]
    """
    return hosts // 2 + 1


def settled(replies: list[AcceptorReply], *, hosts: int) -> tuple[bool, bytes | None]:
    """Return whether answers to `Acceptor.read` tell a name's value by themselves, and it: None where there is none.

    One value with one ballot at a majority is chosen; where a majority has accepted nothing, nothing was chosen yet.
    Anything else needs an attempt that completes it.
    """
    held = [one.accepted for one in replies]
    if held.count(None) >= majority_of(hosts):
        return True, None
    for one in held:
        if one is not None and held.count(one) >= majority_of(hosts):
            return True, one.value
    return False, None
