"""Protocol of the relay: its place and access token, its few fixed-size messages, and one end of joined connections.

Everything before two connections are joined has a fixed size. The relay speaks first: `GREETING` and a challenge. A
`REQUEST` answers with a proof of the access token, and a byte says how that went. From then on bytes pass unchanged.
They are CURVE's, so that the relay sees no plaintext; names are keyed hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import struct
from collections.abc import Callable

from thinwire.errors import ConnectError
from thinwire.transport.forked import keep_from_children
from thinwire.transport.secret import Secret

GREETING, CHALLENGE_BYTES = b"thinwire relay 1", 16
# Verb, run, name or ticket, and the proof of the access token.
REQUEST = struct.Struct("!c8s32s32s")
REGISTER, DIAL, ACCEPT = b"r", b"d", b"a"
# From the relay to a registered host: kind, ticket, and the IPv6 address of who dials (IPv4 mapped into it).
NOTICE = struct.Struct("!c16s16s")
CALLED, ALIVE = b"c", b"k"
DONE, NO_ACCESS, NOT_HERE, FULL = b"0", b"1", b"2", b"3"
REASONS = {
    NO_ACCESS: "it does not know the access token; give its file to thinwire relay and to thinwire train --relay-token",
    NOT_HERE: "no host is registered there under this name",
    FULL: "it has no room for more connections of this run",
}
HANDSHAKE_S = 10.0
# A registered host hears from the relay so often, and answers; NAT forgets silent connections after a minute or more.
KEEPALIVE_S = 15.0
SILENCE_S = 3 * KEEPALIVE_S
# Bytes of one direction that wait here before the sender is paused.
MOST_WAITING_BYTES = 1 << 16
_READ_BYTES = 1 << 16


class RelayError(ConnectError):
    """The relay refused a request, or what answered is no relay."""


class NotHereError(RelayError):
    """No host is registered under the name."""


def run_of(token: Secret) -> bytes:
    """Return the public name of a token; hosts with different tokens never meet at a relay."""
    return token.derive("thinwire relay v1 run")[:8]


def name_of(key: bytes) -> bytes:
    """Return the name under which the holder of a public CURVE key registers; only who knows the key can dial it."""
    return hmac.new(key, b"thinwire relay v1 name", hashlib.sha256).digest()


def proof_of(token: Secret, *, challenge: bytes, verb: bytes, name: bytes) -> bytes:
    """Return the proof that goes with a request: of the token, for this challenge and this request alone."""
    access = token.derive("thinwire relay v1 access")
    return hmac.new(access, challenge + verb + name, hashlib.sha256).digest()


def packed_address(text: str) -> bytes:
    """Return an IP address as 16 bytes, one of IPv4 mapped into IPv6."""
    found = ipaddress.ip_address(text.partition("%")[0])
    return found.packed if found.version == 6 else bytes(10) + b"\xff\xff" + found.packed


def read_address(packed: bytes) -> str:
    """Return the IP address that `packed_address` packed."""
    found = ipaddress.IPv6Address(packed)
    return str(found.ipv4_mapped or found)


class Pipe(asyncio.BufferedProtocol):
    """One end of joined connections: what arrives goes to the other end, which pauses this one while it cannot send.

    Args:
        on_open: Called once the connection is there.

    Attributes:
        num_bytes: Bytes that have arrived.
        last_s: Time of the loop at which bytes arrived last.
        is_full: Whether what waits to be sent has reached its bound.
        closed: Done once the connection has ended.
    """

    # `get_buffer` and `buffer_updated` enclose one read, so one buffer serves all connections of a thread's loop.
    def __init__(self, buffer: bytearray, on_open: Callable[[Pipe], None] = lambda pipe: None) -> None:
        loop = asyncio.get_running_loop()
        self._on_open = on_open
        self._buffer = buffer
        self._early = bytearray()
        self._other: Pipe | None = None
        self._arrival: asyncio.Future[None] | None = None
        self.num_bytes, self.last_s = 0, loop.time()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._time = loop.time
        self.is_full = False
        self.peer = ("", 0)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=MOST_WAITING_BYTES)
        plug = transport.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        keep_from_children(plug.fileno())
        self.peer = tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self._on_open(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.last_s = self._time()
        part = bytes(memoryview(self._buffer)[:num_bytes])
        if self._other is not None:
            self._other.write(part)
            return
        self._early += part
        if len(self._early) >= MOST_WAITING_BYTES:
            self.transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self.is_full = True
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._other is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._wake()
        if self._other is not None:
            self._other.transport.close()  # once it has sent what waits

    async def read(self, num_bytes: int) -> bytes:
        """Return the next bytes before the connection is joined.

        Raises:
            ConnectionError: It ended before.
        """
        while len(self._early) < num_bytes:
            if self.closed.done():
                raise ConnectionResetError("the connection ended")
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        found = bytes(self._early[:num_bytes])
        del self._early[:num_bytes]
        return found

    @property
    def num_waiting(self) -> int:
        """Bytes that have arrived and not been read."""
        return len(self._early)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        self.transport.abort()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _begin(self) -> None:
        assert self._other is not None
        if self._early:
            self._other.write(bytes(self._early))
            self._early.clear()
        if self.closed.done():
            self._other.transport.close()
        if not self._other.is_full:
            self.transport.resume_reading()


def join_pipes(one: Pipe, other: Pipe) -> None:
    """Join two connections: from now on what one receives, the other sends."""
    one._other, other._other = other, one
    one._begin()
    other._begin()


def new_buffer() -> bytearray:
    """Return what all connections of one loop read into."""
    return bytearray(_READ_BYTES)
