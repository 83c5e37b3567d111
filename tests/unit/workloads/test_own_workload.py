"""The example of docs/own-workload.md, as a user starts it, and names in a run's files that are no words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trained_runs import train_here
from thinwire.cli.main import main
from thinwire.errors import DataError
from thinwire.inference import load_trained
from thinwire.runlog.run_folder import StepMetrics, parse_metrics
from thinwire.training.config import TrainConfig

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_example_of_an_own_workload_trains_and_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    options = {"method": "diloco", "sync_interval": 10, "steps": 200, "threads": 1, "out": tmp_path / "run"}
    config = train_here(TrainConfig.of(workload="own_workload:SPIRALS", **options), home=tmp_path)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["points"] == 2 * 200 * 16 and summary["accuracy"] > 0.8
    assert (summary["model"], config.optimizer.lr) == ("spirals-mlp", 1e-2)
    assert load_trained(config.run_dir).companion.files() == {}
    assert main(["eval", str(config.run_dir)]) == 0
    assert "nats per point" in capsys.readouterr().out


STEP = {
    "kind": "step", "step": 1, "time_s": 1.0, "loss": 2.0, "compute_fraction": 1.0, "sent_bytes": 0,
    "received_bytes": 0, "sent_bits_per_s": 0.0, "peak_bits_per_s": 0.0, "rounds_in_flight": 0,
}  # fmt: skip


def test_lines_of_earlier_versions_count_tokens_and_others_what_they_name() -> None:
    old = parse_metrics({**STEP, "tokens": 64, "tokens_per_s": 8.0}, source="a")
    new = parse_metrics({**STEP, "unit": "points", "points": 64, "points_per_s": 8.0}, source="a")
    assert isinstance(old, StepMetrics) and isinstance(new, StepMetrics)
    assert (old.unit, old.samples, new.unit, new.samples, new.samples_per_s) == ("tokens", 64, "points", 64, 8.0)


@pytest.mark.parametrize(
    "names", [{"unit": "<script>"}, {"unit": 7}, {"unit": "a" * 41}, {"unit": ""}, {"metric": "a b"}, {"metric": []}]
)
def test_a_name_that_is_no_short_word_is_refused(names: dict[str, object]) -> None:
    values = {**STEP, "tokens": 64, "tokens_per_s": 8.0, **names}
    with pytest.raises(DataError, match="unit and metric must be short words"):
        parse_metrics(values, source="metrics-replica-0.jsonl:1")
