"""Catch-up policies: which steps a replica passes over, and which rounds it launches and applies there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from thinwire.averaging.round_context import Progress
from thinwire.errors import PayloadError
from thinwire.sync.schedule import Round

# Own inner steps over which the others' speed is measured: fewer would measure one pause.
_LEAST_STEPS = 4
# The others' steps for each own step from which on they count as faster: less is jitter.
_LEAST_RATE = 1.25
# Catching up takes time in which the others advance; more leaps in a row would leave none for training.
_MOST_LEAPS = 3


class CatchUp(Protocol):
    """Policy for a replica that is behind the others.

    Attributes:
        has_fixed_replicas: Whether the replicas start together and stay, so that they can compare their set-ups.
    """

    has_fixed_replicas: bool

    @property
    def closed_step(self) -> int:
        """A step up to which all rounds are certainly closed."""

    def bind(self, engine: Any) -> None:
        """Attach the policy to a `RoundEngine`; called once, by the engine."""

    def reset(self) -> None:
        """Forget the progress of the others: the run continues from an earlier state."""

    def hear(self, round: Round, progress: Progress, is_counted: bool) -> None:
        """Record the latest progress of the others; thread-safe."""

    def steps(self, step: int, *, stop: int | None) -> Iterator[int]:
        """Yield the steps whose rounds are exchanged now: `step`, and those passed over; none to stay before `step`.

        Args:
            step: The inner step that this replica has done.
            stop: A step that must not be passed over.
        """

    def launches(self, step: int) -> Iterable[Round]: ...

    def applies(self, step: int) -> Iterable[Round]: ...

    def overdue(self) -> Iterable[Round]:
        """Yield the rounds that were due and not applied, in the order in which they were due."""


class QuorumCatchUp:
    """Policy with a quorum server: follows the replica that closes the rounds.

    A replica that was late once, because it slept, rejoins the others when it passes over what they did meanwhile. A
    slower one would be late again at once: while it does a step, the others close rounds. So, once it knows by how
    much they are faster, it aims at where they will be after its next step, and sends its parts of the rounds until
    there ahead of time. Without a quorum no progress is heard and no step is passed over.

    Example:
        >>> from types import SimpleNamespace
        >>> from thinwire.sync.in_flight import UncountedWork
        >>> work, round = UncountedWork(num_fragments=1), Round(id=0, fragment=0, launch_step=10, apply_step=12)
        >>> others = QuorumCatchUp()
        >>> others.bind(SimpleNamespace(state=SimpleNamespace(work=work), drift_steps=60))
        >>> others.hear(round, Progress(step=30, closed_step=28), is_counted=False)
        >>> others.target(stop=None), others.target(stop=20)
        (30, 20)
        >>> for _ in range(5):
        ...     work.add_step(num_tokens=1)
        >>> others.hear(round, Progress(step=45, closed_step=45), is_counted=False)
        >>> others.rate, others.target(stop=100)
        (3.0, 47)
    """

    has_fixed_replicas = True

    def __init__(self) -> None:
        self._engine: Any
        self._lock = threading.Lock()
        self.reset()

    def bind(self, engine: Any) -> None:
        self._engine = engine

    def reset(self) -> None:
        self.rate = 1.0  # steps of the others for each step of this replica
        self._progress = Progress()
        self._heard_at = 0  # this replica's own steps when it heard of that progress
        self._base = 0, 0  # a step of the others and this replica's own steps then: where `rate` is measured from

    @property
    def known_step(self) -> int:
        return self._progress.step

    @property
    def closed_step(self) -> int:
        return self._progress.closed_step

    def hear(self, round: Round, progress: Progress, is_counted: bool) -> None:
        """Record the latest progress of the others; thread-safe.

        Args:
            round: The round whose message carried it.
            progress: Their progress.
            is_counted: Whether this replica was in time, and has no reason to hurry unless it does already.

        Raises:
            PayloadError: They cannot be that far: they would have waited for this replica.
        """
        most = round.launch_step + self._engine.drift_steps
        if progress.step > most:
            raise PayloadError(
                f"round {round.id} of step {round.launch_step}: the others are said to be at step {progress.step}, and "
                f"this method lets them come to {most} at most; run the same thinwire and options on all hosts"
            )
        with self._lock:
            num_steps = self._engine.state.work.num_steps
            # messages of several rounds may arrive in any order
            if progress.step <= self._progress.step or (is_counted and self.rate == 1):
                return
            base_step, base_at = self._base
            if base_step and num_steps - base_at >= _LEAST_STEPS:
                rate = (progress.step - base_step) / (num_steps - base_at)
                self.rate = rate if rate >= _LEAST_RATE else 1.0
            if num_steps - base_at >= _LEAST_STEPS or not base_step or num_steps == base_at:
                self._base = progress.step, num_steps
            self._progress, self._heard_at = progress, num_steps

    def target(self, *, stop: int | None) -> int:
        """Return the step to be at before the next inner step, 0 where nothing is known.

        Args:
            stop: A step that must not be passed over. Without one, the target is the last known step: the others may
                have ended there.
        """
        with self._lock:
            if stop is None or not self.known_step:
                return self.known_step
            # where they are by now, and where they will be after this replica's next step
            num_steps = self._engine.state.work.num_steps - self._heard_at
            return min(stop, int(self.known_step + self.rate * num_steps + self.rate - 1))

    def steps(self, step: int, *, stop: int | None) -> Iterator[int]:
        yield step
        if self._progress.step:  # nothing is known without a quorum
            yield from leaps(step, target=lambda: self.target(stop=stop), may_pass=self._may_pass)

    def launches(self, step: int) -> Sequence[Round]:
        rounds: Sequence[Round] = self._engine.launches(step)
        return rounds

    def applies(self, step: int) -> Sequence[Round]:
        rounds: Sequence[Round] = self._engine.applies(step)
        return rounds

    def overdue(self) -> Sequence[Round]:
        return ()  # each round is applied when it is due

    def _may_pass(self, step: int) -> bool:
        # beyond the known step the others may need this replica's training, so it waits for no result there
        return step <= self.known_step or all(
            self._engine.has_arrived(round, step=step) for round in self._engine.applies(step)
        )


def leaps(step: int, *, target: Callable[[], int], may_pass: Callable[[int], bool]) -> Iterator[int]:
    """Yield the steps that a replica passes over.

    Args:
        step: The last step exchanged.
        target: Returns the step to be at; asked again after each leap, since the others advance meanwhile.
        may_pass: Whether a step can be passed over without waiting.
    """
    for _ in range(_MOST_LEAPS):
        for passed in range(step + 1, target() + 1):
            if not may_pass(passed):
                break
            yield passed
            step = passed
