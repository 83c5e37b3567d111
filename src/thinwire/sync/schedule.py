"""Schedules: the steps at which rounds are launched and applied, as pure functions; without torch.

Steps are counted from 1, as the papers do: step t is the t-th inner step, and a round launched at t is read right after
that step. A round is launched by every replica after the same step; it may be applied after different steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.shared_random import toss


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One exchange of one fragment.

    Attributes:
        id: Running number, the same on all replicas, in the order of launches.
        fragment: The fragment that is exchanged.
        channel: What of it: a method that sends several things, each in its own code, numbers them from 0.
        launch_step: The step after which every replica reads and sends the fragment.
        apply_step: The step after which this replica applies the result.
    """

    id: int
    fragment: int
    launch_step: int
    apply_step: int
    channel: int = 0


def needed_for(fragments: Collection[int], overdue: Iterable[tuple[int, Sequence[Round]]]) -> list[Round]:
    """Return the rounds that must be applied before some fragments are launched again.

    Args:
        fragments: What is to be launched.
        overdue: Steps and the rounds to apply there, in the order in which that is done.

    Example:
        >>> rounds = [Round(id=number, fragment=number, launch_step=number, apply_step=number + 1) for number in (0, 1)]
        >>> overdue = [(1, [rounds[0]]), (2, [rounds[1]])]
        >>> [len(needed_for({fragment}, overdue)) for fragment in (0, 1, 2)]
        [1, 2, 0]
    """
    found: list[Round] = []
    before: list[Round] = []
    for _, due in overdue:
        before += due
        if any(round.fragment in fragments for round in due):
            found += before
            before = []
    return found


