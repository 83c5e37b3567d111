"""Mark where a call stands on its stream, so that its end can be asked for where torch gives no `Work` to ask.

torch launches a collective of nccl that is not asynchronous on the caller's current stream (pytorch/pytorch#148590,
landed again as #150398; read, not tried on a GPU). So an event behind it there has come once all before it has run,
the call included. It keeps no tensor alive and lets nothing wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place on a stream; it knows no failure of its own and no duration."""

    @property
    def stream(self) -> Hashable:
        """Names the stream: marks of one stream are passed in their order."""
        ...

    def is_completed(self) -> bool:
        """Whether all before it has run, without waiting."""
        ...


class EventMark:
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
