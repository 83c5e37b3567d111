"""Records, their files as strangers write them, and clocks that show different times."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic_jobs import Scene, synthesize
from thinwire.errors import DataError
from thinwire.monitor.detect.clocks import Sighting, align
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.runlog.reader import MOST_LINE_BYTES, Records, from_records, parse_line, read_records, take_line
from thinwire.runlog.records import (
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    Probe,
    Record,
    Span,
    TransferEnd,
    header_line,
    to_line,
)

ONE_OF_EACH: list[Record] = [
    Communicator(communicator="world", ranks=(0, 1), hosts=("a", "b")),
    Operation(communicator="world", rank=0, sequence=3, kind="all_reduce", dtype="float32", count=7, posted_s=1.5),
    TransferEnd(communicator="world", rank=1, peer=0, direction="received", operation=3, num_bytes=9, posted_s=1.0,
                started_s=1.25, done_s=2.0, retries=2, error="lost"),
    Span(rank=0, kind="compute", step=4, started_s=0.5, done_s=1.5, loss=2.25),
    Span(rank=0, kind="compute", step=4, started_s=0.5, done_s=1.5, forward_s=0.25, backward_s=0.0),
    Operation(communicator="world", rank=0, sequence=3, kind="barrier", posted_s=1.5, site="run.py:3", is_async=True),
    Beat(rank=1, at_s=-3.0),
    Beat(rank=1, at_s=4.0, stack=("run.py:3 in main",), cpu=0.25, sleeps_in="futex", workers=("42 runs",)),
    Arrival(rank=1, peer=0, at_s=2.5, num_bytes=77, has_signs=True),
    Flow(rank=1, peer=0, at_s=2.5, num_bytes=77, busy_s=1.5, held_s=0.25, silence_s=0.5, unanswered=3),
    Probe(rank=1, peer=0, at_s=2.5, num_bytes=77, took_s=0.125),
]  # fmt: skip


@pytest.mark.parametrize("record", ONE_OF_EACH, ids=lambda record: type(record).__name__)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert parse_line(to_line(record).encode()) == record


def test_a_loss_that_is_no_number_is_read_as_it_was_written() -> None:
    span = parse_line(to_line(Span(rank=0, kind="step", step=1, started_s=0.0, done_s=1.0, loss=math.nan)).encode())
    assert isinstance(span, Span) and span.loss is not None and math.isnan(span.loss)


def _write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join([header_line().encode(), *lines]) + b"\n")
    return path


BAD = {
    b'{"record":"beat","rank":1': "no JSON",
    b"[1]": "no JSON object",
    b'{"record":"bite","rank":1}': "no kind of record",
    b'{"record":["beat"],"rank":1}': "no kind of record",
    b'{"record":"beat","rank":1}': "at_s is missing",
    b'{"record":"beat","rank":1048576,"at_s":1}': "rank is invalid",
    b'{"record":"beat","rank":true,"at_s":1}': "rank is invalid",
    b'{"record":"beat","rank":1,"at_s":NaN}': "at_s is invalid",
    b'{"record":"beat","rank":1,"at_s":1e400}': "at_s is invalid",
    b'{"record":"beat","rank":1,"at_s":"1"}': "at_s is invalid",
    b'{"record":"arrival","rank":1,"peer":1,"at_s":1.5,"num_bytes":3}': "with itself",
    b'{"record":"arrival","rank":1,"peer":0,"at_s":1.5,"num_bytes":-3}': "num_bytes is invalid",
    b'{"record":"arrival","rank":1,"peer":0,"num_bytes":3}': "at_s is missing",
    b'{"record":"flow","rank":1,"peer":1,"at_s":1.5,"num_bytes":3,"busy_s":1}': "with itself",
    b'{"record":"flow","rank":1,"peer":0,"at_s":1.5,"num_bytes":3,"busy_s":-1}': "busy_s is invalid",
    b'{"record":"flow","rank":1,"peer":0,"at_s":1.5,"num_bytes":3,"busy_s":1,"silence_s":"x"}': "silence_s is invalid",
    b'{"record":"probe","rank":1,"peer":0,"at_s":1.5,"num_bytes":3,"took_s":null}': "took_s is invalid",
    b'{"record":"span","rank":1,"kind":"step","step":1,"started_s":2,"done_s":1}': "times run backwards",
    b'{"record":"span","rank":1,"kind":"step","step":1,"started_s":2,"done_s":null}': "done_s is invalid",
    b'{"record":"span","rank":1,"kind":"step","step":1,"started_s":2,"done_s":3,"forward_s":-1}': "forward_s is",
    b'{"record":"span","rank":1,"kind":"step","step":1,"started_s":2,"done_s":3,"backward_s":"1"}':
        "backward_s is invalid",
    b'{"record":"span","rank":1,"kind":"step","step":1,"started_s":2,"done_s":3,"loss":1' + b"0" * 400 + b"}":
        "loss is invalid",
    b'{"record":"communicator","communicator":"w","ranks":[0,0],"hosts":["a","b"]}': "some are there twice",
    b'{"record":"communicator","communicator":"w","ranks":[0,1],"hosts":["a"]}': "not as many as ranks",
    b'{"record":"communicator","communicator":"w","ranks":7,"hosts":["a"]}': "ranks is invalid",
    b'{"record":"transfer","communicator":"w","rank":1,"peer":1,"direction":"sent","operation":0,"num_bytes":1,"posted_s":0}':
        "with itself",
    b'{"record":"transfer","communicator":"w","rank":1,"peer":2,"direction":"up","operation":0,"num_bytes":1,"posted_s":0}':
        "direction is invalid",
    b"\xff\xfe": "no JSON",
    b"[" * 100_000: "no JSON",
    b'{"record":"beat","rank":1,"at_s":1,"x":"' + b"a" * MOST_LINE_BYTES + b'"}': "longer than",
}  # fmt: skip


def test_a_line_that_is_refused_is_counted_and_named_and_ends_nothing(tmp_path: Path) -> None:
    good = to_line(Beat(rank=1, at_s=2.0)).encode()
    path = _write(tmp_path / "r.jsonl", [line for bad in BAD for line in (bad, good)])
    records = read_records([path])
    assert len(records.beats) == len(BAD) and records.num_refused == len(BAD)
    for number, (refusal, reason) in enumerate(zip(records.refusals, BAD.values(), strict=False)):
        assert reason in refusal.reason and refusal.line == 2 + 2 * number and refusal.source == "r.jsonl"
    assert sum(records.reasons.values()) == len(BAD)


def test_a_communicator_that_contradicts_another_is_refused(tmp_path: Path) -> None:
    lines = [to_line(Communicator(communicator="w", ranks=(0,), hosts=(host,))).encode() for host in ("a", "b")]
    records = read_records([_write(tmp_path / "r.jsonl", lines)])
    assert records.communicators["w"].hosts == ("a",) and "other members" in records.refusals[0].reason


@pytest.mark.parametrize(
    ("first", "named"),
    [
        (b"hello", "no file of records"),
        (b'{"format":"else"}', "no file of records"),
        (b'{"format":"thinwire-records","version":2}', "version 2; this thinwire reads 1"),
        (b'{"format":"thinwire-records","version":' + b"9" * 200 + b"}", "version 999"),
    ],
)
def test_a_file_of_something_else_is_refused_with_its_name(tmp_path: Path, first: bytes, named: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(first + b"\n")
    with pytest.raises(DataError, match=named) as caught:
        read_records([path])
    assert "other.jsonl" in str(caught.value)
    with pytest.raises(DataError, match="cannot read"):
        read_records([tmp_path / "none.jsonl"])


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    ),
    st.sampled_from(
        ["rank", "ranks", "hosts", "posted_s", "done_s", "operation", "count", "direction", "record", "loss"]
    ),
    st.sampled_from(ONE_OF_EACH),
)
def test_any_value_in_any_field_is_taken_or_refused(value: object, field: str, record: Record) -> None:
    told = {**json.loads(to_line(record)), field: value}
    records = Records()
    take_line(records, json.dumps(told).encode(), source="f", number=2)
    assert records.num_refused + records.num_records + len(records.communicators) == 1
    diagnose(records)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30))
def test_records_that_are_cut_off_mixed_up_doubled_and_forged_are_no_fault_of_the_job(seed: int) -> None:
    draw = random.Random(seed)
    found = synthesize(Scene(hosts=("a", "a", "b"), rounds=25, seed=seed))
    lines = [to_line(record).encode() for record in found]
    lines += draw.sample(lines, 40)
    draw.shuffle(lines)
    broken = [line[: draw.randrange(len(line))] for line in draw.sample(lines, 20)]
    records = Records()
    for number, line in enumerate([*lines, *broken], start=2):
        take_line(records, line, source="f", number=number)
    assert 0 < records.num_refused <= 20 and records.refused_share < 0.1
    assert [finding for finding in diagnose(records) if finding.confidence > 0.6] == []


def test_a_rank_whose_file_is_cut_off_in_the_middle_is_not_blamed_with_confidence() -> None:
    found = synthesize(Scene(hosts=("a", "b", "c"), rounds=40, seed=3))
    own = [record for record in found if isinstance(record, Operation | TransferEnd | Span | Beat) and record.rank == 2]
    kept = [record for record in found if record not in own[len(own) // 2 :]]
    assert all(finding.kind != "communication slow" for finding in diagnose(from_records(kept)))


def _sightings(offset_s: float, drift: float, *, out_s: float, back_s: float) -> list[Sighting]:
    draw = random.Random(0)
    found = []
    for number in range(200):
        at_s = number * 0.5
        there = offset_s + (at_s + out_s + draw.expovariate(200)) * (1 + drift)
        found.append(Sighting("a", "b", at_s, there))
        sent = offset_s + at_s * (1 + drift)
        found.append(Sighting("b", "a", sent, at_s + back_s + draw.expovariate(200)))
    return found


def test_offset_and_drift_are_found_within_the_stated_error() -> None:
    fit = align(["a", "b"], _sightings(12.5, 40e-6, out_s=0.02, back_s=0.03)).fits["b"]
    assert fit.is_steady
    for at_s in (0.0, 50.0, 100.0):
        assert abs(fit.to_reference(12.5 + at_s * (1 + 40e-6)) - at_s) <= fit.error_s + 2e-3
    assert 0.02 < fit.error_s < 0.04 and abs(fit.drift - 40e-6) < 60e-6


def test_a_link_that_is_slow_in_one_direction_is_bounded_by_the_way_over_a_third_host() -> None:
    direct = _sightings(5.0, 0.0, out_s=1.0, back_s=0.01)
    around = [Sighting("a", "c", t, t + 0.01) for t in range(50)] + [Sighting("c", "a", t, t + 0.01) for t in range(50)]
    around += [Sighting("c", "b", t, t + 5.01) for t in range(50)] + [
        Sighting("b", "c", t + 5.0, t + 0.01) for t in range(50)
    ]
    alone, helped = align(["a", "b"], direct).fits["b"], align(["a", "b", "c"], direct + around).fits["b"]
    reference = align(["a", "b", "c"], direct + around).reference
    assert alone.error_s > 0.4
    assert helped.error_s < 0.05 or reference == "b"


def test_a_clock_that_was_set_is_told_and_its_times_are_left_out() -> None:
    found = synthesize(Scene(hosts=("a", "b", "c"), rounds=60, seed=5))

    def jump(record: Record) -> Record:
        if isinstance(record, Communicator) or record.rank != 1:
            return record
        told = json.loads(to_line(record))
        for name in ("posted_s", "started_s", "done_s", "at_s"):
            if told.get(name) is not None and told.get("operation", told.get("round", told.get("step", 0))) >= 30:
                told[name] += 3600.0
        return parse_line(json.dumps(told).encode())

    findings = diagnose(from_records(map(jump, found)))
    assert [(finding.kind, finding.where) for finding in findings] == [("clock", "host b")]
