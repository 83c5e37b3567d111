"""A method in one file is known to `thinwire train` with its options, without any change elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_port

from thinwire.averaging.exchange import cheapest
from thinwire.averaging.topology import AllReplicas
from thinwire.cli.methods import main as methods_main
from thinwire.cli.train import main as train_main
from thinwire.codecs import float32
from thinwire.methods import RECIPES, About, Method, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient
from thinwire.training.config import read_config

CARD = About(paper="-", exchanged="-", bits="-", memory="1", inner_optimizer="plain-sgd", lr=0.05)


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Register the method toy-average, and yield the gains that it was made with."""
    seen: list[float] = []

    def toy_average(*, sync_interval: int = 10, gain: float = 1.0) -> Method:
        seen.append(gain)
        return Method(
            name="toy-average",
            schedule=Staggered(sync_interval=sync_interval),
            topology=AllReplicas(),
            view=PseudoGradient(fragments=Pattern(num_fragments=1)),
            exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
            update=lambda num_replicas: OuterStep(optimizer=PlainSGD(lr=gain)),
        )

    # registered under annotations that are values, as those of a module are
    toy_average.__annotations__ = {"sync_interval": int, "gain": float, "return": Method}
    register(CARD)(toy_average)
    yield seen
    del RECIPES["toy-average"]


def train(folder: Path, *words: str) -> int:
    (folder / "text.txt").write_text("a slow link carries little. " * 200)
    small = ["--data", str(folder / "text.txt"), "--tokenizer", "bytes", "--seq-len", "16", "--batch-size", "1"]
    short = ["--steps", "4", "--eval-every", "0", "--final-eval-batches", "1", "--threads", "1"]
    rest = [*short, "--quiet", "--cache-dir", str(folder / "cache"), "--out", str(folder / "run")]
    return train_main(["--method", "toy-average", *small, *rest, *words])


def test_a_new_method_trains_with_its_own_option_and_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gains: list[float]
) -> None:
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    one_rank["MASTER_PORT"] = str(free_port())
    for name, value in one_rank.items():
        monkeypatch.setenv(name, value)
    assert train(tmp_path, "--gain", "0.5", "--sync-interval", "2") == 0
    assert set(gains) == {0.5}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["method"], summary["steps"], summary["sync_interval"]) == ("toy-average", 4, 2)
    config = read_config(tmp_path / "run")
    assert config.sync.method_option == ("gain=0.5",)
    assert (config.optimizer.inner_optimizer, config.optimizer.lr) == ("plain-sgd", 0.05)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--gain", "much"], "--method-option gain is of another kind; got 'much'; allowed float"),
        (["--gain=1", "--method-option", "gain=2"], "--method-option gain is given twice"),
        (["--gian", "1"], "unknown option; got --gian; allowed those of thinwire train --help; try --gain"),
        (["--blend", "0.5"], "--blend does not go with --method toy-average"),
    ],
)
@pytest.mark.usefixtures("gains")
def test_a_wrong_option_of_a_new_method_is_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, *words) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.usefixtures("gains")
def test_the_options_of_a_new_method_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert methods_main(["toy-average"]) == 0
    assert "  --gain: float, 1.0" in capsys.readouterr().out


@pytest.mark.usefixtures("gains")
def test_a_name_is_registered_once() -> None:
    def toy_average() -> Method:
        raise AssertionError

    with pytest.raises(ValueError, match="'toy-average' is registered already"):
        register(CARD)(toy_average)
