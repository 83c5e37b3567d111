from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.full_disk import file_size_limit
from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.replica_checkpoints import (
    Found,
    ReplicaCheckpoints,
    choose_step,
    flatten_state,
    unflatten_state,
    verify_all,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
STATES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=10,
)


def checkpoints(
    run_dir: Path, *, replica: int = 0, num_replicas: int = 1, digest: str = "abc", run: str = "r"
) -> ReplicaCheckpoints:
    identity = {"run": run, "replica": replica, "num_replicas": num_replicas, "config_digest": digest}
    return ReplicaCheckpoints(run_dir, **identity)


def saved(run_dir: Path, *steps: int, **identity: Any) -> ReplicaCheckpoints:
    own = checkpoints(run_dir, **identity)
    for step in steps:
        own.save({"weights": torch.full((100,), float(step)), "step": step}, step=step, drift_steps=1000)
    return own


def file_of(run_dir: Path, step: int, suffix: str) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}" / f"replica-0.{suffix}"


@given(state=STATES)
def test_any_nested_state_comes_back_as_it_was(state: Any) -> None:
    tensors, skeleton = flatten_state(state)
    again = unflatten_state(tensors, json.loads(json.dumps(skeleton)))
    assert again == state
    assert repr(again) == repr(state)  # True is not 1, and a tuple is no list


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    state = {
        "float32": base,
        "alias": base,
        "view": base[1:3],
        "transposed": base.t(),
        "bfloat16": torch.randn(3).bfloat16(),
        "int64": torch.tensor([-1, 1 << 62]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "nested": [({"a": torch.ones(1)}, 0.1), {0: torch.zeros(2)}],
    }
    own = checkpoints(tmp_path)
    own.save(state, step=3, drift_steps=10)
    again = own.load(3)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape, name
            assert torch.equal(again[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert again["nested"][0][1] == 0.1
    assert torch.equal(again["nested"][1][0], torch.zeros(2))


def test_a_state_that_json_cannot_hold_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"object at state\['a'\]\[1\]"):
        flatten_state({"a": [1, object()]})
    with pytest.raises(ValueError, match="keys of the state"):
        flatten_state({(1, 2): 3})


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_any_damage_is_found_and_names_the_file(tmp_path: Path, suffix: str, damage: str) -> None:
    own = saved(tmp_path, 5)
    path = file_of(tmp_path, 5, suffix)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"flip": content, "cut": content[:-9], "empty": b""}[damage])
    assert f"replica-0.{suffix}" in own.problem(5) or "damaged" in own.problem(5)
    with pytest.raises(CheckpointError, match=r"replica-0\.(json|safetensors).*remove"):
        own.load(5)


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        ({"digest": "other"}, "its run config is 'abc', this one's 'other'"),
        ({"num_replicas": 2}, "its replica of is '1', this one's 2"),
        ({"run": "s"}, "its run id is 'r', this one's 's'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, identity: dict[str, Any], field: str) -> None:
    saved(tmp_path, 5)
    assert f"is not of this run: {field}" in checkpoints(tmp_path, **identity).problem(5)


def test_another_step_or_replica_in_the_place_of_one_is_refused(tmp_path: Path) -> None:
    own = saved(tmp_path, 5, 6, num_replicas=2)
    for suffix in ("json", "safetensors"):
        file_of(tmp_path, 6, suffix).write_bytes(file_of(tmp_path, 5, suffix).read_bytes())
    assert "its step is 5, not 6" in own.problem(6)


def test_a_json_with_a_forged_content_is_refused(tmp_path: Path) -> None:
    own = saved(tmp_path, 5)
    path = file_of(tmp_path, 5, "json")
    body = json.loads(path.read_text())
    body["step"] = 6
    path.write_text(json.dumps(body))
    assert "damaged" in own.problem(5)
    path.write_text("[" * 100_000)
    assert "damaged" in own.problem(5)


def test_old_checkpoints_go_and_those_that_a_slower_replica_needs_stay(tmp_path: Path) -> None:
    own = checkpoints(tmp_path)
    for step in range(10, 101, 10):
        own.save({}, step=step, drift_steps=25)
    # a replica may be at step 75, so that 70 is its newest
    assert own.steps() == [70, 80, 90, 100]
    for step in (200, 300, 400):
        own.save({}, step=step, drift_steps=5)
    assert own.steps() == [300, 400]


def test_a_replica_removes_its_own_files_only(tmp_path: Path) -> None:
    first, second = (saved(tmp_path, 1, 2, replica=replica, num_replicas=2) for replica in (0, 1))
    for step in (3, 4, 5):
        first.save({}, step=step, drift_steps=0)
    assert first.steps() == [4, 5]
    assert second.steps() == [1, 2]
    assert second.load(1)["step"] == 1


def test_a_disk_without_room_leaves_the_checkpoint_before_and_nothing_half_written(tmp_path: Path) -> None:
    own = saved(tmp_path, 1)
    with file_size_limit(10_000), pytest.raises(CheckpointError, match="cannot write the checkpoint of step 2 to"):
        own.save({"weights": torch.zeros(100_000)}, step=2, drift_steps=0)
    assert own.steps() == [1]
    assert own.problem(1) == ""
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["replica-0.json", "replica-0.safetensors"]


def test_a_file_in_the_place_of_the_folder_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        checkpoints(tmp_path).save({}, step=1, drift_steps=0)


def test_a_partial_file_of_a_killed_writer_does_not_count(tmp_path: Path) -> None:
    own = saved(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000002"
    folder.mkdir()
    (folder / ".replica-0.safetensors.partial").write_bytes(b"half")
    (folder / "replica-0.safetensors").write_bytes(b"half")
    assert verify_all(own) == Found(good=(1,), bad={})


def test_the_newest_step_that_all_replicas_can_use_is_chosen() -> None:
    assert choose_step([Found(good=(10, 20, 30), bad={}), Found(good=(10, 20), bad={})]) == (20, [])
    assert choose_step([Found(good=(), bad={}), Found(good=(), bad={})]) == (0, [])
    step, warnings = choose_step([Found(good=(10, 20), bad={}), Found(good=(10,), bad={20: "x is damaged; remove it"})])
    assert (step, warnings) == (10, ["x is damaged; going on from step 10"])


def test_no_common_step_is_an_error_that_says_why() -> None:
    with pytest.raises(CheckpointError, match="x is damaged, and no earlier one is whole"):
        choose_step([Found(good=(20,), bad={}), Found(good=(), bad={20: "x is damaged; remove it"})])
    with pytest.raises(CheckpointError, match=r"replica 0: \[20\]; replica 1: \[10\]"):
        choose_step([Found(good=(20,), bad={}), Found(good=(10,), bad={})])
    with pytest.raises(CheckpointError, match="no checkpoint is there for all replicas"):
        choose_step([Found(good=(20,), bad={}), Found(good=(), bad={})])
