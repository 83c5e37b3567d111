"""Wire transport: messages between sites over ZeroMQ with CURVE keys, bounded against strangers.

**Trust.** Any process with the job's secret can join, may claim any replica number, and can read the replicas'
messages; a claim of a number whose connection is in use is refused. No other process gets further than a handshake.
Each side proves its key to the other, and everything behind the handshake is encrypted and authenticated. There is no
forward secrecy against a secret that leaks while connections last, and sizes and times of messages can be seen.

**Mechanism.**

- One TCP connection joins two replicas; the one with the higher number dials. One thread owns all sockets. With a
  traffic plan there may be several, each from a source port that takes a path of its own, see `multipath`.
- A message's start of up to 64 KiB may arrive unexpected, up to `MAX_UNEXPECTED` of them and `MAX_UNEXPECTED_BYTES`;
  the sender holds more back. The rest follows in parts after the receiver has checked the start against its posted
  receive, at most a window at a time, which grows as long as that raises the rate. So neither side's queue grows, and a
  short message never waits behind more than a window.
- A send is done when the other replica has the whole message, whether or not it has posted its receive; a message of
  more than 64 KiB waits for that.
- A peer's cost is bounded: frame size, queues, unexpected messages, unread replies, connections without a handshake. A
  peer that exceeds a bound or sends an invalid frame is disconnected for good, which is a `PeerLost` for its messages
  only.
- A connection that breaks, or is silent for longer than `Liveness` allows, fails its transfers in flight with
  `PeerLost`. The dialling side dials again; when the same process answers, new messages go over the new connection.
  Failed messages are not sent again; a whole message that arrived before the break can still be received until then.
- The set of replicas is fixed or open. In an open set, the elastic layer calls `add` and `remove`; one port accepts all
  replicas, and a removed one never comes back under its number.
- A replica may `request` a blob that another has or will have; the response is a message like any other.
- Bytes are those of `message.py`, as over a process group. CURVE, ZMTP and the wire's own frames add 125 bytes to a
  small message and 0.2 % to a large one, heartbeats 80 bytes a second each way
  (`benchmarks/transport/wire_overhead.py`).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from thinwire.errors import ConnectError, TransportError
from thinwire.roles import ROLES, checked_role
from thinwire.transport.addresses import Address, DialPaths, RelayPlace, check_dial_paths
from thinwire.transport.base import MOST_REPLICAS, Envelope, Pending, StreamLimits, check_peer
from thinwire.transport.message import Tamper, header_of, pack
from thinwire.transport.relay.member import RelayMember
from thinwire.transport.secret import Secret
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import Connection, key_pair
from thinwire.transport.wire.framing import MOST_NAME_BYTES, CancelFrame, RequestFrame
from thinwire.transport.wire.io_loop import IoLoop
from thinwire.transport.wire.multipath import MultipathConnection, PathStats
from thinwire.transport.wire.peer import Peer, not_a_member
from thinwire.transport.wire.transfer import RequestTransfer, ResponseTransfer, WireTransfer

CLOSE_S = 10.0
# One failed handshake may be a connection that broke at the wrong moment.
_MAX_HANDSHAKES = 2
_log = logging.getLogger(__name__)


class WireTransport:
    """Transport over CURVE connections, one rank a replica.

    It listens as soon as it is made; `dial` connects it to the replicas with lower numbers, and those with higher
    numbers dial it.

    Args:
        ports: Ports to try one after the other; 0 stands for a free one.
        is_open: Whether the set is open. Then `num_replicas` is only the planned number, a replica's number may be any
            below `MOST_REPLICAS`, there are no others until they are added, and a message for one that is not in the
            set is a `PeerLost`.
        role: What this replica does in the run, one of `thinwire.roles.ROLES`; the others learn it.
        relay: Where others reach this replica, and it reaches them, if they cannot be dialled directly.
        ranks_per_replica: Above 1, each replica here is a rank, and so many consecutive ones are a replica of the run.

    Attributes:
        tamper: Called with each packed message that this replica sends; returns what goes on the wire, or None to lose
            the message. For tests of faults.
        on_request: See `RequestTransport`; each request must be answered by `respond` at some time, also a cancelled
            one, best at once with an empty response. Without it, no blob is there. Set it before others can send
            requests. It, `on_cancel` and `on_lost` are called one at a time and in order, from the completion thread,
            which they must not delay.

    Raises:
        ValueError: There is no such replica or role.
        ConnectError: The address cannot be listened on.

    Example:
        >>> low, high = (
        ...     WireTransport(replica=number, num_replicas=2, secret=Secret(key=bytes(32)), address="127.0.0.1")
        ...     for number in range(2)
        ... )
        >>> high.dial({0: Address(host="127.0.0.1", port=low.port)}, deadline_s=10)
        >>> high.close(), low.close()
        (None, None)
    """

    runs_in_background = True

    def __init__(
        self, *, replica: int, num_replicas: int, secret: Secret, address: str, ports: Sequence[int] = (0,),
        is_open: bool = False, role: str = ROLES[0], ranks_per_replica: int = 1, relay: RelayPlace | None = None,
    ) -> None:  # fmt: skip
        self._most_replicas = MOST_REPLICAS if is_open else num_replicas
        if not 0 <= replica < self._most_replicas:
            raise ValueError(f"replica must be in 0..{self._most_replicas - 1}, got {replica}")
        self.tamper: Tamper | None = None
        self.on_request: Callable[[int, int, bytes], None] | None = None
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_lost: Callable[[int], None] | None = None
        self.replica, self.ranks_per_replica = replica, ranks_per_replica
        self.num_replicas = num_replicas
        self._is_open = is_open
        self._peers: set[int] = set() if is_open else set(range(num_replicas)) - {replica}
        self._removed: set[int] = set()
        self._asks = itertools.count()
        self._in_flight = StreamLimits()
        self._lock = threading.Lock()
        self._is_closed = False
        self._relay = None if relay is None else RelayMember(relay)
        try:
            self._loop = IoLoop(
                replica=replica, num_replicas=None if is_open else num_replicas, secret=secret, address=address,
                ports=ports, role=checked_role(role), on_request=self._on_request, relay=self._relay,
            )  # fmt: skip
        except BaseException:
            self._close_relay()
            raise
        if self._relay is not None:
            key = key_pair(secret, replica=replica, role="door").public_bytes
            self._relay.offer(key, address=address, port=self.port)
        # libzmq's threads must end before the interpreter does
        atexit.register(self.close)

    @property
    def port(self) -> int:
        """The TCP port on which this replica is dialled."""
        return self._loop.listener.port

    def dial(
        self, addresses: Mapping[int, Address], *, deadline_s: float, paths: Mapping[int, DialPaths] | None = None
    ) -> None:
        """Connect to replicas with lower numbers and wait until all of them have answered.

        With planned paths, a replica is dialled from their source ports, and several times where there are several.

        Raises:
            ValueError: A replica's number is not lower, or the set is open.
            ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
        """
        if self._is_open:
            raise ValueError("an open set of replicas has no others at the start; add them one by one")
        for peer in addresses:
            if not 0 <= peer < self.replica:
                raise ValueError(f"replica {self.replica} dials those with lower numbers, got {peer}")
        check_dial_paths(paths or {}, addresses)
        self._loop.dial(addresses, paths=paths)
        _wait_for_all(self._loop, addresses, replica=self.replica, deadline_s=deadline_s)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload to another replica; the transport keeps a copy until it has arrived.

        Raises:
            ValueError: There is no other replica of that number, or the stream does not allow the message at once.
        """
        message: torch.Tensor | None = pack(payload, sender=self.replica, envelope=envelope)
        transfer = self._transfer(to, envelope, verb="take")
        if self.tamper is not None and message is not None:
            message = self.tamper(message)
        if message is None:  # lost on purpose
            transfer.succeed()
            return transfer
        packed = message
        self._on_peer(transfer, lambda state: state.post_send(transfer, packed))
        return transfer

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope.

        Raises:
            ValueError: There is no other replica of that number, or the stream does not allow the message at once.
        """
        transfer = self._transfer(source, envelope, verb="send")
        self._on_peer(transfer, lambda state: state.post_receive(transfer))
        return transfer

    def add(self, peer: int, *, address: Address | None = None) -> bool:
        """Add a replica to the open set: it may dial this one, or is dialled again and again until it is removed.

        Replicas with higher numbers dial this one; one with a lower number needs an address, and a new one counts from
        the next attempt on.

        Returns:
            Whether it was added: a removed replica never comes back.

        Raises:
            ValueError: The set is not open, or there is no such replica, or it has a lower number and no address.
        """
        self._check_open(peer)
        if peer < self.replica and address is None:
            raise ValueError(f"replica {self.replica} dials those with lower numbers: replica {peer} needs an address")
        with self._lock:
            if peer in self._removed:
                return False
            self._peers.add(peer)
            # under the lock, so that commands run in the order of the calls
            self._loop.add(peer, address=address if peer < self.replica else None)
        return True

    def remove(self, peer: int) -> None:
        """Remove a replica from the open set; its transfers in flight fail at once.

        Raises:
            ValueError: The set is not open, or there is no such replica.
        """
        self._check_open(peer)
        with self._lock:
            self._removed.add(peer)
            self._peers.discard(peer)
            self._loop.remove(peer)

    def peers(self) -> tuple[int, ...]:
        """Return the other replicas of the set, connected or not, in ascending order."""
        with self._lock:
            return tuple(sorted(self._peers))

    def role_of(self, peer: int) -> str | None:
        """Return what a replica does in the run, None if it is not connected."""
        state = self._loop.peers.get(peer)
        return state.role if state is not None and state.is_up else None

    def is_connected(self, peer: int) -> bool:
        """Return whether a replica is connected now."""
        state = self._loop.peers.get(peer)
        return state is not None and state.is_up

    def wait_until_connected(self, peers: Iterable[int], *, deadline_s: float) -> tuple[int, ...]:
        """Wait until all of these replicas that are in the set are connected, and return those that are.

        One that is not added, or is removed meanwhile, is not waited for.
        """
        wanted, end = tuple(peers), time.monotonic() + deadline_s
        with self._loop.changed:
            while True:
                there = tuple(peer for peer in wanted if self.is_connected(peer))
                left_s = end - time.monotonic()
                if set(wanted) & self._peers <= set(there) or left_s <= 0 or self._is_closed:
                    return there
                self._loop.changed.wait(min(left_s, 0.2))

    def request(self, source: int, name: bytes, *, most_bytes: int) -> RequestTransfer:
        """Request a blob that another replica has, or will have.

        Returns:
            The transfer, which can be cancelled. The message's reference hash is 1 if the payload is the blob, and 0 if
            the blob is not there and will not be.

        Raises:
            ValueError: There is no other replica of that number, or the name is too short or too long.
        """
        check_peer(source, replica=self.replica, num_replicas=self._most_replicas)
        if not 1 <= len(name) <= MOST_NAME_BYTES:
            raise ValueError(f"a name has 1 to {MOST_NAME_BYTES} bytes, got {len(name)}")
        transfer = RequestTransfer(
            peer=source, number=next(self._asks), name=name, most_bytes=most_bytes, later=self._loop.completion.later,
            withdraw=lambda transfer: self._on_peer(transfer, lambda state: state.post_cancel(transfer)),
        )  # fmt: skip
        self._on_peer(transfer, lambda state: state.post_request(transfer))
        return transfer

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> ResponseTransfer:
        """Respond to a request; the payload is not copied, and must not change until the transfer ends.

        Returns:
            The transfer. It fails with `PeerLost` if the request was cancelled, or its connection broke, even if the
            replica is connected again.
        """
        transfer = ResponseTransfer(
            peer=peer, number=number, num_bytes=payload.numel(), is_there=is_there, later=self._loop.completion.later
        )
        if self.tamper is not None:
            message = self.tamper(pack(payload, sender=self.replica, envelope=transfer.envelope))
            if message is None:  # lost on purpose
                transfer.succeed()
                return transfer
            whole, header = message, b""
        else:
            crc = zlib.crc32(payload.numpy().data) if crc is None else crc
            whole, header = payload, header_of(crc, sender=self.replica, envelope=transfer.envelope)
        self._on_peer(transfer, lambda state: state.post_response(transfer, whole, header=header))
        return transfer

    def close(self) -> None:
        """Fail all transfers in flight, send goodbyes, and end sockets and threads, even if peers are dead."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._loop.close(deadline_s=CLOSE_S)
        self._close_relay()

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def relayed_peers(self) -> tuple[int, ...]:
        """Return the replicas that are reached by the relay now."""
        found = {peer: self._connection(peer) for peer in list(self._loop.peers)}
        return tuple(sorted(peer for peer, one in found.items() if one is not None and one.is_relayed))

    def reading(self, peer: int) -> ConnectionStats | None:
        connection = self._connection(peer)
        return None if connection is None else connection.reading()

    def connections(self) -> Mapping[Hashable, ConnectionStats]:
        found = {peer: self.reading(peer) for peer in list(self._loop.peers)}
        return {peer: one for peer, one in found.items() if one is not None}

    def paths(self, peer: int) -> list[PathStats]:
        bundle = self._connection(peer)
        return bundle.stats() if isinstance(bundle, MultipathConnection) else []

    def limit_path(self, peer: int, path: int, weight: float) -> None:
        """Use a path to a replica for at most this part of the rate that is measured on it; see `MultipathConnection`.

        Raises:
            ValueError: The weight is not in (0, 1].
        """
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {weight}")

        def apply() -> None:
            bundle = self._connection(peer)
            if isinstance(bundle, MultipathConnection) and 0 <= path < bundle.num_paths:
                bundle.limit(path, weight)

        self._loop.call_soon(apply)

    def _connection(self, peer: int) -> Connection | None:
        state = self._loop.peers.get(peer)
        return None if state is None else state.connection

    def _transfer(self, peer: int, envelope: Envelope, *, verb: str) -> WireTransfer:
        check_peer(peer, replica=self.replica, num_replicas=self._most_replicas)
        each = self.ranks_per_replica
        name = f"replica {peer // each} (rank {peer})" if each > 1 else ""
        transfer = WireTransfer(peer=peer, envelope=envelope, verb=verb, later=self._loop.completion.later, name=name)
        transfer.count(self._in_flight, link=(peer, verb))
        return transfer

    def _on_peer(self, transfer: WireTransfer, command: Callable[[Peer], None]) -> None:
        def find() -> None:
            state = self._loop.peers.get(transfer.peer)
            if state is None:
                transfer.fail(not_a_member(transfer))
            else:
                command(state)

        if self._is_closed or not self._loop.call_soon(find):
            transfer.fail_now(
                TransportError(
                    f"the transport was closed with {transfer.describe()} of replica {transfer.peer} in flight"
                )
            )

    def _on_request(self, peer: int, frame: RequestFrame | CancelFrame | None) -> None:
        try:
            if isinstance(frame, RequestFrame):
                if self.on_request is None:
                    self.respond(peer, frame.number, torch.empty(0, dtype=torch.uint8), is_there=False)
                else:
                    self.on_request(peer, frame.number, frame.name)
            elif isinstance(frame, CancelFrame):
                if self.on_cancel is not None:
                    self.on_cancel(peer, frame.number)
            elif self.on_lost is not None:
                self.on_lost(peer)
        except Exception:  # transfers must go on, whatever a caller's function does
            _log.exception("a request of replica %d could not be handled", peer)

    def _check_open(self, peer: int) -> None:
        if not self._is_open:
            raise ValueError("only an open set of replicas can change; make it with is_open=True")
        check_peer(peer, replica=self.replica, num_replicas=MOST_REPLICAS)


