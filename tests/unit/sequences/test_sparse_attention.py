"""Sparse attention over ranks, against one process with the same selection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import sequences
from thinwire.errors import ThinwireError
from thinwire.sequences.sharing import SequenceAttention, SparseAttention

BATCH, WIDTH, HEADS = 2, 6, 4


def inputs(kv_heads: int, seq_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(BATCH, heads, seq_len, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def selected(query: torch.Tensor, key: torch.Tensor, parts: int, kept: int) -> set[tuple[int, int]]:
    """Return the blocks that one process selects, in float64."""
    means = [torch.stack([piece.mean(2) for piece in one.chunk(parts, 2)]) for one in (query, key)]
    keys = means[1].repeat_interleave(HEADS // key.shape[1], 2)
    found = {(part, part) for part in range(parts)}
    for row in range(parts):
        scores = [float((means[0][row] * keys[column]).sum(-1).max()) for column in range(row)]
        found |= {(row, column) for column in sorted(range(row), key=lambda one: -scores[one])[:kept]}
    return found


def alone(whole: list[torch.Tensor], blocks: set[tuple[int, int]], parts: int) -> list[Any]:
    query, key, value = (one.clone().requires_grad_() for one in whole[:3])
    size = query.shape[2] // parts
    seen = torch.zeros(parts, parts, dtype=torch.bool)
    for row, column in blocks:
        seen[row, column] = True
    mask = seen.repeat_interleave(size, 0).repeat_interleave(size, 1).tril()
    keys, values = (one.repeat_interleave(HEADS // one.shape[1], 1) for one in (key, value))
    scores = (query @ keys.mT / math.sqrt(WIDTH)).masked_fill(~mask, -math.inf)
    output = scores.softmax(-1) @ values
    (output * whole[3]).sum().backward()
    return [output.detach(), query.grad, key.grad, value.grad]


def shared(
    whole: list[torch.Tensor], sites: tuple[int, ...], *, kept: int, parts: int = 3, is_dense: bool = False
) -> Any:
    """Return output and gradients over all positions, a rank's attention, and the bytes sent by (source, target)."""

    def work(peers: ThreadPeers) -> Any:
        attend: Any = sequences.sparse_attention(
            peers, heads=HEADS, kv_heads=whole[1].shape[1], parts=parts, kept=kept, sites=sites
        )
        if is_dense:
            attend = SequenceAttention(attend.plan, peers)
        own = attend.own_positions(whole[0].shape[2])
        # heads behind positions in memory, as projections return them
        query, key, value = (
            one[:, :, own].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in whole[:3]
        )
        before = {way: count for way, count in peers.ways.sent.items() if way[0] == peers.rank}
        output = attend(query, key, value)
        (output * whole[3][:, :, own]).sum().backward()
        sent = {way: peers.ways.sent[way] - count for way, count in before.items() if way[1] != peers.rank}
        return own, [output.detach(), query.grad, key.grad, value.grad], attend, sent

    ranks, _ = on_ranks(len(sites), work)
    found = [torch.zeros_like(one) for one in (whole[0], *whole[:3])]
    sent: dict[tuple[int, int], int] = {}
    for own, tensors, attend, counted in ranks:
        sent |= counted
        for into, tensor in zip(found, tensors, strict=True):
            into[:, :, own] = tensor
        assert getattr(attend, "chosen", None) == getattr(ranks[0][2], "chosen", None), "all ranks agree"
    return found, ranks[0][2], sent


@pytest.mark.parametrize(
    ("sites", "kv_heads"), [((0,), 2), ((0, 1), 4), ((0, 0, 1, 1), 2), ((0, 0, 1, 1), 1), ((0, 1, 2, 3, 4), 4)]
)
def test_sparse_attention_is_that_of_one_process_and_unselected_keys_do_not_cross(
    sites: tuple[int, ...], kv_heads: int
) -> None:
    parts = 3 * len(sites)
    whole = inputs(kv_heads, 2 * parts)
    totals = []
    for kept in (1, 2, parts):
        found, attend, sent = shared(whole, sites, kept=kept)
        blocks = {(block.row, block.column) for block in attend.chosen.blocks}
        assert blocks == selected(whole[0], whole[1], parts, kept)
        for one, wanted in zip(found, alone(whole, blocks, parts), strict=True):
            assert (one - wanted).abs().max() < 1e-10
        plan = replace(attend.plan, table=attend.chosen)
        passes = [
            plan.sent_bytes(batch=BATCH, seq_len=2 * parts, head_dim=WIDTH, item_bytes=8, log_sum_bytes=8, backward=one)
            for one in (False, True)
        ]
        agreed = attend.selection_bytes(batch=BATCH, head_dim=WIDTH)
        assert sent == {way: agreed + sum(one.get(way, 0) for one in passes) for way in sent}
        totals.append(sum(sent.values()))
    assert len(sites) < 4 or totals[0] < totals[1] < totals[2]
    # with all of them it is attention to all keys, to the bit
    dense, _, _ = shared(whole, sites, kept=parts, is_dense=True)
    assert all(torch.equal(one, other) for one, other in zip(found, dense, strict=True))


def test_what_a_rank_says_of_its_blocks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, plain = inputs(4, 12), SparseAttention._from_all

    def lies(self: SparseAttention, own: torch.Tensor) -> list[torch.Tensor]:
        found = plain(self, own)
        return found if own.dtype != torch.uint8 else [torch.ones_like(one) for one in found]

    monkeypatch.setattr(SparseAttention, "_from_all", lies)
    with pytest.raises(ThinwireError, match="was told of blocks that are not to be"):
        shared(whole, (0, 0), kept=1)


def test_documents_of_a_packed_row_are_not_selected_across() -> None:
    documents = torch.arange(24).div(6, rounding_mode="floor").expand(BATCH, -1)

    def work(peers: ThreadPeers) -> Any:
        attend = sequences.sparse_attention(peers, heads=HEADS, parts=3, kept=12)
        attend.set_documents(documents)
        own = attend.own_positions(24)
        attend(*(one[:, :, own] for one in inputs(HEADS, 24)[:3]))
        return attend.chosen

    (table, *_), _ = on_ranks(4, work)
    assert {(one.row // 3, one.column // 3) for one in table.blocks} == {(n, n) for n in range(4)}


def test_ranks_that_keep_other_numbers_and_numbers_below_1_are_refused() -> None:
    def work(peers: ThreadPeers) -> None:
        sequences.sparse_attention(peers, heads=HEADS, parts=3, kept=1 + peers.rank)

    with pytest.raises(ValueError, match="do not share sequences alike"):
        on_ranks(2, work)
    for wrong in ({"parts": 0}, {"kept": 0}):
        with pytest.raises(ValueError, match=r"sparse attention needs .*; got 0; allowed 1 or more; try .*=8"):
            on_ranks(1, lambda peers, wrong=wrong: sequences.sparse_attention(peers, heads=HEADS, **wrong))
