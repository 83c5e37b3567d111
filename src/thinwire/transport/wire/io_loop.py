"""I/O loop: the thread that owns the sockets of the wire, and drives connections and peers."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import zmq

from thinwire.transport.addresses import Address
from thinwire.transport.base import MOST_REPLICAS
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import HANDSHAKE_S, HEARTBEAT_S, key_pair
from thinwire.transport.wire.dialer import DialedConnection
from thinwire.transport.wire.framing import INCARNATION_BYTES, CancelFrame, FrameError, Hello, RequestFrame, read, write
from thinwire.transport.wire.listener import ACCEPTED, TAKEN, UNKNOWN, AcceptedConnection, Listener, ReceivedFrame
from thinwire.transport.wire.peer import Peer
from thinwire.transport.wire.transfer import CompletionThread

FAREWELL_S = 2.0
_LINGER_MS = 200
# Delay until a frame is retried for which libzmq's queue had no room; a ROUTER does not report when it has.
_RETRY_S = 0.005
# Bursts that are read of a connection that ended: libzmq holds no more than this.
_LAST_BURSTS = 16


class IoLoop:
    """Connections to all other replicas, driven by one thread.

    Args:
        replica: This replica.
        num_replicas: Number of replicas, None for an open set.
        secret: The job's.
        address: The IP address to listen on.
        ports: Ports to try; 0 stands for a free one.
        on_request: Called in the completion thread with a replica and its request or cancellation, or with None when
            its connection ended.

    Attributes:
        peers: By replica.
        listener: Accepts connections of replicas with higher numbers.
        changed: Notified when a connection was made, or could not be made.
    """

    def __init__(
        self,
        *,
        replica: int,
        num_replicas: int | None,
        secret: Secret,
        address: str,
        ports: Sequence[int],
        on_request: Callable[[int, RequestFrame | CancelFrame | None], None],
    ) -> None:
        self._replica = replica
        self._secret = secret
        self._is_open = num_replicas is None
        self._on_request_frame = on_request
        self._own = Hello(
            replica=replica,
            num_replicas=num_replicas or MOST_REPLICAS,
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
        )
        self.peers: dict[int, Peer] = {}
        self._known_keys: dict[bytes, int] = {}
        for peer in range(num_replicas or 0):
            if peer != replica:
                self._add_peer(peer)
        self.changed = threading.Condition()
        self.problems: dict[int, tuple[str, bool]] = {}
        self._addresses: dict[int, Address] = {}
        self._dialed: dict[int, DialedConnection] = {}
        self._accepted: dict[bytes, tuple[Peer, AcceptedConnection]] = {}
        self._until_s: float | None = None
        self._is_busy = False
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.listener = self._open_listener(address, ports)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._open_wake_pair()
        self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
        self.completion = CompletionThread()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire", daemon=True)
        self._thread.start()

    def _open_wake_pair(self) -> None:
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._poller = zmq.Poller()
        for plug in (self._woken, self.listener.monitor, self.listener.plug, self.listener.decider):
            self._poller.register(plug, zmq.POLLIN)

    def _open_listener(self, address: str, ports: Sequence[int]) -> Listener:
        keys = key_pair(self._secret, replica=self._replica, role="door")
        return Listener(
            self._context, address=address, ports=ports, keys=keys, callers=self._known_keys, decide=self._decide
        )

    def _add_peer(self, peer: int) -> None:
        self.peers[peer] = Peer(peer=peer, own=self._own, is_open=self._is_open, on_request=self._on_request)
        if peer > self._replica:
            self._known_keys[key_pair(self._secret, replica=peer, role="dialler").public_bytes] = peer

    def _on_request(self, peer: int, frame: RequestFrame | CancelFrame | None) -> None:
        self.completion.later(lambda: self._on_request_frame(peer, frame))

    def call_soon(self, command: Callable[[], None]) -> bool:
        """Run a command in the thread soon; return whether the thread still runs."""
        with self._wake_lock:
            if self._wake.closed:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                with contextlib.suppress(zmq.Again):  # enough wake-ups are queued
                    self._wake.send(b"", zmq.DONTWAIT)
            return True

    def dial(self, addresses: Mapping[int, Address]) -> None:
        """Dial replicas, and again whenever a connection breaks."""

        def begin() -> None:
            self._addresses.update(addresses)
            self._redial()

        self.call_soon(begin)

    def add(self, peer: int, *, address: Address | None) -> None:
        """Add a replica to an open set: it may dial this one, or is dialled if an address is given."""

        def begin() -> None:
            if peer not in self.peers:
                self._add_peer(peer)
            if address is not None:
                self._addresses[peer] = address
                self._redial()

        self.call_soon(begin)

    def remove(self, peer: int) -> None:
        """Remove a replica from an open set: its connection ends, and it is not admitted again."""

        def end() -> None:
            self._addresses.pop(peer, None)
            if peer > self._replica and peer in self.peers:
                del self._known_keys[key_pair(self._secret, replica=peer, role="dialler").public_bytes]
            if peer in self._dialed:
                self._close_dialed(peer, reason="was removed", for_good=True)
            if peer in self.peers:
                self.peers.pop(peer).drop("was removed", for_good=True)
            self.problems.pop(peer, None)
            self._notify()

        self.call_soon(end)

    def close(self, *, deadline_s: float) -> None:
        """Fail all transfers in flight, send goodbyes, and close the sockets."""
        self.call_soon(self._start_closing)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=deadline_s)
        self.completion.close(deadline_s=deadline_s)

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._handle(dict(self._poller.poll(self._pause_ms())))
        finally:
            self._release()

    def _handle(self, ready: Mapping[zmq.Socket[bytes], int]) -> None:
        if self._woken in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._woken.recv(zmq.DONTWAIT)
        self._run_commands()
        # Ended connections come first: a new one may reuse the descriptor. Their last frames still count. Handshakes
        # come last: frames of a connection that is admitted now must not be read before earlier departures.
        leaving = [caller for fd in self.listener.departed() for caller in self._identities_on(fd)]
        for _ in range(_LAST_BURSTS if leaving else 1):
            if not self._read_listener():
                break
        for caller in leaving:
            self._on_disconnect(caller)
        self.listener.decisions()
        for peer in list(self._dialed):
            self._poll_dialed(peer)
        for state in self.peers.values():
            self._is_busy = state.flush() or self._is_busy
        if time.monotonic() >= self._next_heartbeat_s:
            self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
            self._on_heartbeat()

    def _pause_ms(self) -> int:
        """Return the milliseconds until the next timer is due."""
        if self._is_busy or self._commands:
            self._is_busy = False
            return 0
        now_s = time.monotonic()
        pause_s = self._next_heartbeat_s - now_s
        for state in self.peers.values():
            if state.is_held:
                pause_s = min(pause_s, _RETRY_S)
            elif (due_s := state.due_s()) is not None:
                pause_s = min(pause_s, due_s - now_s)
        return max(0, math.ceil(1000 * pause_s))

    def _run_commands(self) -> None:
        while self._commands:
            with self._wake_lock:
                command = self._commands.popleft()
            command()

    def _decide(self, replica: int) -> bytes:
        state = self.peers.get(replica)
        if state is None or state.is_over:
            return UNKNOWN
        return ACCEPTED if state.connection is None else TAKEN

    def _identities_on(self, fd: int) -> list[bytes]:
        return [caller for caller, (_, connection) in self._accepted.items() if connection.tap.fd == fd]

    def _read_listener(self) -> bool:
        has_heard = False
        for found in self.listener.delivered():
            self._on_received(found)
            has_heard = True
        return has_heard

    def _on_disconnect(self, caller: bytes) -> None:
        state, connection = self._accepted.pop(caller)
        if state.connection is connection:
            state.drop("closed its connection")

    def _on_received(self, found: ReceivedFrame) -> None:
        known = self._accepted.get(found.caller)
        if known is None:
            self._admit(found)
            return
        state, connection = known
        if state.connection is connection:
            try:
                state.take(found.frame)
            except FrameError as error:
                state.drop(f"sent {error} and was disconnected", for_good=True)

    def _admit(self, found: ReceivedFrame) -> None:
        state = self.peers.get(found.replica)
        try:
            if state is None:  # it was removed between its handshake and its hello
                raise FrameError("a hello of one who has left")
            if found.frame is None or not isinstance(hello := read(found.frame), Hello):
                raise FrameError("something else before its hello")
            state.check_hello(hello)
            if self._decide(found.replica) != ACCEPTED:
                raise FrameError("a hello while it is connected")
        except FrameError:
            self.listener.turn_away(found)
            return
        connection = self.listener.admit(found)
        self._accepted[found.caller] = (state, connection)
        state.open(connection, hello)
        connection.send(write(self._own))
        self._notify()

    def _poll_dialed(self, peer: int) -> None:
        dial, state = self._dialed[peer], self.peers[peer]
        dial.read_events()
        try:
            for _ in range(_LAST_BURSTS if dial.problem else 1):
                if not self._read_dialed(dial, state):
                    break
        except FrameError as error:
            self._close_dialed(peer, reason=f"sent {error} and was disconnected", for_good=True)
            return
        if dial.problem:
            self._close_dialed(peer, reason="closed its connection", for_good=False)
        elif state.connection is not dial and time.monotonic() - dial.since_s > 2 * HANDSHAKE_S:
            self._close_dialed(peer, reason="it shook hands and then said nothing", for_good=False)

    def _read_dialed(self, dial: DialedConnection, state: Peer) -> bool:
        has_heard = False
        for raw in dial.delivered():
            has_heard = True
            if state.connection is dial:
                state.take(raw)
                continue
            if raw is None or not isinstance(hello := read(raw), Hello):
                raise FrameError("something else before its hello")
            state.check_hello(hello)
            state.open(dial, hello)
            self._notify()
        return has_heard

    def _close_dialed(self, peer: int, *, reason: str, for_good: bool) -> None:
        dial, state = self._dialed.pop(peer), self.peers[peer]
        for plug in (dial.plug, dial.monitor):
            self._poller.unregister(plug)
        dial.close()
        if state.connection is dial or for_good:
            state.drop(reason, for_good=for_good)
        else:
            state.back_off()
            self.problems[peer] = (dial.problem or reason, dial.is_mistrusted)
        self._notify()

    def _redial(self) -> None:
        now_s = time.monotonic()
        for peer, address in self._addresses.items():
            state = self.peers[peer]
            if peer in self._dialed or state.is_over or now_s < state.redial_s or self._until_s is not None:
                continue
            dial = DialedConnection(
                self._context,
                address=address.host,
                port=address.port,
                own=key_pair(self._secret, replica=self._replica, role="dialler"),
                other=key_pair(self._secret, replica=peer, role="door").public,
                hello=self._own,
            )
            self._dialed[peer] = dial
            for plug in (dial.plug, dial.monitor):
                self._poller.register(plug, zmq.POLLIN)

    def _on_heartbeat(self) -> None:
        self._redial()
        self.listener.guard()
        for peer, state in self.peers.items():
            problem = state.check()
            if problem:
                if peer in self._dialed:
                    self._close_dialed(peer, reason=problem, for_good=False)
                else:
                    state.drop(problem)

    def _start_closing(self) -> None:
        if self._until_s is None:
            self._until_s = time.monotonic() + FAREWELL_S
            for state in self.peers.values():
                state.close()

    def _is_finished(self) -> bool:
        if self._until_s is None:
            return False
        return time.monotonic() > self._until_s or all(state.has_drained for state in self.peers.values())

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _release(self) -> None:
        """Close everything, also if the thread ends by an error of ours: no caller may wait for it."""
        with self._wake_lock:
            self._wake.close(linger=0)
        self._run_commands()
        for state in self.peers.values():
            state.close()
        self._notify()
        for dial in self._dialed.values():
            dial.plug.setsockopt(zmq.LINGER, _LINGER_MS)
            dial.close()
        self.listener.plug.setsockopt(zmq.LINGER, _LINGER_MS)
        self.listener.close()
        self._woken.close(linger=0)
        self._context.destroy(
            linger=_LINGER_MS
        )  # also sockets that an error of ours left open: `term` would wait for them
