"""Rounds on their way: an exchange driven by a thread of its own, or step by step from the training loop."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from thinwire.averaging.delivery import Average, Steps, Wait
from thinwire.sync.schedule import Round
from thinwire.transport.base import Received


class InFlight(Protocol):
    """One round between launch and apply."""

    @property
    def round(self) -> Round:
        """The round."""
        ...

    @property
    def duration_s(self) -> float:
        """Seconds from launch to arrival, 0 where nobody measured or nothing has arrived."""
        ...

    @property
    def num_bytes(self) -> int:
        """Payload bytes that this replica sends, at most."""
        ...

    def poll(self) -> bool:
        """Do what can be done without waiting; tell whether the result is there (or an error)."""
        ...

    def result(self) -> Average:
        """Wait for the result, up to the deadline given at the launch.

        Raises:
            TransportError: A peer was lost, was late, or sent something wrong.
        """
        ...


class Background:
    """Drives an exchange from a thread, so that the wire is busy while the accelerator computes.

    Args:
        steps: The exchange; its first part (encode, start to send) has been run by `launch` already.
        first: What it waits for first.
        round: The round.
        deadline_s: Seconds until a peer counts as hung.
        num_bytes: Payload bytes that this replica sends, at most.
    """

    def __init__(self, steps: Steps, first: Wait, *, round: Round, deadline_s: float, num_bytes: int = 0) -> None:
        self.round = round
        self.num_bytes = num_bytes
        self.duration_s = 0.0
        self._average: Average | None = None
        self._failure: BaseException | None = None
        self._started_s = time.monotonic()
        self._until_s = self._started_s + deadline_s
        self._thread = threading.Thread(target=self._drive, args=(steps, first), name=f"round-{round.id}", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """See `InFlight.poll`."""
        return not self._thread.is_alive()

    def result(self) -> Average:
        """See `InFlight.result`; every wait inside has the deadline, so the thread ends."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._average is not None
        return self._average

    def _drive(self, steps: Steps, wait: Wait) -> None:
        try:
            while True:
                wait = steps.send(_complete(wait, until_s=self._until_s))
        except StopIteration as stop:
            self._average = stop.value
        except BaseException as failure:  # handed to the training thread by result()
            self._failure = failure
        self.duration_s = time.monotonic() - self._started_s


class Inline:
    """Drives an exchange from the training loop itself, in one deterministic order."""

    def __init__(self, steps: Steps, first: Wait, *, round: Round, deadline_s: float, num_bytes: int = 0) -> None:
        self.round = round
        self.num_bytes = num_bytes
        self.duration_s = 0.0
        self._steps = steps
        self._wait = first
        self._average: Average | None = None
        self._deadline_s = deadline_s

    def poll(self) -> bool:
        """See `InFlight.poll`."""
        while self._average is None and all(pending.done() for pending in self._wait.receives):
            self._advance()
        return self._average is not None

    def result(self) -> Average:
        """See `InFlight.result`."""
        while self._average is None:
            self._advance()
        return self._average

    def _advance(self) -> None:
        try:
            self._wait = self._steps.send(_complete(self._wait, until_s=time.monotonic() + self._deadline_s))
        except StopIteration as stop:
            self._average = stop.value


class Arrived:
    """A round whose result came from a checkpoint."""

    duration_s = 0.0
    num_bytes = 0

    def __init__(self, average: Average, *, round: Round) -> None:
        self.round = round
        self._average = average

    def poll(self) -> bool:
        """See `InFlight.poll`."""
        return True

    def result(self) -> Average:
        """See `InFlight.result`."""
        return self._average


def launch(
    steps: Steps, *, round: Round, deadline_s: float, in_background: bool, num_bytes: int = 0
) -> Background | Inline | Arrived:
    """Start an exchange: encode and begin to send at once, then let it be driven.

    Args:
        steps: The exchange, not yet started.
        round: The round.
        deadline_s: Seconds until a peer counts as hung.
        in_background: Whether a thread drives it.
        num_bytes: Payload bytes that this replica sends, at most.
    """
    try:
        first = next(steps)
    except StopIteration as stop:
        return Arrived(stop.value, round=round)
    kind = Background if in_background else Inline
    return kind(steps, first, round=round, deadline_s=deadline_s, num_bytes=num_bytes)


def _complete(wait: Wait, *, until_s: float) -> list[Received]:
    received = []
    for pending in wait.receives:
        message = pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
        assert message is not None
        received.append(message)
    for pending in wait.sends:
        pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
    return received
