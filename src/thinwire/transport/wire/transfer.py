"""One message on its way over the wire, as its caller sees it; it ends in a thread that does nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from thinwire.errors import TransportError
from thinwire.transport.base import Envelope
from thinwire.transport.future import Awaited
from thinwire.transport.message import unpack


class Finisher:
    """A thread that ends transfers one after another: checksums and callbacks must not hold up the sockets."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire-finisher", daemon=True)
        self._thread.start()

    def later(self, task: Callable[[], None]) -> None:
        """Run a task after those that came before."""
        self._tasks.put(task)

    def close(self, *, deadline_s: float) -> None:
        """Run what was given so far and end."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=deadline_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class WireTransfer(Awaited):
    """A message over the wire.

    Args:
        peer: The replica at the other end.
        envelope: What the message is.
        verb: What the peer is to do: "send" or "take".
        later: Runs a task in the thread in which transfers end.
    """

    def __init__(
        self, *, peer: int, envelope: Envelope, verb: str, later: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(peer_name=f"replica {peer}", envelope=envelope, verb=verb)
        self.peer = peer
        self.envelope = envelope
        self._later = later

    def succeed(self, message: torch.Tensor | None = None) -> None:
        """End well: a message that arrived is checked first."""
        self._later(lambda: self._settle(message))

    def fail(self, error: TransportError) -> None:
        """End with an error."""
        self._later(lambda: self._end(error))

    def refuse(self, error: TransportError) -> None:
        """End with an error at once: nobody ends transfers later any more."""
        self._end(error)

    def _settle(self, message: torch.Tensor | None) -> None:
        if self.done():  # nobody wants it any more
            return
        error: TransportError | None = None
        try:
            if message is not None:
                self._received = unpack(message, source=self.peer, envelope=self.envelope)
        except TransportError as found:
            error = found
        self._end(error)
