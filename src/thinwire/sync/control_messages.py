"""Control messages between replicas that start and end together: step counts, and votes on an agreed stop."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from thinwire.errors import DeadlineExceeded, DesyncError, PayloadError, TransportError
from thinwire.sync.in_flight import CHECK_S
from thinwire.transport.base import Envelope, Kind, Pending, Transport

_LAYOUT = struct.Struct("<QQBB")
# Fragments of these messages; those of `all_gather_json` have 0.
_END, _VOTE = 1, 2
# Polling interval in seconds while a vote is missing.
_POLL_S = 0.005
# Calls of should_stop after which a loop that does no step is taken for one that never will.
_MOST_CALLS = 10_000
# Seconds in which the others can take the message of a replica that fails.
_SEND_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Progress of a replica.

    Attributes:
        steps: Inner steps that it has done.
        launched_step: The last step whose rounds it launched.
        has_ended: Whether it does no more steps.
        wants_stop: Whether it asks all replicas to stop.
    """

    steps: int
    launched_step: int
    has_ended: bool = False
    wants_stop: bool = False

    def to_tensor(self) -> torch.Tensor:
        """Return the payload: uint8, one-dimensional, CPU."""
        raw = _LAYOUT.pack(self.steps, self.launched_step, self.has_ended, self.wants_stop)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_status(payload: torch.Tensor, *, replica: int) -> ReplicaStatus:
    """Read what another replica sent.

    Raises:
        PayloadError: It is no such message.

    Example:
        >>> read_status(ReplicaStatus(steps=3, launched_step=2, has_ended=True).to_tensor(), replica=1)
        ReplicaStatus(steps=3, launched_step=2, has_ended=True, wants_stop=False)
    """
    steps, launched_step, has_ended, wants_stop = _LAYOUT.unpack(bytes(payload.numpy()))
    if has_ended > 1 or wants_stop > 1:
        raise PayloadError(f"replica {replica} sent a status with flags {has_ended} and {wants_stop}, not 0 or 1")
    return ReplicaStatus(
        steps=steps, launched_step=launched_step, has_ended=bool(has_ended), wants_stop=bool(wants_stop)
    )


