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
- The replicas are a fixed set here, though little else assumes so: one port takes all callers, keys are derived by
  number, and each peer has a link of its own that may be up, down or over.
- Bytes are those of `message.py`, as over a process group. CURVE, ZMTP and the wire's own frames add 125 bytes to a
  small message and 0.2 % to a large one, heartbeats 80 bytes a second each way
  (`benchmarks/transport/wire_overhead.py`).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping

import torch

from thinwire.errors import ConnectError, TransportError
from thinwire.transport.addresses import Address
from thinwire.transport.base import Envelope, Pending, check_peer
from thinwire.transport.message import pack
from thinwire.transport.secret import Secret
from thinwire.transport.wire_liveness import TcpReading
from thinwire.transport.wire_loop import WireLoop
from thinwire.transport.wire_sending import key_of
from thinwire.transport.wire_transfer import WireTransfer

CLOSE_S = 10.0
Tamper = Callable[[torch.Tensor], "torch.Tensor | None"]
# One failed handshake may be a connection that broke at the wrong moment.
_HANDSHAKES = 2


class WireTransport:
    """A transport over CURVE connections, one rank a replica.

    It listens as soon as it is made; `dial` connects it to the replicas with lower numbers, and those with higher
    numbers dial it.

    Args:
        replica: This replica.
        num_replicas: How many there are.
        secret: The job's.
        address: The IPv4 address to listen on; a free port is taken.

    Attributes:
        tamper: Called with each packed message that this replica sends; returns what goes on the wire, or None to lose
            the message. For tests of faults.

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

    def __init__(self, *, replica: int, num_replicas: int, secret: Secret, address: str) -> None:
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica must be in 0..{num_replicas - 1}, got {replica}")
        self.tamper: Tamper | None = None
        self._replica = replica
        self._num_replicas = num_replicas
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = WireLoop(replica=replica, num_replicas=num_replicas, secret=secret, address=address)
        # libzmq's threads must end before the interpreter does
        atexit.register(self.close)

    @property
    def replica(self) -> int:
        """The number of this replica."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """How many replicas take part."""
        return self._num_replicas

    @property
    def port(self) -> int:
        """The TCP port on which this replica is dialled."""
        return self._loop.door.port

    def dial(self, addresses: Mapping[int, Address], *, deadline_s: float) -> None:
        """Connect to replicas with lower numbers and wait until all of them have answered.

        Args:
            addresses: By replica.
            deadline_s: Seconds to wait.

        Raises:
            ValueError: A replica's number is not lower.
            ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
        """
        for peer in addresses:
            if not 0 <= peer < self._replica:
                raise ValueError(f"replica {self._replica} dials those with lower numbers, got {peer}")
        self._loop.dial(addresses)
        end = time.monotonic() + deadline_s
        links = self._loop.links
        problems: dict[int, str] = {}
        failed_handshakes = dict.fromkeys(addresses, 0)
        with self._loop.changed:
            while missing := [peer for peer in addresses if not links[peer].is_up]:
                left_s = end - time.monotonic()
                for peer in missing:
                    problem, is_mistrusted = self._loop.problems.pop(peer, ("", False))
                    problems[peer] = problem or problems.get(peer, f"it did not answer within {deadline_s:g} s")
                    failed_handshakes[peer] += is_mistrusted
                    if links[peer].is_over:
                        raise ConnectError(self._no_way(peer, addresses[peer], f"it {links[peer].reason}"))
                    if left_s <= 0 or failed_handshakes[peer] >= _HANDSHAKES:
                        raise ConnectError(self._no_way(peer, addresses[peer], problems[peer]))
                self._loop.changed.wait(min(left_s, 0.2))

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
        link, packed = self._loop.links[to], message
        self._do(transfer, lambda: link.post_send(transfer, packed))
        return transfer

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope.

        Raises:
            ValueError: There is no other replica of that number, or a number of the envelope is out of range.
        """
        transfer = self._transfer(source, envelope, verb="send")
        link = self._loop.links[source]
        self._do(transfer, lambda: link.post_receive(transfer))
        return transfer

    def close(self) -> None:
        """End what is in flight, let the others know, and give back sockets and threads, also when peers are dead."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._loop.close(deadline_s=CLOSE_S)

    def reading(self, peer: int) -> TcpReading | None:
        """Return what the kernel knows of the connection to a replica, None where there is none."""
        line = self._loop.links[peer].line
        return None if line is None else line.reading()

    def _transfer(self, peer: int, envelope: Envelope, *, verb: str) -> WireTransfer:
        check_peer(peer, replica=self._replica, num_replicas=self._num_replicas)
        key_of(envelope)
        return WireTransfer(peer=peer, envelope=envelope, verb=verb, later=self._loop.finisher.later)

    def _do(self, transfer: WireTransfer, command: Callable[[], None]) -> None:
        if self._is_closed or not self._loop.do(command):
            transfer.refuse(
                TransportError(
                    f"the transport was closed with {transfer.envelope.describe()} of replica {transfer.peer} in flight"
                )
            )

    def _no_way(self, peer: int, address: Address, problem: str) -> str:
        return (
            f"replica {self._replica} could not connect to replica {peer} at {address.host}, port {address.port}: "
            f"{problem}; see its log"
        )
