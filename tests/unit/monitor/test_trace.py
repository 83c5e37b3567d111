"""A job as a trace: what viewers ask of the format, and what a reader must find in it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.synthetic_jobs import InjectedFault, Scene, synthesize
from thinwire.monitor.detect.diagnose import findings_of
from thinwire.monitor.detect.timeline import Job, build
from thinwire.monitor.findings import Place
from thinwire.monitor.trace import to_trace
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Span, TransferEnd

HOSTS = ("a", "a", "b", "c")


def job_of(*faults: InjectedFault) -> Job:
    return build(from_records(synthesize(Scene(hosts=HOSTS, rounds=40, seed=2, faults=faults))))


def slices_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("kind", ["slow link", "paused"])
def test_events_of_a_lane_lie_apart_and_arrows_lie_in_events(kind: Any) -> None:
    place = Place(kind="link", ranks=(0, 2)) if kind == "slow link" else Place(kind="rank", ranks=(2,))
    job = job_of(InjectedFault(kind=kind, place=place, begin=20, severity=5.0))
    trace = json.loads(json.dumps(to_trace(job, findings_of(job)), allow_nan=False))
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in slices_of(trace):
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for own in lanes.values():
        assert all(end <= begin + 1e-2 for (_, end), (begin, _) in pairwise(own))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == set(lanes)
    phases = "".join(event["ph"] for event in trace["traceEvents"])
    assert phases.rindex("X") < phases.index("s"), "also an event that lasts no time is there before its arrow"
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) > 0.95 * len(job.messages)
    for start in starts.values():
        end = ends[start["id"]]
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        for one in (start, end):
            assert any(low - 1e-2 <= one["ts"] <= high + 1e-2 for low, high in lanes[one["pid"], one["tid"]])
    (instant,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert instant["name"].startswith(findings_of(job)[0].kind) and instant["args"]["text"]
    if kind == "paused":
        assert any(event["name"].endswith("(not done)") for event in slices_of(trace))


def test_ranks_are_named_by_their_hosts_and_clocks_tell_their_error() -> None:
    trace = to_trace(job_of())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} on {host}" for rank, host in enumerate(HOSTS)}
    errors = trace["otherData"]["clock_error_us"]
    assert errors.keys() == {"rank 0", "rank 1", "rank 2", "rank 3"} and all(error < 1e6 for error in errors.values())
    reference = trace["otherData"]["clock"]
    assert [error for rank, error in errors.items() if HOSTS[int(rank[-1])] == reference] == [0.0] * HOSTS.count(
        reference
    )


def test_of_too_many_events_the_latest_are_kept() -> None:
    whole, short = to_trace(job_of()), to_trace(job_of(), most_events=100)
    assert len(slices_of(short)) == 100 and short["otherData"]["events_left_out"] == len(slices_of(whole)) - 100
    kept = {(e["name"], e["pid"], e["dur"]) for e in slices_of(whole)[-100:]}
    assert {(e["name"], e["pid"], e["dur"]) for e in slices_of(short)} == kept


def test_what_nobody_knows_of_clocks_and_losses_is_left_open() -> None:
    records = [
        Communicator(communicator="w", ranks=(0, 1), hosts=("a", "b")),
        Span(rank=0, kind="compute", step=0, started_s=1.0, done_s=2.0, loss=float("nan")),
        Operation(communicator="w", rank=1, sequence=0, kind="all_reduce", posted_s=100.0),
        TransferEnd(
            communicator="w", rank=1, peer=0, direction="sent", operation=0, num_bytes=7, posted_s=100.5, error="lost"
        ),
        Beat(rank=1, at_s=101.0),
    ]
    job = build(from_records(records))
    trace = json.loads(json.dumps(to_trace(job), allow_nan=False))
    assert [e["args"].get("error") for e in slices_of(trace)] == [None, None, "lost"]
    assert not [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert to_trace(build(from_records([])))["traceEvents"] == []
