"""The thread that owns the sockets of the wire: what comes in, what goes out, who comes and who is gone."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from thinwire.transport.addresses import Address
from thinwire.transport.base import MOST_REPLICAS
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import BEAT_S, HANDSHAKE_S, key_pair
from thinwire.transport.wire.dialer import Dial
from thinwire.transport.wire.framing import INCARNATION_BYTES, Cancel, FrameError, Hello, Want, read, write
from thinwire.transport.wire.listener import TAKEN, UNKNOWN, WELCOME, Delivered, Door, DoorLine
from thinwire.transport.wire.peer import Link
from thinwire.transport.wire.transfer import Finisher

FAREWELL_S = 2.0
_LINGER_MS = 200
# How soon a frame is tried again that libzmq's queue had no room for; a ROUTER does not tell when it has.
_RETRY_S = 0.005
# Of a connection that ended, all that libzmq still holds is heard, which is no more than this.
_LAST_BURSTS = 16


class WireLoop:
    """Links to all other replicas, driven by one thread.

    Args:
        replica: This replica.
        num_replicas: How many there are, None where they come and go.
        secret: The job's.
        address: The IPv4 address to listen on.
        heard: Told, in the thread in which transfers end, what a replica asks for and cancels, and None when its
            connection ended.

    Attributes:
        links: By replica.
        door: Where this one is dialled.
        changed: Notified when a connection came or could not be made.
    """

    def __init__(
        self,
        *,
        replica: int,
        num_replicas: int | None,
        secret: Secret,
        address: str,
        heard: Callable[[int, Want | Cancel | None], None],
    ) -> None:
        self._replica = replica
        self._secret = secret
        self._is_open = num_replicas is None
        self._heard = heard
        self._own = Hello(
            replica=replica,
            num_replicas=num_replicas or MOST_REPLICAS,
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
        )
        self.links: dict[int, Link] = {}
        self._callers: dict[bytes, int] = {}
        for peer in range(num_replicas or 0):
            if peer != replica:
                self._link(peer)
        self.changed = threading.Condition()
        self.problems: dict[int, tuple[str, bool]] = {}
        self._addresses: dict[int, Address] = {}
        self._dials: dict[int, Dial] = {}
        self._door_lines: dict[bytes, tuple[Link, DoorLine]] = {}
        self._until_s: float | None = None
        self._is_busy = False
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.door = self._open_door(address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._set_up_waking()
        self._next_beat_s = time.monotonic() + BEAT_S
        self.finisher = Finisher()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire", daemon=True)
        self._thread.start()

    def _set_up_waking(self) -> None:
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._poller = zmq.Poller()
        for plug in (self._woken, self.door.monitor, self.door.plug, self.door.decider):
            self._poller.register(plug, zmq.POLLIN)

    def _open_door(self, address: str) -> Door:
        keys = key_pair(self._secret, replica=self._replica, role="door")
        return Door(self._context, address=address, keys=keys, callers=self._callers, decide=self._decide)

    def _link(self, peer: int) -> None:
        self.links[peer] = Link(peer=peer, own=self._own, is_open=self._is_open, heard=self._hear)
        if peer > self._replica:
            self._callers[key_pair(self._secret, replica=peer, role="dialler").public_bytes] = peer

    def _hear(self, peer: int, frame: Want | Cancel | None) -> None:
        self.finisher.later(lambda: self._heard(peer, frame))

    def do(self, command: Callable[[], None]) -> bool:
        """Have the thread do something soon; tell whether it still runs."""
        with self._wake_lock:
            if self._wake.closed:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                with contextlib.suppress(zmq.Again):  # it has been woken often enough
                    self._wake.send(b"", zmq.DONTWAIT)
            return True

    def dial(self, addresses: Mapping[int, Address]) -> None:
        """Dial replicas, and again whenever their connection broke."""

        def begin() -> None:
            self._addresses.update(addresses)
            self._redial()

        self.do(begin)

    def add(self, peer: int, *, address: Address | None) -> None:
        """Let a replica dial this one, or dial it where an address is given; for sets that are open."""

        def begin() -> None:
            if peer not in self.links:
                self._link(peer)
            if address is not None:
                self._addresses[peer] = address
                self._redial()

        self.do(begin)

    def remove(self, peer: int) -> None:
        """End the connection to a replica, which is not admitted any more; for sets that are open."""

        def end() -> None:
            self._addresses.pop(peer, None)
            if peer > self._replica and peer in self.links:
                del self._callers[key_pair(self._secret, replica=peer, role="dialler").public_bytes]
            if peer in self._dials:
                self._undial(peer, reason="was removed", for_good=True)
            if peer in self.links:
                self.links.pop(peer).drop("was removed", for_good=True)
            self.problems.pop(peer, None)
            self._tell()

        self.do(end)

    def close(self, *, deadline_s: float) -> None:
        """End all that is in flight, say goodbye, and give the sockets back."""
        self.do(self._begin_to_close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=deadline_s)
        self.finisher.close(deadline_s=deadline_s)

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._turn(dict(self._poller.poll(self._pause_ms())))
        finally:
            self._give_back()

    def _turn(self, ready: Mapping[zmq.Socket[bytes], int]) -> None:
        if self._woken in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._woken.recv(zmq.DONTWAIT)
        self._obey()
        # Who leaves is looked up first: the descriptor may be that of one who comes. What they said last still counts.
        # And decisions come last: who is let in now must not be heard before the departures of then.
        leaving = [caller for fd in self.door.departed() for caller in self._callers_on(fd)]
        for _ in range(_LAST_BURSTS if leaving else 1):
            if not self._hear_door():
                break
        for caller in leaving:
            self._depart(caller)
        self.door.decisions()
        for peer in list(self._dials):
            self._take_from_dial(peer)
        for link in self.links.values():
            self._is_busy = link.flush() or self._is_busy
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + BEAT_S
            self._beat()

    def _pause_ms(self) -> int:
        """Return how long nothing has to be done unless something comes."""
        if self._is_busy or self._commands:
            self._is_busy = False
            return 0
        now_s = time.monotonic()
        pause_s = self._next_beat_s - now_s
        for link in self.links.values():
            if link.is_held:
                pause_s = min(pause_s, _RETRY_S)
            elif (due_s := link.due_s()) is not None:
                pause_s = min(pause_s, due_s - now_s)
        return max(0, math.ceil(1000 * pause_s))

    def _obey(self) -> None:
        while self._commands:
            with self._wake_lock:
                command = self._commands.popleft()
            command()

    def _decide(self, replica: int) -> bytes:
        link = self.links.get(replica)
        if link is None or link.is_over:
            return UNKNOWN
        return WELCOME if link.line is None else TAKEN

    def _callers_on(self, fd: int) -> list[bytes]:
        return [caller for caller, (_, line) in self._door_lines.items() if line.tap.fd == fd]

    def _hear_door(self) -> bool:
        has_heard = False
        for found in self.door.delivered():
            self._take_from_door(found)
            has_heard = True
        return has_heard

    def _depart(self, caller: bytes) -> None:
        link, line = self._door_lines.pop(caller)
        if link.line is line:
            link.drop("closed its connection")

    def _take_from_door(self, found: Delivered) -> None:
        known = self._door_lines.get(found.caller)
        if known is None:
            self._admit(found)
            return
        link, line = known
        if link.line is line:
            try:
                link.take(found.frame)
            except FrameError as error:
                link.drop(f"sent {error} and was disconnected", for_good=True)

    def _admit(self, found: Delivered) -> None:
        link = self.links.get(found.replica)
        try:
            if link is None:  # it was removed between its handshake and its hello
                raise FrameError("a hello of one who has left")
            if found.frame is None or not isinstance(hello := read(found.frame), Hello):
                raise FrameError("something else before its hello")
            link.greet(hello)
            if self._decide(found.replica) != WELCOME:
                raise FrameError("a hello while it is connected")
        except FrameError:
            self.door.turn_away(found)
            return
        line = self.door.admit(found)
        self._door_lines[found.caller] = (link, line)
        link.open(line, hello)
        line.send(write(self._own))
        self._tell()

    def _take_from_dial(self, peer: int) -> None:
        dial, link = self._dials[peer], self.links[peer]
        dial.listen()
        try:
            for _ in range(_LAST_BURSTS if dial.problem else 1):
                if not self._hear_dial(dial, link):
                    break
        except FrameError as error:
            self._undial(peer, reason=f"sent {error} and was disconnected", for_good=True)
            return
        if dial.problem:
            self._undial(peer, reason="closed its connection", for_good=False)
        elif link.line is not dial and time.monotonic() - dial.since_s > 2 * HANDSHAKE_S:
            self._undial(peer, reason="it shook hands and then said nothing", for_good=False)

    def _hear_dial(self, dial: Dial, link: Link) -> bool:
        has_heard = False
        for raw in dial.delivered():
            has_heard = True
            if link.line is dial:
                link.take(raw)
                continue
            if raw is None or not isinstance(hello := read(raw), Hello):
                raise FrameError("something else before its hello")
            link.greet(hello)
            link.open(dial, hello)
            self._tell()
        return has_heard

    def _undial(self, peer: int, *, reason: str, for_good: bool) -> None:
        dial, link = self._dials.pop(peer), self.links[peer]
        for plug in (dial.plug, dial.monitor):
            self._poller.unregister(plug)
        dial.hang_up()
        if link.line is dial or for_good:
            link.drop(reason, for_good=for_good)
        else:
            link.postpone()
            self.problems[peer] = (dial.problem or reason, dial.is_mistrusted)
        self._tell()

    def _redial(self) -> None:
        now_s = time.monotonic()
        for peer, address in self._addresses.items():
            link = self.links[peer]
            if peer in self._dials or link.is_over or now_s < link.redial_s or self._until_s is not None:
                continue
            dial = Dial(
                self._context,
                address=address.host,
                port=address.port,
                own=key_pair(self._secret, replica=self._replica, role="dialler"),
                other=key_pair(self._secret, replica=peer, role="door").public,
                hello=self._own,
            )
            self._dials[peer] = dial
            for plug in (dial.plug, dial.monitor):
                self._poller.register(plug, zmq.POLLIN)

    def _beat(self) -> None:
        self._redial()
        self.door.guard()
        for peer, link in self.links.items():
            problem = link.check()
            if problem:
                if peer in self._dials:
                    self._undial(peer, reason=problem, for_good=False)
                else:
                    link.drop(problem)

    def _begin_to_close(self) -> None:
        if self._until_s is None:
            self._until_s = time.monotonic() + FAREWELL_S
            for link in self.links.values():
                link.close()

    def _is_finished(self) -> bool:
        if self._until_s is None:
            return False
        return time.monotonic() > self._until_s or all(link.has_parted for link in self.links.values())

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _give_back(self) -> None:
        """Also where the thread ends by a slip of ours: nobody may wait for it."""
        with self._wake_lock:
            self._wake.close(linger=0)
        self._obey()
        for link in self.links.values():
            link.close()
        self._tell()
        for dial in self._dials.values():
            dial.plug.setsockopt(zmq.LINGER, _LINGER_MS)
            dial.hang_up()
        self.door.plug.setsockopt(zmq.LINGER, _LINGER_MS)
        self.door.close()
        self._woken.close(linger=0)
        self._context.destroy(linger=_LINGER_MS)  # also what a slip of ours left open: `term` would wait for it