class Schedule(Protocol):
    """A schedule: rounds to launch and apply, as pure functions of step, fragments and replica.

    Attributes:
        sync_interval: Inner steps between two exchanges of the same fragment; 1 unless a schedule says otherwise.
    """

    __slots__ = ()

    @property
    def sync_interval(self) -> int:
        return 1

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        """Raise `ValueError` where the schedule does not fit so many fragments or replicas; all fit by default."""
        return

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return the rounds to launch after inner step `step` (from 1), in the order of their ids."""

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return the rounds that `replica` applies after inner step `step`, in the order of their ids.

        By default what was launched after the same step.
        """
        return self.launches(step, num_fragments=num_fragments, replica=replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryStep(Schedule):
    """Exchange everything at every step, and wait for it.

    Args:
        num_channels: How many things of each fragment.
    """

    num_channels: int = 1

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        num_rounds = num_fragments * self.num_channels
        return [
            Round(
                id=(step - 1) * num_rounds + number, fragment=number // self.num_channels,
                channel=number % self.num_channels, launch_step=step, apply_step=step,
            )
            for number in range(num_rounds)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRefresh(Schedule):
    """Exchange channel 0 at every step, and before it channel 1 now and then: at the first step, and by a shared coin.

    The coin of step t decides on step t + 1; all replicas toss the same.

    Args:
        probability: With which a step is followed by a refresh, in (0, 1].
        seed: Selects the coins; the same on all replicas.

    Raises:
        ValueError: `probability` is out of its range.

    Example:
        >>> schedule = RandomRefresh(probability=0.5)
        >>> [[round.channel for round in schedule.launches(step, num_fragments=1)] for step in range(1, 7)]
        [[1, 0], [0], [0], [0], [1, 0], [1, 0]]
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability must be in (0, 1], got {self.probability}; 1 refreshes at every step")

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        if num_fragments != 1:
            raise ValueError(f"RandomRefresh() exchanges the model as one fragment, got {num_fragments}")

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return the refresh, where there is one, and the round of channel 0."""
        first = 2 * (step - 1)
        rounds = [Round(id=first + 1, fragment=0, launch_step=step, apply_step=step)]
        if step == 1 or toss(self.probability, self.seed, "refresh", step - 1):
            rounds.insert(0, Round(id=first, fragment=0, channel=1, launch_step=step, apply_step=step))
        return rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Staggered(Schedule):
    """Exchange each fragment every `sync_interval` steps, at its own offset, and apply it `overlap_steps` later.

    Fragment p of P is launched after the steps t with `(t - offset(p)) mod H == 0` and `t >= H + offset(p)`, where
    `offset(p) = floor(p * H / P)`. So fragments are spread evenly over the interval, and none is exchanged before it
    has run H steps (arXiv 2501.18512, Algorithm 2; its formula would also fire in a first, shorter window, which its
    own example leaves out, as we do).

    At tau = H a fragment's next round is launched right before the last one is applied, so what it reads does not know
    of that result yet: its reference is one round old. That is another algorithm than a smaller tau, not only a later
    arrival (CO2, arXiv 2401.16265, is built on it), and no replica can run it while another does not.

    Args:
        sync_interval: H, at least 1.
        overlap_steps: tau, 0 <= tau <= H: one number, or one a replica where replicas differ in speed; H for all
            replicas or for none.
        is_staggered: False gives all fragments the offset 0 (DiLoCo exchanges them together).

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> schedule = Staggered(sync_interval=100, overlap_steps=1)
        >>> [r.launch_step for t in range(301) for r in schedule.launches(t, num_fragments=2) if r.fragment == 1]
        [150, 250]
    """

    sync_interval: int
    overlap_steps: int | tuple[int, ...] = 0
    is_staggered: bool = True

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise ValueError(f"sync_interval must be at least 1, got {self.sync_interval}")
        overlaps = self.overlap_steps if isinstance(self.overlap_steps, tuple) else (self.overlap_steps,)
        for tau in overlaps:
            if not 0 <= tau <= self.sync_interval:
                raise ValueError(
                    f"overlap_steps must be at least 0 and at most sync_interval ({self.sync_interval}), got {tau}; "
                    f"a fragment's exchange must be applied no later than when its next one starts"
                )
        if self.sync_interval in overlaps and min(overlaps) < self.sync_interval:
            raise ValueError(
                f"overlap_steps of {self.sync_interval}, a whole sync_interval, must hold for all replicas, got "
                f"{overlaps}; the others would refer to a newer global value; give at most {self.sync_interval - 1}"
            )

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        """Refuse a list of overlaps that does not name one a replica."""
        if isinstance(self.overlap_steps, tuple) and len(self.overlap_steps) != num_replicas:
            raise ValueError(
                f"overlap_steps names {len(self.overlap_steps)} replicas, but {num_replicas} take part; "
                f"give one number a replica"
            )

    def offset(self, fragment: int, *, num_fragments: int) -> int:
        """Return the fragment's offset within the interval, in steps."""
        return fragment * self.sync_interval // num_fragments if self.is_staggered else 0

    def overlap_of(self, replica: int) -> int:
        return self.overlap_steps[replica] if isinstance(self.overlap_steps, tuple) else self.overlap_steps

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        tau = self.overlap_steps[replica] if isinstance(self.overlap_steps, tuple) else self.overlap_steps
        # visiting every fragment at every step would dominate a long simulation
        interval, since = divmod(step, self.sync_interval)
        if self.is_staggered:  # those with floor(fragment * H / P) == since
            due = range(*(-(-at * num_fragments // self.sync_interval) for at in (since, since + 1)))
        else:
            due = range(num_fragments if since == 0 else 0)
        first = (interval - 1) * num_fragments
        return [
            Round(id=first + fragment, fragment=fragment, launch_step=step, apply_step=step + tau)
            for fragment in (due if interval >= 1 else ())
        ]

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        return self.launches(step - self.overlap_of(replica), num_fragments=num_fragments, replica=replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched(Schedule):
    """Exchange two things of the whole model every `sync_interval` steps; one of them is sent long before it is needed.

    Outer step k = 1, 2, ... takes both. Channel 1 is what the inner steps have made: launched after step kH and applied
    tau steps later. Channel 0 is what the outer step before has left behind and nothing changes until this one: it is
    launched on the first step after that, `(k - 1) H + tau + 1`, and applied right before channel 1. So it is on the
    wire for a whole interval, and no replica waits for it.

    Args:
        sync_interval: H, at least 1.
        overlap_steps: tau of channel 1, 0 <= tau < H; one number for all replicas.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> schedule = Prefetched(sync_interval=10, overlap_steps=2)
        >>> launched = [r for t in range(1, 24) for r in schedule.launches(t, num_fragments=1)]
        >>> [(r.id, r.channel, r.launch_step, r.apply_step) for r in launched]
        [(0, 0, 3, 12), (1, 1, 10, 12), (2, 0, 13, 22), (3, 1, 20, 22), (4, 0, 23, 32)]
    """

    sync_interval: int
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise ValueError(f"sync_interval must be at least 1, got {self.sync_interval}")
        if not isinstance(self.overlap_steps, int):
            raise ValueError(
                f"overlap_steps must be one number here, got {self.overlap_steps}; what is sent ahead must be launched "
                f"after the same step everywhere"
            )
        if not 0 <= self.overlap_steps < self.sync_interval:
            raise ValueError(
                f"overlap_steps must be at least 0 and below sync_interval ({self.sync_interval}), got "
                f"{self.overlap_steps}; an outer step must be done before the next one starts"
            )

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
        """Refuse a model that is cut: two rounds are one outer step of all of it."""
        if num_fragments != 1:
            raise ValueError(f"num_fragments must be 1 with this schedule, got {num_fragments}; give one fragment")

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return what is sent ahead, then what the inner steps have made."""
        before, is_not_due = divmod(step - self.overlap_steps - 1, self.sync_interval)
        ahead = [self._round(before, channel=0)] if not is_not_due and before >= 0 else []
        return [*ahead, *self._made_at(step)]

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return both rounds of the outer step that is due."""
        due = self._made_at(step - self.overlap_steps)
        return [round for made in due for round in (self._round(made.id // 2, channel=0), made)]

    def _made_at(self, step: int) -> list[Round]:
        number, rest = divmod(step, self.sync_interval)
        return [self._round(number - 1, channel=1)] if not rest and number >= 1 else []

    def _round(self, before: int, *, channel: int) -> Round:
        """Return a round of the outer step that `before` others come before."""
        ready = before * self.sync_interval + self.overlap_steps + 1
        made = (before + 1) * self.sync_interval
        return Round(
            id=2 * before + channel, fragment=0, channel=channel, launch_step=made if channel else ready,
            apply_step=made + self.overlap_steps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(Schedule):
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
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, got {self.warmup_steps}; what is learnt in the warm-up is used ever "
                f"after, and 15 to 25 % of all steps are usual"
            )

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        channel = 0 if step <= self.warmup_steps else 1
        return [
            Round(
                id=(step - 1) * num_fragments + fragment, fragment=fragment, channel=channel, launch_step=step,
                apply_step=step,
            )
            for fragment in range(num_fragments)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DoublingIntervals(Schedule):
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
        for name in ("variance_steps", "variance_updates", "local_doubling_steps", "max_local_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; 1000 and 16 are the authors'")

    @property
    def sync_interval(self) -> int:
        return self.max_local_steps

    def check(self, *, num_fragments: int, num_replicas: int) -> None:
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
        return [Round(id=step - 1, fragment=0, channel=self.channel(step), launch_step=step, apply_step=step)]
