from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from tests.full_disk import file_size_limit
from thinwire.elastic.global_state import GlobalState, sha256
from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.checkpoint_files import open_storage
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints

FILES = ["checkpoint.json", "model.safetensors", "outer.safetensors"]
numbers = itertools.count()


def state_of(step: int, **note: Any) -> GlobalState:
    generator = torch.Generator().manual_seed(step)
    return GlobalState(
        step=step,
        parameters={
            "blocks.0.weight": torch.randn(31, 17, generator=generator),
            "norm": torch.randn(7, generator=generator).bfloat16(),
            "scale": torch.tensor(float(step)),
            "empty": torch.empty(0, 3),
        },
        outer={"momentum.0": torch.randn(540, generator=generator)},
        note={"tokens": 64 * step, **note},
    )


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        name = f"memory://run-{next(numbers)}"
        yield name
        MemoryFileSystem().rm(name.removeprefix("memory:/"), recursive=True)
    else:
        yield str(tmp_path / "run") if request.param == "folder" else f"file://{tmp_path}/run"


def written(url: str | Path, *steps: int, **options: Any) -> GlobalCheckpoints:
    checkpoints = GlobalCheckpoints(url, **options)
    for step in steps:
        checkpoints.write(state_of(step))
    return checkpoints


def is_same(first: GlobalState | None, second: GlobalState) -> bool:
    return first is not None and sha256(first) == sha256(second)


def change(url: str, step: int, file: str, damage: str) -> None:
    """Damage one file of a checkpoint, wherever it is."""
    place = open_storage(url)
    folder = f"step-{step:08d}"
    content = bytearray(b"".join(place.read(folder, file)))
    if damage == "missing":
        place.remove(folder, [file])
        return
    content[len(content) // 2] ^= 1
    place.write(folder, file, [memoryview({"flip": bytes(content), "cut": bytes(content[:-9]), "empty": b""}[damage])])


def test_a_state_comes_back_bit_for_bit_from_every_place(url: str) -> None:
    checkpoints = GlobalCheckpoints(url)
    assert checkpoints.steps() == [] and checkpoints.latest().state is None
    checkpoints.save(state_of(150, ledger=[[0, 3]], options={"lr": 0.5}))
    assert checkpoints.wait(60.0)
    again = GlobalCheckpoints(url)
    assert again.steps() == [150] and again.problem(150) == ""
    assert is_same(again.load(150), state_of(150, ledger=[[0, 3]], options={"lr": 0.5}))
    assert is_same(again.latest().state, again.load(150)) and again.latest().warnings == ()
    assert again.describe(150).note["tokens"] == 64 * 150
    assert again.describe(150).num_bytes > state_of(150).num_bytes
    assert sorted(open_storage(url).sizes("step-00000150")) == FILES


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_a_damaged_file_is_named_and_the_state_before_is_taken(url: str, file: str, damage: str) -> None:
    written(url, 1, 2, 3)
    change(url, 3, file, damage)
    checkpoints = GlobalCheckpoints(url)
    if file == "checkpoint.json" and damage == "missing":
        assert checkpoints.steps() == [2]  # as if it had never been brought to an end
        assert is_same(checkpoints.latest().state, state_of(2))
        return
    assert "step-00000003" in checkpoints.problem(3) and "; remove " in checkpoints.problem(3)
    assert file in checkpoints.problem(3)
    with pytest.raises(CheckpointError, match="step-00000003"):
        checkpoints.load(3)
    latest = checkpoints.latest()
    assert is_same(latest.state, state_of(2))
    assert len(latest.warnings) == 1 and latest.warnings[0].endswith("; going on from step 2")
    assert "step-00000003" in latest.warnings[0]


def test_where_nothing_verifies_the_run_does_not_begin_anew_in_silence(url: str) -> None:
    checkpoints = written(url, 1, 2)
    for step in (1, 2):
        change(url, step, "outer.safetensors", "flip")
    with pytest.raises(CheckpointError, match=r"step-00000002/outer.*no earlier one is whole"):
        checkpoints.latest()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("step", 4, "its step is 4, not 3"),
        ("version", 1, "is of format version 1, and this thinwire reads 3"),
        ("format", "another-checkpoint", "its format is"),
        ("files", {}, "lacks a field"),
        ("state", None, "lacks a field"),
        ("state", {"a": float("nan")}, "holds no state: a note holds"),
    ],
)
def test_a_json_that_says_something_else_is_refused(tmp_path: Path, field: str, value: Any, named: str) -> None:
    from thinwire.training.checkpoints.checkpoint_files import body_sha256

    checkpoints = written(tmp_path, 3)
    path = tmp_path / "step-00000003" / "checkpoint.json"
    body = json.loads(path.read_text())
    body[field] = value
    path.write_text(json.dumps(body))
    assert "its SHA-256 is wrong" in checkpoints.problem(3)
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": body_sha256(body)}))
    with pytest.raises(CheckpointError, match=named):
        checkpoints.load(3)
    path.write_text("[" * 100_000)
    assert "no checkpoint's JSON" in checkpoints.problem(3)


def test_plain_pytorch_loads_the_model_and_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 11, bias=False))
    model[2].weight = model[0].weight
    GlobalCheckpoints(tmp_path).write(GlobalState(step=1, parameters=dict(model.named_parameters())))
    again = nn.Sequential(nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 11, bias=False))
    again[2].weight = again[0].weight
    tensors = safetensors.torch.load_file(tmp_path / "step-00000001" / "model.safetensors")
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert missing == ["2.weight"] and not unexpected  # the second name of a tensor that was loaded
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    # under all names, nothing is missing
    both = dict(model.named_parameters(remove_duplicate=False))
    GlobalCheckpoints(tmp_path).write(GlobalState(step=2, parameters=both))
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "step-00000002" / "model.safetensors"))


