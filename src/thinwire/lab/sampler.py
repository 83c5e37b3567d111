"""Reads the kernel's counters on a beat, and writes down every change."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.lab.counters import Counters, parse_devices, sample_line
from thinwire.lab.network_commands import INTERFACE

BEAT_S = 0.02
_MOST_BYTES = 1 << 16
_NOTHING = Counters(sent_bytes=0, received_bytes=0, sent_packets=0, received_packets=0)


class CounterSampler:
    """Samples all hosts' interfaces.

    Args:
        device_counters: One open `/proc/net/dev` a host.
        path: Takes a line a change.
    """

    def __init__(self, device_counters: Sequence[int], *, path: Path) -> None:
        self._device_counters = device_counters
        self._file = path.open("w", buffering=1)
        self._due_s = 0.0
        self._last: list[Counters] = []
        self._withheld = ""

    def read(self) -> list[Counters]:
        """Return the counts now, one a host; a device that is gone keeps its last ones."""
        counters = []
        for host, file in enumerate(self._device_counters):
            text = os.pread(file, _MOST_BYTES, 0).decode()
            try:
                counters.append(parse_devices(text, interface=INTERFACE))
            except ValueError:  # the host's device is gone: a command removed it, or the relay ended
                counters.append(self._last[host] if self._last else _NOTHING)
        return counters

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing is to do."""
        return max(0.0, self._due_s - now_s)

    def take_if_due(self, now_s: float) -> None:
        """Take a sample if it is time."""
        if now_s >= self._due_s:
            # on the beat; one that comes late begins a new one
            self._due_s += BEAT_S if now_s < self._due_s + BEAT_S else now_s - self._due_s + BEAT_S
            self.take()

    def take(self) -> list[Counters]:
        """Take a sample and return the counts in it."""
        counters = self.read()
        line = sample_line(time.time(), counters) + "\n"
        if counters == self._last:
            self._withheld = line
        else:
            # the last sample without a change says when the change began
            self._file.write(self._withheld + line)
            self._last, self._withheld = counters, ""
        return counters
