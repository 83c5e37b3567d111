"""Stages that come and go: each step's gradients are those of one process without the stages that were lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live_processes import DEADLINE_S, until
from torch import nn

from thinwire.adaptive_timeout import Deadlines
from thinwire.errors import ConnectError, PayloadError
from thinwire.shared_random import derive_seed
from thinwire.training.config import TrainConfig
from thinwire.training.parallel_passes import ParallelPasses, cut_model
from thinwire.training.skip_passes import deal_paths
from thinwire.transport import path_group
from thinwire.transport.job_environment import JobPlace
from thinwire.transport.path_group import PathGroup, is_under_way
from thinwire.transport.path_runner import PathRunner
from thinwire.transport.rendezvous import open_file_store
from thinwire.transport.replica_mesh import ReplicaMesh
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import TransformerStage, build_transformer, next_token_loss

SHAPE = TransformerConfig(vocab_size=16, dim=16, layers=4, heads=4, max_seq_len=8)
STAGES, LOST, ROWS = 4, 2, 6
CONFIG = TrainConfig.of(model="nano", pp=STAGES, skip=0.25, micro_batch=1, batch_size=ROWS, clip_norm=0.05)
CPU = torch.device("cpu")


@pytest.fixture
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> threading.local:
    """Let each thread be a rank of one job; `rank` is its number."""
    own = threading.local()

    def job_store(*, deadline_s: float) -> tuple[JobPlace, Any]:
        file = str(tmp_path / "store")
        place = JobPlace(rank=own.rank, world_size=STAGES, master_address="", master_port=0, agent_serves_store=False,
                         prefix="job", rendezvous_file=file)  # fmt: skip
        return place, open_file_store(file, world_size=STAGES)

    monkeypatch.setattr(path_group, "job_store", job_store)
    # one process sets it for all threads
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path_group._num_made.clear()
    return own


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(16, (ROWS, 9), generator=torch.Generator().manual_seed(number))
    return made[:, :-1], made[:, 1:]


class _Killed(Exception):
    pass


class _Stage:
    """One stage of a run, as far as losing it goes."""

    def __init__(self, model: nn.Module, *, step: int = 0) -> None:
        self.group = PathGroup(num_stages=STAGES)
        mesh = ReplicaMesh(device=CPU, pp=STAGES, stages=self.group)
        self.model = cut_model(model, CONFIG, mesh)
        self.passes = ParallelPasses(CONFIG, self.model, mesh, step=step)

    def step(self, number: int) -> dict[str, Any]:
        loss, _ = self.passes.backward(*batch(number), factor=1.0)
        self.passes.clip()
        gradients = {name.partition(".")[2]: one.grad for name, one in self.model.named_parameters()}
        gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        found = {"loss": float(loss), "present": self.group.present, "gradients": gradients}
        found["held out"] = float(self.passes.held_out(*batch(number)))
        for parameter in self.model.parameters():
            parameter.grad = None
        return found


def reference(number: int, present: tuple[int, ...]) -> dict[str, Any]:
    """Return the same of one process, whose micro-batches take paths over some stages of one layer each."""
    model: Any = build_transformer(SHAPE, seed=3)
    tokens, targets = batch(number)
    seed = derive_seed(CONFIG.run.seed, "skip", *(int(row.sum()) for row in tokens))
    dealt = deal_paths(num_stages=len(present), length=min(3, len(present)), count=ROWS, seed=seed)
    paths = [tuple(present[place] for place in path) for path in dealt]

    def loss_of(path: tuple[int, ...], rows: torch.Tensor, wanted: torch.Tensor, z_loss: float) -> torch.Tensor:
        part = TransformerStage(model, range(0), has_embedding=True, has_head=True)
        part.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in path})
        return torch.stack(next_token_loss(part(rows), wanted, z_loss=z_loss))

    total = 0.0
    for path, row, target in zip(paths, tokens.split(1), targets.split(1), strict=True):
        loss = loss_of(path, row, target, SHAPE.z_loss)[0] / ROWS
        loss.backward()
        total += loss.item()
    for layer, block in enumerate(model.blocks):
        for parameter in block.parameters():
            if parameter.grad is not None:
                parameter.grad *= ROWS / sum(layer in path for path in paths)
    norm = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]).norm()
    scale = min(1.0, CONFIG.optimizer.clip_norm / float(norm))
    gradients = {name: one.grad * scale for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": total, "gradients": gradients, "held out": loss_of(present, tokens, targets, 0.0)[1].item()}


def kill_in_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stage end once, in the middle of its passes of step 2."""
    run_pass, passes = PathRunner._pass, list[int]()

    def last_pass(self: PathRunner, step: Any, *arguments: Any) -> None:
        if isinstance(self._transport, PathGroup) and self._transport.replica == LOST and step.number == 2:
            passes.append(step.number)
            if len(passes) == 2:
                raise _Killed
        run_pass(self, step, *arguments)

    monkeypatch.setattr(PathRunner, "_pass", last_pass)


