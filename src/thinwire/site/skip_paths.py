"""Paths of micro-batches that skip some stages of a pipeline, and their step times in virtual time.

Each micro-batch takes its own path through the nodes that hold the stages. It begins at a node of the first stage,
which also computes the loss, visits some other stages at most once each, and goes back the same way. A* finds the best
path of one micro-batch. Conflict-based search above it keeps the limits that several micro-batches share, and parts
those that would meet on a node.

Reference:
    SkipPipe, arXiv 2502.19913. Its messages between nodes are replaced by a plan that all nodes know beforehand.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from thinwire.errors import refusal
from thinwire.files import short

# A backward pass and a loss, in forward passes of the same node.
BACKWARD, LOSS = 1.5, 0.25
# Stages that a path may go back over in total, one at a time, and that it may jump beyond the furthest one.
_MOST_SWAPS, _MOST_JUMP = 2, 4
# Plans within the shared limits among which the search for fewer meetings begins.
_MOST_SEEDS = 32
# Seconds for which one visit too many counts: the search goes on where few are left.
_EXCESS_S = 0.2

Path = tuple[int, ...]


class PathPass(NamedTuple):
    """One pass of a micro-batch on a node: place in its trip, of which the loss is the middle."""

    start_s: float
    end_s: float
    node: int
    micro_batch: int
    place: int


@dataclass(frozen=True, kw_only=True)
class SkipNetwork:
    """Nodes of a pipeline in which micro-batches choose their paths.

    Attributes:
        stages: Nodes of each stage; micro-batches begin at those of the first one.
        forward_s: Forward pass of a micro-batch, of each node.
        delay_s: From a node to another one, for activations and for gradients.
        memory: Micro-batches that a node holds at once.
        after_first_s: For which a node is not free after it began a micro-batch.
        after_s: For which it is not free after any other pass.
    """

    stages: tuple[tuple[int, ...], ...]
    forward_s: tuple[float, ...]
    delay_s: tuple[tuple[float, ...], ...]
    memory: int = 3
    after_first_s: float = 0.0
    after_s: float = 0.0

    def __post_init__(self) -> None:
        """Check that each node has one stage, and all times."""
        nodes = [node for own in self.stages for node in own]
        every = [*self.forward_s, *(one for row in self.delay_s for one in row), self.after_first_s, self.after_s]
        is_whole = sorted(nodes) == list(range(len(nodes))) and all(self.stages) and len(nodes) > 0
        is_square = len(self.forward_s) == len(self.delay_s) == len(nodes)
        is_square = is_square and all(len(row) == len(nodes) for row in self.delay_s)
        if not is_whole or not is_square or not all(0 <= one < inf for one in every) or self.memory < 1:
            raise refusal(
                "a network has nodes 0, 1, ... in one stage each, with a time each, and delays between all",
                got=f"stages {self.stages}, {len(self.forward_s)} times, {len(self.delay_s)} rows of delays, "
                f"memory {self.memory}", allowed="finite times from 0, memory from 1",
                remedy="SkipNetwork(stages=((0,), (1,)), forward_s=(1, 1), delay_s=((0, 2), (2, 0)))",
            )  # fmt: skip

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Stage of each node."""
        return {node: number for number, nodes in enumerate(self.stages) for node in nodes}

    def trip(self, path: Path) -> list[tuple[int, float]]:
        """Return node and seconds of each pass of a path: forward, the loss, and backward."""
        forward = [(node, self.forward_s[node]) for node in path]
        backward = [(node, BACKWARD * seconds) for node, seconds in reversed(forward)]
        return [*forward, (path[0], LOSS * self.forward_s[path[0]]), *backward]

    def next_nodes(self, path: Path) -> list[int]:
        """Return the nodes to which a path may go on."""
        visited = [self.stage_of[node] for node in path]
        furthest = swapped = 0
        for stage in visited:
            furthest = max(furthest, stage)
            swapped += furthest - stage
        allowed: list[int] = []
        for stage, nodes in enumerate(self.stages):
            back = max(0, furthest - stage)
            if stage and stage not in visited and back <= 1 and swapped + back <= _MOST_SWAPS:
                allowed += nodes if stage - furthest <= _MOST_JUMP else ()
        return allowed


