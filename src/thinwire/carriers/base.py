"""Interface of carriers: named blobs in a store that several members reach; lease and journal of create-only blobs."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeAlias

import msgspec
import torch

from thinwire.errors import DeadlineExceeded, NotThere, PayloadError, refusal

Payload: TypeAlias = torch.Tensor | bytes | bytearray | memoryview
Operation: TypeAlias = Literal["put", "get", "list", "delete"]
# S3 takes names of 1024 bytes with the prefix, file systems parts of 255.
MOST_NAME_CHARACTERS, MOST_PART_CHARACTERS, MOST_DEPTH = 900, 255, 8
MOST_POSITION = 10**8 - 1
MOST_LEASE_S = 3600.0
MOST_ENTRY_BYTES = 16 * 2**20
_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_=.-]*")
_REQUEST_S = 60.0  # deadline of one small request


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Entry:
    """A blob in a listing: its name, its size in the store, and when it was written by the store's clock."""

    name: str
    num_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that a carrier takes, and how often it may be asked.

    Attributes:
        most_bytes: Largest payload of one blob.
        least_poll_s: Pause before the second look for a blob; each later one is twice as long.
        most_poll_s: Longest pause between two looks.
        requests_per_hour: Budget of requests; infinite without one.
    """

    most_bytes: int = 2**40
    least_poll_s: float = 1.0
    most_poll_s: float = 4.0
    requests_per_hour: float = math.inf

    def polls(self) -> Iterator[float]:
        """Yield the pauses between looks: 1, 2, 4, 4 times the least one.

        Example:
            >>> from itertools import islice
            >>> list(islice(Limits().polls(), 4))
            [1.0, 2.0, 4.0, 4.0]
        """
        pause_s = self.least_poll_s
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, self.most_poll_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierCost:
    """Requests and bytes that a carrier has used; sums and differences are costs too."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def requests(self) -> int:
        return self.puts + self.gets + self.lists + self.deletes

    def __add__(self, other: CarrierCost) -> CarrierCost:
        return CarrierCost(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __sub__(self, other: CarrierCost) -> CarrierCost:
        return CarrierCost(**{one.name: getattr(self, one.name) - getattr(other, one.name) for one in fields(self)})


class CostMeter:
    """Counter of a carrier's requests and bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = CarrierCost()

    def count(self, operation: Operation, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        self.add(CarrierCost(**{f"{operation}s": 1}, sent_bytes=sent_bytes, received_bytes=received_bytes))

    def add(self, added: CarrierCost) -> None:
        with self._lock:
            self._total += added

    def total(self) -> CarrierCost:
        with self._lock:
            return self._total


class CarrierLease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to lead for a time, by the store's clock; it makes leaders rare, the journal makes them safe.

    Attributes:
        name: Folder of the lease.
        position: Number of its newest record.
        term: Number of the holder's turn, from 1; each take-over adds 1.
        holder: Text that is unique to the process that holds it.
        start_s: When it was last renewed, in seconds of the store's clock.
        seconds: Duration from then.
    """

    name: str
    position: int
    term: int
    holder: str
    start_s: float
    seconds: float

    def is_over(self, now_s: float) -> bool:
        """Return whether another member may take it; a start in the future is a broken clock's, and holds nothing."""
        return now_s >= self.start_s + self.seconds or self.start_s > now_s + self.seconds


def check_name(
    name: str, *, most: int = MOST_NAME_CHARACTERS, most_part: int = MOST_PART_CHARACTERS, depth: int = MOST_DEPTH
) -> str:
    """Return a blob's name or a folder's; the limits are those of stores.

    Raises:
        ValueError: It is no relative path of plain characters, or too long.

    Example:
        >>> check_name("rounds/7/member-3")
        'rounds/7/member-3'
        >>> check_name("../key")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: a blob has no such name; got '../key'; allowed 1 to 8 parts of letters, ...
    """
    parts = name.split("/")
    is_plain = all(len(part) <= most_part and _PART.fullmatch(part) for part in parts)
    if not is_plain or len(name) > most or len(parts) > depth:
        raise refusal(
            "a blob has no such name", got=ascii(name[:80]),
            allowed=f"1 to {depth} parts of letters, digits, _ = . -, {most} characters in all", remedy="rounds/7",
        )  # fmt: skip
    return name


def as_bytes(payload: Payload) -> memoryview:
    """Return a payload's bytes without a copy; a tensor must be uint8, one-dimensional, contiguous and on the CPU."""
    if not isinstance(payload, torch.Tensor):
        return memoryview(payload).cast("B")
    is_plain = payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous()
    if not is_plain or payload.device.type != "cpu":
        raise refusal("a blob's payload is no row of bytes", got=f"{payload.dtype} {tuple(payload.shape)}",
                      allowed="uint8, one-dimensional, contiguous, on the CPU", remedy="view(torch.uint8)")  # fmt: skip
    return payload.numpy().data


def as_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return bytes as a tensor of its own that may be written to, uint8, `(num_bytes,)`."""
    kept = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(kept, dtype=torch.uint8) if kept else torch.empty(0, dtype=torch.uint8)


def check_size(name: str, num_bytes: int, *, most_bytes: int) -> None:
    """Refuse a blob that is larger than its reader allows, before memory is taken.

    Raises:
        PayloadError: It is.
    """
    if num_bytes > most_bytes:
        raise PayloadError(f"blob {name} has {num_bytes} bytes, and at most {most_bytes} are expected")


def position_name(journal: str, position: int) -> str:
    """Return the name of a journal's entry.

    Example:
        >>> position_name("journal", 42)
        'journal/00000042'
    """
    if not 0 <= position <= MOST_POSITION:
        raise refusal("a journal has no such position", got=position, allowed=f"0 to {MOST_POSITION}",
                      remedy="a new journal")  # fmt: skip
    return f"{journal}/{position:08d}"


class Carrier(Protocol):
    """A store of named blobs that several members reach. Thread-safe.

    A class that names `Carrier` as its base implements the first eight methods; those below them are made of these,
    once for all carriers. What a listing misses may be there: only `get` by an expected name decides.
    """

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        """Write a blob, whole or not at all.

        Args:
            name: See `check_name`.
            payload: uint8, `(payload_bytes,)`, or bytes; it is not kept.
            only_new: Whether to leave a blob as it is that exists already, even if it appears at the same moment.

        Returns:
            Whether it was written; False if it exists already. A write whose answer is lost and that is repeated may
            say False of its own blob: `append` looks.

        Raises:
            TransportError: It may have been written or not; `AccessRefused` and `Throttled` say what to do.
        """
        ...

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        """Read a blob, uint8, `(payload_bytes,)`; it does not wait for one that is not there: see `fetch`.

        Raises:
            NotThere: There is none now.
            PayloadError: It is damaged, or larger than `most_bytes`.
            DeadlineExceeded: The transfer took longer than `deadline_s`.
        """
        ...

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        """Return the blobs below a folder whose names are greater than `after`, by name; new ones may be missing."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete blobs; those that are not there are no error."""
        ...

    def now(self) -> float:
        """Return the store's clock, in seconds since 1970, which all members share however their own clocks differ."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait for these seconds, or until something may have changed."""
        ...

    def limits(self) -> Limits: ...

    def cost(self) -> CarrierCost: ...

    def close(self) -> None:
        """Close what it holds open; most hold nothing."""
        return

    def wait(self, prefix: str, *, after: str, deadline_s: float) -> list[Entry]:
        """Wait for blobs below a folder whose names are greater than `after`; empty if none came in time."""
        until_s = time.monotonic() + deadline_s
        left_s = deadline_s
        for pause_s in self.limits().polls():
            found = self.listing(prefix, after=after)
            if found or left_s <= 0:
                return found
            self.pause(min(pause_s, left_s))
            # pauses count too, since a virtual clock does not move the monotonic one
            left_s = min(left_s - min(pause_s, left_s), until_s - time.monotonic())
        return []

    def fetch(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        """Read a blob as `get` does, and wait for it until then, in pauses of `Limits.polls`.

        Raises:
            DeadlineExceeded: It was not there in time.
        """
        until_s = time.monotonic() + deadline_s
        left_s = deadline_s
        for pause_s in self.limits().polls():
            try:
                return self.get(name, most_bytes=most_bytes, deadline_s=max(left_s, self.limits().least_poll_s))
            except NotThere:
                if left_s <= 0:
                    break
            self.pause(min(pause_s, left_s))
            left_s = min(left_s - min(pause_s, left_s), until_s - time.monotonic())
        raise DeadlineExceeded(f"blob {name} was not there within {deadline_s:g} s")

    def append(self, journal: str, position: int, entry: bytes) -> bool:
        """Write a journal's entry at a position that is still free.

        Args:
            journal: Its folder.
            position: From 0, without gaps.
            entry: Unique to its writer, for example by its term and holder: an equal one counts as written by it.

        Returns:
            Whether this entry is the one at the position. False means that another leader wrote it: stop leading.
        """
        name = position_name(journal, position)
        if self.put(name, entry, only_new=True):
            return True
        try:  # a repeated write finds its own first try
            found = self.get(name, most_bytes=MOST_ENTRY_BYTES, deadline_s=_REQUEST_S)
        except (NotThere, PayloadError):
            return False
        return bytes(as_bytes(found)) == entry

    def entry(self, journal: str, position: int) -> bytes:
        """Return a journal's entry; raises `NotThere` at its end."""
        name = position_name(journal, position)
        return bytes(as_bytes(self.get(name, most_bytes=MOST_ENTRY_BYTES, deadline_s=_REQUEST_S)))

    def lease(
        self, name: str, *, term: int, holder: str, seconds: float, known: CarrierLease | None = None
    ) -> CarrierLease | None:
        """Take a lease, renew one's own, or take over one that has run out.

        A lease is a journal of its own: a renewal and a take-over are its next record, and one of them gets it.

        Args:
            name: Its folder.
            term: The term to hold: 1 for a new lease, the holder's own to renew, the next one to take over.
            holder: Text that no other process uses.
            seconds: Duration from now, by the store's clock.
            known: A record that was seen before, which saves a listing: the holder's own, to renew.

        Returns:
            The lease that is held now, or None: another member holds it, or was faster.
        """
        if not 0 < seconds <= MOST_LEASE_S:
            raise refusal("a lease has no such duration", got=seconds, allowed=f"above 0 to {MOST_LEASE_S:g} s",
                          remedy="30")  # fmt: skip
        newest, now_s = self.newest_lease(name, known=known), self.now()
        if newest is None:
            may = term == 1
        elif (newest.term, newest.holder) == (term, holder):
            may = True
        else:
            may = term == newest.term + 1 and newest.is_over(now_s)
        if not may:
            return None
        position = 0 if newest is None else newest.position + 1
        mine = CarrierLease(name=name, position=position, term=term, holder=holder, start_s=now_s, seconds=seconds)
        return mine if self.append(name, position, msgspec.json.encode(mine)) else None

    def newest_lease(self, name: str, *, known: CarrierLease | None = None) -> CarrierLease | None:
        """Return the newest record of a lease, None if it was never held.

        Raises:
            PayloadError: A record is no lease.
        """
        newest = known
        if newest is None:
            # a hint where to begin, since old records may be deleted; other names are foreign
            listed = [last for entry in self.listing(name) if (last := entry.name.rpartition("/")[2]).isdecimal()]
            position = min(int(listed[-1]), MOST_POSITION) if listed else 0
        else:
            position = newest.position + 1
        while True:
            try:
                newest = _lease(self.entry(name, position), name=name, position=position)
            except NotThere:
                return newest
            position += 1


def _lease(data: bytes, *, name: str, position: int) -> CarrierLease:
    try:
        found = msgspec.json.decode(data, type=CarrierLease)
    except (ValueError, RecursionError) as error:  # all errors of msgspec are ValueErrors
        raise PayloadError(f"record {position} of lease {name} is no lease: {error}") from None
    is_sound = found.name == name and found.position == position and 1 <= found.term <= MOST_POSITION
    if not is_sound or not math.isfinite(found.start_s) or not 0 < found.seconds <= MOST_LEASE_S:
        raise PayloadError(f"record {position} of lease {name} is not sound")
    return found
