"""A run's state as metrics: what Prometheus asks of its text format, and the run's numbers in it."""

from __future__ import annotations

from typing import Any

from tests.prometheus_text import read
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.prometheus_text import findings_text, metrics_text
from thinwire.runlog.reader import Records


def test_replicas_links_findings_and_lost_time_are_told() -> None:
    finding: dict[str, Any] = {"kind": "communication slow", "where": 'a "thin"\\wire\n', "confidence": 0.75}
    told = {
        "run": {"name": "demo", "state": "training", "step": 40, "steps": 100, "val_loss": None},
        "replicas": [
            {"replica": 1, "state": "training", "step": 40, "loss": 2.5, "tokens": 640, "sent_bytes": 7},
            {"replica": 2, "state": "silent", "step": 38, "loss": None, "tokens": 600, "sent_bytes": 0},
        ],
        "links": {"links": [{"from": 1, "to": 2, "bytes": 10, "messages": 3, "failed": 0, "now_bits_per_s": 1e-7}]},
        "findings": {"findings": [finding, {**finding, "confidence": 0.5}, {**finding, "where": "x", "is_over": True}]},
        "downtime": {"detection_s": 1.5, "total_s": 2.0, "run_s": 9.0, "num_incidents": 1.0},
    }
    samples, types = read(metrics_text(told))
    one, two, link = (frozenset({("replica", "1")}), frozenset({("replica", "2")}),
                      frozenset({("source", "1"), ("destination", "2")}))  # fmt: skip
    assert samples["thinwire_replica_loss", one] == 2.5 and ("thinwire_replica_loss", two) not in samples
    assert (
        samples["thinwire_replica_tokens_total", two] == 600 and samples["thinwire_replica_sent_bytes_total", two] == 0
    )
    assert samples["thinwire_replica_state", two | {("state", "silent")}] == 1
    assert (
        samples["thinwire_link_bytes_total", link] == 10 and samples["thinwire_link_bytes_per_second", link] == 1.25e-8
    )
    place = frozenset({("kind", "communication slow"), ("where", 'a "thin"\\wire\n')})
    assert (
        samples["thinwire_finding_confidence_ratio", place] == 0.75 and samples["thinwire_findings", frozenset()] == 1
    )
    lost = {labels: value for (name, labels), value in samples.items() if name == "thinwire_downtime_seconds_total"}
    assert lost == {frozenset({("row", "detection")}): 1.5}
    assert "thinwire_run_validation_loss" not in types and types["thinwire_run_step"] == "gauge"


def test_what_a_diagnosis_found_is_told_without_what_is_over_or_would_be_refused() -> None:
    place = Place(kind="host", hosts=('a "b"\\',))
    finding = Finding(kind="clock", places=(place,), since_s=1.0, text="", confidence=0.5, remedy="")
    over = Finding(kind="desync", places=(place,), since_s=1.0, until_s=2.0, text="", confidence=0.5, remedy="")
    text = findings_text([finding, over], Records(num_refused=3), Job(), at=7.5)
    samples, types = read(text)
    labels = frozenset({("kind", "clock"), ("where", 'host a "b"\\')})
    none: frozenset[tuple[str, str]] = frozenset()
    assert samples == {
        ("thinwire_finding_confidence_ratio", labels): 0.5, ("thinwire_findings", none): 1,
        ("thinwire_diagnosed_records", none): 0, ("thinwire_refused_lines", none): 3,
        ("thinwire_diagnosis_timestamp_seconds", none): 7.5,
    }  # fmt: skip
    assert set(types.values()) == {"gauge"}
    assert read(findings_text([], Records(), Job(), at=0.0))[0]["thinwire_findings", none] == 0
