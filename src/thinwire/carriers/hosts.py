"""Carrier on several hosts that run `thinwire store`: what a majority holds outlives any minority.

A small value lies on all of them, and is written once by `thinwire.carriers.majority`. A large one lies on one host,
with its size and hash in such a value: it is gone with that host, as a part of a round is with its replica.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.carriers.base import (
    Carrier,
    CarrierCost,
    CostMeter,
    Entry,
    Limits,
    Payload,
    as_bytes,
    as_tensor,
    check_name,
    check_size,
)
from thinwire.carriers.host_store import (
    MOST_NAMES,
    MOST_VALUE_BYTES,
    PIECE_BYTES,
    StoreAnswer,
    StoreRequest,
    caller_keys,
    set_store_socket_options,
    store_keys,
)
from thinwire.carriers.majority import BallotAttempt, majority_of, settled
from thinwire.errors import DeadlineExceeded, NotThere, PayloadError, TransportError, refusal
from thinwire.transport.addresses import Address, host_port, needs_ipv6
from thinwire.transport.secret import Secret
from thinwire.transport.wire.zeromq import zmq

MOST_HOSTS = 9
# Time for one exchange with the hosts, from measured ones; and for an operation with all its tries.
_LEAST_S, _MOST_S, _OPERATION_S = 0.5, 10.0, 20.0
_CLOCK_S = 60.0
_REDIAL_MS, _LONGEST_REDIAL_MS = 100, 2000
_NONCE_BYTES = 16
_INLINE, _ELSEWHERE = 0, 1
_Enough = Callable[[Mapping[int, StoreAnswer]], bool]


class _Elsewhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place of a large blob."""

    host: int
    blob: str
    num_bytes: int
    sha256: bytes


