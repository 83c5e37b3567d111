"""`thinwire generate`, `eval` and `export` as a user types them."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from tests.trained_runs import train
from thinwire.cli.main import main
from thinwire.cli.model_commands import _origin as origin_of
from thinwire.cli.tables import sample_lines
from thinwire.inference import evaluate, load_trained

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run")).run_dir


def test_generate_prints_the_text_on_stdout_and_where_it_is_from_on_stderr(run: Path, capsys: Output) -> None:
    words = ["generate", str(run), "--prompt", "12 replicas", "--max-tokens", "40", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert first.out.startswith("12 replicas") and len(first.out) > len("12 replicas\n")
    assert f"global parameters of {run}, the result, after step 7" in first.err
    assert main(words) == 0
    assert capsys.readouterr().out == first.out
    assert main([*words, "--seed", "4", "--step", "4"]) == 0
    other = capsys.readouterr()
    assert other.out != first.out and "a checkpoint, after step 4" in other.err


def test_a_replica_s_own_parameters_are_not_called_global(run: Path) -> None:
    own = dataclasses.replace(load_trained(run, step=4), replica=1)
    assert origin_of(own) == f"replica 1's own parameters of {run}, a checkpoint, after step 4"


def test_eval_prints_the_three_numbers_of_the_model_as_lines_and_as_json(
    run: Path, tmp_path: Path, capsys: Output
) -> None:
    text = "12 replicas say little.\n" * 60
    (tmp_path / "text.txt").write_text(text)
    words = ["eval", str(run), "--data", str(tmp_path / "text.txt")]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    expected = evaluate(load_trained(run), [text])
    assert values["loss"] == pytest.approx(expected.loss) and values["tokens"] == expected.num_tokens
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert values["bits_per_byte"] == pytest.approx(values["loss"] * values["tokens"] / math.log(2) / len(text))
    assert (values["bytes"], values["step"]) == (len(text), 7)
    assert main([*words, "--max-bytes", "500"]) == 0
    loss, perplexity, bits, read, model = capsys.readouterr().out.splitlines()
    assert loss.startswith("loss ") and loss.endswith(" nats per token")
    assert perplexity.startswith("perplexity ") and bits.startswith("bits per byte ")
    assert ": the first 500 B, " in read and "the result, after step 7" in model


def test_export_writes_a_folder_and_reports_its_size(run: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")]) == 2
    assert "--out is not empty; got " in capsys.readouterr().err


CASES = [
    (["generate", "nowhere", "--prompt", "x"], 1, "nowhere holds no run (no config.json); give the --out folder"),
    (["generate", "nowhere", "--prompt", ""], 2, "--prompt is empty; got ''; allowed one character or more"),
    (
        ["generate", "nowhere", "--prompt", "x", "--max-tokens", "0"],
        2,
        "--max-tokens is too small; got 0; allowed 1 or more",
    ),
    (["generate", "nowhere", "--prompt", "x", "--temperature", "-1"], 2, "--temperature is too small; got -1"),
    (["generate", "nowhere", "--prompt", "x", "--temperature", "nan"], 2, "--temperature is not finite; got nan"),
    (["generate", "nowhere", "--prompt", "x", "--top-k", "-1"], 2, "--top-k is too small; got -1; allowed 0 or more"),
    (["generate", "nowhere", "--prompt", "x", "--device", "tpu"], 2, "unknown --device; got 'tpu'; allowed cpu, cuda"),
    (["generate", "nowhere", "--prompt", "x", "--step", "0"], 2, "--step is too small; got 0; allowed 1 or more"),
    (["export", "nowhere", "--to", "gguf", "--out", "x"], 2, "unknown --to; got 'gguf'; allowed hf, safetensors"),
    (["eval", "nowhere", "--max-bytes", "many"], 2, "the size cannot be read; got 'many'"),
    (["eval", "nowhere", "--batch-size", "0"], 2, "--batch-size is too small; got 0; allowed 1 or more"),
]


def test_wrong_command_lines_are_refused_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import json, sys\nfrom thinwire.cli.main import main\n"
        "for words in json.loads(sys.argv[1]): print(main(words))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([words for words, _, _ in CASES])],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [code for _, code, _ in CASES]
    for line, (words, _, reason) in zip(done.stderr.splitlines(), CASES, strict=True):
        assert line.startswith(f"thinwire {words[0]}: error: ") and reason in line
    assert list(tmp_path.iterdir()) == []


def test_what_the_run_lacks_is_refused_with_a_remedy(run: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 1
    assert "has no checkpoint yet: the first comes after step 4" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "x", "--step", "5"]) == 1
    assert "has no checkpoint of step 5; take one of its checkpoints: 4, 7" in capsys.readouterr().err
    assert main(["eval", str(run), "--data", "nothing.txt"]) == 1
    assert "--data names no file or folder; got 'nothing.txt'" in capsys.readouterr().err


def test_a_run_ends_with_a_sample_in_two_short_lines(run: Path, tmp_path: Path) -> None:
    before, after = sample_lines(run)
    assert before.startswith("sample before training  ") and after.startswith("sample after training   ")
    prompt = json.loads((run / "samples.json").read_text())[0]["prompt"]
    assert (
        before[24:].startswith(f"{prompt} | ") and after[24:].startswith(f"{prompt} | ") and before[24:] != after[24:]
    )
    assert sample_lines(tmp_path) == []
    for text in ("{", "[]", '[{"prompt": 3}]', "{}", "3"):
        (tmp_path / "samples.json").write_text(text)
        assert sample_lines(tmp_path) == []
    (tmp_path / "samples.json").write_text(json.dumps([{"prompt": "a\n b", "before": "\n" * 9, "after": "c" * 99}]))
    assert [line[24:] for line in sample_lines(tmp_path)] == ["a b |", f"a b | {'c' * 67}..."]
