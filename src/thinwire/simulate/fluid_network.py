"""Fluid network in virtual time: flows over several links at once, at max-min fair rates that change at events.

A flow is a fluid: it has one rate, and loads every link that it names in proportion. A transfer along a path loads each
link of it with one bit for a bit; an exchange among many replicas is one flow too, which loads all their links at once
with weights. Rates change only when a flow starts or ends or a link changes, so nothing is lost between those events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import NamedTuple

from thinwire.simulate.virtual_clock import VirtualClock


class FlowDemand(NamedTuple):
    """Demand of one flow on the links."""

    # pairs of a link and the bits that it carries for one bit of the flow, above 0; every link once
    loads: Sequence[tuple[int, float]]
    limit: float = inf  # the flow's own highest rate, in bits of the flow a second
    share: float = 1.0  # how fast the flow's use of its most loaded link grows beside that of others


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
    slopes = [_slope(demand) for demand in demands]
    filling = _Filling(demands, slopes, capacities)
    while len(filling.levels) < len(demands):
        filling.stop_the_next()
    return [filling.levels[number] * slope for number, slope in enumerate(slopes)]


def _slope(demand: FlowDemand) -> float:
    """Return the bits of a flow a second at level 1."""
    return demand.share / max((weight for _, weight in demand.loads), default=1.0)


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
        # of each link: what a level costs its flows that have not stopped, their number, and what the others take
        self.growth = {link: sum(weight for _, weight in flows) for link, flows in self.users.items()}
        self.all_growth = dict(self.growth)
        self.num_left = {link: len(flows) for link, flows in self.users.items()}
        self.taken = dict.fromkeys(self.users, 0.0)
        self.full_at = {link: capacities[link] / growth for link, growth in self.growth.items()}
        # lowest level first; entries that `full_at` no longer holds are passed over
        self.by_level = [(at, link) for link, at in self.full_at.items()]
        heapify(self.by_level)

    def stop_the_next(self) -> None:
        """Raise the level to where the next links are full or the next flows at their limits; those flows stop."""
        heap, full_at = self.by_level, self.full_at
        while heap and full_at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        level = min(heap[0][0] if heap else inf, min(self.limits.values(), default=inf))
        full = []
        while heap and heap[0][0] <= level:
            at, link = heappop(heap)
            if full_at.get(link) == at and link not in full:
                full.append(link)
        stopped = {number for link in full for number, _ in self.users[link] if number not in self.levels}
        stopped.update(number for number, at in self.limits.items() if at <= level)
        if level == inf:
            stopped.update(number for number in range(len(self.demands)) if number not in self.levels)
        touched: dict[int, None] = {}
        for number in stopped:
            self.levels[number] = level
            self.limits.pop(number, None)
            for link, weight in self.demands[number].loads:
                used = weight * self.slopes[number]
                self.growth[link] -= used
                self.taken[link] += used * level
                self.num_left[link] -= 1
                touched[link] = None
        for link in full:
            del self.full_at[link]
        for link in touched:
            if link in self.full_at:
                self._fill_again(link, level)

    def _fill_again(self, link: int, level: float) -> None:
        if not self.num_left[link]:
            del self.full_at[link]
            return
        if self.growth[link] < _FEW_DIGITS * self.all_growth[link]:
            # what was subtracted is much larger than what is left: add up the rest
            self.growth[link] = sum(weight for number, weight in self.users[link] if number not in self.levels)
        self.full_at[link] = at = max(level, (self.capacities[link] - self.taken[link]) / self.growth[link])
        heappush(self.by_level, (at, link))


Loads = tuple[tuple[int, float], ...]

# With more flows under way, an event changes rates only around it; fewer are solved as a whole.
_MOST_SOLVED_WHOLE = 32
_MOST_TRIES = 8  # of solving a part, before the whole group is solved
_FEW_DIGITS = 1e-3  # a difference this small beside its terms has lost too many digits
_ALMOST = 1 - 1e-9  # rounding of sums of rates


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLink:
    """A wire in one direction.

    Raises:
        ValueError: A number is negative or none, or the changes are not in the order of time.
    """

    bandwidth_bits_per_s: float  # its rate from the start; 0 carries nothing, infinity never fills
    latency_s: float = 0.0  # how long a bit is under way
    # pairs of a time in seconds and the rate from then on, in the order of time; a rate of 0 is a failure, and flows
    # over the link stand still until it has a rate again
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

    Raises:
        ValueError: A number is out of its range.
    """

    size_bits: float  # how many; 0 takes only the latency
    loads: Loads  # pairs of a link's number and the bits on it for one bit of the flow. A link named twice carries both
    latency_s: float = 0.0  # from the last bit's leaving to the flow's end
    limit_bits_per_s: float = inf  # the flow is never faster than this
    # its part of a link that it shares, beside the parts of others: what 3 connections get is a share of 3
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


# Returns the loads of a flow while only some links work, which it is asked about.
Reroute = Callable[[Callable[[int], bool]], Loads]


