"""Metrics of a replica while it trains: JSON lines of metrics and transfers, and optional loggers."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import MissingExtra
from thinwire.events import Totals, Transfer, TransferLog
from thinwire.runlog.measures import Measures
from thinwire.runlog.run_numbers import SendRate
from thinwire.runlog.writer import JsonlWriter
from thinwire.transport.tcp_stats import ConnectionStats

SAMPLE_S = 0.25
_JOIN_S = 5.0
_NOTHING = Totals()
_COUNTS = ("messages", "payload_bytes", "wire_bytes")
Connections = Callable[[], Mapping[Hashable, ConnectionStats]]


class KernelCounts:
    """Bytes that a replica's connections transmitted and saw acknowledged, over all of them, from their kernel.

    A connection counts from when it is first seen: its earlier bytes belong to an unknown time.

    Attributes:
        transmitted: Bytes passed on to the network, each counted once.
        acknowledged: Bytes that the other ends have acknowledged; negative while earlier ones are on their way.

    Example:
        >>> counts = KernelCounts()
        >>> for transmitted, acknowledged in ((900, 800), (1900, 1500)):
        ...     one = ConnectionStats(
        ...         silence_s=0, rtt_s=0, sent_bytes=acknowledged, received_bytes=0, transmitted_bytes=transmitted
        ...     )
        ...     counts.update({"a": one})
        >>> counts.transmitted, counts.acknowledged
        (1000, 600)
    """

    def __init__(self) -> None:
        self.transmitted = self.acknowledged = 0
        self._latest: dict[Hashable, tuple[int, int]] = {}

    def update(self, found: Mapping[Hashable, ConnectionStats]) -> None:
        for key, one in found.items():
            # the kernel counts the segment that opens a connection as acknowledged, not as transmitted
            transmitted, acknowledged = one.transmitted_bytes, min(one.sent_bytes, one.transmitted_bytes)
            before = self._latest.get(key)
            if before is None or transmitted < before[0] or acknowledged < before[1]:  # a new connection
                before = transmitted, transmitted
            self.transmitted += transmitted - before[0]
            self.acknowledged += acknowledged - before[1]
            self._latest[key] = transmitted, acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Counts of a replica at one moment; carried over a resume.

    Attributes:
        time_s: Seconds since this replica's training began.
        samples: Tokens, images or the like that this replica trained on.
        stalled_s: Seconds its training thread waited for the wire.
        peak_bits_per_s: Peak rate of sending, see `thinwire.runlog.run_numbers`.
    """

    time_s: float = 0.0
    samples: int = 0
    stalled_s: float = 0.0
    sent: Totals = _NOTHING
    received: Totals = _NOTHING
    peak_bits_per_s: float = 0.0


