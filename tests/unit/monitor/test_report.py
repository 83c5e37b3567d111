"""What `report.html` says of what broke."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.rehearsed_run import finding_line
from tests.sample_runs import append, step_line, write_run
from thinwire.charts import HEIGHT, WIDTH, Axis, Chart, ChartSeries, highest, line_chart, scale, spread
from thinwire.errors import DataError
from thinwire.monitor.report.figures import loss_against_bytes, loss_against_samples, utilisation, wire_rate
from thinwire.monitor.report.report import headline, render_report, samples, trouble, write_report
from thinwire.runlog.run_folder import read_run
from thinwire.training.config import TrainConfig, command_line, read_config

REPEAT = "thinwire train --replicas 2"

Coordinates = list[tuple[float, float]]
HOSTILE = "<script>alert('1')</script>&\"\x1b[2J"


def _shapes(svg: str, tag: str, style: str = "") -> list[Coordinates]:
    found = [node for node in ElementTree.fromstring(svg).iter(tag) if style in node.get("class", "")]
    return [
        [(float(x), float(y)) for x, y in (place.split(",") for place in node.attrib["points"].split())]
        for node in found
    ]


def _words(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("text")]


def _chart(*points: tuple[float, float], x: Axis | None = None) -> str:
    series = ChartSeries(name="loss", label="loss", points=points)
    return line_chart(Chart(title="loss", x=x or Axis(label="step"), y=Axis(label="loss"), series=(series,)))


def _notes(page: ElementTree.Element) -> list[str]:
    return ["".join(node.itertext()) for node in page.iter("p") if node.get("class") == "note"]


def _page(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text().removeprefix("<!DOCTYPE html>"))


# The charts


def test_a_line_has_a_place_for_every_point_and_stands_inside_the_picture() -> None:
    (line,) = _shapes(_chart(*((float(n), 9.0 - n) for n in range(7))), "polyline", "line s0")
    assert len(line) == 7
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in itertools.pairwise(line))
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)


def test_a_linear_axis_puts_the_middle_in_the_middle_and_a_log_axis_the_geometric_mean() -> None:
    (linear,) = _shapes(_chart((0, 1), (50, 2), (100, 3)), "polyline", "line s0")
    assert linear[1][0] == pytest.approx((linear[0][0] + linear[2][0]) / 2, abs=0.1)
    log_axis = Axis(label="bytes", scale="log")
    (log,) = _shapes(_chart((1e3, 1), (1e5, 2), (1e7, 3), x=log_axis), "polyline", "line s0")
    assert log[1][0] == pytest.approx((log[0][0] + log[2][0]) / 2, abs=0.1)


def test_a_value_that_is_not_finite_breaks_the_line_and_nothing_else() -> None:
    lines = _shapes(_chart((0, 3), (1, 2), (2, math.nan), (3, 2), (4, 1), (5, math.inf)), "polyline", "line s0")
    assert [len(line) for line in lines] == [2, 2]


def test_a_log_axis_leaves_zero_out() -> None:
    (line,) = _shapes(_chart((0, 5), (10, 4), (1000, 3), x=Axis(label="bytes", scale="log")), "polyline", "line s0")
    assert len(line) == 2


def test_a_single_point_is_a_dot() -> None:
    svg = _chart((3, 4))
    assert not _shapes(svg, "polyline", "line s0")
    assert [node for node in ElementTree.fromstring(svg).iter("circle") if node.get("class") == "f0"]


@pytest.mark.parametrize("points", [(), ((1.0, math.nan),)])
def test_a_chart_without_a_point_says_so(points: tuple[tuple[float, float], ...]) -> None:
    assert _words(_chart(*points)) == ["no data"]


def test_a_long_series_is_thinned_and_keeps_both_ends() -> None:
    (line,) = _shapes(_chart(*((float(n), float(n)) for n in range(10_007))), "polyline", "line s0")
    (whole,) = _shapes(_chart((0, 0), (10_006, 10_006)), "polyline", "line s0")
    assert len(line) <= 402
    assert (line[0], line[-1]) == (whole[0], whole[-1])


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (4.1, 9.3), (0.999, 1.0), (-5, 3), (1e-9, 2e-9), (7, 7), (0, 0), (1e12, 3e12)]
)
def test_ticks_are_round_few_and_in_sight(low: float, high: float) -> None:
    fitted = scale(Axis(label="y"), [low, high], start=250, stop=20, most_ticks=6)
    assert 2 <= len(fitted.ticks) <= 9
    assert fitted.low <= low and high <= fitted.high
    assert all(19.9 <= fitted(tick) <= 250.1 for tick in fitted.ticks)


@pytest.mark.parametrize("high", [11.0, 300.0, 5_000.0, 1e5, 1e9])
def test_ticks_of_time_and_of_a_log_axis_are_in_sight(high: float) -> None:
    for kind in ("time", "log"):
        fitted = scale(Axis(label="x", scale=kind), [10.0, high], start=50, stop=400, most_ticks=5)  # type: ignore[arg-type]
        assert len(fitted.ticks) >= 1
        assert all(49.9 <= fitted(tick) <= 400.1 for tick in fitted.ticks)


@pytest.mark.parametrize("high", [7.0, 45.0, 125.0, 1_207.0, 5_000.0, 90_000.0])
def test_the_values_below_a_time_axis_are_evenly_spaced_and_do_not_overlap(high: float) -> None:
    chart = Chart(
        title="t",
        x=Axis(label="time", scale="time", write="{:.0f} seconds".format),
        y=Axis(label="y"),
        series=(ChartSeries(name="a", points=((0, 1), (high, 2))),),
    )
    texts = [node for node in ElementTree.fromstring(line_chart(chart)).iter("text") if "seconds" in (node.text or "")]
    places = [float(node.attrib["x"]) for node in texts]
    assert len(places) >= 2
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) - min(gaps) < 0.3
    assert all(gap > 6 * len(node.text or "") for gap, node in zip(gaps, texts, strict=False))


def test_labels_are_moved_apart_and_stay_in_the_picture() -> None:
    moved = spread([100.0, 100.0, 101.0, 239.0, 239.0], gap=15, low=24, high=239)
    assert all(b - a >= 15 for a, b in itertools.pairwise(sorted(moved)))
    assert max(moved) <= 239


def test_the_ends_of_eight_lines_are_labelled_without_overlap() -> None:
    series = tuple(
        ChartSeries(name=f"replica {n}", label=f"replica {n}", points=((0, 1), (9, 1)), colour=n) for n in range(8)
    )
    svg = line_chart(Chart(title="t", x=Axis(label="x"), y=Axis(label="y"), series=series))
    places = [
        float(node.attrib["y"]) for node in ElementTree.fromstring(svg).iter("text") if node.get("class") == "label"
    ]
    assert len(places) == 8
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(sorted(places)))


def test_a_peak_between_two_places_stays_in_sight() -> None:
    points = [(n / 10, 7.0 if n == 5_003 else 1.0) for n in range(10_000)]
    assert max(highest(points, low=0, high=1000, bins=240)) == 7.0


# The figures of a run


def test_the_loss_ends_at_all_tokens_of_all_replicas(tmp_path: Path) -> None:
    svg = loss_against_samples(read_run(write_run(tmp_path / "run", replicas=2, steps=300))).svg
    (validation,) = _shapes(svg, "polyline", "line main")
    assert len(validation) == 6
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in itertools.pairwise(validation))
    assert len(_shapes(svg, "polyline", "line s0")) == len(_shapes(svg, "polyline", "line s1")) == 1
    assert {"replica 0", "replica 1", "validation"} <= set(_words(svg)), "each line has its own label"
    assert "validation: 4.2 at 614 k" in svg


def test_the_loss_against_bytes_marks_what_an_all_reduce_would_send(tmp_path: Path) -> None:
    svg = loss_against_bytes(read_run(write_run(tmp_path / "run"))).svg
    assert "3.66 GB" in " ".join(_words(svg))
    (validation,) = _shapes(svg, "polyline", "line main")
    assert all(left[0] < right[0] for left, right in itertools.pairwise(validation))
    assert "validation: 4.2 at 12.4 MB" in svg


def test_an_all_reduce_run_is_not_marked_with_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", interval=3, payload_bytes=12_200_000)
    assert "marker" not in loss_against_bytes(read_run(run)).svg


@pytest.mark.parametrize("replicas", [2, 8, 33])
def test_every_replica_has_a_lane_of_its_own_for_its_rate(tmp_path: Path, replicas: int) -> None:
    svg = wire_rate(read_run(write_run(tmp_path / "run", replicas=replicas, steps=60))).svg
    lanes = _shapes(svg, "polygon")
    assert len(lanes) == replicas
    tops = [min(y for _, y in lane) for lane in lanes]
    assert tops == sorted(tops)
    for lane in lanes:
        assert all(left[0] <= right[0] for left, right in itertools.pairwise(lane))
        assert min(y for _, y in lane) < max(y for _, y in lane), "a lane must show its bursts"
    words = _words(svg)
    assert f"replica {replicas - 1}" in words
    # bars can be read: a scale from 0 to a round rate, at each lane or for all of them
    if replicas <= 5:
        assert (
            words.count("0") > replicas and sum(word.endswith("bit/s") and word[0] != "p" for word in words) == replicas
        )
        assert "sent, each replica" in words
    else:
        assert any(re.fullmatch(r"sent, each replica: a lane is \d+ [kM]bit/s high", word) for word in words)


def test_the_table_of_numbers_begins_with_what_a_run_is_for_and_is_as_wide_as_its_words(tmp_path: Path) -> None:
    page = render_report(read_run(write_run(tmp_path / "run", steps=60)), command="thinwire train")
    table = page.partition("<h2>Numbers</h2>")[2].partition("</table>")[0]
    first = re.findall(r'<th scope="row">([^<]*)</th>', table)[:3]
    assert [name.partition(" of the")[0] for name in first[:2]] == [
        "validation loss", "times fewer bytes than an all-reduce at every step"
    ]  # fmt: skip
    assert 'class="facts"' in table and ".facts{width:auto}" in page
    assert ".many tr>:first-child{position:sticky" in page  # what a row is of stays in sight on a narrow screen


def test_more_replicas_than_colours_share_one_colour_and_one_label(tmp_path: Path) -> None:
    svg = loss_against_samples(read_run(write_run(tmp_path / "run", replicas=9, steps=60))).svg
    assert len(_shapes(svg, "polyline", "line s7 faint")) == 9
    assert _words(svg).count("training") == 1


def test_a_lane_names_the_peak_of_its_replica_as_every_other_place_does(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    append(run / "metrics-replica-1.jsonl", step_line(70, time_s=28.0, peak_bits_per_s=7.7e6))
    assert {"peak 3.30 Mbit/s", "peak 7.70 Mbit/s"} <= set(_words(wire_rate(read_run(run)).svg))


def test_one_replica_sends_nothing_and_the_figures_say_so(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", replicas=1))
    assert _words(wire_rate(run).svg) == ["nothing was sent"]
    assert _words(loss_against_bytes(run).svg) == ["nothing was sent"]
    assert "sent nothing" in headline(run.finished())


def test_utilisation_stands_between_zero_and_a_hundred_percent(tmp_path: Path) -> None:
    svg = utilisation(read_run(write_run(tmp_path / "run"))).svg
    assert {"0 %", "100 %"} <= set(_words(svg))
    assert len(_shapes(svg, "polyline", "line s")) == 2


def test_losses_that_are_not_finite_are_counted_below_the_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", summary={"val_loss": math.nan})
    append(run / "metrics-replica-0.jsonl", step_line(310, loss=math.nan))
    assert "not finite at 1 of" in loss_against_samples(read_run(run)).caption
    assert "without a finite validation loss" in render_report(read_run(run), command=REPEAT)


def test_a_run_without_a_single_line_still_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replicas=2, steps=1, log_every=10)
    for number in (0, 1):
        (run / f"metrics-replica-{number}.jsonl").write_text("")
    assert "4.200" in render_report(read_run(run), command=REPEAT)


# The page


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_the_report_is_well_formed_and_loads_nothing(tmp_path: Path, replicas: int) -> None:
    path = write_report(write_run(tmp_path / "run", replicas=replicas), command=REPEAT)
    text = path.read_text()
    page = _page(path)
    assert len(list(page.iter("svg"))) == 4
    assert not re.search(r"https?://|@import|url\(|<script|<link|<img|<iframe", text)
    assert not [node for node in page.iter() if {"src", "href"} & set(node.attrib)]
    (run := path.parent).joinpath("model").mkdir()
    links = [node.get("href") for node in _page(write_report(run, command=REPEAT)).iter() if "href" in node.attrib]
    assert links == ["model/"], "the trained model is one click away"
    assert "default-src 'none'" in text


def _lead(run: Path) -> str:
    page = _page(write_report(run, command=REPEAT))
    (lead,) = [node for node in page.iter("p") if node.get("class") == "headline"]
    return "".join(lead.itertext())


def test_the_report_leads_with_the_bytes_and_with_the_loss_against_the_baseline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", final_loss=4.2)
    price = "2 replicas sent 12.4 MB each, 296 times fewer bytes than an all-reduce at every step, and reached a "
    assert _lead(run) == f"{price}validation loss of 4.200; no baseline run."
    for name, changes in (
        ("a-other-model", {"model": "35m"}), ("b-other-tokens", {"tokens": 1}), ("c-other-method", {"method": "diloco"})
    ):  # fmt: skip
        write_run(tmp_path / name, method="all-reduce", final_loss=3.0, summary=changes)
    write_run(tmp_path / "d-other-data", method="all-reduce", final_loss=3.0, config={"data": {"source": "books"}})
    write_run(tmp_path / "e-unfinished", method="all-reduce", is_finished=False)
    (tmp_path / "f-damaged").mkdir()
    (tmp_path / "f-damaged" / "summary.json").write_text("{")
    assert _lead(run).endswith("; no baseline run.")
    dense = write_run(tmp_path / "g<b>", method="all-reduce", interval=3, payload_bytes=12_200_000, final_loss=4.0)
    assert _lead(run) == f"{price}validation loss of 4.200, 5.0 % above the baseline run g<b> (4.000)."
    assert _lead(dense) == (
        "2 replicas sent 3.66 GB each, no fewer bytes than an all-reduce at every step, and reached a validation loss "
        "of 4.000; this is a baseline run."
    )


def test_texts_before_and_after_training_stand_side_by_side(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "samples.json"
    path.write_text(json.dumps([{"prompt": "import", "before": "\x1b[2J<b>", "after": " json\n"}, {"prompt": ""}]))
    text = "".join(_page(write_report(run, command=REPEAT)).itertext())
    assert "Text samples" in text and "Prompt: import" in text and "<b>" in text and " json\n" in text
    assert text.count("before training") == text.count("after training") == 2
    assert "\x1b" not in text
    for broken in ("{}", "[1]", '[{"after": "x"}]', "[" * 10_000, "x" * (1 << 19)):
        path.write_text(broken)
        assert "Not read: samples.json" in "".join(samples(run)), broken[:20]
    path.unlink()
    assert samples(run) == []


def test_the_report_tells_what_was_warned_of_and_of_many_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replicas=2)
    for replica, step in ((0, 30), (1, 20)):
        line = {"kind": "warning", "step": step, "message": f"replica {replica}: steps take 0.9 s, {HOSTILE}"}
        append(run / f"metrics-replica-{replica}.jsonl", line)
    notes = [
        "".join(node.itertext())
        for node in _page(write_report(run, command=REPEAT)).iter("p")
        if node.get("class") == "note"
    ]
    assert [note[:33] for note in notes] == ["Warning after step 20: replica 1:", "Warning after step 30: replica 0:"]
    append(
        run / "metrics-replica-0.jsonl", *({"kind": "warning", "step": 40 + n, "message": "late"} for n in range(1000))
    )
    notes = [
        "".join(node.itertext())
        for node in _page(write_report(run, command=REPEAT)).iter("p")
        if node.get("class") == "note"
    ]
    assert notes[0] == "1,002 warnings; the last 10:" and notes[-1] == "Warning after step 1,039: late"
    assert len(notes) == 11


def test_hostile_words_from_the_files_stay_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", "_"), config={"data": {"source": HOSTILE}, HOSTILE: HOSTILE})
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"method": HOSTILE, "model": HOSTILE, "machine": HOSTILE}))
    append(run / "metrics-replica-1.jsonl", {"kind": "error", "step": 3, "message": HOSTILE})
    path = write_report(run, command=REPEAT)
    page = _page(path)
    assert not list(page.iter("script"))
    assert "\x1b" not in path.read_text()
    assert "alert('1')" in "".join(page.itertext())


def test_the_command_to_do_it_again_gives_what_is_not_the_default(tmp_path: Path) -> None:
    words = command_line(read_config(write_run(tmp_path / "run")))
    assert words.startswith("thinwire train --replicas 2")
    assert "--lr 0.003" in words and "--codec e3m0" in words
    assert "--method streaming-diloco" in words and "--quiet" not in words and "version" not in words
    assert "--method" not in command_line(TrainConfig.of(method="iso-loco"))
    page = _page(write_report(tmp_path / "run", command=words))
    assert ["".join(node.itertext()) for node in page.iter("pre")] == [words], "it can be copied as it stands"
    assert "--data 'a b; rm'" in command_line(TrainConfig.of(data="a b; rm"))


def test_a_report_that_cannot_be_written_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "report.html").mkdir()
    before = sorted(run.iterdir())
    with pytest.raises(OSError, match=r"report\.html"):
        write_report(run, command=REPEAT)
    assert sorted(run.iterdir()) == before


# The folder


def test_a_half_written_last_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", is_finished=False)
    metrics = run / "metrics-replica-0.jsonl"
    whole = len(read_run(run).replicas[0].steps)
    line = json.dumps(step_line(310)) + "\n"
    with metrics.open("a") as file:
        file.write(line[:40])
    assert len(read_run(run).replicas[0].steps) == whole
    with metrics.open("a") as file:
        file.write(line[40:])
    assert len(read_run(run).replicas[0].steps) == whole + 1


def test_lines_after_a_resume_take_the_place_of_those_beyond_the_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40, is_finished=False)
    append(run / "metrics-replica-0.jsonl", step_line(30, loss=1.25), step_line(40, loss=1.5))
    steps = read_run(run).replicas[0].steps
    assert [line.step for line in steps] == [10, 20, 30, 40]
    assert [line.loss for line in steps[2:]] == [1.25, 1.5]


def test_a_warning_among_the_lines_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20)
    append(run / "metrics-replica-0.jsonl", {"kind": "warning", "step": 1, "message": "coding costs"})
    assert read_run(run).replicas[0].error == ""


@pytest.mark.parametrize(
    "line",
    [
        "garbage", "[1, 2]", '"text"', '{"kind": "surprise"}', '{"kind": "step"}', "\x00\x01", "[" * 100_000,
        json.dumps(step_line(1) | {"step": "1"}), json.dumps(step_line(1) | {"step": 1.5}),
        json.dumps(step_line(1) | {"sent_bytes": 10**400}), json.dumps(step_line(1) | {"loss": None}),
        '{"kind": "step", "step": NaN}', '{"kind": "warning", "step": 1}',
    ],
)  # fmt: skip
def test_a_whole_line_that_no_run_writes_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "run", steps=20)
    (run / "metrics-replica-1.jsonl").write_text(json.dumps(step_line(10)) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"metrics-replica-1\.jsonl:2"):
        read_run(run)


def test_a_transfer_that_goes_backwards_or_nowhere_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40)
    path = run / "transfers-replica-0.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    for change in ({"finished_s": -1e9}, {"started_s": math.nan}, {"finished_s": math.inf}, {"direction": "sideways"}):
        path.write_text(json.dumps(good | change) + "\n")
        with pytest.raises(DataError, match=r"transfers-replica-0\.jsonl:1"):
            read_run(run)


def test_a_missing_folder_and_a_folder_that_is_no_run_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no config\.json"):
        read_run(tmp_path)


def test_a_summary_that_lacks_a_field_names_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text('{"method": "diloco"}')
    with pytest.raises(DataError, match="replicas"):
        read_run(run)


def test_a_run_in_progress_can_be_read_but_has_no_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=120, is_finished=False)
    assert read_run(run).summary is None
    with pytest.raises(DataError, match=r"not finished.*last step is 120.*--resume"):
        write_report(run, command=REPEAT)
    assert not (run / "report.html").exists()


def test_a_run_without_findings_is_reported_so_and_one_without_diagnosis_is_not_called_well(tmp_path: Path) -> None:
    assert "<p>No findings.</p>" in render_report(read_run(write_run(tmp_path / "run")), command=REPEAT)
    off = write_run(tmp_path / "off", config={"run": {"on_finding": "off", "steps": 300}})
    assert "the run had no live diagnosis (--on-finding off)" in render_report(read_run(off), command=REPEAT)


def test_what_broke_what_was_done_and_what_it_cost_stand_in_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "findings.jsonl").write_text(finding_line(at=1e9) + finding_line(at=1e9 + 9, state="over"))
    action = {"at": 1e9 + 1, "action": "exclude", "target": "replica 2", "dry_run": True, "finding": 0, "result": "-"}
    (run / "actions.jsonl").write_text(json.dumps(action) + "\n")
    (run / "downtime.json").write_text(json.dumps({"detection_s": 1.5, "total_s": 2.0, "run_s": 40.0}))
    page = write_report(run, command="thinwire train").read_text()
    told = (
        "communication slow: link 0 -&gt; 2",
        "Messages take longer.",
        "times longer: 4.7",
        "97 %",
        "look at the cable",
    )
    done = "exclude (dry run: not done)", "replica 2", "2.0 s of 40.0 s, 5.0 %"
    # with the date, and the same wherever it is read
    places = (("reported at ", 40), ("over at ", 49), ("", 41))
    when = [f"{words}2001-09-09 01:46:{second} UTC" for words, second in places]
    for words in (*told, *done, *when):
        assert words in page, words


def test_a_run_that_lost_no_time_says_so_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "downtime.json").write_text(json.dumps({"detection_s": 0.0, "total_s": 0.0, "run_s": 40.0}))
    assert trouble(tmp_path)[-1] == "<p>No time was lost to faults and restarts in 40.0 s.</p>"


def test_broken_files_are_told_and_markup_in_them_stays_text(tmp_path: Path) -> None:
    (tmp_path / "findings.jsonl").write_text("{broken\n" + finding_line(text="<script>", at=1e12))
    (tmp_path / "actions.jsonl").write_text('{"at": "soon", "action": "warn"}\n')
    (tmp_path / "downtime.json").write_text('{"total_s": -1}')
    told = "".join(trouble(tmp_path))
    assert "<script>" not in told and "&lt;script&gt;" in told
    assert all(f"Not read: {name}" in told for name in ("findings.jsonl", "actions.jsonl", "downtime.json"))
