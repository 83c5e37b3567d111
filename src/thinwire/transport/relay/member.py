"""Member of a relay: a thread that registers this process's listeners there, and leads local ports to those of others.

ZeroMQ knows nothing of the relay. It dials a port on loopback, from which the bytes go to the relay and on to the
listener of the other process, where they come from loopback too. `origin_of` says where they are from in truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from thinwire.transport.addresses import ANY_LOOPBACK, Address, RelayPlace
from thinwire.transport.forked import keep_from_children
from thinwire.transport.relay.pipe import (
    ACCEPT,
    CALLED,
    CHALLENGE_BYTES,
    DIAL,
    DONE,
    GREETING,
    HANDSHAKE_S,
    NOT_HERE,
    NOTICE,
    REASONS,
    REGISTER,
    REQUEST,
    SILENCE_S,
    NotHereError,
    Pipe,
    RelayError,
    join_pipes,
    name_of,
    new_buffer,
    proof_of,
    read_address,
    run_of,
)

LOOPBACK, _RELAYED = "127.0.0.1", "relay:"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0
# Connections that others have asked for and that are being made.
_MOST_CALLS = 64
# Connections and registrations of this process in all.
_MOST_TASKS = 1024
_log = logging.getLogger(__name__)
# Addresses from which relayed connections come, by the end that a listener of this process sees.
_origins: dict[tuple[str, int], str] = {}


def origin_of(peer: tuple[str, int] | None) -> str:
    """Return where a connection comes from: an IP address, behind "relay:" where a relay states it; empty if unknown.

    Example:
        >>> origin_of(("192.0.2.1", 5000))
        '192.0.2.1'
    """
    return "" if peer is None else _origins.get(peer, peer[0])


def is_relayed(peer: tuple[str, int] | None) -> bool:
    """Return whether a listener's connection from this end came by a relay."""
    return peer in _origins


def is_relayed_origin(origin: str) -> bool:
    """Return whether `origin_of` named a relay: what it states is never this host."""
    return origin.startswith(_RELAYED)


