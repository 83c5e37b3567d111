"""What `thinwire diagnose` writes for Prometheus, read as strictly as its format says."""

from __future__ import annotations

from pathlib import Path

from tests.prometheus_text import read
from tests.rehearsed_run import write_records
from tests.synthetic_jobs import InjectedFault
from thinwire.cli.diagnose import FOUND, main
from thinwire.monitor.detect.diagnose import findings_of
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Place
from thinwire.monitor.prometheus_text import findings_text
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Communicator, Span, header_line, to_line

SLOW = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=24, severity=5.0)


def test_metrics_of_a_slow_link_hold_its_finding_and_all_ranks(tmp_path: Path) -> None:
    run, path = write_records(tmp_path / "run", SLOW), tmp_path / "thinwire.prom"
    path.write_text("old")
    assert main([str(run), "--prometheus", str(path)]) == FOUND
    samples, types = read(path.read_text())
    place = frozenset({("kind", "communication slow"), ("where", "link 0 -> 2")})
    assert samples["thinwire_finding_confidence_ratio", place] > 0.5
    assert samples["thinwire_findings", frozenset()] == 1
    hosts = [dict(labels)["host"] for name, labels in samples if name == "thinwire_rank_silent_seconds"]
    assert sorted(hosts) == ["a", "b", "c"]
    one = frozenset({("rank", "1"), ("host", "b")})
    assert samples["thinwire_rank_last_operation", one] == samples["thinwire_rank_last_step", one] == 47
    assert samples["thinwire_rank_open_operations", one] == 0 and samples["thinwire_rank_work_seconds", one] > 0
    assert set(types.values()) == {"gauge"} and list(tmp_path.glob(".*")) == []


def test_hostile_names_are_escaped_and_what_is_not_known_has_no_sample() -> None:
    name = 'a"} 1\n\\thinwire_findings 7\ud800\r'
    records = from_records([
        Communicator(communicator="x", ranks=(0,), hosts=(name,)),
        Span(rank=0, kind="compute", step=1, started_s=0.0, done_s=2.0),
    ])  # fmt: skip
    job = build(records)
    samples, _ = read(findings_text(findings_of(job), records, job, at=10.0))
    labels = frozenset({("rank", "0"), ("host", name.replace("\ud800", "?"))})
    assert samples["thinwire_rank_work_seconds", labels] == 2.0
    assert samples["thinwire_findings", frozenset()] == 0 and samples["thinwire_diagnosed_records", frozenset()] == 1
    assert not any(name == "thinwire_rank_open_operations" for name, _ in samples)


def test_a_kind_of_work_that_utf8_cannot_write_ends_no_heat_map(tmp_path: Path) -> None:
    spans = [Span(rank=rank, kind="\ud800", step=1, started_s=0.0, done_s=1.0) for rank in (0, 1)]
    path = tmp_path / "records-rank-0.jsonl"
    path.write_text("\n".join([header_line(), *map(to_line, spans)]) + "\n")
    assert main([str(path), "--heat", str(tmp_path / "heat.html")]) == 0
    assert '<h2 id="kind-0">?</h2>' in (tmp_path / "heat.html").read_text()
