"""A rank's flight recorder: what it has posted, what is done, what it computes and that it lives, on disk as it runs.

The training thread and those of the transport only put events into a queue of fixed length. A thread of the
recorder's own turns them into records four times a second, and writes what is posted even where it never ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from thinwire.elastic.round_driver import part_of_name
from thinwire.errors import TransportError
from thinwire.events import Direction, Posted, RoundMark, Transfer, TransferLog
from thinwire.monitor.record.connection_records import FlowSource, PeerFlows
from thinwire.monitor.runlog.record_file import MOST_FILE_BYTES, RecordFile
from thinwire.monitor.runlog.records import Arrival, Beat, Communicator, Operation, Record, Span, TransferEnd, to_line
from thinwire.sync.engine import Engine
from thinwire.transport.addresses import clock_name, host_name

COMMUNICATOR = "rounds"
TURN_S = 0.25
BEAT_S = 0.5
MOST_EVENTS = 1 << 15
MOST_OPEN = 1 << 12
_MOST_ERROR = 400
# So long a disk that does not answer may keep a rank from ending.
_CLOSE_S = 10.0
_PHASES = 4

Event = Posted | Transfer | RoundMark | Span
_Key = tuple[Direction, int, int, int]


class Forward(Protocol):
    """Takes a rank's lines to another host."""

    def add(self, lines: list[str]) -> None:
        """Take lines; must be quick."""
        ...

    def turn(self) -> None:
        """Send what may be sent now; called every `TURN_S`; must be quick."""
        ...

    def finish(self) -> None:
        """Send the rest, as far as that does not take long."""
        ...


class Reading(FlowSource, Protocol):
    """What is known of a connection."""

    @property
    def received_bytes(self) -> int:
        """What has come over it."""
        ...

    @property
    def has_signs(self) -> bool:
        """Whether signs of life come over it by themselves."""
        ...


class Followed(Protocol):
    """Carries messages."""

    @property
    def log(self) -> TransferLog:
        """What it carried."""
        ...