class ActiveFlow:
    """A flow under way."""

    __slots__ = (
        "at_s", "counted_bits", "demand", "done", "flow", "has_left", "left_bits", "level", "number", "rate", "reroute",
        "slope", "uses", "version",
    )  # fmt: skip

    def __init__(
        self, number: int, flow: FluidFlow, loads: Loads, done: Callable[[], None],
        has_left: Callable[[], None] | None, reroute: Reroute | None,
    ) -> None:  # fmt: skip
        self.number, self.flow, self.done, self.has_left, self.reroute = number, flow, done, has_left, reroute
        self.counted_bits = 0.0  # sent over links that the flow has left since
        self.left_bits, self.rate, self.at_s, self.version = flow.size_bits, 0.0, 0.0, 0
        self.take(loads)

    def take(self, loads: Loads) -> None:
        """Use these links from now on."""
        self.demand = FlowDemand(loads=loads, limit=self.flow.limit_bits_per_s, share=self.flow.share)
        self.slope = _slope(self.demand)
        self.level = self.rate / self.slope
        self.uses = {link: weight * self.slope for link, weight in loads}  # bits a second on each link at level 1


class _FairChange:
    """Fair rates after a change of some links, among few flows beside the fixed rates of the others.

    The new levels are set on the flows; their rates follow from them.

    Args:
        users: The flows on each link, by number.
        rates: What each link can carry.
        dirty: Links on which a flow has come or gone, or whose rate has changed.

    Attributes:
        flows: The flows whose levels are solved, by number.
    """

    def __init__(self, users: Sequence[dict[int, ActiveFlow]], rates: Sequence[float], dirty: Iterable[int]) -> None:
        self._users, self._rates, self._dirty = users, rates, tuple(dirty)
        self.flows = {n: moving for link in self._dirty for n, moving in users[link].items() if not moving.level}
        self._states: dict[int, tuple[bool, float, bool]] = {}

    def solve(self) -> bool:
        """Solve the flows beside the others; return whether some of the others must be solved too."""
        solved = self.flows
        links = {link for moving in solved.values() for link in moving.uses}
        capacities = {
            link: self._rates[link]
            - sum([o.level * o.uses[link] for n, o in self._users[link].items() if n not in solved])
            for link in links
        }
        capacities = {link: max(0.0, capacity) for link, capacity in capacities.items()}
        rates = max_min_rates([moving.demand for moving in solved.values()], capacities) if solved else []
        for moving, rate in zip(solved.values(), rates, strict=True):
            moving.level = rate / moving.slope
        touched = {*links, *self._dirty}
        for link in touched:
            self._states.pop(link, None)
        found = self._unheld(touched)
        self.flows.update(found)
        return bool(found)

    def take_all(self) -> None:
        """Solve all flows that share links with those of now, directly or through others."""
        fresh = list(self.flows.values())
        seen: set[int] = set()
        while fresh:
            for link in fresh.pop().uses:
                if link not in seen:
                    seen.add(link)
                    new = {n: o for n, o in self._users[link].items() if n not in self.flows}
                    self.flows.update(new)
                    fresh += new.values()

    def _unheld(self, touched: Iterable[int]) -> dict[int, ActiveFlow]:
        """Return fixed flows that nothing holds, and those that a solved flow must share a full link with."""
        found: dict[int, ActiveFlow] = {}
        seen: set[int] = set()
        for link in touched:
            if self._state(link)[2]:
                found.update((n, o) for n, o in self._users[link].items() if n not in self.flows)
            for number, moving in self._users[link].items():
                if number in seen:
                    continue
                seen.add(number)
                if self._is_held(moving):
                    continue
                if number not in self.flows:
                    found[number] = moving
                    continue
                for full in moving.uses:
                    if self._state(full)[0]:
                        others = self._users[full].items()
                        found.update((n, o) for n, o in others if o.level > moving.level and n not in self.flows)
        return found

    def _is_held(self, moving: ActiveFlow) -> bool:
        level = moving.level
        for link in moving.uses:
            is_full, highest, _ = self._state(link)
            if is_full and level >= highest:
                return True
        return level * moving.slope >= moving.demand.limit * _ALMOST

    def _state(self, link: int) -> tuple[bool, float, bool]:
        """Return whether a link is full, its highest level, and whether its rate is exceeded; rounding aside."""
        found = self._states.get(link)
        if found is None:
            users = self._users[link].values()
            load = sum([moving.level * moving.uses[link] for moving in users])
            highest = max([moving.level for moving in users], default=0.0)
            rate = self._rates[link]
            found = self._states[link] = load >= rate * _ALMOST, highest * _ALMOST, load * _ALMOST > rate
        return found


