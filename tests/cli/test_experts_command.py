"""`thinwire experts` from branches to numbers, with tiny models that `thinwire train` has made."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.trained_runs import train
from thinwire.cli.main import main
from thinwire.inference import as_trained, evaluate, load_trained, open_experts

Output = pytest.CaptureFixture[str]


def say(capsys: Output, *words: object) -> str:
    assert main(["experts", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refuse(capsys: Output, *words: object) -> str:
    assert main(["experts", *map(str, words)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("thinwire experts: error: ")
    return error


def test_experts_are_branched_trained_added_evaluated_and_merged(tmp_path: Path, capsys: Output) -> None:
    experts, short = tmp_path / "experts", {"steps": 2, "replicas": 1, "sync_interval": 1, "samples": False}
    seed = train(tmp_path / "seed", **short).run_dir
    capsys.readouterr()
    assert "experts: seed\n" in say(capsys, "add", experts, seed, "--name", "seed")
    assert "seed 1.000" in say(capsys, "branch", experts, "--start", "seed", "--out", tmp_path / "branch")
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "text.txt").write_text("31415 926535 897932 384626 " * 400)
    digits = train(
        tmp_path / "expert", **short, init_from=tmp_path / "branch", data=str(tmp_path / "digits"), vocab_size=None,
        lr=1e-2,
    ).run_dir  # fmt: skip
    capsys.readouterr()
    found = say(capsys, "add", experts, digits, "--name", "digits", "--domain", "numbers")
    assert f"{2 * 2 * 32:,} tokens; experts: seed, digits" in found
    (tmp_path / "test.txt").write_text("2718 281828 459045 " * 60)
    (tmp_path / "dev.txt").write_text("141421 356237 309504 " * 60)

    def loss(*words: object) -> dict[str, float]:
        return json.loads(say(capsys, "eval", experts, "--data", tmp_path / "test.txt", "--json", *words))

    uniform = loss()
    trained = as_trained(opened := open_experts(experts), opened.ensemble())
    wanted = evaluate(trained, [(tmp_path / "test.txt").read_text()])
    assert uniform["loss"] == pytest.approx(wanted.loss) and uniform["tokens"] == wanted.num_tokens
    assert uniform["perplexity"] == pytest.approx(math.exp(uniform["loss"]))
    assert uniform["experts"]["digits"] > 0.9 and sum(uniform["experts"].values()) == pytest.approx(1)
    alone = evaluate(load_trained(digits), [(tmp_path / "test.txt").read_text()])
    assert abs(uniform["loss"] - alone.loss) < math.log(2) / 16, "a uniform prior costs at most log 2 a sequence"
    assert "no prior is cached" in refuse(capsys, "eval", experts, "--data", tmp_path / "test.txt", "--prior", "cached")
    cached = ("--prior", "cached", "--development", tmp_path / "dev.txt")
    assert loss(*cached)["loss"] == pytest.approx(alone.loss, abs=1e-3)
    assert loss("--prior", "cached", "--most-members", 1)["experts"] == {"digits": 1.0}
    leak = refuse(capsys, "eval", experts, "--data", tmp_path / "dev.txt", "--prior", "cached", "--max-bytes", "500")
    assert "the cached prior was computed on a text of --data" in leak
    lines = say(capsys, "eval", experts, "--data", tmp_path / "test.txt", "--prior", "average").splitlines()
    assert [line.split()[0] for line in lines] == ["loss", "perplexity", "bits", "text", "experts"]
    assert lines[-1].endswith("seed 0.500, digits 0.500; prior average")

    posterior = say(capsys, "branch", experts, "--data", tmp_path / "dev.txt", "--out", tmp_path / "next")
    assert "digits 1.000" in posterior and f"thinwire train --init-from {tmp_path / 'next'} --data" in posterior
    say(capsys, "merge", experts, "--weights", "digits=1,seed=0", "--out", tmp_path / "merged")
    merged = evaluate(load_trained(tmp_path / "merged"), [(tmp_path / "test.txt").read_text()])
    assert merged.loss == alone.loss
    twice = refuse(capsys, "merge", experts, "--weights", "digits=0.5,seed=0.5,digits=0.5", "--out", tmp_path / "x")
    assert "allowed NAME=WEIGHT,..., each name once" in twice
    assert "try digits=0.5,seed=0.5" in refuse(
        capsys, "merge", experts, "--weights", "digits=1,seed=1", "--out", tmp_path / "x"
    )


def test_wrong_command_lines_are_refused_in_one_line(tmp_path: Path, capsys: Output) -> None:
    for words, reason in (
        (["split"], "unknown experts command; got 'split'; allowed add, branch, convert, eval, merge"),
        (["add", tmp_path, "x"], "--name is missing"),
        (
            ["add", tmp_path, "nowhere", "--name", "a"],
            "(config.json and model/*.safetensors); no such folder; try ls .",
        ),
        (["eval", tmp_path, "--data", "x"], "set.json"),
        (["eval", tmp_path, "--data", "x", "--prior", "flat"], "unknown --prior; got 'flat'"),
        (["eval", tmp_path, "--data", "x", "--development", "y"], "--development is for --prior cached"),
        (["branch", tmp_path, "--out", "x"], "got neither --start nor --data; allowed one of them; try --start NAME"),
        (["merge", tmp_path, "--out", "x"], "set.json"),
        (["eval", tmp_path, "--data", "x", "--max-bytes", "1e400"], "the size cannot be read; got '1e400'"),
    ):
        assert reason in refuse(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_mixture_is_converted_to_fewer_dimensions_evaluated_and_fine_tuned(tmp_path: Path, capsys: Output) -> None:
    short = {"steps": 1, "replicas": 1, "sync_interval": 1, "samples": False, "batch_size": 1}
    run = train(tmp_path / "run", **short, model="moe-nano").run_dir
    capsys.readouterr()
    (tmp_path / "test.txt").write_text("31415 926535 897932 384626 " * 20)
    words = ["convert", run, "--data", tmp_path / "test.txt"]
    error = refuse(capsys, *words, "--rank", 48, "--out", tmp_path / "none")
    found = re.search(r"got (0\.\d+) at rank 48; allowed --least-energy 0.9 or more; try --rank (\d+)$", error.strip())
    assert found is not None and float(found[1]) < 0.9 and not (tmp_path / "none").exists()
    rank = int(found[2])
    out = say(capsys, *words, "--rank", rank, "--out", tmp_path / "low")
    assert re.search(rf"low: moe-nano-r{rank}; each layer keeps 0\.9\d\d or more of its squared weights\n", out)
    losses = re.search(r"loss ([\d.]+) before, ([\d.]+) after", out)
    assert losses is not None
    for folder, loss in zip((run, tmp_path / "low"), losses.groups(), strict=True):
        again = evaluate(load_trained(folder), [(tmp_path / "test.txt").read_text()])
        assert float(loss) == pytest.approx(again.loss, abs=1e-4)
    assert "is not empty" in refuse(capsys, *words, "--rank", rank, "--out", tmp_path / "low")
    assert "got 192; allowed 1 to 191 of 192; try --rank 96" in refuse(
        capsys, *words, "--rank", 192, "--out", tmp_path / "none"
    )
    tuned = train(tmp_path / "tuned", **short, model=f"moe-nano-r{rank}", init_from=tmp_path / "low", vocab_size=None)
    assert load_trained(tuned.run_dir).model.config.expert_dim == rank  # type: ignore[union-attr]
    dense = train(tmp_path / "dense", **short, model="nano").run_dir
    capsys.readouterr()
    assert "only mixtures of experts" in refuse(capsys, "convert", dense, "--rank", 4, "--out", tmp_path / "none")