def run_paths(network: SkipNetwork, paths: Sequence[Path], starts_s: Sequence[float]) -> list[PathPass]:
    """Run micro-batches along their paths, and return their passes in the order in which they start.

    A node takes the pass that is ready first, and begins a micro-batch of its own only when nothing else is ready. A
    forward pass needs a free place in the node's memory, which the backward pass gives back.

    Args:
        network: The nodes.
        paths: Of each micro-batch.
        starts_s: Before which each micro-batch does not begin.

    Raises:
        ValueError: A path or start is none, or micro-batches wait for places that they hold themselves.

    Example:
        >>> network = SkipNetwork(stages=((0,), (1,)), forward_s=(1, 1), delay_s=((0, 2), (2, 0)))
        >>> max(one.end_s for one in run_paths(network, [(0, 1)], [0.0]))
        13.25
    """
    is_known = all(path and len(set(path)) == len(path) and set(path) <= network.stage_of.keys() for path in paths)
    if not is_known or len(starts_s) != len(paths) or not all(0 <= one < inf for one in starts_s):
        raise refusal("each micro-batch has a path of nodes and a start", got=f"{short(paths)}, {short(starts_s)}",
                      allowed=f"nodes 0 to {len(network.stage_of) - 1}, each once, and as many finite times from 0",
                      remedy="run_paths(network, [(0, 1)], [0.0])")  # fmt: skip
    trips = [network.trip(path) for path in paths]
    free_s = dict.fromkeys(network.stage_of, 0.0)
    places = dict.fromkeys(network.stage_of, network.memory)
    waiting: dict[int, list[tuple[float, int, int]]] = {node: [] for node in network.stage_of}
    # ready pass: when, whether it begins a micro-batch, its number and place; an old time wakes a node
    events = [(start_s, inf, number, 0) for number, start_s in enumerate(starts_s)]
    heapq.heapify(events)
    found: list[PathPass] = []
    while events:
        now_s, arrival_s, number, place = heapq.heappop(events)
        node = trips[number][place][0] if number >= 0 else place
        if number >= 0:
            waiting[node].append((arrival_s, number, place))
        if now_s < free_s[node]:
            continue
        ready = [one for one in waiting[node] if places[node] or one[2] >= len(paths[one[1]])]
        if not ready:
            continue
        chosen = min(ready)
        waiting[node].remove(chosen)
        _, number, place = chosen
        end_s = now_s + trips[number][place][1]
        found.append(PathPass(now_s, end_s, node, number, place))
        loss = len(paths[number])
        places[node] += (place > loss) - (place < loss)
        if place < len(trips[number]) - 1:
            arrival_s = end_s + network.delay_s[node][trips[number][place + 1][0]]
            heapq.heappush(events, (arrival_s, arrival_s, number, place + 1))
        free_s[node] = end_s + (network.after_s if place else network.after_first_s)
        heapq.heappush(events, (free_s[node], inf, -1, node))
    if len(found) < sum(map(len, trips)):
        raise refusal("micro-batches wait for each other's places in a node's memory", got=f"memory={network.memory}",
                      allowed="enough for these paths", remedy=f"memory={len(paths)}")  # fmt: skip
    return found