class Logger(Protocol):
    """Receiver of metrics besides the JSON lines."""

    def log(self, values: dict[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class Meter:
    """Counts and writes one replica's `metrics-replica-N.jsonl` and `transfers-replica-N.jsonl`.

    Args:
        log: The transport's records, streamed to the file as they come.
        warn: Receives a warning if the disk is full.
        connections: Returns the kernel's statistics of the transport's connections. Where there are none, rates are
            those of messages whose sending has ended.
        border: Counts what crosses between the replica's own sites; it is sent and received too, and no rate is of it.

    Attributes:
        samples: Tokens, images or the like trained on so far.
        latest_loss: Mean over the steps of the latest line, NaN before the first.
    """

    def __init__(
        self, run_dir: Path, *, replica: int, log: TransferLog, loggers: tuple[Logger, ...] = (),
        measures: Measures | None = None, warn: Callable[[str], None] = lambda text: None,
        connections: Connections = dict, border: TransferLog | None = None,
    ) -> None:  # fmt: skip
        self._border = TransferLog() if border is None else border
        self._paths = run_dir / f"metrics-replica-{replica}.jsonl", run_dir / f"transfers-replica-{replica}.jsonl"
        self._metrics, self._transfers = (JsonlWriter(path, warn=warn) for path in self._paths)
        self._loggers = loggers
        self._measures = measures or Measures()
        self._log = log
        self._origin_s = time.monotonic()
        self._carried = ReplicaCounts()
        self._connections = connections
        self._kernel, self._has_kernel = KernelCounts(), False
        self._rate = SendRate()
        self._rate_lock = threading.Lock()
        self._stop = threading.Event()

        def watch_rate() -> None:
            while not self._stop.wait(SAMPLE_S):
                self._sample_rate()

        self._sampler = threading.Thread(target=watch_rate, name="thinwire-rate", daemon=True)
        self.samples = 0
        self.latest = ReplicaCounts()
        self._losses: list[Any] = []
        self.latest_loss = math.nan
        self._start_s = 0.0

    def start(self) -> None:
        """Begin to write transfers down, those of the set-up first; after a checkpoint was loaded."""
        self._start_s = time.monotonic() - self._origin_s
        for transfer in self._log:
            self._record(transfer)
        self._log.add_sink(self._record)
        self._sample_rate(is_line=True)
        self._sampler.start()

    def read(self, *, stalled_s: float) -> ReplicaCounts:
        """Return the counts now; `stalled_s` is the time that this process's training thread waited for the network."""
        carried = self._carried
        return ReplicaCounts(
            time_s=time.monotonic() - self._origin_s, samples=self.samples, stalled_s=carried.stalled_s + stalled_s,
            sent=_sum(_sum(carried.sent, self._log.totals("sent")), self._border.totals("sent")),
            received=_sum(_sum(carried.received, self._log.totals("received")), self._border.totals("received")),
            peak_bits_per_s=self._rate.peak_bits_per_s,
        )  # fmt: skip

    def train_step(self, loss: Any, *, samples: int) -> None:
        """Add a step's loss, a scalar tensor; its value is read only when a line is written."""
        self._losses.append(loss)
        self.samples += samples

    def interval_loss(self) -> float:
        """Return the mean loss over the steps since the latest line, or that line's without a step."""
        if not self._losses:
            return self.latest_loss
        return math.fsum(float(value) for value in self._losses) / len(self._losses)

    def write_step(self, step: int, *, stalled_s: float, rounds_in_flight: int) -> None:
        sent_bits_per_s = self._sample_rate(is_line=True)
        now, last = self.read(stalled_s=stalled_s), self.latest
        elapsed_s = max(now.time_s - last.time_s, 1e-9)
        loss = self.latest_loss = self.interval_loss()
        self._losses.clear()
        self.latest = now
        line = {
            "kind": "step", "step": step, "time_s": round(now.time_s, 4), "loss": loss,
            **self._measures.counted(now.samples, per_s=round((now.samples - last.samples) / elapsed_s, 2)),
            "compute_fraction": round(max(0.0, 1 - (now.stalled_s - last.stalled_s) / elapsed_s), 5),
            "sent_bytes": now.sent.wire_bytes, "received_bytes": now.received.wire_bytes,
            "stalled_s": round(now.stalled_s, 4), "sent_bits_per_s": round(sent_bits_per_s, 1),
            "peak_bits_per_s": round(now.peak_bits_per_s, 1), "rounds_in_flight": rounds_in_flight,
        }  # fmt: skip
        self._write(line, step=step)

    def write_eval(self, step: int, *, shown: Sequence[float], targets: int) -> None:
        """Write validation loss and metric of the global parameters over so many samples."""
        now = self.read(stalled_s=0.0)
        line = {
            "kind": "eval", "step": step, "time_s": round(now.time_s, 4),
            **self._measures.counted(now.samples), **self._measures.evaluated(shown), "targets": targets,
        }  # fmt: skip
        self._write(line, step=step)

    def write_error(self, step: int, *, message: str) -> None:
        self._write({"kind": "error", "step": step, "message": message}, step=step)

    def write_warning(self, step: int, *, message: str) -> None:
        """Write what the user should know from `step` on; nothing stops."""
        self._write({"kind": "warning", "step": step, "message": message}, step=step)

    def state_dict(self, *, stalled_s: float) -> dict[str, Any]:
        """Return the counts and how long the two files are; no line may be pending."""
        now = self.read(stalled_s=stalled_s)
        self._transfers.flush()
        counts = {
            name: [getattr(totals, field) for field in _COUNTS]
            for name, totals in (("sent", now.sent), ("received", now.received))
        }
        return {
            "time_s": now.time_s, "tokens": now.samples, "stalled_s": now.stalled_s,
            "peak_bits_per_s": now.peak_bits_per_s, "losses": [float(loss) for loss in self._losses],
            "last": [self.latest.time_s, self.latest.samples, self.latest.stalled_s, self.latest.sent.wire_bytes],
            "file_bytes": [path.stat().st_size for path in self._paths], **counts,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint, and cut off the lines written after it."""
        sent, received = (Totals(**dict(zip(_COUNTS, state[name], strict=True))) for name in ("sent", "received"))
        self._carried = ReplicaCounts(stalled_s=state["stalled_s"], sent=sent, received=received)
        self._rate = SendRate(state["peak_bits_per_s"])
        self._origin_s = time.monotonic() - state["time_s"]
        self.samples = state["tokens"]
        self._losses = list(state["losses"])
        time_s, samples, stalled_s, sent_bytes = state["last"]
        last = ReplicaCounts(time_s=time_s, samples=samples, stalled_s=stalled_s)
        self.latest = replace(last, sent=Totals(wire_bytes=sent_bytes))
        for file, path, size in zip((self._metrics, self._transfers), self._paths, state["file_bytes"], strict=True):
            file.flush()
            if path.stat().st_size > size:
                file.truncate(size)

    def start_over(self) -> None:
        """Empty both files, for a run that was stopped before its first checkpoint."""
        for file in (self._metrics, self._transfers):
            file.truncate(0)

    def close(self) -> None:
        self._stop.set()
        if self._sampler.is_alive():
            self._sampler.join(_JOIN_S)
        for logger in self._loggers:
            logger.close()
        self._metrics.close()
        self._transfers.close()

    def _sample_rate(self, *, is_line: bool = False) -> float:
        """Read the counters of sending; for a line, return the rate since the one before."""
        with self._rate_lock:
            began_s = time.monotonic()
            with contextlib.suppress(OSError):  # no descriptor is left
                found = self._connections()
                if found and not self._has_kernel:
                    self._has_kernel = True
                    self._rate.restart()
                self._kernel.update(found)
            sent = self._log.totals("sent").wire_bytes
            kernel = self._kernel.transmitted, self._kernel.acknowledged
            transmitted, acknowledged = kernel if self._has_kernel else (sent, sent)
            now_s = time.monotonic()
            self._rate.add(began_s=began_s, ended_s=now_s, transmitted=transmitted, acknowledged=acknowledged)
            return self._rate.since_mark() if is_line else 0.0

    def _write(self, line: dict[str, Any], *, step: int) -> None:
        self._metrics.write(json.dumps(line, separators=(",", ":")), is_last=True)
        self._transfers.flush()
        values = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        for logger in self._loggers:
            logger.log(values, step=step)

    def _record(self, transfer: Transfer) -> None:
        if self._transfers.closed:
            return  # a message that ended while the process does
        # the set-up came before the clock began
        started_s = max(self._start_s, transfer.started_s - self._origin_s)
        finished_s = max(started_s, transfer.finished_s - self._origin_s)
        own = replace(transfer, started_s=round(started_s, 6), finished_s=round(finished_s, 6))
        self._transfers.write(own.to_json())


def open_loggers(
    run_dir: Path, *, tensorboard: bool, wandb: bool, replica: int, after_step: int = 0
) -> tuple[Logger, ...]:
    """Open the optional loggers; TensorBoard hides what a resumed run wrote after `after_step`.

    Raises:
        MissingExtra: Their package is not installed.
    """
    loggers: list[Logger] = []
    if tensorboard:
        loggers.append(_TensorboardLogger(run_dir / "tensorboard" / f"replica-{replica}", after_step=after_step))
    if wandb:
        loggers.append(_WandbLogger(run_dir, replica=replica))
    return tuple(loggers)


class _TensorboardLogger:
    def __init__(self, folder: Path, *, after_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra.of("tensorboard", extra="report") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=after_step + 1)

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLogger:
    def __init__(self, run_dir: Path, *, replica: int) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra.of("wandb", extra="report") from None
        self._run: Any = wandb.init(project="thinwire", dir=str(run_dir), group=run_dir.name, name=f"replica-{replica}")

    def log(self, values: dict[str, float], *, step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def _sum(first: Totals, second: Totals) -> Totals:
    return Totals(**{name: getattr(first, name) + getattr(second, name) for name in _COUNTS})
