"""Join of a replica: gets its number from the coordinator, connects to the others, and opens the blob store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.elastic.carried_blobs import CarriedBlobs
from thinwire.elastic.coordinator_client import MemberConnection, connect_coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession, Neighbour, PeerActivity, RoundLimits
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.mailbox import MailboxConnection
from thinwire.elastic.protocol import RUN_OVER, VERSION, Message
from thinwire.elastic.round_driver import ReplicaRounds
from thinwire.errors import Refused, RunOver
from thinwire.events import Transfer
from thinwire.transport.addresses import Address, ListenConfig, address_towards
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.recording import RecordingRequestTransport
from thinwire.transport.secret import Secret
from thinwire.transport.wire.wire_transport import WireTransport
from thinwire.version import __version__

_NOT_THERE_S = 30.0
# In place of an address where replicas do not connect to each other.
_ON_CARRIER = Address(host="carrier", port=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A replica that has joined."""

    job: Mapping[str, Any]  # the job as the coordinator describes it
    session: CoordinatorSession  # session with the coordinator
    transport: RecordingRequestTransport  # its connections
    library: BlobStore  # blob store of this replica
    rounds: ReplicaRounds  # the engine's interface to elastic rounds
    connection: MemberConnection  # its connection to the coordinator

    @property
    def replica(self) -> int:
        """Its number."""
        return self.session.replica

    def announce(
        self, *, corpus: str, num_windows: int, address: Address, held_step: int = 0, era: int = 0,
        disk_step: int = 0, first_values: str = "",
    ) -> None:  # fmt: skip
        """Report this replica's address, its corpus, and the states that it holds.

        Args:
            corpus: SHA-256 of the corpus.
            num_windows: Windows of the corpus.
            address: Where the others reach it.
            held_step: Step of a state of its own, 0 for none.
            era: Era of that state.
            disk_step: Step of the checkpoint that it can read, 0 for none.
            first_values: Hash of its model's values; empty where all replicas begin with the same.
        """
        self.session.send_reliably(
            "here", address=address.host, port=address.port, corpus=corpus, windows=num_windows, held=held_step,
            era=era, disk=disk_step, first_values=first_values,
        )  # fmt: skip

    def close(self, *, why: str = "") -> None:
        """Leave the job, and close sockets and threads."""
        self.session.send("leave", why=why)
        self.connection.close()
        self.library.close()
        self.transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """Values of a job that a session needs."""

    num_replicas: int  # planned replicas
    interval_steps: int  # H, inner steps
    limits: RoundLimits = field(default_factory=RoundLimits)  # limits on waiting for parts


class _Handshake:
    """Messages of the coordinator before the session exists."""

    def __init__(self) -> None:
        self.session: CoordinatorSession | None = None
        self.welcome: Message | None = None
        self.refusal = ""
        self._early: list[Message] = []
        self._lock = threading.Lock()
        self.has_come = threading.Event()

    def receive(self, message: Message) -> None:
        with self._lock:
            if self.session is not None:
                self.session.receive(message)
            elif message["kind"] == "welcome":
                self.welcome = message
                self.has_come.set()
            elif message["kind"] == "refused":
                self.refusal = message["why"]
                self.has_come.set()
            else:
                self._early.append(message)

    def tick(self) -> None:
        session = self.session
        if session is not None:
            session.tick()

    def attach(self, session: CoordinatorSession) -> None:
        with self._lock:
            self.session = session
            for message in self._early:
                session.receive(message)


