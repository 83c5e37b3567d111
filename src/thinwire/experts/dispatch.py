"""Dispatch policies, which decide what travels between ranks that share experts, and the exchange of rows of tokens.

A policy gets the rows that a rank's tokens send to experts, sorted by expert, and returns what the experts make of
them, in the same order. All ranks call it together, in the same order, also those without a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import PayloadError, refusal
from thinwire.experts.sharing import ExpertRanks
from thinwire.transport.group_peers import RankPeers


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows travel to the experts' ranks, and back; both again for the gradients.

    Attributes:
        code: Codecs of rows and of their gradients; None sends them as they are. A rank's own rows are never coded.
        most_rows: Limit of what one rank may announce to another in one pass, since the receiver allocates for it.
    """

    code: ActivationCode | None = None
    most_rows: int = 1 << 24

    def __post_init__(self) -> None:
        """Check the code: a receiver allocates before a payload comes."""
        code = self.code
        if code is not None and not (code.has_fixed_size() and code.has_fixed_size(is_forward=False)):
            raise refusal("tokens need a code of fixed size", got=code.name, allowed="such as block-int4/block-int4",
                          remedy='ActivationCode("block-int4", "block-int4")')  # fmt: skip
        if not 0 < self.most_rows < 1 << 31:
            raise refusal("most_rows is out of range", got=self.most_rows, allowed="1 to 2147483647",
                          remedy="most_rows=1 << 24")  # fmt: skip

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: ExpertRanks) -> Tensor:
        """See `Dispatch`."""
        if experts.peers is None:
            return experts.compute(rows, counts)
        announced = exchange_counts(counts, experts, most_rows=self.most_rows)
        per_rank = experts.num_own
        sent = [sum(counts[first : first + per_rank]) for first in range(0, len(counts), per_rank)]
        received = [sum(of_rank) for of_rank in announced]
        arrived = exchange_rows(rows, sent, received, experts, code=self.code)
        # by rank, then expert; the experts want them by expert
        kinds = torch.arange(per_rank).repeat(len(sent)).repeat_interleave(torch.tensor(announced).flatten())
        order = kinds.argsort(stable=True).to(rows.device)
        own_counts = [sum(of_expert) for of_expert in zip(*announced, strict=True)]
        made = experts.compute(arrived[order], own_counts)
        return exchange_rows(made[order.argsort()], received, sent, experts, code=self.code)

    def sent_bytes(self, rows: Sequence[int], *, width: int, item_bytes: int, backward: bool = False) -> int:
        """Return the bytes that a rank sends in one crossing, of so many rows to each other rank.

        A pass has two crossings: dispatch, of the rows to the experts, and combine, of what they made of the others'.

        Example:
            >>> tokens(code=ActivationCode("block-int4", "block-int4")).sent_bytes([64, 0], width=64, item_bytes=4)
            2176
        """
        if self.code is None:
            return sum(rows) * width * item_bytes
        return sum(self.code.payload_bytes(count * width, is_forward=not backward) for count in rows)


def tokens(*, code: ActivationCode | None = None, most_rows: int = 1 << 24) -> Tokens:
    """Return the policy by which tokens travel to experts; see `Tokens`."""
    return Tokens(code=code, most_rows=most_rows)


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
    _wait(peers, outgoing, incoming)
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
        return _exchanged(rows, sent, received, experts, code, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, experts, code = ctx.given
        return _exchanged(grad, received, sent, experts, code, is_forward=False), None, None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], experts: ExpertRanks, code: ActivationCode | None, *,
    is_forward: bool,
) -> Tensor:  # fmt: skip
    peers = experts.peers
    assert peers is not None, "ranks share the experts"
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    outgoing = torch.split(rows.contiguous(), sent)
    found = rows.new_empty((sum(received), rows.shape[1]))  # by shape: `empty_like` of a permuted tensor is permuted
    arriving = torch.split(found, received)
    arriving[peers.rank].copy_(outgoing[peers.rank])
    if code is None:
        _wait(peers, [(rank, outgoing[rank]) for rank in others], [(rank, arriving[rank]) for rank in others])
        return found
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
    _wait(peers, coded, list(payloads.items()))
    for rank, payload in payloads.items():
        code.decode(payload, arriving[rank], is_forward=is_forward, source=f"{experts.name}, rank {rank}")
    return found


def _wait(peers: RankPeers, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    for wait in peers.exchange(sends, receives):
        wait()
