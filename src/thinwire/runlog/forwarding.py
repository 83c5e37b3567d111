"""Forwarding of a replica's records to the coordinator's host, which diagnoses all replicas together.

They travel over the connection to the coordinator, one batch at a time, each resent until it is acknowledged. Memory
and traffic are bounded at both ends.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from thinwire.errors import is_no_room
from thinwire.rate_limit import RateLimit
from thinwire.runlog.reader import parse_line
from thinwire.runlog.records import Communicator, ProcessState, Record, to_line
from thinwire.runlog.writer import record_paths, record_writer

# Less than 1 % of a link of 5 Mbit/s.
BYTES_A_SECOND, _BYTES_AT_ONCE = 4096.0, 32768.0
# Lines of a batch, uncompressed; compressed they take a fifth to a half.
MOST_BATCH_BYTES = 32768
# Lines that wait while the coordinator does not answer; the oldest steps are dropped first.
MOST_WAITING_BYTES = 1 << 18
_SPAN = '{"record":"span"'
_FINISH_S, _FINISH_LOOK_S = 2.0, 0.02
# Of all replicas of other hosts together, also of those that have long gone: as many come as spot machines do.
MOST_KEPT_BYTES = 1 << 29
# At the coordinator, of all replicas together, while its disk is full.
MAX_WAITING_HERE_BYTES = 4 << 20
# At the coordinator: an honest replica stays far below.
_TAKEN_A_SECOND, _TAKEN_AT_ONCE = 2 * BYTES_A_SECOND, float(MOST_WAITING_BYTES)


class ReliableSender(Protocol):
    """Sends messages to the coordinator until they are acknowledged."""

    def send_reliably(self, kind: str, **fields: object) -> None: ...

    def is_acknowledged(self, kind: str) -> bool: ...


class RecordForward:
    """Sends one replica's lines; used by its recorder's thread alone.

    Attributes:
        num_left_out: Lines that were never sent, since too many waited.
        num_bytes: Bytes of the batches that were, as they were sent.
    """

    def __init__(self, session: ReliableSender, *, now: Callable[[], float] = time.monotonic) -> None:
        self._session, self._now = session, now
        self._lines: deque[str] = deque()
        self._waiting_bytes = 0
        self._number = 0
        self._left_bytes = _BYTES_AT_ONCE
        self._looked_s = now()
        self.num_left_out = 0
        self.num_bytes = 0

    def add(self, lines: list[str]) -> None:
        self._lines.extend(lines)
        self._waiting_bytes += sum(len(line) + 1 for line in lines)
        if self._waiting_bytes <= MOST_WAITING_BYTES:
            return
        # half of what waits goes: steps first, then what is oldest
        kept = deque(line for line in self._lines if not line.startswith(_SPAN))
        kept_bytes = sum(len(line) + 1 for line in kept)
        while kept_bytes > MOST_WAITING_BYTES // 2:
            kept_bytes -= len(kept.popleft()) + 1
        self.num_left_out += len(self._lines) - len(kept)
        self._lines, self._waiting_bytes = kept, kept_bytes

    def turn(self) -> None:
        now_s = self._now()
        self._left_bytes = min(_BYTES_AT_ONCE, self._left_bytes + (now_s - self._looked_s) * BYTES_A_SECOND)
        self._looked_s = now_s
        if not self._lines or self._left_bytes <= 0 or not self._session.is_acknowledged("records"):
            return
        batch: list[str] = []
        num_bytes = 0
        while self._lines and num_bytes + len(self._lines[0]) < MOST_BATCH_BYTES:
            batch.append(self._lines.popleft())
            num_bytes += len(batch[-1]) + 1
        if not batch:  # a line that is longer than any may be
            self._waiting_bytes -= len(self._lines.popleft()) + 1
            self.num_left_out += 1
            return
        self._waiting_bytes -= num_bytes
        text = pressed(batch)
        self._left_bytes -= len(text)
        self.num_bytes += len(text)
        self._session.send_reliably("records", number=self._number, text=text)
        self._number += 1

    def finish(self) -> None:
        until_s = time.monotonic() + _FINISH_S
        while time.monotonic() < until_s and (self._lines or not self._session.is_acknowledged("records")):
            self._left_bytes = _BYTES_AT_ONCE  # a goodbye is not put off
            self.turn()
            time.sleep(_FINISH_LOOK_S)


def pressed(lines: list[str]) -> str:
    """Return a batch of lines as the text of a message.

    Example:
        >>> unpressed(pressed(["a", "b"]))
        ['a', 'b']
    """
    return base64.b85encode(zlib.compress("\n".join(lines).encode(), 6)).decode()


def unpressed(text: str) -> list[str]:
    """Return the lines of an untrusted message.

    Raises:
        ValueError: It holds none, or more than `MOST_BATCH_BYTES`.
    """
    try:
        press = zlib.decompressobj()
        raw = press.decompress(base64.b85decode(text), MOST_BATCH_BYTES + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"a batch of records that is none: {error}") from None
    if len(raw) > MOST_BATCH_BYTES or not press.eof:
        raise ValueError(f"a batch of records of more than {MOST_BATCH_BYTES} bytes, or without its end")
    return raw.decode().split("\n")


class TakenRecords:
    """Writes what replicas of other hosts record to this run's folder, as `records-rank-N.jsonl`: untrusted lines.

    Each line is parsed and written again. Lines of another rank, malformed lines, and lines beyond a replica's
    allowance are dropped. Nothing is written for a replica whose process is on this host: it writes itself.
    Where all files together grow too long, those go whose replica has been silent for longest. While the disk is full,
    lines are kept in memory, bounded; beyond the bound the oldest of the replica with the most are lost.

    Args:
        say: Called once where a file cannot be written.
        most_bytes: How long all files together may be.

    Attributes:
        num_refused: Lines and batches that were left out.
    """

    def __init__(
        self, run_dir: Path, *, say: Callable[[str], None], now: Callable[[], float] = time.monotonic,
        most_bytes: int = MOST_KEPT_BYTES,
    ) -> None:  # fmt: skip
        self._run_dir, self._most_bytes, self._say, self._now = run_dir, most_bytes, say, now
        self._kept = self._kept_before()
        self._allowances: dict[int, RateLimit] = {}
        self._places: dict[int, str] = {}
        self._warned: set[int] = set()
        self._met: set[int] = set()
        self._waiting: dict[int, deque[str]] = {}
        self.num_refused = 0

    def take(self, replica: int, text: str) -> None:
        allowance = self._allowances.setdefault(replica, RateLimit(a_second=_TAKEN_A_SECOND, at_once=_TAKEN_AT_ONCE))
        is_allowed = allowance.take(now_s=self._now(), amount=len(text) + 1)
        if not is_allowed or self._is_here(replica):
            self.num_refused += 1
            return
        try:
            lines = unpressed(text)
        except ValueError:
            self.num_refused += 1
            return
        checked = [to_line(record) for line in lines if (record := self._checked(replica, line)) is not None]
        if checked and replica not in self._met:
            checked = self._beyond_the_last(replica, checked)
        if checked:
            self._write(replica, checked)

    def _checked(self, replica: int, line: str) -> Record | None:
        try:
            record = parse_line(line.encode())
        except ValueError:
            self.num_refused += 1
            return None
        is_own = record.ranks == (replica,) if isinstance(record, Communicator) else record.rank == replica
        if not is_own or isinstance(record, ProcessState):  # these are seen on a host, and only there
            self.num_refused += 1
            return None
        if isinstance(record, Communicator):
            self._places[replica] = to_line(record)
        return record

    def close(self) -> None:
        """Write what is kept in memory, as far as there is room."""
        for replica in list(self._waiting):
            self._write(replica, [])

    def _write(self, replica: int, new: list[str]) -> None:
        path, _ = record_paths(self._run_dir, rank=replica)
        before = path.stat().st_size if path.exists() else 0
        lines = self._waiting.pop(replica, deque())
        lines.extend(new)
        try:
            file = record_writer(self._run_dir, rank=replica, is_continued=True, max_kept_bytes=0)
            with contextlib.closing(file):
                if file.write_all(lines) and replica in self._places:
                    file.write_all([self._places[replica]])
            self._make_room(replica)
            self._warned.discard(replica)
        except OSError as error:
            with contextlib.suppress(OSError):  # take back what was written of lines for which there was no room
                if not before:
                    path.unlink()
                elif path.stat().st_size > before:
                    os.truncate(path, before)
            if is_no_room(error):
                self._waiting[replica] = lines
                sizes = {other: sum(map(len, waiting)) for other, waiting in self._waiting.items()}
                while sum(sizes.values()) > MAX_WAITING_HERE_BYTES:
                    most = max(sizes, key=lambda other: sizes[other])
                    sizes[most] -= len(self._waiting[most].popleft())
                    self.num_refused += 1
            else:
                self.num_refused += len(lines)
            if replica not in self._warned:
                self._warned.add(replica)
                how = "wait in memory until there is room" if replica in self._waiting else "are lost"
                self._say(f"records of replica {replica} {how}: {error.strerror or error}")

    def _make_room(self, replica: int) -> None:
        """Remove what those wrote who have been silent for longest, until there is room for all."""
        self._kept.pop(replica, None)
        self._kept[replica] = self._num_bytes(replica)
        while sum(self._kept.values()) > self._most_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._met.discard(oldest)
            for path in record_paths(self._run_dir, rank=oldest):
                path.unlink(missing_ok=True)

    def _kept_before(self) -> dict[int, int]:
        """Return what another coordinator has kept of other hosts' replicas, who has been silent for longest first."""
        latest_s: dict[int, float] = {}
        for path in self._run_dir.glob("records-rank-*.jsonl"):
            number = path.stem.removesuffix(".old").rpartition("-")[2]
            if number.isdecimal() and not (self._run_dir / "logs" / f"replica-{number}.pid").exists():
                with contextlib.suppress(OSError):
                    latest_s[int(number)] = max(latest_s.get(int(number), 0.0), path.stat().st_mtime)
        return {number: self._num_bytes(number) for number in sorted(latest_s, key=lambda number: latest_s[number])}

    def _num_bytes(self, replica: int) -> int:
        total = 0
        for path in record_paths(self._run_dir, rank=replica):
            with contextlib.suppress(OSError):  # one that is not there holds none
                total += path.stat().st_size
        return total

    def _beyond_the_last(self, replica: int, lines: list[str]) -> list[str]:
        """Return what of a replica's first batch is not kept yet: a coordinator may have died before it answered.

        What that one wrote last and not to the end of a line is cut off.
        """
        self._met.add(replica)
        path, _ = record_paths(self._run_dir, rank=replica)
        with contextlib.suppress(OSError), path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2 * MOST_BATCH_BYTES))
            whole, torn = (end := file.read())[: end.rfind(b"\n") + 1], end[end.rfind(b"\n") + 1 :]
            file.truncate(size - len(torn))
            kept = whole.decode(errors="replace").splitlines()
            for count in range(min(len(lines), len(kept)), 0, -1):
                if kept[-count:] == lines[:count]:
                    return lines[count:]
        return lines

    def _is_here(self, replica: int) -> bool:
        """Tell whether a process of this host is that replica."""
        try:
            pid = int((self._run_dir / "logs" / f"replica-{replica}.pid").read_text())
            os.kill(pid, 0)
        except (OSError, ValueError, OverflowError):
            return False
        return True
