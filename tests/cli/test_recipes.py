"""`thinwire recipes` and `thinwire train --config`: every recipe is planned as it says, and trains in small."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from live_processes import DEADLINE_S

from tests.pretrained_models import write_llama_with_weights, write_tokenizer
from tests.trained_runs import train_here
from thinwire.cli.main import main
from thinwire.cli.recipes import facts_of, names, path_of
from thinwire.cli.train_options import expand_config_file, parse
from thinwire.training.config import OPTIONS, TrainConfig, read_config

ROOT = Path(__file__).resolve().parents[2]
# The recipe's own method, code and overlap; a model, batch and interval for a test, and CPUs.
SMALL = (  # noqa: SIM905 - as a user types them
    "--device cpu --autocast none --steps 5 --seq-len 16 --batch-size 1 --quiet --json "
    "--sync-interval 12 --warmup-steps 0 --eval-every 0 --final-eval-batches 2 --checkpoint-every 0 --threads 1"
).split()
PLANNED = [name for name in names() if "plan" in facts_of(name)]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_plans", ROOT / "scripts" / "recipe_plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_of(path: Path, *words: str) -> TrainConfig:
    return parse(expand_config_file(["--config", str(path), *words]))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a thin wire carries little, so say little. " * 400)
    return tmp_path / "text.txt"


def test_the_list_names_every_recipe_with_its_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "ls"]) == 0
    told = capsys.readouterr().out
    for name in names():
        assert re.search(rf"^{name} +{re.escape(facts_of(name)['machines'])}", told, re.MULTILINE), name
    assert max(map(len, told.splitlines())) <= 100


def test_a_recipe_is_shown_and_copied_whole_and_a_copy_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "show", "two-home-pcs"]) == 0
    assert capsys.readouterr().out == path_of("two-home-pcs").read_text()
    assert main(["recipes", "cp", "two-home-pcs"]) == 0
    assert "thinwire train --config two-home-pcs.toml" in capsys.readouterr().err
    (tmp_path / "two-home-pcs.toml").write_text("mine")
    assert main(["recipes", "cp", "two-home-pcs"]) == 2
    refused = "the copy exists already; got two-home-pcs.toml; allowed a new file; try thinwire recipes cp two-home-pcs"
    assert refused in capsys.readouterr().err
    assert (tmp_path / "two-home-pcs.toml").read_text() == "mine"
    assert main(["recipes", "cp", "two-home-pcs", "other.toml"]) == 0
    assert (tmp_path / "other.toml").read_text() == path_of("two-home-pcs").read_text()


def test_a_recipe_that_is_a_program_is_listed_shown_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "ls"]) == 0
    assert "flower-digits" in capsys.readouterr().out
    copy = tmp_path / "mine.py"
    assert main(["recipes", "cp", "flower-digits", str(copy)]) == 0
    assert f"; python {copy}" in capsys.readouterr().err
    assert main(["recipes", "show", "flower-digits"]) == 0
    assert capsys.readouterr().out == copy.read_text() == path_of("flower-digits").read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["show", "two-home-pc"], "unknown recipe; got 'two-home-pc'; allowed cpu-demo, "),
        (["show"], "show needs a name; got nothing; allowed cpu-demo, "),
        (["list"], "unknown action; got 'list'; allowed ls, show, cp; try ls"),
        (
            ["ls", "cpu-demo"],
            "ls takes no name; got 'cpu-demo'; allowed no further argument; try thinwire recipes show cpu-demo",
        ),
        (["show", "../cpu-demo"], "unknown recipe; got '../cpu-demo'; allowed cpu-demo, "),
    ],
)
def test_a_wrong_word_is_refused_with_the_remedy(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *words]) == 2
    assert reason in (told := capsys.readouterr().err)
    assert "; try " in told


def test_a_file_of_options_is_taken_and_the_command_line_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[recipe]\nmachines = "any"\n[run]\nsteps = 70\nseed = 3\n[model]\nname = "35m"\ncompile = true\n'
        '[sync]\nmethod = "dgc"\nfinal_exchange = false\nmethod_option = ["density=0.01"]\n[optimizer]\nlr = 1e-3\n'
    )
    config = options_of(path, "--steps", "9", "--model=nano")
    assert (config.run.steps, config.run.seed, config.model.name) == (9, 3, "nano")
    assert config.model.compile and not config.sync.final_exchange
    assert (config.sync.method, config.sync.method_option, config.optimizer.lr) == ("dgc", ("density=0.01",), 1e-3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("steps = 3", "unknown section in --config own.toml; got 'steps'; allowed run, model, "),
        ("[run]\nstep = 3", "unknown option of [run] in --config own.toml; got 'step'; allowed "),
        (
            "[model]\ncompile = 1",
            "model.compile in --config own.toml is not true or false; got 1; allowed true, false; try",
        ),
        (
            "[run]\nsteps = [3]",
            "run.steps in --config own.toml has the wrong type; got [3]; allowed a text or a number; try",
        ),
        ("[run]\nsteps = true", "has the wrong type; got True; allowed a text or a number"),
        ("[run]\nsteps = 'many'", "--steps is no whole number; got 'many'"),
        ("[run]\nconfig = 'other.toml'", "unknown option of [run] in --config own.toml; got 'config'; allowed "),
        ("[run", "--config is not TOML; got own.toml: "),
        (None, "--config cannot be read; got own.toml: No such file or directory; allowed a TOML file of options; try"),
    ],
)
def test_a_wrong_file_of_options_is_refused_in_one_line(
    content: str | None, reason: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "own.toml").write_text(content)
    assert main(["train", "--config", "own.toml"]) == 2
    told = capsys.readouterr().err
    assert reason in told and len(told.splitlines()) == 1, told


@pytest.mark.parametrize("name", names())
def test_every_option_of_a_recipe_has_a_place_and_every_line_fits(name: str) -> None:
    content = tomllib.loads(path_of(name).read_text())
    config = options_of(path_of(name))
    for section, values in content.items():
        for field, value in values.items() if section != "recipe" else ():
            option = next(one for one, place in OPTIONS.items() if place == (section, field))
            assert config.option(option) == value, option
    assert {"machines", "time", "sent"} <= set(content["recipe"])
    prose = [line for line in path_of(name).read_text().splitlines() if line.startswith("#")]
    assert prose and all(len(line) <= 130 for line in prose)


@pytest.mark.parametrize("name", PLANNED)
def test_the_numbers_of_a_recipe_are_those_that_its_command_plans(name: str) -> None:
    facts = facts_of(name)
    script = _script()
    numbers = script.planned(facts["plan"])
    assert {key: facts.get(key) for key in script.figures(numbers)} == script.figures(numbers), (
        f"python scripts/recipe_plans.py {name}"
    )
    if "train" in numbers:  # what was planned is what the recipe runs
        config = options_of(path_of(name))
        planned = {key: value for key, value in numbers["train"].items() if key not in ("replicas", "exchange")}
        own = {key: config.option(key) for key in planned}
        assert own == planned


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu-demo"])  # test_demo.py runs that one
def test_a_recipe_trains_in_small(name: str, corpus: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / f"{name}.toml", tmp_path / "run"
    assert main(["recipes", "cp", name, str(copy)]) == 0
    is_elastic = options_of(copy).elastic.is_enabled
    own = ["--replicas", "2", *(["--port", "0", "--begin-with", "2"] if is_elastic else [])]
    if options_of(copy).model.lora is None:
        own += ["--model", "nano", "--tokenizer", "bytes"]
    else:  # adapters need pretrained weights with a tokenizer
        base = write_tokenizer(write_llama_with_weights(tmp_path / "base"), texts=[corpus.read_text()])
        own += ["--model", f"hf:{base}"]
    words = [*SMALL, *own, "--data", str(corpus), "--cache-dir", str(tmp_path), "--out", str(out)]
    if is_elastic:
        done = subprocess.run(
            [sys.executable, "-m", "thinwire.cli.main", "train", "--config", str(copy), *words],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["wire_bytes_sent"] > 0
    else:  # what only processes show is the same for all methods, and tested elsewhere
        train_here(options_of(copy, *words), home=tmp_path)
    assert json.loads((out / "summary.json").read_text())["steps"] == 5
    ran, recipe = read_config(out), options_of(copy)
    for option in ("method", "codec", "overlap_steps", "exchange", "layers_per_fragment", "elastic", "lora"):
        assert ran.option(option) == recipe.option(option), option
