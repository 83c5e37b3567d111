"""Fluid network in virtual time: flows over several links at once, at max-min fair rates that change at events.

A flow is a fluid: it has one rate, and loads every link that it names in proportion. A transfer along a path loads each
link of it with one bit for a bit; an exchange among many replicas is one flow too, which loads all their links at once
with weights. Rates change only when a flow starts or ends or a link changes, so nothing is lost between those events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from thinwire.simulate.virtual_clock import VirtualClock


class FlowDemand(NamedTuple):
    """Demand of one flow on the links.

    Attributes:
        loads: Pairs of a link and the bits that it carries for one bit of the flow, above 0; every link once.
        limit: The flow's own highest rate, in bits of the flow a second.
        share: How fast the flow's use of its most loaded link grows beside that of others.
    """

    loads: Sequence[tuple[int, float]]
    limit: float = inf
    share: float = 1.0


def max_min_rates(demands: Sequence[FlowDemand], capacities: Mapping[int, float]) -> list[float]:
    """Return the rate of every flow, in its own bits a second, by progressive filling.

    The use of its most loaded link grows alike for all flows (`share` times as fast for some) until a link is full or a
    flow is at its limit; those flows stay there, and the others go on. So no flow can get more without taking from one
    that has no more than it.

    Args:
        demands: One a flow.
        capacities: Bits a second of every link that is named, at least 0, infinite where it never fills.

    Example:
        >>> max_min_rates([FlowDemand(loads=[(0, 1.0)]), FlowDemand(loads=[(0, 1.0), (1, 1.0)])], {0: 10.0, 1: 2.0})
        [8.0, 2.0]
        >>> max_min_rates([FlowDemand(loads=[(0, 3.0)])], {0: 12.0})  # one bit of this flow is three on the link
        [4.0]
    """
    if len(demands) == 1:
        only = demands[0]
        return [min(only.limit, min((capacities[link] / weight for link, weight in only.loads), default=inf))]
    # bits of a flow a second at level 1
    slopes = [demand.share / max((weight for _, weight in demand.loads), default=1.0) for demand in demands]
    filling = _Filling(demands, slopes, capacities)
    while len(filling.levels) < len(demands):
        filling.stop_the_next()
    return [filling.levels[number] * slope for number, slope in enumerate(slopes)]


class _Filling:
    """One progressive filling: which flows have stopped, each at its level, and at which level each link is full."""

    def __init__(self, demands: Sequence[FlowDemand], slopes: Sequence[float], capacities: Mapping[int, float]) -> None:
        self.demands, self.slopes, self.capacities = demands, slopes, capacities
        self.levels: dict[int, float] = {}
        self.limits = {
            number: demand.limit / slopes[number] for number, demand in enumerate(demands) if demand.limit < inf
        }
        self.users: dict[int, list[tuple[int, float]]] = {}
        for number, demand in enumerate(demands):
            for link, weight in demand.loads:
                self.users.setdefault(link, []).append((number, weight * slopes[number]))
        self.full_at = {
            link: capacities[link] / sum(weight for _, weight in flows) for link, flows in self.users.items()
        }

    def stop_the_next(self) -> None:
        """Raise the level to where the next links are full or the next flows at their limits; those flows stop."""
        level = min(min(self.full_at.values(), default=inf), min(self.limits.values(), default=inf))
        full = [link for link, at in self.full_at.items() if at <= level]
        stopped = {number for link in full for number, _ in self.users[link] if number not in self.levels}
        stopped.update(number for number, at in self.limits.items() if at <= level)
        if level == inf:
            stopped.update(number for number in range(len(self.demands)) if number not in self.levels)
        for number in stopped:
            self.levels[number] = level
            self.limits.pop(number, None)
        for link in full:
            del self.full_at[link]
        for link in {link for number in stopped for link, _ in self.demands[number].loads} & self.full_at.keys():
            self._fill_again(link, level)

    def _fill_again(self, link: int, level: float) -> None:
        growth = taken = 0.0
        for number, weight in self.users[link]:
            if number in self.levels:
                taken += weight * self.levels[number]
            else:
                growth += weight
        if growth:
            self.full_at[link] = max(level, (self.capacities[link] - taken) / growth)
        else:
            del self.full_at[link]


Loads = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLink:
    """A wire in one direction.

    Attributes:
        bandwidth_bits_per_s: Its rate from the start; 0 carries nothing, infinity never fills.
        latency_s: How long a bit is under way.
        changes: Pairs of a time in seconds and the rate from then on, in the order of time; a rate of 0 is a failure,
            and flows over the link stand still until it has a rate again.

    Raises:
        ValueError: A number is negative or none, or the changes are not in the order of time.
    """

    bandwidth_bits_per_s: float
    latency_s: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for rate in (self.bandwidth_bits_per_s, *(rate for _, rate in self.changes)):
            if not rate >= 0:
                raise ValueError(f"bandwidth_bits_per_s must be at least 0, got {rate}; 0 is a link that is down")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise ValueError(f"latency_s must be finite and at least 0, got {self.latency_s}")
        times = [time_s for time_s, _ in self.changes]
        if not all(0 <= time_s < inf for time_s in times) or times != sorted(set(times)):
            raise ValueError(f"changes must have finite times from 0 on in ascending order, got {times}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidFlow:
    """Bits that cross links together.

    Attributes:
        size_bits: How many; 0 takes only the latency.
        loads: Pairs of a link's number and the bits on it for one bit of the flow. A link named twice carries both.
        latency_s: From the last bit's leaving to the flow's end.
        limit_bits_per_s: The flow is never faster than this.
        share: Its part of a link that it shares, beside the parts of others: what 3 connections get is a share of 3.

    Raises:
        ValueError: A number is out of its range.
    """

    size_bits: float
    loads: Loads
    latency_s: float = 0.0
    limit_bits_per_s: float = inf
    share: float = 1.0

    def __post_init__(self) -> None:
        if not (self.size_bits >= 0 and isfinite(self.size_bits)):
            raise ValueError(f"size_bits must be finite and at least 0, got {self.size_bits}")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise ValueError(f"latency_s must be finite and at least 0, got {self.latency_s}")
        if not (self.limit_bits_per_s > 0 and self.share > 0 and isfinite(self.share)):
            raise ValueError(
                f"limit_bits_per_s and share must be above 0 and share finite, got {self.limit_bits_per_s} and "
                f"{self.share}; leave limit_bits_per_s out for a flow without a limit"
            )
        if not all(weight > 0 and isfinite(weight) for _, weight in self.loads):
            raise ValueError(f"loads must be finite and above 0, got {self.loads}; leave out links that carry nothing")


class ActiveFlow:
    """A flow under way."""

    __slots__ = ("at_s", "demand", "done", "flow", "has_left", "left_bits", "number", "rate", "version")

    def __init__(
        self, number: int, flow: FluidFlow, loads: Loads, done: Callable[[], None], has_left: Callable[[], None] | None
    ) -> None:
        self.number, self.flow, self.done, self.has_left = number, flow, done, has_left
        self.demand = FlowDemand(loads=loads, limit=flow.limit_bits_per_s, share=flow.share)
        self.left_bits, self.rate, self.at_s, self.version = flow.size_bits, 0.0, 0.0, 0


class FluidNetwork:
    """Links on a clock, and the flows that move over them.

    Args:
        links: Numbered from 0 in this order.
        clock: Whose time it is.

    Attributes:
        peak_bits_per_s: The highest rate that each link has carried at any time.

    Example:
        >>> clock = VirtualClock()
        >>> network = FluidNetwork([SimLink(bandwidth_bits_per_s=10.0, latency_s=0.5)], clock=clock)
        >>> ends = []
        >>> for size in (10, 30):
        ...     _ = network.start(FluidFlow(size_bits=size, loads=((0, 1.0),)), lambda: ends.append(clock.now_s))
        >>> clock.run()
        >>> ends  # both at 5 bits a second, then the second one alone at 10
        [2.0, 4.0]
    """

    def __init__(self, links: Sequence[SimLink], *, clock: VirtualClock) -> None:
        self._clock = clock
        self._rates = [float(link.bandwidth_bits_per_s) for link in links]
        self._users: list[dict[int, ActiveFlow]] = [{} for _ in links]
        self._dirty: dict[int, None] = {}  # as a set, but in the order of marking
        self._fresh: list[ActiveFlow] = []
        self._carried_bits = [0.0] * len(links)
        self.peak_bits_per_s = [0.0] * len(links)
        self._num_started = 0
        clock.settle_with(self._settle)
        for number, link in enumerate(links):
            for time_s, rate in link.changes:
                clock.at(time_s, self._changing(number, rate))

    def start(
        self, flow: FluidFlow, done: Callable[[], None], *, has_left: Callable[[], None] | None = None
    ) -> ActiveFlow:
        """Start a flow now.

        Args:
            flow: What is sent.
            done: Runs when the last bit has arrived.
            has_left: Runs when the last bit has left, which is the latency earlier.

        Raises:
            ValueError: The flow names a link that does not exist.
        """
        loads = _joined(flow.loads)
        for link, _ in loads:
            if not 0 <= link < len(self._rates):
                raise ValueError(f"loads must name links 0 to {len(self._rates) - 1}, got {link}")
        moving = ActiveFlow(self._num_started, flow, loads, done, has_left)
        moving.at_s = self._clock.now_s
        self._num_started += 1
        if flow.size_bits == 0:
            self._arrive(moving)
            return moving
        for link, _ in loads:
            self._users[link][moving.number] = moving
            self._dirty[link] = None
        if not loads:
            self._fresh.append(moving)
        self._clock.unsettle()
        return moving

    def stop(self, moving: ActiveFlow) -> None:
        """Take a flow off the links for good; it ends without `done`. One that has sent its last bit is too late."""
        if moving.left_bits > 0:
            self._bring_up_to_date(moving)
            self._leave(moving)
            moving.left_bits = 0.0  # a later death does not stop it again

    def carried_bits(self) -> list[float]:
        """Return the bits that each link has carried so far."""
        carried = list(self._carried_bits)
        for moving in {number: moving for users in self._users for number, moving in users.items()}.values():
            sent = moving.flow.size_bits - moving.left_bits + self._since(moving)
            for link, weight in moving.demand.loads:
                carried[link] += weight * sent
        return carried

    def load_bits_per_s(self, link: int) -> float:
        """Return what a link carries now."""
        return sum(
            moving.rate * weight
            for moving in self._users[link].values()
            for at, weight in moving.demand.loads
            if at == link
        )

    def rate_bits_per_s(self, link: int) -> float:
        """Return what a link could carry now."""
        return self._rates[link]

    def _since(self, moving: ActiveFlow) -> float:
        elapsed = self._clock.now_s - moving.at_s
        return min(moving.left_bits, moving.rate * elapsed) if elapsed else 0.0

    def _changing(self, link: int, rate: float) -> Callable[[], None]:
        def change() -> None:
            self._rates[link] = float(rate)
            self._dirty[link] = None

        return change

    def _settle(self) -> None:
        """Give new rates to all flows that what happened in this instant may have touched."""
        for moving in self._fresh:
            self._move(moving, moving.flow.limit_bits_per_s)
        self._fresh.clear()
        dirty, self._dirty = self._dirty, {}
        settled: set[int] = set()
        for link in dirty:
            if link in settled or not self._users[link]:
                continue
            flows, links = self._component(link)
            settled.update(links)
            capacities = {reached: self._rates[reached] for reached in links}
            for moving, rate in zip(flows, max_min_rates([f.demand for f in flows], capacities), strict=True):
                self._move(moving, rate)
            self._note_peaks(flows)

    def _component(self, link: int) -> tuple[list[ActiveFlow], list[int]]:
        """Return the flows that share links with each other, from one link on, and all links that they use."""
        flows: dict[int, ActiveFlow] = {}
        links = {link: None}
        fresh = [link]
        while fresh:
            for number, moving in self._users[fresh.pop()].items():
                if number not in flows:
                    flows[number] = moving
                    new = [at for at, _ in moving.demand.loads if at not in links]
                    links.update(dict.fromkeys(new))
                    fresh += new
        return [flows[number] for number in sorted(flows)], list(links)

    def _note_peaks(self, flows: Iterable[ActiveFlow]) -> None:
        loads: dict[int, float] = {}
        for moving in flows:
            for link, weight in moving.demand.loads:
                loads[link] = loads.get(link, 0.0) + weight * moving.rate
        for link, load in loads.items():
            self.peak_bits_per_s[link] = max(self.peak_bits_per_s[link], load)

    def _move(self, moving: ActiveFlow, rate: float) -> None:
        if rate == moving.rate:
            return
        self._bring_up_to_date(moving)
        moving.rate = rate
        moving.version += 1
        # rounding may leave nothing to a flow whose link fails just before its end
        if rate > 0 or moving.left_bits == 0:
            version = moving.version
            rest_s = moving.left_bits / rate if moving.left_bits else 0.0
            self._clock.at(self._clock.now_s + rest_s, lambda: self._finish(moving, version))

    def _bring_up_to_date(self, moving: ActiveFlow) -> None:
        moving.left_bits -= self._since(moving)
        moving.at_s = self._clock.now_s

    def _finish(self, moving: ActiveFlow, version: int) -> None:
        if version == moving.version:
            moving.left_bits = 0.0
            self._leave(moving)
            self._arrive(moving)

    def _arrive(self, moving: ActiveFlow) -> None:
        if moving.has_left is not None:
            self._clock.at(self._clock.now_s, moving.has_left)
        self._clock.at(self._clock.now_s + moving.flow.latency_s, moving.done)

    def _leave(self, moving: ActiveFlow) -> None:
        moving.version += 1
        self._clock.unsettle()
        sent = moving.flow.size_bits - moving.left_bits
        for link, weight in moving.demand.loads:
            del self._users[link][moving.number]
            self._dirty[link] = None
            self._carried_bits[link] += weight * sent


def _joined(loads: Loads) -> Loads:
    if len({link for link, _ in loads}) == len(loads):
        return loads
    joined: dict[int, float] = {}
    for link, weight in loads:
        joined[link] = joined.get(link, 0.0) + weight
    return tuple(joined.items())
