"""The wire benchmark from the command line to its table, on real sockets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.main import main
from thinwire.errors import WorkerFailed
from thinwire.wire_benchmark.runner import BenchWire, GridCell, run_cell, summary

pytestmark = pytest.mark.multiprocess
CACHE = Path.home() / ".cache" / "thinwire"


def cell(**changed: object) -> GridCell:
    values: dict[str, object] = {
        "contender": "streaming-e3m0", "num_hosts": 2, "wire": BenchWire(rate_bits_per_s=20e6), "repeat": 0,
        "sync_interval": 3, "overlap_steps": 1, "wide_steps": 1, "warmup_steps": 3, "measured_steps": 3,
    }  # fmt: skip
    return GridCell(**(values | changed))  # type: ignore[arg-type]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire.cli.main", "bench", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_benchmark_goes_on_where_it_stopped_and_its_bytes_are_the_kernel_s(tmp_path: Path) -> None:
    words = [
        "wire", "--contender", "streaming-e3m0", "--rate", "20mbit", "--sync-interval", "3", "--overlap-steps", "1",
        "--intervals", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    first = bench(*words, "--repeats", "1")
    assert first.returncode == 0, first.stderr
    lines = (tmp_path / "wire.jsonl").read_text().splitlines()
    again = bench(*words, "--repeats", "1")
    assert again.returncode == 0 and (tmp_path / "wire.jsonl").read_text().splitlines() == lines
    assert again.stdout == first.stdout and first.stdout.count("streaming-e3m0") == 2
    wide, thin = (summary(json.loads(line)) for line in lines)
    assert (wide["wire"].rate_bits_per_s, thin["wire"].rate_bits_per_s) == (None, 20e6)
    assert wide["val_loss"] == thin["val_loss"], "the wire must not change what is computed"
    for found in (wide, thin):
        # every byte is there, and what goes beside them is small
        assert 1.0 < found["bytes_over_payload"] < 1.15
    assert thin["peak_bits_per_s"] < 20e6 * 1.1 < wide["peak_bits_per_s"]
    assert "<svg" in (tmp_path / "wire-2-hosts.svg").read_text()


def test_a_host_that_dies_ends_the_run_with_its_last_words() -> None:
    with pytest.raises(WorkerFailed, match=r"host \d ended with exit code 2: .*overlap"):
        run_cell(cell(overlap_steps=7), cache_dir=CACHE)


def test_the_options_of_bench_are_those_that_were_agreed_on() -> None:
    options = sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", bench("wire", "--help").stdout, re.MULTILINE)))
    assert options == Path(__file__).with_name("options_of_bench.txt").read_text().splitlines(), (
        "an option is a promise: change tests/lab/options_of_bench.txt and CHANGELOG.md with it"
    )


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", "--report", "--out", "/proc/nowhere"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "/proc/nowhere" in told and "--out" in told


def test_half_a_line_is_named_and_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wire.jsonl").write_text('{"cell": {"contender"')
    assert main(["bench", "wire", "--report", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "line 1 of" in told
    assert (tmp_path / "wire.jsonl").read_text() == '{"cell": {"contender"'


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("wire", "--contender", "streming"), "streaming"),
        (("wire", "--rate", "5 apples"), "5 apples"),
        (("wire", "--jitter", "5ms"), "jitter"),
        (("wire", "--repeets", "2"), "repeats"),
        (("wire", "--repeats", "0"), "the number of repeats is too small; got 0"),
        (("wire", "--hosts", "2", "--hosts", "0"), "the number of hosts is too small; got 0; allowed 2 or more"),
        (("wire", "--intervals", "0"), "the number of intervals is too small; got 0"),
        (("wire", "--sync-interval", "6", "--overlap-steps", "6"), "not below H, which is 6; got 6"),
        (("wire", "--pace", "--contender", "diloco"), "--pace does not go with diloco"),
        (("cable",), "unknown benchmark; got 'cable'; allowed wire"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "never")) if words[0] == "wire" else ()
    assert main(["bench", *words, *out]) == 2
    told = capsys.readouterr()
    assert named in told.err and len(told.err.splitlines()) == 1
    assert told.out == "" and not (tmp_path / "never").exists()
