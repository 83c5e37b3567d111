"""Numbers of a run: one definition of each, with its unit and its window.

The table at the end, the live view, the dashboard, `report.html`, `--json`, `thinwire compare` and README show these.

- Bytes sent (bytes): payloads and thinwire's message headers that a replica sent, from joining to the end of its final
  exchange. Headers of TCP, IP and Ethernet are not counted.
- Mean rate (bit/s): 8 x bytes sent / wall time.
- Peak rate (bit/s): the highest rate over any time of at least 1 s. It counts the bytes that the replica's kernel
  transmitted and saw acknowledged within that time, so that it never exceeds what left the host.
- Rate now (bit/s): the same over the time since the previous log line, and at least 1 s.
- Times fewer (ratio): bytes that an all-reduce of float32 gradients at every step would send / bytes sent.
- Step time (s): wall time / inner steps, with waiting and evaluation.
- Time left (s): steps left x time per step since the first log line, of the slowest replica.
- Waiting (share): time in which the training thread waited for the network / wall time, since training began.
- Computing (share): the rest, evaluation and saving included. A chart over time has the shares between its points.

A run's bytes, mean rate and shares are the mean over its replicas, its peak rate is the highest of any replica. Its
wall time is that of the slowest replica, from the start of its training to the end of its final exchange.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from thinwire.runlog.run_folder import StepMetrics, Summary
from thinwire.units import format_bytes, format_rate, format_seconds

RATE_WINDOW_S = 1.0
# Longer windows are tried too: less of what they hold was already on its way when they began.
_LONGEST_WINDOW_S = 10.0
_FLOAT32_BYTES = 4


def all_reduce_bytes(*, parameters: int, num_replicas: int, steps: int) -> float:
    """Return the bytes that each replica would send for a ring all-reduce of float32 gradients at every step.

    Example:
        >>> all_reduce_bytes(parameters=3_050_496, num_replicas=2, steps=300)
        3660595200.0
    """
    return 2 * (num_replicas - 1) / num_replicas * _FLOAT32_BYTES * parameters * steps


def times_fewer(all_reduce: float, sent: float) -> float | None:
    """Return how many times fewer bytes were sent than by an all-reduce at every step; None where nothing was sent."""
    return all_reduce / sent if sent > 0 and all_reduce > 0 else None


def format_times(times: float | None) -> str:
    """Write a ratio, rounded.

    Example:
        >>> format_times(220.31), format_times(7.86), format_times(None)
        ('220', '7.9', '-')
    """
    if times is None or not math.isfinite(times):
        return "-"
    return f"{times:,.0f}" if times >= 20 else f"{times:.1f}"


def format_share(share: float | None) -> str:
    """Write a share in percent.

    Example:
        >>> format_share(0.0131)
        '1.3 %'
    """
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """Numbers of a run, finished or in progress; None where unknown. The module defines each.

    Attributes:
        peak_bits_per_s: Peak rate of the replica with the highest one.
        times_fewer_bytes: Bytes of an all-reduce at every step over bytes sent.
        waiting: Share of the time in which a replica waited for the network.
        samples_per_s: Samples of all replicas in a second of wall time.
        unit: What the samples are: tokens, images.
    """

    sent_bytes: float
    received_bytes: float
    mean_bits_per_s: float | None
    peak_bits_per_s: float
    times_fewer_bytes: float | None
    step_s: float | None
    waiting: float | None
    wall_s: float
    samples_per_s: float | None
    unit: str = "tokens"

    @classmethod
    def of_summary(cls, summary: Summary) -> RunNumbers:
        times = times_fewer(summary.allreduce_bytes, summary.wire_bytes_sent)
        return cls._of(
            sent_bytes=summary.wire_bytes_sent, received_bytes=summary.wire_bytes_received,
            peak_bits_per_s=summary.peak_bits_per_s, wall_s=summary.wall_s, steps=summary.steps,
            samples=summary.samples, unit=summary.unit, waiting=1 - summary.compute_utilisation,
            times=summary.times_fewer_bytes if times is None else times,
        )  # fmt: skip

    @classmethod
    def of_lines(cls, lines: Iterable[StepMetrics]) -> RunNumbers | None:
        """Return the numbers of a run in progress, from each replica's latest line; None without one."""
        latest = list(lines)
        if not latest:
            return None
        waits = [1 - line.computing for line in latest if line.stalled_s is not None and line.time_s > 0]
        return cls._of(
            sent_bytes=fmean(line.sent_bytes for line in latest),
            received_bytes=fmean(line.received_bytes for line in latest),
            peak_bits_per_s=max(line.peak_bits_per_s for line in latest),
            wall_s=max(line.time_s for line in latest), steps=max(line.step for line in latest),
            samples=sum(line.samples for line in latest), unit=latest[0].unit,
            waiting=fmean(waits) if waits else None, times=None,
        )  # fmt: skip

    @classmethod
    def _of(
        cls, *, sent_bytes: float, received_bytes: float, peak_bits_per_s: float, wall_s: float, steps: int,
        samples: int, unit: str, waiting: float | None, times: float | None,
    ) -> RunNumbers:  # fmt: skip
        has_time = wall_s > 0
        return cls(
            sent_bytes=sent_bytes, received_bytes=received_bytes, peak_bits_per_s=peak_bits_per_s, wall_s=wall_s,
            mean_bits_per_s=8 * sent_bytes / wall_s if has_time else None,
            step_s=wall_s / steps if has_time and steps else None, waiting=waiting, times_fewer_bytes=times,
            samples_per_s=samples / wall_s if has_time else None, unit=unit,
        )  # fmt: skip

    def to_json(self) -> dict[str, float | None]:
        """Return the numbers by name; one that is not finite becomes None."""
        found = asdict(self)
        unit = found.pop("unit")
        found[f"{unit}_per_s"] = found.pop("samples_per_s")
        return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}

    def texts(self) -> dict[str, str]:
        """Return the numbers by name, rounded and with their units, as every place writes them."""
        rate, step_s = self.mean_bits_per_s, self.step_s
        return {
            "sent_bytes": format_bytes(self.sent_bytes), "received_bytes": format_bytes(self.received_bytes),
            "mean_bits_per_s": "-" if rate is None else format_rate(rate),
            "peak_bits_per_s": format_rate(self.peak_bits_per_s),
            "times_fewer_bytes": format_times(self.times_fewer_bytes),
            "step_s": "-" if step_s is None else format_seconds(step_s), "waiting": format_share(self.waiting),
            "wall_s": format_seconds(self.wall_s),
            f"{self.unit}_per_s": "-" if self.samples_per_s is None else f"{self.samples_per_s:,.0f} {self.unit}/s",
        }  # fmt: skip


