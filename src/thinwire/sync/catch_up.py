"""Catching up: the steps that a late replica must skip to rejoin the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from thinwire.averaging.round_context import Progress
from thinwire.errors import PayloadError
from thinwire.sync.schedule import Round
from thinwire.sync.uncounted_work import UncountedWork

# So many inner steps are a measure of speed, and so much faster must the others be to count as faster.
_LEAST_STEPS = 4
_LEAST_RATE = 1.25


class CatchUp(Protocol):
    """A catch-up policy: what the engine asks about the progress of the others."""

    @property
    def known_step(self) -> int:
        """A step that the others have reached for certain, 0 where nothing is known."""
        ...

    @property
    def closed_step(self) -> int:
        """A step up to which all rounds are closed for certain."""
        ...

    def hear(self, round: Round, progress: Progress, is_counted: bool) -> None:
        """Record the latest progress of the others; thread-safe."""
        ...

    def target(self, *, stop: int | None) -> int:
        """Return the step to be at before the next inner step, 0 where nothing is known."""
        ...


class QuorumCatchUp:
    """Policy with a quorum server: follows the replica that closes the rounds.

    One that is late once, because it slept, is with the others again when it passes over what they did meanwhile. One
    that is slower would be late again at once: while it does a step, the others close rounds. So, once it knows by how
    much they are faster, it aims at where they will be after its next step, and sends its parts of the rounds until
    there ahead of time.

    Args:
        work: What this replica does meanwhile.
        drift_steps: How many steps the others may get ahead of a round that this replica has launched.

    Example:
        >>> work, round = UncountedWork(num_fragments=1), Round(id=0, fragment=0, launch_step=10, apply_step=12)
        >>> others = QuorumCatchUp(work, drift_steps=60)
        >>> others.hear(round, Progress(step=30, closed_step=28), is_counted=False)
        >>> others.target(stop=None), others.target(stop=20)
        (30, 20)
        >>> for _ in range(5):
        ...     work.add_step(num_tokens=1)
        >>> others.hear(round, Progress(step=45, closed_step=45), is_counted=False)
        >>> others.rate, others.target(stop=100)
        (3.0, 47)
    """

    def __init__(self, work: UncountedWork, *, drift_steps: int) -> None:
        self.rate = 1.0
        self._drift_steps = drift_steps
        self._work = work
        self._progress = Progress()
        self._heard_at = 0
        self._base = 0, 0
        self._lock = threading.Lock()

    @property
    def known_step(self) -> int:
        """A step that the others have reached for certain, 0 where nothing is known."""
        return self._progress.step

    @property
    def closed_step(self) -> int:
        """A step up to which all rounds are closed for certain."""
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
        most = round.launch_step + self._drift_steps
        if progress.step > most:
            raise PayloadError(
                f"round {round.id} of step {round.launch_step}: the others are said to be at step {progress.step}, and "
                f"this method lets them come to {most} at most; run the same thinwire and options on all hosts"
            )
        with self._lock:
            num_steps = self._work.num_steps
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
            stop: A step that must not be passed over. Where there is none, the others may have ended where they were
                last heard of, so that is where it ends.
        """
        with self._lock:
            if stop is None or not self.known_step:
                return self.known_step
            num_steps = self._work.num_steps - self._heard_at
            return min(stop, int(self.known_step + self.rate * num_steps + self.rate - 1))


class ElasticCatchUp:
    """Policy of an elastic run: a replica that is too far behind the furthest one skips the missing steps.

    Args:
        known: Returns the furthest step at which any replica has launched a round.
        reached: Returns the step that this replica is at.
        patience_steps: By so many steps it may be behind and still do all of them: the others wait that long.
        aim: Returns for a step that this replica is at where to be before its next one, so that it is not behind
            later; 0 for nowhere.

    Example:
        >>> pace = ElasticCatchUp(known=lambda: 30, reached=lambda: 25, patience_steps=3.0)
        >>> pace.target(stop=100), pace.target(stop=28)
        (30, 28)
        >>> ElasticCatchUp(known=lambda: 30, reached=lambda: 27, patience_steps=3.0).target(stop=None)
        0
    """

    closed_step = 0

    def __init__(
        self, *, known: Callable[[], int], reached: Callable[[], int], patience_steps: float,
        aim: Callable[[int], int] = lambda reached: 0,
    ) -> None:  # fmt: skip
        self._aim = aim
        self._known = known
        self._reached = reached
        self._patience_steps = patience_steps

    @property
    def known_step(self) -> int:
        """See `CatchUp.known_step`."""
        return self._known()

    def hear(self, round: Round, progress: Progress, is_counted: bool) -> None:
        """Ignore it: the coordinator reports progress to all."""

    def target(self, *, stop: int | None) -> int:
        """See `CatchUp.target`."""
        known_step, reached = self._known(), self._reached()
        is_behind = known_step - reached > self._patience_steps
        wanted = max(known_step if is_behind else 0, self._aim(reached))
        return wanted if stop is None else min(stop, wanted)
