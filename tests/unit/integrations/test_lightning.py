"""Lightning's strategy with replicas in one process: several optimizers, folders, numbers, devices, hooks."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.errors import ThinwireError
from thinwire.sync.equal_batches import EqualBatchesWarning

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install 'thinwire[lightning]'", allow_module_level=True)

STEPS = 9
LAST_STEP = 400


def method() -> Any:
    return thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1, num_fragments=1)


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"maker": nn.Linear(4, 3), "critic": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))}


def optimizers(maker: nn.Module, critic: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(maker.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)]


def turns(maker: Any, critic: Any, batch: torch.Tensor, steppers: Any, backward: Any) -> None:
    """One batch of a GAN: the maker's turn, then the critic's, which sees the maker's new samples."""
    first, second = steppers
    first.zero_grad()
    backward(-critic(maker(batch)).mean())
    first.step()
    second.zero_grad()
    backward(critic(maker(batch).detach()).mean() - critic(batch[:, :3]).mean())
    second.step()


def batches(replica: int) -> torch.Tensor:
    return torch.randn(STEPS, 6, 4, generator=torch.Generator().manual_seed(replica))


def bare(transport: Any) -> list[list[float]]:
    """Train the same without Lightning, with two models that are apart from the start."""
    made = networks()
    steppers = [
        thinwire.DistributedOptimizer(model, inner, method=method(), transport=transport)
        for model, inner in zip(made.values(), optimizers(**made), strict=True)
    ]
    for batch in batches(transport.replica):
        turns(made["maker"], made["critic"], batch, steppers, lambda loss: loss.backward())
    for one in steppers:
        one.close(final_exchange=True)
    return [p.tolist() for model in made.values() for p in model.parameters()]


def trainer(transport: Any, folder: Path, **more: Any) -> Any:
    import lightning

    from thinwire.integrations.lightning import DiLoCoStrategy

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "max_epochs": 1}
    strategy = DiLoCoStrategy(method=method(), transport=transport)
    return lightning.Trainer(strategy=strategy, accelerator="cpu", default_root_dir=folder, **{**quiet, **more})


def gan(transport: Any, folder: Path) -> list[list[float]]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleDict(networks())

        def training_step(self, batch: torch.Tensor) -> None:
            turns(self.nets["maker"], self.nets["critic"], batch, self.optimizers(), self.manual_backward)

        def configure_optimizers(self) -> Any:
            return optimizers(**self.nets)

    module = Module()
    made = trainer(
        transport, folder, logger=CSVLogger(folder / "logs"), callbacks=[ModelCheckpoint(folder / "saved")],
    )  # fmt: skip
    made.fit(module, torch.utils.data.DataLoader(batches(transport.replica), batch_size=None))
    assert made.strategy.root_device == torch.device("cpu") and len(made.strategy.wrapped) == 2
    assert [one.steps_done for one in made.strategy.wrapped] == [STEPS, STEPS] and made.global_step == 2 * STEPS
    return [p.tolist() for p in module.nets.parameters()]


def test_optimizers_that_step_in_turns_train_as_two_models_would(tmp_path: Path) -> None:
    found = thinwire.run_replicas(2, lambda transport: gan(transport, tmp_path))
    assert found == thinwire.run_replicas(2, bare)
    assert found[0] == found[1]
    for replica in (0, 1):  # nothing of one replica is in the folder of the other
        (log,) = (tmp_path / "logs" / f"replica-{replica}").rglob("metrics.csv")
        assert "thinwire/0/rounds_applied" in log.read_text() and "thinwire/1/missing_steps" in log.read_text()
        assert list((tmp_path / "saved" / f"replica-{replica}").glob("*.ckpt"))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"replica-0", "replica-1"}


def equal(transport: Any, folder: Path, seed: int) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> Any:
            return self.net(batch).square().mean()  # Lightning itself never calls the module

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    made = trainer(transport, folder, logger=False, enable_checkpointing=False, max_epochs=2)
    made.fit(Module(), torch.utils.data.DataLoader(batches(seed), batch_size=None))


@pytest.mark.parametrize("is_equal", [True, False])
def test_replicas_that_train_alike_are_noticed_though_lightning_calls_no_model(tmp_path: Path, is_equal: bool) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thinwire.run_replicas(2, lambda t: equal(t, tmp_path, seed=7 if is_equal else t.replica))
    texts = [str(one.message) for one in found if issubclass(one.category, EqualBatchesWarning)]
    assert len(texts) == int(is_equal)
    assert all(word in text for text in texts for word in ("seed", "sampler", "split_dataset"))


def test_a_strategy_that_nothing_joins_or_whose_hooks_are_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.integrations import hooks
    from thinwire.integrations.lightning import DiLoCoStrategy

    with pytest.raises(ValueError, match="neither transport nor uri"):
        DiLoCoStrategy(method="diloco")
    monkeypatch.setitem(hooks.HOOKS, "lightning", (*hooks.HOOKS["lightning"], "_gone"))
    with pytest.raises(ThinwireError, match=r"lightning 2\.[\d.]+ has no _gone, which thinwire needs; tried was"):
        DiLoCoStrategy(method="diloco", transport=thinwire.LoopbackWorld(1).transports[0])


def test_a_late_trainer_of_an_elastic_run_begins_at_the_step_of_the_others(tmp_path: Path) -> None:
    """The run counts the steps, for the trainer's limits and its schedules too; two trainers end with one model."""
    import threading

    import lightning

    from thinwire.integrations.lightning import DiLoCoStrategy
    from thinwire.transport.addresses import free_port

    uri, is_under_way, has_joined = f"127.0.0.1:{free_port()}", threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            torch.manual_seed(len(name))
            self.net, self.name, self.rates = nn.Linear(4, 1), name, {}

        def training_step(self, batch: torch.Tensor) -> Any:
            if self.name == "first" and self.global_step >= 8:
                is_under_way.set()
                has_joined.wait(0.1)  # slow steps until then, for the other one fetches the state within them
            self.rates[self.global_step] = self.optimizers().param_groups[0]["lr"]
            has_joined.set() if self.name == "late" else None
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            inner = torch.optim.SGD(self.parameters(), lr=0.01)
            return [inner], [
                {"scheduler": torch.optim.lr_scheduler.LinearLR(inner, total_iters=LAST_STEP), "interval": "step"}
            ]

    def train(name: str) -> None:
        torch.set_num_threads(1)
        method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1)
        strategy = DiLoCoStrategy(method=method, uri=uri, options={"folder": tmp_path / "run"})
        made = lightning.Trainer(
            strategy=strategy, accelerator="cpu", max_steps=LAST_STEP, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module(name)
        made.fit(module, torch.utils.data.DataLoader(torch.randn(100, 2, 4), batch_size=None))
        found[name] = (made.global_step, module.rates, [p.tolist() for p in module.parameters()], made.default_root_dir)

    first = threading.Thread(target=train, args=["first"])
    first.start()
    is_under_way.wait()
    train("late")
    first.join()
    (end, rates, values, root), (late_end, late_rates, late_values, late_root) = found["first"], found["late"]
    assert end == late_end == LAST_STEP and values == late_values and root != late_root
    assert min(late_rates) >= 8
    shared = {step for step in set(rates) & set(late_rates) if step > min(late_rates) + 10}  # the run ramps it up first
    assert shared and all(rates[step] == late_rates[step] for step in shared)