def orders_of(passes: Sequence[PathPass]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return each node's passes in order, as micro-batch and place, for `thinwire.transport.path_runner`."""
    nodes = {one.node for one in passes}
    return {node: tuple((one.micro_batch, one.place) for one in passes if one.node == node) for node in nodes}


@dataclass(frozen=True, kw_only=True)
class SkipProblem:
    """Micro-batches of a step whose paths are sought.

    Attributes:
        network: The nodes.
        starts: Node of the first stage, and least start, of each micro-batch.
        length: Stages on each path, the first one included.
        repeats_s: When the same paths are run again, after their first start: a step has several waves.
        stage_visits: Most micro-batches of a wave that visit one stage. Default: what the nodes of the smallest one
            hold at once.
        node_visits: Most micro-batches of a wave that visit one node. Default: what it holds at once.

    Raises:
        ValueError: The length is out of range, or the stages cannot hold so many visits.
    """

    network: SkipNetwork
    starts: tuple[tuple[int, float], ...]
    length: int
    repeats_s: tuple[float, ...] = (0.0,)
    stage_visits: int | None = None
    node_visits: int | None = None

    def __post_init__(self) -> None:
        """Check the length and the limits."""
        others = len(self.network.stages) - 1
        first = self.network.stages[0]
        if not self.starts or not all(node in first and 0 <= start_s < inf for node, start_s in self.starts):
            raise refusal("micro-batches start at nodes of the first stage", got=str(self.starts)[:200],
                          allowed=f"one or more, at {first}, from 0 s",
                          remedy=f"starts=(({first[0]}, 0.0),)")  # fmt: skip
        if not 1 <= self.length <= others + 1:
            raise refusal("a path must have the first stage and visit none twice", got=f"{self.length} stages",
                          allowed=f"1 to {others + 1}", remedy=f"length={others + 1}")  # fmt: skip
        visits, places = len(self.starts) * (self.length - 1), others * self.most_stage_visits
        if visits > places:
            raise refusal("the stages cannot hold all visits", got=f"{visits} visits", allowed=f"at most {places}",
                          remedy=f"stage_visits={-(-visits // others)} and node_visits alike")  # fmt: skip

    @property
    def most_node_visits(self) -> int:
        return self.network.memory if self.node_visits is None else self.node_visits

    @property
    def most_stage_visits(self) -> int:
        smallest = min((len(nodes) for nodes in self.network.stages[1:]), default=0)
        return smallest * self.most_node_visits if self.stage_visits is None else self.stage_visits

    def makespan_s(self, paths: Sequence[Path]) -> float:
        """Return the time of all waves on these paths, collisions included; infinity where the memory is too small."""
        starts_s = [start_s + later_s for later_s in self.repeats_s for _, start_s in self.starts]
        try:
            return max(one.end_s for one in run_paths(self.network, [*paths] * len(self.repeats_s), starts_s))
        except ValueError:
            return inf


class SkipPaths(NamedTuple):
    """Result of `solve_paths`.

    Attributes:
        paths: Of each micro-batch: the nodes that it visits, in order.
        makespan_s: Of all waves, in virtual time.
        is_proven: Whether no plan within the limits has a shorter longest trip; of plans without collisions alone.
    """

    paths: list[Path]
    makespan_s: float
    is_proven: bool


def solve_paths(problem: SkipProblem, *, parts_collisions: bool = True, most_tries: int = 2000) -> SkipPaths:
    """Find a path for each micro-batch by conflict-based search.

    First the limits on visits: each of the micro-batches of which one is too many is forbidden the place in turn, until
    the longest trip is the shortest possible one. Then collisions: of two that would be on a node at the same time
    one has to wait or to go elsewhere, and the plan with the shortest step is kept.

    Args:
        problem: What is sought.
        parts_collisions: Whether the second search runs.
        most_tries: Plans that each search tries; with fewer than needed the result is good, not the best.

    Raises:
        ValueError: No plan was found.
    """
    seeds, is_proven = _within_limits(problem, most_tries, keeps_longer=False)
    if not seeds:
        raise refusal("no paths keep the limits of stages and nodes", got=f"{most_tries} plans tried",
                      allowed="one or more", remedy="a larger most_tries or node_visits")  # fmt: skip
    if not parts_collisions:
        return SkipPaths(seeds[-1].paths, problem.makespan_s(seeds[-1].paths), is_proven)
    # the plan with the shortest longest trip is not always the one with the shortest step
    seeds += _within_limits(problem, most_tries, keeps_longer=True)[0]
    queue: list[tuple[float, float, _Branch]]
    queue = [(problem.makespan_s(one.paths), number, one) for number, one in enumerate(seeds)]
    heapq.heapify(queue)
    best_s, _, best = queue[0]
    for number in range(len(seeds), len(seeds) + most_tries):
        if not queue:
            break
        makespan_s, _, branch = heapq.heappop(queue)
        excess, forbidden, visitors = _crowded(problem, branch)
        if not excess and makespan_s < best_s:
            best_s, best = makespan_s, branch
        for place, limit in enumerate([(one, forbidden) for one in visitors] if excess else _apart(branch)):
            child = _limited(problem, branch, *limit)
            if child is not None:
                heapq.heappush(queue, (problem.makespan_s(child.paths), number + place / 1e3, child))
    return SkipPaths(best.paths, best_s, is_proven=False)


# Node, and time in which a micro-batch must not be there.
Window = tuple[int, float, float]
Windows = frozenset[Window]


class _Branch(NamedTuple):
    """Windows of each micro-batch, and its passes, were it alone but for them."""

    windows: tuple[Windows, ...]
    plans: tuple[tuple[PathPass, ...], ...]

    @property
    def paths(self) -> list[Path]:
        return [tuple(one.node for one in plan[: len(plan) // 2]) for plan in self.plans]

    @property
    def finishes_s(self) -> list[float]:
        return [plan[-1].end_s for plan in self.plans]


def _free_s(windows: Windows, node: int, now_s: float, seconds: float) -> float:
    """Return when a pass may start on a node, now or later; infinity for never."""
    for _, start_s, end_s in sorted(window for window in windows if window[0] == node):
        if now_s < end_s and now_s + seconds > start_s:
            now_s = end_s
    return now_s


def _best_plan(problem: SkipProblem, micro_batch: int, windows: Windows) -> tuple[PathPass, ...] | None:
    """Return the trip of one micro-batch that ends first (A*), None where its windows leave none."""
    network, (start, start_s) = problem.network, problem.starts[micro_batch]
    nodes = [node for node, stage in network.stage_of.items() if stage or node == start]
    hop_s = min((network.delay_s[a][b] for a in nodes for b in nodes if a != b), default=0.0)
    visit_s = (1 + BACKWARD) * min(network.forward_s[node] for node in nodes) + 2 * hop_s

    def least_s(path: Path, now_s: float) -> float:
        """Return the least end of a trip whose last forward pass of these has ended now."""
        back_s = sum(network.delay_s[a][b] for a, b in zip(path[1:], path, strict=False))
        back_s += sum(BACKWARD * network.forward_s[node] for node in path) + LOSS * network.forward_s[start]
        left = problem.length - len(path)
        home_s = 2 * hop_s if left else network.delay_s[path[-1]][start] + network.delay_s[start][path[-1]]
        return now_s + back_s + home_s + left * visit_s

    reached: list[tuple[float, Path, float, tuple[PathPass, ...]]] = [(0.0, (), start_s, ())]
    while reached:
        _, path, now_s, plan = heapq.heappop(reached)
        if plan:
            return plan
        if len(path) == problem.length:
            plan = _timed(network, path, micro_batch, start_s, windows)
            if plan[-1].end_s < inf:
                heapq.heappush(reached, (plan[-1].end_s, path, now_s, plan))
            continue
        for node in network.next_nodes(path) if path else (start,):
            seconds, hop = network.forward_s[node], network.delay_s[path[-1]][node] if path else 0.0
            end_s = _free_s(windows, node, now_s + hop, seconds) + seconds
            if end_s < inf:
                heapq.heappush(reached, (least_s((*path, node), end_s), (*path, node), end_s, ()))
    return None


def _timed(
    network: SkipNetwork, path: Path, micro_batch: int, start_s: float, windows: Windows
) -> tuple[PathPass, ...]:  # fmt: skip
    """Return the passes of a path, each as early as its windows allow."""
    now_s, before, passes = start_s, path[0], []
    for place, (node, seconds) in enumerate(network.trip(path)):
        now_s = _free_s(windows, node, now_s + network.delay_s[before][node], seconds)
        passes.append(PathPass(now_s, now_s + seconds, node, micro_batch, place))
        now_s, before = now_s + seconds, node
    return tuple(passes)


def _within_limits(problem: SkipProblem, most_tries: int, *, keeps_longer: bool) -> tuple[list[_Branch], bool]:
    """Return plans within the limits on visits, and whether no other one has a shorter longest trip than the last.

    With `keeps_longer` plans whose longest trip is longer than an earlier one's are among them.
    """
    plans = tuple(_best_plan(problem, number, frozenset()) for number in range(len(problem.starts)))
    first = _Branch((frozenset(),) * len(plans), tuple(plan for plan in plans if plan is not None))
    queue: list[tuple[float, float, int, _Branch]] = [] if None in plans else [(0.0, 0.0, 0, first)]
    seen, best_s = {first.windows}, inf
    found: list[_Branch] = []
    for tried in range(most_tries):
        if not queue or len(found) == _MOST_SEEDS:
            break
        branch = heapq.heappop(queue)[-1]
        longest_s = max(branch.finishes_s)
        if longest_s > best_s and not keeps_longer:
            continue
        excess, forbidden, visitors = _crowded(problem, branch)
        if not excess:
            best_s = min(best_s, longest_s)
            found.append(branch)
        for number in visitors:
            child = _limited(problem, branch, number, forbidden)
            if child is not None and child.windows not in seen:
                seen.add(child.windows)
                cost_s = max(child.finishes_s) + _EXCESS_S * _crowded(problem, child)[0]
                heapq.heappush(queue, (cost_s, sum(child.finishes_s), tried * len(plans) + number, child))
    return found, all(max(one[-1].finishes_s) >= best_s for one in queue)


def _crowded(problem: SkipProblem, branch: _Branch) -> tuple[int, Windows, list[int]]:
    """Return how many visits are too many, and of the first crowded place its windows and enough of its visitors.

    Of one more than may visit a place one has to leave it, so a search that forbids each of them in turn is complete.
    """
    stages = problem.network.stages[1:]
    excess, forbidden, crowd = 0, Windows(), list[int]()
    visits = [(node, number) for number, path in enumerate(branch.paths) for node in path[1:]]
    places = [(stage, problem.most_stage_visits) for stage in stages]
    for place, most in (*places, *(((node,), problem.most_node_visits) for stage in stages for node in stage)):
        visitors = [number for node, number in visits if node in place]
        if len(visitors) > most:
            excess += len(visitors) - most
            if not crowd:
                forbidden = Windows((node, -inf, inf) for node in place)
                crowd = sorted(visitors, key=branch.finishes_s.__getitem__)[: most + 1]
    return excess, forbidden, crowd


def _apart(branch: _Branch) -> list[tuple[int, Windows]]:
    """Return the windows by which either of the first two micro-batches that meet on a node avoids the other."""
    last: dict[int, PathPass] = {}
    for later in sorted(one for plan in branch.plans for one in plan):
        earlier = last.get(later.node)
        if earlier is not None and earlier.micro_batch != later.micro_batch and later.start_s < earlier.end_s:
            pairs = (later, earlier), (earlier, later)
            return [(one.micro_batch, Windows([(other.node, other.start_s, other.end_s)])) for one, other in pairs]
        if earlier is None or later.end_s > earlier.end_s:
            last[later.node] = later
    return []


def _limited(problem: SkipProblem, branch: _Branch, number: int, windows: Windows) -> _Branch | None:
    """Return a branch with more windows and another plan of one micro-batch, None where it has no path."""
    windows |= branch.windows[number]
    plan = _best_plan(problem, number, windows)
    if plan is None:
        return None
    return _Branch(
        (*branch.windows[:number], windows, *branch.windows[number + 1 :]),
        (*branch.plans[:number], plan, *branch.plans[number + 1 :]),
    )  # fmt: skip