class HostsCarrier(Carrier):
    """The store of several hosts, as one member reaches it.

    Args:
        hosts: Addresses of all of them, in one order for all members; 3 outlive the loss of one, 5 of two.
        secret: The run's.
        folder: Where all names of this carrier lie; runs with different ones do not meet.
        home: Index of the host that keeps this member's large blobs; by default each of them is tried.

    Raises:
        ValueError: Too many hosts, none, or one twice.
    """

    def __init__(
        self, hosts: Sequence[Address], *, secret: Secret, folder: str = "", home: int | None = None
    ) -> None:  # fmt: skip
        if not 1 <= len(hosts) <= MOST_HOSTS or len(set(hosts)) < len(hosts):
            raise refusal("these are no hosts of a store", got=len(hosts), allowed=f"1 to {MOST_HOSTS} different ones",
                          remedy="three hosts that each run thinwire store")  # fmt: skip
        self._folder = check_name(folder) + "/" if folder else ""
        self._where = [host_port(one.host, one.port) for one in hosts]
        self._connections = _HostConnections(hosts, secret=secret)
        self._meter = CostMeter()
        self._clock: tuple[float, float] | None = None
        order = list(range(len(hosts)))
        random.shuffle(order)
        self._homes = order if home is None else [home]

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        check_name(name)
        data, nonce = as_bytes(payload), secrets.token_bytes(_NONCE_BYTES)
        if len(data) + 64 <= MOST_VALUE_BYTES:
            own, elsewhere = bytes([_INLINE]) + nonce + len(data).to_bytes(8, "big") + bytes(data), None
        else:
            if only_new and self._value(name) is not None:
                self._meter.count("put")
                return False
            elsewhere = self._store(data)
            own = bytes([_ELSEWHERE]) + nonce + len(data).to_bytes(8, "big") + msgspec.msgpack.encode(elsewhere)
        before = None if only_new else self._value(name)
        chosen = self._attempt(name, own, replaces=not only_new)
        self._meter.count("put", sent_bytes=len(own) * len(self._where) + (len(data) if elsewhere else 0))
        unneeded = elsewhere if chosen != own else None if before is None else _elsewhere(before, name, self._where)
        if unneeded is not None:
            self._drop(unneeded)
        return chosen == own

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        value = self._value(check_name(name), deadline_s=deadline_s)
        if value is None:
            self._meter.count("get")
            raise NotThere(f"there is no blob {name} on the hosts of the store now")
        check_size(name, _size(value, name), most_bytes=most_bytes)
        elsewhere = _elsewhere(value, name, self._where)
        if elsewhere is None:
            data: bytes | bytearray = value[1 + _NONCE_BYTES + 8 :]
            if len(data) != _size(value, name):
                raise PayloadError(f"blob {name} is damaged: it has {len(data)} bytes, not {_size(value, name)}")
        else:
            data = self._load(elsewhere, name, deadline_s=deadline_s)
        self._meter.count("get", received_bytes=len(data))
        return as_tensor(data)

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        self._meter.count("list")
        start, found = f"{self._folder}{check_name(prefix)}/", dict[str, Entry]()
        after = f"{self._folder}{after}"
        while True:
            request = StoreRequest(number=0, what="names", name=start, after=after)
            answers = self._ask(request, self._majority, deadline_s=_OPERATION_S)
            ends = []
            for answer in answers.values():
                for name, head, written_s in answer.names:
                    if not name.startswith(start):
                        raise PayloadError("a host of the store lists names that were not asked for")
                    found[name] = Entry(
                        name=name.removeprefix(self._folder), num_bytes=_size(head, name), modified_s=written_s
                    )
                if len(answer.names) >= MOST_NAMES:
                    ends.append(answer.names[-1][0])
            if not ends:
                return sorted(found.values())
            if min(ends) <= after:
                raise PayloadError("a host of the store lists names that were not asked for")
            after = min(ends)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._meter.count("delete")
            value = self._value(check_name(name))
            everyone: _Enough = lambda answers: len(answers) == len(self._where)  # noqa: E731
            with contextlib.suppress(DeadlineExceeded):  # a host that is away keeps it
                self._ask(
                    StoreRequest(number=0, what="forget", name=self._folder + name),
                    everyone,
                    deadline_s=self._connections.limit_s,
                )
            if value is not None and (elsewhere := _elsewhere(value, name, self._where)) is not None:
                self._drop(elsewhere)

    def now(self) -> float:
        steady_s = time.monotonic()
        if self._clock is None or steady_s - self._clock[0] > _CLOCK_S:
            answers = self._ask(
                StoreRequest(number=0, what="names", name="//"), self._majority, deadline_s=_OPERATION_S
            )
            hosts_s = statistics.median(answer.now_s for answer in answers.values())
            self._clock = steady_s, hosts_s - time.monotonic()
        return steady_s + self._clock[1]

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def limits(self) -> Limits:
        return Limits(most_bytes=1 << 36, least_poll_s=0.05, most_poll_s=0.5)

    def cost(self) -> CarrierCost:
        return self._meter.total()

    def _majority(self, answers: Mapping[int, StoreAnswer]) -> bool:
        return len(answers) >= majority_of(len(self._where))

    def _ask(
        self, request: StoreRequest, enough: _Enough, *, deadline_s: float, hosts: Sequence[int] | None = None
    ) -> dict[int, StoreAnswer]:
        """Ask hosts, again and again, until the answers are enough."""
        asked = range(len(self._where)) if hosts is None else hosts
        until_s = time.monotonic() + deadline_s
        answers: dict[int, StoreAnswer] = {}
        while True:
            again = {host: request for host in asked if host not in answers}
            answers |= self._connections.ask(again, lambda found: enough({**answers, **found}), until_s=until_s)  # noqa: B023
            if enough(answers):
                return answers
            if time.monotonic() >= until_s:
                silent = ", ".join(self._where[host] for host in asked if host not in answers)
                problem = f" ({self._connections.problem})" if self._connections.problem else ""
                raise DeadlineExceeded(
                    f"of {len(asked)} hosts of the store {len(answers)} answered within {deadline_s:g} s, "
                    f"not {silent}{problem}; start them again (thinwire store), or look with: "
                    f"thinwire doctor {silent.split(', ')[0]}"
                )
            time.sleep(_REDIAL_MS / 1000)

    def _value(self, name: str, *, deadline_s: float = _OPERATION_S) -> bytes | None:
        """Return the value that is chosen for a name, None for none."""
        hosts, request = len(self._where), StoreRequest(number=0, what="read", name=self._folder + name)

        def enough(answers: Mapping[int, StoreAnswer]) -> bool:
            replies = [one.reply for one in answers.values() if one.reply is not None]
            return settled(replies, hosts=hosts)[0] or len(answers) == hosts

        try:
            answers = self._ask(request, enough, deadline_s=min(deadline_s, self._connections.limit_s))
        except DeadlineExceeded:  # those that answered may differ, and one is away
            answers = {}
        is_settled, value = settled([one.reply for one in answers.values() if one.reply is not None], hosts=hosts)
        return value if is_settled else self._attempt(name, None, deadline_s=min(deadline_s, _OPERATION_S))

    def _attempt(
        self, name: str, own: bytes | None, *, replaces: bool = False, deadline_s: float = _OPERATION_S
    ) -> bytes | None:
        """Write a value, or find and complete that which is there; return the one that is chosen."""
        until_s = time.monotonic() + deadline_s
        # of this call alone: two threads that shared a ballot could have two values accepted by it
        attempt = BallotAttempt(hosts=len(self._where), ballot=(1, secrets.token_hex(8)), own=own, replaces=replaces)
        while (phase := attempt.phase) not in ("chosen", "absent"):
            if phase == "beaten":
                time.sleep(random.uniform(0, self._connections.limit_s / 5))  # so that one of two gets ahead
                attempt = attempt.next()
                continue
            what: Literal["prepare", "accept"] = "prepare" if phase == "prepare" else "accept"
            request = StoreRequest(
                number=0, what=what, name=self._folder + name, ballot=attempt.ballot, data=attempt.value or b""
            )

            def after(answers: Mapping[int, StoreAnswer]) -> BallotAttempt:
                found = attempt  # noqa: B023
                for host, answer in answers.items():
                    if answer.reply is not None:
                        found = found.take(host, answer.reply, phase=phase)
                return found

            left_s = until_s - time.monotonic()
            answers = self._ask(request, lambda found: after(found).phase != phase, deadline_s=max(left_s, 0.0))
            attempt = after(answers)
        return attempt.value if attempt.phase == "chosen" else None

    def _store(self, data: memoryview) -> _Elsewhere:
        blob, sha256 = secrets.token_hex(16), hashlib.sha256(data).digest()
        for host in self._homes:
            requests = [
                StoreRequest(
                    number=0, what="store", blob=blob, offset=offset, data=bytes(data[offset : offset + PIECE_BYTES])
                )
                for offset in range(0, len(data), PIECE_BYTES)
            ]
            try:
                for request in requests:
                    self._ask(request, bool, deadline_s=_OPERATION_S / len(self._homes), hosts=[host])
            except TransportError:
                if host == self._homes[-1]:
                    raise
                continue
            return _Elsewhere(host=host, blob=blob, num_bytes=len(data), sha256=sha256)
        raise AssertionError("a store has a host")

    def _load(self, elsewhere: _Elsewhere, name: str, *, deadline_s: float) -> bytearray:
        until_s, found = time.monotonic() + deadline_s, bytearray()
        while len(found) < elsewhere.num_bytes:
            request = StoreRequest(number=0, what="load", blob=elsewhere.blob, offset=len(found))
            left_s = max(0.0, until_s - time.monotonic())
            piece = self._ask(request, bool, deadline_s=left_s, hosts=[elsewhere.host])[elsewhere.host].data
            if not piece:
                raise NotThere(f"host {self._where[elsewhere.host]} of the store does not have blob {name} any more")
            found += piece
        if len(found) != elsewhere.num_bytes or hashlib.sha256(found).digest() != elsewhere.sha256:
            raise PayloadError(f"blob {name} is damaged on host {self._where[elsewhere.host]} of the store")
        return found

    def _drop(self, elsewhere: _Elsewhere) -> None:
        request = StoreRequest(number=0, what="drop", blob=elsewhere.blob)
        with contextlib.suppress(TransportError):
            self._ask(request, bool, deadline_s=self._connections.limit_s, hosts=[elsewhere.host])


