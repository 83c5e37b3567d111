"""A member that comes after its round was closed: what it sends is dropped, and the mean goes out in answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from thinwire.errors import DeadlineExceeded, ThinwireError
from thinwire.transport.base import Pending, Received

_LOOK_S = 0.005


class Straggler:
    """One late member of one closed round, as a transfer that is done when it has been answered.

    Nothing is sent to a member before it asks, so that a replica that sleeps has no mail piling up for it, and what it
    gets says how far the others are when it wakes, not when it fell asleep.

    Args:
        peer: The member.
        pending: What it still has to send.
        check: Raises where what it sent is not what it must be.
        answer: Starts to send the mean.
    """

    def __init__(
        self, pending: Pending, *, peer: int, check: Callable[[Received], None], answer: Callable[[], Pending]
    ) -> None:
        self.peer = peer
        self._pending: Pending | None = pending
        self._check = check
        self._answer = answer
        self._sent: Pending | None = None
        self._failure: ThinwireError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Take the member in if it has come, and tell whether its answer is out."""
        with self._lock:  # the round's thread and that of a later round may look at the same time
            try:
                if self._pending is not None and self._pending.done():
                    received = self._pending.wait(deadline_s=0.0)
                    assert received is not None
                    self._pending = None
                    self._check(received)
                    self._sent = self._answer()
                return self._failure is not None or (self._sent is not None and self._sent.done())
            except ThinwireError as failure:
                self._failure = failure
                return True

    def wait(self, *, deadline_s: float) -> None:
        """See `Pending.wait`."""
        end_s = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() > end_s:
                raise DeadlineExceeded(
                    f"replica {self.peer} did not ask for a closed round within {deadline_s:.3g} s, the deadline that "
                    f"follows from measured times; see the log there"
                )
            time.sleep(_LOOK_S)
        if self._failure is not None:
            raise self._failure
        assert self._sent is not None
        self._sent.wait(deadline_s=deadline_s)
