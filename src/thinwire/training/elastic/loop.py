"""Training loop policy of an elastic replica, and its throughput."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.join import Membership
from thinwire.errors import ThinwireError
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.elastic.replica_ranks import Rank0Driver
from thinwire.training.loop import LoopSetup, Training

_SEEN = 32
# Seconds; a coarse clock may measure 0.
_LEAST_S = 1e-6


class StepThroughput:
    """Throughput of the latest steps, reported to the coordinator.

    Args:
        session: Session with the coordinator.
        interval_steps: H, inner steps.
        now: Clock in seconds that never goes back.

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
        """Record a step.

        Args:
            took_s: Seconds without waits.
            step: Inner step reached, skipped steps among them.
            tokens: Tokens trained on.
        """
        if len(self._seen) == 1:
            self.steps_s.clear()  # the first step warms up
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


# AdamW without state steps by the sign of each gradient, so a replica that joins a running job ramps up.
_MOST_RAMP_STEPS = 20


class Left(ThinwireError):
    """A replica was asked to leave, and has."""


class ElasticPolicy:
    """Loop policy of an elastic replica: membership, pauses, throughput, and a slow start; see `LoopPolicy`.

    Args:
        membership: This replica's membership in the job.
        optimizer: The wrapped optimizer.
        throughput: Records this replica's steps.
        tokens_per_step: Tokens of this replica's batch.
        step: Inner steps that the run has done already.
        is_fresh: Whether the inner optimizer has no state yet: in a running job, the learning rate then rises slowly.
    """

    def __init__(
        self, membership: Membership, *, optimizer: DistributedOptimizer, throughput: StepThroughput,
        tokens_per_step: int, step: int, is_fresh: bool,
    ) -> None:  # fmt: skip
        self._membership = membership
        self._session = membership.session
        self._optimizer = optimizer
        self._throughput = throughput
        self._tokens_per_step = tokens_per_step
        self._ramp_steps = min(_MOST_RAMP_STEPS, optimizer.method.schedule.sync_interval) if step and is_fresh else 0
        self._own_steps = 0

    def before_step(self) -> None:
        """Wait while the run is paused.

        Raises:
            Left: This replica was asked to leave.
        """
        session = self._session
        session.check()
        if session.view.is_paused:
            session.wait_for(lambda view: not view.is_paused or view.leave_why, deadline_s=None, why="")
        if session.view.leave_why:
            self._optimizer.engine.flush()
            raise Left(f"replica {self._membership.replica} {session.view.leave_why}")

    def after_step(self, step: int, *, took_s: float, num_tokens: int = 0) -> None:
        """Record a step, of `tokens_per_step` where it counted no tokens itself."""
        self._own_steps += 1
        self._throughput.add_step(took_s=took_s, step=step, tokens=num_tokens or self._tokens_per_step)

    def after_report(self, loss: float) -> None:
        """Report the loss; 0 stands for none."""
        self._session.report_work(loss=loss if math.isfinite(loss) and loss > 0 else 0.0)

    def before_evaluation(self) -> None:
        """Apply overdue rounds, so that all replicas evaluate the same parameters."""
        self._optimizer.engine.apply_overdue()

    def share(self) -> tuple[int, int]:
        """Return this replica's place among the active ones, and their number."""
        active = self._session.active()
        return active.index(self._membership.replica), len(active)

    def lr_scale(self) -> float:
        """Return a factor that rises to 1 over the first own steps."""
        return min(1.0, (self._own_steps + 1) / self._ramp_steps) if self._ramp_steps else 1.0


def elastic_training(
    setup: LoopSetup, *, membership: Membership, throughput: StepThroughput, step: int, is_fresh: bool = True,
    rank0: Rank0Driver | None = None,
) -> Training:  # fmt: skip
    """Return the training loop of an elastic replica; checkpoints are written by `StateKeeper`.

    Args:
        setup: What the loop works with.
        membership: This replica's membership in the job.
        throughput: Records this replica's steps.
        step: Inner steps that the run has done already.
        is_fresh: Whether the inner optimizer has no state yet.
        rank0: Drives the ranks of a replica of several ranks.
    """
    config, optimizer = setup.config, setup.optimizer
    assert config.data.batch_size is not None and config.model.seq_len is not None
    policy = ElasticPolicy(
        membership, optimizer=optimizer, throughput=throughput,
        tokens_per_step=config.data.batch_size * config.model.seq_len, step=step, is_fresh=is_fresh,
    )  # fmt: skip
    return Training(setup, policy=policy, passes=rank0, step=step)
