"""Schedule of a transformers trainer in an elastic run, whose steps may be passed over or come again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")

SCHEDULES: list[Callable[[torch.optim.Optimizer], LRScheduler]] = [
    lambda inner: LambdaLR(inner, lambda step: 1 - step / 100),
    lambda inner: StepLR(inner, step_size=3, gamma=0.5),
    lambda inner: CosineAnnealingLR(inner, T_max=50),
]


def _elastic_steps(of: Any) -> Any:
    from thinwire.integrations.hf import _ElasticSteps  # takes seconds, which each worker that collects would spend

    return _ElasticSteps(of)


def trainer(schedule: LRScheduler) -> Any:
    return SimpleNamespace(
        lr_scheduler=schedule, diloco=SimpleNamespace(steps_done=0, is_finished=False), _globalstep_last_logged=0,
        _initial_global_step=0,
    )  # fmt: skip


@pytest.mark.parametrize("make", SCHEDULES)
def test_the_rate_is_that_of_the_run_s_step_whether_steps_are_passed_over_or_come_again(
    make: Callable[[torch.optim.Optimizer], LRScheduler],
) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    found = trainer(make(inner))
    steps, state = _elastic_steps(found), SimpleNamespace(global_step=0)
    steps.on_train_begin(None, state, None)
    rates: dict[int, float] = {}
    # on by one, over six, back by ten after a lost state, and on
    for done in (*range(1, 12), *range(17, 25), *range(14, 30)):
        found.diloco.steps_done = done
        inner.step()
        steps.on_optimizer_step(None, state, None)
        rate = inner.param_groups[0]["lr"]
        assert state.global_step == done - 1
        assert rate == pytest.approx(rates.setdefault(done, rate))
        found.lr_scheduler.step()
        state.global_step += 1
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = make(plain)
    for done in range(1, 30):
        if done in rates:
            assert rates[done] == pytest.approx(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()


def test_a_schedule_that_follows_a_metric_is_left_alone() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    found = trainer(ReduceLROnPlateau(inner))
    steps, state = _elastic_steps(found), SimpleNamespace(global_step=0)
    steps.on_train_begin(None, state, None)
    found.diloco.steps_done = 9
    steps.on_optimizer_step(None, state, None)
    assert state.global_step == 8 and inner.param_groups[0]["lr"] == 0.1
