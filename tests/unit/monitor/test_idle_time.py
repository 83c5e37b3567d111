"""Idle time by cause: who was late at which call, and how long the others waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli.diagnose import main
from thinwire.monitor.detect.idle_time import idle_causes, shown_causes
from thinwire.monitor.detect.timeline import build
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Communicator, Operation, Record, header_line, to_line


def _operations(*, rounds: bool = False, late_at: tuple[int, ...] = (20, 40)) -> list[Record]:
    """Return steps of two calls and a barrier now and then, that rank 0 comes 12 s late to."""
    records: list[Record] = []
    ready, number = [0.0, 0.0, 0.0], 0

    def call(kind: str, count: int, own_s: tuple[float, float, float], line: int) -> None:
        nonlocal number
        posted = [at_s + one_s for at_s, one_s in zip(ready, own_s, strict=True)]
        for rank in range(3):
            ready[rank] = max(posted) + 0.01
            records.append(Operation(
                communicator="0 default_pg", rank=rank, sequence=number, kind=kind, count=count,
                site=f"train.py:{line}", posted_s=posted[rank], done_s=ready[rank], round=number if rounds else -1,
            ))  # fmt: skip
        number += 1

    for step in range(60):
        call("all_reduce", 8192, (0.1, 0.1, 0.1), 3)
        call("all_reduce", 128, (0.001, 0.002, 0.001), 3)
        if step in late_at:
            call("barrier", 0, (12.0, 0.0, 0.0), 7)
    return records


def test_an_evaluation_on_one_rank_shows_as_idle_time_of_the_others_after_the_run() -> None:
    job = build(from_records(_operations()))
    (cause,) = shown_causes(job, idle_causes(job))
    assert (cause.rank, cause.times, cause.waiting) == (0, 2, (1, 2)) and cause.waited_s == pytest.approx(24.0)
    assert str(cause).startswith(
        "24.0 s of the others: rank 0 was late at barrier() at train.py:7 of 0 default_pg, 2 t"
    )


def test_calls_that_ranks_do_not_wait_in_and_small_waits_are_no_idle_time() -> None:
    job = build(from_records(_operations(late_at=())))
    assert shown_causes(job, idle_causes(job)) == []
    job = build(from_records(_operations(rounds=True)))
    assert idle_causes(job) == [], "rounds go on beside training"
    buckets: list[Record] = [Communicator(communicator="0", ranks=(0, 1), hosts=("a", "a"))]
    buckets += [
        Operation(communicator="0", rank=rank, sequence=number, kind="all_reduce", count=8,
                  posted_s=3.0 * rank + 0.1 * number, done_s=3.5, is_async=True)
        for number in range(4) for rank in range(2)
    ]  # fmt: skip
    (cause,) = idle_causes(build(from_records(buckets)))
    assert (cause.times, cause.waited_s) == (1, pytest.approx(3.0)), "only the last bucket is waited in"


def test_diagnose_prints_idle_time_without_calling_it_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        own = [to_line(record) for record in _operations() if isinstance(record, Operation) and record.rank == rank]
        (tmp_path / f"records-rank-{rank}.jsonl").write_text("\n".join([header_line(), *own]) + "\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No fault found." in out and "idle time by cause:\n  24.0 s of the others: rank 0 was late" in out
    assert main(["--json", str(tmp_path)]) == 0
    assert '"waited_s": 24.0' in capsys.readouterr().out
