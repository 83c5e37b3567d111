"""Pipeline schedules of a site, and their exact step times in virtual time.

A schedule is the order in which each rank works through its micro-batches: 1F1B with a chosen number in flight, or
interleaved 1F1B (arXiv 2104.04473). The order becomes a graph of tasks for `thinwire.simulate`: each operation waits
for the one before it on its rank and for the message from its neighbour, and messages queue on their link. Nothing is
assumed about bubbles: they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from thinwire.errors import refusal
from thinwire.simulate import ComputeTask, FluidFlow, SimLink, TransferTask, run_tasks
from thinwire.site.memory import interleaved_in_flight, one_f_one_b_in_flight

# Rounds, of as many micro-batches as ranks, that are simulated one by one; those beyond take as long as the last ones
# do on average. With unequal stages and links this is within 1 % of the whole schedule.
_EXACT_ROUNDS, _REPEATED_ROUNDS = 6, 3


class PipelineOp(NamedTuple):
    """One operation of a rank: a forward or backward pass of a micro-batch through one of the rank's chunks."""

    is_forward: bool
    chunk: int
    micro_batch: int


Order = tuple[tuple[PipelineOp, ...], ...]


def one_f_one_b(*, num_stages: int, num_micro_batches: int, eagerness: int = 1) -> Order:
    """Return the operations of each rank under 1F1B.

    Args:
        num_stages: p.
        num_micro_batches: m.
        eagerness: k: rank r starts min(m, k (p - r) - (k - 1)) forward passes before its first backward pass. 1 is
            1F1B; a large number is GPipe, which hides latency but keeps every micro-batch.

    Example:
        >>> [op.micro_batch for op in one_f_one_b(num_stages=2, num_micro_batches=3)[0] if op.is_forward]
        [0, 1, 2]
    """
    ranks = []
    for rank in range(num_stages):
        ahead = passes_ahead(
            rank, num_stages=num_stages, num_micro_batches=num_micro_batches, eagerness=eagerness
        )  # fmt: skip
        forward = [PipelineOp(True, 0, number) for number in range(num_micro_batches)]
        backward = [PipelineOp(False, 0, number) for number in range(num_micro_batches)]
        ranks.append(_alternate(forward, backward, ahead - 1))
    return tuple(ranks)


def passes_ahead(rank: int, *, num_stages: int, num_micro_batches: int, eagerness: int) -> int:
    """Return how many micro-batches a rank of 1F1B with an eagerness has in flight at most."""
    return min(num_micro_batches, eagerness * (num_stages - rank) - (eagerness - 1))


def interleaved(*, num_stages: int, num_micro_batches: int, interleave: int) -> Order:
    """Return the operations of each rank under interleaved 1F1B, with `interleave` chunks a rank.

    Raises:
        ValueError: The micro-batches are no multiple of the stages, which the schedule needs.
    """
    if num_micro_batches % num_stages:
        nearest = max(1, round(num_micro_batches / num_stages)) * num_stages
        raise refusal(
            "an interleaved pipeline needs a multiple of its stages", got=f"{num_micro_batches} micro-batches",
            allowed=f"multiples of {num_stages}", remedy=str(nearest),
        )  # fmt: skip
    about = {"num_stages": num_stages, "num_micro_batches": num_micro_batches, "interleave": interleave}
    return tuple(_interleaved_rank(rank, **about) for rank in range(num_stages))


def _interleaved_rank(rank: int, *, num_stages: int, num_micro_batches: int, interleave: int) -> tuple[PipelineOp, ...]:
    total, group = interleave * num_micro_batches, interleave * num_stages

    def operation(number: int, *, is_forward: bool) -> PipelineOp:
        chunk = number % group // num_stages
        micro_batch = number // group * num_stages + number % num_stages
        return PipelineOp(is_forward, chunk if is_forward else interleave - 1 - chunk, micro_batch)

    warm_up = min(total, 2 * (num_stages - rank - 1) + (interleave - 1) * num_stages)
    forward = [operation(number, is_forward=True) for number in range(total)]
    backward = [operation(number, is_forward=False) for number in range(total)]
    return _alternate(forward, backward, warm_up)


