"""A job on one clock as a trace that Perfetto and Chrome's tracing page show: ranks, their work, rounds and messages.

The JSON form of the Trace Event Format: complete events (`X`), flows from a message's sender to its receiver (`s` and
`f`), instants for findings (`i`) and names (`M`); times in microseconds from the first one. What overlaps gets lanes of
its own, up to 64 of a kind, since events of one lane must lie in each other or apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.findings import Finding, ranks_of

MOST_EVENTS = 200_000
_LANES = 64  # of each kind; what overlaps more often than that shares the last one
_GROUPS = ("work", "rounds", "sends", "receives")
_Slice = tuple[float, float, int, str, str, dict[str, Any]]


def to_trace(job: Job, findings: Sequence[Finding] = (), *, most_events: int = MOST_EVENTS) -> dict[str, Any]:
    """Return the object of a trace; the latest events where there are too many.

    Example:
        >>> from thinwire.runlog.reader import from_records
        >>> from thinwire.runlog.records import Span
        >>> from thinwire.monitor.detect.timeline import build
        >>> spans = [Span(rank=0, kind="compute", step=3, started_s=5.0, done_s=5.25)]
        >>> (event,) = [one for one in to_trace(build(from_records(spans)))["traceEvents"] if one["ph"] == "X"]
        >>> event["name"], event["ts"], event["dur"]
        ('step 3', 0.0, 250000.0)
    """
    slices = sorted(_slices(job), key=lambda found: found[:2])
    left_out = max(0, len(slices) - most_events)
    slices = slices[left_out:]
    begin_s = min([found[0] for found in slices], default=0.0)
    lanes = _Lanes()
    events = [_complete(found, lane=lanes.of(found), begin_s=begin_s) for found in slices]
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for event in events:
        if (number := event["args"].pop("flow", None)) is not None:
            flow = _flow(event, number)
            ends.setdefault(number, {})[flow["ph"]] = flow
    # without arrows of which one end is known, or whose message arrived before it left: clocks have errors
    whole = [both for both in ends.values() if len(both) == 2 and both["s"]["ts"] <= both["f"]["ts"]]
    instants = [_instant(finding, job, begin_s=begin_s) for finding in findings]
    errors = {
        f"rank {rank}": round(1e6 * error_s, 1) if math.isfinite(error_s) else None
        for rank, error_s in sorted(job.error_s.items())
    }
    # events before arrows: one that lasts no time must be there when its arrow comes
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": job.alignment.reference, "clock_error_us": errors, "begins_at_s": round(begin_s, 6),
            "events_left_out": left_out, "ranks_with_a_set_clock": sorted(job.unsteady),
        },
        "traceEvents": [
            *_names(job, lanes), *events, *(end for both in whole for end in (both["s"], both["f"])), *instants,
        ],
    }  # fmt: skip


def _slices(job: Job) -> Iterator[_Slice]:
    """Yield begin, end, rank, group, name and details of all that lasts."""
    for span in job.spans:
        known_values = {"loss": span.loss, "forward_s": span.forward_s, "backward_s": span.backward_s}
        known = {name: value for name, value in known_values.items() if value is not None and math.isfinite(value)}
        yield span.started_s, span.done_s, span.rank, "work", f"step {span.step}", known
    for (communicator, sequence), ops in job.operations.items():
        for rank, op in ops.items():
            name = f"{op.kind} {sequence}" + ("" if op.done_s is not None else " (not done)")
            details = {"communicator": communicator, "dtype": op.dtype, "count": op.count, "round": op.round}
            yield op.posted_s, _end(op.done_s, job), rank, "rounds", name, details
    for number, message in enumerate(job.messages):
        yield from _message_slices(message, job, number)


def _message_slices(message: Message, job: Job, number: int) -> Iterator[_Slice]:
    details: dict[str, Any] = {"bytes": message.num_bytes, "operation": message.operation, "part": message.part}
    if (transfer_s := message.transfer_s) is not None:
        details["transfer_ms"] = round(1000 * transfer_s, 3)
    if message.error:
        details["error"] = message.error
    if message.retries:
        details["retries"] = message.retries
    for group, rank, begin_s, done_s, name in (
        ("sends", message.source, message.sent_posted_s, message.sent_done_s, f"to {message.destination}"),
        ("receives", message.destination, message.received_posted_s, message.received_done_s, f"from {message.source}"),
    ):
        if begin_s is not None:
            name += "" if done_s is not None else " (not done)"
            yield begin_s, _end(done_s, job), rank, group, name, {**details, "flow": number}


def _end(done_s: float | None, job: Job) -> float:
    return job.now_s if done_s is None else done_s


class _Lanes:
    """Gives slices that overlap lanes of their own."""

    def __init__(self) -> None:
        self._free_s: dict[tuple[int, str], list[float]] = {}

    def of(self, found: _Slice) -> int:
        """Return the number of a lane that is free; slices come in the order of their begins."""
        begin_s, end_s, rank, group = found[:4]
        lanes = self._free_s.setdefault((rank, group), [])
        free = next((number for number, free_s in enumerate(lanes) if free_s <= begin_s), len(lanes))
        if free == len(lanes) and free < _LANES:
            lanes.append(end_s)
        else:
            free = min(free, _LANES - 1)
            lanes[free] = max(lanes[free], end_s)
        return _GROUPS.index(group) * _LANES + free

    def names(self) -> Iterator[tuple[int, int, str]]:
        """Yield rank, lane and name of all lanes."""
        for (rank, group), lanes in sorted(self._free_s.items()):
            for number in range(len(lanes)):
                yield rank, _GROUPS.index(group) * _LANES + number, f"{group} {number + 1}" if number else group


def _complete(found: _Slice, *, lane: int, begin_s: float) -> dict[str, Any]:
    started_s, done_s, rank, group, name, details = found
    return {
        "ph": "X", "name": name, "cat": group, "pid": rank, "tid": lane, "ts": _micros(started_s - begin_s),
        "dur": _micros(max(0.0, done_s - started_s)), "args": details,
    }  # fmt: skip


def _flow(event: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the end of an arrow that belongs to an end of a message; it must lie in the event."""
    is_sent = event["cat"] == "sends"
    at = event["ts"] if is_sent else event["ts"] + event["dur"]
    flow = {
        "ph": "s" if is_sent else "f", "name": "message", "cat": "message", "id": number,
        "pid": event["pid"], "tid": event["tid"], "ts": at,
    }  # fmt: skip
    return flow if is_sent else {**flow, "bp": "e"}


def _instant(finding: Finding, job: Job, *, begin_s: float) -> dict[str, Any]:
    named = [rank for place in finding.places for rank in place.ranks]
    ranks = named or sorted(ranks_of(finding.places, job.host_of))
    where = {"s": "p", "pid": ranks[0]} if ranks else {"s": "g", "pid": min(job.host_of, default=0)}
    return {
        "ph": "i", "name": f"{finding.kind}: {finding.where}", "cat": "finding", "tid": 0, **where,
        "ts": _micros(max(0.0, finding.since_s - begin_s)) if math.isfinite(finding.since_s) else 0.0,
        "args": {"text": finding.text, "remedy": finding.remedy, "confidence": round(finding.confidence, 3)},
    }  # fmt: skip


def _names(job: Job, lanes: _Lanes) -> Iterator[dict[str, Any]]:
    order = {rank: place for place, rank in enumerate(sorted(job.host_of, key=lambda rank: (job.host_of[rank], rank)))}
    for rank, host in sorted(job.host_of.items()):
        named = {"process_name": {"name": f"rank {rank} on {host}"}, "process_sort_index": {"sort_index": order[rank]}}
        for name, values in named.items():
            yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": values}
    for rank, lane, name in lanes.names():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 3)
