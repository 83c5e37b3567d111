"""Messages between coordinator and replicas on a carrier: all connections go out, and each end polls.

A replica writes its messages, several in one object, as `in/<token>/<number>`; the leader lists and deletes those. The
leader writes batches `out/<term>/<number>` that all read by their expected names, and `out/head`, which names a recent
one. A list of the store is a hint alone: what it leaves out comes later, and what it shows twice is read once.

Polls slow down while nothing comes, and keep to a budget of requests an hour; other requests count in it too.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from thinwire.elastic.carried_blobs import PollBudget, PollPace
from thinwire.elastic.carried_journal import LostLeadership
from thinwire.elastic.protocol import Message, decode, encode
from thinwire.errors import ConnectError, NotThere, PayloadError, ThinwireError, TransportError

if TYPE_CHECKING:
    from thinwire.carriers.base import Carrier
    from thinwire.elastic.coordinator import Coordinator
    from thinwire.transport.secret import Secret

# Budget of each process on a store that is paid for; at list prices about 2 cents an hour where all of it is used.
REQUESTS_PER_HOUR = 7200.0
_LOOK_S, _AGAIN_S = 0.1, 4.0
# Heartbeats alone are written no more often; a replica counts as silent after 20 s.
_BEAT_S = 4.0
# The leader writes a batch at least so often, and the head; after so many seconds with the same head it counts as gone.
_ALIVE_S, _HEAD_S, GONE_S = 3.0, 6.0, 18.0
_HEAD_EVERY = 16
# Batches that stay for readers that are behind; who is further behind goes on at the head.
_KEPT_BATCHES = 64
_MOST_BATCH_BYTES, _MOST_MESSAGES, _MOST_AT_ONCE = 8 << 20, 4096, 256
# Of what lies there for the leader at once, and replicas whose latest batch it remembers.
_MOST_AT_ONCE_BYTES, _MOST_CURSORS = 32 << 20, 4096
# The same message is not sent again sooner: an answer takes several requests.
_REPEAT_S = 8.0
# Of these only the latest counts, and none is worth a request of its own.
_LATEST = frozenset({"beat", "work", "rates", "progress", "pace"})
_TICK_S = 0.25
_DEADLINE_S = 30.0
_TOKEN_BYTES = 16
HEAD = "out/head"
_Number = Annotated[int, Meta(ge=0, lt=1 << 39)]


class Letters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batch of a replica's messages."""

    token: Annotated[bytes, Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    number: _Number
    messages: Annotated[list[bytes], Meta(max_length=2 * _MOST_MESSAGES)]


class MessageBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batch of a leader's messages: by message, the tokens that it is for."""

    term: int
    number: int
    messages: list[tuple[list[bytes], bytes]]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recent batch, from which a new reader begins."""

    term: _Number
    number: _Number
    has_resigned: bool = False  # whoever led has stopped, and another may lead at once


def broadcast_name(term: int, number: int) -> str:
    """Return the name of a batch's object."""
    return f"out/{term:010d}/{number:010d}"


def open_run(uri: str, *, secret: Secret, may_create: bool = False) -> Carrier:
    """Open the place of a run on a carrier, sealed with its secret; runs of other secrets have places of their own.

    Raises:
        ValueError: There is no such carrier, or it writes twice what was to be new.
        ConnectError: There is no run of this secret, and none may be created.
        MissingExtra: What sealing or the store needs is not installed.
    """
    from thinwire.carriers.open import CarrierAddress, folder_of, open_carrier, read_address

    near = read_address(uri).place.rstrip("/")
    place = f"{near}/{secret.derive('thinwire carrier v1 place').hex()[:24]}"
    if near.startswith("file:"):
        folder = folder_of(place)
        if not may_create and not folder.is_dir():
            raise _no_run(near)
        folder.parent.mkdir(parents=True, exist_ok=True)
    address = CarrierAddress(place=place, secret=secret)
    try:
        return open_carrier(address, may_create=may_create, requests_per_hour=REQUESTS_PER_HOUR)
    except NotThere:
        raise _no_run(near) from None


def _no_run(uri: str) -> ConnectError:
    return ConnectError(
        f"there is no run of this secret in {uri}: take the whole address that thinwire train --elastic --via printed, "
        f"and see that the folder or bucket is the same one here"
    )


def _read(carrier: Carrier, name: str, kind: type[Any], *, most_bytes: int = _MOST_BATCH_BYTES) -> Any:
    """Return the decoded object, None where there is none.

    Raises:
        PayloadError: It is no object of this kind.
    """
    try:
        payload = carrier.get(name, most_bytes=most_bytes, deadline_s=_DEADLINE_S)
    except NotThere:
        return None
    try:
        return msgspec.msgpack.decode(bytes(payload.numpy()), type=kind)
    except (ValueError, msgspec.DecodeError) as error:
        raise PayloadError(f"{name} is no object of this thinwire: {str(error)[:120]}") from None


class BroadcastReader:
    """Reads a run's broadcasts in order, and finds the term and batch that are current."""

    def __init__(self, carrier: Carrier, *, budget: PollBudget, now: Callable[[], float] = time.monotonic) -> None:
        self._carrier = carrier
        self._budget = budget
        self._now = now
        self._read_s = self._looked_s = now()
        self.term = self.number = 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last batch."""
        return self._now() - self._read_s

    def read(self) -> Iterator[MessageBatch]:
        """Yield the batches since the last call: one is in memory at a time, and none is lost by an error behind it."""
        if self.term == 0 or (self.silent_s > _ALIVE_S and self._now() - self._looked_s > _ALIVE_S):
            self._find()
        for _ in range(_KEPT_BATCHES if self.term else 0):
            self._budget.spend()
            batch = _read(self._carrier, broadcast_name(self.term, self.number), MessageBatch)
            if batch is None:
                return
            self.number += 1
            self._read_s = self._now()
            if (batch.term, batch.number) == (self.term, self.number - 1):  # else a moved one
                yield batch

    def _find(self) -> None:
        """Go on at the head where that is further than this reader, by a term or by more batches than are kept."""
        self._looked_s = self._now()
        self._budget.spend()
        head = _read(self._carrier, HEAD, Head, most_bytes=1 << 10)
        if head is None:
            return
        is_ahead = head.term > self.term or (head.term == self.term and head.number > self.number + 1)
        # nothing has come for long where this reader is: the head that led it there was wrong
        is_back = self.silent_s > GONE_S and (head.term, head.number + _KEPT_BATCHES) < (self.term, self.number)
        if is_ahead or is_back:
            self.term, self.number = head.term, head.number


class LeaderWatch:
    """Sees whether a leader is there: by its head, which changes, and by this process's clock alone.

    Attributes:
        term: Of the latest head; 0 for none.
    """

    def __init__(
        self, carrier: Carrier, *, budget: PollBudget, gone_s: float = GONE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._carrier, self._budget, self._gone_s, self._now = carrier, budget, gone_s, now
        self._head: Head | None = None
        self._changed_s = now()

    @property
    def term(self) -> int:
        return 0 if self._head is None else self._head.term

    def is_gone(self) -> bool:
        """Look, and return whether there was a leader that has stopped or resigned."""
        self._budget.spend()
        head = _read(self._carrier, HEAD, Head, most_bytes=1 << 10)
        if head != self._head:
            self._head, self._changed_s = head, self._now()
            return head is not None and head.has_resigned
        return self._now() - self._changed_s > self._gone_s

    def begin_again(self) -> None:
        """Give another process time that has claimed a term just now."""
        self._changed_s = self._now()


class MailboxConnection:
    """A replica's or a command's connection to the leader, with a thread of its own; see `CoordinatorConnection`."""

    def __init__(
        self, carrier: Carrier, *, on_message: Callable[[Message], None], on_tick: Callable[[], None] = lambda: None,
        budget: PollBudget | None = None, warn: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.carrier = carrier
        self._on_message, self._on_tick, self._warn = on_message, on_tick, warn
        self.token = b"t" + secrets.token_bytes(_TOKEN_BYTES - 1)
        self.budget = budget or PollBudget(an_hour=carrier.limits().requests_per_hour)
        self._reader = BroadcastReader(carrier, budget=self.budget)
        self._pace = PollPace(self.budget)
        self._lock = threading.Lock()
        self._waiting: dict[bytes, bool] = {}  # by message, whether it is worth a request
        self._latest: dict[str, bytes] = {}
        self._sent_s: dict[bytes, float] = {}
        self._number = 0
        self._written_s = 0.0
        self._problem = ""
        self._is_closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-membership", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message soon; it waits while the store does not answer."""
        raw, now_s = encode(kind, **fields), time.monotonic()
        with self._lock:
            if kind in _LATEST:
                self._latest[kind] = raw
            elif now_s - self._sent_s.get(raw, -_REPEAT_S) >= _REPEAT_S:
                self._sent_s[raw] = now_s
                self._waiting[raw] = True
                self._wake.set()

    def no_answer(self, *, deadline_s: float) -> ConnectError:
        """Return the error of a coordinator that has not answered within `deadline_s`."""
        why = self._problem or (
            "no run has begun there, its last host has gone, or the secret is another one; look at the address that "
            "thinwire train --elastic --via printed"
        )
        return ConnectError(f"no coordinator answered through the carrier within {deadline_s:g} s: {why}")

    def close(self) -> None:
        """Send queued messages, and end the thread; may be called twice."""
        self._is_closing.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        is_down = False
        while True:
            is_last = self._is_closing.is_set()
            try:
                self._flush(is_last=is_last)
                if is_last:
                    return
                if self._pace.is_due:
                    self._receive()
                    self._pace.polled()
                if is_down:
                    is_down, self._problem = False, ""
                    self._warn("the carrier answers again, and the run goes on")
            except ThinwireError as error:  # the store refuses or is gone: nothing is lost, and it is tried again
                self._problem = str(error)
                if is_last:
                    return
                if not is_down:
                    is_down = True
                    self._warn(f"the carrier does not answer, and messages wait: {error}")
                self._is_closing.wait(_AGAIN_S)
            self._on_tick()
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _flush(self, *, is_last: bool) -> None:
        now_s = time.monotonic()
        with self._lock:
            if not self._waiting and (not self._latest or now_s - self._written_s < _BEAT_S) and not is_last:
                return
            is_urgent = bool(self._waiting)
            messages = [*list(self._waiting)[:_MOST_MESSAGES], *self._latest.values()]
            if not messages:
                return
            self._number += 1
            number = self._number
            for old in [raw for raw, sent_s in self._sent_s.items() if now_s - sent_s >= _REPEAT_S]:
                del self._sent_s[old]
        raw = msgspec.msgpack.encode(Letters(token=self.token, number=number, messages=messages))
        self.budget.spend()
        self.carrier.put(f"in/{self.token.hex()}/{number:010d}", raw, only_new=True)
        with self._lock:
            for message in messages:
                self._waiting.pop(message, None)
            self._latest = {kind: found for kind, found in self._latest.items() if found not in messages}
        self._written_s = now_s
        if is_urgent:
            self._pace.hurry()

    def _receive(self) -> None:
        for batch in self._reader.read():
            for tokens, raw in batch.messages:
                if self.token not in tokens:
                    continue
                with contextlib.suppress(PayloadError):  # a leader of another version that has the secret
                    message = decode(raw, to_member=True)
                    if message["kind"] not in _LATEST:
                        self._pace.hurry()
                    self._on_message(message)


class MailboxServer:
    """Serves a coordinator in one term of its leadership; see `CoordinatorServer`.

    Attributes:
        generation: Names this process among the run's coordinators.
    """

    def __init__(
        self, carrier: Carrier, *, term: int, generation: str, say: Callable[[str], None],
        budget: PollBudget | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._carrier, self._term, self._say, self._now = carrier, term, say, now
        self.generation = generation
        self.budget = budget or PollBudget(an_hour=carrier.limits().requests_per_hour, now=now)
        self._pace = PollPace(self.budget, now=now)
        self._outgoing: dict[bytes, dict[bytes, None]] = {}  # by message, the tokens that it is for
        self._latest: dict[tuple[bytes, str], bytes] = {}  # by token and kind
        self._is_urgent = False
        self._number = 0
        self._written_s = self._head_s = -_HEAD_S
        self._cursors: dict[bytes, int] = {}
        self._num_invalid = 0

    def send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        """Send a message with the next batch."""
        raw = encode(kind, **fields)
        if kind in _LATEST:
            self._latest[token, kind] = raw
        else:
            self._outgoing.setdefault(raw, {})[token] = None
            self._is_urgent = True

    def serve(
        self, coordinator: Coordinator, *, until: Callable[[], bool], turn: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Serve until `until` returns true; `turn` is called before each batch, and writes the journal."""
        is_down = False
        while not until():
            try:
                self.step(coordinator, turn=turn)
                if is_down:
                    is_down = False
                    self._say("the carrier answers again, and the run goes on")
                time.sleep(_LOOK_S)
            except LostLeadership:
                raise
            except TransportError as error:  # what was read is deleted after it was acted on: nothing is lost
                if not is_down:
                    is_down = True
                    self._say(f"the carrier does not answer, and the run waits: {error}")
                time.sleep(_AGAIN_S)

    def step(self, coordinator: Coordinator, *, turn: Callable[[], None]) -> None:
        """Read what has come if that is due, act on it, and write what follows."""
        now_s = self._now()
        read = self._receive(coordinator, now_s=now_s) if self._pace.is_due else []
        coordinator.tick(now_s)
        turn()
        self.flush()
        if read:  # what follows from them is written
            self.budget.spend()
            self._carrier.delete(read)

    def flush(self, *, has_resigned: bool = False) -> None:
        """Write a batch where there is something to say, or nothing was said for a while."""
        now_s = self._now()
        if not self._is_urgent and now_s - self._written_s < _ALIVE_S and not has_resigned:
            return
        for (token, _), raw in self._latest.items():
            self._outgoing.setdefault(raw, {})[token] = None
        batch = MessageBatch(
            term=self._term, number=self._number,
            messages=[(list(tokens), raw) for raw, tokens in self._outgoing.items()],
        )  # fmt: skip
        name = broadcast_name(self._term, self._number)
        self.budget.spend()
        if not self._carrier.put(name, msgspec.msgpack.encode(batch), only_new=True):
            self._number += 1  # an earlier attempt got there without an answer; the messages go into the next one
            return
        self._outgoing, self._latest, self._is_urgent = {}, {}, False
        self._written_s = now_s
        if self._number % _HEAD_EVERY == 0 or now_s - self._head_s >= _HEAD_S or has_resigned:
            self._head_s = now_s
            head = msgspec.msgpack.encode(Head(term=self._term, number=self._number, has_resigned=has_resigned))
            self.budget.spend()
            self._carrier.put(HEAD, head, only_new=False)
        self._number += 1
        if self._number % _HEAD_EVERY == 0 and (last := self._number - _KEPT_BATCHES) > 0:
            self.budget.spend()
            self._carrier.delete([broadcast_name(self._term, one) for one in range(max(0, last - _HEAD_EVERY), last)])

    def _receive(self, coordinator: Coordinator, *, now_s: float) -> list[str]:
        """Act on what replicas wrote; return its names."""
        self.budget.spend()
        turns: Counter[str] = Counter()
        # one of each replica first, so that none is kept waiting by the many of another
        entries = sorted(
            (turns.update([folder := one.name.rpartition("/")[0]]) or turns[folder], one)
            for one in self._carrier.listing("in")
        )
        read, found, left_bytes = [], [], _MOST_AT_ONCE_BYTES
        for _, entry in entries[:_MOST_AT_ONCE]:
            left_bytes -= min(entry.num_bytes, _MOST_BATCH_BYTES)
            if left_bytes < 0:
                break
            self.budget.spend()
            try:
                letters = _read(self._carrier, entry.name, Letters)
            except PayloadError as error:
                self._invalid(str(error))
                letters = None
            read.append(entry.name)
            if letters is not None and letters.number > self._cursors.get(letters.token, 0):
                found.append(letters)
        for letters in sorted(found, key=lambda one: one.number):
            self._cursors.pop(letters.token, None)
            self._cursors[letters.token] = letters.number
            while len(self._cursors) > _MOST_CURSORS:  # of those that have not written for the longest
                del self._cursors[next(iter(self._cursors))]
            for raw in letters.messages[:_MOST_MESSAGES]:
                self._handle(coordinator, letters.token, raw, now_s=now_s)
        self._pace.polled()
        return read

    def _handle(self, coordinator: Coordinator, token: bytes, raw: bytes, *, now_s: float) -> None:
        try:
            message = decode(raw, to_member=False)
            if message["kind"] not in _LATEST:
                self._pace.hurry()
            coordinator.handle(token, message, now_s=now_s)
        except PayloadError as error:
            self._invalid(f"a replica sent {error}")

    def _invalid(self, text: str) -> None:
        self._num_invalid += 1
        if self._num_invalid <= 16:
            self._say(text[:300])
