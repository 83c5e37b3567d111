"""Elastic driver of the round engine: late results, late state, and catching up where replicas come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from thinwire.averaging.round_context import Progress
from thinwire.elastic.adaptive_local_steps import AdaptiveLocalSteps
from thinwire.sync.catch_up import leaps
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round, needed_for
from thinwire.sync.updates import LateOuterStep


class StepObserver(Protocol):
    """Receives the steps whose rounds are complete; added to `ElasticDriver.observers`."""

    def on_exchanged(self, step: int) -> None:
        """Receive a step whose due rounds are all applied: global parameters are those that hold after it."""
        ...


class LateState(Protocol):
    """The outer optimizer's state of a joining replica, still in transfer when training begins."""

    def is_here(self) -> bool:
        """Return whether `load_into` need not wait."""
        ...

    def load_into(self, engine: RoundEngine) -> None:
        """Wait for the state and load it.

        Raises:
            Expelled: It could not be fetched.
        """
        ...


class ElasticDriver:
    """Catch-up policy of an elastic run (see `CatchUp`): a replica too far behind skips the missing steps.

    A due round whose result has not arrived is overdue. With `tolerates_overdue`, training continues until its fragment
    is launched again: the next pseudo-gradient refers to the result. Results are applied in the order in which they
    were due, so every replica passes through the same global parameters.

    Args:
        known_step: Returns the furthest step at which any replica has launched a round.
        grace_steps: Steps that this replica may be behind and still do all of them: the others wait that long.
        tolerates_overdue: Whether training continues while rounds are overdue.
        own_pace: Makes this replica's pace from `launched` and `has_work`; None aims nowhere ahead of the others.

    Attributes:
        observers: Receive each completed step.
    """

    has_fixed_replicas = False
    closed_step = 0  # the coordinator answers for a closed round itself

    def __init__(
        self, known_step: Callable[[], int], *, grace_steps: float, tolerates_overdue: bool = False,
        own_pace: Callable[..., AdaptiveLocalSteps] | None = None,
    ) -> None:  # fmt: skip
        self.observers: list[StepObserver] = []
        self._engine: RoundEngine
        self._known_step = known_step
        self._grace_steps = grace_steps
        self._tolerates_overdue = tolerates_overdue
        self._pace = None if own_pace is None else own_pace(launched=self.launched_at, has_work=self.has_work)
        self._overdue: deque[tuple[int, Sequence[Round]]] = deque()
        self._late_state: LateState | None = None

    def bind(self, engine: RoundEngine) -> None:
        self._engine = engine

    def reset(self) -> None:
        """Nothing is remembered: the coordinator reports progress to all."""

    def hear(self, round: Round, progress: Progress, is_counted: bool) -> None:
        """Ignore it: the coordinator reports progress to all."""

    def begin_at(self, optimizer: DistributedOptimizer, step: int) -> None:
        """Continue from the global values that hold after a step; take part in the rounds in flight there."""
        optimizer.begin_at(step)
        # no round is in flight for longer than an interval
        for launched in range(max(1, step - self._engine.method.schedule.sync_interval), step + 1):
            for round in self._engine.launches(launched):
                if round.apply_step > step:
                    self._engine.launch(round)

    def await_state(self, state: LateState) -> None:
        """Apply no round before a state is loaded; it is loaded between two steps, at once if it is here."""
        self._late_state = state
        if state.is_here():
            self._load_late_state()

    def launched_at(self, step: int) -> tuple[int, ...]:
        """Return the fragments of the rounds that are launched after a step."""
        return tuple(round.fragment for round in self._engine.launches(step))

    def has_work(self, fragment: int) -> bool:
        """Return whether this replica has trained anything that no round of a fragment has counted."""
        return self._engine.state.work.since(fragment)[1] > 0

    def target(self, *, stop: int | None) -> int:
        """Return the step to be at before the next inner step, 0 to stay."""
        known_step, reached = self._known_step(), self._engine.state.reached_step
        is_behind = known_step - reached > self._grace_steps  # else the others still wait for this replica
        ahead = 0 if self._pace is None else self._pace.target_step(reached)
        wanted = max(known_step if is_behind else 0, ahead)
        return wanted if stop is None else min(stop, wanted)

    def steps(self, step: int, *, stop: int | None) -> Iterator[int]:
        """See `CatchUp.steps`: none while a launch needs overdue results. What is trained meanwhile counts later."""
        if not self._lacks_results(step):
            yield step
            yield from leaps(step, target=lambda: self.target(stop=stop), may_pass=self._may_pass)

    def launches(self, step: int) -> Iterator[Round]:
        """See `CatchUp.launches`; first applies what is overdue of a fragment, and all that was due before."""
        for round in self._engine.launches(step):
            while any(one.fragment == round.fragment for _, due in self._overdue for one in due):
                self._apply_next()
            yield round

    def applies(self, step: int) -> Iterator[Round]:
        # results may arrive in any order, and are applied in the order of their steps
        self._overdue.append((step, self._engine.applies(step)))
        while self._overdue and not (self._tolerates_overdue and not self._have_arrived(self._overdue[0][1])):
            yield from self._next_due()
        update = self._engine.update
        if self._overdue and isinstance(update, LateOuterStep):
            for round in self._overdue[-1][1]:
                update.defer(self._engine.update_state, round)

    def overdue(self) -> Iterator[Round]:
        self._load_late_state()
        while self._overdue:
            yield from self._next_due()

    def _apply_next(self) -> None:
        for round in self._next_due():
            self._engine.apply(round)

    def _next_due(self) -> Iterator[Round]:
        """Yield the rounds of the earliest overdue step; once they are applied, report the step."""
        self._load_late_state()
        step, due = self._overdue.popleft()
        yield from due
        for observer in self.observers:
            observer.on_exchanged(step)

    def _load_late_state(self) -> None:
        if self._late_state is not None:
            self._late_state.load_into(self._engine)
            self._late_state = None

    def _is_whole(self) -> bool:
        return self._late_state is None or self._late_state.is_here()

    def _have_arrived(self, rounds: Sequence[Round], *, step: int | None = None) -> bool:
        at = self._engine.state.reached_step if step is None else step
        return self._is_whole() and all(self._engine.has_arrived(round, step=at) for round in rounds)

    def _needed_at(self, step: int) -> list[Round]:
        """Return the overdue rounds that the launches after a step refer to."""
        return needed_for(set(self.launched_at(step)), self._overdue)

    def _lacks_results(self, step: int) -> bool:
        """Return whether a launch that others have passed, or whose state is late, cannot be done yet."""
        if not self._tolerates_overdue or (step > self._known_step() and self._is_whole()):
            return False
        # the next pseudo-gradient of a fragment refers to the result of its last round
        needed = self._needed_at(step)
        return bool(needed) and not self._have_arrived(needed)

    def _may_pass(self, step: int) -> bool:
        if step > self._known_step():  # the others may need this replica's training there: wait for nothing
            if self._tolerates_overdue:
                fragments = set(self.launched_at(step))
                due = [one for _, found in self._overdue for one in found if one.fragment in fragments]
            else:
                due = list(self._engine.applies(step))
            # a round launched at this very step is not in flight yet, and is waited for there
            due = [round for round in due if round.id in self._engine.state.in_flight]
            if due and not self._have_arrived(due, step=step):
                return False
        return not self._lacks_results(step)
