"""Relay server: joins hosts that can only dial out, sees no plaintext, and bounds its memory.

A host registers names and waits. Whoever dials a name is given a ticket with the host, which dials back with it, and
the relay joins both connections. A token is a run of its own: hosts with different tokens never meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.errors import ConnectError
from thinwire.rate_limit import RateLimit
from thinwire.transport.admission import PendingConnections
from thinwire.transport.relay.pipe import (
    ACCEPT,
    ALIVE,
    CALLED,
    CHALLENGE_BYTES,
    DIAL,
    DONE,
    FULL,
    GREETING,
    HANDSHAKE_S,
    KEEPALIVE_S,
    NO_ACCESS,
    NOT_HERE,
    NOTICE,
    REGISTER,
    REQUEST,
    SILENCE_S,
    Pipe,
    join_pipes,
    new_buffer,
    packed_address,
    proof_of,
    run_of,
)
from thinwire.transport.secret import Secret

_TICKET_BYTES = 16
_BACKLOG = 1024
_REPORTS_A_SECOND, _BURST_REPORTS = 0.2, 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Bounds of a relay; one joined pair takes at most about 0.3 MB.

    Attributes:
        most_names: Names of one token.
        most_pairs: Joined pairs of one token.
        most_pairs_in_all: Of all tokens.
        most_new_each: Connections of one address that have not proved a token yet.
        most_new: Of all addresses.
        handshake_s: Seconds to prove the token, and to dial back.
        idle_s: Seconds without a byte after which a pair ends; members send heartbeats every second.
    """

    most_names: int = 256
    most_pairs: int = 256
    most_pairs_in_all: int = 1024
    most_new_each: int = 64
    most_new: int = 256
    handshake_s: float = HANDSHAKE_S
    idle_s: float = 120.0
    silence_s: float = SILENCE_S


