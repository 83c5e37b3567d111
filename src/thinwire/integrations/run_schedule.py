"""Learning-rate schedule that follows the steps of an elastic run, which may be passed over or come again."""

from __future__ import annotations

import copy
import warnings

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class RunSchedule:
    """Moves a schedule to the step that a run has reached.

    Args:
        schedule: Before its first step; one that follows a metric, not the steps, is left alone.
    """

    def __init__(self, schedule: object) -> None:
        is_by_steps = isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau)
        self._schedule = schedule if isinstance(schedule, LRScheduler) and is_by_steps else None
        if self._schedule is not None:
            self._first_state = copy.deepcopy(self._schedule.state_dict())
            self._first_rates = [group["lr"] for group in self._schedule.optimizer.param_groups]

    def move_by(self, steps: int) -> None:
        """Move it by steps, forwards or back."""
        if self._schedule is not None:
            self.move_to(self._schedule.last_epoch + steps)

    def move_to(self, step: int) -> None:
        """Move it to a step, forwards or back."""
        if (schedule := self._schedule) is None:
            return
        if schedule.last_epoch > step:  # this trainer lost its state, and goes on from an earlier one of the run
            schedule.load_state_dict(copy.deepcopy(self._first_state))
            for group, rate in zip(schedule.optimizer.param_groups, self._first_rates, strict=True):
                group["lr"] = rate
        with warnings.catch_warnings():  # torch warns of a schedule that moves before the optimizer's first step
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            while schedule.last_epoch < step:
                schedule.step()
