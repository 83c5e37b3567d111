"""Named blobs that replicas pull from each other: each publishes its own, and the others request them by name.

A request for a blob that is not published yet waits at its replica, and is answered upon publication. A blob is held
once, however many replicas request it. Bulk answers yield to all others, but never starve.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from thinwire.errors import NotThere, TransportError
from thinwire.transport.base import Envelope, Received, Request, RequestTransport, TransferFuture
from thinwire.transport.streams import BLOBS
from thinwire.transport.wire.flow_control import ReceiveWindow
from thinwire.transport.wire.transfer import IS_THERE

# Bulk responses in flight: the least on a slow link, more on a distant one as long as that raises the rate.
LEAST_BULK, MOST_BULK = 2, 8
# Longest time that other responses may hold bulk back.
LONGEST_HOLD_S = 1.0
# A response that takes longer continues, but does not count any more: a stuck replica must not delay the others.
LONGEST_PLACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRequest:
    """A request of another replica."""

    peer: int
    number: int
    name: bytes = field(compare=False)


class SendScheduler:
    """Scheduler of responses: bulk yields to all others, but never starves; replicas take turns.

    A bulk response starts if fewer than a window of them are in flight, and no other response is. While others are in
    flight, one bulk response at a time starts after `LONGEST_HOLD_S` without bulk in flight.

    Example:
        >>> scheduler = SendScheduler()
        >>> scheduler.begin_other()
        >>> scheduler.add(BlobRequest(peer=3, number=0, name=b"state/0"), now_s=0.0)
        >>> scheduler.next_bulk(now_s=0.5), scheduler.due_s()
        (None, 1.0)
        >>> scheduler.end_other()
        >>> scheduler.next_bulk(now_s=0.5).name
        b'state/0'
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[BlobRequest]] = {}
        self._began_s: dict[BlobRequest, float] = {}
        self._window = ReceiveWindow(least=LEAST_BULK, most=MOST_BULK)  # in responses, not bytes
        self._others = 0
        self._held_since_s = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(len(orders) for orders in self._waiting.values())

    def add(self, order: BlobRequest, *, now_s: float) -> None:
        if not self._waiting and not self._began_s:
            self._held_since_s = now_s
        self._waiting.setdefault(order.peer, deque()).append(order)

    def begin_other(self) -> None:
        """Count a response in flight that is not bulk."""
        self._others += 1

    def end_other(self) -> None:
        self._others -= 1

    def next_bulk(self, *, now_s: float) -> BlobRequest | None:
        """Return the bulk response that may start now, and count it as in flight; None if none may."""
        due_s = self.due_s(now_s=now_s)
        if due_s is None or due_s > now_s:
            return None
        peer = next(iter(self._waiting))
        orders = self._waiting.pop(peer)
        order = orders.popleft()
        if orders:
            self._waiting[peer] = orders  # behind the others
        self._began_s[order] = now_s
        return order

    def end_bulk(self, order: BlobRequest, *, now_s: float) -> None:
        del self._began_s[order]
        self._held_since_s = now_s
        if self._others or not self._waiting:
            self._window.pause()  # the rate would not be the link's
        else:
            self._window.observe(1, now_s=now_s)

    def drop(self, order: BlobRequest) -> bool:
        """Drop a bulk response that waits; return whether there was one."""
        orders = self._waiting.get(order.peer)
        if orders is None or order not in orders:
            return False
        orders.remove(order)
        if not orders:
            del self._waiting[order.peer]
        return True

    def drop_all_of(self, peer: int) -> None:
        self._waiting.pop(peer, None)

    def due_s(self, *, now_s: float = 0.0) -> float | None:
        """Return when the next bulk response may start if nothing else happens, None if none waits."""
        if not self._waiting:
            return None
        places_s = sorted(began_s + LONGEST_PLACE_S for began_s in self._began_s.values())
        current_s = [place_s for place_s in places_s if place_s > now_s]
        allowed = 1 if self._others else self._window.num_bytes
        if len(current_s) >= allowed:
            return current_s[len(current_s) - allowed]
        if self._others:
            return self._held_since_s + LONGEST_HOLD_S
        return now_s


