"""Schedule of a layer of experts whose tokens travel in chunks (FSMoE), as a task graph, and the fastest degrees.

A chunk crosses between nodes, is gathered among the devices of a node that share each expert, computed, scattered
again, and crosses back. Messages of a kind follow each other, and those of unlike kinds overlap with each other and
with computing. Gradients that wait for the same line go into its gaps. Nothing is approximated: all degrees are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from thinwire.simulate.fluid_network import FluidFlow, SimLink
from thinwire.simulate.task_graph import ComputeTask, Task, TaskTimes, TransferTask, run_tasks

DEGREES = (1, 2, 4, 8)  # chunks of a pass that are tried, as the paper does
# A backward pass computes gradients of inputs and of weights.
_BACKWARD_WORK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Linear cost of a part of a layer's forward pass: of a share x of the tokens, start_s + x whole_s."""

    start_s: float = 0.0
    whole_s: float = 0.0

    def of(self, chunks: int) -> float:
        """Return the seconds of one of so many equal chunks."""
        return self.start_s + self.whole_s / chunks if self.whole_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs of a layer of experts."""

    all_to_all: Cost  # of tokens between nodes, one way
    latency_s: float = 0.0  # of a message between nodes; the next one follows meanwhile
    ready_s: float = 0.0  # until a sender knows that a receiver waits: gloo's messages leave then
    backward_all_to_all: Cost | None = None  # where gradients have another code than tokens
    gather: Cost = Cost()  # inside a node, before the experts
    experts: Cost  # a forward pass
    scatter: Cost = Cost()  # inside a node, after the experts
    gradient: Cost = Cost()  # all-reduce of what later layers left for this line, in the backward pass


def pass_tasks(costs: LayerCosts, chunks: int, *, is_backward: bool = False, pieces: int = 0) -> list[Task]:
    """Return the tasks of a pass: the counts of a forward one, those of each chunk, and the pieces of the gradient.

    All chunks may leave at once, those of the way back when they are made. A piece of the gradient leaves where no
    chunk waits for the line.

    Args:
        costs: Of the layer.
        chunks: Of the pass.
        is_backward: Whether it is a backward pass.
        pieces: Of the gradient; 0 leaves it out.
    """
    line_cost = (costs.backward_all_to_all if is_backward else None) or costs.all_to_all
    # a backward pass scatters where a forward pass gathers
    ways = (costs.scatter, costs.gather) if is_backward else (costs.gather, costs.scatter)
    work_s = costs.experts.of(chunks) * (_BACKWARD_WORK if is_backward else 1)

    tasks: list[Task] = []

    def add(processor: str, seconds: float, *after: int) -> int:
        tasks.append(ComputeTask(processor=processor, seconds=seconds, after=after))
        return len(tasks) - 1

    def send(seconds: float, *after: int, priority: float = 0.0) -> int:
        ready = add(f"message {len(tasks)}", costs.ready_s, *after)
        flow = FluidFlow(size_bits=seconds, loads=((0, 1.0),), latency_s=costs.latency_s)
        tasks.append(TransferTask(flow=flow, after=(ready,), queue="line", priority=priority))
        return len(tasks) - 1

    # a forward pass begins with the counts of rows, by which receivers make room for them
    counted = () if is_backward else (send(0.0),)
    for _ in range(chunks):
        arrived = send(line_cost.of(chunks), *counted)
        made = add("device", work_s, add("node", ways[0].of(chunks), arrived))
        send(line_cost.of(chunks), add("node", ways[1].of(chunks), made))
    for _ in range(pieces):
        send(costs.gradient.of(pieces), priority=1.0)
    return tasks


def pass_times(costs: LayerCosts, chunks: int, *, is_backward: bool = False, pieces: int = 0) -> TaskTimes:
    """Return the simulated times of `pass_tasks`; one bit a second stands for a second of the line."""
    tasks = pass_tasks(costs, chunks, is_backward=is_backward, pieces=pieces)
    return run_tasks(tasks, links=[SimLink(bandwidth_bits_per_s=1.0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDegrees:
    """Degrees of a layer and its time."""

    forward: int  # chunks
    backward: int  # chunks
    pieces: int  # of the gradient
    seconds: float  # of both passes, with the gradient


def schedules(costs: LayerCosts, degrees: Sequence[int] = DEGREES) -> list[ChunkDegrees]:
    """Return every pair of degrees with its time, the fastest first; of equal ones the fewest chunks.

    The gradient goes in as many pieces as is fastest.

    Example:
        >>> best = schedules(LayerCosts(all_to_all=Cost(start_s=0.01, whole_s=1.0), experts=Cost(whole_s=2.0)))[0]
        >>> best.forward, best.backward, round(best.seconds, 2)
        (8, 8, 6.54)
    """
    forward_s = {chunks: pass_times(costs, chunks).makespan_s for chunks in degrees}
    has_gradient = costs.gradient.whole_s > 0
    backward = {
        chunks: min(
            (pass_times(costs, chunks, is_backward=True, pieces=pieces).makespan_s, pieces)
            for pieces in (degrees if has_gradient else (0,))
        )
        for chunks in degrees
    }
    found = [
        ChunkDegrees(
            forward=one, backward=other, pieces=backward[other][1], seconds=forward_s[one] + backward[other][0]
        )
        for one, other in product(degrees, repeat=2)
    ]
    # rounding of times that are equal in theory must not choose
    return sorted(found, key=lambda one: (float(f"{one.seconds:.9g}"), one.forward + one.backward))
