"""A local Ray of two workers: an unmodified loop in a TorchTrainer, and elastic actors of which one is killed."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.errors import MissingExtra
from thinwire.training.summary import parameters_sha256

try:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ModuleNotFoundError:
    pytest.skip("ray is not installed: pip install 'thinwire[ray]'", allow_module_level=True)

from thinwire.integrations.ray import RayRun, run_elastic

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "ray_elastic.py"
SOON_S = 300.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def trainer_loop(make: Callable[[], nn.Module]) -> Callable[[dict[str, Any]], None]:
    """Return a loop that knows nothing of Ray; a closure, so that Ray carries it to its workers."""

    def loop(config: dict[str, Any]) -> None:
        transport = thinwire.connect()
        torch.manual_seed(transport.replica)
        model = make()
        method = thinwire.methods.streaming_diloco(sync_interval=5, overlap_steps=1)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        with optimizer:
            for _ in range(12):
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        text = f"{transport.num_replicas} {parameters_sha256(model)} {optimizer.statistics.rounds_applied}"
        Path(config["folder"], f"replica-{transport.replica}").write_text(text)

    return loop


def test_an_unmodified_loop_runs_in_a_torch_trainer(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        trainer_loop(lambda: nn.Linear(4, 1)), train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    )  # fmt: skip
    trainer.fit()
    first, second = (Path(tmp_path, f"replica-{replica}").read_text().split() for replica in range(2))
    assert first == second and first[0] == "2" and int(first[2]) > 1


def slow_train(folder: Path) -> Callable[[RayRun], dict[str, Any]]:
    """Return a function that trains slowly from step 40 on, until the killed replica is back."""

    def train(run: RayRun) -> dict[str, Any]:
        torch.set_num_threads(1)
        torch.manual_seed(os.getpid())
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        method = thinwire.methods.streaming_diloco(sync_interval=8, overlap_steps=2)
        lives = folder / f"lives-{run.index}"
        with lives.open("a") as file:
            file.write(f"{os.getpid()}\n")
        life = len(lives.read_text().split())
        first_step = 0
        with run.join(model, inner, method=method, steps=200) as optimizer:
            while not optimizer.is_finished:
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                first_step = first_step or optimizer.steps_done
                if optimizer.steps_done >= 20:
                    (folder / f"trains-{run.index}-{life}").touch()
                is_back = (folder / "trains-1-2").exists()
                time.sleep(0.5 if optimizer.steps_done >= 40 and not is_back else 0.05)
        return {"life": life, "first_step": first_step, "sha256": parameters_sha256(model)}

    return train


def test_a_killed_actor_is_started_again_and_ends_with_the_same_model(tmp_path: Path) -> None:
    problems: list[str] = []

    def kill() -> None:
        until_s = time.monotonic() + SOON_S
        while not all((tmp_path / f"trains-{index}-1").exists() for index in range(2)):
            if time.monotonic() > until_s:
                problems.append("the replicas did not begin")
                return
            time.sleep(0.05)
        os.kill(int((tmp_path / "lives-1").read_text().split()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run_elastic(slow_train(tmp_path), replicas=2, folder=tmp_path / "run")
    killer.join()
    assert not problems
    assert [one["life"] for one in found] == [1, 2] and found[1]["first_step"] > 20
    assert found[0]["sha256"] == found[1]["sha256"]


def test_the_file_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLE))  # its cluster is the one of this test
    sums = run_elastic(example["train"], replicas=2, folder=tmp_path / "runs")
    assert len(set(sums)) == 1


def test_a_run_without_ray_or_replicas_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run needs replicas; got 0; allowed 1 or more"):
        run_elastic(print, replicas=0, folder=tmp_path)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", None)
    with pytest.raises(MissingExtra, match=r"ray is not installed; install it with: pip install 'thinwire\[ray\]'"):
        run_elastic(print, replicas=1, folder=tmp_path)
