"""The page of `thinwire dashboard`: what a browser and a screen reader get of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from live_processes import DEADLINE_S

from tests.rehearsed_run import finding_line, write_records
from tests.sample_runs import append, step_line, write_run
from tests.synthetic_jobs import InjectedFault
from thinwire.monitor.dashboard.server import page_parts, page_with
from thinwire.monitor.dashboard.snapshot import snapshot
from thinwire.monitor.findings import Place

NODE = shutil.which("node")
PAGE = page_with("").decode()
SLOW = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=30, severity=5.0)
NEEDS_NODE = pytest.mark.skipif(NODE is None, reason="runs the page's script: install node (Debian: nodejs)")
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks that elements are closed in their order, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")


@pytest.fixture(scope="module")
def outline() -> Outline:
    found = Outline()
    found.feed(PAGE)
    found.close()
    return found


def in_node(state: object, *, events: list[object] | None = None, values: list[str] | None = None) -> dict[str, Any]:
    script = PAGE.rpartition("<script>")[2].partition("</script>")[0]
    given = json.dumps({"script": script, "state": state, "events": events or [], "values": values or []})
    assert NODE is not None
    words = [NODE, str(Path(__file__).with_name("page_in_node.js"))]
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def told(run: Path) -> dict[str, Any]:
    return {"version": 1, "now": 1e9, "sections": {**snapshot(run), "fault": ""}}


def test_the_page_is_html_whose_elements_are_closed(outline: Outline) -> None:
    assert not outline.wrong and not outline.open
    assert PAGE.startswith("<!DOCTYPE html>") and ("html", {"lang": "en"}) in outline.seen


def test_nothing_on_the_page_comes_from_elsewhere(outline: Outline) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"'`)]*", PAGE))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody asks for
    assert not [tag for tag, attributes in outline.seen if {"src", "srcset", "action"} & set(attributes)]
    assert not {"link", "img", "iframe", "object", "form", "base"} & {tag for tag, _ in outline.seen}
    assert "@import" not in PAGE and "url(" not in PAGE


def test_what_files_hold_can_only_become_text() -> None:
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
    ):
        assert way not in PAGE
    assert not re.search(r'\son[a-z]+="', PAGE)


def test_landmarks_headings_and_live_regions_are_there(outline: Outline) -> None:
    tags = [tag for tag, _ in outline.seen]
    assert tags.count("main") == tags.count("header") == tags.count("footer") == tags.count("h1") == 1
    ids = [attributes["id"] for _, attributes in outline.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in outline.seen:
        if tag == "section":
            assert attributes["aria-labelledby"] in ids
        if attributes.get("class") == "scroll":  # who has no mouse scrolls by keys
            # a group and no region: a landmark beside each section's own would be one too many
            assert attributes["tabindex"] == "0" and attributes["role"] == "group"
            assert attributes.get("aria-label") or attributes.get("aria-labelledby") in ids
        elif "tabindex" in attributes:  # the order of the keys is that of the page
            assert (tag, attributes["tabindex"]) == ("main", "-1")
    labels = [attributes["aria-labelledby"] for tag, attributes in outline.seen if tag == "section"]
    assert len(labels) == len(set(labels))
    named = {attributes["for"] for tag, attributes in outline.seen if tag == "label"}
    assert {attributes["id"] for tag, attributes in outline.seen if tag in ("select", "input", "textarea")} == named
    assert any(attributes.get("aria-live") == "polite" for _, attributes in outline.seen)
    assert (tags.index("a"), dict(outline.seen)["a"]["href"]) == (tags.index("body") + 1, "#main")


def test_both_schemes_and_the_focus_have_a_style() -> None:
    assert "prefers-color-scheme: dark" in PAGE and ":focus-visible" in PAGE
    assert "transition" not in PAGE and "animation" not in PAGE  # so that nobody need ask for less of them
    light, dark = (
        set(re.findall(r"(--[\w-]+):", part)) for part in PAGE.split("@media (prefers-color-scheme: dark)")[:2]
    )
    assert light == {name for name in dark if name in light} and len(light) > 20


def test_all_that_scrolls_can_have_the_focus_and_nothing_that_is_empty_has_it(outline: Outline) -> None:
    for rule in re.findall(r"([^{}]+)\{[^{}]*overflow-[xy]: auto[^{}]*\}", PAGE):
        assert rule.strip() == ".scroll", rule
    within = [after for (tag, _), (_, after) in zip(outline.seen, outline.seen[1:], strict=False) if tag == "summary"]
    assert within and all(attributes.get("class") == "scroll" for attributes in within)
    assert ".scroll:empty, .chart:empty { display: none !important; }" in PAGE


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    digits = colour.lstrip("#") if len(colour) == 7 else "".join(2 * digit for digit in colour.lstrip("#"))
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_stand_out_from_what_is_behind_them(scheme: str) -> None:
    light, dark = PAGE.split("@media (prefers-color-scheme: dark)")[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", light if scheme == "light" else dark))
    pairs = [
        ("text", "paper"), ("text", "card"), ("quiet", "card"), ("quiet", "paper"), ("strong", "card"), ("bad", "card"),
        ("bad", "bad-card"), ("text", "bad-card"), ("good", "good-card"), ("good", "card"), ("text", "good-card"),
    ]  # fmt: skip
    for words, behind in pairs:
        bright, dim = sorted((luminance(colours[words]), luminance(colours[behind])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (words, behind)  # WCAG 2, level AA
    assert "opacity" not in PAGE  # which would bring words nearer to what is behind them


def test_the_policy_allows_exactly_what_stands_in_the_page() -> None:
    import base64
    import hashlib

    policy = page_parts()[2]
    for tag in ("style", "script"):
        inside = PAGE.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy


def classes(page: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [attributes for _, attributes in page["attributes"] if name in str(attributes.get("class", "")).split()]


@NEEDS_NODE
def test_the_page_shows_the_trouble_first_and_every_chart_has_words_and_a_table(tmp_path: Path) -> None:
    write_records(write_run(tmp_path / "demo", replicas=3, is_finished=False), SLOW)
    (tmp_path / "demo" / "downtime.json").write_text('{"detection_s": 1.5, "total_s": 3, "run_s": 60}')
    page = in_node(told(tmp_path / "demo"))
    assert page["source"] == "events"
    assert page["title"] == "▲ Communication slow: link 0 -> 2 · demo"
    assert page["text"]["headline-text"] == page["text"]["announcement"] == "Communication slow: link 0 -> 2"
    assert "Remedy: look at the interface" in page["text"]["headline-detail"]
    assert "Remedy: look at the interface" in page["text"]["findings"]
    assert "▲ 4." in page["text"]["matrix"] or "▲ 5." in page["text"]["matrix"]
    charts = [attributes for tag, attributes in page["attributes"] if attributes.get("role") == "img"]
    assert len(charts) == 3 and all(len(attributes["aria-label"]) > 20 for attributes in charts)
    for name in ("timeline-table", "loss-table", "speed-table", "links", "replicas", "matrix"):
        assert len(page["text"][name]) > 60, name
    drawings = [attributes for tag, attributes in page["attributes"] if tag == "svg" and "role" not in attributes]
    assert all(attributes["aria-hidden"] == "true" for attributes in drawings)
    assert not [attributes for _, attributes in page["attributes"] if "NaN" in json.dumps(attributes)]


@NEEDS_NODE
def test_the_headline_is_starting_then_healthy_and_never_a_question_mark(tmp_path: Path) -> None:
    states = [told(tmp_path)]
    write_run(tmp_path, is_finished=False)
    lines = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    for path in lines:
        path.unlink()
    states.append(told(tmp_path))
    for path, text in lines.items():
        path.write_text(text.replace('"step": 300', '"step": 299'))
    write_records(tmp_path)
    states.append(told(tmp_path))
    pages = [in_node(state) for state in states]
    assert [page["text"]["headline-mark"] for page in pages] == ["…", "…", "✓"]
    assert [page["text"]["headline-text"] for page in pages] == ["Starting", "Starting", "Healthy"]
    assert [page["title"].split(" · ")[0] for page in pages] == ["… Starting", "… Starting", "✓ Healthy"]
    assert pages[0]["text"]["headline-detail"].startswith("This folder holds no run yet.")
    assert pages[1]["text"]["headline-detail"].startswith("Waiting for 2 replicas.")
    assert "No fault found on 6 links" in pages[2]["text"]["headline-detail"]


@NEEDS_NODE
def test_only_a_cell_that_a_finding_is_about_is_coloured(tmp_path: Path) -> None:
    healthy: dict[str, Any] = {"matrix": matrix(longer=9.0), "heat": [heat_map(longer=9.0)]}
    row = {"kind": "k", "where": "w", "text": "", "remedy": "", "probe": "", "confidence": 1, "since_round": -1}
    row |= {"evidence": [], "is_over": False}

    def hot(**finding: Any) -> list[dict[str, Any]]:
        findings = {"source": "run", "findings": [{**row, "cells": [], "ranks": [], **finding}]}
        return classes(in_node({"now": 1e9, "sections": {**healthy, "findings": findings}}), "hot")

    assert classes(in_node({"now": 1e9, "sections": healthy}), "hot") == [], "times alone colour nothing"
    assert len(hot(cells=[[0, 1]], ranks=[0, 1])) == 1
    assert len(hot(cells=[[0, None]], ranks=[0])) == 1 and len(hot(cells=[[0, None], [None, 0]], ranks=[0])) == 2
    assert len(hot(ranks=[1])) == 1, "the work of rank 1"
    assert hot(cells=[[0, 1]], ranks=[0, 1], is_over=True) == [], "it is resolved"


def matrix(*, longer: float) -> dict[str, Any]:
    cells = [{"from": one, "to": 1 - one, "now_s": 1.0, "times_longer": longer, "retries": 0} for one in (0, 1)]
    return {"ranks": [0, 1], "hosts": {}, "cells": cells, "num_left_out": 0, "clock_error_s": 0, "is_of_wires": False}


def heat_map(kind: str = "compute", *, longer: float = 1.0) -> dict[str, Any]:
    rows = [{"rank": rank, "times_s": [0.1], "times_longer": [longer]} for rank in (0, 1)]
    return {"kind": kind, "windows": [[0, 9]], "rows": rows, "num_left_out": 0}


@NEEDS_NODE
def test_the_time_left_is_that_of_the_slowest_replica(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False, steps=300)
    for path in tmp_path.glob("metrics-*"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: 12 if "-0." in path.name else 10]))
    run = snapshot(tmp_path)["run"]
    assert run["time_left_s"] == pytest.approx((300 - 100) * 0.4 * 1.01, rel=1e-3)  # replica 1, at step 100
    assert "time left1:21 min" in in_node(told(tmp_path))["text"]["tiles"]
    write_run(tmp_path)
    assert "time left" not in in_node(told(tmp_path))["text"]["tiles"]


@NEEDS_NODE
def test_the_loss_is_smoothed_and_shows_its_values_below_the_pointer(tmp_path: Path) -> None:
    loss = [{"replica": 0, "points": [[10, 5.0], [20, 4.0], [30, 3.0]]}]
    curves = {"loss": loss, "speed": [], "evaluations": [[30, 3.5]]}
    move = 'byId("loss").onpointermove({ clientX: 56 + 0.6 * 532 }), byId("loss-legend").textContent'
    leave = 'byId("loss").onpointerleave(), byId("loss-legend").textContent'
    count = 'byId("loss").children[0].all().filter((one) => /raw/.test(one.attributes.class)).length'
    rough = f'byId("smoothing").value = "0", byId("smoothing").oninput(), {count}'
    page = in_node({"now": 1e9, "sections": {"curves": curves}}, values=[move, leave, rough])
    assert page["values"] == [
        "Loss step 20replica 0 4.000validation 3.500 at step 30",
        "Loss latest, step 30replica 0 3.000validation 3.500 at step 30", 0,
    ]  # fmt: skip
    assert len(classes(in_node({"now": 1e9, "sections": {"curves": curves}}), "raw")) == 1


@NEEDS_NODE
def test_the_heat_map_shows_the_time_that_was_chosen() -> None:
    maps = [heat_map("compute"), heat_map("backward")]
    choose = 'byId("heat-kind").value = "backward", byId("heat-kind").onchange(), byId("heat-note").textContent'
    page = in_node({"now": 1e9, "sections": {"heat": maps}}, values=['byId("heat-note").textContent', choose])
    assert [text.split(",")[0] for text in page["values"]] == [
        f"Time of each rank's {kind} over the median of all ranks" for kind in ("compute", "backward")
    ]
    assert page["text"]["heat-kind"] == "the whole work of a stepthe backward passes"
    assert not page["hidden"]["heat-choice"]
    # a map that is the only one needs no choice
    assert in_node({"now": 1e9, "sections": {"heat": maps[:1]}})["hidden"]["heat-choice"]


@NEEDS_NODE
def test_a_section_that_changes_is_drawn_again_with_those_that_depend_on_it(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False)
    before = told(tmp_path)
    (tmp_path / "findings.jsonl").write_text(finding_line(where="rank 1", places=[{"kind": "rank", "ranks": [1]}]))
    after = told(tmp_path)
    after["sections"] = {name: after["sections"][name] for name in ("findings", "headline")}
    assert "▲" not in in_node(before)["text"]["replicas"]
    page = in_node(before, events=[after])
    assert "1 ▲ finding" in page["text"]["replicas"] and "rank 1" in page["text"]["headline-text"]


@NEEDS_NODE
def test_what_is_empty_is_not_shown_and_the_reason_is_in_words(tmp_path: Path) -> None:
    page = in_node(told(tmp_path))
    for name in ("findings", "matrix", "timeline", "links", "speed", "heat", "downtime", "actions", "replicas"):
        assert page["hidden"][f"{name}-section"], name
    assert page["text"]["loss-note"] == "The loss appears after the first logged step."
    assert "No message has crossed a link yet." in page["text"]["absent"]
    for words in (page["text"]["absent"], page["text"]["headline-detail"], page["text"]["loss-note"]):
        assert ".json" not in words, "no name of a file"
    (tmp_path / "config.json").write_text('{"run": {"replicas": 1, "steps": 9}}')
    append(tmp_path / "metrics-replica-0.jsonl", step_line(3))
    page = in_node(told(tmp_path))
    assert "A run of one replica has no links." in page["text"]["absent"]
    assert page["text"]["headline-detail"] == "No fault found. One replica has no links to check."
    assert not page["hidden"]["speed-section"] and not page["hidden"]["replicas-section"]


@NEEDS_NODE
def test_hostile_words_are_shown_as_they_are(tmp_path: Path) -> None:
    append(tmp_path / "metrics-replica-0.jsonl", step_line(10, loss=float("nan")), step_line(20, loss=1e300))
    append(
        tmp_path / "metrics-replica-0.jsonl", {"kind": "error", "step": 3, "message": "<img src=x onerror=alert(1)>"}
    )
    (tmp_path / "findings.jsonl").write_text(finding_line(where="<script>alert(1)</script>", evidence={"__proto__": 1}))
    page = in_node(told(tmp_path))
    assert "<script>alert(1)</script>" in page["text"]["headline-text"]
    assert "<img src=x onerror=alert(1)>" in page["text"]["replicas"]
    assert "img" not in {tag for tag, _ in page["attributes"]}
    assert in_node(None)["text"].get("headline-text", "") == ""


@NEEDS_NODE
def test_numbers_are_told_in_units_that_fit() -> None:
    asked = {
        "inBytes(1_650_000)": "1.65 MB", "inBytes(12)": "12 B", "inRate(5e6)": "5.00 Mbit/s", "inBytes(null)": "–",
        "inSeconds(0.0042)": "4.2 ms", "inSeconds(3723)": "1:02:03 h", "inSeconds(75)": "1:15 min",
        "inSeconds(0)": "0 s",
        "inSeconds(12e-6)": "12 µs", "inTimes(4.68)": "4.7×", "inTimes(40)": "40×", "inPercent(0.995)": "100 %",
        "ago(0.4)": "just now", "ago(45)": "45 s ago", "ago(4700)": "78 min ago", "ago(200000)": "2 days ago",
        "moment(1e9, 1e12 + 5) === new Date(1e12).toLocaleTimeString()": True, "moment(null, 0)": "–",
        "moment(1e9, 1e12 + 864e5) === new Date(1e12).toLocaleString()": True, "moment(1e99, 0)": "an unknown time",
        "timeLeft(80.6)": "1:21 min", "timeLeft(0.2)": "any moment", "timeLeft(null)": "–",
        "smoothed([[0, 1], [1, 1], [2, null], [3, 1]], 0.9).map((one) => one[1]).join()": "1,1,,1",
        "averaged([[0, 0], [1, 3]], 0.5)[1][1]": 2, "smoothed([[0, 0], [1, 3]], 0)[1][1]": 3,
        "smoothed([[0, 0], [1, 3], [2, 0]], 0.5)[1][1]": 2,
        "nearest([[0, 1], [5, 2], [9, 3]], 6)[1]": 2,
        "ticks(0, 10, 5).join()": "0,2,4,6,8,10", "ticks(0.31, 0.32, 3).length": 3, "ticks(3, 3, 5).join()": "3",
        "pathThrough([[0, 1], [1, null], [2, 3], [3, 4]], (x) => x, (y) => y)": "M0.0 1.0h0M2.0 3.0h0L3.0 4.0",
        "extent([{ points: [[1, null], [2, 5], [3, 4]] }], 1).join()": "4,5", "extent([], 0)": None,
        "sampled([1, 2, 3, 4, 5, 6, 7], 3).join()": "1,4,7", "sampled([1, 2], 3).join()": "1,2",
        "stacked([[0, 0, 2], [1, 1, 3], [2, 2, 4]]).map((one) => one[1]).join()": "0,1,0",
        "tickWords(0.30000000000000004)": "0.3", "tickWords(25000)": "25.0 k",
    }  # fmt: skip
    assert dict(zip(asked, in_node(None, values=list(asked))["values"], strict=True)) == asked
