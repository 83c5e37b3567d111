"""Passes of one stage of a pipeline in which every micro-batch takes its own path.

torch's stages have one neighbour before and one behind; here a micro-batch says where it comes from and where it goes.
A node of the first stage begins a micro-batch, and computes its loss when the last node of its path has sent it back.
The gradient of the loss then takes the same way once more, and from the last node on the path backward.

Reference:
    SkipPipe, arXiv 2502.19913; `thinwire.site.skip_paths` finds paths and orders.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from thinwire.errors import PayloadError, refusal
from thinwire.transport.base import NOTE_BYTES, Envelope, Pending, Transport
from thinwire.transport.coded_stage import StageCode
from thinwire.transport.streams import ACTIVATIONS

# Messages that a node waits for at once before their time; gloo has a thread for each.
_RECEIVES_AHEAD = 8
_MOST_MICRO_BATCHES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """Paths and orders of a step, on which all its nodes agree.

    Attributes:
        number: Of the step, counted up.
        paths: Of each micro-batch, the nodes that it visits, in order; nodes are the transport's replicas.
        orders: Of each node that takes part, its passes in order: a micro-batch, and the pass's place in its trip,
            which goes forward along the path, computes the loss at its first node, and goes backward.
        weights: Of each micro-batch's loss in that of the batch.

    Raises:
        ValueError: A path is empty or visits a node twice, or the orders do not hold the passes of all trips.
    """

    number: int
    paths: tuple[tuple[int, ...], ...]
    orders: dict[int, tuple[tuple[int, int], ...]]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check paths and orders."""
        if not 0 < len(self.paths) <= _MOST_MICRO_BATCHES or len(self.weights) != len(self.paths):
            raise refusal("a step has a path and a weight for each micro-batch", remedy="one weight a path",
                          got=f"{len(self.paths)} and {len(self.weights)}",
                          allowed=f"1 to {_MOST_MICRO_BATCHES} of each")  # fmt: skip
        for path in self.paths:
            if not path or len(set(path)) < len(path):
                raise refusal("a path visits a node once", got=path, allowed="one or more different nodes",
                              remedy="thinwire.site.skip_paths.solve_paths")  # fmt: skip
        listed = sorted((*one, node) for node, order in self.orders.items() for one in order)
        trips = [
            (number, place, node) for number in range(len(self.paths)) for place, node in enumerate(self.trip(number))
        ]
        if listed != sorted(trips):
            raise refusal("the orders of the nodes must hold each pass once", got=f"{len(listed)} passes",
                          allowed=f"the {len(trips)} passes of all trips",
                          remedy="the order of thinwire.site.skip_paths.run_paths")  # fmt: skip

    def trip(self, micro_batch: int) -> tuple[int, ...]:
        """Return the node of each pass of a micro-batch."""
        path = self.paths[micro_batch]
        return (*path, path[0], *reversed(path))

    def share(self, node: int) -> float:
        """Return the weight of all micro-batches that visit a node."""
        return sum(weight for path, weight in zip(self.paths, self.weights, strict=True) if node in path)


