"""Stay of a replica in an elastic run under one number, and its loop policy: what `thinwire train` and `join` share."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from thinwire.elastic.adaptive_local_steps import AdaptiveLocalSteps
from thinwire.elastic.coordinator_session import CoordinatorSession, CoordinatorView, RoundLimits, StateOffer
from thinwire.elastic.elastic_method import ReplicaShards, elastic
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.join import JoinPlan, Membership, join
from thinwire.elastic.rounds import grace_steps, max_overdue_steps
from thinwire.errors import Refused, ThinwireError
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.elastic.job import JobTerms
from thinwire.training.elastic.local_snapshot import HeldState, LocalSnapshot
from thinwire.training.elastic.states import CheckpointPolicy, IncomingState, StateKeeper, take_in
from thinwire.training.loop import LoopPolicy
from thinwire.transport.addresses import ListenConfig
from thinwire.transport.secret import Secret

_SEEN = 32
# Seconds; a coarse clock may measure 0.
_LEAST_S = 1e-6


class StepThroughput:
    """Throughput of the latest steps, reported to the coordinator; `steps_s` are their times without waits."""

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


class ElasticPolicy(LoopPolicy):
    """Loop policy of an elastic replica: membership, pauses, throughput, and a slow start.

    A fresh replica, whose inner optimizer has no state yet, raises its learning rate slowly in a running job.
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
        active = self._session.active()
        return active.index(self._membership.replica), len(active)

    def lr_scale(self) -> float:
        """Return a factor that rises to 1 over the first own steps."""
        return min(1.0, (self._own_steps + 1) / self._ramp_steps) if self._ramp_steps else 1.0


_JOIN_S = 60.0
_Job = TypeVar("_Job", bound=JobTerms)


class ElasticStay(Generic[_Job]):
    """Stay in a run, from the first message to the coordinator to the last.

    Without `listen` it listens at the address from which the coordinator is reached. `on_silence` is called while the
    coordinator is silent; `report` by default.

    Raises:
        ThinwireError: The job cannot be joined.
    """

    def __init__(
        self, invitation: Invitation, *, secret: Secret, read_job: Callable[[Mapping[str, Any]], _Job],
        listen: ListenConfig | None, report: Callable[[str], None], on_silence: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        def plan_of(values: Mapping[str, Any]) -> JoinPlan:
            job = read_job(values)
            overdue_steps = max_overdue_steps(sync_interval=job.sync_interval, overlap_steps=job.overlap_steps)
            last_step = float(job.last_step) or float("inf")
            limits = RoundLimits(overdue_steps=overdue_steps if job.allows_overdue else 0.0, last_step=last_step)
            return JoinPlan(num_replicas=job.num_replicas, interval_steps=job.sync_interval, limits=limits)

        self.membership, self._address = join(
            invitation, secret=secret, plan_of=plan_of, listen=listen, deadline_s=_JOIN_S, warn=on_silence or report
        )
        self.job = job = read_job(self.membership.job)
        self._report = report
        self._keeper: StateKeeper | None = None
        self._coming: IncomingState | None = None
        self.throughput = StepThroughput(self.membership.session, interval_steps=job.sync_interval)
        own_pace = partial(
            AdaptiveLocalSteps, peers=self.membership.session.pace, own_s=lambda: self.throughput.steps_s,
            interval_steps=job.sync_interval, slack_steps=job.overlap_steps / 4,
        )  # fmt: skip
        self.driver = ElasticDriver(
            self.membership.rounds.known_step, tolerates_overdue=job.allows_overdue, own_pace=own_pace,
            grace_steps=grace_steps(sync_interval=job.sync_interval, overlap_steps=job.overlap_steps),
        )  # fmt: skip

    @property
    def has_kept(self) -> bool:
        return self._keeper is not None and self._keeper.has_kept

    def elastic_method(self, method: Method, *, pieces: ReplicaShards | None = None) -> Method:
        return elastic(
            method, session=self.membership.rounds, pieces=pieces,
            find=lambda text: self.membership.session.send("note", level="warning", text=text),
        )  # fmt: skip

    def announce(
        self, *, corpus: str, num_windows: int, held: HeldState | None = None, disk_step: int = 0,
        first_values: str = "",
    ) -> StateOffer:  # fmt: skip
        """Report what this replica holds; return the state that the coordinator offers it. It may refuse."""
        self.membership.announce(
            corpus=corpus, num_windows=num_windows, address=self._address, disk_step=disk_step,
            held_step=0 if held is None else held.step, era=0 if held is None else held.era, first_values=first_values,
        )  # fmt: skip

        def offer_of(view: CoordinatorView) -> StateOffer | None:
            if view.refused_why:
                raise Refused(f"the job refuses this replica: {view.refused_why}")
            return view.offer if view.has_started else None

        offer: StateOffer = self.membership.session.wait_for(offer_of, deadline_s=None, why="")
        return offer

    def begin(
        self, offer: StateOffer, *, model: nn.Module, optimizer: DistributedOptimizer, policy: CheckpointPolicy,
        checkpoints: GlobalCheckpoints | None = None, kept: LocalSnapshot | None = None,
        held: HeldState | None = None, may_begin_early: bool,
    ) -> int:  # fmt: skip
        """Take the offered state in and become active; return the step to go on from. See `take_in`."""
        membership = self.membership
        self._keeper = StateKeeper(
            membership, model=model, optimizer=optimizer, policy=policy, warn=self._report, kept=kept
        )
        self.driver.observers.append(self._keeper)
        step, self._coming = take_in(
            offer, membership=membership, model=model, optimizer=optimizer, checkpoints=checkpoints, held=held,
            report=self._report, may_begin_early=may_begin_early,
        )  # fmt: skip
        if self._coming is not None:
            self.driver.await_state(self._coming)
        session = membership.session
        if not step:
            session.pace.start(now_s=time.monotonic())
        session.reach(step)
        session.send_reliably("active", step=step)
        me = membership.replica
        session.wait_for(lambda view: me in view.neighbours and view.neighbours[me].is_active, deadline_s=None, why="")
        session.stop_resending("active")
        self._report(f"replica {membership.replica} takes part from step {step}")
        return step

    def finish(self, note: Mapping[str, Any]) -> Mapping[str, Any]:
        """Report the end of this replica's training; wait for that of the run, and return its last message."""
        session = self.membership.session
        session.send_reliably("done", note=dict(note))
        finish: Mapping[str, Any] = session.wait_for(lambda view: view.finish, deadline_s=None, why="")
        session.stop_resending("done")
        return finish

    def stop_states(self) -> None:
        """Stop fetching and finish publishing states."""
        if self._coming is not None:
            self._coming.close()
        if self._keeper is not None:
            self._keeper.close()

    def close(self, *, why: str = "") -> None:
        self.membership.close(why=why)
