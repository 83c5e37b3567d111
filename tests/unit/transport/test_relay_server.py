"""Relay: what is joined passes unchanged and bounded, by hosts of one token alone, and again after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import pytest

from thinwire.transport.addresses import Address, RelayPlace, free_port
from thinwire.transport.relay.member import RelayMember, is_relayed, origin_of
from thinwire.transport.relay.pipe import (
    CHALLENGE_BYTES,
    DIAL,
    DONE,
    GREETING,
    MOST_WAITING_BYTES,
    NO_ACCESS,
    NOT_HERE,
    REGISTER,
    REQUEST,
    name_of,
    proof_of,
    run_of,
)
from thinwire.transport.relay.server import RelayLimits, RelayServer
from thinwire.transport.secret import Secret

TOKEN, OTHER = Secret(key=bytes(32)), Secret(key=bytes(31) + b"\1")
KEY = b"k" * 32


class Running:
    """A relay in a thread of its own, which can be stopped and started again at its port."""

    def __init__(self, *tokens: Secret, **limits: Any) -> None:
        self.tokens, self.limits, self.port = tokens or (TOKEN,), RelayLimits(**limits), free_port("127.0.0.1")
        self.reports: list[str] = []
        self.start()

    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = RelayServer(self.tokens, limits=self.limits, say=self.reports.append)
        self.loop.run_until_complete(self.server.start(address="127.0.0.1", port=self.port))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()

    def look(self, find: Callable[[], Any]) -> Any:
        """Return what a function finds in the relay's own thread."""
        found: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: found.set_result(find()))
        return found.result(30)

    def until(self, find: Callable[[], Any]) -> None:
        end_s = time.monotonic() + 60
        while not self.look(find):
            assert time.monotonic() < end_s, "it did not come"
            time.sleep(0.01)

    def place(self, token: Secret = TOKEN) -> RelayPlace:
        return RelayPlace(address=Address(host="127.0.0.1", port=self.port), token=token)

    def dial(self, *, verb: bytes = DIAL, name: bytes = b"", token: Secret = TOKEN) -> socket.socket:
        """Send one request, as a member of the relay does."""
        plug = self.connect()
        head = exactly(plug, len(GREETING) + CHALLENGE_BYTES)
        assert head.startswith(GREETING)
        name = name or name_of(KEY)
        proof = proof_of(token, challenge=head[len(GREETING) :], verb=verb, name=name)
        plug.sendall(REQUEST.pack(verb, run_of(token), name, proof))
        return plug

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


