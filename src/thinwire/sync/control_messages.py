"""Control messages between replicas that start and end together: step counts, and votes on an agreed stop."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NoReturn

import torch

from thinwire.errors import DeadlineExceeded, DesyncError, PayloadError, PeerLost, TransportError
from thinwire.sync.in_flight import CHECK_S
from thinwire.transport.base import Envelope, Pending, Transport
from thinwire.transport.streams import CONTROL

_LAYOUT = struct.Struct("<QQBB")
# Second parts of these messages' keys; those of `all_gather_json` have 0.
_END, _VOTE = 1, 2
_NAMES = {_END: "the end of the run", _VOTE: "a vote of should_stop()"}
# Polling interval in seconds while a vote is missing.
_POLL_S = 0.005
# Calls of should_stop after which a loop that does no step is taken for one that never will.
_MOST_CALLS = 10_000
# Seconds in which the others can take the message of a replica that fails.
_SEND_S = 2.0


class LoopCall(IntEnum):
    """Call that a replica is in: one of its loop, or one that others answer with the same call."""

    TRAINING = 0
    VOTING = 1
    CLOSING = 2
    MERGING = 3


_CLOSES = {LoopCall.CLOSING: "close()", LoopCall.MERGING: "close(final_exchange=True)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Progress of a replica.

    Attributes:
        steps: Inner steps that it has done.
        launched_step: The last step whose rounds it launched.
        call: What it does after them.
        wants_stop: Whether it asks all replicas to stop.
    """

    steps: int
    launched_step: int
    call: LoopCall = LoopCall.TRAINING
    wants_stop: bool = False

    @property
    def has_ended(self) -> bool:
        return self.call in _CLOSES

    def describe(self, replica: int) -> str:
        """Return what the replica of this number does, for an error."""
        if self.call in _CLOSES:
            return f"replica {replica} ended after {self.steps} steps with {_CLOSES[self.call]}"
        if self.call is LoopCall.VOTING:
            return f"replica {replica} waits in should_stop() after {self.steps} steps"
        return f"replica {replica} is at step {self.steps}"

    def to_tensor(self) -> torch.Tensor:
        raw = _LAYOUT.pack(self.steps, self.launched_step, self.call, self.wants_stop)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def read_status(payload: torch.Tensor, *, replica: int) -> ReplicaStatus:
    """Read what another replica sent.

    Raises:
        PayloadError: It is no such message.

    Example:
        >>> read_status(ReplicaStatus(steps=3, launched_step=2, call=LoopCall.MERGING).to_tensor(), replica=1)
        ReplicaStatus(steps=3, launched_step=2, call=<LoopCall.MERGING: 3>, wants_stop=False)
    """
    steps, launched_step, call, wants_stop = _LAYOUT.unpack(bytes(payload.numpy()))
    if call > max(LoopCall) or wants_stop > 1:
        raise PayloadError(
            f"replica {replica} sent a status with the flags {call} and {wants_stop}; allowed 0 to "
            f"{max(LoopCall)}, and 0 or 1"
        )
    return ReplicaStatus(steps=steps, launched_step=launched_step, call=LoopCall(call), wants_stop=bool(wants_stop))


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
            DesyncError: They differ, or one does something else; names all that are known.
            TransportError: A replica sent no count.
        """
        own = self._send_end(LoopCall.MERGING)
        statuses = {self._transport.replica: own}
        for replica in self._others:
            statuses[replica] = self._end_of(replica, deadline_s=deadline_s)
            if (statuses[replica].call, statuses[replica].steps) != (own.call, own.steps):
                raise _difference(statuses)
        for sent in self._sends:
            sent.wait(deadline_s=deadline_s)

    def leave(self) -> None:
        """Send the step count of a replica that waits for no other, so that who waits for it learns why."""
        self._send_end(LoopCall.CLOSING)
        self._listen()  # two replicas that both leave take each other's message at once
        self._await_sends()

    def check(self, step: int) -> None:
        """Look whether a replica has ended that the rounds of a step still need.

        Raises:
            DesyncError: One has; names the step counts that are known.
        """
        statuses = self._arrived_statuses()
        if any(status.launched_step < step for status in statuses.values()):
            self._fail(statuses, LoopCall.TRAINING)

    def _arrived_statuses(self) -> dict[int, ReplicaStatus]:
        statuses = {}
        for replica, pending in self._listen().items():
            if replica in self._ended or pending.done():
                with contextlib.suppress(TransportError):  # a round that needs the replica raises it too
                    statuses[replica] = self._end_of(replica, deadline_s=0.0)
        return statuses

    def _fail(self, statuses: dict[int, ReplicaStatus], call: LoopCall) -> NoReturn:
        statuses[self._transport.replica] = self._send_end(call)
        self._await_sends()
        raise _difference(statuses)

    def _await_sends(self) -> None:
        """Wait a little, so that who waits for these messages gets them before the connection ends."""
        until_s = time.monotonic() + _SEND_S
        for sent in self._sends:
            with contextlib.suppress(TransportError):
                sent.wait(deadline_s=max(0.0, until_s - time.monotonic()))

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
                self._refuse_ended(pending)
                check_s = time.monotonic() + CHECK_S
            time.sleep(_POLL_S)
        try:
            return _read(pending, _VOTE, replica=replica, deadline_s=max(0.0, until_s - time.monotonic()))
        except TransportError:
            self._refuse_ended(pending)
            self._send_end(LoopCall.VOTING)  # the other may wait for a round of this one
            self._await_sends()
            raise

    def _refuse_ended(self, vote: Pending) -> None:
        """Refuse a missing vote where a replica has ended: a vote that comes is sent before."""
        statuses = self._arrived_statuses()
        if any(status.has_ended for status in statuses.values()) and not _has_come(vote):
            self._fail(statuses, LoopCall.VOTING)

    def _send_end(self, call: LoopCall) -> ReplicaStatus:
        own = replace(self._progress(), call=call)
        if not self._has_sent_end:
            self._has_sent_end = True
            self._send(_END, 0, own)
        return own

    def _end_of(self, replica: int, *, deadline_s: float) -> ReplicaStatus:
        if replica not in self._ended:
            self._ended[replica] = _read(self._listen()[replica], _END, replica=replica, deadline_s=deadline_s)
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
    return Envelope(stream=CONTROL, key=(number, part), payload_bytes=_LAYOUT.size)


def _read(pending: Pending, part: int, *, replica: int, deadline_s: float) -> ReplicaStatus:
    try:
        received = pending.wait(deadline_s=deadline_s)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"replica {replica} did not send {_NAMES[part]} within {deadline_s:.3g} s; see whether it hangs, or does "
            f"other work after its last step"
        ) from error
    except PeerLost as error:
        raise PeerLost(
            f"replica {replica} closed its connection before it sent {_NAMES[part]}; see its log for an error, and "
            f"end all loops with close(final_exchange=True)"
        ) from error
    assert received is not None
    return read_status(received.payload, replica=replica)


def _has_come(vote: Pending) -> bool:
    try:
        return vote.done() and vote.wait(deadline_s=0.0) is not None
    except TransportError:
        return False


def _difference(statuses: Mapping[int, ReplicaStatus]) -> DesyncError:
    found = ", ".join(status.describe(replica) for replica, status in sorted(statuses.items()))
    if len({status.steps for status in statuses.values()}) > 1:
        remedy = "all must do the same number: call skip_step() for a batch that one leaves out"
    else:
        remedy = "all must make the same calls after the same steps"
    return DesyncError(
        f"{found}; {remedy}, call should_stop() after each step on all, and close(final_exchange=True) once it is True"
    )
