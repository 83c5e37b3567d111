"""Steps of a model with experts: what is counted in a step, and the experts that are streamed for one (FSSDP).

A streamed expert's weights come once a step, before the first pass, and its gradient leaves after the last one. All
layers' weights for a rank are one message.

Reference:
    arXiv 2502.02581, section 3, whose copies are for one pass; a step's micro-batches share them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.experts.dispatch import Weights
from thinwire.experts.layer import ExpertLayer
from thinwire.experts.stream_plan import plan_streams
from thinwire.transport.group_peers import RankPeers, exchange_all
from thinwire.transport.shards import local_shard

# Expert and rank of each copy in a layer.
_Plans = list[tuple[ExpertLayer, tuple[tuple[int, int], ...]]]


@contextmanager
def step(model: nn.Module) -> Iterator[None]:
    """Frame the passes of an optimizer step, up to its last backward pass; all ranks that share experts do it together.

    `balance_loss(over="global-batch")` counts from its beginning. With `experts.weights` the weights of streamed
    experts come at the beginning, chosen by the choices of the step before; gradients leave at the end.

    Raises:
        TransportError: A rank is gone or hangs.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertLayer)]
    streaming = [layer for layer in layers if layer.streams_from is not None]
    for layer in layers:
        # no `new_zeros` of a weight, which may be a DTensor
        layer.step_counts = torch.zeros(layer.num_experts, dtype=torch.int64, device=layer.router.weight.device)
        layer.own_counts = torch.zeros_like(layer.step_counts)
    plans = [(layer, streams_of(layer)) for layer in streaming]
    copies = _fetch(plans) if plans else {}
    try:
        yield
        # after a failure others have failed too, or wait for this rank in vain
        if plans:
            _give_back(plans, copies)
            _share_counts(streaming)
    finally:
        for layer in layers:
            layer.step_counts = layer.own_counts = None
            layer.copies.clear()


def streams_of(layer: ExpertLayer) -> tuple[tuple[int, int], ...]:
    """Return the expert and the rank of each copy in the next step; the same on all ranks."""
    policy = layer.dispatch
    assert isinstance(policy, Weights) and layer.streams_from is not None
    weights = layer.weights_of(0)
    width, item = weights[0].shape[-1], weights[0].element_size()
    return plan_streams(
        layer.streams_from.tolist(), row_bytes=policy.row_bytes(width=width, item_bytes=item),
        expert_bytes=sum(one.nbytes for one in weights), most_streamed=policy.most_streamed,
    )  # fmt: skip


def _peers(plans: _Plans) -> RankPeers:
    peers = plans[0][0].peers
    assert peers is not None, "several ranks share the experts"
    return peers


def _between(plans: _Plans, owner: int, rank: int) -> Iterator[tuple[ExpertLayer, int]]:
    """Yield the layers and experts that one rank streams to another, in the order of the message."""
    for layer, plan in plans:
        per_rank = layer.num_experts // _peers(plans).size
        yield from ((layer, expert) for expert, to in plan if to == rank and expert // per_rank == owner)


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors]) if tensors else like.new_empty(0)


def _fetch(plans: _Plans) -> dict[int, list[list[Tensor]]]:
    """Exchange the weights of streamed experts; return those of each owner, in the order of its message."""
    peers, like = _peers(plans), plans[0][0].weights_of(0)[0]
    outgoing, incoming = {}, {}
    for other in (rank for rank in range(peers.size) if rank != peers.rank):
        sent = [w for layer, expert in _between(plans, peers.rank, other) for w in layer.weights_of(expert)]
        outgoing[other] = _flat(sent, like)
        sizes = [sum(w.numel() for w in layer.weights_of(0)) for layer, _ in _between(plans, other, peers.rank)]
        incoming[other] = like.new_empty(sum(sizes))
    exchange_all(peers, outgoing, incoming)
    found: dict[int, list[list[Tensor]]] = {}
    for owner, flat in incoming.items():
        left, found[owner] = flat, []
        for layer, expert in _between(plans, owner, peers.rank):
            copy = []
            for shape in (weight.shape for weight in layer.weights_of(0)):
                copy.append(left[: shape.numel()].view(shape).detach().requires_grad_())
                left = left[shape.numel() :]
            layer.copies[expert] = (copy[0], copy[1])
            found[owner].append(copy)
    return found


def _give_back(plans: _Plans, copies: dict[int, list[list[Tensor]]]) -> None:
    """Send gradients of copies to the experts' ranks, which add them to their own."""
    peers, like = _peers(plans), plans[0][0].weights_of(0)[0]
    outgoing = {
        owner: _flat([w.grad if w.grad is not None else torch.zeros_like(w) for copy in own for w in copy], like)
        for owner, own in copies.items()
    }
    incoming = {
        other: like.new_empty(
            sum(w.numel() for layer, _ in _between(plans, peers.rank, other) for w in layer.weights_of(0))
        )
        for other in outgoing
    }
    exchange_all(peers, outgoing, incoming)
    for other, flat in incoming.items():  # in the order of ranks, so that sums have the same bits in each run
        left = flat
        for layer, expert in _between(plans, peers.rank, other):
            place = expert % (layer.num_experts // peers.size)
            for parameter in (layer.up, layer.down):
                size = local_shard(parameter)[place].numel()
                part, left = left[:size], left[size:]
                if not parameter.requires_grad:  # an optimizer would move a frozen one that has a gradient
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local_shard(parameter.grad)[place]
                own += part.view(own.shape)


def _share_counts(layers: Sequence[ExpertLayer]) -> None:
    """Let each rank know every rank's choices of this step, which decide the next one's streams."""
    peers = layers[0].peers
    assert peers is not None
    own = torch.cat([layer.own_counts for layer in layers if layer.own_counts is not None])
    found = {rank: own if rank == peers.rank else torch.zeros_like(own) for rank in range(peers.size)}
    others = {rank: numbers for rank, numbers in found.items() if rank != peers.rank}
    exchange_all(peers, dict.fromkeys(others, own), others)
    rows = torch.stack([found[rank] for rank in range(peers.size)])
    for layer, part in zip(layers, torch.split(rows, [layer.num_experts for layer in layers], 1), strict=True):
        assert layer.streams_from is not None
        layer.streams_from.copy_(part)
