"""The training loop of a replica that may be paused, told to leave, or let go."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.join import Membership
from thinwire.errors import ThinwireError
from thinwire.monitor.record.recorder import Recorder
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.config import TrainConfig
from thinwire.training.drift import watch_for
from thinwire.training.elastic.replica_ranks import Rank0Driver
from thinwire.training.loop import Batch, Batches, Training
from thinwire.training.metrics import Meter

_SEEN = 32
# A step cannot take no time at all, whatever a clock says.
_LEAST_S = 1e-6


class StepThroughput:
    """A replica's latest steps; each is told to the session, and so to the others and to people.

    Args:
        session: This replica's seat.
        interval_steps: H, inner steps.
        now: Gives seconds that only grow.

    Attributes:
        steps_s: Times of the latest steps without waits, in seconds.
    """

    def __init__(
        self, session: CoordinatorSession, *, interval_steps: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps_s: deque[float] = deque(maxlen=_SEEN)
        self._session = session
        self._interval_steps = interval_steps
        self._now = now
        self._seen: deque[tuple[int, int, float]] = deque(maxlen=_SEEN + 1)
        self._tokens = 0

    def add_step(self, *, took_s: float, step: int, tokens: int) -> None:
        """Take in a step.

        Args:
            took_s: Seconds without waits.
            step: Where the replica is after it, and after what it passed over.
            tokens: What it trained on.
        """
        if len(self._seen) == 1:
            self.steps_s.clear()  # the first step warms up: it says little of the others, once there is one
        self.steps_s.append(max(_LEAST_S, took_s))
        self._tokens += tokens
        self._seen.append((step, self._tokens, self._now()))
        session, (first_step, first_tokens, first_s) = self._session, self._seen[0]
        session.reach(step)
        session.report_work(step_s=statistics.median(self.steps_s))
        if step > first_step:
            session.report_work(
                steps_per_interval=self._interval_steps * (len(self._seen) - 1) / (step - first_step),
                tokens_s=(self._tokens - first_tokens) / max(_LEAST_S, self._seen[-1][2] - first_s),
            )


# AdamW without a past steps by the sign of each gradient; so a replica that comes in the middle of a run begins slowly.
_MOST_RAMP_STEPS = 20


class Left(ThinwireError):
    """A replica was told to leave, and has."""


class ElasticTraining(Training):
    """See `Training`; checkpoints are the `StateKeeper`'s business.

    Args:
        config: Resolved options.
        model: A language model on `device`.
        optimizer: Over it, with a seat.
        batches: This replica's data.
        held_out: Gives so many batches (at most) that nobody trains on.
        meter: Takes the metrics.
        device: Where the model is.
        membership: This replica's seat.
        step: Inner steps that the run has done already.
        is_fresh: Whether the inner optimizer remembers nothing yet.
        own_work: Takes this replica's steps.
        driver: The ranks that this replica is made of, where there are several; this one leads.
        recorder: Takes each step's time and loss.
    """

    def __init__(
        self, config: TrainConfig, *, model: nn.Module, optimizer: DistributedOptimizer, batches: Batches,
        held_out: Callable[[int], Iterable[Batch]], meter: Meter, device: torch.device, membership: Membership,
        step: int, own_work: StepThroughput, is_fresh: bool = True, driver: Rank0Driver | None = None,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            config, model=model, optimizer=optimizer, batches=batches, held_out=held_out, meter=meter,
            checkpoints=None, device=device, watch=watch_for(config, optimizer, log=membership.transport.log),
            recorder=recorder,
        )  # fmt: skip
        self.step = self._reported_step = step
        self._membership = membership
        self._own_work = own_work
        self._driver = driver
        self._own_steps = 0
        if driver is not None:  # which knows how its own ranks go forward and back
            self._passes = driver.passes
        if not step:
            membership.session.pace.start(now_s=time.monotonic())
        self._ramp_steps = min(_MOST_RAMP_STEPS, optimizer.method.schedule.sync_interval) if step and is_fresh else 0

    def share(self) -> tuple[int, int]:
        """Return which part of an evaluation is this replica's, and how many there are: by those that are here."""
        active = self._membership.session.active()
        return active.index(self._membership.replica), len(active)

    def evaluate(self, num_batches: int, *, part: int = 0, num_parts: int = 1) -> tuple[float, int]:
        """See `Training.evaluate`; what all replicas share in evaluating is the same on all of them."""
        self._optimizer.engine.take_in_overdue()
        return super().evaluate(num_batches, part=part, num_parts=num_parts)

    def lr_factor(self) -> float:
        """Return the present step's learning rate as a share of its peak: less in this replica's own first steps."""
        ramp = min(1.0, (self._own_steps + 1) / self._ramp_steps) if self._ramp_steps else 1.0
        return ramp * super().lr_factor()

    def _backward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._driver is None:
            return super()._backward(tokens, targets)
        return self._driver.backward(tokens, targets, factor=self.lr_factor())

    def _clip(self) -> None:
        if self._driver is None:
            super()._clip()
        else:
            self._driver.clip()

    def _held_out_nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (
            super()._held_out_nll(tokens, targets) if self._driver is None else self._driver.held_out(tokens, targets)
        )

    def _report(self) -> None:
        super()._report()
        loss = self._meter.latest_loss
        self._membership.session.report_work(loss=loss if math.isfinite(loss) and loss > 0 else 0.0)

    def _train_step(self) -> None:
        session = self._membership.session
        session.check()
        if session.view.is_paused:
            self._rest()
        if session.view.leave_why:
            self._optimizer.engine.flush()
            raise Left(f"replica {self._membership.replica} {session.view.leave_why}")
        began_s, stalled_s = time.monotonic(), self._optimizer.statistics.stalled_s
        super()._train_step()
        self._own_steps += 1
        took_s = time.monotonic() - began_s - (self._optimizer.statistics.stalled_s - stalled_s)
        assert self._config.batch_size is not None and self._config.seq_len is not None
        tokens = self._config.batch_size * self._config.seq_len
        self._own_work.add_step(took_s=took_s, step=self.step, tokens=tokens)

    def _rest(self) -> None:
        """Wait until the pause is over."""
        session = self._membership.session
        session.wait_for(lambda view: not view.is_paused or view.leave_why, deadline_s=None, why="")