class RelayMember:
    """Connections of this process by a relay; made again whenever they break.

    Attributes:
        problem: Reason why the relay does not serve this process now; empty where it does.
    """

    def __init__(self, place: RelayPlace) -> None:
        self.place = place
        self.problem = ""
        self._ports: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._buffer = new_buffer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="thinwire-relay", daemon=True)
        self._thread.start()

    def offer(self, key: bytes, *, address: str, port: int) -> None:
        """Let others reach a listener of this host by its public CURVE key."""
        target = Address(host=ANY_LOOPBACK.get(address, address), port=port)
        self._begin(self._keep_registered(name_of(key), target))

    def port_to(self, key: bytes) -> int:
        """Return a port on loopback that leads to the listener with a public CURVE key."""
        with self._lock:
            if key not in self._ports:
                plug = socket.create_server((LOOPBACK, 0))
                keep_from_children(plug.fileno())
                self._ports[key] = int(plug.getsockname()[1])
                self._begin(self._serve_port(plug, name_of(key)))
            return self._ports[key]

    def close(self) -> None:
        """End all connections by the relay, and the thread."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=HANDSHAKE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _open(self, verb: bytes, name: bytes) -> Pipe:
        return await _open(self.place, verb, name, buffer=self._buffer)

    async def _keep_registered(self, name: bytes, target: Address) -> None:
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                pipe = await self._open(REGISTER, name)
                try:
                    self.problem, delay_s = "", _FIRST_RETRY_S
                    await self._take_calls(pipe, target)
                finally:
                    pipe.abort()
            except (OSError, TimeoutError, RelayError) as error:
                problem = str(error) if isinstance(error, RelayError) else (
                    f"the relay at {self.place.describe()} is not reached: {error or 'no answer'}"
                )  # fmt: skip
                if problem != self.problem:
                    _log.warning("%s", problem)
                self.problem = problem
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)

    async def _take_calls(self, pipe: Pipe, target: Address) -> None:
        pipe.write(b".")
        while True:
            async with asyncio.timeout(SILENCE_S):
                kind, ticket, origin = NOTICE.unpack(await pipe.read(NOTICE.size))
            if kind != CALLED:
                pipe.write(b".")
            elif self._num_calls < _MOST_CALLS:
                self._num_calls += 1
                self._begin(self._answer(ticket, target, origin=read_address(origin)))

    async def _answer(self, ticket: bytes, target: Address, *, origin: str) -> None:
        """Join a connection that another host has asked for to the listener here."""
        try:
            far = await self._open(ACCEPT, ticket.ljust(32, b"\0"))
        except (OSError, TimeoutError, RelayError) as error:
            _log.info("a relayed connection was not made: %s", error)
            return
        finally:
            self._num_calls -= 1
        plug = socket.socket(socket.AF_INET6 if ":" in target.host else socket.AF_INET, socket.SOCK_STREAM)
        end: tuple[str, int] | None = None
        try:
            plug.setblocking(False)
            # its own end is known before the listener sees it
            plug.bind((target.host, 0))
            end = (str(plug.getsockname()[0]), int(plug.getsockname()[1]))
            _origins[end] = _RELAYED + origin
            await self._loop.sock_connect(plug, (target.host, target.port))
            _, near = await self._loop.create_connection(lambda: Pipe(self._buffer), sock=plug)
            await _carry(near, far)
        except OSError as error:
            _log.info("a relayed connection found no listener at port %d: %s", target.port, error)
            plug.close()
        finally:
            far.abort()
            if end is not None:
                del _origins[end]

    async def _serve_port(self, plug: socket.socket, name: bytes) -> None:
        def on_open(pipe: Pipe) -> None:
            self._begin(self._lead(pipe, name))

        server = await self._loop.create_server(lambda: Pipe(self._buffer, on_open), sock=plug)
        try:
            await server.serve_forever()
        finally:
            server.close()

    async def _lead(self, near: Pipe, name: bytes) -> None:
        if len(self._tasks) > _MOST_TASKS:  # other users of this machine reach the port too
            near.abort()
            return
        try:
            far = await self._open(DIAL, name)
        except (OSError, TimeoutError, RelayError) as error:
            # ZeroMQ dials again
            _log.info("a connection by the relay was not made: %s", error)
            near.abort()
            return
        await _carry(near, far)


async def _carry(near: Pipe, far: Pipe) -> None:
    join_pipes(near, far)
    try:
        await asyncio.wait((near.closed, far.closed), return_when=asyncio.FIRST_COMPLETED)
        # the other end still sends what waits
        await asyncio.wait((near.closed, far.closed), timeout=HANDSHAKE_S)
    finally:
        near.abort()
        far.abort()


def check_relay(place: RelayPlace) -> None:
    """Check that a relay answers and knows the token.

    Raises:
        RelayError: It does not; with the remedy.
    """

    async def ask() -> None:
        pipe = await _open(place, DIAL, secrets.token_bytes(32), buffer=new_buffer())
        pipe.abort()

    try:
        asyncio.run(ask())
    except NotHereError:
        return
    except (OSError, TimeoutError) as error:
        raise RelayError(
            f"no relay answers at {place.describe()} ({error or 'no answer'}); start it there with: thinwire relay "
            f"--port {place.address.port}, and let its firewall pass this port"
        ) from None


async def _open(place: RelayPlace, verb: bytes, name: bytes, *, buffer: bytearray) -> Pipe:
    """Connect to the relay and have a request granted.

    Raises:
        RelayError: The relay refuses it; with the remedy.
        OSError: It cannot be reached.
        TimeoutError: It does not answer.
    """
    token, where = place.token, place.address
    async with asyncio.timeout(HANDSHAKE_S):
        _, pipe = await asyncio.get_running_loop().create_connection(lambda: Pipe(buffer), where.host, where.port)
    try:
        async with asyncio.timeout(2 * HANDSHAKE_S):
            if await pipe.read(len(GREETING)) != GREETING:
                raise RelayError(f"what answers at {place.describe()} is no relay of this version")
            challenge = await pipe.read(CHALLENGE_BYTES)
            proof = proof_of(token, challenge=challenge, verb=verb, name=name)
            pipe.write(REQUEST.pack(verb, run_of(token), name, proof))
            if (answer := await pipe.read(1)) != DONE:
                reason = REASONS.get(answer, "it answered in a way that this version does not know")
                kind = NotHereError if answer == NOT_HERE else RelayError
                raise kind(f"the relay at {place.describe()} refused: {reason}")
    except BaseException:
        pipe.abort()
        raise
    return pipe
