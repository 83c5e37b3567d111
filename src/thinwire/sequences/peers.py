"""Exchange of heads between the ranks that share sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.sequences.block_tables import SequencePlan
from thinwire.transport.group_peers import RankPeers


def to_heads(
    tensors: Sequence[Tensor], plan: SequencePlan, peers: RankPeers, members: range
) -> tuple[Tensor, ...]:  # fmt: skip
    """Give up heads for positions: of all of a rank's positions its own heads, as one message to each member.

    Args:
        tensors: Queries, or queries, keys and values; (batch, all heads, own positions, head_dim) each.
        plan: Of the call.
        peers: All ranks.
        members: Ranks that exchange heads, this one included.

    Returns:
        (batch, own heads, positions of all members, head_dim) each; keys of heads that several ranks need are copied.
    """
    batch, _, positions, width = tensors[0].shape
    heads = [_heads(plan, place, len(tensors)) for place in range(len(members))]
    outgoing = [
        torch.cat([one[:, own.start : own.stop].flatten() for one, own in zip(tensors, ranges, strict=True)])
        for ranges in heads
    ]
    own = heads[peers.rank - members.start]
    buffers = [torch.empty_like(outgoing[peers.rank - members.start]) for _ in members]
    per_head = batch * positions * width
    pieces = [
        torch.split(one, [per_head * len(rows) for rows in own])
        for one in _exchanged(outgoing, buffers, peers, members)
    ]
    return tuple(
        _ordered([piece.view(batch, len(rows), positions, width) for piece in of_members], plan)
        for rows, of_members in zip(own, zip(*pieces, strict=True), strict=True)
    )


def to_positions(
    tensors: Sequence[Tensor], plan: SequencePlan, peers: RankPeers, members: range
) -> tuple[Tensor, ...]:  # fmt: skip
    """Undo `to_heads`; what several ranks return for a head is added up.

    Args:
        tensors: (batch, own heads, positions of all members, head_dim) each.
        plan: Of the call.
        peers: All ranks.
        members: Ranks that exchange heads, this one included.
    """
    batch, _, all_positions, width = tensors[0].shape
    positions = all_positions // len(members)
    outgoing = [
        torch.cat([one.flatten() for one in own]) for own in zip(*(_pieces(t, plan) for t in tensors), strict=True)
    ]
    heads = [_heads(plan, place, len(tensors)) for place in range(len(members))]
    per_head = batch * positions * width
    buffers = [outgoing[0].new_empty(per_head * sum(map(len, ranges))) for ranges in heads]
    counts = [plan.heads, plan.kv_heads, plan.kv_heads][: len(tensors)]
    found = tuple(one.new_zeros((batch, count, positions, width)) for one, count in zip(tensors, counts, strict=True))
    for arrived, ranges in zip(_exchanged(outgoing, buffers, peers, members), heads, strict=True):
        pieces = torch.split(arrived, [per_head * len(rows) for rows in ranges])
        for whole, piece, rows in zip(found, pieces, ranges, strict=True):
            whole[:, rows.start : rows.stop] += piece.view(batch, len(rows), positions, width)
    return found


def _heads(plan: SequencePlan, place: int, num_tensors: int) -> list[range]:
    """Return the heads of a member in queries, keys and values."""
    queries, keys = plan.heads_of(place)
    return [queries, keys, keys][:num_tensors]


def _exchanged(
    outgoing: list[Tensor], buffers: list[Tensor], peers: RankPeers, members: range
) -> list[Tensor]:  # fmt: skip
    """Send a tensor to each member and fill a buffer of each; this rank's own is not sent."""
    own = peers.rank - members.start
    others = [place for place in range(len(members)) if place != own]
    received, sent = peers.exchange(
        [(members[place], outgoing[place]) for place in others], [(members[place], buffers[place]) for place in others]
    )
    received()
    sent()
    return [outgoing[own] if place == own else buffer for place, buffer in enumerate(buffers)]


def _ordered(pieces: Sequence[Tensor], plan: SequencePlan) -> Tensor:
    """Join the members' positions, (batch, heads, positions, width) each, part by part of the group."""
    count = len(plan.table.owners) // plan.table.num_ranks
    slices = [piece.chunk(count, 2) for piece in pieces]
    return torch.cat([slices[place][part] for part in range(count) for place in range(len(pieces))], 2)


def _pieces(tensor: Tensor, plan: SequencePlan) -> list[Tensor]:
    """Undo `_ordered`: return the positions of each member."""
    count = len(plan.table.owners) // plan.table.num_ranks
    slices = tensor.chunk(count * plan.group_size, 2)
    return [torch.cat(slices[place :: plan.group_size], 2) for place in range(plan.group_size)]
