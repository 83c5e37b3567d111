"""Flight recorder of a rank: posted and finished operations, computing and heartbeats, on disk as it runs.

The training thread and those of the transport only put events into a queue of fixed length. A thread of the recorder
turns them into records four times a second, and writes posted operations even if they never end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.averaging.round_context import Average
from thinwire.elastic.round_driver import part_of_name
from thinwire.errors import TransportError
from thinwire.events import Direction, Posted, RoundMark, Transfer
from thinwire.recording.connection_records import PeerFlows
from thinwire.recording.own_fault import fault_text
from thinwire.recording.thread_state import TrainingThread
from thinwire.runlog.forwarding import RecordForward
from thinwire.runlog.path_limits import PathLimitReader
from thinwire.runlog.process_state import write_process
from thinwire.runlog.records import (
    ROUND_BITS,
    Arrival,
    Beat,
    Communicator,
    Operation,
    Record,
    Span,
    TransferEnd,
    to_line,
)
from thinwire.runlog.writer import MOST_FILE_BYTES, JsonlWriter, record_writer
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round
from thinwire.transport.addresses import clock_name, host_name
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.tcp_stats import ConnectionStats

if TYPE_CHECKING:  # needs pyzmq, an extra
    from thinwire.transport.wire.multipath import PathStats

COMMUNICATOR = "rounds"
TURN_S = 0.25
BEAT_S = 0.5
MOST_EVENTS = 1 << 15
MOST_OPEN = 1 << 12
_MOST_ERROR = 400
# A disk that does not answer delays the end of a rank by at most this.
_CLOSE_S = 10.0
_PHASES = 4

Event = Posted | Transfer | RoundMark | Span
_Key = tuple[Direction, int, int, int]


class Recorder:
    """Writes `records-rank-N.jsonl` of one rank, see `thinwire.runlog.writer`.

    Memory is bounded: beyond `MOST_EVENTS` waiting events and `MOST_OPEN` open operations the oldest are dropped. While
    the disk is full, lines are kept in memory; a disk that fails otherwise ends the recording, not the run.

    Args:
        rank: This rank; for a replica of several ranks, the replica's number at its leading rank.
        clock: Monotonic seconds, the same as the transport's.
        warn: Receives the reason why the recording ended or waits.
        forward: Sends the lines to the host that diagnoses all ranks; None if that is this host.

    Attributes:
        num_dropped: Events dropped from the full queue.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, most_bytes: int = MOST_FILE_BYTES,
        clock: Callable[[], float] = time.monotonic, warn: Callable[[str], None] = lambda text: None,
        forward: RecordForward | None = None,
    ) -> None:  # fmt: skip
        self._run_dir, self._rank, self._clock, self._warn, self._forward = run_dir, rank, clock, warn, forward
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._open: dict[_Key | int, TransferEnd | Operation] = {}
        self._unwritten: set[_Key | int] = set()
        self._flows = PeerFlows(rank)
        self._beat_s = -BEAT_S
        self._reading: Callable[[int], ConnectionStats | None] = lambda peer: None
        self._paths: Callable[[int], Sequence[PathStats]] = lambda peer: ()
        self._limits: PathLimitReader | None = None
        self.num_dropped = 0
        self._place = Communicator(
            communicator=COMMUNICATOR, ranks=(rank,), hosts=(host_name(),), clocks=(clock_name(),)
        )
        self._stop = threading.Event()
        self._file: JsonlWriter | None = None
        try:
            self._file = record_writer(run_dir, rank=rank, most_bytes=most_bytes, warn=warn)
            self._file.write_all([to_line(self._place)])
            write_process(run_dir, rank=rank)
        except OSError as error:
            self._give_up(error)
        if forward is not None:
            forward.add([to_line(self._place)])
        self._training = TrainingThread(rank, clock())
        self._thread = threading.Thread(target=self._run, name="thinwire-recorder", daemon=True)
        self._thread.start()

    def follow(self, transport: RecordingTransport, engine: RoundEngine) -> None:
        """Record all rounds of an engine and their messages from now on.

        Args:
            engine: Whose rounds.
            transport: Carries them. Its connections and paths are recorded too, and limits that findings set are
                applied to the paths.
        """
        transport.log.add_post_sink(self.add)
        transport.log.add_sink(self.add)
        engine.observers.append(self)
        self._reading, self._paths = transport.reading, transport.paths
        self._limits = PathLimitReader(self._run_dir, rank=self._rank, apply=transport.limit_path)

    def on_mark(self, mark: RoundMark) -> None:
        self.add(mark)

    def on_applied(self, round: Round, average: Average) -> None:
        """Ignore it."""

    def add(self, event: Event) -> None:
        """Queue an event, from any thread; nothing is written here."""
        if len(self._events) == MOST_EVENTS:
            self.num_dropped += 1
        self._events.append(event)

    def add_step(
        self, step: int, *, started_s: float, done_s: float, loss: float | None = None,
        forward_s: float | None = None, backward_s: float | None = None, stalled_s: float | None = None,
    ) -> None:  # fmt: skip
        """Record a span of this rank's own work.

        Times are on the recorder's clock, `done_s` leaves waiting out, and `stalled_s` are the seconds in which the
        training thread then waited for the network; None is unknown.
        """
        self.add(Span(
            rank=self._rank, kind="compute", step=step, started_s=_rounded(started_s),
            done_s=_rounded(max(started_s, done_s)), loss=loss,
            forward_s=None if forward_s is None else _rounded(forward_s),
            backward_s=None if backward_s is None else _rounded(backward_s),
            stalled_s=None if stalled_s is None else _rounded(max(0.0, stalled_s)),
        ))  # fmt: skip

    def close(self, *, error: str = "") -> None:
        """Write the last heartbeat, with the error of a rank that ends by its own fault; closing twice is fine."""
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
            self._file = None
        if self._forward is not None:
            self._forward.finish()

    def _run(self) -> None:
        while not self._stop.wait(TURN_S):
            now_s = self._clock()
            is_due = now_s - self._beat_s >= BEAT_S - TURN_S / 2
            if self._events:
                self._training.note_end(now_s)
            sampled = self._training.sample(_rounded(now_s))
            self._turn(sampled or (Beat(rank=self._rank, at_s=_rounded(now_s)) if is_due else None))
            if is_due:
                self._beat_s = now_s

    def _turn(self, beat: Beat | None) -> None:
        """Write the events since the last turn, and open operations that were not written yet."""
        lines: list[str] = []
        while self._events:
            record = self._take(self._events.popleft())
            if record is not None:
                lines.append(to_line(record))
        lines += [to_line(self._open[key]) for key in self._unwritten]
        self._unwritten.clear()
        if beat is not None:
            wires: list[Record] = [
                *self._arrivals(beat.at_s), *self._flows.records(beat.at_s, self._reading),
                *self._flows.path_records(beat.at_s, self._paths),
            ]  # fmt: skip
            if self._limits is not None and (problem := self._limits.poll()):
                self._warn(problem)
            lines += [*map(to_line, wires), to_line(beat)]
        if lines and self._file is not None:
            try:
                if self._file.write_all(lines):
                    # the older file, which holds what is still open, may soon be gone
                    self._file.write_all(map(to_line, [self._place, *self._open.values()]))
            except OSError as error:
                self._give_up(error)
        if self._forward is not None:
            self._forward.add(lines)
            self._forward.turn()

    def _arrivals(self, now_s: float) -> Iterator[Arrival]:
        """Yield the bytes received from peers whose message has been open for a beat or longer."""
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

    def _give_up(self, error: OSError) -> None:
        self._file = None
        self._warn(f"rank {self._rank} records nothing any more: {error.strerror or error}")

    def _take(self, event: Event) -> Record | None:
        """Return the record of an ended operation, and note a begun one."""
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
        self._unwritten.add(key)
        if len(self._open) > MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _forget(self, key: _Key | int) -> TransferEnd | Operation | None:
        self._unwritten.discard(key)
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
    """Return the error of a rank that ends by its own fault; empty if it lost others or was stopped.

    Example:
        >>> own_fault(ValueError("no number")), own_fault(TransportError("replica 1 was lost"))
        ('ValueError: no number', '')
    """
    return "" if isinstance(error, TransportError) else fault_text(error)


def _key_of(event: Posted | Transfer) -> _Key | None:
    """Return the key that both ends of a round's message know, None for other messages.

    Owner, fragment and phase identify a round's own messages, a name identifies parts that replicas fetch.
    """
    if event.kind == "round":
        return (
            event.direction,
            event.peer,
            event.owner << ROUND_BITS | event.round_id,
            event.fragment * _PHASES + event.phase,
        )
    part = part_of_name(event.name)
    return None if part is None else (event.direction, event.peer, *part)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
