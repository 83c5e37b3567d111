"""Blobs of replicas on a carrier: a replica uploads each of its own once, and others get it by its name.

There are no connections between replicas. A blob that is not there yet is asked for again, slower and slower, within
the budget of requests. Bulk yields to all other uploads.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from thinwire.errors import NotThere, PayloadError, ThinwireError, TransportError
from thinwire.transport.base import Envelope, Received, Response, TransferFuture
from thinwire.transport.streams import BLOBS
from thinwire.transport.wire.transfer import IS_THERE

if TYPE_CHECKING:
    import torch

    from thinwire.carriers.base import Carrier
    from thinwire.events import TransferLog

_LEAST_POLL_S, _MOST_POLL_S, _GROWTH = 0.2, 4.0, 1.5
# Blobs that are fetched at once: on a store far away one transfer alone does not fill the link.
_NUM_GETS = 4
_DEADLINE_S = 600.0
_BULK, _PARTS = 1, 0


class PollBudget:
    """Requests of one process: what must be sent is counted, and polls wait until the budget has room for them.

    Args:
        an_hour: Requests an hour; infinite for a carrier that costs nothing.
        now: Clock in seconds that never goes back.

    Example:
        >>> clock = iter([0.0, 0.0, 0.0, 100.0, 101.0])
        >>> budget = PollBudget(an_hour=3600, now=lambda: next(clock))
        >>> budget.spend(400)
        >>> budget.wait_s(), budget.wait_s()  # 300 are there at once, 1 more each second
        (101.0, 1.0)
        >>> budget.wait_s(), budget.num_spent
        (0.0, 400)
    """

    _AT_ONCE_S = 300.0

    def __init__(self, *, an_hour: float, now: Callable[[], float] = time.monotonic) -> None:
        # a bucket that is never empty stands for no limit
        self._a_second = min(an_hour, 1e12) / 3600
        self._left = self._AT_ONCE_S * self._a_second
        self._now = now
        self._at_s = now()
        self._lock = threading.Lock()
        self.num_spent = 0

    def spend(self, count: int = 1) -> None:
        with self._lock:
            self._refill()
            self._left -= count
            self.num_spent += count

    def wait_s(self) -> float:
        """Return the seconds until a poll has room."""
        with self._lock:
            self._refill()
            return max(0.0, (1 - self._left) / self._a_second)

    def _refill(self) -> None:
        now_s = self._now()
        self._left = min(self._AT_ONCE_S * self._a_second, self._left + (now_s - self._at_s) * self._a_second)
        self._at_s = now_s


class PollPace:
    """Times of polls: quick after something came or was asked, then slower and slower, within the budget."""

    def __init__(self, budget: PollBudget, *, now: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._now = now
        self._interval_s = _LEAST_POLL_S
        self.due_s = -math.inf

    @property
    def is_due(self) -> bool:
        return self._now() >= self.due_s

    def hurry(self) -> None:
        self._interval_s = _LEAST_POLL_S
        self.due_s = min(self.due_s, self._now() + _LEAST_POLL_S)

    def polled(self) -> None:
        """Set the next poll's time."""
        self.due_s = self._now() + max(self._interval_s, self._budget.wait_s())
        self._interval_s = min(_MOST_POLL_S, self._interval_s * _GROWTH)


class _Get(TransferFuture):
    """A blob that is asked for until it is there."""

    def __init__(self, *, source: int, name: bytes, most_bytes: int, drop: Callable[[_Get], None]) -> None:
        self.envelope = Envelope(stream=BLOBS, key=(0,))
        super().__init__(peer_name=f"replica {source}", envelope=self.envelope, verb="upload")
        self.name, self.most_bytes = name, most_bytes
        self._drop = drop

    def describe(self) -> str:
        return f"blob {ascii(self.name)[1:]}"

    def give(self, payload: torch.Tensor) -> None:
        self._received = Received(payload=payload, note=IS_THERE)
        self._end(None)

    def fail(self, error: TransportError) -> None:
        self._end(error)

    def cancel(self) -> None:
        self._drop(self)
        self._end(TransportError(f"{self.describe()} is not wanted any more"))