class Recorder:
    """Writes `records-rank-N.jsonl` of one rank, see `thinwire.monitor.runlog.record_file`.

    Memory is bounded: so many events wait at most, and so many transfers and rounds are open at most; the oldest are
    forgotten. While the disk is full, lines are kept in memory; a disk that fails otherwise ends the recording, not the
    run.

    Args:
        run_dir: The run's folder.
        rank: This rank; where a replica is many ranks, the replica's number at the one that leads.
        most_bytes: How long the files may be.
        clock: Seconds that only grow; the transport's times must be of the same.
        warn: Told why nothing is recorded any more.
        forward: Takes the lines to where all ranks' records are judged; None where they are here.

    Attributes:
        num_dropped: Events that there was no room for.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, most_bytes: int = MOST_FILE_BYTES,
        clock: Callable[[], float] = time.monotonic, warn: Callable[[str], None] = lambda text: None,
        forward: Forward | None = None,
    ) -> None:  # fmt: skip
        self._forward = forward
        self._rank = rank
        self._clock = clock
        self._warn = warn
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._open: dict[_Key | int, TransferEnd | Operation] = {}
        self._untold: set[_Key | int] = set()
        self._flows = PeerFlows(rank)
        self._beat_s = -BEAT_S
        self._reading: Callable[[int], Reading | None] = lambda peer: None
        self.num_dropped = 0
        self._place = Communicator(
            communicator=COMMUNICATOR, ranks=(rank,), hosts=(host_name(),), clocks=(clock_name(),)
        )
        self._stop = threading.Event()
        self._is_full = False
        self._file: RecordFile | None = None
        try:
            self._file = RecordFile(run_dir, rank=rank, most_bytes=most_bytes)
            self._file.write([to_line(self._place)])
        except OSError as error:
            self._give_up(error)
        if forward is not None:
            forward.add([to_line(self._place)])
        self._thread = threading.Thread(target=self._run, name="thinwire-recorder", daemon=True)
        self._thread.start()

    def follow(self, transport: Followed, engine: Engine) -> None:
        """Record all rounds of an engine and their messages from here on.

        Args:
            transport: What carries them. Where it has a `reading` of each connection, what comes meanwhile is recorded.
            engine: Whose rounds.
        """
        transport.log.add_post_sink(self.add)
        transport.log.add_sink(self.add)
        engine.on_round = self.add
        self._reading = getattr(transport, "reading", self._reading)

    def add(self, event: Event) -> None:
        """Take an event in, from any thread; nothing is written here."""
        if len(self._events) == MOST_EVENTS:
            self.num_dropped += 1
        self._events.append(event)

    def add_step(
        self, step: int, *, started_s: float, done_s: float, loss: float | None = None,
        forward_s: float | None = None, backward_s: float | None = None,
    ) -> None:  # fmt: skip
        """Record a stretch of this rank's own work.

        Args:
            step: The inner step.
            started_s: When it began, on the recorder's clock.
            done_s: When it would have been done if nothing had been waited for.
            loss: Of the step, where it is known.
            forward_s: Seconds that its forward passes took, where they were timed.
            backward_s: Seconds that its backward passes took, where they were timed.
        """
        self.add(Span(
            rank=self._rank, kind="compute", step=step, started_s=_rounded(started_s),
            done_s=_rounded(max(started_s, done_s)), loss=loss,
            forward_s=None if forward_s is None else _rounded(forward_s),
            backward_s=None if backward_s is None else _rounded(backward_s),
        ))  # fmt: skip

    def close(self, *, error: str = "") -> None:
        """Say goodbye and write no more; closing twice is fine.

        Args:
            error: Why this rank ends, where the fault is its own.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"rank {self._rank} ends without its last records: the disk has not answered for {_CLOSE_S:g} s")
            return
        bye = Beat(rank=self._rank, at_s=_rounded(self._clock()), is_last=True, error=error[:_MOST_ERROR])
        self._turn(bye)
        if self._file is not None:
            self._file.close()
            if self._file.num_lost:
                self._warn(
                    f"{self._file.num_lost} records of rank {self._rank} are missing: there was no room for them"
                )
            self._file = None
        if self._forward is not None:
            self._forward.finish()

    def _run(self) -> None:
        while not self._stop.wait(TURN_S):
            now_s = self._clock()
            is_due = now_s - self._beat_s >= BEAT_S - TURN_S / 2
            self._turn(Beat(rank=self._rank, at_s=_rounded(now_s)) if is_due else None)
            if is_due:
                self._beat_s = now_s

    def _turn(self, beat: Beat | None) -> None:
        """Write down what came since the last turn, and what is open and was not told yet."""
        lines: list[str] = []
        while self._events:
            record = self._take(self._events.popleft())
            if record is not None:
                lines.append(to_line(record))
        lines += [to_line(self._open[key]) for key in self._untold]
        self._untold.clear()
        if beat is not None:
            wires: list[Record] = [*self._arrivals(beat.at_s), *self._flows.records(beat.at_s, self._reading)]
            lines += [*map(to_line, wires), to_line(beat)]
        if lines:
            self._write(lines)
        if self._forward is not None:
            self._forward.add(lines)
            self._forward.turn()

    def _arrivals(self, now_s: float) -> Iterator[Arrival]:
        """Yield what has come from those from whom a message has been open for a beat and longer."""
        waited_for = {
            key[1] for key, one in self._open.items()
            if isinstance(key, tuple) and key[0] == "received" and one.posted_s <= now_s - BEAT_S
        }  # fmt: skip
        for peer in sorted(waited_for):
            found = self._reading(peer)
            if found is not None:
                yield Arrival(
                    rank=self._rank, peer=peer, at_s=now_s, num_bytes=found.received_bytes, has_signs=found.has_signs
                )

    def _write(self, lines: list[str]) -> None:
        if self._file is None:
            return
        try:
            if self._file.write(lines):
                # what the file before told of what is still open may soon be gone
                self._file.write(map(to_line, [self._place, *self._open.values()]))
        except OSError as error:
            self._give_up(error)
            return
        if self._file.is_waiting != self._is_full:
            self._is_full = self._file.is_waiting
            if self._is_full:
                self._warn(f"rank {self._rank}'s records are kept in memory until there is room on the disk")

    def _give_up(self, error: OSError) -> None:
        self._file = None
        self._warn(f"rank {self._rank} records nothing any more: {error.strerror or error}")

    def _take(self, event: Event) -> Record | None:
        """Return the record of what has ended; note what has begun."""
        if isinstance(event, Span):
            return event
        if isinstance(event, RoundMark):
            return self._take_round(event)
        key = _key_of(event)
        if key is None:
            return None
        if isinstance(event, Posted):
            if event.direction == "sent":
                self._flows.note_send(event.peer)
            self._note(key, self._end(key, num_bytes=event.num_bytes, posted_s=event.posted_s))
            return None
        self._forget(key)
        end = self._end(
            key, num_bytes=event.payload_bytes, posted_s=event.started_s, error=event.error[:_MOST_ERROR],
            done_s=None if event.error else _rounded(event.finished_s), begun_s=event.begun_s,
        )  # fmt: skip
        if event.error:  # a deadline that ran out: it may still end well
            self._note(key, end)
            return None
        return end

    def _take_round(self, mark: RoundMark) -> Record | None:
        found = self._forget(mark.round_id) if mark.is_done else None
        operation = Operation(
            communicator=COMMUNICATOR, rank=self._rank, sequence=mark.round_id, kind="round", dtype=mark.dtype,
            count=mark.num_elements, posted_s=_rounded(mark.at_s) if found is None else found.posted_s,
            done_s=_rounded(mark.at_s) if mark.is_done else None, round=mark.round_id,
        )  # fmt: skip
        if mark.is_done:
            return operation
        self._note(mark.round_id, operation)
        return None

    def _note(self, key: _Key | int, record: TransferEnd | Operation) -> None:
        self._open[key] = record
        self._untold.add(key)
        if len(self._open) > MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _forget(self, key: _Key | int) -> TransferEnd | Operation | None:
        self._untold.discard(key)
        return self._open.pop(key, None)

    def _end(
        self, key: _Key, *, num_bytes: int, posted_s: float, done_s: float | None = None, error: str = "",
        begun_s: float | None = None,
    ) -> TransferEnd:  # fmt: skip
        direction, peer, operation, part = key
        return TransferEnd(
            communicator=COMMUNICATOR, rank=self._rank, peer=peer, direction=direction, operation=operation, part=part,
            num_bytes=num_bytes, posted_s=_rounded(posted_s), done_s=done_s, error=error,
            started_s=None if begun_s is None else _rounded(begun_s),
        )  # fmt: skip


def own_fault(error: Exception) -> str:
    """Return why a rank ends in words, empty where it ends because it lost others or was told to.

    Example:
        >>> own_fault(ValueError("no number")), own_fault(TransportError("replica 1 was lost"))
        ('ValueError: no number', '')
    """
    return "" if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"


def _key_of(event: Posted | Transfer) -> _Key | None:
    """Return what both ends of a round's message know it by, None for other messages.

    A round's own messages are told apart by fragment and phase, parts that replicas ask each other for by their owner.
    """
    if event.kind == "round":
        return event.direction, event.peer, event.round_id, event.fragment * _PHASES + event.phase
    part = part_of_name(event.name)
    return None if part is None else (event.direction, event.peer, *part)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
