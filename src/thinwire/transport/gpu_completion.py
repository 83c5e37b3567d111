"""Learn when calls on a GPU have ended, by asking: one thread for all of a process.

A call on a GPU tells nobody of its end: its `Work` holds an event at the end of the call on its stream, and
`Work.is_completed` asks that event without waiting; a call without a `Work` has a mark of ours that answers the same.
So nothing waits, and an end is known late by at most the time between two rounds of asking.

What torch does, by the source of its ProcessGroupNCCL (read, not tried on a GPU), and what follows from it:

- The question holds Python's lock, and CUDA may answer late while another thread synchronises a device. So calls that
  one stream runs in their order are asked oldest first, and no further than the first that lasts. A group's own stream
  runs its asynchronous calls; the others run wherever their caller is, and FSDP2 has several streams.
- A `Work` holds the tensors that its call fills. They live until its end is known, so calls under way are bounded.
- Any question from another thread breaks the capture of a CUDA graph in torch's default mode. So asking can be held.
"""

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
    """How a call ended.

    Attributes:
        done_s: When that was seen: never before it was so.
        error: What went wrong, or an empty text.
        duration_s: How long the GPU was in the call; none where torch does not time calls.
    """

    done_s: float
    error: str = ""
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    work: Any
    group: int
    on_end: Callable[[CallEnd], None]


class WorkPoller:
    """Asks each `Work` or mark that is under way whether it has ended, in a thread that begins with the first one.

    Args:
        clock: Seconds that only grow.
        poll_s: Time between two rounds of asking while any call is under way.
        most: How many calls may be under way.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, poll_s: float = POLL_S, most: int = MOST_CALLS
    ) -> None:
        self._clock = clock
        self._poll_s = poll_s
        self._most = most
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
        """Whether one more call may be under way."""
        return self._num < self._most

    def watch(self, work: Any, on_end: Callable[[CallEnd], None], *, group: int, line: Hashable | None = None) -> None:
        """Ask a `Work`, or a mark behind a call, until it has ended.

        Args:
            work: Of a call that has been made.
            on_end: Called once, in the asking thread.
            group: Number of the group whose call it is.
            line: Names the calls that end one after the other, as they were made; without it a call has no order.
        """
        asked = _Asked(work, group, on_end)
        with self._lock:
            self._queues.setdefault(object() if line is None else line, deque()).append(asked)
            self._num += 1
            self._is_wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name="thinwire-watch-poll", daemon=True)
                self._thread.start()

    def hold(self) -> None:
        """Ask no more until `release`; nothing is being asked when this returns."""
        with self._asking:
            self._is_held = True

    def release(self) -> None:
        """Ask again."""
        self._is_held = False

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the thread: as soon as all calls have ended, at the latest after `wait_s`, and after one more round."""
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
        """Ask the calls of one line, oldest first, no further than the first that lasts."""
        line = self._queues[key]
        while line and (end := self._poll_one(line[0])) is not None:
            asked = line.popleft()
            asked.on_end(end)
            with self._lock:
                self._num -= 1
                if not line:
                    del self._queues[key]
                if not self._num and self._closes_s is None:
                    self._is_wanted.clear()

    def _poll_one(self, asked: _Asked) -> CallEnd | None:
        """Return how a call ended; none while it lasts."""
        try:
            if not asked.work.is_completed():
                return None
        except Exception as error:  # as CUDA has it: after one such error every question fails
            return CallEnd(done_s=self._clock(), error=str(error) or type(error).__name__)
        done_s = self._clock()
        if failure := compat.failure_of(asked.work):
            return CallEnd(done_s=done_s, error=failure)
        return CallEnd(done_s=done_s, duration_s=self._duration_s(asked))

    def _duration_s(self, asked: _Asked) -> float | None:
        """Return how long the GPU was in a call; where a group does not time its calls it is not asked again."""
        kind = (asked.group, type(asked.work))  # a mark never knows, though the same group may time the rest
        if kind in self._untimed:
            return None
        duration_s = compat.duration_s(asked.work)
        if duration_s is None:
            self._untimed.add(kind)
        return duration_s


class StreamMark(Protocol):
    """A place on a stream; it knows no failure of its own and no duration."""

    @property
    def stream(self) -> Hashable:
        """Names the stream: marks of one stream are passed in their order."""
        ...

    def is_completed(self) -> bool:
        """Whether all before it has run, without waiting."""
        ...


class CudaEventMark:
    """The end of what a device's current stream of this thread holds now.

    Args:
        device: A GPU.

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
        """Whether all before it has run, without waiting."""
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