def _wait_for_all(loop: IoLoop, addresses: Mapping[int, Address], *, replica: int, deadline_s: float) -> None:
    """Wait until all dialled replicas have answered; name the one that does not.

    Raises:
        ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
    """
    end = time.monotonic() + deadline_s
    problems: dict[int, str] = {}
    failed_handshakes = dict.fromkeys(addresses, 0)

    def failure(peer: int, problem: str) -> ConnectError:
        address = addresses[peer]
        return ConnectError(
            f"replica {replica} could not connect to replica {peer} at {address.host}, port {address.port}: {problem}; "
            f"see its log"
        )

    with loop.changed:
        while missing := [peer for peer in addresses if not loop.peers[peer].is_up]:
            left_s = end - time.monotonic()
            for peer in missing:
                problem, is_mistrusted = loop.problems.pop(peer, ("", False))
                problems[peer] = problem or problems.get(peer, f"it did not answer within {deadline_s:g} s")
                failed_handshakes[peer] += is_mistrusted
                if loop.peers[peer].is_over:
                    raise failure(peer, f"it {loop.peers[peer].reason}")
                if left_s <= 0 or failed_handshakes[peer] >= _MAX_HANDSHAKES:
                    raise failure(peer, problems[peer])
            loop.changed.wait(min(left_s, 0.2))
