"""Findings as metrics in Prometheus's text format, version 0.0.4, which its textfile collector reads too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.slow_compute import work_of
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Finding
from thinwire.monitor.runlog.reader import Records

Samples = Iterable[tuple[Mapping[str, object], object]]
_LATEST = 8


def findings_text(findings: Sequence[Finding], records: Records, job: Job, *, at: float) -> str:
    """Return what a diagnosis found, and what records tell of ranks, as metrics.

    Samples carry no time, which the textfile collector would refuse.

    Args:
        findings: Those that are over are no samples.
        records: What they were found in.
        job: The same on one clock.
        at: Now, in seconds since 1970: a metric, so that an alarm can tell that nobody judges any more.

    Example:
        >>> print(findings_text([], Records(), Job(), at=0.0).splitlines()[2])
        thinwire_findings 0
    """
    told = [{**finding.to_json(), "is_over": finding.until_s is not None} for finding in findings]
    lines: list[str] = [
        *finding_lines(told),
        *metric_lines("diagnosed_records", "gauge", "Records that were judged.", [({}, records.num_records)]),
        *metric_lines(
            "refused_lines", "gauge", "Lines of records that could not be read.", [({}, records.num_refused)]
        ),
        *metric_lines("diagnosis_timestamp_seconds", "gauge", "When this was judged, since 1970.", [({}, at)]),
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
    says = "A finding that is not over, and how sure it is."
    yield from metric_lines("finding_confidence_ratio", "gauge", says, found)
    yield from metric_lines("findings", "gauge", "Findings that are not over.", [({}, len(worst))])


def metric_lines(name: str, kind: str, says: str, samples: Samples) -> Iterator[str]:
    """Yield a metric's lines; none where it has no samples.

    Args:
        name: Without the leading `thinwire_`.
        kind: `gauge` or `counter`.
        says: What it is, in one line.
        samples: Labels and value of each; what is no finite number is none.
    """
    known = [(labels, value) for labels, value in samples if isinstance(value, int | float) and math.isfinite(value)]
    if known:
        yield f"# HELP thinwire_{name} {says}"
        yield f"# TYPE thinwire_{name} {kind}"
    for labels, value in known:
        told = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        yield f"thinwire_{name}{{{told}}} {value}" if told else f"thinwire_{name} {value}"


def _escaped(text: str) -> str:
    # a name that was read from JSON may hold halves of letters, which UTF-8 has not
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _rank_lines(job: Job) -> Iterator[str]:
    labels = {rank: {"rank": rank, "host": job.host_of[rank]} for rank in job.ranks}
    silent = [(labels[rank], round(job.now_s - seen_s, 6)) for rank, seen_s in sorted(job.last_seen_s.items())
              if rank not in job.unsteady]  # fmt: skip
    says = "Time from the rank's last record to the latest one of all ranks."
    yield from metric_lines("rank_silent_seconds", "gauge", says, silent)
    ended = [(labels[rank], 1) for rank in sorted(job.goodbyes)]
    yield from metric_lines("rank_ended", "gauge", "1 for a rank that has said that it ends.", ended)
    done: dict[int, int] = {}
    unfinished = dict.fromkeys(job.ranks, 0)
    for own in job.operations.values():
        for rank, operation in own.items():
            number = operation.round if operation.round >= 0 else operation.sequence
            if operation.done_s is None:
                unfinished[rank] += 1
            else:
                done[rank] = max(done.get(rank, -1), number)
    says = "Number of the last round or operation that the rank has done."
    yield from metric_lines("rank_last_operation", "gauge", says, [(labels[rank], done[rank]) for rank in sorted(done)])
    says = "Rounds or operations that the rank has begun and not done."
    open_ones = [(labels[rank], number) for rank, number in unfinished.items()] if job.operations else []
    yield from metric_lines("rank_open_operations", "gauge", says, open_ones)
    works = {rank: own for rank, own in sorted(work_of(job).items()) if own and rank not in job.unsteady}
    latest = [(labels[rank], median([work.time_s for work in own[-_LATEST:]])) for rank, own in works.items()]
    yield from metric_lines(
        "rank_work_seconds", "gauge", "The rank's own work for a step, middle of the latest 8.", latest
    )
    yield from metric_lines(
        "rank_last_step", "gauge", "Last step whose work is known.",
        [(labels[rank], max(work.step for work in own)) for rank, own in works.items()],
    )  # fmt: skip