@dataclass(kw_only=True)
class _Work:
    """A node's state of a step: by micro-batch what is given for its next pass, and its input and output here."""

    share: float
    inputs: Sequence[torch.Tensor]
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class PathRunner:
    """Runs the passes of one node, and adds the gradients of its stage.

    The gradient of a stage is the mean over the micro-batches that visited it, by their weights, and not over all.

    Args:
        forward: The node's stage: takes hidden states of a micro-batch, or, at the first stage, its inputs.
        parameters: Of the stage, and of the loss at the first one.
        transport: Joins the nodes; it stays the caller's.
        code: Of messages, the same on all nodes.
        device: Of the stage.
        loss: At the first stage: of hidden states and the number of a micro-batch.
    """

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], parameters: Iterable[nn.Parameter], *,
        transport: Transport, code: StageCode, device: torch.device,
        loss: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._forward, self._transport, self._code = forward, transport, code
        self._device, self._loss = device, loss
        self._parameters = [one for one in parameters if one.requires_grad]
        # payloads of another code may have the same size
        self._note = hashlib.blake2b(code.name.encode(), digest_size=NOTE_BYTES).digest()

    def run(
        self, step: PathStep, *, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32,
        inputs: Sequence[torch.Tensor] = (),
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """Run this node's passes of a step.

        Args:
            step: The same on all nodes that take part.
            shapes: Of the hidden states of each micro-batch.
            dtype: Of the hidden states.
            inputs: Of each micro-batch, at the first stage.

        Returns:
            Loss of each micro-batch that begins here.

        Raises:
            TransportError: Another node is lost or late, or has another code.
            NonFiniteError: Activations or gradients hold NaN or infinity.
        """
        node = self._transport.replica
        order = step.orders.get(node, ())
        # of micro-batches without weight, such as padding alone, all gradients are zero
        work = _Work(share=step.share(node) or 1.0, inputs=inputs)
        messages = [one for one in order if one[1] and step.trip(one[0])[one[1] - 1] != node]
        awaited: dict[tuple[int, int], Pending] = {}
        sent: list[tuple[Pending, float]] = []
        for number, place in order:
            while messages and len(awaited) < _RECEIVES_AHEAD:
                one = messages.pop(0)
                envelope = self._envelope(step, *one, numel=math.prod(shapes[one[0]]))
                awaited[one] = self._transport.receive(source=step.trip(one[0])[one[1] - 1], envelope=envelope)
            if pending := awaited.pop((number, place), None):
                given = torch.empty(*shapes[number], dtype=dtype, device=self._device)
                self._take(step, pending, given, number, place)
                work.given[number] = given
            self._pass(step, work, number, place)
            trip = step.trip(number)
            if place + 1 < len(trip) and trip[place + 1] != node:
                sent.append(self._send(step, work.given.pop(number), number, place + 1))
        for pending, deadline_s in sent:
            pending.wait(deadline_s=deadline_s)
        return work.losses

    def _pass(self, step: PathStep, work: _Work, number: int, place: int) -> None:
        """Run one pass on what is given for it, and put what it gives on in its place."""
        given = work.given.pop(number) if place else work.inputs[number]
        turn = len(step.paths[number])
        if place <= turn and place:
            given.requires_grad_()
        if place < turn:
            work.kept[number] = given, self._forward(given)
            work.given[number] = work.kept[number][1].detach()
        elif place == turn:
            assert self._loss is not None, "paths begin at nodes with a loss"
            loss = self._loss(given, number)
            work.losses[number] = loss.detach()
            work.given[number] = self._differentiate(loss * step.weights[number], given, share=work.share)
        else:
            first, output = work.kept.pop(number)
            work.given[number] = self._differentiate(output, first, gradient=given, share=work.share)

    def _differentiate(
        self, output: torch.Tensor, given: torch.Tensor, *, share: float, gradient: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        """Add the gradients of the stage's parameters; return that of what it was given, nothing for inputs."""
        wanted = [*([given] if given.requires_grad else []), *self._parameters]
        found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        own = found.pop(0) if given.requires_grad else None
        for parameter, one in zip(self._parameters, found, strict=True):
            if one is not None:
                parameter.grad = one / share if parameter.grad is None else parameter.grad.add_(one / share)
        return torch.zeros_like(given) if own is None else own

    def _envelope(self, step: PathStep, number: int, place: int, *, numel: int, size: int | None = None) -> Envelope:
        """Return the address of the message before a pass."""
        is_forward = place <= len(step.paths[number])
        return Envelope(
            stream=ACTIVATIONS, key=(step.number << 16 | number, place, int(is_forward)), numel=numel, note=self._note,
            payload_bytes=self._code.payload_bytes(numel, is_forward=is_forward) if size is None else size,
            takes_less=size is None and not self._code.has_fixed_size(is_forward=is_forward),
        )  # fmt: skip

    def _send(self, step: PathStep, values: torch.Tensor, number: int, place: int) -> tuple[Pending, float]:
        trip, is_forward = step.trip(number), place <= len(step.paths[number])
        source = f"node {self._transport.replica}, micro-batch {number}"
        payload = self._code.encode(values, is_forward=is_forward, source=source).cpu()
        envelope = self._envelope(step, number, place, numel=values.numel(), size=len(payload))
        pending = self._transport.send(payload, to=trip[place], envelope=envelope)
        return pending, ACTIVATIONS.deadline_s(len(payload))

    def _take(self, step: PathStep, pending: Pending, out: torch.Tensor, number: int, place: int) -> None:
        """Fill a tensor with the message before a pass."""
        is_forward = place <= len(step.paths[number])
        source = f"node {step.trip(number)[place - 1]}, micro-batch {number}"
        size = self._code.payload_bytes(out.numel(), is_forward=is_forward)
        received = pending.wait(deadline_s=ACTIVATIONS.deadline_s(size))
        assert received is not None, "a receive returns its message"
        if received.note != self._note:
            raise PayloadError(f"{source}: it has another activation code than {self._code.name}; give all nodes one")
        self._code.decode(received.payload.to(out.device), out, is_forward=is_forward, source=source)
