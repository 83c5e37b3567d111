"""Receive window: the bytes of a peer that may be in flight to this replica."""

from __future__ import annotations

LEAST_BYTES = 1 << 17
MOST_BYTES = 1 << 24
_GAIN = 1.2
_EPOCHS_UNTIL_RETRY = 64


class Window:
    """Grows for as long as growing makes the bytes come faster, so that neither a fast wire nor a far one idles.

    On a thin wire it stays small: what is on its way stands in a queue there, and a short message waits behind it.

    Args:
        least: Bytes at the start, and always.
        most: Bytes at the most.

    Attributes:
        num_bytes: How many may be on their way now.

    Example:
        >>> window, now_s = Window(), 0.0
        >>> for _ in range(8):  # a wire of 10 MB/s whatever the window
        ...     now_s += window.num_bytes / 10e6
        ...     window.observe(window.num_bytes, now_s=now_s)
        >>> window.num_bytes == LEAST_BYTES
        True
    """

    def __init__(self, *, least: int = LEAST_BYTES, most: int = MOST_BYTES) -> None:
        self.num_bytes = least
        self._least, self._most = least, most
        self._arrived_bytes = 0
        self._began_s: float | None = None
        self._smaller_bytes_per_s: float | None = None
        self._left_epochs = 1

    def pause(self) -> None:
        """Forget when the current epoch began: nothing is being waited for."""
        self._began_s, self._arrived_bytes = None, 0

    def observe(self, num_bytes: int, *, now_s: float) -> None:
        """Count what arrived; an epoch ends when a whole window has.

        Args:
            num_bytes: How many.
            now_s: Seconds that only grow.
        """
        if self._began_s is None:
            self._began_s = now_s  # what came first was sent before
            return
        self._arrived_bytes += num_bytes
        if self._arrived_bytes < self.num_bytes:
            return
        rate = self._arrived_bytes / max(1e-6, now_s - self._began_s)
        self._began_s, self._arrived_bytes = now_s, 0
        self._judge(rate)

    def _judge(self, bytes_per_s: float) -> None:
        before, self._smaller_bytes_per_s = self._smaller_bytes_per_s, None
        if before is not None and bytes_per_s < _GAIN * before:
            self.num_bytes = max(self._least, self.num_bytes // 2)
            self._left_epochs = _EPOCHS_UNTIL_RETRY
            return
        if before is None:
            self._left_epochs -= 1
            if self._left_epochs > 0:
                return
        if self.num_bytes < self._most:
            self._smaller_bytes_per_s = bytes_per_s
            self.num_bytes *= 2
