"""`plan.json`: what is read is what was written, and nothing else is taken for a plan."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.errors import DataError
from thinwire.planning.cluster import Cluster, Machine
from thinwire.planning.plan import Plan, load_plan, pareto, read_plan, save_plan
from thinwire.planning.search import PlanConstraints, make_plan
from thinwire.planning.training_task import TrainingTask


def small_plan() -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    rates = {"flops_per_s": 1e9, "float64_flops_per_s": 1e12, "up_bits_per_s": 1e6, "down_bits_per_s": 1e6}
    machines = tuple(Machine(name=name, **rates) for name in "ab")
    workload = TrainingTask(name="nano", model=model, tokens=1e6, seq_len=64, batch_size=4)
    wishes = PlanConstraints(intervals=(10, 30), overlaps=(1,), layers=(1,), min_replicas=2)
    return make_plan(workload, Cluster(machines=machines), wishes)


PLAN = small_plan()
GOOD: dict[str, Any] = json.loads(json.dumps(PLAN.to_json()))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json")
    assert found.settings == PLAN.settings()
    assert found.hosts == ("a", "b")
    assert found.prediction == PLAN.best.prediction
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_says_what_train_is_told_and_all_that_was_simulated() -> None:
    assert GOOD["train"]["replicas"] == 2 and GOOD["train"]["overlap_steps"] == "1"
    assert GOOD["train"]["steps"] == -(-1_000_000 // (2 * 4 * 64))
    assert len(GOOD["simulated"]) == len(PLAN.outlooks)
    assert all("total_s" in entry and "candidate" in entry for entry in GOOD["simulated"])


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "other", "format"),
        ("version", 2, "version 2"),
        ("train", [], "train"),
        ("train.method", 3, "train.method"),
        ("train.replicas", True, "train.replicas"),
        ("train.out", "/etc", "'out', which a plan does not decide"),
        ("train.steps", ..., "lacks 'steps'"),
        ("hosts", ["a"], "2 replicas"),
        ("hosts", [1, 2], "hosts must be a list of names"),
        ("predicted.step_s", -1.0, "predicted.step_s"),
        ("predicted.step_s", "0.3", "predicted.step_s"),
        ("predicted.compute_s", 1e9, "predicted.compute_s"),
        ("predicted.total_s", float("nan"), "predicted.total_s"),
        ("predicted.total_s", 10**4000, "predicted.total_s"),
        ("train.replicas", 10**4000, "replicas, got 2 names"),
        ("version", True, "version True"),
        ("predicted", None, "predicted"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_place(path: str, value: object, named: str) -> None:
    with pytest.raises(DataError, match=named):
        read_plan(changed(path, value))


def changed(path: str, value: object) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    place: Any = content
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = ["format", "version", "hosts", "train", "predicted", *(f"train.{name}" for name in GOOD["train"])]
PLACES += [f"predicted.{name}" for name in GOOD["predicted"]]


@given(path=st.sampled_from(PLACES), value=ANYTHING)
def test_anything_in_any_place_is_read_or_refused_in_one_line(path: str, value: object) -> None:
    try:
        read_plan(changed(path, value))
    except DataError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 400


@pytest.mark.parametrize("text", ["", "{", "[1]", "NaN", '{"format": Infinity}', "[" * 100_000])
def test_a_file_that_is_no_json_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"plan\.json"):
        load_plan(path)


@pytest.mark.parametrize("place", ["train", "hosts", "version", "predicted"])
def test_lists_in_lists_are_refused_however_deep(place: str, tmp_path: Path) -> None:
    """What can just be read may be nested too deep to be shown."""
    path = tmp_path / "plan.json"
    for depth in range(700, 1000):
        path.write_text(json.dumps(changed(place, "HERE")).replace('"HERE"', "[" * depth + "]" * depth))
        with pytest.raises(DataError, match=r"plan\.json") as refusal:
            load_plan(path)
        assert len(str(refusal.value).splitlines()) == 1


def test_where_the_file_cannot_be_written_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match=r"/plan\.json"):
        save_plan(PLAN, tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_is_not_there_or_far_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="thinwire plan"):
        load_plan(tmp_path / "none.json")
    long = tmp_path / "long.json"
    with long.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(DataError, match="more than"):
        load_plan(long)


def test_the_front_holds_what_nothing_beats_in_time_and_loss() -> None:
    front = pareto(PLAN.outlooks)
    for outlook in PLAN.outlooks:
        assert outlook.penalty is not None
        is_beaten = any(
            other.prediction.total_s < 0.99 * outlook.prediction.total_s
            and other.penalty is not None
            and other.penalty.share < outlook.penalty.share
            for other in PLAN.outlooks
        )
        assert not (is_beaten and outlook in front)
    times = [outlook.prediction.total_s for outlook in front]
    shares = [outlook.penalty.share for outlook in front if outlook.penalty is not None]
    assert times == sorted(times) and shares == sorted(shares, reverse=True)
