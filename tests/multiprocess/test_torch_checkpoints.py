"""Checkpoints by torch.distributed.checkpoint: two ranks save what one loads, and the other way round."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire.errors import CheckpointError
from thinwire.integrations import dcp

STEPS, SAVE_AT = 8, 5
AT_REST = 3  # no round is in flight


def build(transport: thinwire.RecordingTransport, *, ranks: int, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)), nn.Linear(8, 3))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in list(model)[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    return model, thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(model: nn.Module, optimizer: Any, *, first: int, last: int) -> None:
    """Give all ranks of a replica the same batches: the mean of equal gradients is exact."""
    for step in range(first, last):
        points = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(points).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def life(folder: str, load_from: str | None, save_to: str) -> dict[str, Any]:
    """Train to the end from the start, or from a checkpoint; save in the middle, in the background."""
    torch.set_num_threads(1)
    ranks = 1
    transport = thinwire.connect()
    if torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        transport.close()
        transport = thinwire.connect(ranks_per_replica=ranks)
    model, optimizer = build(transport, ranks=ranks, seed=0 if load_from is None else 1)
    first = 0
    if load_from is not None:
        assert dcp.load(Path(folder) / load_from, model, optimizer) == ()
        first = optimizer.steps_done
    if first < SAVE_AT:
        train(model, optimizer, first=first, last=SAVE_AT)
        in_flight = len(optimizer.rounds_in_flight)
        pending = dcp.async_save(Path(folder) / save_to, model, optimizer)
        train(model, optimizer, first=SAVE_AT, last=STEPS)
        pending.result()
    else:
        in_flight = len(optimizer.rounds_in_flight)
        dcp.save(Path(folder) / save_to, model, optimizer)
        train(model, optimizer, first=first, last=STEPS)
    local = digest(model)
    optimizer.close(final_exchange=True)
    functions: dict[str, list[str]] = {}
    if save_to == "two":
        for steps, is_broadcast in ((AT_REST, False), (AT_REST, True), (SAVE_AT, False), (SAVE_AT, True)):
            functions[f"{steps} {is_broadcast}"] = carried(
                transport, ranks=ranks, steps=steps, is_broadcast=is_broadcast
            )
    return {"first": first, "in_flight": in_flight, "local": local, "global": digest(model), "functions": functions}


def carried(transport: Any, *, ranks: int, steps: int, is_broadcast: bool) -> list[str]:
    """Carry a state by torch's functions, as its example for FSDP2 does, to another model and optimizer.

    Returns:
        The hashes at the end of the one that saved and of the one that loaded; or this rank's refusal.
    """
    model, optimizer = build(transport, ranks=ranks, seed=0)
    train(model, optimizer, first=0, last=steps)
    saving = StateDictOptions(full_state_dict=True, cpu_offload=is_broadcast)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=saving))
    train(model, optimizer, first=steps, last=STEPS)
    expected = digest(model)
    optimizer.abandon()
    model, optimizer = build(transport, ranks=ranks, seed=5)
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_broadcast)
    set_model_state_dict(model, states[0], options=loading)
    refused = ""
    try:
        set_optimizer_state_dict(model, optimizer, states[1], options=loading)
    except CheckpointError as error:
        refused = str(error)
    if torch.distributed.get_rank() == 0 or not refused:
        assert optimizer.steps_done == steps
    everywhere: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everywhere, refused)
    if not any(everywhere):
        train(model, optimizer, first=steps, last=STEPS)
    optimizer.abandon()
    return everywhere if any(everywhere) else [expected, digest(model)]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("dcp"))
    found = {}
    for name, ranks, load_from in (("two", 2, None), ("one", 1, "two"), ("two again", 2, "one")):
        arguments = {"folder": folder, "load_from": load_from, "save_to": name}
        environment = {} if ranks > 1 else dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        done = values(run(life, num_ranks=ranks, arguments=arguments, environment=environment))
        assert all(one == done[0] for one in done)
        found[name] = done[0]
    found["files"] = {"names": sorted(path.suffix for path in Path(folder).rglob("*") if path.is_file())}
    return found


def test_one_rank_goes_on_from_the_checkpoint_of_two_bit_for_bit(lives: dict[str, dict[str, Any]]) -> None:
    assert lives["two"]["in_flight"] > 0, "rounds in flight are part of what is saved"
    assert lives["one"]["first"] == SAVE_AT
    for what in ("local", "global"):
        assert lives["one"][what] == lives["two"][what]


def test_two_ranks_go_on_from_the_checkpoint_of_one_bit_for_bit(lives: dict[str, dict[str, Any]]) -> None:
    assert lives["two again"]["first"] == SAVE_AT
    for what in ("local", "global"):
        assert lives["two again"][what] == lives["two"][what]


def test_only_safetensors_files_are_written(lives: dict[str, dict[str, Any]]) -> None:
    assert set(lives["files"]["names"]) == {".safetensors"}


def test_torch_functions_carry_a_sharded_replica_bit_for_bit_or_refuse(lives: dict[str, dict[str, Any]]) -> None:
    found = lives["two"]["functions"]
    for case in (f"{AT_REST} False", f"{AT_REST} True", f"{SAVE_AT} False"):
        assert len(set(found[case])) == 1 and len(found[case]) == 2, case
    # rank 0 hands on only what a fresh optimizer has: rounds in flight are lost on the way to the others
    first, second = found[f"{SAVE_AT} True"]
    assert not first and "not whole on this rank" in second and "thinwire.integrations.dcp" in second