def exactly(plug: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = plug.recv(size - len(found))
        assert part, f"ended after {found!r}"
        found += part
    return found


@contextmanager
def member(relay: Running, token: Secret = TOKEN) -> Iterator[RelayMember]:
    with closing(RelayMember(relay.place(token))) as made:
        yield made


@pytest.fixture
def relay() -> Iterator[Running]:
    with closing(Running()) as running:
        yield running


def registered(relay: Running, host: RelayMember, key: bytes = KEY) -> socket.socket:
    """Register a listener, and wait until the relay knows it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    host.offer(key, address="127.0.0.1", port=listener.getsockname()[1])
    relay.until(lambda: any(name == name_of(key) for _, name in relay.server.names))
    return listener


def test_bytes_pass_both_ways_unchanged_also_through_a_restart(relay: Running) -> None:
    """Streams of awkward sizes both ways at once; after the relay was gone, a new connection passes too."""
    sizes = (1, 65_535, 65_537, 3_000_001)
    with member(relay) as host, member(relay) as guest:
        listener = registered(relay, host)
        port = guest.port_to(KEY)
        for turn in range(2):
            near = socket.create_connection(("127.0.0.1", port), timeout=60)
            far, end = listener.accept()
            far.settimeout(60)
            assert is_relayed(end) and origin_of(end) == "relay:127.0.0.1"
            for size in sizes:
                payloads = random.Random(size).randbytes(size), random.Random(size + 1).randbytes(size)
                senders = [
                    threading.Thread(target=plug.sendall, args=(payload,))
                    for plug, payload in zip((near, far), payloads, strict=True)
                ]
                for sender in senders:
                    sender.start()
                assert (exactly(far, size), exactly(near, size)) == payloads
                for sender in senders:
                    sender.join()
            if turn == 0:
                relay.close()
                assert near.recv(1) == b"" and far.recv(1) == b""  # both ends learn of it
                relay.start()
                relay.until(lambda: relay.server.names)
            near.close(), far.close()
        relay.until(lambda: not relay.server.num_pairs.total())
        assert origin_of(end) == "127.0.0.1"  # forgotten with its connection
        listener.close()


def test_a_slow_reader_pauses_the_sender(relay: Running) -> None:
    """What waits in the relay and both members stays bounded, whatever is sent."""
    with member(relay) as host, member(relay) as guest:
        listener = registered(relay, host)
        near = socket.create_connection(("127.0.0.1", guest.port_to(KEY)), timeout=60)
        far, _ = listener.accept()
        far.settimeout(60)
        for plug in (near, far):  # the kernel's own buffers are no part of the bound
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near.settimeout(2.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 1 << 28:
                sent += near.send(bytes(1 << 16))
        waiting = relay.look(lambda: max(pipe.transport.get_write_buffer_size() for pipe in _pipes(relay.server)))
        assert waiting <= 2 * MOST_WAITING_BYTES + 1
        digest = hashlib.sha256(exactly(far, sent)).digest()
        assert digest == hashlib.sha256(bytes(sent)).digest()
        near.close(), far.close(), listener.close()


def _pipes(server: RelayServer) -> list[Any]:
    """Return all connections of a relay, found by their tasks."""
    frames = [task.get_coro().cr_frame for task in server._tasks]  # type: ignore[union-attr]
    return [frame.f_locals["pipe"] for frame in frames if frame is not None]


def test_only_hosts_of_one_token_meet() -> None:
    """Another token's name is not found, an unknown or forged token has no access, and a name's newest host counts."""
    with closing(Running(TOKEN, OTHER)) as relay, member(relay) as host:
        listener = registered(relay, host)
        assert relay.dial(token=OTHER).recv(1) == NOT_HERE
        assert relay.dial(token=Secret(key=os.urandom(32))).recv(1) == NO_ACCESS
        plug = relay.connect()
        head = exactly(plug, len(GREETING) + CHALLENGE_BYTES)
        stale = proof_of(TOKEN, challenge=bytes(CHALLENGE_BYTES), verb=DIAL, name=name_of(KEY))
        assert head[len(GREETING) :] != bytes(CHALLENGE_BYTES)
        plug.sendall(REQUEST.pack(DIAL, run_of(TOKEN), name_of(KEY), stale))
        assert plug.recv(1) == NO_ACCESS  # a proof that was overheard does not open it again
        assert relay.dial(verb=b"x").recv(1) == NO_ACCESS
        # who knows a name and the token may take it for a moment: its host comes back, and CURVE proves who it is
        squatter = relay.dial(verb=REGISTER)
        assert squatter.recv(1) == DONE
        assert squatter.recv(1) == b""
        relay.until(lambda: len(relay.server.names) == 1)
        listener.close()
        # a name of no one, and a ticket of no one
        assert relay.dial(name=bytes(32)).recv(1) == NOT_HERE
        assert relay.dial(verb=b"a", name=bytes(32)).recv(1) == NOT_HERE


def test_strangers_cost_little() -> None:
    """A flood, half-open and slow connections and huge headers end; a member gets through all the while."""
    with closing(Running(handshake_s=1.0, most_new_each=8, most_new=16)) as relay, member(relay) as host:
        listener = registered(relay, host)
        flood = [relay.connect() for _ in range(100)]
        assert relay.look(lambda: len(relay.server._new)) <= 8
        huge = relay.connect()
        with pytest.raises(OSError):  # cut off
            for _ in range(100):
                huge.sendall(bytes(1 << 20))
        slow = relay.connect()
        with pytest.raises(OSError):
            while True:  # a byte at a time: the deadline is one for the whole request
                slow.sendall(b"r")
                time.sleep(0.05)
        with member(relay) as guest:
            near = socket.create_connection(("127.0.0.1", guest.port_to(KEY)), timeout=60)
            far, _ = listener.accept()
            near.sendall(b"through")
            assert exactly(far, 7) == b"through"
            near.close(), far.close()
        relay.until(lambda: not relay.server._new)
        assert len(relay.reports) <= 20  # nor can they fill the log
        for plug in (*flood, huge, slow, listener):
            plug.close()


def test_members_are_bounded_too() -> None:
    """Names and pairs of a token have bounds, and pairs without a byte and hosts without a sign of life end."""
    with closing(Running(most_names=2, most_pairs=1, idle_s=0.5, handshake_s=5.0, silence_s=1.0)) as relay:
        hosts = [relay.dial(verb=REGISTER, name=bytes([number]) * 32) for number in range(3)]
        assert [plug.recv(1) for plug in hosts] == [DONE, DONE, b"3"]
        first = relay.dial(name=bytes(32))
        relay.until(lambda: relay.server.num_pairs.total() == 1)
        assert relay.dial(name=bytes(32)).recv(1) == b"3"
        kind, ticket, _ = struct.unpack("!c16s16s", exactly(hosts[0], 33))
        assert kind == b"c"
        answer = relay.dial(verb=b"a", name=ticket.ljust(32, b"\0"))
        assert (answer.recv(1), first.recv(1)) == (DONE, DONE)
        assert relay.dial(verb=b"a", name=ticket.ljust(32, b"\0")).recv(1) == NOT_HERE  # a ticket counts once
        assert (answer.recv(1), first.recv(1)) == (b"", b"")  # idle
        relay.until(lambda: not relay.server.names and not relay.server.num_pairs.total())
        assert hosts[1].recv(1) == b""
