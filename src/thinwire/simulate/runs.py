"""What a simulated training is told and what it tells: schedules, replicas with their step times and outages, a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, Protocol

from thinwire.simulate.exchange_model import RoundTimes


class Round(Protocol):
    """One exchange of one fragment, as `thinwire.sync.schedule.Round`."""

    @property
    def id(self) -> int:
        """Running number, in the order of launches."""
        ...

    @property
    def fragment(self) -> int:
        """The fragment."""
        ...

    @property
    def channel(self) -> int:
        """What of it."""
        ...

    @property
    def apply_step(self) -> int:
        """The step after which the replica that was asked for applies the result, not before that of the launch."""
        ...


class Schedule(Protocol):
    """When rounds are launched, and when they are applied, as `thinwire.sync.schedule.Schedule`."""

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return the rounds to launch after a step, the same for all replicas but for the steps to apply them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReplica:
    """How fast a replica computes, and when it is gone.

    Attributes:
        step_s: Seconds of an inner step: of each, or the median where `sigma` is above 0.
        sigma: Steps vary log-normally, by so much in their logarithm.
        outages: Pairs of the times at which it dies and returns, ascending; infinity for one that does not return. What
            it was computing is lost. It returns into the step that the fastest replica is in.

    Raises:
        ValueError: A number is out of its range.
    """

    step_s: float
    sigma: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and isfinite(self.step_s) and self.sigma >= 0 and isfinite(self.sigma)):
            raise ValueError(
                f"step_s must be above 0 and sigma at least 0, both finite, got {self.step_s} and {self.sigma}"
            )
        times = [time_s for outage in self.outages for time_s in outage]
        if not all(before < after for before, after in zip([-1.0, *times], times, strict=False)):
            raise ValueError(f"outages must be pairs of times from 0 on that grow, got {self.outages}")


class Stall(NamedTuple):
    """A wait for rounds that were not done when they had to be applied.

    Attributes:
        replica: Who waited.
        step: After which inner step.
        seconds: How long.
    """

    replica: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """What came of a simulated training.

    Attributes:
        step_ends_s: For each replica, when each of its steps was done, with what was applied after it. Steps that it
            was gone for are missing.
        last_step: For each replica, the number of its last step.
        compute_s: For each replica, the seconds in which it computed steps that it finished.
        finished_s: For each replica, when its last step was done.
        stalls: All waits, in the order of their ends.
        rounds: All rounds, in the order of their ends, and then those that never ended.
        link_bits: The bits that each link of the cluster carried.
        peak_bits_per_s: The highest rate of each link.
    """

    step_ends_s: tuple[tuple[float, ...], ...]
    last_step: tuple[int, ...]
    compute_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    stalls: tuple[Stall, ...]
    rounds: tuple[RoundTimes, ...]
    link_bits: tuple[float, ...]
    peak_bits_per_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """When the last replica was done."""
        return max(self.finished_s, default=0.0)

    @property
    def compute_utilisation(self) -> float:
        """The part of all replicas' time until the end in which they computed steps that count."""
        return sum(self.compute_s) / (len(self.compute_s) * self.total_s) if self.total_s else 0.0

    @property
    def stall_s(self) -> tuple[float, ...]:
        """For each replica, the seconds in which it waited for rounds."""
        waited = [0.0] * len(self.compute_s)
        for stall in self.stalls:
            waited[stall.replica] += stall.seconds
        return tuple(waited)
