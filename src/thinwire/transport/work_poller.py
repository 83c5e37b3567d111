"""Ends of calls on a GPU, found by polling each `Work`, or an event of ours on the stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thinwire import compat

POLL_S = 0.005
MOST_CALLS = 4096
_IDLE_S = 60.0
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """End of a call."""

    done_s: float  # time when the end was seen, never before the end itself
    error: str = ""
    duration_s: float | None = None  # time of the call on the GPU; None if torch does not time calls


@dataclass(frozen=True, slots=True)
class _Asked:
    work: Any
    group: int
    on_end: Callable[[CallEnd], None]


class WorkPoller:
    """Polls each open `Work` or mark, in a thread that starts with the first one.

    Args:
        poll_s: Polling interval while any call is open.
        most: Number of open calls at most.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, poll_s: float = POLL_S, most: int = MOST_CALLS
    ) -> None:
        self._clock, self._poll_s, self._most = clock, poll_s, most
        self._queues: dict[Hashable, deque[_Asked]] = {}
        self._untimed: set[tuple[int, type]] = set()
        self._num = 0
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._is_held = False
        self._is_wanted = threading.Event()
        self._closes_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        return self._num < self._most

    def watch(
        self, work: Any, on_end: Callable[[CallEnd], None], *, group: int, stream: Hashable | None = None
    ) -> None:
        """Poll a `Work`, or a mark behind a call, until it has ended.

        Args:
            work: The call's `Work` or mark.
            on_end: Called once, in the polling thread.
            group: Number of the call's group.
            stream: Names the calls that end in the order in which they were made; None for a call without an order.
        """
        asked = _Asked(work, group, on_end)
        with self._lock:
            self._queues.setdefault(object() if stream is None else stream, deque()).append(asked)
            self._num += 1
            self._is_wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name="thinwire-watch-poll", daemon=True)
                self._thread.start()

    def hold(self) -> None:
        """Stop polling until `release`; no query is running when this returns."""
        with self._asking:
            self._is_held = True

    def release(self) -> None:
        self._is_held = False

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the thread once all calls have ended, at the latest after `wait_s`, and after one more round."""
        self._is_held = False
        self._closes_s = time.monotonic() + wait_s
        with self._lock:
            thread = self._thread
            self._is_wanted.set()
        if thread is not None:
            thread.join(wait_s + _JOIN_S)

    def _go_on(self) -> None:
        while self._closes_s is None or (self._num and time.monotonic() < self._closes_s):
            if self._is_wanted.wait(_IDLE_S):
                self._poll_all()
                time.sleep(self._poll_s)
        self._poll_all()

    def _poll_all(self) -> None:
        with self._lock:
            keys = list(self._queues)
        for key in keys:
            with self._asking:
                if self._is_held:
                    return
                self._poll_queue(key)

    def _poll_queue(self, key: Hashable) -> None:
        """Poll the calls of one stream, oldest first, up to the first that has not ended."""
        calls = self._queues[key]
        while calls and (end := self._poll_one(calls[0])) is not None:
            asked = calls.popleft()
            asked.on_end(end)
            with self._lock:
                self._num -= 1
                if not calls:
                    del self._queues[key]
                if not self._num and self._closes_s is None:
                    self._is_wanted.clear()

    def _poll_one(self, asked: _Asked) -> CallEnd | None:
        """Return the end of a call, None while it lasts."""
        try:
            if not asked.work.is_completed():
                return None
        except Exception as error:  # after one CUDA error every query fails
            return CallEnd(done_s=self._clock(), error=str(error) or type(error).__name__)
        done_s = self._clock()
        if failure := compat.failure_of(asked.work):
            return CallEnd(done_s=done_s, error=failure)
        # a group without timing is not queried again; a mark has none, even if its group times other calls
        kind = (asked.group, type(asked.work))
        duration_s = None if kind in self._untimed else compat.duration_s(asked.work)
        if duration_s is None:
            self._untimed.add(kind)
        return CallEnd(done_s=done_s, duration_s=duration_s)


class StreamMark(Protocol):
    """An event on a stream, without an error or a duration of its own."""

    @property
    def stream(self) -> Hashable:
        """Names the stream: marks of one stream complete in order."""
        ...

    def is_completed(self) -> bool:
        """Return whether all work before it has run, without waiting."""
        ...


class CudaEventMark:
    """An event behind all work that this thread's current stream of a device holds now.

    Raises:
        RuntimeError: CUDA could not record the event.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            current = torch.cuda.current_stream(device)
            self._event = torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]
            self._event.record(current)
        # every device's default stream has the same handle
        self.stream: Hashable = (current.device_index, current.cuda_stream)

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what is put on the device's current stream.

    Example:
        >>> is_capturing(torch.device("cpu"))
        False
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
