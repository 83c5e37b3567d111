"""Schedules of methods that pass from one phase to the next: dense at first, coded later; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.sync.schedule import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Exchange everything at every step: channel 0 in the warm-up, channel 1 after it.

    Args:
        warmup_steps: How many steps the warm-up has, at least 1.

    Raises:
        ValueError: `warmup_steps` is below 1.

    Example:
        >>> schedule = WarmUp(warmup_steps=2)
        >>> [r.channel for step in (1, 2, 3) for r in schedule.launches(step, num_fragments=1)]
        [0, 0, 1]
    """

    warmup_steps: int

    def __post_init__(self) -> None:
        """Check the number."""
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, got {self.warmup_steps}; what is learnt in the warm-up is used ever "
                f"after, and 15 to 25 % of all steps are usual"
            )

    @property
    def sync_interval(self) -> int:
        """Always 1."""
        return 1

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        """Every number of fragments and replicas fits."""

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return one round a fragment."""
        channel = 0 if step <= self.warmup_steps else 1
        return [
            Round(
                id=(step - 1) * num_fragments + fragment, fragment=fragment, channel=channel, launch_step=step,
                apply_step=step,
            )
            for fragment in range(num_fragments)
        ]  # fmt: skip

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return what was launched after the same step."""
        return self.launches(step, num_fragments=num_fragments, replica=replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoublingIntervals:
    """First an interval between dense exchanges that doubles, then one between exchanges at all (0/1 Adam).

    Up to `variance_steps`, every step has an exchange: a dense one (channel 0) at the multiples of an interval that
    starts at 1 and doubles after each `variance_updates` of them, a coded one (channel 1) at the steps between. After
    that, steps are local (channel 3, which sends nothing) but for the multiples of another interval (channel 2), which
    starts at 1, doubles every `local_doubling_steps` steps, and ends at `max_local_steps`.

    Args:
        variance_steps: How many steps the first phase has, at least 1.
        variance_updates: Dense exchanges until their interval doubles, at least 1.
        local_doubling_steps: Steps until the interval of the second phase doubles, at least 1.
        max_local_steps: The longest interval of the second phase, at least 1.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> schedule = DoublingIntervals(
        ...     variance_steps=8, variance_updates=2, local_doubling_steps=2, max_local_steps=4
        ... )
        >>> [schedule.channel(step) for step in range(1, 17)]
        [0, 0, 1, 0, 1, 0, 1, 0, 2, 2, 3, 2, 3, 3, 3, 2]
    """

    variance_steps: int
    variance_updates: int
    local_doubling_steps: int
    max_local_steps: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("variance_steps", "variance_updates", "local_doubling_steps", "max_local_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; 1000 and 16 are the authors'")

    @property
    def sync_interval(self) -> int:
        """The longest that the interval gets."""
        return self.max_local_steps

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        """Refuse several fragments."""
        if num_fragments != 1:
            raise ValueError(f"these intervals are for one fragment, got {num_fragments}; exchange the whole model")

    def channel(self, step: int) -> int:
        """Return the channel of a step's round: 0 dense, 1 coded, 2 after local steps, 3 nothing is sent."""
        if step <= self.variance_steps:
            return 0 if step % self.variance_interval(step) == 0 else 1
        return 2 if step % self.local_interval(step) == 0 else 3

    def variance_interval(self, step: int) -> int:
        """Return the interval between dense exchanges that holds at a step of the first phase."""
        interval, last = 1, self.variance_updates
        while step > last:
            interval *= 2
            last = (last // interval + self.variance_updates) * interval
        return interval

    def local_interval(self, step: int) -> int:
        """Return the interval between exchanges that holds at a step of the second phase."""
        doublings = (step - self.variance_steps - 1) // self.local_doubling_steps
        return min(self.max_local_steps, 1 << min(doublings, self.max_local_steps.bit_length()))

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return the step's only round."""
        return [Round(id=step - 1, fragment=0, channel=self.channel(step), launch_step=step, apply_step=step)]

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return what was launched after the same step."""
        return self.launches(step, num_fragments=num_fragments, replica=replica)
