"""Exchange of rows of tokens between ranks that share experts: counts first, then rows, with gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import PayloadError
from thinwire.experts.sharing import ExpertRanks
from thinwire.transport.group_peers import Wait


def exchange_counts(counts: Sequence[int], experts: ExpertRanks, *, most_rows: int) -> list[list[int]]:
    """Send each rank how many rows it gets for each of its experts.

    Args:
        counts: Rows for each of all experts.
        experts: Whose they are.
        most_rows: Limit of the rows of one rank.

    Returns:
        Rows that each rank sends to this one, for each of this rank's experts.

    Raises:
        PayloadError: A rank announces more rows than the limit, fewer than none, or another sum than it says.
    """
    peers, per_rank = experts.peers, experts.num_own
    assert peers is not None, "ranks share the experts"
    parts = [list(counts[first : first + per_rank]) for first in range(0, len(counts), per_rank)]
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    outgoing = [(rank, torch.tensor([*parts[rank], sum(parts[rank])], device=experts.device)) for rank in others]
    incoming = [(rank, torch.zeros_like(numbers)) for rank, numbers in outgoing]
    for wait in peers.exchange(outgoing, incoming):
        wait()
    found = {peers.rank: parts[peers.rank]}
    for rank, numbers in incoming:
        *of_experts, total = numbers.tolist()
        if min(of_experts) < 0 or sum(of_experts) != total or total > most_rows:
            raise PayloadError(
                f"{experts.name}: rank {rank} announces {sum(of_experts)} rows for experts; got {of_experts[:8]} of "
                f"{total}; allowed 0 to {most_rows} rows; try tokens(most_rows=) or fewer tokens a pass"
            )
        found[rank] = of_experts
    return [found[rank] for rank in range(peers.size)]


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], experts: ExpertRanks, *, code: ActivationCode | None
) -> Tensor:
    """Send each rank its part of the rows, with gradients that travel back the same way.

    Args:
        rows: (rows, width), sorted by receiving rank.
        sent: Rows for each rank.
        received: Rows from each rank, of the same width and dtype.
        experts: The ranks.
        code: Of what leaves this rank.

    Returns:
        (rows, width), sorted by sending rank.
    """
    found: Tensor = _Exchange.apply(rows, list(sent), list(received), experts, code)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], experts: ExpertRanks, code: ActivationCode | None
    ) -> Tensor:
        ctx.given = sent, received, experts, code
        return start_exchange(rows, sent, received, experts, code, is_forward=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, experts, code = ctx.given
        return start_exchange(grad, received, sent, experts, code, is_forward=False)(), None, None, None, None


def start_exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], experts: ExpertRanks, code: ActivationCode | None, *,
    is_forward: bool,
) -> Callable[[], Tensor]:  # fmt: skip
    """Start what `exchange_rows` does in one direction, without gradients; the function waits and returns the rows.

    All ranks start their exchanges in the same order.
    """
    peers = experts.peers
    assert peers is not None, "ranks share the experts"
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    outgoing = torch.split(rows.contiguous(), list(sent))
    found = rows.new_empty((sum(received), rows.shape[1]))  # by shape: `empty_like` of a permuted tensor is permuted
    arriving = torch.split(found, list(received))
    arriving[peers.rank].copy_(outgoing[peers.rank])
    if code is None:
        waits = peers.exchange([(rank, outgoing[rank]) for rank in others], [(rank, arriving[rank]) for rank in others])
        return lambda: _ended(waits, found)
    payloads = {
        rank: torch.empty(
            code.payload_bytes(arriving[rank].numel(), is_forward=is_forward), dtype=torch.uint8, device=rows.device
        )
        for rank in others
    }
    coded = [
        (rank, code.encode(outgoing[rank], is_forward=is_forward, source=f"{experts.name}, rank {peers.rank}"))
        for rank in others
    ]
    waits = peers.exchange(coded, list(payloads.items()))

    def finish() -> Tensor:
        _ended(waits, found)
        for rank, payload in payloads.items():
            code.decode(payload, arriving[rank], is_forward=is_forward, source=f"{experts.name}, rank {rank}")
        return found

    return finish


def _ended(waits: Sequence[Wait], found: Tensor) -> Tensor:
    for wait in waits:
        wait()
    return found
