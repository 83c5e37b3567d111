"""Findings as metrics in Prometheus's text format, version 0.0.4, which its textfile collector reads too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.diagnosis.findings import Finding
from thinwire.diagnosis.reading import Records

Samples = Iterable[tuple[Mapping[str, object], object]]


def findings_text(findings: Sequence[Finding], records: Records) -> str:
    """Return what a diagnosis found as metrics; they carry no time, which the textfile collector would refuse.

    Args:
        findings: Those that are over are no samples.
        records: What they were found in.

    Example:
        >>> print(findings_text([], Records()).splitlines()[2])
        thinwire_findings 0
    """
    told = [{**finding.to_json(), "is_over": finding.until_s is not None} for finding in findings]
    lines: list[str] = [
        *finding_lines(told),
        *metric_lines("diagnosed_records", "gauge", "Records that were judged.", [({}, records.num_records)]),
        *metric_lines(
            "refused_lines", "gauge", "Lines of records that could not be read.", [({}, records.num_refused)]
        ),
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
        samples: Labels and value of each; what is no number is none.
    """
    known = [(labels, value) for labels, value in samples if isinstance(value, int | float)]
    if known:
        yield f"# HELP thinwire_{name} {says}"
        yield f"# TYPE thinwire_{name} {kind}"
    for labels, value in known:
        told = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        yield f"thinwire_{name}{{{told}}} {value}" if told else f"thinwire_{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