# Names of withdrawn blobs that are kept; `is_past` covers older ones.
MOST_WITHDRAWN = 1 << 16
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blob:
    payload: torch.Tensor
    crc: int
    is_bulk: bool


class _LocalRequest(TransferFuture):
    """Request of this replica for a blob that it will publish itself."""

    def __init__(self, *, replica: int, name: bytes, leave: Callable[[_LocalRequest], bool]) -> None:
        self.envelope = Envelope(stream=BLOBS, key=(0,))
        super().__init__(peer_name=f"replica {replica}", envelope=self.envelope, verb="publish")
        self.name = name
        self._stop_waiting = leave

    def describe(self) -> str:
        return f"blob {ascii(self.name)[1:]}"

    def give(self, payload: torch.Tensor | None) -> None:
        found = _NOTHING if payload is None else payload
        self._received = Received(payload=found, note=b"" if payload is None else IS_THERE)
        self._end(None)

    def cancel(self) -> None:
        self._stop_waiting(self)
        self._end(TransportError(f"{self.describe()} is not wanted any more"))

    def close(self) -> None:
        self._end(TransportError(f"the blob store was closed while {self.describe()} was waited for"))


class BlobFetch:
    """Fetch of a blob from a replica's store."""

    def __init__(self, *, source: int, name: bytes, ask: Request) -> None:
        self.source = source
        self.name = name
        self._ask = ask

    def done(self) -> bool:
        return self._ask.done()

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        """Wait for the blob; after a time-out it may be called again.

        Returns:
            The payload, uint8, `(payload_bytes,)`; it must not be written to.

        Raises:
            DeadlineExceeded: It has not arrived in time.
            NotThere: The replica does not have it, and will not.
            PeerLost: The connection broke, or the replica is not in the set.
            PayloadError: It is damaged, or larger than it may be.
        """
        received = self._ask.wait(deadline_s=deadline_s)
        assert received is not None, "an ask ends with a message"
        if not any(received.note):
            raise NotThere(f"replica {self.source} does not have blob {ascii(self.name)[1:]}, and will not have it")
        return received.payload

    def cancel(self) -> None:
        self._ask.cancel()

    def on_finish(self, callback: Callable[[], None]) -> None:
        self._ask.on_finish(callback)


class BlobMirror(Protocol):
    """Place where published blobs are copied to, for transports whose replicas do not ask each other."""

    def put(self, name: bytes, payload: torch.Tensor, *, is_bulk: bool) -> None:
        """Copy a blob soon; it does not change until `remove`."""
        ...

    def remove(self, name: bytes) -> None:
        """Delete the copy soon, if there is one."""
        ...


