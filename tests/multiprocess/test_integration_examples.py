"""The files of the pages "Use it in ...": two real ranks run each, and train the bits of a bare loop."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import runpy
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from torch import nn

import thinwire
from thinwire.compat import group_operators, intercept
from thinwire.errors import CheckpointError
from thinwire.integrations.data import ReplicaSampler

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "integrations"
# Example: the package that it needs, and the extra that brings it.
NEEDS = {
    "transformers_trainer": ("transformers", "hf"), "accelerate_loop": ("accelerate", "hf"),
    "lightning_strategy": ("lightning", "lightning"), "fabric_loop": ("lightning", "lightning"),
    "torch_checkpoint": ("torch", ""), "torchtitan_container": ("torchtitan", "titan"), "nanogpt_loop": ("torch", ""),
}  # fmt: skip
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Example: the bare loop that it must equal: which data it reads, and the settings of AdamW.
BARE: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate_loop": ("sampler", {"lr": 1e-2}), "lightning_strategy": ("sampler", {"lr": 1e-2}),
    "fabric_loop": ("own", {"lr": 1e-2}), "torchtitan_container": ("own", ADAMW),
}  # fmt: skip


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def bare(data: str, adamw: dict[str, Any]) -> str:
    transport = thinwire.connect(solo=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1)
    inner = torch.optim.AdamW(model.parameters(), foreach=False, **adamw)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    points = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    batches: Iterable[torch.Tensor] = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(transport.replica))
    if data == "sampler":
        batches = torch.utils.data.DataLoader(points, batch_size=4, sampler=ReplicaSampler(points, transport))
    for batch in batches:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close(final_exchange=True)
    transport.close()
    return digest(model)


def lightning_resumed(folder: str) -> dict[str, Any]:
    """Stop a Lightning training at a checkpoint with rounds in flight, and go on from there."""
    import lightning

    from thinwire.integrations.lightning import DiLoCoStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)
            self.validated: list[float] = []

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.validated.append(self.net(batch).sum().item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)]

    transport = thinwire.connect(solo=True)
    own = torch.randn(20, 8, generator=torch.Generator().manual_seed(transport.replica))

    def train(max_epochs: int, checkpoint: str | None) -> tuple[Any, Any]:
        torch.manual_seed(1)
        method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2)
        trainer = lightning.Trainer(
            strategy=DiLoCoStrategy(method=method, transport=transport), max_epochs=max_epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, num_sanity_val_steps=0, callbacks=[Save()],
        )  # fmt: skip
        module = Module()
        loaders = (torch.utils.data.DataLoader(own, batch_size=4), torch.utils.data.DataLoader(torch.ones(2, 8)))
        trainer.fit(module, *loaders, ckpt_path=checkpoint)
        return module, trainer

    path = f"{folder}/lightning-{transport.replica}.ckpt"

    class Save(lightning.Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)
                assert trainer.strategy.diloco.rounds_in_flight

    whole, _ = train(3, None)
    saved = torch.load(path, weights_only=False)
    resumed, _ = train(3, path)
    transport.close()
    return {
        "whole": digest(whole), "resumed": digest(resumed), "validated": whole.validated,
        "saved": saved["state_dict"]["net.bias"].tolist(),
        "local": saved["thinwire_local_parameters"]["net.bias"].tolist(),
    }  # fmt: skip


def rank(folder: str, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.chdir(folder)
    counts: list[str] = []

    def count(name: str, _: Any, go_on: Any) -> Any:
        counts.append(name)
        return go_on()

    stop = intercept(sorted(group_operators()), count)
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        left = runpy.run_path(str(FOLDER / f"{name}.py"))
        found[name] = digest(left["model"])
        if "container" in left:
            with pytest.raises(CheckpointError, match="would lack thinwire's state"):
                left["container"].state_dict()
    for name in BARE:
        found[f"bare {name}"] = bare(*BARE[name])
    if "lightning_strategy" in names:
        found["resumed"] = lightning_resumed(folder)
    stop()
    return {**found, "collectives": counts}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what both ranks found, for the examples whose package is installed."""
    names = [name for name, (package, _) in NEEDS.items() if is_installed(package)]
    arguments = {"folder": str(tmp_path_factory.mktemp("examples")), "names": names}
    imports = [
        package for package in ("transformers", "accelerate", "lightning", "torchtitan") if is_installed(package)
    ]
    return values(run(rank, num_ranks=2, arguments=arguments, imports=imports))


def need(name: str) -> None:
    package, extra = NEEDS[name]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed; install it with: pip install 'thinwire[{extra}]'")


def test_every_file_is_run_here() -> None:
    in_a_test_of_their_own = {"ray_elastic", "transformers_elastic"}  # test_ray.py, test_hf_elastic.py
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NEEDS) | in_a_test_of_their_own


@pytest.mark.parametrize("name", NEEDS)
def test_two_ranks_end_with_the_same_model(name: str, found: list[dict[str, Any]]) -> None:
    need(name)
    assert found[0][name] == found[1][name]


@pytest.mark.parametrize("name", BARE)
def test_the_bits_are_those_of_the_bare_loop(name: str, found: list[dict[str, Any]]) -> None:
    need(name)
    assert found[0][name] == found[0][f"bare {name}"] == found[1][f"bare {name}"]


def test_no_collective_of_torch_runs(found: list[dict[str, Any]]) -> None:
    assert [one["collectives"] for one in found] == [[], []]


def test_lightning_goes_on_from_a_checkpoint_and_validates_the_global_parameters(found: list[dict[str, Any]]) -> None:
    need("lightning_strategy")
    first, second = (one["resumed"] for one in found)
    assert first["whole"] == first["resumed"] == second["whole"] == second["resumed"]
    assert first["validated"] == second["validated"] and first["saved"] == second["saved"]
    assert first["local"] != second["local"]


def test_the_versions_written_down_are_those_that_run_here() -> None:
    from thinwire.integrations.hooks import TRIED_VERSIONS

    page = (FOLDER.parents[1] / "docs" / "use-in.md").read_text()
    for package, expected in TRIED_VERSIONS.items():
        if is_installed(package):
            assert version(package).startswith(f"{expected}."), f"{package}: run the tests and change TRIED_VERSIONS"
        assert f"| {package} | {expected} |" in page
