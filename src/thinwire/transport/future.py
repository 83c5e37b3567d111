"""A message on its way, as its caller sees it; how it moves is the transports' matter."""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.errors import DeadlineExceeded, TransportError
from thinwire.transport.base import Envelope, Received


class Awaited:
    """A `Pending` that also announces its end.

    Args:
        peer_name: The other end, as errors name it.
        envelope: What the message is.
        verb: What the peer is to do: "send" or "take".
    """

    def __init__(self, *, peer_name: str, envelope: Envelope, verb: str) -> None:
        self._peer_name = peer_name
        self._envelope = envelope
        self._verb = verb
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._received: Received | None = None
        self._error: TransportError | None = None

    def describe(self) -> str:
        """Name what is under way in an error's text."""
        return self._envelope.describe()

    def done(self) -> bool:
        """Tell, without waiting, whether `wait` would return or raise at once."""
        return self._finished.is_set()

    def wait(self, *, deadline_s: float) -> Received | None:
        """Wait until the transfer is done; a wait that ran out can be tried again."""
        if not self._finished.wait(timeout=max(0.0, deadline_s)):
            raise DeadlineExceeded(
                f"{self._peer_name} did not {self._verb} {self.describe()} within {deadline_s:.3g} s, the "
                f"deadline that follows from measured times; it hangs, or its link became slower than that: see its log"
            )
        if self._error is not None:
            raise self._error
        return self._received

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when the transfer ended either way, from the thread that ends it, or at once when it has."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _end(self, error: TransportError | None) -> None:
        """End, once: well with what `_received` holds, or with an error."""
        with self._lock:
            if self._finished.is_set():
                return
            self._error = error
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
