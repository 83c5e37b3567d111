"""Byte counters of the hosts' interfaces: sampled from the kernel, written as JSON lines, and read as rates."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thinwire.lab.network_commands import INTERFACE

PEAK_WINDOW_S = 0.1
_FIELDS = 16


class Counters(NamedTuple):
    """One host's counts since the lab began, link-layer headers included.

    Attributes:
        sent_bytes: Bytes that left the host's interface.
        received_bytes: Bytes that came in.
        sent_packets: Packets that left; one that the kernel cuts later counts once.
        received_packets: Packets that came in.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All hosts' counts at one time.

    Attributes:
        time_s: Seconds since the epoch.
        sent_bytes: One number a host.
        received_bytes: One number a host.
    """

    time_s: float
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]


def parse_devices(text: str, *, interface: str) -> Counters:
    """Read one interface's counts from the text of `/proc/net/dev`.

    Raises:
        ValueError: The interface is not there.
    """
    match = re.search(rf"^\s*{re.escape(interface)}:(.*)$", text, flags=re.MULTILINE)
    numbers = match.group(1).split() if match else []
    if len(numbers) < _FIELDS:
        raise ValueError(f"/proc/net/dev has no interface {interface!r}")
    return Counters(*(int(numbers[place]) for place in (8, 0, 9, 1)))


def sample_line(time_s: float, counters: Sequence[Counters]) -> str:
    """Write a sample as a line of JSON."""
    sent = [count.sent_bytes for count in counters]
    received = [count.received_bytes for count in counters]
    return json.dumps({"time_s": round(time_s, 4), "sent_bytes": sent, "received_bytes": received})


def read_samples(path: Path) -> list[Sample]:
    """Read a lab's `counters.jsonl`; a last line that is not whole is left out."""
    samples = []
    for line in path.read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            break
        sent, received = tuple(values["sent_bytes"]), tuple(values["received_bytes"])
        samples.append(Sample(time_s=values["time_s"], sent_bytes=sent, received_bytes=received))
    return samples


def between(samples: Sequence[Sample], *, start_s: float, end_s: float) -> list[Sample]:
    """Return the samples of a span, with the counts that held at its two ends."""
    inside = [sample for sample in samples if start_s < sample.time_s < end_s]
    return [at(samples, time_s=start_s), *inside, at(samples, time_s=end_s)]


def at(samples: Sequence[Sample], *, time_s: float) -> Sample:
    """Return the counts at a time; between two samples they are taken to have grown evenly."""
    after = next((place for place, sample in enumerate(samples) if sample.time_s > time_s), len(samples))
    if after in (0, len(samples)):
        near = samples[min(after, len(samples) - 1)]
        return Sample(time_s=time_s, sent_bytes=near.sent_bytes, received_bytes=near.received_bytes)
    low, high = samples[after - 1], samples[after]
    share = (time_s - low.time_s) / (high.time_s - low.time_s)

    def even(before: tuple[int, ...], later: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(first + share * (last - first)) for first, last in zip(before, later, strict=True))

    return Sample(
        time_s=time_s,
        sent_bytes=even(low.sent_bytes, high.sent_bytes),
        received_bytes=even(low.received_bytes, high.received_bytes),
    )


def sent_by(samples: Iterable[Sample], *, host: int) -> list[tuple[float, int]]:
    """Return one host's sent bytes as points (seconds, bytes)."""
    return [(sample.time_s, sample.sent_bytes[host]) for sample in samples]


def peak_rate(points: Sequence[tuple[float, int]], *, window_s: float = PEAK_WINDOW_S) -> float:
    """Return the highest rate in any window, in bits per second.

    Counts are known at the samples only; between two of them the rate is taken as constant. A window starts or ends at
    a sample, which is where the highest one lies.

    Args:
        points: (seconds, bytes so far), in order; samples without a change may be missing.
        window_s: The window's length.

    Example:
        >>> peak_rate([(0.0, 0), (0.1, 1000), (0.2, 1000)])
        80000.0
    """
    times = [time_s for time_s, _ in points]
    starts = [*times, *(time_s - window_s for time_s in times)]
    best, low, high = 0.0, 0, 0
    for start_s in sorted(start for start in starts if start >= times[0]) if times else []:
        low = _advance(points, low, start_s)
        high = _advance(points, max(high, low), start_s + window_s)
        count = _bytes_at(points, high, start_s + window_s) - _bytes_at(points, low, start_s)
        best = max(best, count * 8 / window_s)
    return best


def _advance(points: Sequence[tuple[float, int]], index: int, time_s: float) -> int:
    while index + 1 < len(points) and points[index + 1][0] <= time_s:
        index += 1
    return index


def _bytes_at(points: Sequence[tuple[float, int]], index: int, time_s: float) -> float:
    before_s, before = points[index]
    if index + 1 == len(points):
        return before
    after_s, after = points[index + 1]
    return before + (after - before) * (time_s - before_s) / (after_s - before_s)


BEAT_S = 0.02
_MOST_BYTES = 1 << 16


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
                counters.append(self._last[host] if self._last else Counters(0, 0, 0, 0))
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
