"""`thinwire plan` and `thinwire simulate` on the command line, and `thinwire train --plan`."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from thinwire.cli import plan as plan_command
from thinwire.cli import simulate as simulate_command
from thinwire.cli.plan_options import ClusterOptions, PlanOptions
from thinwire.cli.simulate import SimulateOptions
from thinwire.cli.train_options import parse, settle
from thinwire.cli.train_plan import planned
from thinwire.training.build import check_memory, make_method
from thinwire.training.config import validate
from thinwire.units import parse_bytes
from thinwire.workloads.language import build_model

ALIKE = ["--hosts", "2", "--rate", "20mbit", "--latency", "10ms"]
HOME = [*ALIKE, "--flops", "4e10", "--batch-size", "8", "--tokens", "1e7", "--interval", "10", "--interval", "30"]
HOUSE = {
    "format": "thinwire-cluster",
    "version": 1,
    "replicas": [
        {"name": "attic", "flops_per_s": 2e13, "memory_bytes": "24 GB", "up_bits_per_s": "20mbit",
         "down_bits_per_s": "100mbit"},
        {"name": "office", "flops_per_s": 2e13, "up_bits_per_s": "1gbit", "down_bits_per_s": "1gbit"},
        {"name": "[red]shed", "flops_per_s": 2e13, "memory_bytes": 1e9, "up_bits_per_s": 1e7, "down_bits_per_s": 1e7},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "command"), [(PlanOptions, "plan"), (SimulateOptions, "simulate")])
def test_the_options_are_those_that_were_agreed_on(kind: type[ClusterOptions], command: str) -> None:
    options = sorted("--" + field.name.replace("_", "-") for field in dataclasses.fields(kind))
    frozen = Path(__file__).with_name(f"options_of_{command}.txt").read_text().splitlines()
    assert options == frozen, f"an option is a promise: change tests/cli/options_of_{command}.txt and CHANGELOG.md too"


def test_a_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert plan_command.main([*HOME, "--out", str(out), "--figure", str(figure)]) == 0
    told = capsys.readouterr()
    assert "best: " in told.out and "host-0 alone takes" in told.out
    assert "what it takes to compute 95%" in told.out
    assert f"thinwire train --plan {out}" in told.err
    assert json.loads(out.read_text())["train"]["model"] == "nano"
    assert ET.fromstring(figure.read_text()).tag.endswith("svg")


def test_a_plan_through_a_store_prices_both_ways_to_exchange(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*HOME, "--method", "diloco", "--min-replicas", "2", "--out", str(tmp_path / "plan.json")]
    assert plan_command.main([*words, "--via", "s3://bucket/run"]) == 0
    text = capsys.readouterr().out
    rounds = float(re.search(r"through S3: ([\d,.]+) rounds an hour", text)[1].replace(",", ""))
    for way, puts, reads in (("all-gather", 2, 2), ("two-phase", 4, 4)):
        found = re.search(rf"{way}: ([\d,]+) PUT, ([\d,]+) GET .*; ([\d.]+) USD an hour, ([\d.]+) USD a day", text)
        hourly = [float(one.replace(",", "")) for one in found.groups()]
        assert hourly[:2] == pytest.approx([puts * rounds, reads * rounds], rel=1e-3)
        assert hourly[3] == pytest.approx(24 * hourly[2], rel=1e-3)
    assert re.search(r"^chosen: all-gather, the cheaper one$", text, re.M)
    for more in (["--via", "ftp://x"], ["--via", "s3://bucket/run", "--explain"]):
        assert plan_command.main([*words, *more]) == 2
        assert "--via" in capsys.readouterr().err


def test_the_arithmetic_multiplies_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main([*HOME, "--explain", "--out", str(tmp_path / "p.json")]) == 0
    text = capsys.readouterr().out
    computing = re.search(r"6 x ([\d.]+) M parameters x ([\d,]+) tokens / ([\d.e+]+) FLOP/s .* = ([\d.]+) ms", text)
    assert computing is not None
    parameters, tokens, flops, milliseconds = (float(part.replace(",", "")) for part in computing.groups())
    assert 6 * parameters * 1e6 * tokens / flops == pytest.approx(milliseconds / 1e3, rel=0.005)
    steps = re.search(r"/ \((\d+) replicas x (\d+) sequences x (\d+) tokens\) = ([\d,]+)", text)
    assert steps is not None
    replicas, sequences, length, count = (int(part.replace(",", "")) for part in steps.groups())
    assert count == -(-10_000_000 // (replicas * sequences * length))


def test_a_cluster_file_names_the_machines_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(HOUSE))
    words = ["--cluster", str(path), "--model", "150m", "--tokens", "1e9", "--batch-size", "4", "--json"]
    assert plan_command.main([*words, "--interval", "100", "--out", str(tmp_path / "p.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["hosts"]) <= {"attic", "office"}
    assert found["left_out"][0]["what"] == "[red]shed" and "has 1.00 GB" in found["left_out"][0]["reason"]


def test_a_plan_that_keeps_too_few_busy_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = ["--hosts", "2", "--rate", "100kbit", "--flops", "4e10", "--tokens", "1e7", "--min-replicas", "2"]
    assert plan_command.main([*words, "--min-utilisation", "0.95", "--interval", "10", "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert "no plan computes 95% of the time" in told.err and len(told.err.splitlines()) == 1
    assert "nearest: " in told.out and "times as fast" in told.out
    assert not out.exists()


def test_the_example_of_the_readme_runs_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    lines = re.findall(r"^thinwire plan (--hosts .*)$", readme.replace("\\\n", " "), flags=re.MULTILINE)
    assert lines, "README.md has no example of thinwire plan"
    out = tmp_path / "plan.json"
    for line in lines:
        assert plan_command.main([*shlex.split(line), "--out", str(out)]) == 0
        told = capsys.readouterr()
        for quoted in re.findall(r"^(?:best|memory): .*$|^host-0 alone .*$", readme, flags=re.MULTILINE):
            assert quoted in told.out
        assert "best: iso-loco" in told.out and f"thinwire train --plan {out}" in told.err
        assert re.search(r"memory: a replica needs about [\d.]+ GB of [\d.]+ GB", told.out) is not None
        train = json.loads(out.read_text())["train"]
        words = ["--plan", str(out), "--data", "text.txt"]
        found, _ = planned(parse(words), words, say=lambda text: None)
        config = settle(found, words)
        model = build_model(train["model"], max_seq_len=train["seq_len"], device="meta")
        # on the machine of the example, whatever this one has
        check_memory(config, model, make_method(config), num_local=1, limit_bytes=24e9)


def test_a_size_is_planned_for_train_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ALIKE, "--flops", "4e13", "--model", "125m", "--tokens", "1e9", "--interval", "100"]
    assert plan_command.main([*words, "--out", str(tmp_path / "p.json")]) == 0
    assert f"thinwire train --plan {tmp_path / 'p.json'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ([], r"24\.0 GB \(assumed; state it with --memory\)"),
        (["--memory", "80GB"], r"80\.0 GB \(--memory\)"),
    ],
)
def test_memory_is_checked_and_the_output_says_whose_number_it_is(
    words: list[str], known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command.main([*HOME, *words, "--out", str(tmp_path / "p.json")]) == 0
    assert re.search(rf"^memory: a replica needs about [\d.]+ MB of {known}$", capsys.readouterr().out, re.MULTILINE)


def test_machines_of_a_file_without_a_memory_are_named_with_the_one_that_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(HOUSE))
    words = ["--cluster", str(path), "--tokens", "1e7", "--interval", "100", "--out", str(tmp_path / "p.json")]
    assert plan_command.main(words) == 0
    assert f"(assumed for office; add memory_bytes to {path})" in capsys.readouterr().out


def test_a_model_that_fits_no_machine_of_the_usual_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main([*ALIKE, "--flops", "4e13", "--model", "7b", "--tokens", "25e9"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"host-0: needs about 1\d\d GB of memory, has 24\.0 GB; state what the machines have", told)


def test_a_batch_that_does_not_fit_is_planned_in_micro_batches_that_train_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = [*HOME, "--memory", "150MB", "--batch-size", "16", "--min-replicas", "2", "--out", str(out)]
    assert plan_command.main(words) == 0
    train = json.loads(out.read_text())["train"]
    assert train["batch_size"] == 16 and 1 <= train["micro_batch"] < 16
    assert f"{train['micro_batch']} of 16 sequences at a time" in capsys.readouterr().out
    words = ["--plan", str(out)]
    found, _ = planned(parse(words), words, say=lambda text: None)
    assert found.data.micro_batch == train["micro_batch"]


def test_methods_without_a_published_loss_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*HOME, "--method", "noloco", "--method", "diloco", "--out", str(tmp_path / "p.json")]
    assert plan_command.main(words) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    rows = [line for line in table if line.startswith(("noloco", "diloco", "host-0"))]
    assert len(rows) >= 3 and rows[-1].startswith("noloco") and "unknown" in rows[-1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--cluster FILE"),
        (["--hosts", "2", "--rate", "1mbit"], "--flops"),
        ([*HOME, "--cluster", "c.json"], "leave --hosts"),
        ([*HOME, "--rate", "fast"], "5mbit"),
        ([*HOME, "--hosts", "0"], "--hosts is too small"),
        ([*HOME, "--flops", "-1"], "--flops is not above 0"),
        ([*HOME, "--batch-size", "4", "--global-batch", "1e4"], "--batch-size does not go with --global-batch"),
        ([*HOME, "--batch-size", "0"], "--batch-size is too small; got 0"),
        ([*HOME, "--tokens", "0"], "--tokens is too small; got 0"),
        ([*HOME, "--method", "dilco"], "try diloco"),
        ([*HOME, "--interval", "0"], "--interval is too small; got 0"),
        ([*HOME, "--min-utilisation", "1.5"], "--min-utilisation is no share"),
        ([*HOME, "--model", "7q"], "a size such as 125m"),
        ([*HOME, "--memory", "1 MB"], "no machine has the memory"),
        ([*HOME, "--min-replicas", "3"], "nothing is left to run: min_replicas is 3, and there are 2 machines"),
        ([*HOME, "--seq-len", "0"], "--seq-len is too small; got 0"),
        ([*HOME, "--tokens", "nan"], "--tokens is not finite"),
        ([*HOME, "--flops", "inf"], "--flops is not above 0"),
        ([*HOME, "--model", "9" * 400 + "b"], "a size such as 125m"),
        ([*HOME, "--codec", "e3m1"], "try e3m0"),
        ([*HOME, "--figur", "x"], "try --figure"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and named in told.err and len(told.err.splitlines()) == 1


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(["--cluster", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    assert plan_command.main([*HOME, "--out", str(tmp_path / "no" / "plan.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_simulation_compares_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_command.main([*ALIKE, "--step-time", "400ms", "--steps", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "all-reduce", "diloco", "streaming-diloco"]


def test_a_program_gets_one_object_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ALIKE, "--step-time", "400ms", "--steps", "60", "--method", "diloco", "--sync-interval", "10", "--json"]
    assert simulate_command.main([*words, "--slow", "1=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "diloco" and found["last_step"] == [60, 60]
    # six rounds of 3,050,496 float32 each way at 20 Mbit/s, and replica 1 takes 0.8 s a step. Of the four
    # trips of a message, one says that there is room for it, and one asks for what is behind its opening.
    round_s = 8 * (4 * 3_050_496 + 56) / 20e6 + 4 * 0.01
    assert found["total_s"] == pytest.approx(60 * 0.8 + 6 * round_s, rel=1e-3)
    assert found["stall_s"][0] == pytest.approx(found["stall_s"][1] + 60 * 0.4, rel=1e-3)


def test_a_replica_that_dies_for_good_is_gone_on_without(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--hosts",
        "3",
        *ALIKE[2:],
        "--step-time",
        "100ms",
        "--steps",
        "60",
        "--method",
        "streaming-diloco",
        "--json",
    ]
    assert simulate_command.main([*words, "--outage", "2=1s", "--detection", "2s", "--sync-interval", "10"]) == 0
    assert json.loads(capsys.readouterr().out)["last_step"][:2] == [60, 60]


def test_a_simulation_refuses_a_model_that_a_machine_has_no_memory_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ALIKE, "--step-time", "1s", "--steps", "2", "--method", "diloco"]
    assert simulate_command.main([*words, "--model", "7b", "--memory", "24GB"]) == 2
    refused = capsys.readouterr()
    assert re.search(
        r"--model 7b does not fit the memory of host-0; got about 1\d\d GB.*; allowed 24\.0 GB", refused.err
    )
    assert refused.out == ""
    assert simulate_command.main([*words, "--memory", "24GB"]) == 0
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(HOUSE))
    words = ["--cluster", str(path), *words[len(ALIKE) :]]
    assert simulate_command.main(words) == 0
    assert simulate_command.main([*words, "--model", "150m"]) == 2
    assert "does not fit the memory of [red]shed; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--hosts", "1", "--rate", "1mbit", "--step-time", "1s"], "allowed 2 or more machines"),
        ([*ALIKE, "--step-time", "4"], "try 4s"),
        ([*ALIKE], "--flops"),
        ([*ALIKE, "--step-time", "1s", "--slow", "2=1.5"], "--slow names no replica; got 2"),
        ([*ALIKE, "--step-time", "1s", "--slow", "1:1.5"], "2=1.5"),
        ([*ALIKE, "--step-time", "1s", "--slow", "1=fast"], "factor"),
        ([*ALIKE, "--step-time", "1s", "--slow", "1=0"], "above 0"),
        ([*ALIKE, "--step-time", "1s", "--outage", "1=9"], "try 9s"),
        ([*ALIKE, "--step-time", "1s", "--method", "dgc", "--codec", "e3m0"], "does not go with --method dgc"),
        ([*ALIKE, "--step-time", "1s", "--method", "nothing"], "unknown method"),
        ([*ALIKE, "--step-time", "1s", "--steps", "0"], "--steps is too small"),
        ([*ALIKE, "--step-time", "1s", "--jitter", "-1"], "--jitter is too small"),
        ([*ALIKE, "--step-time", "1s", "--batch-size", "0"], "--batch-size is too small; got 0"),
        ([*ALIKE, "--step-time", "1s", "--seq-len", "0"], "--seq-len is too small; got 0"),
        ([*ALIKE, "--step-time", "1s", "--outage", "1=5s-3s"], "times from 0 on that grow"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate_command.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and named in told.err and len(told.err.splitlines()) == 1


def test_a_narrow_terminal_breaks_no_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert plan_command.main([*HOME, "--out", str(tmp_path / "p.json")]) == 0
    assert "iso-loco  " in capsys.readouterr().out


def test_a_simulation_that_nobody_survives_says_where_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ALIKE, "--step-time", "100ms", "--steps", "60", "--method", "all-reduce", "--json"]
    assert simulate_command.main([*words, "--outage", "0=1s", "--outage", "1=1s"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert max(found["last_step"]) < 60
    assert f"no replica was left after step {max(found['last_step'])} of 60" in told.err
    assert found["step_s"] == pytest.approx(found["total_s"] / max(1, *found["last_step"]))
    assert found["steady_step_s"] is None


def test_where_no_loss_is_published_the_figure_is_drawn_without_points(tmp_path: Path) -> None:
    figure = tmp_path / "plan.svg"
    words = [*HOME, "--method", "noloco", "--min-replicas", "2", "--out", str(tmp_path / "p.json")]
    assert plan_command.main([*words, "--figure", str(figure)]) == 0
    assert ET.fromstring(figure.read_text()).tag.endswith("svg")


def test_every_line_of_the_arithmetic_multiplies_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*HOME, "--method", "iso-loco", "--min-replicas", "2", "--explain", "--json"]
    assert plan_command.main([*words[:-2], "--json", "--out", str(tmp_path / "p.json")]) == 0
    best = json.loads(capsys.readouterr().out)
    assert plan_command.main([*words[:-1], "--out", str(tmp_path / "p.json")]) == 0
    text = capsys.readouterr().out
    step_s, train = best["predicted"]["step_s"], best["train"]

    assert "float64 assumed at a sixth of the FLOP/s" in text
    payload = re.search(
        r"payload: ([\d.]+ .?B) for the whole model in (\d+) fragments.*: ([\d.]+) bits a parameter", text
    )
    assert payload is not None
    bits = 8 * parse_bytes(payload.group(1)) / best["num_parameters"]
    assert float(payload.group(3)) == pytest.approx(bits, rel=0.01)

    every = re.search(r"every (\d+) steps .* (\d+) steps compute for ([\d.]+) s,", text)
    assert every is not None and int(every.group(1)) == train["sync_interval"]
    assert float(every.group(3)) == pytest.approx(train["sync_interval"] * best["predicted"]["compute_s"], rel=0.02)

    time = re.search(r"time: ([\d,]+) steps x ([\d.]+) (ms|s) = ", text)
    assert time is not None and int(time.group(1).replace(",", "")) == train["steps"]
    assert float(time.group(2)) * {"ms": 1e-3, "s": 1.0}[time.group(3)] == pytest.approx(step_s, rel=0.01)

    parts = re.search(
        r"loss against data-parallel training: (\S+)% "
        r"\(measured replicas (\S+)%, interval (\S+)%, overlap (\S+)%;",
        text,
    )
    assert parts is not None
    total, *summands = map(float, parts.groups())
    assert total == pytest.approx(sum(summands), abs=0.02)
    worth = re.search(r"takes ([\d.]+) times the compute", text)
    assert worth is not None
    assert float(worth.group(1)) == pytest.approx((1 + total / 100) ** (1 / 0.04925), rel=0.01)


def test_a_method_that_is_named_beside_a_plan_gets_none_of_the_planned_one_s_settings(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert plan_command.main([*HOME, "--method", "streaming-diloco", "--min-replicas", "2", "--out", str(out)]) == 0
    words = ["--plan", str(out), "--method", "diloco"]
    found, _ = planned(parse(words), words, say=lambda text: None)
    assert (found.sync.method, found.sync.overlap_steps, found.sync.layers_per_fragment, found.run.expected_step_s) == (
        "diloco", None, None, None,
    )  # fmt: skip
    assert found.run.steps == json.loads(out.read_text())["train"]["steps"] and found.run.replicas == 2
    validate(settle(found, words))
    words = ["--plan", str(out), "--method", "streaming_diloco"]
    same, _ = planned(parse(words), words, say=lambda text: None)
    assert same.sync.overlap_steps is not None and same.run.expected_step_s is not None


def test_train_takes_what_the_plan_says_and_words_go_before_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert plan_command.main([*HOME, "--min-replicas", "2", "--out", str(out)]) == 0
    wanted = json.loads(out.read_text())
    words, said = ["--plan", str(out), "--steps", "7"], list[str]()
    found, plan = planned(parse(words), words, say=said.append)
    assert plan is None and "'host-0', 'host-1'" in said[0]
    assert found.run.steps == 7
    assert found.sync.method == wanted["train"]["method"] and found.run.replicas == 2
    assert found.sync.sync_interval == wanted["train"]["sync_interval"]
    assert found.run.expected_step_s == wanted["predicted"]["step_s"]
    # what was not planned is not held against the plan
    words = [*words, "--codec=bfloat16"]
    other, _ = planned(parse(words), words, say=said.append)
    assert (other.sync.codec, other.sync.sync_interval, other.run.expected_step_s) == (
        "bfloat16",
        found.sync.sync_interval,
        None,
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "auto"], "thinwire lab --hosts 2"),
        (["--method", "auto", "--plan", "p.json"], "leave --method auto out"),
        (["--method", "auto", "--resume", "runs/x"], "--resume does not go with"),
        (["--plan", "p.json", "--resume", "runs/x"], "--resume does not go with"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        planned(parse(words), words, say=lambda text: None)


def test_the_steady_step_does_not_depend_on_the_length_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Streaming on a slow link: the queue of rounds is still short when the run begins."""
    words = [
        "--hosts", "2", "--rate", "2mbit", "--latency", "20ms", "--step-time", "400ms", "--sync-interval", "30",
        "--method", "streaming-diloco", "--json",
    ]  # fmt: skip
    found = []
    for steps in ("60", "120", "600"):
        assert simulate_command.main([*words, "--steps", steps]) == 0
        found.append(json.loads(capsys.readouterr().out))
    short, some, long = found
    assert short["steady_step_s"] is None
    assert some["steady_step_s"] == pytest.approx(long["steady_step_s"], rel=0.01)
    assert short["step_s"] < 0.95 * long["steady_step_s"], "the start is faster"