def time_left_s(spans: Iterable[tuple[StepMetrics, StepMetrics]], *, total_steps: int) -> float | None:
    """Return the seconds until all replicas have done all steps; None before the first line.

    Args:
        spans: The first and the latest line of each replica. What comes before the first, such as compiling, does not
            count, unless that is the only one.
        total_steps: Inner steps of the whole run.
    """
    found = []
    for first, last in spans:
        steps, took_s = last.step - first.step, last.time_s - first.time_s
        if steps <= 0:
            steps, took_s = last.step, last.time_s
        if steps > 0:
            found.append(max(0, total_steps - last.step) * max(0.0, took_s) / steps)
    return max(found, default=None)


LABELS: Mapping[str, str] = {
    "sent_bytes": "bytes sent, mean per replica",
    "received_bytes": "bytes received, mean per replica",
    "mean_bits_per_s": "mean rate, each replica",
    "peak_bits_per_s": "peak rate over 1 s, highest replica",
    "times_fewer_bytes": "times fewer bytes than an all-reduce at every step",
    "step_s": "time per step",
    "waiting": "waiting for the network",
    "wall_s": "wall time",
    "samples_per_s": "speed, all replicas",
}


def number_rows(numbers: RunNumbers) -> list[dict[str, Any]]:
    """Return name, label, value and text of each number, in the order of `LABELS`."""
    values, texts = numbers.to_json(), numbers.texts()
    keys = {name: f"{numbers.unit}_per_s" if name == "samples_per_s" else name for name in LABELS}
    return [
        {"name": key, "label": LABELS[name], "value": values[key], "text": texts[key]} for name, key in keys.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Counters of a replica's connections, read between two times."""

    began_s: float
    ended_s: float
    transmitted: int
    acknowledged: int


class SendRate:
    """Peak rate and latest rate of a replica's sending, from samples of its kernel's counters.

    A byte counts for a window if the kernel had not transmitted it before the window, and saw it acknowledged within.
    So a rate never exceeds what left the host in that time, however much lies in the kernel's buffers.

    Args:
        peak_bits_per_s: Peak rate so far, of an earlier part of the run.

    Attributes:
        peak_bits_per_s: Highest rate over any time of at least `RATE_WINDOW_S` between two samples.

    Example:
        >>> rate = SendRate()
        >>> rate.add(began_s=0.0, ended_s=0.0, transmitted=0, acknowledged=0)
        >>> rate.add(began_s=1.0, ended_s=1.0, transmitted=1500, acknowledged=1000)
        >>> rate.peak_bits_per_s
        8000.0
    """

    def __init__(self, peak_bits_per_s: float = 0.0) -> None:
        self.peak_bits_per_s = peak_bits_per_s
        self._samples: deque[_Sample] = deque()
        self._marked: _Sample | None = None

    def restart(self) -> None:
        """Forget the samples, and keep the peak: later ones count from another zero."""
        self._samples.clear()
        self._marked = None

    def add(self, *, began_s: float, ended_s: float, transmitted: int, acknowledged: int) -> None:
        """Add a sample, read between two times.

        `transmitted` are the bytes that the kernel has passed on to the network, each counted once, and `acknowledged`
        those that the other ends have acknowledged.
        """
        now = _Sample(began_s=began_s, ended_s=ended_s, transmitted=transmitted, acknowledged=acknowledged)
        for before in self._samples:
            self.peak_bits_per_s = max(self.peak_bits_per_s, _rate(before, now))
        self._samples.append(now)
        while len(self._samples) > 2 and ended_s - self._samples[1].began_s > _LONGEST_WINDOW_S:
            self._samples.popleft()

    def since_mark(self) -> float:
        """Return the rate since the last call, over `RATE_WINDOW_S` at least; 0 before there are two samples."""
        if not self._samples:
            return 0.0
        now, marked = self._samples[-1], self._marked
        if marked is None or now.ended_s - marked.began_s < RATE_WINDOW_S:
            older = [one for one in self._samples if now.ended_s - one.began_s >= RATE_WINDOW_S]
            marked = older[-1] if older else self._samples[0]
        self._marked = now
        found = _rate(marked, now)
        self.peak_bits_per_s = max(self.peak_bits_per_s, found)
        return found


def _rate(before: _Sample, after: _Sample) -> float:
    # the bytes of a shorter time are those of a window that begins earlier, at least
    window_s = max(RATE_WINDOW_S, after.ended_s - before.began_s)
    return 8 * max(0, after.acknowledged - before.transmitted) / window_s
