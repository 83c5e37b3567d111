"""States with NaN or infinity: neither written for this replica or for others, nor gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic_engine import build
from test_elastic_faults import Worker, street

import thinwire.training.elastic.local_snapshot as kept_state
from thinwire.elastic.global_state import GlobalState, non_finite, spans
from thinwire.runlog.run_identity import RunIdentity
from thinwire.training.elastic.local_snapshot import LocalSnapshot

__all__ = ["street"]


RUN = RunIdentity(run=16 * "a", config_digest=32 * "0", incarnations=(16 * "b",))


def file_of(path: Path) -> LocalSnapshot:
    return LocalSnapshot(path, run=RUN, warn=pytest.fail)


def state_of(parameter: float, inner: float) -> GlobalState:
    parameters, outer = {"w": torch.full((3,), parameter)}, {"inner.exp_avg": torch.full((3,), inner)}
    return GlobalState(step=4, parameters=parameters, outer=outer, note={"run": RUN.stamp(), "era": 0})


@pytest.mark.parametrize(
    ("state", "bad"),
    [
        (state_of(1.0, 2.0), ""),
        (state_of(float("nan"), 2.0), "w"),
        (state_of(1.0, float("nan")), "inner.exp_avg"),
        (state_of(1.0, float("inf")), "inner.exp_avg"),
        (state_of(float("-inf"), 1.0), ""),  # a frozen mask
        (state_of(3e38, 3e38), ""),  # finite, though the sum is not
    ],
)
def test_a_state_with_nan_on_the_disk_is_none(tmp_path: Path, state: GlobalState, bad: str) -> None:
    assert non_finite(state) == bad
    with (tmp_path / "state").open("wb") as file:
        for span in spans(state):
            file.write(span)
    held = file_of(tmp_path / "state").read()
    assert (held is None) == bool(bad)


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_replica_whose_moments_are_nan_keeps_no_state(
    tmp_path: Path, street: Any, is_bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Worker = street(1).workers[0]
    moments = {"exp_avg": torch.full((3,), float("nan") if is_bad else 1.0)}
    monkeypatch.setattr(kept_state, "inner_tensors", lambda inner, model: moments)
    kept = file_of(tmp_path / "kept" / "state")
    assert kept.offer(4, era=0, every=4, model=build(), optimizer=worker.optimizer) is not is_bad
    kept.close()
    assert (tmp_path / "kept" / "state").exists() is not is_bad
