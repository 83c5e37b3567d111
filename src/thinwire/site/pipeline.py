"""Pipeline schedules of a site, and their exact step times in virtual time.

A schedule is the order in which each rank works through its micro-batches: 1F1B with a chosen number in flight, or
interleaved 1F1B (arXiv 2104.04473). The order becomes a graph of tasks for `thinwire.simulate`: each operation waits
for the one before it on its rank and for the message from its neighbour, and messages queue on their link. Nothing is
assumed about bubbles: they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from thinwire.errors import refusal
from thinwire.simulate import ComputeTask, FluidFlow, SimLink, TransferTask, run_tasks

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
        ahead = min(num_micro_batches, eagerness * (num_stages - rank) - (eagerness - 1))
        forward = [PipelineOp(True, 0, number) for number in range(num_micro_batches)]
        backward = [PipelineOp(False, 0, number) for number in range(num_micro_batches)]
        ranks.append(_alternate(forward, backward, ahead - 1))
    return tuple(ranks)


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
    total, group = interleave * num_micro_batches, interleave * num_stages

    def operation(number: int, *, is_forward: bool) -> PipelineOp:
        chunk = number % group // num_stages
        micro_batch = number // group * num_stages + number % num_stages
        return PipelineOp(is_forward, chunk if is_forward else interleave - 1 - chunk, micro_batch)

    ranks = []
    for rank in range(num_stages):
        warm_up = min(total, 2 * (num_stages - rank - 1) + (interleave - 1) * num_stages)
        forward = [operation(number, is_forward=True) for number in range(total)]
        backward = [operation(number, is_forward=False) for number in range(total)]
        ranks.append(_alternate(forward, backward, warm_up))
    return tuple(ranks)


def most_in_flight(operations: Sequence[PipelineOp]) -> int:
    """Return how many forward passes of a rank wait for their backward pass at once, at most."""
    most = now = 0
    for operation in operations:
        now += 1 if operation.is_forward else -1
        most = max(most, now)
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage: one chunk of one rank.

    Attributes:
        forward_s: Forward pass of a micro-batch.
        backward_s: Backward pass of a micro-batch, with what is recomputed.
        first_forward_s: That of the first micro-batch of a step, which may wait for gathered weights; None if equal.
        last_backward_s: That of the last micro-batch, which may reduce gradients; None if equal.
    """

    forward_s: float
    backward_s: float
    first_forward_s: float | None = None
    last_backward_s: float | None = None

    def seconds(self, operation: PipelineOp, *, num_micro_batches: int) -> float:
        """Return the duration of one operation of this stage."""
        usual, special = self.backward_s, self.last_backward_s
        is_special = operation.micro_batch == num_micro_batches - 1
        if operation.is_forward:
            usual, special = self.forward_s, self.first_forward_s
            is_special = operation.micro_batch == 0
        return usual if special is None or not is_special else special

    def total_s(self, num_micro_batches: int) -> float:
        """Return the seconds of a whole step of this stage."""
        first = self.forward_s if self.first_forward_s is None else self.first_forward_s
        last = self.backward_s if self.last_backward_s is None else self.last_backward_s
        return first + last + (num_micro_batches - 1) * (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """Link from one rank of a pipeline to the next one, alike in both directions.

    Attributes:
        message_s: Seconds for which a message occupies the link.
        latency_s: Seconds from its last bit's leaving to its arrival.
    """

    message_s: float = 0.0
    latency_s: float = 0.0

    @property
    def total_s(self) -> float:
        """From the start of a message on a free link to its arrival."""
        return self.message_s + self.latency_s


def order_of(*, num_stages: int, num_micro_batches: int, interleave: int = 1) -> Order:
    """Return 1F1B, or interleaved 1F1B where a rank has several chunks."""
    if interleave == 1:
        return one_f_one_b(num_stages=num_stages, num_micro_batches=num_micro_batches)
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
    num_micro_batches = 1 + max(operation.micro_batch for operation in order[0])
    numbers: dict[tuple[bool, int, int], int] = {}
    for rank, operations in enumerate(order):
        for operation in operations:
            stage = operation.chunk * num_ranks + rank
            numbers[operation.is_forward, stage, operation.micro_batch] = len(numbers)
    tasks: list[ComputeTask | TransferTask] = []
    messages: list[TransferTask] = []
    for rank, operations in enumerate(order):
        for position, operation in enumerate(operations):
            stage = operation.chunk * num_ranks + rank
            after = [len(tasks) - 1] if position else []
            source = stage - 1 if operation.is_forward else stage + 1
            if 0 <= source < len(stages):
                sender = numbers[operation.is_forward, source, operation.micro_batch]
                link = source % num_ranks if operation.is_forward else rank
                if num_ranks > 1 and stage_links[link].total_s > 0:
                    after.append(len(numbers) + len(messages))
                    messages.append(
                        _message(stage_links[link], link if operation.is_forward else num_ranks + link, sender)
                    )
                else:
                    after.append(sender)
            seconds = stages[stage].seconds(operation, num_micro_batches=num_micro_batches)
            tasks.append(ComputeTask(processor=rank, seconds=seconds, after=tuple(after)))
    # a message's size is its seconds: on its own link of one bit a second it takes just these
    links = [SimLink(bandwidth_bits_per_s=1.0 if stage_links[number % num_ranks].message_s else inf)
             for number in range(2 * num_ranks)] if messages else []  # fmt: skip
    return run_tasks([*tasks, *messages], links=links).makespan_s


def step_s(
    stages: Sequence[StageTimes], stage_links: Sequence[StageLink], *, num_micro_batches: int, interleave: int = 1
) -> float:
    """Return the step time of a pipeline with any number of micro-batches.

    Up to six times as many micro-batches as ranks the schedule runs in full; what is beyond repeats the last rounds.

    Args:
        stages: As for `pipeline_s`.
        stage_links: As for `pipeline_s`.
        num_micro_batches: Of one step.
        interleave: Chunks of each rank.
    """
    num_ranks = len(stages) // interleave
    if num_ranks == 1:
        return stages[0].total_s(num_micro_batches)

    def exact(count: int) -> float:
        order = order_of(num_stages=num_ranks, num_micro_batches=count, interleave=interleave)
        return pipeline_s(order, stages, stage_links)

    periods = max(0, num_micro_batches // num_ranks - _EXACT_ROUNDS)
    simulated = num_micro_batches - periods * num_ranks
    found = exact(simulated)
    if not periods:
        return found
    return found + periods / _REPEATED_ROUNDS * (found - exact(simulated - _REPEATED_ROUNDS * num_ranks))


def lower_bound_s(
    stages: Sequence[StageTimes], stage_links: Sequence[StageLink], *, num_micro_batches: int, interleave: int = 1
) -> float:
    """Return a time that no step of this pipeline can beat; the largest of three.

    - A rank starts when the first micro-batch has reached it, does all its work, and then the last gradient goes back
      to the first rank.
    - A link carries all messages one after another.
    - Few micro-batches are in flight: a later one waits until an earlier one has gone to the end and come back.

    Args:
        stages: As for `pipeline_s`.
        stage_links: As for `pipeline_s`.
        num_micro_batches: Of one step.
        interleave: Chunks of each rank.
    """
    num_ranks = len(stages) // interleave
    if num_ranks == 1:
        return stages[0].total_s(num_micro_batches)
    best = fill = drain = 0.0
    for rank in range(num_ranks):
        work = sum(stages[chunk * num_ranks + rank].total_s(num_micro_batches) for chunk in range(interleave))
        first, last = stages[rank].first_forward_s, stages[rank].last_backward_s
        best = max(best, fill + work + drain)
        if interleave == 1:
            trips = -(-num_micro_batches // (num_ranks - rank))
            best = max(best, fill + trips * _round_trip_s(stages[rank:], stage_links[rank:]))
        fill += stages[rank].forward_s if first is None else first
        messages = num_micro_batches * (interleave if rank < num_ranks - 1 else interleave - 1)
        best = max(best, fill + messages * stage_links[rank].message_s)
        fill += stage_links[rank].total_s
        drain += (stages[rank].backward_s if last is None else last) + stage_links[rank].total_s
    for chunk in range(interleave if interleave > 1 else 0):
        # on rank 0, 2 (v - c) p - 1 forward passes after one of chunk c the gradient of that one has come back; chunk c
        # has its turn every v p forward passes
        rounds = -(-(2 * (interleave - chunk) * num_ranks - 1) // (interleave * num_ranks))
        trips = (num_micro_batches // num_ranks - 1) // rounds + 1
        best = max(best, trips * _round_trip_s(stages[chunk * num_ranks :], stage_links))
    return best


def _round_trip_s(stages: Sequence[StageTimes], stage_links: Sequence[StageLink]) -> float:
    """Return the least time from the first to the last of some stages and back; the links go round."""
    work = sum(
        min(stage.forward_s, stage.forward_s if stage.first_forward_s is None else stage.first_forward_s)
        + min(stage.backward_s, stage.backward_s if stage.last_backward_s is None else stage.last_backward_s)
        for stage in stages
    )
    return work + 2 * sum(stage_links[number % len(stage_links)].total_s for number in range(len(stages) - 1))


def _alternate(forward: Sequence[PipelineOp], backward: Sequence[PipelineOp], warm_up: int) -> tuple[PipelineOp, ...]:
    """Return forward passes to warm up, then pairs of forward and backward, then the backward passes that are left."""
    found = list(forward[:warm_up])
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        found += [ahead, behind]
    return (*found, *backward[len(forward) - warm_up :])


def _message(stage_link: StageLink, link: int, sender: int) -> TransferTask:
    flow = FluidFlow(size_bits=stage_link.message_s, loads=((link, 1.0),), latency_s=stage_link.latency_s)
    return TransferTask(flow=flow, after=(sender,), queue=link)