@pytest.mark.parametrize(
    ("options", "steps", "kept"),
    [
        ({}, range(10, 60, 10), [40, 50]),
        ({"keep_last": 1}, range(10, 60, 10), [50]),
        ({"keep_last": 3}, range(10, 30, 10), [10, 20]),
        ({"keep_last": 1, "keep_every": 20}, range(10, 80, 10), [20, 40, 60, 70]),
        ({"keep_last": 2, "keep_every": 50}, [0, 3, 50, 99, 100, 101, 102], [0, 50, 100, 101, 102]),
    ],
)
def test_the_last_and_the_marked_ones_stay(
    url: str, options: dict[str, int], steps: Iterable[int], kept: list[int]
) -> None:
    checkpoints = written(url, *steps, **options)
    assert checkpoints.steps() == kept
    assert not any(checkpoints.problem(step) for step in kept)


def test_broken_ones_are_no_reason_to_remove_one_that_verifies(url: str) -> None:
    written(url, 1, 2, 3, keep_last=3)
    change(url, 2, "model.safetensors", "flip")
    change(url, 3, "checkpoint.json", "cut")
    checkpoints = GlobalCheckpoints(url, keep_last=2)  # a new process, which has verified nothing
    checkpoints.write(state_of(4))
    assert checkpoints.steps() == [1, 2, 3, 4]
    checkpoints.write(state_of(5))
    assert checkpoints.steps() == [4, 5]


def test_the_one_just_written_stays_where_later_ones_are_there(url: str) -> None:
    checkpoints = written(url, 10, 20, 30)
    checkpoints.write(state_of(5))
    assert checkpoints.steps() == [5, 20, 30]
    checkpoints.forget_after(5)
    assert checkpoints.steps() == [5]
    checkpoints.write(state_of(10))
    assert is_same(checkpoints.latest().state, state_of(10))


def test_leftovers_go_and_files_of_others_stay(tmp_path: Path) -> None:
    for folder, names in {
        "step-00000001": ["model.safetensors", "outer.safetensors", ".checkpoint.json.host.partial"],
        "step-00000002": [".model.safetensors.host.partial"],
        "step-00000003": ["replica-0.json", "replica-0.safetensors"],
        "step-4": ["checkpoint.json"],
        "notes": ["checkpoint.json"],
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("")
    checkpoints = written(tmp_path, 3, 5)
    assert checkpoints.steps() == [3, 5]
    checkpoints.write(state_of(6))
    left = {path.name: sorted(file.name for file in path.iterdir()) for path in tmp_path.iterdir()}
    assert left == {
        "step-00000003": ["replica-0.json", "replica-0.safetensors"],
        "step-00000005": FILES,
        "step-00000006": FILES,
        "step-4": ["checkpoint.json"],
        "notes": ["checkpoint.json"],
    }


def test_the_same_state_once_more_does_not_touch_the_good_tensors(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 7)
    file = tmp_path / "step-00000007" / "model.safetensors"
    before = file.stat().st_ino
    checkpoints.write(state_of(7, more="note"))
    assert file.stat().st_ino == before
    assert is_same(checkpoints.load(7), state_of(7, more="note"))


def test_another_state_of_the_same_step_takes_the_place_of_the_old_one(url: str) -> None:
    checkpoints = written(url, 7)
    other = GlobalState(step=7, parameters={"w": torch.ones(3)})
    checkpoints.write(other)
    assert is_same(GlobalCheckpoints(url).load(7), other)


def test_a_disk_without_room_is_a_warning_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = written(tmp_path, 1, on_warning=told.append)
    large = GlobalState(step=2, parameters={"w": torch.zeros(100_000)})
    with file_size_limit(10_000):
        checkpoints.save(large)
        assert checkpoints.wait(60.0)
    assert len(told) == 1
    assert "step 2" in told[0] and "make room there" in told[0] and told[0].endswith("training goes on without it")
    assert checkpoints.steps() == [1] and checkpoints.problem(1) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoints.save(large)
    assert checkpoints.wait(60.0) and checkpoints.steps() == [1, 2] and len(told) == 1


def test_a_store_that_cannot_be_reached_is_no_store_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to host")

    checkpoints = written("memory://unreachable", 1)
    monkeypatch.setattr(MemoryFileSystem, "ls", unreachable)
    for ask in (checkpoints.steps, checkpoints.latest):
        with pytest.raises(CheckpointError, match="cannot list memory:///unreachable: no route to host"):
            ask()
    assert "cannot read" in checkpoints.problem(1)


def test_a_store_is_asked_anew_each_time() -> None:
    seen = GlobalCheckpoints("memory://anew")
    assert seen.steps() == []
    written("memory://anew", 4)
    assert seen.steps() == [4]


def test_a_file_in_the_place_of_the_folder_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint of step 1 to {tmp_path}/run"):
        GlobalCheckpoints(tmp_path / "run").write(state_of(1))
    with pytest.raises(CheckpointError, match="cannot list"):
        GlobalCheckpoints(tmp_path / "run").steps()


@pytest.mark.parametrize(
    ("options", "named"), [({"keep_last": 0}, "keep_last must be at least 1, got 0"), ({"keep_every": 0}, "keep_every")]
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GlobalCheckpoints("anywhere", **options)