def end(stage: _Stage) -> None:
    stage.group.complete()
    stage.group.close()


def test_a_step_is_repeated_without_a_lost_stage_which_takes_part_again_when_it_is_back(
    own_places: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_in_second_step(monkeypatch)
    models = [build_transformer(SHAPE, seed=3) for _ in range(STAGES + 1)]
    have_gone_on = threading.Event()

    def survivor(rank: int) -> list[dict[str, Any]]:
        own_places.rank = rank
        stage = _Stage(models[rank])
        found = [stage.step(number) for number in (1, 2, 3)]
        have_gone_on.set()
        until(lambda: rank or stage.group._has_returned())
        found += [stage.step(number) for number in (4, 5)]
        end(stage)
        return found

    def lost(rank: int) -> list[dict[str, Any]]:
        own_places.rank = rank
        stage = _Stage(models[rank])
        found = [stage.step(1)]
        with pytest.raises(_Killed):
            stage.step(2)
        stage.group.close()  # as its process's end does
        assert have_gone_on.wait(DEADLINE_S)
        path_group._num_made.clear()
        assert is_under_way(num_stages=STAGES, deadline_s=60)
        stage = _Stage(models[STAGES], step=1)  # from a checkpoint
        assert stage.group.is_returning
        found += [stage.step(number) for number in (2, 3, 4, 5)]
        end(stage)
        return found

    with ThreadPoolExecutor(STAGES) as threads:
        futures = [threads.submit(lost if rank == LOST else survivor, rank) for rank in range(STAGES)]
        found = [future.result(timeout=DEADLINE_S) for future in futures]

    whole, others = tuple(range(STAGES)), (0, 1, 3)
    for number, present in enumerate((whole, others, others, whole, whole), start=1):
        expected, gradients = reference(number, present), {}
        for rank in present:
            step = found[rank][number - 1]
            assert step["present"] == present
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["held out"] == pytest.approx(expected["held out"], rel=1e-5)
            gradients |= step["gradients"]
        assert gradients.keys() == expected["gradients"].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=1e-5, atol=1e-7)
    # steps without it leave its weights alone, and show the latest loss that it knows
    assert not found[LOST][1]["gradients"] and not found[LOST][2]["gradients"]
    assert [step["loss"] for step in found[LOST][1:3]] == [0.0, 0.0]


def test_what_stage_0_posts_is_checked(own_places: threading.local) -> None:
    """A store is open to whoever reaches it."""
    own_places.rank = 1
    group = PathGroup.__new__(PathGroup)
    group.num_replicas, group.number, group._deadline_s = STAGES, 0, 1.0
    group._deadlines, group._store = Deadlines(), path_group.job_store(deadline_s=1)[1]
    for text in ("", "[", "7", "[[0, 9], [1, 0]]", "[[1, 2], [1, 0]]", "[[0, 0], [1, 0]]", "[[0], [1]]", "[[0, 1]]"):
        group._store.set("members/0", text)
        with pytest.raises(PayloadError, match="stage 0 posted"):
            group._chosen()
    group._store.set("members/0", "0" * (1 << 17))
    with pytest.raises(PayloadError, match="131072 bytes, allowed 65536"):
        group._chosen()


def test_a_stage_that_never_comes_is_named(own_places: threading.local) -> None:
    own_places.rank = 0
    with pytest.raises(ConnectError, match=r"stage 1 did not come within 0\.1 s; see its log"):
        PathGroup(num_stages=STAGES, deadline_s=0.1)