class ControlMessages:
    """Exchanges control messages with all other replicas.

    A replica sends one message at its end, or when it finds that another has ended before it. The others look for it
    only once a wait is long, so training costs nothing.

    Args:
        transport: Joins the replicas.
        progress: Returns the progress of this replica.
    """

    def __init__(self, transport: Transport, *, progress: Callable[[], ReplicaStatus]) -> None:
        self._transport = transport
        self._progress = progress
        self._others = [replica for replica in range(transport.num_replicas) if replica != transport.replica]
        self._sends: list[Pending] = []
        self._ends: dict[int, Pending] = {}
        self._ended: dict[int, ReplicaStatus] = {}
        self._has_sent_end = False
        self._votes: dict[int, Pending] = {}
        self._own_vote = ReplicaStatus(steps=0, launched_step=0)
        self._interval: int | None = None
        self._asked_at = (-1, 0)  # the step of the latest call of should_stop, and how many calls there were at it
        self._wants_stop = self._is_stopping = False

    def end(self, *, deadline_s: float) -> None:
        """Compare the step counts of all replicas at their end, and wait for them.

        Raises:
            DesyncError: They differ; names all that are known.
            TransportError: A replica sent no count.
        """
        own = self._send_end(has_ended=True)
        statuses = {self._transport.replica: own}
        for replica in self._others:
            statuses[replica] = self._end_of(replica, deadline_s=deadline_s)
            if not statuses[replica].has_ended or statuses[replica].steps != own.steps:
                raise _count_error(statuses)
        for sent in self._sends:
            sent.wait(deadline_s=deadline_s)

    def check(self, step: int) -> None:
        """Look whether a replica has ended that the rounds of a step still need.

        Raises:
            DesyncError: One has; names the step counts that are known.
        """
        statuses = {}
        for replica, pending in self._listen().items():
            if replica in self._ended or pending.done():
                with contextlib.suppress(TransportError):  # a round that needs the replica raises it too
                    statuses[replica] = self._end_of(replica, deadline_s=0.0)
        if any(status.launched_step < step for status in statuses.values()):
            statuses[self._transport.replica] = self._send_end(has_ended=False)
            until_s = time.monotonic() + _SEND_S  # whoever waits for this message gets it before the connection ends
            for sent in self._sends:
                with contextlib.suppress(TransportError):
                    sent.wait(deadline_s=max(0.0, until_s - time.monotonic()))
            raise _count_error(statuses)

    def should_stop(self, local: bool, *, interval: int, deadline_s: float) -> bool:
        """Return whether a replica asked for a stop in the interval before this one: the same on all at one step.

        Args:
            local: Whether this replica asks for it.
            interval: Steps between two votes, in which they travel.
            deadline_s: Seconds until a replica counts as hung.

        Raises:
            DesyncError: A replica has ended already, or voted at another step.
            TransportError: A replica did not vote.
        """
        if not self._others:
            return local
        self._wants_stop |= local
        own = self._progress()
        step, calls = self._asked_at
        self._asked_at = (own.steps, calls + 1 if own.steps == step else 1)
        if self._asked_at[1] > _MOST_CALLS:
            raise DesyncError(
                f"should_stop() was called {_MOST_CALLS} times after step {own.steps} without a step, and the others "
                f"wait for one; call skip_step() where this replica has no batch"
            )
        before, self._interval = self._interval, own.steps // interval
        if self._is_stopping or before in (None, self._interval):
            return self._is_stopping
        self._is_stopping = self._count_votes(deadline_s=deadline_s)
        if not self._is_stopping:
            self._own_vote = replace(own, wants_stop=self._wants_stop)
            self._votes = self._post(_VOTE, self._interval)
            self._send(_VOTE, self._interval, self._own_vote)
        return self._is_stopping

    def _count_votes(self, *, deadline_s: float) -> bool:
        statuses = {replica: self._vote_of(replica, deadline_s=deadline_s) for replica in self._votes}
        statuses[self._transport.replica] = own = self._own_vote
        if any(status.steps != own.steps for status in statuses.values()):
            counts = ", ".join(
                f"replica {replica} after {status.steps} steps" for replica, status in sorted(statuses.items())
            )
            raise DesyncError(
                f"the replicas asked for an agreed stop after different numbers of steps: {counts}; call should_stop() "
                f"after the same steps on all, and skip_step() for a batch that one leaves out"
            )
        return any(status.wants_stop for status in statuses.values())

    def _vote_of(self, replica: int, *, deadline_s: float) -> ReplicaStatus:
        """Wait for a vote, and look now and then whether a replica has ended."""
        pending, until_s = self._votes[replica], time.monotonic() + deadline_s
        check_s = time.monotonic() + CHECK_S
        while self._transport.runs_in_background and not pending.done() and time.monotonic() < until_s:
            if time.monotonic() > check_s:
                self.check(self._progress().launched_step)
                check_s = time.monotonic() + CHECK_S
            time.sleep(_POLL_S)
        try:
            return _read(pending, replica=replica, deadline_s=max(0.0, until_s - time.monotonic()))
        except DeadlineExceeded:
            self.check(self._progress().launched_step)
            raise

    def _send_end(self, *, has_ended: bool) -> ReplicaStatus:
        own = replace(self._progress(), has_ended=has_ended)
        if not self._has_sent_end:
            self._has_sent_end = True
            self._send(_END, 0, own)
        return own

    def _end_of(self, replica: int, *, deadline_s: float) -> ReplicaStatus:
        if replica not in self._ended:
            self._ended[replica] = _read(self._listen()[replica], replica=replica, deadline_s=deadline_s)
        return self._ended[replica]

    def _listen(self) -> dict[int, Pending]:
        if not self._ends:
            self._ends = self._post(_END, 0)
        return self._ends

    def _post(self, part: int, number: int) -> dict[int, Pending]:
        envelope = _envelope(part, number)
        return {peer: self._transport.receive(source=peer, envelope=envelope) for peer in self._others}

    def _send(self, part: int, number: int, status: ReplicaStatus) -> None:
        payload, envelope = status.to_tensor(), _envelope(part, number)
        self._sends = [sent for sent in self._sends if not sent.done()]
        self._sends += [self._transport.send(payload, to=peer, envelope=envelope) for peer in self._others]


def _envelope(part: int, number: int) -> Envelope:
    return Envelope(kind=Kind.CONTROL, round_id=number, fragment=part, payload_bytes=_LAYOUT.size)


def _read(pending: Pending, *, replica: int, deadline_s: float) -> ReplicaStatus:
    received = pending.wait(deadline_s=deadline_s)
    assert received is not None
    return read_status(received.payload, replica=replica)


def _count_error(statuses: Mapping[int, ReplicaStatus]) -> DesyncError:
    counts = ", ".join(
        f"replica {replica} ended after {status.steps} steps" if status.has_ended
        else f"replica {replica} is at step {status.steps}"
        for replica, status in sorted(statuses.items())
    )  # fmt: skip
    return DesyncError(
        f"{counts}; all must do the same number: call skip_step() for a batch that one leaves out, and end all loops "
        f"with should_stop()"
    )
