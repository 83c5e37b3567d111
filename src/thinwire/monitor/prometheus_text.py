"""Prometheus text format 0.0.4: metrics of findings, diagnosed ranks and the dashboard's snapshot.

The textfile collector reads the same format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.slow_compute import work_of
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Finding
from thinwire.runlog.measures import per_sample
from thinwire.runlog.reader import Records

Samples = Iterable[tuple[Mapping[str, object], object]]
_LATEST = 8
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def findings_text(findings: Sequence[Finding], records: Records, job: Job, *, at: float) -> str:
    """Return findings and the state of ranks as metrics.

    Samples carry no time, which the textfile collector would refuse.

    Example:
        >>> print(findings_text([], Records(), Job(), at=0.0).splitlines()[2])
        thinwire_findings 0
    """
    rows = [{**finding.to_json(), "is_over": finding.until_s is not None} for finding in findings]
    lines: list[str] = [
        *finding_lines(rows),
        *metric_lines("diagnosed_records", "gauge", "Diagnosed records.", [({}, records.num_records)]),
        *metric_lines("refused_lines", "gauge", "Rejected lines of records.", [({}, records.num_refused)]),
        # so that an alarm notices a diagnosis that has stopped
        *metric_lines("diagnosis_timestamp_seconds", "gauge", "Time of the diagnosis, since 1970.", [({}, at)]),
        *_rank_lines(job),
    ]
    return "".join(f"{line}\n" for line in lines)


def finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the metrics of findings, as `Finding.to_json` writes them with `is_over`."""
    worst: dict[tuple[str, str], float] = {}
    for one in findings:
        if not one.get("is_over"):
            place = str(one["kind"]), str(one["where"])
            worst[place] = max(worst.get(place, 0.0), float(one.get("confidence") or 0.0))
    found = [({"kind": kind, "where": where}, sure) for (kind, where), sure in sorted(worst.items())]
    yield from metric_lines("finding_confidence_ratio", "gauge", "Confidence of each open finding.", found)
    yield from metric_lines("findings", "gauge", "Number of open findings.", [({}, len(worst))])


def metric_lines(name: str, kind: str, description: str, samples: Samples) -> Iterator[str]:
    """Yield the lines of the metric `thinwire_NAME`; values that are no finite number are left out."""
    known = [(labels, value) for labels, value in samples if isinstance(value, int | float) and math.isfinite(value)]
    if known:
        yield f"# HELP thinwire_{name} {description}"
        yield f"# TYPE thinwire_{name} {kind}"
    for labels, value in known:
        # names from JSON may hold lone surrogates, which UTF-8 lacks
        texts = {label: str(text).encode("utf-8", "replace").decode("utf-8") for label, text in labels.items()}
        pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in texts.items())
        yield f"thinwire_{name}{{{pairs}}} {value}" if pairs else f"thinwire_{name} {value}"


def _rank_lines(job: Job) -> Iterator[str]:
    labels = {rank: {"rank": rank, "host": job.host_of[rank]} for rank in sorted(job.host_of)}
    silent = [(labels[rank], round(job.now_s - seen_s, 6)) for rank, seen_s in sorted(job.last_seen_s.items())
              if rank not in job.unsteady]  # fmt: skip
    description = "Time from the rank's last record to the latest one of all ranks."
    yield from metric_lines("rank_silent_seconds", "gauge", description, silent)
    ended = [(labels[rank], 1) for rank in sorted(job.goodbyes)]
    yield from metric_lines("rank_ended", "gauge", "1 for a rank that has ended.", ended)
    done: dict[int, int] = {}
    unfinished = dict.fromkeys(labels, 0)
    for own in job.operations.values():
        for rank, operation in own.items():
            number = operation.round if operation.round >= 0 else operation.sequence
            if operation.done_s is None:
                unfinished[rank] += 1
            else:
                done[rank] = max(done.get(rank, -1), number)
    last = [(labels[rank], done[rank]) for rank in sorted(done)]
    yield from metric_lines("rank_last_operation", "gauge", "Number of the rank's last finished round.", last)
    open_ones = [(labels[rank], number) for rank, number in unfinished.items()] if job.operations else []
    yield from metric_lines("rank_open_operations", "gauge", "Unfinished rounds of the rank.", open_ones)
    works = {rank: own for rank, own in sorted(work_of(job).items()) if own and rank not in job.unsteady}
    latest = [(labels[rank], median([work.time_s for work in own[-_LATEST:]])) for rank, own in works.items()]
    yield from metric_lines(
        "rank_work_seconds", "gauge", "The rank's own work for a step, median of the latest 8.", latest
    )
    yield from metric_lines(
        "rank_last_step", "gauge", "Last step whose work is known.",
        [(labels[rank], max(work.step for work in own)) for rank, own in works.items()],
    )  # fmt: skip


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REPLICA = (
    ("step", "gauge", "step", "Last inner step of the replica."),
    ("loss", "gauge", "loss", "Loss at that step, in nats per sample: a token, an image."),
    ("{unit}_total", "counter", "{unit}", "{Unit} trained on."),
    ("{unit}_per_second", "gauge", "{unit}_per_s", "{Unit} trained on per second, since the line before."),
    ("compute_ratio", "gauge", "computing", "Share of the time since training began without waiting for the network."),
    ("sent_bytes_total", "counter", "sent_bytes", "Bytes sent to other replicas."),
    ("received_bytes_total", "counter", "received_bytes", "Bytes received from other replicas."),
    ("rounds_in_flight", "gauge", "rounds_in_flight", "Rounds that were launched and not applied yet."),
)
_LINK = (
    ("bytes_total", "counter", "bytes", "Bytes that crossed the link, as the replicas count them."),
    ("messages_total", "counter", "messages", "Messages that crossed the link."),
    ("failed_messages_total", "counter", "failed", "Messages that failed on the link."),
)


