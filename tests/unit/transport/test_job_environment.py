"""Places that launchers' variables state, and what is left of them in a solo world."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from thinwire import compat
from thinwire.transport.job_environment import VISIBLE_GPUS, pin_gpus


@pytest.mark.parametrize(
    ("listed", "gpus", "local_ranks", "left"),
    [
        (None, 4, [2], "2"),
        (None, 4, [2, 3], "2,3"),
        (None, 2, [0, 1], None),  # all of them
        (None, 2, [3], "1"),  # more ranks than GPUs: they share
        ("7,5", 2, [1], "5"),
        ("GPU-a,GPU-b", 2, [0], "GPU-a"),
        ("6", 1, [3], "6"),  # the launcher has chosen
        (None, 1, [1], None),
        (None, 4, [], None),  # LOCAL_RANK is unknown
    ],
)
def test_a_replica_is_left_the_gpus_of_its_local_ranks(
    listed: str | None, gpus: int, local_ranks: Sequence[int], left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_gpus(listed, gpus, monkeypatch)
    monkeypatch.setattr(compat, "num_usable_gpus", lambda: len(os.environ[VISIBLE_GPUS].split(",")))
    pin_gpus(local_ranks)
    assert os.environ.get(VISIBLE_GPUS) == left


@pytest.mark.parametrize("listed", [None, "0,1"])
def test_cuda_that_runs_already_is_refused_and_the_choice_is_as_before(
    listed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_gpus(listed, 2, monkeypatch)
    monkeypatch.setattr(compat, "num_usable_gpus", lambda: 2)  # CUDA has read the variable before
    with pytest.raises(ValueError, match=r"CUDA runs in this process already; got 2 GPUs.*connect\(solo=True\) first"):
        pin_gpus([1])
    assert os.environ.get(VISIBLE_GPUS) == listed


def _have_gpus(listed: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if listed is None:
        monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    else:
        monkeypatch.setenv(VISIBLE_GPUS, listed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
