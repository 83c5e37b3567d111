"""The heat map of work: who computes ever slower stands out, whatever the records hold."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rehearsed_run import write_records
from tests.synthetic_jobs import InjectedFault, Scene, synthesize
from thinwire.monitor.dashboard.snapshot import snapshot
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Place
from thinwire.monitor.heat import HeatMap, heat_maps, summary_sentence, to_page
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Record, Span
from thinwire.runlog.run_folder import read_files


def spans(times_s: dict[int, list[float]], kind: str = "compute") -> list[Span]:
    return [
        Span(rank=rank, kind=kind, step=step, started_s=float(step), done_s=step + time_s)
        for rank, own in times_s.items()
        for step, time_s in enumerate(own)
    ]


def maps_of(records: list[Span], **limits: int) -> list[HeatMap]:
    return heat_maps(build(from_records(records)), **limits)


def test_without_records_there_is_no_map() -> None:
    assert heat_maps(build(from_records([]))) == []


def test_a_rank_that_computes_ever_slower_is_a_row_that_grows_hot(tmp_path: Path) -> None:
    fault = InjectedFault(kind="growing work", place=Place(kind="rank", ranks=(1,)), begin=8, severity=6.0)
    folder = write_records(tmp_path / "run", fault, rounds=64)
    (one,) = heat_maps(build(read_files([folder])))
    row = [ratio for ratio in one.times_longer[1] if ratio is not None]
    assert len(row) == len(one.windows) == 16 and row[-1] > row[8] > 1.2 * row[0]
    assert all(ratio is not None and ratio < 1.25 for rank in (0, 2) for ratio in one.times_longer[rank])
    assert one.hottest is not None and one.hottest[0] == 1 and "Rank 1 stands out most" in summary_sentence(one)
    assert snapshot(folder)["heat"][0]["rows"][1]["times_longer"][-1] > 2


@pytest.mark.parametrize("num_steps", [1, 15, 16, 17, 31])
def test_each_step_is_in_one_window(num_steps: int) -> None:
    (one,) = maps_of(spans({0: [0.25] * num_steps, 1: [0.5] * num_steps}))
    assert [step for first, last in one.windows for step in range(first, last + 1)] == list(range(num_steps))
    assert len(one.windows) <= 16
    # of two ranks the faster one is the measure
    assert set(one.times_longer[0]) == {1.0} and set(one.times_longer[1]) == {2.0}


def test_forward_and_backward_are_maps_of_their_own_and_whole_steps_are_none() -> None:
    found = maps_of([
        *spans({0: [0.1], 1: [0.1], 2: [0.1]}, "forward"), *spans({0: [0.2], 1: [0.2], 2: [0.8]}, "backward"),
        *spans({0: [0.9], 1: [0.9], 2: [0.9]}, "step"),
    ])  # fmt: skip
    assert [one.kind for one in found] == ["forward", "backward"]
    assert found[1].times_longer[2] == (pytest.approx(4.0),) and found[0].times_longer[2] == (pytest.approx(1.0),)


def timed(records: list[Record], draw: random.Random) -> list[Record]:
    """Return records whose spans tell of their passes, and of one rank's wildly."""
    return [
        replace(one, forward_s=draw.choice((0.0, 0.01, 9.0)), backward_s=draw.random() * (1 + 50 * (one.rank == 2)))
        if isinstance(one, Span)
        else one
        for one in records
    ]


def test_passes_that_a_span_tells_of_are_maps_after_that_of_the_whole_work() -> None:
    records = [
        Span(rank=rank, kind="compute", step=step, started_s=float(step), done_s=step + 0.5,
             forward_s=0.1, backward_s=0.3 if rank == 1 else 0.15)
        for rank in range(3) for step in range(4)
    ]  # fmt: skip
    found = maps_of(records)
    assert [one.kind for one in found] == ["compute", "forward", "backward"]
    assert [one.times_longer[1][0] for one in found] == [1.0, 1.0, pytest.approx(2.0)]
    assert maps_of([replace(one, forward_s=None) for one in records])[1].kind == "backward"


@pytest.mark.parametrize(
    "fault",
    [
        InjectedFault(kind="slow work", place=Place(kind="rank", ranks=(1,)), begin=20, severity=4.0),
        InjectedFault(kind="stalls", place=Place(kind="rank", ranks=(0,)), begin=8, severity=8.0, period=5),
        InjectedFault(kind="growing work", place=Place(kind="rank", ranks=(2,)), begin=8, severity=6.0),
        InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=20, severity=5.0),
        InjectedFault(kind="killed", place=Place(kind="rank", ranks=(1,)), begin=30),
        None,
    ],
    ids=lambda fault: fault.kind if fault else "no fault",
)
def test_what_passes_take_changes_no_finding(fault: InjectedFault | None) -> None:
    records = synthesize(Scene(hosts=("a", "b", "c"), rounds=64, seed=3, faults=(fault,) if fault else ()))
    told = diagnose(from_records(records))
    assert bool(told) == bool(fault)
    # also where they come as spans of their own, of whatever wrote them
    apart = [
        Span(rank=one.rank, kind=kind, step=one.step, started_s=one.started_s, done_s=one.done_s)
        for one in records if isinstance(one, Span) for kind in ("forward", "backward")
    ]  # fmt: skip
    for more in (timed(records, random.Random(1)), [*records, *apart]):
        assert [one.to_json() for one in diagnose(from_records(more))] == [one.to_json() for one in told]


def test_of_many_ranks_those_that_stand_out_are_shown() -> None:
    (one,) = maps_of(spans({rank: [0.3 if rank == 77 else 0.1] for rank in range(100)}), most_ranks=4)
    assert len(one.times_s) == 4 and 77 in one.times_s and one.num_left_out == 96


def test_a_rank_without_times_in_a_window_has_none_there() -> None:
    (one,) = maps_of(spans({0: [0.1, 0.1], 1: [0.1]}))
    assert one.times_s[1][1] is None and one.times_longer[1][1] is None and "none" in to_page([one])


def test_a_kind_that_is_markup_stays_text_and_many_kinds_are_bounded() -> None:
    found = maps_of([one for number in range(40) for one in spans({0: [0.1]}, f"<script>{number}")])
    assert len(found) == 8 and "<script>" not in to_page(found)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="most_ranks=0"):
        maps_of([], most_ranks=0)