@cache
def layers_in_flight(
    rank: int, *, num_stages: int, num_micro_batches: int, own_chunks: tuple[int, ...], eagerness: int = 1
) -> float:
    """Return how many layers' activations of one micro-batch each a rank keeps at most.

    Args:
        rank: Of the pipeline.
        num_stages: Ranks of the pipeline.
        num_micro_batches: Of a step.
        own_chunks: Layers of each chunk of this rank.
        eagerness: As for `one_f_one_b`.

    Example:
        >>> layers_in_flight(0, num_stages=4, num_micro_batches=8, own_chunks=(3,))
        12
    """
    about = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    if len(own_chunks) == 1:
        if eagerness == 1:
            return own_chunks[0] * one_f_one_b_in_flight(rank, **about)
        return own_chunks[0] * passes_ahead(rank, eagerness=eagerness, **about)
    if len(set(own_chunks)) == 1:
        return own_chunks[0] * interleaved_in_flight(rank, interleave=len(own_chunks), **about)
    # the order repeats itself after as many micro-batches as ranks
    about["num_micro_batches"] = min(num_micro_batches, 3 * num_stages)
    return most_in_flight(_interleaved_rank(rank, interleave=len(own_chunks), **about), own_chunks)


@cache
def chunk_layers(layers: int, num_chunks: int) -> tuple[int, ...]:
    """Return how many layers each chunk of a pipeline has, in the order in which a micro-batch passes them.

    Where the chunks do not divide the layers, those at the ends have one less, the last one first: they hold the head
    and the embedding too. So are BLOOM (arXiv 2211.05100), GLM-130B (2210.02414) and Llama 3 (2407.21783) cut.

    Example:
        >>> chunk_layers(70, 12), chunk_layers(7, 4)
        ((5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5), (2, 2, 2, 1))
    """
    most = -(-layers // num_chunks)
    found = [most] * num_chunks
    for number in range(most * num_chunks - layers):
        found[number // 2 if number % 2 else -1 - number // 2] -= 1
    return tuple(found)


def most_in_flight(operations: Sequence[PipelineOp], weights: Sequence[float] | None = None) -> float:
    """Return how many forward passes of a rank wait for their backward pass at once, at most.

    Args:
        operations: Of the rank.
        weights: What a pass of each chunk counts; None for 1 each.
    """
    most = now = 0.0
    for operation in operations:
        weight = 1.0 if weights is None else weights[operation.chunk]
        now += weight if operation.is_forward else -weight
        most = max(most, now)
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage: one chunk of one rank.

    Attributes:
        forward_s: Forward pass of a micro-batch.
        backward_s: Backward pass of a micro-batch, with what is recomputed.
        ready_s: From the start of a step until the first forward pass may begin: all ranks gather weights at once.
        reduce_s: Sum of its gradients, after the last pass of its rank; other ranks do not wait for it.
    """

    forward_s: float
    backward_s: float
    ready_s: float = 0.0
    reduce_s: float = 0.0

    def seconds(self, *, is_forward: bool) -> float:
        """Return the duration of a pass of one micro-batch."""
        return self.forward_s if is_forward else self.backward_s

    def total_s(self, num_micro_batches: int) -> float:
        """Return the seconds of a whole step of this stage, were it alone."""
        return self.ready_s + num_micro_batches * (self.forward_s + self.backward_s) + self.reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """Link from one rank of a pipeline to the next one, and back.

    Attributes:
        message_s: Seconds for which a message occupies the link.
        latency_s: Seconds from its last bit's leaving to its arrival.
        less_back_s: Seconds less for a message back, whose code may be shorter.
    """

    message_s: float = 0.0
    latency_s: float = 0.0
    less_back_s: float = 0.0

    @property
    def back(self) -> StageLink:
        """The way back."""
        return StageLink(message_s=self.message_s - self.less_back_s, latency_s=self.latency_s)

    @property
    def total_s(self) -> float:
        """From the start of a message on a free link to its arrival."""
        return self.message_s + self.latency_s


def order_of(*, num_stages: int, num_micro_batches: int, interleave: int = 1, eagerness: int = 1) -> Order:
    """Return 1F1B with an eagerness, or interleaved 1F1B where a rank has several chunks."""
    if interleave == 1:
        return one_f_one_b(num_stages=num_stages, num_micro_batches=num_micro_batches, eagerness=eagerness)
    return interleaved(num_stages=num_stages, num_micro_batches=num_micro_batches, interleave=interleave)


def pipeline_s(order: Order, stages: Sequence[StageTimes], stage_links: Sequence[StageLink]) -> float:
    """Return the step time of a pipeline, by running its schedule.

    Args:
        order: The operations of each rank.
        stages: Stage c p + r is chunk c of rank r; a micro-batch passes them in this order.
        stage_links: Link r leads from rank r to the next one; the last one back to rank 0, which only chunks need.

    Example:
        >>> order = one_f_one_b(num_stages=4, num_micro_batches=32)
        >>> pipeline_s(order, [StageTimes(forward_s=1, backward_s=2)] * 4, [StageLink(latency_s=2)] * 4)
        209.0
    """
    num_ranks = len(order)
    numbers: dict[tuple[bool, int, int], int] = {}
    for rank, operations in enumerate(order):
        for operation in operations:
            stage = operation.chunk * num_ranks + rank
            numbers[operation.is_forward, stage, operation.micro_batch] = len(numbers)
    tasks: list[ComputeTask | TransferTask] = []
    others: list[ComputeTask | TransferTask] = []
    for rank, operations in enumerate(order):
        for position, operation in enumerate(operations):
            stage = operation.chunk * num_ranks + rank
            after = [len(tasks) - 1] if position else []
            source = stage - 1 if operation.is_forward else stage + 1
            if 0 <= source < len(stages):
                sender = numbers[operation.is_forward, source, operation.micro_batch]
                link = source % num_ranks if operation.is_forward else rank
                if num_ranks > 1 and stage_links[link].total_s > 0:
                    after.append(len(numbers) + len(others))
                    way = stage_links[link] if operation.is_forward else stage_links[link].back
                    others.append(_message(way, link if operation.is_forward else num_ranks + link, sender))
                else:
                    after.append(sender)
            if operation.is_forward and operation.micro_batch == 0 and stages[stage].ready_s:
                after.append(len(numbers) + len(others))
                others.append(ComputeTask(processor=num_ranks + stage, seconds=stages[stage].ready_s))
            seconds = stages[stage].seconds(is_forward=operation.is_forward)
            tasks.append(ComputeTask(processor=rank, seconds=seconds, after=tuple(after)))
        if reduce_s := sum(stage.reduce_s for stage in stages[rank::num_ranks]):
            others.append(ComputeTask(processor=rank, seconds=reduce_s, after=(len(tasks) - 1,)))
    # a message's size is its seconds: on its own link of one bit a second it takes just these
    links = [SimLink(bandwidth_bits_per_s=1.0 if stage_links[number % num_ranks].message_s else inf)
             for number in range(2 * num_ranks)]  # fmt: skip
    return run_tasks([*tasks, *others], links=links).makespan_s


def step_s(
    stages: Sequence[StageTimes], stage_links: Sequence[StageLink], *, num_micro_batches: int, interleave: int = 1,
    eagerness: int = 1,
) -> float:  # fmt: skip
    """Return the step time of a pipeline with any number of micro-batches.

    Up to six times as many micro-batches as ranks the schedule runs in full; what is beyond repeats the last rounds.

    Args:
        stages: As for `pipeline_s`.
        stage_links: As for `pipeline_s`.
        num_micro_batches: Of one step.
        interleave: Chunks of each rank.
        eagerness: As for `one_f_one_b`; above 1 the whole schedule runs.
    """
    num_ranks = len(stages) // interleave
    if num_ranks == 1:
        return stages[0].total_s(num_micro_batches)

    def exact(count: int) -> float:
        order = order_of(num_stages=num_ranks, num_micro_batches=count, interleave=interleave, eagerness=eagerness)
        return pipeline_s(order, stages, stage_links)

    periods = max(0, num_micro_batches // num_ranks - _EXACT_ROUNDS) if eagerness == 1 else 0
    simulated = num_micro_batches - periods * num_ranks
    found = exact(simulated)
    if not periods:
        return found
    return found + periods / _REPEATED_ROUNDS * (found - exact(simulated - _REPEATED_ROUNDS * num_ranks))


def lower_bound_s(
    stages: Sequence[StageTimes], stage_links: Sequence[StageLink], *, num_micro_batches: int, interleave: int = 1,
    eagerness: int = 1,
) -> float:  # fmt: skip
    """Return a time that no step of this pipeline can beat; the largest of three.

    - A rank starts when its weights are there and the first micro-batch has reached it, and does all its work. Then it
      sums its gradients, and the last one goes back to the first rank, which sums its own.
    - A link carries all messages one after another.
    - Few micro-batches are in flight: a later one waits until an earlier one has gone to the end and come back.

    Args:
        stages: As for `pipeline_s`.
        stage_links: As for `pipeline_s`.
        num_micro_batches: Of one step.
        interleave: Chunks of each rank.
        eagerness: As for `one_f_one_b`.
    """
    num_ranks = len(stages) // interleave
    if num_ranks == 1:
        return stages[0].total_s(num_micro_batches)
    best = fill = drain = 0.0
    reduces = [sum(stage.reduce_s for stage in stages[rank::num_ranks]) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        work = num_micro_batches * sum(stage.forward_s + stage.backward_s for stage in stages[rank::num_ranks])
        fill = max(fill, stages[rank].ready_s)
        best = max(best, fill + work + max(reduces[rank], drain + reduces[0]))
        if interleave == 1:
            ahead = passes_ahead(
                rank, num_stages=num_ranks, num_micro_batches=num_micro_batches, eagerness=eagerness
            )  # fmt: skip
            trips = -(-num_micro_batches // ahead)
            best = max(best, fill + trips * _round_trip_s(stages[rank:], stage_links[rank:]))
        fill += stages[rank].forward_s
        messages = num_micro_batches * (interleave if rank < num_ranks - 1 else interleave - 1)
        best = max(best, fill + messages * stage_links[rank].message_s)
        fill += stage_links[rank].total_s
        drain += stages[rank].backward_s + stage_links[rank].back.total_s
    for chunk in range(interleave if interleave > 1 else 0):
        # on rank 0, 2 (v - c) p - 1 forward passes after one of chunk c the gradient of that one has come back; chunk c
        # has its turn every v p forward passes
        rounds = -(-(2 * (interleave - chunk) * num_ranks - 1) // (interleave * num_ranks))
        trips = (num_micro_batches // num_ranks - 1) // rounds + 1
        best = max(best, trips * _round_trip_s(stages[chunk * num_ranks :], stage_links))
    return best


def _round_trip_s(stages: Sequence[StageTimes], stage_links: Sequence[StageLink]) -> float:
    """Return the least time from the first to the last of some stages and back; the links go round."""
    work = sum(stage.forward_s + stage.backward_s for stage in stages)
    links = [stage_links[number % len(stage_links)] for number in range(len(stages) - 1)]
    return work + sum(link.total_s + link.back.total_s for link in links)


def _alternate(forward: Sequence[PipelineOp], backward: Sequence[PipelineOp], warm_up: int) -> tuple[PipelineOp, ...]:
    """Return forward passes to warm up, then pairs of forward and backward, then the backward passes that are left."""
    found = list(forward[:warm_up])
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        found += [ahead, behind]
    return (*found, *backward[len(forward) - warm_up :])


def _message(stage_link: StageLink, link: int, sender: int) -> TransferTask:
    flow = FluidFlow(size_bits=stage_link.message_s, loads=((link, 1.0),), latency_s=stage_link.latency_s)
    return TransferTask(flow=flow, after=(sender,), queue=link)