class BlobStore:
    """Blobs of this replica for others, and access to theirs. Thread-safe.

    Args:
        transport: Carries requests and responses; the store sets its `on_request`, `on_cancel` and `on_lost`. Make the
            store before others can send requests.
        is_past: Returns whether an unpublished name will never be published, so that no replica waits for it; called
            from the transport's thread, it must be quick.
        mirror: Takes a copy of each blob; None where others request them here.

    Example:
        >>> from thinwire.transport.secret import Secret
        >>> from thinwire.transport.wire.wire_transport import WireTransport
        >>> transport = WireTransport(
        ...     replica=7, num_replicas=4, secret=Secret(key=bytes(32)), address="127.0.0.1", is_open=True
        ... )
        >>> library = BlobStore(transport)
        >>> library.publish(b"round/0", torch.arange(3, dtype=torch.uint8))
        >>> library.get(7, b"round/0", most_bytes=100).wait(deadline_s=1)  # its own need no wire
        tensor([0, 1, 2], dtype=torch.uint8)
        >>> library.num_bytes
        3
        >>> library.close(), transport.close()
        (None, None)
    """

    def __init__(
        self, transport: RequestTransport, *, is_past: Callable[[bytes], bool] = lambda name: False,
        mirror: BlobMirror | None = None,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._is_past = is_past
        self._mirror = mirror
        self._lock = threading.RLock()
        self._blobs: dict[bytes, _Blob] = {}
        self._withdrawn: dict[bytes, None] = {}
        self._waiting: dict[bytes, dict[BlobRequest | _LocalRequest, None]] = {}
        self._requests: dict[tuple[int, int], BlobRequest] = {}
        self._scheduler = SendScheduler()
        self._timer: threading.Timer | None = None
        self._timer_s = math.inf
        self._is_starting = False
        self._is_closed = False
        self._bulk_wanted_s = -math.inf
        transport.on_request = self._on_peer_request
        transport.on_cancel = self._on_peer_cancel
        transport.on_lost = self._on_peer_lost

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads that are published now."""
        with self._lock:
            return sum(blob.payload.numel() for blob in self._blobs.values())

    @property
    def bulk_unwanted_s(self) -> float:
        """Seconds since the last request of another replica for bulk that is here; infinite without one."""
        return time.monotonic() - self._bulk_wanted_s

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a publication, and queued bulk responses."""
        with self._lock:
            return sum(len(asks) for asks in self._waiting.values()) + self._scheduler.num_waiting

    @property
    def is_past(self) -> Callable[[bytes], bool]:
        return self._is_past

    @is_past.setter
    def is_past(self, is_past: Callable[[bytes], bool]) -> None:
        self._is_past = is_past
        self.forget_past()

    def publish(self, name: bytes, payload: torch.Tensor, *, is_bulk: bool = False) -> None:
        """Publish a blob, and answer the requests that wait for it.

        Args:
            name: 1 to 64 bytes that never name another blob.
            payload: uint8, `(payload_bytes,)`, contiguous, on the CPU; it is not copied, and must not change until it
                is withdrawn and its transfers have ended.
            is_bulk: Whether its responses yield to those of other blobs.

        Raises:
            ValueError: The payload is of another kind, or the name is published already.
        """
        is_plain = payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous()
        if not is_plain or payload.device.type != "cpu":
            raise ValueError(
                f"a blob's payload must be uint8, one-dimensional, contiguous and on the CPU, got {payload.dtype} of "
                f"shape {tuple(payload.shape)} on {payload.device}"
            )
        blob = _Blob(payload=payload, crc=zlib.crc32(payload.numpy().data), is_bulk=is_bulk)
        with self._lock:
            if name in self._blobs:
                raise ValueError(f"blob {ascii(name)[1:]} is published already; withdraw it first")
            self._withdrawn.pop(name, None)
            self._blobs[name] = blob
            asks = self._waiting.pop(name, {})
        if self._mirror is not None:
            self._mirror.put(name, payload, is_bulk=is_bulk)
        self._serve(asks, blob)

    def withdraw(self, name: bytes) -> None:
        """Withdraw a blob: later requests are answered without it; transfers in flight go on."""
        with self._lock:
            self._blobs.pop(name, None)
            self._withdrawn[name] = None
            while len(self._withdrawn) > MOST_WITHDRAWN:
                del self._withdrawn[next(iter(self._withdrawn))]
            asks = self._waiting.pop(name, {})
        if self._mirror is not None:
            self._mirror.remove(name)
        self._serve(asks, None)

    def forget_past(self) -> None:
        """Withdraw all blobs that are past now, and answer requests for past names without a blob."""
        with self._lock:
            past = [name for name in (*self._blobs, *self._waiting) if self._is_past(name)]
            for name in past:
                self._blobs.pop(name, None)
            asks = [ask for name in past for ask in self._waiting.pop(name, {})]
        if (mirror := self._mirror) is not None:
            for name in past:
                mirror.remove(name)
        self._serve(asks, None)

    def get(self, source: int, name: bytes, *, most_bytes: int) -> BlobFetch:
        """Request a blob of a replica, which may be this one, of at most so many bytes.

        Raises:
            ValueError: There is no such replica, or the name is too short or too long.
        """
        if source != self._transport.replica:
            ask = self._transport.request(source, name, most_bytes=most_bytes)
            return BlobFetch(source=source, name=name, ask=ask)
        own = _LocalRequest(replica=source, name=name, leave=self._stop_waiting)
        self._find(name, own)
        return BlobFetch(source=source, name=name, ask=own)

    def close(self) -> None:
        """Answer no more requests, and fail those that wait here; the transport stays."""
        with self._lock:
            self._is_closed = True
            self._transport.on_request = self._transport.on_cancel = self._transport.on_lost = None
            waiting = [ask for asks in self._waiting.values() for ask in asks]
            for kept in (self._waiting, self._blobs, self._requests):
                kept.clear()
            if self._timer is not None:
                self._timer.cancel()
        for ask in waiting:
            if isinstance(ask, _LocalRequest):
                ask.close()
            else:
                self._respond(ask, None)

    def _find(self, name: bytes, ask: BlobRequest | _LocalRequest) -> None:
        with self._lock:
            blob = self._blobs.get(name)
            if blob is None and name not in self._withdrawn and not self._is_past(name) and not self._is_closed:
                self._waiting.setdefault(name, {})[ask] = None
                return
        self._serve([ask], blob)

    def _stop_waiting(self, ask: BlobRequest | _LocalRequest) -> bool:
        with self._lock:
            asks = self._waiting.get(ask.name, {})
            if ask not in asks:
                return False
            del asks[ask]
            if not asks:
                del self._waiting[ask.name]
            return True

    def _on_peer_request(self, peer: int, number: int, name: bytes) -> None:
        order = BlobRequest(peer=peer, number=number, name=name)
        with self._lock:
            self._requests[(peer, number)] = order
        self._find(name, order)

    def _on_peer_cancel(self, peer: int, number: int) -> None:
        with self._lock:
            order = self._requests.get((peer, number))
            waits = order is not None and (self._stop_waiting(order) or self._scheduler.drop(order))
        if order is not None and waits:
            self._serve([order], None)

    def _on_peer_lost(self, peer: int) -> None:
        with self._lock:
            for order in [order for order in self._requests.values() if order.peer == peer]:
                self._stop_waiting(order)
                del self._requests[(peer, order.number)]
            self._scheduler.drop_all_of(peer)

    def _serve(self, asks: Iterable[BlobRequest | _LocalRequest], blob: _Blob | None) -> None:
        for ask in asks:
            if isinstance(ask, _LocalRequest):
                ask.give(None if blob is None else blob.payload)
            else:
                self._respond(ask, blob)
        self._start_bulk()

    def _respond(self, ask: BlobRequest, blob: _Blob | None) -> None:
        with self._lock:
            if blob is not None and blob.is_bulk:
                self._bulk_wanted_s = time.monotonic()
                self._scheduler.add(ask, now_s=self._bulk_wanted_s)
                return
            self._requests.pop((ask.peer, ask.number), None)
            if blob is not None:
                self._scheduler.begin_other()
        if blob is None:
            self._transport.respond(ask.peer, ask.number, _NOTHING, is_there=False)
        else:

            def end() -> None:
                with self._lock:
                    self._scheduler.end_other()
                self._start_bulk()

            self._transport.respond(ask.peer, ask.number, blob.payload, crc=blob.crc).on_finish(end)

    def _start_bulk(self) -> None:
        with self._lock:
            if self._is_starting:  # by another thread, or by a caller of this one: a response may end at once
                return
            self._is_starting = True
        while True:
            with self._lock:
                order = self._scheduler.next_bulk(now_s=time.monotonic())
                if order is None:
                    self._is_starting = False
                    self._wake_when_due()
                    return
                self._requests.pop((order.peer, order.number), None)
                blob = self._blobs.get(order.name)
            payload, crc = (_NOTHING, None) if blob is None else (blob.payload, blob.crc)
            answer = self._transport.respond(order.peer, order.number, payload, is_there=blob is not None, crc=crc)
            answer.on_finish(partial(self._end_bulk, order))

    def _end_bulk(self, order: BlobRequest) -> None:
        with self._lock:
            self._scheduler.end_bulk(order, now_s=time.monotonic())
        self._start_bulk()

    def _wake_when_due(self) -> None:
        now_s = time.monotonic()
        due_s = self._scheduler.due_s(now_s=now_s)
        if due_s is None or due_s >= self._timer_s or self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()

        def wake() -> None:
            with self._lock:
                if threading.current_thread() is self._timer:
                    self._timer, self._timer_s = None, math.inf
            self._start_bulk()

        self._timer, self._timer_s = threading.Timer(max(0.0, due_s - now_s), wake), due_s
        self._timer.daemon = True
        self._timer.start()
