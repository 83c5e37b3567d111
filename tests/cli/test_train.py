"""Every wrong command line ends with one clear line on stderr, the right exit code, and nothing on the disk."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.main import main
from thinwire.runlog.run_identity import new_identity, read_identity, write_identity
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import OPTIONS, TrainConfig, config_text, read_config, resolve
from thinwire.training.launch import step_to_resume
from thinwire.training.run_origin import check_options, write_origin
from thinwire.version import __version__

THINWIRE = [sys.executable, "-m", "thinwire.cli.main"]
OPTIONS_FILE = Path(__file__).with_name("options.txt")
# Runs several command lines in one real process, since each start of torch takes seconds.
MANY = """
# begins with torch loaded
import contextlib, io, json, sys
from thinwire.cli.main import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def thinwire(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*THINWIRE, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def thinwire_many(lines: Sequence[Sequence[str]], *, cwd: Path, **environment: str) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps([list(words) for words in lines])],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_options_of_train_are_those_that_were_agreed_on() -> None:
    told = thinwire("train", "--help", COLUMNS="100")
    assert told.returncode == 0
    options = sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z0-9-]*)", told.stdout, re.MULTILINE)))
    frozen = OPTIONS_FILE.read_text().splitlines()
    assert options == frozen, "an option is a promise: change tests/cli/options.txt and CHANGELOG.md with it"


