"""The second workload: images of digits through the same loop, log, pages and commands as texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire
from tests.trained_runs import train_here
from thinwire.cli.main import main
from thinwire.cli.tables import final_table
from thinwire.cli.view import evaluation_line
from thinwire.errors import Refused
from thinwire.monitor.dashboard.snapshot import RunFollower
from thinwire.monitor.prometheus_text import metrics_text
from thinwire.monitor.report.comparison import compare_runs
from thinwire.monitor.report.report import render_report, results
from thinwire.runlog.run_folder import read_run
from thinwire.runlog.run_identity import new_identity
from thinwire.training import worker
from thinwire.training.config import TrainConfig, resolve, validate
from thinwire.training.elastic.job import ElasticJob
from thinwire.training.worker import ReplicaStart
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport
from thinwire.workloads.digits.workload import DIGIT_CLASSIFICATION, open_digits
from thinwire.workloads.workload import Leases

pytestmark = pytest.mark.slow
OWN = "thinwire.workloads.digits.workload:DIGIT_CLASSIFICATION"
Output = pytest.CaptureFixture[str]


def digits(out: Path, **options: object) -> TrainConfig:
    given = {
        "workload": "digits", "method": "dgc", "replicas": 2, "steps": 60, "eval_every": 30, "checkpoint_every": 30,
        "threads": 1, "out": out, **options,
    }  # fmt: skip
    return TrainConfig.of(**given)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("digits")
    return train_here(digits(folder / "run"), home=folder)


def test_a_run_learns_digits_and_its_log_counts_images(run: TrainConfig) -> None:
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["images"] == 2 * 60 * 32 and summary["unit"] == "images" and summary["images_per_s"] > 0
    assert (summary["metric"], summary["metric_unit"]) == ("accuracy", "%")
    assert 0.3 < summary["accuracy"] <= 1 and 0 < summary["val_loss"] < 2  # chance: 0.1, and 2.3
    assert (summary["model"], summary["data"], summary["codec"]) == ("digits-convnet", "digits", "top-k-sampled")
    assert not any("token" in name or "nll" in name for name in summary)
    lines = [json.loads(line) for line in (run.run_dir / "metrics-replica-0.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "eval" and lines[-1]["targets"] == 360 and lines[-1]["accuracy"] == summary["accuracy"]
    # replicas share an evaluation while they train: each writes its own part
    parts = [line for line in lines if line["kind"] == "eval" and line["step"] == 30]
    assert len(parts) == 1 and parts[0]["targets"] < 360
    assert not any("tokens" in line for line in lines)


def test_table_report_comparison_and_dashboard_speak_of_accuracy_and_images(run: TrainConfig) -> None:
    found = read_run(run.run_dir)
    summary = found.finished()
    shown = f"{100 * json.loads((run.run_dir / 'summary.json').read_text())['accuracy']:.1f} %"
    rows = dict(results(summary))
    assert rows["validation accuracy of the global parameters"] == shown
    assert rows["validation loss of the global parameters"].endswith("nats per image")
    assert rows["images, all replicas"] == "3,840" and rows["speed, all replicas"].endswith("images/s")
    assert final_table(summary).row_count == len(rows) + 1
    page = render_report(found, command="thinwire train --workload digits")
    assert f"reached a validation accuracy of <b>{shown}</b>" in page
    assert "Accuracy against images" in page and "Loss against images" in page
    words = page.partition("<summary>Settings</summary>")[0]
    assert "token" not in words and "held-out text" not in words and "nll" not in words
    heads, (cells,) = compare_runs([run.run_dir]).table()
    assert cells[heads.index("accuracy")] == shown and "images/s" in heads and "tokens" not in heads
    assert evaluation_line(found.evaluations[-1]).endswith(f", accuracy {shown}")


def test_a_killed_run_resumes_bit_for_bit(run: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(run.run_dir, folder)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000060")
    config = run.replace(out=folder)
    steps: list[int] = []

    def replica_main(transport: LoopbackTransport) -> None:
        patch.setattr(worker, "connect", lambda **rest: RecordingTransport(transport))
        place = ReplicaStart(local_rank=transport.replica, is_prepared=True, is_resumed=True)
        worker.run_replica(config, place=place, on_start=steps.append)

    with pytest.MonkeyPatch.context() as patch:
        thinwire.run_replicas(2, replica_main)
    assert steps == [30, 30]
    first, again = (json.loads((one / "summary.json").read_text()) for one in (run.run_dir, folder))
    for name in ("global_parameters_sha256", "val_loss", "accuracy", "images"):
        assert first[name] == again[name], name


def test_eval_prints_accuracy_and_the_other_commands_say_what_to_do_instead(
    run: TrainConfig, tmp_path: Path, capsys: Output
) -> None:
    folder = str(run.run_dir)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert main(["eval", folder, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["accuracy"] == pytest.approx(summary["accuracy"], abs=1e-6)
    assert values["loss"] == pytest.approx(summary["val_loss"], rel=1e-4)
    assert (values["images"], values["step"]) == (360, 60)
    assert main(["eval", folder, "--step", "30"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("accuracy       ") and "nats per image" in told and "360 images" in told
    assert main(["generate", folder, "--prompt", "7"]) == 2
    assert capsys.readouterr().err == (
        "thinwire generate: error: thinwire generate is for language models; got a run of --workload digits; allowed "
        f"a run of --workload language; try thinwire eval {folder}\n"
    )
    assert main(["eval", folder, "--data", "stdlib"]) == 2
    assert "--data is for language models" in capsys.readouterr().err
    assert main(["export", folder, "--to", "hf", "--out", str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err.endswith("try --to safetensors\n")
    assert main(["export", folder, "--to", "safetensors", "--out", str(tmp_path / "plain")]) == 0
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"]


def test_leased_shards_show_each_image_once_an_epoch() -> None:
    config = resolve(digits(Path("run"), batch_size=7), world_size=None, cores=1, home=Path("home"))
    data = open_digits(config)
    asked: list[int] = []

    def lend(number: int) -> tuple[int, int]:
        asked.append(number)
        return number, 0

    batches = DIGIT_CLASSIFICATION.leased_batches(config, data, Leases(shard_windows=100, lend=lend))
    assert batches.num_windows == 1437
    images = torch.cat([next(batches)[0] for _ in range(1437 // 7 + 1)])[:1437]
    assert len(np.unique(images.flatten(1).numpy(), axis=0)) == len(np.unique(data.images.flatten(1).numpy(), axis=0))
    assert sum(batches.used.values()) == 7 * (1437 // 7 + 1) and len(asked) == 15


def test_a_job_of_another_host_may_be_of_digits_but_not_name_a_program() -> None:
    elastic = {"elastic": True, "method": "streaming-diloco"}
    config = resolve(digits(Path("run"), **elastic), world_size=None, cores=1, home=Path("home"))
    values = ElasticJob.of(config, identity=new_identity(config_digest=config.digest())).to_json()
    job = ElasticJob.from_json(json.loads(json.dumps(values)))
    assert job.config.run.workload == "digits" and values["window_samples"] == 1
    values["config"]["run"]["workload"] = "antigravity:geohash"
    with pytest.raises(Refused, match="a program of another host"):
        ElasticJob.from_json(values)
    with pytest.raises(ValueError, match=r"a host that joins would run a program.*; try to leave --elastic out"):
        validate(digits(Path("run"), **elastic).replace(workload=OWN))


def test_the_dashboard_names_the_metric_and_the_unit(run: TrainConfig) -> None:
    follower = RunFollower(run.run_dir)
    while follower.poll():
        pass
    found = follower.sections()
    state, rows = found["run"], found["replicas"]
    assert state["unit"] == "images" and (state["model"], state["data"]) == ("digits-convnet", "digits")
    assert state["metric"]["name"] == "accuracy" and state["metric"]["text"].endswith(" %")
    assert all(row["images_per_s"] > 0 and "tokens_per_s" not in row for row in rows)
    text = metrics_text(found)
    assert "thinwire_replica_images_total{" in text and "thinwire_run_validation_accuracy 0." in text
    assert "token" not in text.replace("a token, an image", "")