def metrics_text(sections: Mapping[str, Any]) -> str:
    """Return the metrics of a run; unknown values have no sample.

    Example:
        >>> text = metrics_text({"run": {"name": "demo", "state": "training", "step": 7}})
        >>> print(*text.splitlines()[:4], sep="\\n")
        # HELP thinwire_run_info The run; always 1.
        # TYPE thinwire_run_info gauge
        thinwire_run_info{run="demo",state="training"} 1
        # HELP thinwire_run_step Last inner step of the run.
    """
    return "".join(f"{line}\n" for line in _lines(sections))


def _lines(sections: Mapping[str, Any]) -> Iterator[str]:
    run = sections.get("run") or {}
    names = {"run": "name", "state": "state", "method": "method", "model": "model"}
    labels = {label: run[name] for label, name in names.items() if run.get(name)}
    yield from metric_lines("run_info", "gauge", "The run; always 1.", [(labels, 1)])
    yield from metric_lines("run_step", "gauge", "Last inner step of the run.", [({}, run.get("step"))])
    yield from metric_lines("run_planned_steps", "gauge", "Planned inner steps of the run.", [({}, run.get("steps"))])
    unit = run.get("unit") or "tokens"  # a word of lower-case letters, as its reader has checked
    description = f"Validation loss of the global parameters, in {per_sample(unit)}."
    yield from metric_lines("run_validation_loss", "gauge", description, [({}, run.get("val_loss"))])
    if (metric := run.get("metric")) is not None:
        description = f"Validation {metric['name']} of the global parameters."
        yield from metric_lines(f"run_validation_{metric['name']}", "gauge", description, [({}, metric["value"])])
    replicas: Sequence[Mapping[str, Any]] = sections.get("replicas") or []
    states = [({"replica": one["replica"], "state": one["state"]}, 1) for one in replicas if one.get("state")]
    yield from metric_lines("replica_state", "gauge", "State of the replica; 1 for its current one.", states)
    for one_of in _REPLICA:
        name, kind, field, description = (part.format(unit=unit, Unit=unit.capitalize()) for part in one_of)
        found = [({"replica": one["replica"]}, one.get(field)) for one in replicas]
        yield from metric_lines(f"replica_{name}", kind, description, found)
    links: Sequence[Mapping[str, Any]] = (sections.get("links") or {}).get("links") or []
    for name, kind, field, description in _LINK:
        found = [({"source": one["from"], "destination": one["to"]}, one.get(field)) for one in links]
        yield from metric_lines(f"link_{name}", kind, description, found)
    rates = [
        ({"source": one["from"], "destination": one["to"]}, one["now_bits_per_s"] / 8)
        for one in links
        if one.get("now_bits_per_s") is not None
    ]
    yield from metric_lines("link_bytes_per_second", "gauge", "Rate of the last seconds.", rates)
    yield from finding_lines((sections.get("findings") or {}).get("findings") or [])
    rows = {name: value for name, value in (sections.get("downtime") or {}).items() if name.endswith("_s")}
    lost = [({"row": name.removesuffix("_s")}, rows[name]) for name in sorted(rows) if name not in ("total_s", "run_s")]
    yield from metric_lines(
        "downtime_seconds_total", "counter", "Time that faults cost, in the rows of C4's table.", lost
    )