def join(
    invitation: Invitation, *, secret: Secret, plan_of: Callable[[Mapping[str, Any]], JoinPlan],
    listen: ListenConfig | None = None, deadline_s: float = _NOT_THERE_S,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Membership, Address]:  # fmt: skip
    """Join a job.

    Args:
        invitation: Where its coordinator is.
        secret: Secret of the job, or the key of an invitation.
        plan_of: Reads what the session needs from the job.
        listen: Where this replica listens; None for the address from which the coordinator is reached. Unused on a
            carrier.
        deadline_s: Seconds to wait for the coordinator.
        warn: Called later while the coordinator is silent.

    Returns:
        The membership, and the address that others dial.

    Raises:
        ConnectError: The coordinator did not answer; with the remedy.
        WrongCoordinator: What answers there has not its key.
        Refused: It takes no replica of this kind; with the remedy.
        RunOver: The run has ended.
    """
    handshake = _Handshake()
    connection = connect_coordinator(
        invitation, secret=secret, on_message=handshake.receive, on_tick=handshake.tick, warn=warn
    )
    try:
        welcome = _request_join(connection, handshake, invitation, deadline_s=deadline_s)
        replica, job = welcome["replica"], welcome["job"]
        if welcome["secret"]:  # an invitation opens the way to the coordinator alone
            secret = Secret(key=bytes.fromhex(welcome["secret"]))
        plan = plan_of(job)
        wire = None
        if not invitation.carrier:
            listen = listen or ListenConfig(address=address_towards(invitation.host))
            wire = WireTransport(
                replica=replica, num_replicas=plan.num_replicas, secret=secret, address=listen.address,
                ports=listen.candidates, is_open=True, relay=listen.relay,
            )  # fmt: skip
    except BaseException as error:
        if handshake.welcome is not None:  # the coordinator gave it a number, and reports why nothing comes of it
            connection.send("leave", why=f"could not take part: {error}")
        connection.close()
        raise
    session = CoordinatorSession(
        replica=replica, interval_steps=plan.interval_steps, send=connection.send,
        on_roster=lambda neighbours: None if wire is None else _update_peers(wire, neighbours, replica=replica),
        warn=warn, activity=PeerActivity(wire), limits=plan.limits,
    )  # fmt: skip
    if isinstance(connection, MailboxConnection):
        blobs = CarriedBlobs(
            connection.carrier, replica=replica, num_replicas=plan.num_replicas, budget=connection.budget, warn=warn,
            uploads_bulk=lambda: min(session.active()) == replica,
        )  # fmt: skip
        transport = RecordingRequestTransport(blobs)
        blobs.log = transport.log
        library = BlobStore(transport, mirror=blobs)
    else:
        assert wire is not None
        transport = RecordingRequestTransport(wire)
        library = BlobStore(transport)
    rounds = ReplicaRounds(session, library)
    library.is_past = rounds.is_past
    _report_losses(transport, session)
    transport.log.add_sink(lambda transfer: note_rate(session, transfer))
    handshake.attach(session)
    membership = Membership(
        job=job, session=session, transport=transport, library=library, rounds=rounds, connection=connection
    )
    return membership, _ON_CARRIER if wire is None or listen is None else listen.advertised(wire.port)


def _request_join(
    connection: MemberConnection, handshake: _Handshake, invitation: Invitation, *, deadline_s: float
) -> Message:
    until_s = time.monotonic() + deadline_s
    host = socket.gethostname()
    while not handshake.has_come.is_set():
        connection.send("join", version=VERSION, thinwire=__version__, host=host)
        handshake.has_come.wait(1.0)
        if time.monotonic() > until_s and not handshake.has_come.is_set():
            raise connection.no_answer(deadline_s=deadline_s)
    if handshake.refusal == RUN_OVER:
        raise RunOver(RUN_OVER)
    if handshake.welcome is None:
        raise Refused(f"the coordinator at {invitation.place} refuses this replica: {handshake.refusal}")
    return handshake.welcome


def _update_peers(wire: WireTransport, neighbours: Mapping[int, Neighbour], *, replica: int) -> None:
    """Connect to new members, and disconnect from those that left."""
    for peer in set(wire.peers()) - set(neighbours):
        wire.remove(peer)
    for peer, found in neighbours.items():
        if peer != replica:
            address = Address(host=found.address, port=found.port) if peer < replica else None
            wire.add(peer, address=address)


def note_rate(session: CoordinatorSession, transfer: Transfer) -> None:
    """Measure a link from a sent answer; requests are not measured, since they may wait for their blob."""
    if transfer.direction == "sent" and not transfer.error:
        seconds = transfer.finished_s - transfer.started_s
        session.link_rates.observe(transfer.peer, num_bytes=transfer.wire_bytes, seconds=seconds)


def _report_losses(transport: RecordingRequestTransport, session: CoordinatorSession) -> None:
    """Report lost connections to the coordinator, so that it checks those replicas sooner."""
    inner = transport.on_lost

    def lost(peer: int) -> None:
        if inner is not None:
            inner(peer)
        session.send("lost", replica=peer)

    transport.on_lost = lost