class RelayServer:
    """Serves one or more runs; all of it in the loop in which it is started.

    Args:
        tokens: Access tokens, each of a run of its own.
        say: Reports refused connections, at a bounded rate.

    Attributes:
        names: Registered hosts by run and name.
        num_pairs: Joined pairs by run.
        num_refused: Connections that ended before they were of use.
    """

    def __init__(
        self, tokens: Sequence[Secret], *, limits: RelayLimits | None = None, say: Callable[[str], None] = print
    ) -> None:
        self._tokens = {run_of(token): token for token in tokens}
        self._limits = limits or RelayLimits()
        self._say = say
        self._reports = RateLimit(a_second=_REPORTS_A_SECOND, at_once=_BURST_REPORTS)
        self._buffer = new_buffer()
        self._pending = PendingConnections(most_each=self._limits.most_new_each, most=self._limits.most_new)
        self._new: dict[int, Pipe] = {}
        self._tickets: dict[tuple[bytes, bytes], asyncio.Future[Pipe]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.names: dict[tuple[bytes, bytes], Pipe] = {}
        self.num_pairs: Counter[bytes] = Counter()
        self.num_refused = 0
        self._server: asyncio.Server

    async def start(self, *, address: str, port: int) -> int:
        """Listen, and return the port; port 0 is a free one.

        Raises:
            ConnectError: The address cannot be listened on.
        """
        if address == "::" and not socket.has_dualstack_ipv6():
            address = "0.0.0.0"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            plug = socket.create_server(
                (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == "::"
            )  # fmt: skip
        except OSError as error:
            raise ConnectError(f"the relay cannot listen on {address}, port {port}: {error.strerror}") from None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Pipe(self._buffer, self._on_open), sock=plug, backlog=_BACKLOG
        )  # fmt: skip
        return int(plug.getsockname()[1])

    async def close(self) -> None:
        """Stop to listen, and end all connections."""
        self._server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_open(self, pipe: Pipe) -> None:
        self._new[id(pipe)] = pipe
        ending = self._pending.add(id(pipe), pipe.peer[0])
        if ending is not None:
            self._new.pop(ending).abort()
        task = asyncio.get_running_loop().create_task(self._serve(pipe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, pipe: Pipe) -> None:
        try:
            verb, run, name = await self._authenticate(pipe)
            if verb == REGISTER:
                await self._keep(pipe, run, name)
            elif verb == DIAL:
                await self._dial(pipe, run, name)
            else:
                await self._accept(pipe, run, name[:_TICKET_BYTES])
        except (OSError, TimeoutError) as error:
            if not pipe.closed.done():
                self._refuse(pipe, str(error) or "was silent")
        finally:
            self._forget(pipe)
            # what was written, such as a refusal, is still sent; a peer that takes nothing is cut off
            pipe.transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.handshake_s):
                    await asyncio.shield(pipe.closed)
            pipe.abort()

    async def _authenticate(self, pipe: Pipe) -> tuple[bytes, bytes, bytes]:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        pipe.write(GREETING + challenge)
        async with asyncio.timeout(self._limits.handshake_s):
            verb, run, name, proof = REQUEST.unpack(await pipe.read(REQUEST.size))
        token = self._tokens.get(run)
        wanted = proof_of(token or Secret(key=bytes(32)), challenge=challenge, verb=verb, name=name)
        if not hmac.compare_digest(proof, wanted) or token is None or verb not in (REGISTER, DIAL, ACCEPT):
            pipe.write(NO_ACCESS)
            raise ConnectionError("sent no proof of an access token")
        self._forget(pipe)
        self._pending.trust(pipe.peer[0])
        return verb, run, name

    def _forget(self, pipe: Pipe) -> None:
        if self._new.pop(id(pipe), None) is not None:
            self._pending.remove(id(pipe))

    async def _keep(self, pipe: Pipe, run: bytes, name: bytes) -> None:
        """Keep a registered host: it answers each sign of life with a byte."""
        earlier = self.names.get((run, name))
        if earlier is None and sum(one == run for one, _ in self.names) >= self._limits.most_names:
            pipe.write(FULL)
            raise ConnectionError(f"registers more than {self._limits.most_names} names")
        self.names[run, name] = pipe
        if earlier is not None:  # of before its network changed; a host that is still there registers again
            earlier.abort()
        pipe.write(DONE)
        try:
            while True:
                async with asyncio.timeout(self._limits.silence_s):
                    await pipe.read(1)
                await asyncio.wait((pipe.closed,), timeout=self._limits.silence_s * KEEPALIVE_S / SILENCE_S)
                if pipe.num_waiting:
                    raise ConnectionError("sends what no registered host sends")
                pipe.write(NOTICE.pack(ALIVE, bytes(16), bytes(16)))
        finally:
            if self.names.get((run, name)) is pipe:
                del self.names[run, name]

    async def _dial(self, pipe: Pipe, run: bytes, name: bytes) -> None:
        host = self.names.get((run, name))
        if host is None or host.is_full:
            pipe.write(NOT_HERE)
            return
        if self.num_pairs[run] >= self._limits.most_pairs or self.num_pairs.total() >= self._limits.most_pairs_in_all:
            pipe.write(FULL)
            raise ConnectionError("asks for more connections than its run may have")
        ticket = secrets.token_bytes(_TICKET_BYTES)
        with self._counted(run):
            answer = self._tickets[run, ticket] = asyncio.get_running_loop().create_future()
            try:
                host.write(NOTICE.pack(CALLED, ticket, packed_address(pipe.peer[0])))
                await asyncio.wait(
                    (answer, pipe.closed), timeout=self._limits.handshake_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                del self._tickets[run, ticket]
            if answer.done():
                await self._carry(pipe, answer.result())
            else:
                pipe.write(NOT_HERE)

    async def _carry(self, one: Pipe, other: Pipe) -> None:
        for pipe in (one, other):
            pipe.write(DONE)
        join_pipes(one, other)
        loop = asyncio.get_running_loop()
        try:
            while not one.closed.done():
                left_s = max(one.last_s, other.last_s) + self._limits.idle_s - loop.time()
                if left_s <= 0:
                    return
                await asyncio.wait((one.closed,), timeout=left_s)
            # the other end still sends what waits
            await asyncio.wait((other.closed,), timeout=self._limits.idle_s)
        finally:
            one.abort()
            other.abort()

    async def _accept(self, pipe: Pipe, run: bytes, ticket: bytes) -> None:
        answer = self._tickets.get((run, ticket))
        if answer is None or answer.done():
            pipe.write(NOT_HERE)
            return
        answer.set_result(pipe)
        await asyncio.shield(pipe.closed)

    @contextlib.contextmanager
    def _counted(self, run: bytes) -> Iterator[None]:
        self.num_pairs[run] += 1
        try:
            yield
        finally:
            self.num_pairs[run] -= 1

    def _refuse(self, pipe: Pipe, why: str) -> None:
        self.num_refused += 1
        if self._reports.take(now_s=time.monotonic()):
            self._say(f"a connection from {pipe.peer[0]} {why}, and was cut off")