def test_stages_are_skipped_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")  # a run, which is not written over
    words = ["--replicas", "1", "--pp", "3", "--micro-batch", "1", "--skip", "0.33", "--out", str(tmp_path)]
    assert main(["train", *words]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("thinwire: warning: --skip is experimental: a plain model") and "error" in error


def test_every_option_has_a_help_text() -> None:
    told = thinwire("train", "--help", COLUMNS="100").stdout
    for name in OPTIONS:
        flag = ("no-" if TrainConfig().option(name) is True else "") + name.replace("_", "-")
        assert re.search(rf"^  --{flag}( [A-Z]+)?\s+\w.{{10,}}", told, re.MULTILINE), flag


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([], 2, ""),
        (["trian"], 2, "unknown command; got 'trian'; allowed demo, train, "),
        (["methods", "x"], 2, "unknown method; got 'x'"),
        (
            ["train", "--replcas", "2"],
            2,
            "unknown option; got --replcas; allowed those of thinwire train --help; try --replicas",
        ),
        (["train", "--steps", "ten"], 2, "--steps is no whole number; got 'ten'"),
        (["train", "--replicas", "two"], 2, "--replicas is no whole number; got 'two'"),
        (["train", "--lr"], 2, "--lr has no value; got nothing; allowed a number"),
        (["train", "stdlib"], 2, "an argument without an option; got 'stdlib'"),
        (["train", "--steps", "0"], 2, "--steps is too small; got 0"),
        (["train", "--resume", "nowhere"], 1, "nowhere holds no run of thinwire"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    words: list[str], code: int, reason: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    told = capsys.readouterr().err
    assert reason in told
    assert len(told.splitlines()) == (1 if reason else 0)
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_run_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01" * 50)
    (tmp_path / "short.txt").write_text("too short")
    cache = ["--cache-dir", str(tmp_path / "cache"), "--tokenizer", "bytes"]
    cases = [
        (["--method", "streming"], "try streaming-diloco"),
        (["--model", "nan"], "try nano"),
        (["--codec", "e3m1"], "try e3m0"),
        (["--overlap-steps", "30"], "--overlap-steps is not below --sync-interval, which is 30; got 30"),
        (["--overlap-steps", "1,2,3"], "names 3 replicas, but 2 take part"),
        (["--num-fragments", "9"], "num_fragments must be at most 7"),
        (["--blend", "1.5"], "--blend is out of its range; got 1.5"),
        (["--method", "diloco", "--overlap-steps", "2"], "--overlap-steps does not go with --method diloco"),
        (["--method", "dimat", "--no-final-exchange"], "--no-final-exchange does not go with --method dimat"),
        (["--method", "dimat", "--replicas", "5", "--method-option", "graph=torus"], "take Ring(), or 4 or 6 replicas"),
        (["--method", "dimat", "--method-option", "matching=weights"], "batches is None"),
        (["--vocab-size", "5"], "vocab_size must be at least 257"),
        (["--out", "run"], "run holds a run already; go on with it: thinwire train --resume run"),
        (["--data", "nowhere"], "--data names no file or folder; got 'nowhere'"),
        (["--data", "empty"], "a folder without a file of text; got 'empty'"),
        (["--data", "binary.txt"], "is binary"),
        (["--data", "short.txt"], "tokens are too few"),
        (["--replicas", "0"], "--replicas is too small"),
        (["--device", "cuda:9"], "unknown --device; got 'cuda:9'; allowed cpu, cuda"),
        (["--compile"], "--compile needs a C++ compiler; got no no-such-compiler"),
    ]
    lines = [["train", *cache, "--quiet", *words] for words, _ in cases]
    outcomes = thinwire_many(lines, cwd=tmp_path, CXX="no-such-compiler")
    for (words, reason), (code, stdout, stderr) in zip(cases, outcomes, strict=True):
        assert (code, stdout) == (2, ""), words
        assert reason in stderr, words
        assert len(stderr.splitlines()) == 1, stderr
        assert stderr.startswith("thinwire train: error: ")
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"run", "empty", "binary.txt", "short.txt", "cache"}


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """Make a run of two replicas with checkpoints of the steps 10 and 20, as one that was stopped leaves it."""
    (tmp_path / "text.txt").write_text("a thin wire carries little. " * 200)
    run = tmp_path / "run"
    given = TrainConfig.of(
        replicas=2, steps=30, data=str(tmp_path / "text.txt"), tokenizer="bytes", batch_size=1, seq_len=16, out=run,
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    config = resolve(given, world_size=None, cores=2, home=tmp_path)
    run.mkdir()
    (run / "config.json").write_text(config_text(config))
    identity_of_run = new_identity(config_digest=config.digest())
    write_identity(run, identity_of_run)
    write_origin(config)
    for replica in (0, 1):
        identity = {"run": identity_of_run.run, "replica": replica, "num_replicas": 2, "config_digest": config.digest()}
        for step in (10, 20):
            ReplicaCheckpoints(run, **identity).save({}, step=step, drift_steps=60)
    return run


def test_a_run_of_an_earlier_version_goes_on_where_a_removed_option_changed_nothing(stopped_run: Path) -> None:
    config = read_config(stopped_run)
    older = dataclasses.replace(read_identity(stopped_run), config_digest=32 * "a")  # over that option too
    write_identity(stopped_run, older)
    for name, section in (("config.json", "elastic"), ("origin.json", "options")):
        values = json.loads((stopped_run / name).read_text())
        values[section]["preserve_norm"] = False
        (stopped_run / name).write_text(json.dumps(values))
    for replica in (0, 1):
        identity = {"run": older.run, "replica": replica, "num_replicas": 2, "config_digest": older.config_digest}
        ReplicaCheckpoints(stopped_run, **identity).save({}, step=30, drift_steps=60)
    assert read_config(stopped_run) == config
    check_options(stopped_run, config)
    assert step_to_resume(config) == (30, [])


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_cannot_be_resumed_is_refused_and_left_as_it_is(stopped_run: Path) -> None:
    foreign = stopped_run.with_name("foreign")
    subprocess.run(["cp", "-r", stopped_run, foreign], check=True)
    (foreign / "config.json").write_text(config_text(read_config(foreign).replace(seed=7)))
    damaged = stopped_run.with_name("damaged")
    subprocess.run(["cp", "-r", stopped_run, damaged], check=True)
    for path in damaged.glob("checkpoints/*/replica-1.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    unreadable = stopped_run.with_name("unreadable")
    unreadable.mkdir()
    (unreadable / "config.json").write_text('{"run": {"steps": "many"}}')
    older = stopped_run.with_name("older")
    older.mkdir()
    (older / "config.json").write_text('{"model": "nano", "steps": 10, "thinwire_version": "0.0.1"}')
    cases: list[tuple[list[str], int, str]] = [
        (["--resume", str(foreign)], 1, "has other options than the run began with: seed 7 instead of 0; restore"),
        (["--resume", str(damaged)], 1, "replica-1.safetensors is damaged (its SHA-256 is wrong)"),
        (["--resume", str(unreadable)], 1, "Expected `int`, got `str` - at `$.run.steps`"),
        (["--resume", str(older)], 1, "config.json has no sections: an older thinwire wrote it"),
        (["--resume", str(stopped_run), "--steps", "40"], 2, "which goes on with its own options; got 40; allowed 30"),
        (["--resume", str(stopped_run), "--lr=0.5"], 2, "goes on with its own options; got 0.5"),
        (["--resume", str(stopped_run), "--no-final-exchange"], 2, "--final-exchange differs from the run in"),
        (["--resume", str(stopped_run), "--overwrite"], 2, "a run goes on in its own folder"),
        (["--resume", str(stopped_run), "--out", "elsewhere"], 2, "a run goes on in its own folder"),
    ]
    before = content_of(stopped_run.parent)
    outcomes = thinwire_many([["train", "--quiet", *words] for words, _, _ in cases], cwd=stopped_run.parent)
    for (words, code, reason), (ended, stdout, stderr) in zip(cases, outcomes, strict=True):
        assert (ended, stdout) == (code, ""), (words, stderr)
        assert reason in stderr, words
        assert len(stderr.splitlines()) == 1, stderr
    after = {name: data for name, data in content_of(stopped_run.parent).items() if not name.startswith("cache")}
    assert after == before


def test_a_finished_run_is_shown_again(tmp_path: Path) -> None:
    config = resolve(TrainConfig.of(out=tmp_path), world_size=None, cores=2, home=tmp_path)
    (tmp_path / "config.json").write_text(config_text(config))
    summary: dict[str, Any] = {
        "method": "diloco", "replicas": 2, "steps": 3, "tokens": 6, "val_loss": 1.5, "wall_s": 1.0, "tokens_per_s": 6.0,
        "payload_bytes": 1, "wire_bytes_sent": 2, "wire_bytes_received": 2, "peak_bits_per_s": 8.0,
        "compute_utilisation": 1.0, "global_parameters_sha256": "ab", "model": "nano", "parameters": 1,
        "sync_interval": 30, "overlap_steps": 0, "codec": "float32", "num_fragments": 1, "allreduce_bytes": 3,
        "times_fewer_bytes": 3.0, "all_reduce_dtype": "float32", "seed": 0, "machine": {},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    done = thinwire("train", "--resume", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == summary
    assert "has finished" in done.stderr


def test_version_and_help_need_no_torch() -> None:
    script = "import sys; from thinwire.cli.main import main; main(['{}']); assert 'torch' not in sys.modules"
    for words, said in (("--version", f"thinwire {__version__}"), ("--help", "usage: thinwire COMMAND")):
        done = subprocess.run(
            [sys.executable, "-c", script.format(words)], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(said)
