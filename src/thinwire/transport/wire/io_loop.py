"""I/O loop: the thread that owns the sockets of the wire, and drives connections and peers."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from thinwire.transport.addresses import Address, DialPaths
from thinwire.transport.base import MOST_REPLICAS
from thinwire.transport.relay.member import LOOPBACK, RelayMember
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import HANDSHAKE_S, HEARTBEAT_S, Connection, key_pair
from thinwire.transport.wire.dialer import DialedConnection
from thinwire.transport.wire.framing import (
    INCARNATION_BYTES,
    SESSION_BYTES,
    CancelFrame,
    FrameError,
    Hello,
    PathHello,
    RequestFrame,
    VersionError,
    read,
    write,
)
from thinwire.transport.wire.listener import ACCEPTED, TAKEN, UNKNOWN, AcceptedConnection, Listener, ReceivedFrame
from thinwire.transport.wire.multipath import TICK_S, MultipathConnection
from thinwire.transport.wire.peer import Peer
from thinwire.transport.wire.transfer import CompletionThread
from thinwire.transport.wire.zeromq import zmq

FAREWELL_S = 2.0
_LINGER_MS = 200
# Delay until a frame is retried for which libzmq's queue had no room; a ROUTER does not report when it has.
_RETRY_S = 0.005
# Bursts that are read of a connection that ended: libzmq holds no more than this.
_LAST_BURSTS = 16
# Until one of several connections is dialled again.
_PATH_REDIAL_S = 1.0
# A direct connection that takes longer is not waited for where there is a relay.
_DIRECT_S = 3.0


def _is_in_use(state: Peer, connection: Connection) -> bool:
    """Return whether a connection is that of a replica, or one of its several."""
    bundle = state.connection
    return bundle is connection or (isinstance(bundle, MultipathConnection) and bundle.path_of(connection) is not None)


def _is_of_session(bundle: Connection, first: Hello | PathHello) -> bool:
    if not isinstance(bundle, MultipathConnection) or not isinstance(first, PathHello):
        return False
    return (first.session, first.num_paths) == (bundle.session, bundle.num_paths)


def _deliver(state: Peer, connection: Connection, raw: memoryview | None) -> None:
    bundle = state.connection
    if isinstance(bundle, MultipathConnection):
        for frame in bundle.take(connection, raw):
            state.take(frame)
    else:
        state.take(raw)


class IoLoop:
    """Connections to all other replicas, driven by one thread.

    Args:
        num_replicas: None for an open set.
        ports: Ports to try; 0 stands for a free one.
        relay: Leads to those that cannot be dialled directly; None for no such way.
        on_request: Called in the completion thread with a replica and its request or cancellation, or with None when
            its connection ended.

    Attributes:
        peers: By replica.
        listener: Accepts connections of replicas with higher numbers.
        changed: Notified when a connection was made, or could not be made.
    """

    def __init__(
        self, *, replica: int, num_replicas: int | None, secret: Secret, address: str, ports: Sequence[int], role: str,
        on_request: Callable[[int, RequestFrame | CancelFrame | None], None], relay: RelayMember | None = None,
    ) -> None:  # fmt: skip
        self._replica = replica
        self._secret = secret
        self._is_open = num_replicas is None
        self._on_request, self._relay = on_request, relay
        self._own = Hello(
            replica=replica, num_replicas=num_replicas or MOST_REPLICAS, role=role,
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
        )  # fmt: skip
        self.peers: dict[int, Peer] = {}
        self._known_keys: dict[bytes, int] = {}
        for peer in range(num_replicas or 0):
            if peer != replica:
                self._add_peer(peer)
        self.changed = threading.Condition()
        self.problems: dict[int, tuple[str, bool]] = {}
        self._addresses: dict[int, Address] = {}
        self._dial_paths: dict[int, DialPaths] = {}
        # by replica and path; a replica without planned paths has path 0 alone
        self._dialed: dict[tuple[int, int], DialedConnection] = {}
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._path_redial_s: dict[tuple[int, int], float] = {}
        self._bundles: dict[int, MultipathConnection] = {}
        self._next_tick_s = 0.0
        self._accepted: dict[bytes, tuple[Peer, AcceptedConnection]] = {}
        self._until_s: float | None = None
        self._is_busy = False
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.listener = Listener(
                self._context, address=address, ports=ports, keys=key_pair(secret, replica=replica, role="door"),
                callers=self._known_keys, decide=self._decide,
            )  # fmt: skip
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._poller = zmq.Poller()
        for plug in (self._woken, self.listener.monitor, self.listener.plug, self.listener.decider):
            self._poller.register(plug, zmq.POLLIN)
        self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
        self.completion = CompletionThread()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire", daemon=True)
        self._thread.start()

    def _add_peer(self, peer: int) -> None:
        def later(peer: int, frame: RequestFrame | CancelFrame | None) -> None:
            self.completion.later(lambda: self._on_request(peer, frame))

        self.peers[peer] = Peer(peer=peer, own=self._own, is_open=self._is_open, on_request=later)
        if peer > self._replica:
            self._known_keys[key_pair(self._secret, replica=peer, role="dialler").public_bytes] = peer

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

    def dial(self, addresses: Mapping[int, Address], *, paths: Mapping[int, DialPaths] | None = None) -> None:
        """Dial replicas, and again whenever a connection breaks; from chosen source ports where paths are given."""

        def begin() -> None:
            self._dial_paths.update(paths or {})
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
            self._forget_dialed(peer)
            if peer in self.peers:
                self.peers.pop(peer).drop("was removed", for_good=True)
            self.problems.pop(peer, None)
            self._notify()

        self.call_soon(end)

    def close(self, *, deadline_s: float) -> None:
        """Fail all transfers in flight, send goodbyes, and close the sockets."""

        def begin() -> None:
            if self._until_s is None:
                self._until_s = time.monotonic() + FAREWELL_S
                for state in self.peers.values():
                    state.close()

        self.call_soon(begin)
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
        gone = set(self.listener.departed())
        leaving = [caller for caller, (_, connection) in self._accepted.items() if connection.tap.fd in gone]
        for _ in range(_LAST_BURSTS if leaving else 1):
            if not self._read_listener():
                break
        for caller in leaving:
            self._on_disconnect(caller)
        self.listener.decisions()
        for key in list(self._dialed):
            self._poll_dialed(key)
        self._tick_paths()
        self._flush()
        if time.monotonic() >= self._next_heartbeat_s:
            self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
            self._on_heartbeat()

    def _flush(self) -> None:
        for state in self.peers.values():
            if isinstance(state.connection, MultipathConnection):
                state.connection.flush()
            self._is_busy = state.flush() or self._is_busy

    def _pause_ms(self) -> int:
        """Return the milliseconds until the next timer is due."""
        if self._is_busy or self._commands:
            self._is_busy = False
            return 0
        now_s = time.monotonic()
        pause_s = self._next_heartbeat_s - now_s
        for state in self.peers.values():
            if isinstance(state.connection, MultipathConnection):
                pause_s = min(pause_s, max(0.0, self._next_tick_s - now_s))
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
        # which of several connections it is, and of which session, says its hello
        is_free = state.connection is None or isinstance(state.connection, MultipathConnection)
        return ACCEPTED if is_free else TAKEN

    def _read_listener(self) -> bool:
        """Act on what the listener has received; return whether that was anything."""
        has_heard = False
        for found in self.listener.delivered():
            has_heard = True
            if (known := self._accepted.get(found.caller)) is None:
                self._admit(found)
            elif _is_in_use(*known):
                try:
                    _deliver(*known, found.frame)
                except FrameError as error:
                    known[0].drop(f"sent {error} and was disconnected", for_good=True)
        return has_heard

    def _on_disconnect(self, caller: bytes) -> None:
        state, connection = self._accepted.pop(caller)
        bundle = state.connection
        if isinstance(bundle, MultipathConnection) and bundle.path_of(connection) is not None:
            bundle.detach(connection)
            if not bundle.is_empty:
                return
        elif bundle is not connection:
            return
        state.drop("closed its connection")

    def _admit(self, found: ReceivedFrame) -> None:
        state = self.peers.get(found.replica)
        try:
            if state is None:  # it was removed between its handshake and its hello
                raise FrameError("a hello of one who has left")
            if found.frame is None or not isinstance(first := read(found.frame), Hello | PathHello):
                raise FrameError("something else before its hello")
            hello = first.hello if isinstance(first, PathHello) else first
            state.check_hello(hello)
            bundle = state.connection
            if state.is_over or not (bundle is None or _is_of_session(bundle, first)):
                raise FrameError("a hello while it is connected")
        except VersionError as error:
            # the other end reads the version of the answer, and closes; each then knows both
            assert state is not None
            if state.connection is None and not state.is_over:
                self.listener.send(found.caller, write(self._own))
                state.drop(f"sent {error}", for_good=True)
                self._notify()
            else:
                self.listener.turn_away(found.fd)
            return
        except FrameError:
            self.listener.turn_away(found.fd)
            return
        connection = self.listener.admit(found)
        self._accepted[found.caller] = (state, connection)
        if isinstance(first, Hello):
            state.open(connection, hello)
        else:
            if not isinstance(bundle, MultipathConnection):
                bundle = MultipathConnection(
                    session=first.session, num_paths=first.num_paths, peer_name=f"replica {found.replica}"
                )
                state.open(bundle, hello)
            bundle.attach(first.path, connection)
        connection.send(write(self._own))  # before anything else goes over it
        self._notify()

    def _poll_dialed(self, key: tuple[int, int]) -> None:
        if key not in self._dialed:
            return  # closed with another connection of this replica
        dial, state = self._dialed[key], self.peers[key[0]]
        dial.read_events()
        try:
            for _ in range(_LAST_BURSTS if dial.problem else 1):
                if not self._read_dialed(key, dial, state):
                    break
        except FrameError as error:
            self._forget_dialed(key[0])
            ended = "" if isinstance(error, VersionError) else " and was disconnected"
            state.drop(f"sent {error}{ended}", for_good=True)
            self._notify()
            return
        if dial.problem:
            self._close_dialed(key, reason="closed its connection")
        elif not _is_in_use(state, dial) and time.monotonic() - dial.since_s > 2 * HANDSHAKE_S:
            self._close_dialed(key, reason="it shook hands and then said nothing")

    def _read_dialed(self, key: tuple[int, int], dial: DialedConnection, state: Peer) -> bool:
        has_heard = False
        for raw in dial.delivered():
            has_heard = True
            if _is_in_use(state, dial):
                _deliver(state, dial, raw)
                continue
            if raw is None or not isinstance(hello := read(raw), Hello):
                raise FrameError("something else before its hello")
            state.check_hello(hello)
            peer, path = key
            bundle = self._bundles.get(peer)
            if bundle is None:
                state.open(dial, hello)
            else:
                if state.connection is not bundle:
                    state.open(bundle, hello)
                bundle.attach(path, dial)
            self._attempts[key] = 0
            self._notify()
        return has_heard

    def _close_dialed(self, key: tuple[int, int], *, reason: str) -> None:
        """Close a connection; with the last one of a replica, its transfers fail."""
        dial, (peer, _) = self._unplug(key), key
        state, bundle = self.peers[peer], self._bundles.get(peer)
        was_in_use = _is_in_use(state, dial)
        if bundle is not None:
            bundle.detach(dial)
            self._path_redial_s[key] = time.monotonic() + _PATH_REDIAL_S
        dial.close()
        if bundle is not None and not bundle.is_empty:
            return  # the others go on
        if was_in_use:
            self._forget_dialed(peer)
            state.drop(reason)
        else:
            state.back_off()
            self.problems[peer] = (dial.problem or reason, dial.is_mistrusted)
        self._notify()

    def _unplug(self, key: tuple[int, int]) -> DialedConnection:
        dial = self._dialed.pop(key)
        for plug in (dial.plug, dial.monitor):
            self._poller.unregister(plug)
        return dial

    def _forget_dialed(self, peer: int) -> None:
        """Close all connections that were dialled to a replica."""
        for key in [key for key in self._dialed if key[0] == peer]:
            self._unplug(key).close()
        self._bundles.pop(peer, None)

    def _redial(self) -> None:
        now_s = time.monotonic()
        for peer, address in self._addresses.items():
            state = self.peers[peer]
            if state.is_over or now_s < state.redial_s or self._until_s is not None:
                continue
            planned = self._dial_paths.get(peer)
            num_paths = 1 if planned is None else len(planned.source_ports)
            if num_paths > 1 and peer not in self._bundles:
                assert planned is not None
                self._bundles[peer] = MultipathConnection(
                    session=secrets.token_bytes(SESSION_BYTES), num_paths=num_paths, shares=planned.shares,
                    peer_name=f"replica {peer}",
                )  # fmt: skip
            for path in range(num_paths):
                if (peer, path) not in self._dialed and now_s >= self._path_redial_s.get((peer, path), 0.0):
                    self._dial_path(peer, path, address)

    def _dial_path(self, peer: int, path: int, address: Address) -> None:
        planned, bundle, key = self._dial_paths.get(peer), self._bundles.get(peer), (peer, path)
        hello: Hello | PathHello = self._own
        if bundle is not None:
            hello = PathHello(hello=self._own, session=bundle.session, path=path, num_paths=bundle.num_paths)
        # the port of a connection that ended a minute ago may be refused, so the spare ones take turns
        ports = (None,) if planned is None else planned.source_ports[path]
        source_port = ports[self._attempts[key] % len(ports)]
        self._attempts[key] += 1
        other, connect_s = key_pair(self._secret, replica=peer, role="door"), HANDSHAKE_S
        # directly where that works, and by the relay in every second attempt
        is_relayed = self._relay is not None and self._attempts[key] % 2 == 0
        if self._relay is not None:
            connect_s = _DIRECT_S
            if is_relayed:
                address = Address(host=LOOPBACK, port=self._relay.port_to(other.public_bytes))
        dial = DialedConnection(
            self._context, address=address.host, port=address.port, hello=hello, source_port=source_port,
            own=key_pair(self._secret, replica=self._replica, role="dialler"), other=other.public,
            is_relayed=is_relayed, connect_s=connect_s,
        )  # fmt: skip
        self._dialed[key] = dial
        for plug in (dial.plug, dial.monitor):
            self._poller.register(plug, zmq.POLLIN)

    def _tick_paths(self) -> None:
        """Let the replicas with several connections pass over those that do not deliver."""
        now_s = time.monotonic()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        for state in list(self.peers.values()):
            if isinstance(state.connection, MultipathConnection):
                for silent in state.connection.tick():
                    key = next((key for key, dial in self._dialed.items() if dial is silent), None)
                    if key is None:
                        silent.close()
                    else:
                        self._close_dialed(key, reason="was silent")

    def _on_heartbeat(self) -> None:
        self._redial()
        self.listener.guard()
        for peer, state in self.peers.items():
            problem = state.check()
            if problem:
                self._forget_dialed(peer)
                state.drop(problem)
                self._notify()

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
        # also sockets that an error of ours left open: `term` would wait for them
        self._context.destroy(linger=_LINGER_MS)