def _size(value: bytes, name: str) -> int:
    if len(value) < 1 + _NONCE_BYTES + 8 or value[0] not in (_INLINE, _ELSEWHERE):
        raise PayloadError(f"blob {name} is none of this version of thinwire")
    return int.from_bytes(value[1 + _NONCE_BYTES :][:8], "big")


def _elsewhere(value: bytes, name: str, hosts: Sequence[str]) -> _Elsewhere | None:
    size = _size(value, name)
    if value[0] == _INLINE:
        return None
    try:
        found = msgspec.msgpack.decode(value[1 + _NONCE_BYTES + 8 :], type=_Elsewhere)
    except ValueError as error:
        raise PayloadError(f"blob {name} does not say where it lies: {error}") from None
    if not 0 <= found.host < len(hosts) or found.num_bytes != size or len(found.sha256) != 32:
        raise PayloadError(f"blob {name} says that it lies where no host of the store is")
    return found


class _HostConnections:
    """Connections to all hosts, with a thread of their own, which only it uses."""

    def __init__(self, hosts: Sequence[Address], *, secret: Secret) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._condition = threading.Condition()
        self._number = 0
        self._waiting: dict[int, tuple[int, dict[int, StoreAnswer], set[int]]] = {}
        self._outgoing: deque[tuple[int, StoreRequest]] = deque()
        self._is_closing = False
        self.problem = ""  # the last one that a host named
        self._timeout = AdaptiveTimeout(least_s=_LEAST_S, most_s=_MOST_S)
        self._plugs = [self._plug(address, secret) for address in hosts]
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, name="thinwire-store-hosts", daemon=True)
        self._thread.start()

    @property
    def limit_s(self) -> float:
        """Time after which a host that has not answered is asked again."""
        return self._timeout.limit_s

    def ask(self, requests: Mapping[int, StoreRequest], enough: _Enough, *, until_s: float) -> dict[int, StoreAnswer]:
        """Send a request to each host, and return the answers: when they are enough, all have come, or time is up."""
        began_s = time.monotonic()
        limit_s = min(until_s, began_s + self.limit_s)
        answers: dict[int, StoreAnswer] = {}
        missed: set[int] = set()
        with self._condition:
            numbers = []
            for host, request in requests.items():
                self._number += 1
                numbers.append(self._number)
                self._waiting[self._number] = (host, answers, missed)
                self._outgoing.append((host, msgspec.structs.replace(request, number=self._number)))
            self._rouse()
            while not enough(answers) and len(answers) + len(missed) < len(requests):
                left_s = limit_s - time.monotonic()
                if left_s <= 0 or self._is_closing:
                    break
                self._condition.wait(left_s)
            for number in numbers:
                self._waiting.pop(number, None)
            if answers:
                # a host writes to its disk before it answers, and a busy disk takes many times the usual
                self._timeout.observe(10 * (time.monotonic() - began_s))
            return dict(answers)

    def close(self) -> None:
        with self._condition:
            self._is_closing = True
            self._rouse()
            self._condition.notify_all()
        self._thread.join(timeout=5)

    def _rouse(self) -> None:
        with contextlib.suppress(zmq.Again):
            self._wake.send(b"", zmq.DONTWAIT)

    def _plug(self, address: Address, secret: Secret) -> zmq.Socket[bytes]:
        plug = self._context.socket(zmq.DEALER)
        set_store_socket_options(plug)
        keys = caller_keys(secret)
        plug.setsockopt(zmq.CURVE_SERVERKEY, store_keys(secret).public)
        plug.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        plug.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
        plug.setsockopt(zmq.RECONNECT_IVL, _REDIAL_MS)
        plug.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_REDIAL_MS)
        plug.setsockopt(zmq.IMMEDIATE, 1)  # what cannot be sent now is asked again later
        plug.setsockopt(zmq.IPV6, needs_ipv6(address.host))
        plug.connect(f"tcp://{host_port(address.host, address.port)}")
        return plug

    def _run(self) -> None:
        poller = zmq.Poller()
        for plug in (*self._plugs, self._woken):
            poller.register(plug, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll(1000))
            if self._woken in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._woken.recv(zmq.DONTWAIT)
            self._send()
            for host, plug in enumerate(self._plugs):
                if plug in ready:
                    self._receive(host, plug)
        with self._condition:
            for plug in (*self._plugs, self._woken, self._wake):
                plug.close(linger=0)
        self._context.term()

    def _send(self) -> None:
        while True:
            with self._condition:
                if not self._outgoing:
                    return
                host, request = self._outgoing.popleft()
            try:
                self._plugs[host].send(msgspec.msgpack.encode(request), zmq.DONTWAIT)
            except zmq.Again:  # there is no connection now
                with self._condition:
                    if (waiting := self._waiting.pop(request.number, None)) is not None:
                        waiting[2].add(host)
                        self._condition.notify_all()

    def _receive(self, host: int, plug: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = plug.recv_multipart(zmq.DONTWAIT)
                try:
                    answer = msgspec.msgpack.decode(frames[0], type=StoreAnswer)
                except ValueError:  # of msgspec or of a text
                    continue  # of another version: it counts as no answer
                with self._condition:
                    waiting = self._waiting.get(answer.number)
                    if waiting is None or waiting[0] != host:
                        continue
                    if answer.problem:
                        self.problem = f"{answer.problem[:200]}"
                        waiting[2].add(host)
                    else:
                        waiting[1].setdefault(host, answer)
                    self._condition.notify_all()