class FluidNetwork:
    """Links on a clock, and the flows that move over them.

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
        self._active: dict[int, ActiveFlow] = {}
        clock.settle_with(self._settle)
        for number, link in enumerate(links):
            for time_s, rate in link.changes:
                clock.at(time_s, self._changing(number, rate))

    def start(
        self, flow: FluidFlow, done: Callable[[], None], *, has_left: Callable[[], None] | None = None,
        reroute: Reroute | None = None,
    ) -> ActiveFlow:  # fmt: skip
        """Start a flow now.

        Args:
            flow: What is sent.
            done: Runs when the last bit has arrived.
            has_left: Runs when the last bit has left, which is the latency earlier.
            reroute: Asked for other links whenever one has died or returned, and now if one is dead; None for a flow
                that waits on a dead link until it works.

        Raises:
            ValueError: The flow names a link that does not exist.
        """
        has_dead = reroute is not None and not all(self._rates)
        loads = self._checked(reroute(self._is_working) if reroute is not None and has_dead else flow.loads)
        moving = ActiveFlow(self._num_started, flow, loads, done, has_left, reroute)
        moving.at_s = self._clock.now_s
        self._num_started += 1
        if flow.size_bits == 0:
            self._arrive(moving)
            return moving
        self._active[moving.number] = moving
        self._use(moving)
        self._clock.unsettle()
        return moving

    def reroute(self, moving: ActiveFlow, loads: Loads) -> None:
        """Move the bits that a flow has left to other links."""
        if moving.left_bits > 0 and (loads := self._checked(loads)) != moving.demand.loads:
            self._bring_up_to_date(moving)
            self._unuse(moving)
            moving.rate = 0.0
            moving.version += 1
            moving.take(loads)
            self._use(moving)
            self._clock.unsettle()

    def blocked_links(self) -> list[int]:
        """Return the dead links that flows wait for."""
        return sorted({link for moving in self._active.values() for link in moving.uses if not self._rates[link]})

    def stop(self, moving: ActiveFlow) -> None:
        """Take a flow off the links for good; it ends without `done`. One that has sent its last bit is too late."""
        if moving.left_bits > 0:
            self._bring_up_to_date(moving)
            self._leave(moving)
            moving.left_bits = 0.0  # a later death does not stop it again

    def carried_bits(self) -> list[float]:
        """Return the bits that each link has carried so far."""
        carried = list(self._carried_bits)
        for moving in self._active.values():
            sent = moving.flow.size_bits - moving.left_bits - moving.counted_bits + self._since(moving)
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
            is_other_path = (self._rates[link] > 0) != (rate > 0)
            self._rates[link] = float(rate)
            self._dirty[link] = None
            if is_other_path:
                for moving in list(self._active.values()):
                    if moving.reroute is not None:
                        self.reroute(moving, moving.reroute(self._is_working))

        return change

    def _settle(self) -> None:
        """Give new rates to all flows that what happened in this instant may have touched."""
        for moving in self._fresh:
            self._move(moving, moving.flow.limit_bits_per_s)
        self._fresh.clear()
        dirty, self._dirty = self._dirty, {}
        if len(self._active) > _MOST_SOLVED_WHOLE:
            self._rebalance(dirty)
            return
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
                    new = [at for at in moving.uses if at not in links]
                    links.update(dict.fromkeys(new))
                    fresh += new
        return [flows[number] for number in sorted(flows)], list(links)

    def _rebalance(self, dirty: Iterable[int]) -> None:
        """Give new rates around the links that have changed, and leave those of all other flows.

        The fair rates are the only ones at which every flow is at its limit or held by a link: a full one on which no
        flow has a higher level. So a few flows are solved beside fixed others. Where a flow is then held by nothing, or
        has less than a fixed one on its full link, the set grows and is solved again, to all flows if need be.
        """
        change = _FairChange(self._users, self._rates, dirty)
        num_tries = 0
        while change.solve():
            num_tries += 1
            if num_tries == _MOST_TRIES:
                change.take_all()
        for moving in change.flows.values():
            self._move(moving, moving.level * moving.slope)
        self._note_peaks(change.flows.values())

    def _note_peaks(self, flows: Iterable[ActiveFlow]) -> None:
        for link in {link for moving in flows for link in moving.uses}:
            load = sum([moving.level * moving.uses[link] for moving in self._users[link].values()])
            self.peak_bits_per_s[link] = max(self.peak_bits_per_s[link], load)

    def _move(self, moving: ActiveFlow, rate: float) -> None:
        if rate == moving.rate:
            return
        self._bring_up_to_date(moving)
        moving.rate, moving.level = rate, rate / moving.slope
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
        del self._active[moving.number]
        self._unuse(moving)

    def _use(self, moving: ActiveFlow) -> None:
        for link in moving.uses:
            self._users[link][moving.number] = moving
            self._dirty[link] = None
        if not moving.uses:
            self._fresh.append(moving)

    def _unuse(self, moving: ActiveFlow) -> None:
        sent = moving.flow.size_bits - moving.left_bits - moving.counted_bits
        moving.counted_bits += sent
        for link, weight in moving.demand.loads:
            del self._users[link][moving.number]
            self._dirty[link] = None
            self._carried_bits[link] += weight * sent

    def _is_working(self, link: int) -> bool:
        return self._rates[link] > 0

    def _checked(self, loads: Loads) -> Loads:
        """Return loads with each link once; all must exist."""
        joined: dict[int, float] = {}
        for link, weight in loads:
            if not 0 <= link < len(self._rates):
                raise ValueError(f"loads must name links 0 to {len(self._rates) - 1}, got {link}")
            joined[link] = joined.get(link, 0.0) + weight
        return tuple(joined.items())
