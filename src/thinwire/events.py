"""Transfer events: one record a transfer, in a bounded buffer and to any sink.

Nothing here imports torch, so that a log can be read on a machine without it.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

Direction = Literal["sent", "received"]

# Rounds that a schedule makes have lower numbers, those of a run's last word this one or higher.
FIRST_LAST_ROUND = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One end of a message.

    Attributes:
        direction: Seen from the replica that recorded it.
        peer: The other replica.
        kind: Stream that the message belongs to, such as `"round"` or `"setup"`.
        owner: Which of several owners on the transport it belongs to.
        round_id: The round, counted from 0; `fragment` too.
        phase: 0 for a round's first message, 1 for the second of a two-phase exchange.
        name: What was asked for by name, where it was.
    """

    direction: Direction
    peer: int
    kind: str
    round_id: int
    fragment: int
    phase: int
    name: bytes = b""
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(_Message):
    """One message that crossed (or failed to cross) the wire.

    Attributes:
        payload_bytes: Bytes of the codec's payload.
        wire_bytes: Payload and thinwire's own header; the kernel adds its own below.
        started_s: When the transfer was asked for, seconds on the recorder's clock.
        finished_s: When it was done.
        error: What went wrong, or an empty text.
        begun_s: From when on a sender did not wait for the other direction any more; None where it never did.
    """

    payload_bytes: int
    wire_bytes: int
    started_s: float
    finished_s: float
    error: str = ""
    begun_s: float | None = None

    def to_json(self) -> str:
        """Write the record as one JSON line without the line's end; `name` and `begun_s` are left out."""
        values = asdict(self)
        del values["name"], values["begun_s"]
        return json.dumps(values, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted(_Message):
    """One end of a message that was asked for; the `Transfer` of its end holds the outcome.

    Attributes:
        num_bytes: The payload's bytes; for a receiver the most that they can be.
        posted_s: When it was asked for, seconds on the recorder's clock.
    """

    num_bytes: int
    posted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMark:
    """A round was launched at this replica, or its result is there.

    Attributes:
        round_id: The round.
        num_elements: Of the tensor that is exchanged.
        dtype: Of its elements, such as `float32`.
        is_done: Whether the result is there.
        at_s: When, in seconds of `time.monotonic`.
    """

    round_id: int
    num_elements: int
    dtype: str
    is_done: bool
    at_s: float


Sink = Callable[[Transfer], None]
PostSink = Callable[[Posted], None]


class TransferLog:
    """A bounded ring of the latest transfers, running totals, and a stream to sinks. Safe between threads.

    Args:
        capacity: How many records are kept; totals count all.
        sinks: Called with every record, in order; a sink must be quick and must not raise.

    Example:
        >>> log = TransferLog(capacity=2)
        >>> log.totals("sent").wire_bytes
        0
    """

    def __init__(self, *, capacity: int = 65_536, sinks: Iterable[Sink] = ()) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._ring: deque[Transfer] = deque(maxlen=capacity)
        self._sinks = list(sinks)
        self._post_sinks: list[PostSink] = []
        self._totals = {"sent": Totals(), "received": Totals()}
        self._streams: dict[tuple[str, Direction], StreamTotals] = {}
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> None:
        """Keep one record and hand it to the sinks."""
        with self._lock:
            self._ring.append(transfer)
            if not transfer.error:
                self._totals[transfer.direction] = self._totals[transfer.direction].plus(transfer)
                stream = self._stream(transfer)
                stream.totals = stream.totals.plus(transfer)
            for sink in self._sinks:
                sink(transfer)

    def count(self, direction: Direction, kind: str, *, peer: int, num_bytes: int) -> None:
        """Count a message that another library moves, without thinwire's header and without its time."""
        self.add(Transfer(direction=direction, peer=peer, kind=kind, round_id=0, fragment=0, phase=0,
                          payload_bytes=num_bytes, wire_bytes=num_bytes, started_s=0.0, finished_s=0.0))  # fmt: skip

    def add_sink(self, sink: Sink) -> None:
        with self._lock:
            self._sinks.append(sink)

    def post(self, posted: Posted) -> None:
        """Hand on that an end of a message was asked for, and count it as in flight until it is settled."""
        with self._lock:
            stream = self._stream(posted)
            stream.in_flight_bytes += posted.num_bytes
            stream.peak_bytes = max(stream.peak_bytes, stream.in_flight_bytes)
        for sink in self._post_sinks:
            sink(posted)

    def settle(self, posted: Posted) -> None:
        """Count a message as in flight no longer."""
        with self._lock:
            self._stream(posted).in_flight_bytes -= posted.num_bytes

    def streams(self, direction: Direction) -> dict[str, StreamTotals]:
        """Return sums and peaks of one direction by the name of the stream."""
        with self._lock:
            return {name: replace(one) for (name, way), one in self._streams.items() if way == direction}

    def _stream(self, event: _Message) -> StreamTotals:
        return self._streams.setdefault((event.kind, event.direction), StreamTotals())

    def add_post_sink(self, sink: PostSink) -> None:
        """Tell `sink` of all that is asked for later; it may be called from several threads at once."""
        self._post_sinks = [*self._post_sinks, sink]

    def totals(self, direction: Direction) -> Totals:
        """Return the sums over everything ever recorded in one direction, failed transfers left out."""
        with self._lock:
            return self._totals[direction]

    def __iter__(self) -> Iterator[Transfer]:
        with self._lock:
            return iter(list(self._ring))

    def __len__(self) -> int:
        with self._lock:
            return len(self._ring)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over transfers: messages, payload bytes, wire bytes."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def plus(self, transfer: Transfer) -> Totals:
        return Totals(
            messages=self.messages + 1,
            payload_bytes=self.payload_bytes + transfer.payload_bytes,
            wire_bytes=self.wire_bytes + transfer.wire_bytes,
        )


@dataclass(slots=True, kw_only=True)
class StreamTotals:
    """Traffic of one stream in one direction.

    Attributes:
        totals: Sums over its transfers, failed ones left out.
        in_flight_bytes: Payload bytes that were asked for and have not ended.
        peak_bytes: The most of these at any time; for a receiver that takes less, the room for them.
    """

    totals: Totals = Totals()
    in_flight_bytes: int = 0
    peak_bytes: int = 0