class CarriedBlobs:
    """A `RequestTransport` whose requests are answered by a carrier, and a `BlobMirror` that uploads to it.

    Args:
        carrier: Where the blobs lie.
        replica: Number of this replica.
        num_replicas: Planned replicas.
        budget: Requests of this process.
        uploads_bulk: Returns whether bulk is uploaded from here: all holders have the same, and one does it.
        warn: Called once while the carrier does not answer.

    Attributes:
        uploads_bulk: As given; set once the replica knows the others.
        log: Takes a record of each upload, if there is one.
    """

    runs_in_background = True

    def __init__(
        self, carrier: Carrier, *, replica: int, num_replicas: int, budget: PollBudget,
        uploads_bulk: Callable[[], bool] = lambda: True, warn: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.on_request: Callable[[int, int, bytes], None] | None = None
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_lost: Callable[[int], None] | None = None
        self.log: TransferLog | None = None
        self.replica, self.num_replicas = replica, num_replicas
        self.uploads_bulk = uploads_bulk
        self._carrier, self._budget, self._warn = carrier, budget, warn
        self._changed = threading.Condition()
        self._wanted: dict[bytes, list[_Get]] = {}
        self._paces: dict[bytes, PollPace] = {}
        self._under_way: set[bytes] = set()
        self._fetched: dict[bytes, None] = {}
        self._uploads: list[tuple[int, int, bytes, torch.Tensor | None]] = []  # a heap; None deletes
        self._uploaded: dict[bytes, None] = {}
        self._order = itertools.count()
        self._is_closed = self._is_down = False
        self._threads = [
            threading.Thread(target=target, name=f"thinwire-carrier-{name}", daemon=True)
            for name, target in (
                *((f"get-{index}", self._get_all) for index in range(_NUM_GETS)),
                ("put", self._put_all),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- requests

    def request(self, source: int, name: bytes, *, most_bytes: int) -> _Get:
        found = _Get(source=source, name=name, most_bytes=most_bytes, drop=self._drop)
        with self._changed:
            self._wanted.setdefault(name, []).append(found)
            self._paces.setdefault(name, PollPace(self._budget))
            self._changed.notify_all()
        return found

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> Response:
        raise self._no_messages()

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Response:
        raise self._no_messages()

    def receive(self, *, source: int, envelope: Envelope) -> Response:
        raise self._no_messages()

    def reading(self, peer: int) -> None:
        """Return None: there are no connections between replicas."""

    def connections(self) -> Mapping[int, None]:
        return {}

    def close(self) -> None:
        """Finish uploads under way, and end the threads; those that wait fail."""
        with self._changed:
            self._is_closed = True
            left = [one for wanted in self._wanted.values() for one in wanted]
            self._wanted.clear()
            self._changed.notify_all()
        for one in left:
            one.fail(TransportError(f"the blob store was closed while {one.describe()} was waited for"))
        for thread in self._threads:
            thread.join(timeout=10)

    def _no_messages(self) -> ValueError:
        return ValueError("replicas on a carrier publish blobs and send each other no messages; use BlobStore")

    def _drop(self, one: _Get) -> None:
        with self._changed:
            wanted = self._wanted.get(one.name, [])
            if one in wanted:
                wanted.remove(one)
            if not wanted:
                self._wanted.pop(one.name, None)
                self._paces.pop(one.name, None)

    def _get_all(self) -> None:
        while True:
            with self._changed:
                name = self._next_due()
                while name is None:
                    if self._is_closed:
                        return
                    due_s = min(
                        (self._paces[one].due_s for one in self._wanted if one not in self._under_way), default=None
                    )
                    self._changed.wait(None if due_s is None else max(0.01, due_s - time.monotonic()))
                    name = self._next_due()
                self._under_way.add(name)
                most_bytes = max(one.most_bytes for one in self._wanted[name])
            payload, failure = None, None
            self._budget.spend()
            try:
                payload = self._carrier.get(_object_name(name), most_bytes=most_bytes, deadline_s=_DEADLINE_S)
            except NotThere:
                self._answered()
            except PayloadError as error:
                failure = error
            except ThinwireError as error:
                self._down(error)
            else:
                self._answered()
            self._settle(name, payload, failure)

    def _settle(self, name: bytes, payload: torch.Tensor | None, failure: PayloadError | None) -> None:
        with self._changed:
            self._under_way.discard(name)
            ended: list[_Get] = []
            if payload is None and failure is None:
                if name in self._paces:
                    self._paces[name].polled()
            else:
                ended = self._wanted.pop(name, [])
                self._paces.pop(name, None)
                if payload is not None:
                    self._remember(self._fetched, name)
            self._changed.notify_all()
        for one in ended:
            if payload is not None and payload.numel() <= one.most_bytes:
                one.give(payload)
            else:
                one.fail(failure or PayloadError(f"{one.describe()} is larger than {one.most_bytes} bytes"))

    def _next_due(self) -> bytes | None:
        free = (name for name in self._wanted if name not in self._under_way and self._paces[name].is_due)
        return next(free, None)

    # -- uploads

    def put(self, name: bytes, payload: torch.Tensor, *, is_bulk: bool) -> None:
        """Upload a blob soon, unless it came from the carrier."""
        with self._changed:
            if name not in self._fetched and (not is_bulk or self.uploads_bulk()):
                self._remember(self._uploaded, name)
                heapq.heappush(self._uploads, (int(is_bulk), next(self._order), name, payload))
                self._changed.notify_all()

    def remove(self, name: bytes) -> None:
        """Delete a blob soon that was uploaded from here."""
        with self._changed:
            if name in self._uploaded:
                del self._uploaded[name]
                heapq.heappush(self._uploads, (_BULK, next(self._order), name, None))
                self._changed.notify_all()

    def _put_all(self) -> None:
        while True:
            with self._changed:
                while not self._uploads:
                    if self._is_closed:
                        return
                    self._changed.wait()
                _, _, name, payload = task = heapq.heappop(self._uploads)
                names = [name]
                while payload is None and self._uploads and self._uploads[0][3] is None:
                    names.append(heapq.heappop(self._uploads)[2])
            self._budget.spend()
            began_s = time.monotonic()
            try:
                if payload is None:
                    self._carrier.delete([_object_name(one) for one in names])
                else:
                    self._carrier.put(_object_name(name), payload, only_new=True)
                    self._record(name, payload.numel(), began_s)
                self._answered()
            except ThinwireError as error:  # tried again: nothing is lost while the store does not answer
                self._down(error)
                with self._changed:
                    if self._is_closed:
                        return
                    if payload is not None:
                        heapq.heappush(self._uploads, task)
                    self._changed.wait(_MOST_POLL_S)

    def _record(self, name: bytes, num_bytes: int, began_s: float) -> None:
        from thinwire.events import Transfer
        from thinwire.transport.message import HEADER_BYTES

        if self.log is not None:
            self.log.add(Transfer(
                direction="sent", peer=self.replica, kind=BLOBS.name, owner=0, round_id=0, fragment=0, phase=0,
                payload_bytes=num_bytes, wire_bytes=HEADER_BYTES + num_bytes, started_s=began_s,
                finished_s=time.monotonic(), name=name,
            ))  # fmt: skip

    def _down(self, error: ThinwireError) -> None:
        if not self._is_down:
            self._is_down = True
            self._warn(f"the carrier does not answer, and parts wait: {error}")

    def _answered(self) -> None:
        if self._is_down:
            self._is_down = False
            self._warn("the carrier answers again, and parts go on")

    @staticmethod
    def _remember(names: dict[bytes, None], name: bytes) -> None:
        names[name] = None
        while len(names) > 1 << 16:
            del names[next(iter(names))]


def _object_name(name: bytes) -> str:
    return f"blobs/{base64.b32encode(name).decode().rstrip('=').lower()}"
