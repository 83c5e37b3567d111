"""Timing of a step's forward and backward passes, where that is free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


class Passes:
    """Adds up the passes of a step; a method may ask for several of each.

    A GPU computes after its calls have returned, so that their times would say nothing, and to wait for it would cost
    what is to be measured: passes are timed on the CPU only.

    Args:
        device: Where the model is.
        clock: Seconds that only grow.

    Example:
        >>> passes = Passes(torch.device("cpu"), clock=iter([1.0, 1.25, 2.0, 2.5]).__next__)
        >>> with passes.forward():
        ...     pass
        >>> with passes.backward():
        ...     pass
        >>> passes.take(), passes.take()
        ((0.25, 0.5), (None, None))
    """

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_timed = device.type == "cpu"
        self._clock = clock
        self._forward_s: float | None = None
        self._backward_s: float | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Time a forward pass."""
        if not self._is_timed:
            yield
            return
        began_s = self._clock()
        yield
        self._forward_s = (self._forward_s or 0.0) + self._clock() - began_s

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward pass."""
        if not self._is_timed:
            yield
            return
        began_s = self._clock()
        yield
        self._backward_s = (self._backward_s or 0.0) + self._clock() - began_s

    def take(self) -> tuple[float | None, float | None]:
        """Return the seconds of all forward and of all backward passes since the last call; none where none were timed.

        Returns:
            Seconds of the forward passes, and of the backward passes.
        """
        taken = self._forward_s, self._backward_s
        self._forward_s = self._backward_s = None
        return taken
