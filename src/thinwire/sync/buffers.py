"""A model's buffers, which are averaged on request: outside of the rounds, once, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from thinwire.averaging.exchange import TwoPhase
from thinwire.averaging.round_context import Delivery
from thinwire.averaging.topology import Peers
from thinwire.codecs import float32
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.base import Kind, Transport
from thinwire.transport.shards import flatten, unflatten_into


def saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's floating buffers that are part of its state; others are caches."""
    saved = model.state_dict(keep_vars=True)
    return [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]


def average_tensors(tensors: Sequence[torch.Tensor], *, transport: Transport, number: int, deadline_s: float) -> None:
    """Replace tensors by their mean over the replicas, and wait for it.

    Args:
        tensors: Floating, of any shapes, the same on all replicas.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call.
        deadline_s: Seconds until a peer counts as hung.

    Raises:
        TransportError: A replica did not take part.
    """
    me = transport.replica
    delivery = Delivery(
        peers=Peers(me=me, members=tuple(range(transport.num_replicas))), transport=transport, round_id=number,
        kind=Kind.BUFFERS,
    )  # fmt: skip
    steps = TwoPhase(codec=float32()).steps(flatten(tensors), delivery)
    round = Round(id=number, fragment=0, launch_step=0, apply_step=0)
    flight = launch(steps, round=round, deadline_s=deadline_s, in_background=transport.runs_in_background)
    unflatten_into(flight.result().mean, tensors)
