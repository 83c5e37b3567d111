"""A run's state as metrics that Prometheus reads: its text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.monitor.prometheus_text import finding_lines, metric_lines

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REPLICA = (
    ("step", "gauge", "step", "Last inner step that the replica told."),
    ("loss", "gauge", "loss", "Loss at that step, in nats per token."),
    ("tokens_total", "counter", "tokens", "Tokens trained on."),
    ("tokens_per_second", "gauge", "tokens_per_s", "Tokens trained on per second, since the line before."),
    ("compute_ratio", "gauge", "compute_fraction", "Part of the time in which the replica computed."),
    ("sent_bytes_total", "counter", "sent_bytes", "Bytes sent to other replicas."),
    ("received_bytes_total", "counter", "received_bytes", "Bytes received from other replicas."),
    ("rounds_in_flight", "gauge", "rounds_in_flight", "Rounds that were launched and not applied yet."),
)
_LINK = (
    ("bytes_total", "counter", "bytes", "Bytes that crossed the link, as the replicas count them."),
    ("messages_total", "counter", "messages", "Messages that crossed the link."),
    ("failed_messages_total", "counter", "failed", "Messages that failed on the link."),
)


def metrics_text(told: Mapping[str, Any]) -> str:
    """Return the metrics of a run; what is not known has no sample.

    Args:
        told: The sections of `snapshot`.

    Example:
        >>> told = metrics_text({"run": {"name": "demo", "state": "training", "step": 7}})
        >>> print(*told.splitlines()[:4], sep="\\n")
        # HELP thinwire_run_info The run; always 1.
        # TYPE thinwire_run_info gauge
        thinwire_run_info{run="demo",state="training"} 1
        # HELP thinwire_run_step Last inner step of the run.
    """
    return "".join(f"{line}\n" for line in _lines(told))


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    run = told.get("run") or {}
    names = {"run": "name", "state": "state", "method": "method", "model": "model"}
    labels = {label: run[name] for label, name in names.items() if run.get(name)}
    yield from metric_lines("run_info", "gauge", "The run; always 1.", [(labels, 1)])
    yield from metric_lines("run_step", "gauge", "Last inner step of the run.", [({}, run.get("step"))])
    yield from metric_lines(
        "run_planned_steps", "gauge", "Inner steps that the run shall have.", [({}, run.get("steps"))]
    )
    says = "Validation loss of the global parameters, in nats per token."
    yield from metric_lines("run_validation_loss", "gauge", says, [({}, run.get("val_loss"))])
    replicas: Sequence[Mapping[str, Any]] = told.get("replicas") or []
    states = [({"replica": one["replica"], "state": one["state"]}, 1) for one in replicas if one.get("state")]
    yield from metric_lines("replica_state", "gauge", "What the replica does; 1 for its state.", states)
    for name, kind, field, says in _REPLICA:
        found = [({"replica": one["replica"]}, one.get(field)) for one in replicas]
        yield from metric_lines(f"replica_{name}", kind, says, found)
    links: Sequence[Mapping[str, Any]] = (told.get("links") or {}).get("links") or []
    for name, kind, field, says in _LINK:
        found = [({"source": one["from"], "destination": one["to"]}, one.get(field)) for one in links]
        yield from metric_lines(f"link_{name}", kind, says, found)
    rates = [
        ({"source": one["from"], "destination": one["to"]}, one["now_bits_per_s"] / 8)
        for one in links
        if one.get("now_bits_per_s") is not None
    ]
    yield from metric_lines("link_bytes_per_second", "gauge", "Rate of the last seconds.", rates)
    yield from finding_lines((told.get("findings") or {}).get("findings") or [])
    rows = {name: value for name, value in (told.get("downtime") or {}).items() if name.endswith("_s")}
    lost = [({"row": name.removesuffix("_s")}, rows[name]) for name in sorted(rows) if name not in ("total_s", "run_s")]
    yield from metric_lines(
        "downtime_seconds_total", "counter", "Time that faults cost, in the rows of C4's table.", lost
    )
