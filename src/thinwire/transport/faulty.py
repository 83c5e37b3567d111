"""A transport that breaks on purpose, the same way every time: for tests of everything that stands on a transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Never, cast

import torch

from thinwire.errors import DeadlineExceeded, PeerLost
from thinwire.events import Direction
from thinwire.transport.base import Envelope, Pending, Received, Transport, TransportWrapper, innermost
from thinwire.transport.message import pack, unpack
from thinwire.transport.streams import ROUNDS

FaultKind = Literal["delay", "drop", "corrupt", "forge", "die", "fall_silent"]
FAULT_KINDS: tuple[FaultKind, ...] = ("delay", "drop", "corrupt", "forge", "die", "fall_silent")
Forge = Callable[[torch.Tensor, Envelope], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Every field that is None matches all; every matching message is hit.

    Attributes:
        kind: `"delay"`: the message starts (sent) or arrives (received) `delay_s` later. `"drop"`: it is lost; the
            sender notices nothing. `"corrupt"`: one byte is flipped, so that the receiver's check refuses it.
            `"forge"`: the replica lies; what it sends is another payload, which passes every check. `"die"`: from
            `round_id` on, the connection to `peer` is broken. `"fall_silent"`: from `round_id` on, nothing passes to
            or from `peer`, without a sign.
        replica: The replica whose transport breaks, so that all replicas can be given one script.
        direction: `"sent"` or `"received"`, seen from `replica`; a death has none.
        round_id: The round; for a death the first one hit.
        delay_s: Seconds of a delay.
        byte: Which byte of the message is flipped, counted from its start (header) or, negative, from its end.
        forge: Makes the payload of a lie (uint8, as many bytes) of the true one and its envelope; only sent messages
            are hit.

    Raises:
        ValueError: The kind is unknown, a delay is not positive, a lie has no `forge` or is received, or a death is
            given a direction or fragment.

    Example:
        >>> Fault(kind="drop", round_id=3, peer=1, direction="sent").kind
        'drop'
    """

    kind: FaultKind
    replica: int | None = None
    peer: int | None = None
    direction: Direction | None = None
    round_id: int | None = None
    fragment: int | None = None
    delay_s: float = 0.0
    byte: int = -1
    forge: Forge | None = None

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"kind must be one of {', '.join(FAULT_KINDS)}, got {self.kind!r}")
        if (self.kind == "delay") != (self.delay_s > 0):
            raise ValueError(
                f"delay_s must be positive for a delay and 0 otherwise, got {self.delay_s} for {self.kind}"
            )
        if (self.kind == "forge") != (self.forge is not None) or (self.forge and self.direction == "received"):
            raise ValueError(
                f"forge must be given for a lie, which is sent, and for nothing else, got forge={self.forge} for "
                f"{self.kind} with direction={self.direction}"
            )
        if self.is_death and (self.direction is not None or self.fragment is not None):
            raise ValueError(f"{self.kind} ends a whole connection; leave direction and fragment out")

    @property
    def is_death(self) -> bool:
        """Whether it lasts from its round on."""
        return self.kind in ("die", "fall_silent")

    def hits(self, envelope: Envelope, *, replica: int, peer: int, direction: Direction) -> bool:
        if self.kind == "forge" and direction == "received":
            return False
        pairs = ((self.replica, replica), (self.peer, peer), (self.direction, direction))
        if any(wanted is not None and wanted != found for wanted, found in pairs):
            return False
        number, fragment = envelope.address.number, envelope.address.part
        if self.fragment not in (None, fragment):
            return False
        if self.round_id is None:
            return True
        if envelope.stream is not ROUNDS:
            return False
        return number >= self.round_id if self.is_death else number == self.round_id


