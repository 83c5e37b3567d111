"""Messages between sites: ZeroMQ with CURVE keys, so that a stranger can neither join, nor read, nor fill the memory.

**Who is trusted.** Whoever has the job's secret can join, may claim any replica number, and can read what the replicas
send each other; a claim of a number whose connection is in use is refused. Nobody else gets further than a handshake.
Each side proves its key to the other, and everything behind the handshake is encrypted and authenticated. There is no
forward secrecy against a secret that leaks while connections last, and sizes and times of messages can be seen.

**How it works.**

- One TCP connection joins two replicas; the one with the higher number dials. One thread owns all sockets.
- A message's opening of up to 64 KiB may come unasked, up to `EARLY_MESSAGES` of them, of `EARLY_BYTES`; a sender holds
  back what would be more. The rest comes in parts after the receiver has checked the opening against its posted
  receive, and not more than a window at a time, which grows where that makes the bytes come faster. So neither side's
  queue grows, and a short message never waits behind more than a window.
- A send is done when the other replica has the whole message, whether or not it has posted its receive; a message of
  more than 64 KiB waits for that.
- What a peer may cost is bounded: frames of one size at most, queues, early messages, answers unread, connections
  without a handshake. Who exceeds a bound or sends what is no frame is disconnected for good; that is a `PeerLost` for
  this peer's messages and no other's.
- A connection that breaks, or over which nothing comes for longer than `Liveness` allows, fails what is on its way over
  it with `PeerLost`. The dialling side dials again; when the same process answers, new messages go over the new
  connection. Messages that had failed are not sent again; a whole message that came before the break can still be
  received until then.
- The replicas are a fixed set, or an open one: there, whoever knows who takes part calls `add` and `remove`, one port
  takes all callers, and a replica that was removed never comes back under its number.
- A replica may `request` another for what that has under a name, or will have; the answer is a message like any other.
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
from collections.abc import Callable, Iterable, Mapping

import torch

from thinwire.errors import ConnectError, TransportError
from thinwire.transport.addresses import Address
from thinwire.transport.base import MOST_REPLICAS, Envelope, Pending, check_peer
from thinwire.transport.message import header_of, pack
from thinwire.transport.secret import Secret
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.flow_control import key_of
from thinwire.transport.wire.framing import MOST_NAME_BYTES, CancelFrame, RequestFrame
from thinwire.transport.wire.io_loop import IoLoop
from thinwire.transport.wire.peer import Peer, not_a_member
from thinwire.transport.wire.transfer import RequestTransfer, ResponseTransfer, WireTransfer

CLOSE_S = 10.0
Tamper = Callable[[torch.Tensor], "torch.Tensor | None"]
_log = logging.getLogger(__name__)


class WireTransport:
    """A transport over CURVE connections, one rank a replica.

    It listens as soon as it is made; `dial` connects it to the replicas with lower numbers, and those with higher
    numbers dial it.

    Args:
        replica: This replica.
        num_replicas: How many there are.
        secret: The job's.
        address: The IPv4 address to listen on; a free port is taken.
        is_open: Whether replicas come and go: then `num_replicas` is only how many are planned, the number of a replica
            may be anything below `MOST_REPLICAS`, there are no others until they are added, and a message for one that
            does not take part is a `PeerLost`.

    Attributes:
        tamper: Called with each packed message that this replica sends; returns what goes on the wire, or None to lose
            the message. For tests of faults.
        on_request: Called with the number of a replica, the number of its ask and the name that it asks for; whoever is
            called has `respond` called some day. Without it, nothing is there. It is set before others can ask.
        on_cancel: Called with a replica and the number of an ask that has no answer yet and that nobody waits for any
            more; it is still to be answered, best at once with nothing.
        on_lost: Called with a replica whose connection ended, or that was removed before it had one; the asks that it
            brought are forgotten. These three are called one at a time and in order, from the thread in which transfers
            end, which they must not hold up.

    Raises:
        ValueError: There is no such replica.
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

    def __init__(self, *, replica: int, num_replicas: int, secret: Secret, address: str, is_open: bool = False) -> None:
        self._most_replicas = MOST_REPLICAS if is_open else num_replicas
        if not 0 <= replica < self._most_replicas:
            raise ValueError(f"replica must be in 0..{self._most_replicas - 1}, got {replica}")
        self.tamper: Tamper | None = None
        self.on_request: Callable[[int, int, bytes], None] | None = None
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_lost: Callable[[int], None] | None = None
        self._replica = replica
        self._num_replicas = num_replicas
        self._is_open = is_open
        self._peers: set[int] = set() if is_open else set(range(num_replicas)) - {replica}
        self._removed: set[int] = set()
        self._asks = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = IoLoop(
            replica=replica,
            num_replicas=None if is_open else num_replicas,
            secret=secret,
            address=address,
            on_request=self._on_request,
        )
        # libzmq's threads must end before the interpreter does
        atexit.register(self.close)

    @property
    def replica(self) -> int:
        """The number of this replica."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """How many replicas take part, or are planned to."""
        return self._num_replicas

    @property
    def port(self) -> int:
        """The TCP port on which this replica is dialled."""
        return self._loop.listener.port

    def dial(self, addresses: Mapping[int, Address], *, deadline_s: float) -> None:
        """Connect to replicas with lower numbers and wait until all of them have answered.

        Args:
            addresses: By replica.
            deadline_s: Seconds to wait.

        Raises:
            ValueError: A replica's number is not lower, or the set is open.
            ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
        """
        if self._is_open:
            raise ValueError("an open set of replicas has no others to dial at the start; add them one by one")
        for peer in addresses:
            if not 0 <= peer < self._replica:
                raise ValueError(f"replica {self._replica} dials those with lower numbers, got {peer}")
        self._loop.dial(addresses)
        wait_for_all(self._loop, addresses, replica=self._replica, deadline_s=deadline_s)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload to another replica; the transport keeps a copy until it is there.

        Args:
            payload: uint8, `(payload_bytes,)`, contiguous, on the CPU.
            to: The replica.
            envelope: What the message is.

        Raises:
            ValueError: There is no other replica of that number, or a number of the envelope is out of range.
        """
        transfer = self._transfer(to, envelope, verb="take")
        message: torch.Tensor | None = pack(payload, sender=self._replica, envelope=envelope)
        if self.tamper is not None and message is not None:
            message = self.tamper(message)
        if message is None:  # lost on purpose
            transfer.succeed()
            return transfer
        packed = message
        self._on_peer(transfer, lambda link: link.post_send(transfer, packed))
        return transfer

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope.

        Raises:
            ValueError: There is no other replica of that number, or a number of the envelope is out of range.
        """
        transfer = self._transfer(source, envelope, verb="send")
        self._on_peer(transfer, lambda link: link.post_receive(transfer))
        return transfer

    def add(self, peer: int, *, address: Address | None = None) -> bool:
        """Let a replica take part: it may dial this one, or is dialled, again and again, until it is removed.

        Args:
            peer: Its number.
            address: Where it is dialled, for one with a lower number than this one's; another address than before
                counts from the next time on. The others dial this replica.

        Returns:
            Whether it may take part: one that was removed never comes back.

        Raises:
            ValueError: The set is not open, or there is no such replica, or it has a lower number and no address.
        """
        self._check_open(peer)
        if peer < self._replica and address is None:
            raise ValueError(f"replica {self._replica} dials those with lower numbers: replica {peer} needs an address")
        with self._lock:
            if peer in self._removed:
                return False
            self._peers.add(peer)
            # under the lock, so that commands come in the order of the calls
            self._loop.add(peer, address=address if peer < self._replica else None)
        return True

    def remove(self, peer: int) -> None:
        """End the connection to a replica for good; what is on its way to and from it fails at once.

        Raises:
            ValueError: The set is not open, or there is no such replica.
        """
        self._check_open(peer)
        with self._lock:
            self._removed.add(peer)
            self._peers.discard(peer)
            self._loop.remove(peer)

    def peers(self) -> tuple[int, ...]:
        """Return the others that take part, connected or not, in the order of their numbers."""
        with self._lock:
            return tuple(sorted(self._peers))

    def is_connected(self, peer: int) -> bool:
        """Tell whether there is a connection to a replica now."""
        link = self._loop.peers.get(peer)
        return link is not None and link.is_up

    def wait_until_connected(self, peers: Iterable[int], *, deadline_s: float) -> tuple[int, ...]:
        """Wait until there are connections to all of these replicas that take part.

        Args:
            peers: Their numbers; one that is not added, or is removed meanwhile, is not waited for.
            deadline_s: Seconds after which to go on with those that there are.

        Returns:
            Those that are connected now.
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
        """Ask another replica for what it has, or will have, under a name.

        Args:
            source: The replica.
            name: 1 to 64 bytes.
            most_bytes: The most that may come.

        Returns:
            What is on its way. The message's reference hash is 1 where the payload is what was asked for, 0 where that
            is not there and will not come. It can be cancelled.

        Raises:
            ValueError: There is no other replica of that number, or the name is too short or too long.
        """
        check_peer(source, replica=self._replica, num_replicas=self._most_replicas)
        if not 1 <= len(name) <= MOST_NAME_BYTES:
            raise ValueError(f"a name has 1 to {MOST_NAME_BYTES} bytes, got {len(name)}")
        transfer = RequestTransfer(
            peer=source,
            number=next(self._asks),
            name=name,
            most_bytes=most_bytes,
            later=self._loop.completion.later,
            withdraw=lambda transfer: self._on_peer(transfer, lambda link: link.post_cancel(transfer)),
        )
        self._on_peer(transfer, lambda link: link.post_request(transfer))
        return transfer

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> ResponseTransfer:
        """Answer an ask; the payload is not copied, and must stay as it is until the transfer ends.

        Args:
            peer: Who asked.
            number: Of the ask.
            payload: uint8, `(payload_bytes,)`, contiguous, on the CPU.
            is_there: Whether the payload is what was asked for.
            crc: CRC-32 of the payload, where it is known.

        Returns:
            What is on its way. It is a `PeerLost` where nobody waits for it any more, also when the asker's connection
            broke and came back.
        """
        transfer = ResponseTransfer(
            peer=peer,
            number=number,
            num_bytes=payload.numel(),
            is_there=is_there,
            later=self._loop.completion.later,
        )
        if self.tamper is not None:
            message = self.tamper(pack(payload, sender=self._replica, envelope=transfer.envelope))
            if message is None:  # lost on purpose
                transfer.succeed()
                return transfer
            whole, header = message, b""
        else:
            crc = zlib.crc32(payload.numpy().data) if crc is None else crc
            whole, header = payload, header_of(crc, sender=self._replica, envelope=transfer.envelope)
        self._on_peer(transfer, lambda link: link.post_response(transfer, whole, header=header))
        return transfer

    def close(self) -> None:
        """End what is in flight, let the others know, and give back sockets and threads, also when peers are dead."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._loop.close(deadline_s=CLOSE_S)

    def reading(self, peer: int) -> ConnectionStats | None:
        """Return what the kernel knows of the connection to a replica, None where there is none."""
        link = self._loop.peers.get(peer)
        line = None if link is None else link.connection
        return None if line is None else line.reading()

    def _transfer(self, peer: int, envelope: Envelope, *, verb: str) -> WireTransfer:
        check_peer(peer, replica=self._replica, num_replicas=self._most_replicas)
        key_of(envelope)
        return WireTransfer(peer=peer, envelope=envelope, verb=verb, later=self._loop.completion.later)

    def _on_peer(self, transfer: WireTransfer, command: Callable[[Peer], None]) -> None:
        def find() -> None:
            link = self._loop.peers.get(transfer.peer)
            if link is None:
                transfer.fail(not_a_member(transfer))
            else:
                command(link)

        self._call_soon(transfer, find)

    def _call_soon(self, transfer: WireTransfer, command: Callable[[], None]) -> None:
        if self._is_closed or not self._loop.call_soon(command):
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
        except Exception:  # transfers must go on ending, whatever a caller's own function does
            _log.exception("what replica %d asks for could not be looked at", peer)

    def _check_open(self, peer: int) -> None:
        if not self._is_open:
            raise ValueError("only an open set of replicas has some that come and go; make it with is_open=True")
        check_peer(peer, replica=self._replica, num_replicas=MOST_REPLICAS)


# One failed handshake may be a connection that broke at the wrong moment.
_HANDSHAKES = 2


def wait_for_all(loop: IoLoop, addresses: Mapping[int, Address], *, replica: int, deadline_s: float) -> None:
    """Wait until all replicas that are being dialled have answered.

    Args:
        loop: Which dials them.
        addresses: By replica.
        replica: This one.
        deadline_s: Seconds to wait.

    Raises:
        ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
    """
    end = time.monotonic() + deadline_s
    problems: dict[int, str] = {}
    failed_handshakes = dict.fromkeys(addresses, 0)

    def no_way(peer: int, problem: str) -> ConnectError:
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
                    raise no_way(peer, f"it {loop.peers[peer].reason}")
                if left_s <= 0 or failed_handshakes[peer] >= _HANDSHAKES:
                    raise no_way(peer, problems[peer])
            loop.changed.wait(min(left_s, 0.2))
