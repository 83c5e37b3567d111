"""Clocks and counters of one replica at moments of a run, and the spans between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.events import Direction, Totals, Transfer, TransferLog


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """One moment.

    Attributes:
        monotonic_s: On a clock that only grows.
        unix_s: Since 1970, to be matched with counters that were sampled elsewhere.
        sent: Messages of rounds sent by thinwire so far; None where another program sends them.
        received: Likewise.
        stalled_s: Seconds that the training thread has waited for the wire, None where nobody counts them.
    """

    monotonic_s: float
    unix_s: float
    sent: Totals | None
    received: Totals | None
    stalled_s: float | None


class ByteMeter:
    """Takes readings; counts the messages of rounds and leaves out those by which the replicas meet.

    Args:
        log: Of the transport that the rounds use.
        counts_bytes: Whether thinwire sends what the contender sends.
    """

    def __init__(self, log: TransferLog, *, counts_bytes: bool) -> None:
        self._counts_bytes = counts_bytes
        self._totals: dict[Direction, Totals] = {"sent": Totals(), "received": Totals()}
        log.add_sink(self._add)

    def read(self, *, stalled_s: Callable[[], float | None]) -> MeterReading:
        """Return the clocks and counters now."""
        return MeterReading(
            monotonic_s=time.perf_counter(),
            unix_s=time.time(),
            sent=self._totals["sent"] if self._counts_bytes else None,
            received=self._totals["received"] if self._counts_bytes else None,
            stalled_s=stalled_s(),
        )

    def _add(self, transfer: Transfer) -> None:
        # called under the log's lock, so no sum is lost
        if transfer.kind == "round" and not transfer.error:
            self._totals[transfer.direction] = self._totals[transfer.direction].plus(transfer)


def span(began: MeterReading, ended: MeterReading, *, step_s: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the numbers of the measured steps: see `thinwire.lab.wire_benchmark.worker` for the fields."""
    return {
        "tokens": tokens,
        "step_s": [round(seconds, 6) for seconds in step_s],
        "wall_s": ended.monotonic_s - began.monotonic_s,
        "stalled_s": _difference(began.stalled_s, ended.stalled_s),
        "started_unix_s": began.unix_s,
        "ended_unix_s": ended.unix_s,
        **_bytes(began, ended),
    }


def closing(ended: MeterReading, closing: MeterReading, closed: MeterReading) -> dict[str, Any]:
    """Return the numbers of the final flush; its bytes include what was in flight when the steps ended."""
    return {
        "close_s": closed.monotonic_s - closing.monotonic_s,
        "close_started_unix_s": closing.unix_s,
        "close_ended_unix_s": closed.unix_s,
        **{f"close_{name}": value for name, value in _bytes(ended, closed).items()},
    }


def since_gate(opened: MeterReading, closed: MeterReading) -> dict[str, Any]:
    """Return what was sent from the gate to the end: nothing is on its way at either."""
    payload_bytes = _bytes(opened, closed)["payload_bytes_sent"]
    return {"gate_unix_s": opened.unix_s, "gate_payload_bytes_sent": payload_bytes}


def _bytes(began: MeterReading, ended: MeterReading) -> dict[str, int | None]:
    fields: dict[str, int | None] = {}
    for direction, first, last in (("sent", began.sent, ended.sent), ("received", began.received, ended.received)):
        for name in ("messages", "payload_bytes", "wire_bytes"):
            known = first is not None and last is not None
            fields[f"{name}_{direction}"] = getattr(last, name) - getattr(first, name) if known else None
    return fields


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first