class FaultyTransport(TransportWrapper):
    """Wrap a transport and let the faults of a script happen; the first fault that hits a message counts.

    A death, once it hit, also covers messages that belong to no round. Put it inside a `RecordingTransport` to have the
    faults in the log.

    Args:
        inner: The transport that moves the bytes.
        script: The faults.
        sleep: How to let time pass for a delay or a lost message.

    Raises:
        ValueError: The script wants to corrupt what is sent, or to delay it, and the transport cannot.
    """

    def __init__(
        self, inner: Transport, script: Sequence[Fault], *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self.script = tuple(script)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._deaths: set[tuple[int, int]] = set()
        for fault in self.script:
            sends = fault.direction != "received"
            if fault.kind == "corrupt" and sends and not hasattr(innermost(inner), "tamper"):
                raise ValueError(f"{type(inner).__name__} has no `tamper`; corrupt what is received instead")
            if fault.kind == "delay" and sends and not inner.runs_in_background:
                raise ValueError(f"{type(inner).__name__} sends at once; delay what is received instead")

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send, or do what the script says, see `Transport.send`."""
        fault = self._fault(envelope, peer=to, direction="sent")
        if fault is not None and fault.kind == "corrupt":
            wire = innermost(self.inner)
            with self._lock:
                wire.tamper = lambda message: _flipped(message, fault.byte)
                try:
                    return self.inner.send(payload, to=to, envelope=envelope)
                finally:
                    wire.tamper = None

        def send() -> Pending:
            true = payload if fault is None or fault.forge is None else fault.forge(payload.clone(), envelope)
            with self._lock:  # a message that leaves beside a corrupt one stays whole
                return self.inner.send(true, to=to, envelope=envelope)

        match fault.kind if fault else None:
            case "die":
                return _Changed(lambda: True, partial(_raise_lost, to, envelope))
            case "drop" | "fall_silent":
                return _Changed(lambda: True, lambda deadline_s: None)  # its sender notices nothing
            case "delay":
                return _Later(send, cast(Fault, fault).delay_s, self._sleep)
        return send()

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive, or do what the script says, see `Transport.receive`."""
        fault = self._fault(envelope, peer=source, direction="received")
        match fault.kind if fault else None:
            case "die":
                return _Changed(lambda: True, partial(_raise_lost, source, envelope))
            case "fall_silent":
                return _Never(source, envelope, self._pass_time)
        # Also a message that is to be lost is taken in, so that its sender notices nothing.
        pending = self.inner.receive(source=source, envelope=envelope)

        def damaged(deadline_s: float) -> Received:
            received = pending.wait(deadline_s=deadline_s)
            assert received is not None, "a receive ends with a message"
            # packed again, changed, and put through the real check
            stamped = replace(envelope, note=received.note, payload_bytes=received.payload.numel())
            message = _flipped(pack(received.payload, sender=source, envelope=stamped), cast(Fault, fault).byte)
            return unpack(message, source=source, envelope=envelope)

        match fault.kind if fault else None:
            case "drop":
                return _Never(source, envelope, self._pass_time, taken=pending)
            case "corrupt":
                return _Changed(pending.done, damaged)
            case "delay":
                return _Late(pending, source, envelope, cast(Fault, fault).delay_s, self._sleep)
        return pending

    def _fault(self, envelope: Envelope, *, peer: int, direction: Direction) -> Fault | None:
        for number, fault in enumerate(self.script):
            is_dead = (number, peer) in self._deaths
            if is_dead or fault.hits(envelope, replica=self.replica, peer=peer, direction=direction):
                if fault.is_death:
                    self._deaths.add((number, peer))
                return fault
        return None

    def _pass_time(self, seconds: float) -> None:
        # In one deterministic order nothing happens while time passes, so none needs to.
        if self.runs_in_background:
            self._sleep(seconds)


class _Changed:
    """A message whose end a fault decides."""

    def __init__(self, done: Callable[[], bool], wait: Callable[[float], Received | None]) -> None:
        self.done = done
        self._wait = wait

    def wait(self, *, deadline_s: float) -> Received | None:
        return self._wait(deadline_s)


def _raise_lost(peer: int, envelope: Envelope, deadline_s: float) -> Never:
    raise PeerLost(
        f"replica {peer} closed its connection during {envelope.describe()}; see its log; restart it and resume from "
        f"the last checkpoint"
    )


class _Never:
    """A message that does not come."""

    def __init__(
        self, peer: int, envelope: Envelope, pass_time: Callable[[float], None], taken: Pending | None = None
    ) -> None:
        self._peer = peer
        self._envelope = envelope
        self._pass_time = pass_time
        self._taken = taken

    def done(self) -> bool:
        return False

    def wait(self, *, deadline_s: float) -> Received | None:
        end = time.monotonic() + deadline_s
        if self._taken is not None:
            self._taken.wait(deadline_s=deadline_s)
            self._taken = None
        self._pass_time(max(0.0, end - time.monotonic()))
        raise _missed(self._peer, self._envelope, deadline_s)


class _Late:
    """A message that arrives `delay_s` after it was asked for at the earliest."""

    def __init__(
        self, inner: Pending, source: int, envelope: Envelope, delay_s: float, sleep: Callable[[float], None]
    ) -> None:
        self._inner = inner
        self._source = source
        self._envelope = envelope
        self._left_s = delay_s
        self._due_s = time.monotonic() + delay_s
        self._sleep = sleep

    def done(self) -> bool:
        # time passes for one that only looks, too
        return (self._left_s <= 0 or time.monotonic() >= self._due_s) and self._inner.done()

    def wait(self, *, deadline_s: float) -> Received | None:
        if time.monotonic() >= self._due_s:
            self._left_s = 0.0
        slept_s = min(self._left_s, deadline_s)
        self._sleep(slept_s)
        self._left_s -= slept_s
        if self._left_s > 0:
            raise _missed(self._source, self._envelope, deadline_s)
        return self._inner.wait(deadline_s=deadline_s - slept_s)


class _Later:
    """A message that is sent `delay_s` late, from a thread of its own."""

    def __init__(self, send: Callable[[], Pending], delay_s: float, sleep: Callable[[float], None]) -> None:
        self._pending: Pending | None = None
        self._failure: Exception | None = None
        self._has_begun = threading.Event()
        threading.Thread(target=self._run, args=(send, delay_s, sleep), daemon=True).start()

    def _run(self, send: Callable[[], Pending], delay_s: float, sleep: Callable[[float], None]) -> None:
        sleep(delay_s)
        try:
            self._pending = send()
        except Exception as failure:
            self._failure = failure
        self._has_begun.set()

    def done(self) -> bool:
        return self._has_begun.is_set() and (self._pending is None or self._pending.done())

    def wait(self, *, deadline_s: float) -> Received | None:
        end = time.monotonic() + deadline_s
        if not self._has_begun.wait(timeout=deadline_s):
            raise DeadlineExceeded(f"a message that a fault delays did not leave within {deadline_s:.3g} s")
        if self._failure is not None:
            raise self._failure
        assert self._pending is not None
        return self._pending.wait(deadline_s=max(0.0, end - time.monotonic()))


def _missed(peer: int, envelope: Envelope, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"replica {peer} did not send {envelope.describe()} within {deadline_s:.3g} s, the deadline that follows from "
        f"measured times; see its log"
    )


def _flipped(message: torch.Tensor, byte: int) -> torch.Tensor:
    changed = message.clone()
    # A byte that the message does not have must not turn the fault into nothing.
    changed[max(-changed.numel(), min(byte, changed.numel() - 1))] ^= 0x40
    return changed
