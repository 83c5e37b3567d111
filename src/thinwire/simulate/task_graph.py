"""Task graphs in virtual time: computing on processors, one task at a time, and transfers over links.

Nothing is assumed about the graph: a training step, a pipeline's microbatches and a ring of messages are all written as
tasks that wait for others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import inf, isfinite

from thinwire.simulate.fluid_network import FluidFlow, FluidNetwork, SimLink
from thinwire.simulate.virtual_clock import VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTask:
    """Work on a processor.

    Raises:
        ValueError: `seconds` is negative or not finite.
    """

    processor: Hashable  # its name. It does one task at a time, and none is interrupted
    seconds: float  # how long it takes
    after: tuple[int, ...] = ()  # numbers of the tasks that must have ended before
    # of all tasks that are ready, a processor takes that of the lowest priority, then the one that was ready first,
    # then the one with the lowest number. Equal priorities make it a queue
    priority: float = 0.0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and isfinite(self.seconds)):
            raise ValueError(f"seconds must be finite and at least 0, got {self.seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTask:
    """Bits over links."""

    flow: FluidFlow  # what is sent, and over which links
    after: tuple[int, ...] = ()  # numbers of the tasks that must have ended before
    # transfers that name the same queue leave one after another: the next one starts when the last bit of the one
    # before has left, or has arrived where `waits_for_arrival`. None starts as soon as it may, and shares the links
    # with whatever else is on them
    queue: Hashable = None
    priority: float = 0.0  # as for `ComputeTask`, in the queue
    waits_for_arrival: bool = False  # whether the queue goes on only when this transfer has arrived


Task = ComputeTask | TransferTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """Times of all tasks of a graph."""

    # when each task started; infinity where it never did, since a link that it waits for never came back
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]  # when each task ended, or infinity
    link_bits: tuple[float, ...]  # the bits that each link has carried
    peak_bits_per_s: tuple[float, ...]  # the highest rate of each link

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return max(self.end_s, default=0.0)


def run_tasks(tasks: Sequence[Task], *, links: Sequence[SimLink] = ()) -> TaskTimes:
    """Run a graph of tasks, and return when each of them started and ended.

    Args:
        tasks: Numbered from 0 in this order; a task may wait for later ones.
        links: Those that the transfers' flows name by number.

    Raises:
        ValueError: A task waits for one that does not exist, or tasks wait for each other.

    Example:
        >>> send = FluidFlow(size_bits=8e6, loads=((0, 1.0),))
        >>> tasks = [ComputeTask(processor="a", seconds=2.0), TransferTask(flow=send, after=(0,)),
        ...          ComputeTask(processor="a", seconds=5.0, after=(0,)),
        ...          ComputeTask(processor="a", seconds=1.0, after=(1,))]
        >>> run_tasks(tasks, links=[SimLink(bandwidth_bits_per_s=1e6)]).end_s
        (2.0, 10.0, 7.0, 11.0)
    """
    _check(tasks)
    return _Execution(tasks, links).run()


class _Server:
    """Does one task at a time, and takes the next by priority, readiness and number."""

    __slots__ = ("is_busy", "waiting")

    def __init__(self) -> None:
        self.is_busy = False
        self.waiting: list[tuple[float, float, int]] = []


class _Execution:
    def __init__(self, tasks: Sequence[Task], links: Sequence[SimLink]) -> None:
        self.tasks = tasks
        self.clock = VirtualClock()
        self.network = FluidNetwork(links, clock=self.clock)
        self.start_s = [inf] * len(tasks)
        self.end_s = [inf] * len(tasks)
        self.missing = [len(set(task.after)) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for before in set(task.after):
                self.followers[before].append(number)
        self.servers: dict[tuple[str, Hashable], _Server] = {}
        self.free: dict[_Server, None] = {}
        # who is free chooses when all that becomes ready in this instant is known
        self.clock.settle_with(self._dispatch)

    def run(self) -> TaskTimes:
        for number, missing in enumerate(self.missing):
            if not missing:
                self._ready(number)
        self.clock.run()
        return TaskTimes(
            start_s=tuple(self.start_s), end_s=tuple(self.end_s), link_bits=tuple(self.network.carried_bits()),
            peak_bits_per_s=tuple(self.network.peak_bits_per_s),
        )  # fmt: skip

    def _ready(self, number: int) -> None:
        task = self.tasks[number]
        if isinstance(task, TransferTask) and task.queue is None:
            self.start_s[number] = self.clock.now_s
            self.network.start(task.flow, self._ending(number))
            return
        key = ("processor", task.processor) if isinstance(task, ComputeTask) else ("queue", task.queue)
        server = self.servers.setdefault(key, _Server())
        heapq.heappush(server.waiting, (task.priority, self.clock.now_s, number))
        if not server.is_busy:
            self.free[server] = None

    def _dispatch(self) -> None:
        for server in self.free:
            if server.waiting and not server.is_busy:
                self._serve(server, heapq.heappop(server.waiting)[2])
        self.free.clear()

    def _serve(self, server: _Server, number: int) -> None:
        task = self.tasks[number]
        server.is_busy = True
        self.start_s[number] = self.clock.now_s
        end = self._ending(number)

        def end_and_release() -> None:
            self._release(server)
            end()

        if isinstance(task, ComputeTask):
            self.clock.at(self.clock.now_s + task.seconds, end_and_release)
        elif task.waits_for_arrival:
            self.network.start(task.flow, end_and_release)
        else:
            self.network.start(task.flow, end, has_left=lambda: self._release(server))

    def _release(self, server: _Server) -> None:
        server.is_busy = False
        self.free[server] = None

    def _ending(self, number: int) -> Callable[[], None]:
        def end() -> None:
            self.end_s[number] = self.clock.now_s
            for follower in self.followers[number]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._ready(follower)

        return end


def _check(tasks: Sequence[Task]) -> None:
    """Refuse a graph with edges to nowhere, or with a circle."""
    for number, task in enumerate(tasks):
        for before in task.after:
            if not 0 <= before < len(tasks):
                raise ValueError(f"after of task {number} must name tasks 0 to {len(tasks) - 1}, got {before}")
    try:
        TopologicalSorter({number: task.after for number, task in enumerate(tasks)}).prepare()
    except CycleError as error:
        waiting = sorted(set(error.args[1]))[:5]
        raise ValueError(
            f"after must not go round in circles, but tasks {waiting} wait for each other; cut one edge"
        ) from None
