from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from thinwire.elastic.global_state import GlobalState
from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.global_checkpoints import BackgroundSaves

SOON_S = 600.0


class Disk:
    """Takes states when it is let, and notes which."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, float]] = []
        self.tensors: list[torch.Tensor] = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.errors: list[Exception] = []
        self.threads: set[int] = set()

    def write(self, state: GlobalState) -> None:
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.may_end.acquire(timeout=SOON_S)
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append((state.step, float(state.parameters["w"][0])))
        self.tensors.append(state.parameters["w"])

    def let(self, count: int = 1) -> None:
        self.may_end.release(count)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.let(100)


def state_of(step: int, numel: int = 10) -> GlobalState:
    return GlobalState(step=step, parameters={"w": torch.full((numel,), float(step))}, note={"list": [step]})


def test_a_save_returns_while_the_state_is_still_written_elsewhere(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write)
    saves.hand_over(state_of(1))
    assert disk.begun.acquire(timeout=SOON_S)
    assert not saves.wait(0.01) and disk.taken == []
    disk.let()
    assert saves.wait(SOON_S) and disk.taken == [(1, 1.0)]
    assert threading.get_ident() not in disk.threads


def test_what_is_written_is_the_state_at_the_call(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write)
    state = state_of(1)
    saves.hand_over(state)
    state.parameters["w"].zero_()
    disk.let()
    assert saves.wait(SOON_S) and disk.taken == [(1, 1.0)]
    saves.hand_over(state, copy=False)
    disk.let()
    assert saves.wait(SOON_S) and disk.tensors[-1] is state.parameters["w"]


def test_the_newest_waits_and_one_that_waited_before_is_left_out(disk: Disk) -> None:
    told: list[str] = []
    saves = BackgroundSaves(disk.write, on_warning=told.append)
    saves.hand_over(state_of(1))
    assert disk.begun.acquire(timeout=SOON_S)
    for step in (2, 3, 4):
        saves.hand_over(state_of(step))
    disk.let(4)
    assert saves.wait(SOON_S)
    assert disk.taken == [(1, 1.0), (4, 4.0)]
    assert [line.split(" is left out")[0] for line in told] == [f"the checkpoint of step {step}" for step in (2, 3)]
    assert all(line.endswith("save less often, or to a faster place") for line in told)


def test_without_a_listener_what_is_left_out_is_a_python_warning(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write)
    saves.hand_over(state_of(1))
    assert disk.begun.acquire(timeout=SOON_S)
    saves.hand_over(state_of(2))
    with pytest.warns(RuntimeWarning, match="step 2 is left out"):
        saves.hand_over(state_of(3))
    disk.let(3)
    assert saves.wait(SOON_S)


def test_the_memory_of_copies_is_used_again_and_never_while_it_is_written(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write, on_warning=lambda words: None)
    disk.let(2)
    for step in (1, 2):
        saves.hand_over(state_of(step))
        assert saves.wait(SOON_S) and disk.begun.acquire(timeout=SOON_S)
    assert disk.tensors[0].data_ptr() == disk.tensors[1].data_ptr()
    for step in (3, 4, 5):
        saves.hand_over(state_of(step))
        if step == 3:
            assert disk.begun.acquire(timeout=SOON_S)
    disk.let(2)
    assert saves.wait(SOON_S)
    assert disk.taken == [(1, 1.0), (2, 2.0), (3, 3.0), (5, 5.0)]
    assert disk.tensors[2].data_ptr() != disk.tensors[3].data_ptr()


def test_a_model_of_another_shape_gets_memory_of_its_own(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write)
    disk.let(2)
    for step, numel in ((1, 10), (2, 11)):
        saves.hand_over(state_of(step, numel))
        assert saves.wait(SOON_S)
    assert disk.tensors[1].shape == (11,)


def test_without_a_listener_a_failure_is_raised_once_and_the_next_state_is_written_all_the_same(disk: Disk) -> None:
    saves = BackgroundSaves(disk.write)
    disk.errors.append(CheckpointError("the disk is full"))
    saves.hand_over(state_of(1))
    disk.let()
    with pytest.raises(CheckpointError, match="the disk is full"):
        saves.wait(SOON_S)
    assert saves.wait(SOON_S)
    disk.errors.append(CheckpointError("full once more"))
    saves.hand_over(state_of(2))
    disk.let()
    while saves._failure is None:
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match="full once more"):
        saves.hand_over(state_of(3))
    disk.let()
    assert saves.wait(SOON_S) and disk.taken == [(3, 3.0)]


def test_a_listener_hears_of_a_failure_and_nothing_is_raised(disk: Disk) -> None:
    told: list[str] = []
    saves = BackgroundSaves(disk.write, on_warning=told.append)
    disk.errors += [CheckpointError("the disk is full; make room"), KeyError("a slip")]
    disk.let(3)
    for step in (1, 2, 3):
        saves.hand_over(state_of(step))
        assert saves.wait(SOON_S)
    assert told[0] == "the disk is full; make room; training goes on without it"
    assert told[1].startswith("the checkpoint of step 2 could not be written: KeyError")
    assert disk.taken == [(3, 3.0)]


def test_a_listener_that_fails_keeps_nobody_waiting(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())

    def fail(words: str) -> None:
        raise RuntimeError(words)

    saves = BackgroundSaves(disk.write, on_warning=fail)
    disk.errors.append(CheckpointError("full"))
    disk.let(2)
    saves.hand_over(state_of(1))
    assert saves.wait(SOON_S) and ended.wait(SOON_S)
    saves.hand_over(state_of(2))
    assert saves.wait(SOON_S) and disk.taken == [(2, 2.0)]


def test_a_copy_for_which_no_memory_is_left_ends_no_training(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    told: list[str] = []
    saves = BackgroundSaves(disk.write, on_warning=told.append)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)
        saves.hand_over(state_of(1))
    assert "step 1 is left out" in told[0] and "copy=False" in told[0]
    disk.let()
    saves.hand_over(state_of(2))
    assert saves.wait(SOON_S) and disk.taken == [(2, 2.0)]
