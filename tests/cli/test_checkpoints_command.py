"""`thinwire checkpoints`: what is there, and what of it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.cli.checkpoints import main
from thinwire.elastic.global_state import GlobalState
from thinwire.runlog.run_identity import new_identity
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import TrainConfig, config_text

Output = pytest.CaptureFixture[str]


def write(place: str | Path, *steps: int, **note: Any) -> None:
    checkpoints = GlobalCheckpoints(place, keep_last=9)
    for step in steps:
        parameters = {"w": torch.full((1000,), float(step))}
        checkpoints.write(GlobalState(step=step, parameters=parameters, note={"tokens": 1000 * step, **note}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_steps_sizes_tokens_and_states_stand_in_a_table(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path / "checkpoints", 100, 250)
    assert main([str(tmp_path)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["step", "size", "samples", "seen", "replica", "run", "state"]
    assert [row[0] for row in rows] == ["100", "250"]
    assert rows[1][1] == "4.14" and rows[1][3:] == ["250", "k", "all", "-", "complete,", "not", "verified"]
    assert main([str(tmp_path / "checkpoints"), "--verify"]) == 0
    assert capsys.readouterr().out.count(" verified") == 2


def test_only_verify_finds_a_flipped_bit_and_both_find_a_cut_file(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000001" / "model.safetensors")
    assert main([str(tmp_path)]) == 0
    capsys.readouterr()
    assert main([str(tmp_path), "--verify"]) == 1
    out = capsys.readouterr().out.split("\n")
    assert "step-00000001/model.safetensors is damaged" in out[1] and out[2].rstrip().endswith("  verified")
    (tmp_path / "step-00000003" / "outer.safetensors").write_bytes(b"")
    flip(tmp_path / "step-00000002" / "checkpoint.json")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "checkpoint.json is damaged" in out[2] and "outer.safetensors is 0 bytes" in out[3]


def test_a_program_gets_one_json_object(capsys: Output) -> None:
    write("memory://listed", 7, tokens=True)
    write("memory://listed", 8)
    for words, is_verified in ((["--json"], False), (["--json", "--verify"], True)):
        assert main(["memory://listed", *words]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["place"] == "memory:///listed"
        first, second = told["checkpoints"]
        assert first["tokens"] is None
        assert second.pop("bytes") > 4000
        assert second == {
            "step": 8,
            "tokens": 8000,
            "is_verified": is_verified,
            "problem": "",
            "run": None,
            "replica": None,
        }


def test_the_run_that_wrote_a_checkpoint_stands_beside_it(tmp_path: Path, capsys: Output) -> None:
    run = new_identity(config_digest=32 * "0")
    GlobalCheckpoints(tmp_path, run=run).write(GlobalState(step=7, parameters={"w": torch.ones(9)}))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert run.run in shown and "samples seen" in shown
    for workload, samples in (("language", "tokens"), ("digits", "images"), ("nowhere:AT_ALL", "samples")):
        (tmp_path / "config.json").write_text(config_text(TrainConfig.of(workload=workload)))
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        GlobalCheckpoints(tmp_path / "checkpoints", run=run).write(GlobalState(step=7, parameters={}))
        assert main([str(tmp_path)]) == 0
        assert f"{samples} seen" in capsys.readouterr().out
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["run"] == run.run


def test_a_static_runs_checkpoints_are_listed_by_replica(tmp_path: Path, capsys: Output) -> None:
    for replica in (0, 1):
        identity = {"run": "r", "replica": replica, "num_replicas": 2, "config_digest": "d"}
        ReplicaCheckpoints(tmp_path, **identity).save({"w": torch.ones(9)}, step=30, drift_steps=0)
    assert main([str(tmp_path), "--verify"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[-3:] for row in rows] == [["0", "r", "verified"], ["1", "r", "verified"]]
    flip(tmp_path / "checkpoints" / "step-00000030" / "replica-1.safetensors")
    assert main([str(tmp_path), "--verify"]) == 1
    assert "replica-1.safetensors is damaged" in capsys.readouterr().out


def test_a_folder_without_any_says_so_and_stdout_stays_empty(tmp_path: Path, capsys: Output) -> None:
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out == "" and f"{tmp_path} holds no checkpoint" in told.err
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"place": str(tmp_path), "checkpoints": []}


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["/nowhere/at/all"], 1, "there is no folder /nowhere/at/all"),
        (["zzz://bucket"], 2, "zzz"),
        ([], 2, "PATH_OR_URL"),
        (["a", "--verfy"], 2, "try --verify"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: list[str], code: int, named: str, capsys: Output) -> None:
    assert main(words) == code
    told = capsys.readouterr()
    assert told.out == "" and named in told.err and len(told.err.splitlines()) == 1
    assert told.err.startswith("thinwire checkpoints: ")
