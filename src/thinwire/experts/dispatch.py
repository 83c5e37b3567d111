"""Dispatch policies, which decide what travels between ranks that share experts.

A policy gets the rows that a rank's tokens send to experts, sorted by expert, and returns what the experts make of
them, in the same order. All ranks call it together, in the same order, also those without a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import refusal
from thinwire.experts.chunked import Pieces, compute_in_chunks
from thinwire.experts.exchange import exchange_counts, exchange_rows
from thinwire.experts.sharing import ExpertRanks

MOST_CHUNKS = 64  # of a pass, since each is a message to every other rank


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows travel to the experts' ranks, and back; both again for the gradients.

    Attributes:
        code: Codecs of rows and of their gradients; None sends them as they are. A rank's own rows are never coded.
        most_rows: Limit of what one rank may announce to another in one pass, since the receiver allocates for it.
        chunks: Groups of rows of which one travels while the experts compute another, in a forward and in a backward
            pass; one divides the other. See `thinwire.site.expert_schedule` for the fastest.
    """

    code: ActivationCode | None = None
    most_rows: int = 1 << 24
    chunks: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Check the code: a receiver allocates before a payload comes."""
        code = self.code
        if code is not None and not (code.has_fixed_size() and code.has_fixed_size(is_forward=False)):
            raise refusal("tokens need a code of fixed size", got=code.name, allowed="such as block-int4/block-int4",
                          remedy='ActivationCode("block-int4", "block-int4")')  # fmt: skip
        if not 0 < self.most_rows < 1 << 31:
            raise refusal("most_rows is out of range", got=self.most_rows, allowed="1 to 2147483647",
                          remedy="most_rows=1 << 24")  # fmt: skip
        fewest, most = min(self.chunks), max(self.chunks)
        if not 1 <= fewest <= most <= MOST_CHUNKS or most % fewest:
            raise refusal("chunks of both passes do not divide each other", got=f"chunks={self.chunks}",
                          allowed=f"1 to {MOST_CHUNKS}, such as 4, or (2, 4)", remedy="chunks=2")  # fmt: skip

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: ExpertRanks) -> Tensor:
        """See `Dispatch`."""
        if experts.peers is None:
            return experts.compute(rows, counts)
        announced = exchange_counts(counts, experts, most_rows=self.most_rows)
        if self.chunks != (1, 1):
            return compute_in_chunks(rows, Pieces(counts, announced, self.chunks, experts, self.code))
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


def tokens(
    *, code: ActivationCode | None = None, most_rows: int = 1 << 24, chunks: int | tuple[int, int] = 1
) -> Tokens:
    """Return the policy by which tokens travel to experts; see `Tokens`. One number of chunks is for both passes."""
    return Tokens(code=code, most_rows=most_rows, chunks=(chunks, chunks) if isinstance(chunks, int) else chunks)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of experts travel to ranks whose tokens would be more bytes, for a step each; other tokens travel.

    Inside of `experts.step` alone: elsewhere, as in an evaluation, all tokens travel.

    Attributes:
        most_streamed: Copies that a rank holds at most in each layer.
        most_bytes: Limit of the copies and their gradients on a rank, in all layers.
        tokens: Of tokens whose experts are not streamed.
    """

    most_streamed: int = 4
    most_bytes: int = 1 << 30
    tokens: Tokens = Tokens()

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("most_streamed", "most_bytes"):
            if getattr(self, name) < 1:
                raise refusal(f"{name} is too small", got=getattr(self, name), allowed="1 or more",
                              remedy="experts.weights(), or experts.tokens()")  # fmt: skip

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: ExpertRanks) -> Tensor:
        """See `Dispatch`."""
        if not experts.copies:
            return self.tokens(rows, counts, experts)
        parts = list(torch.split(rows, list(counts)))
        travelling = [expert for expert in range(len(counts)) if expert not in experts.copies]
        left = [0 if expert in experts.copies else count for expert, count in enumerate(counts)]
        sent = self.tokens(torch.cat([parts[expert] for expert in travelling]), left, experts)
        for expert, made in zip(travelling, torch.split(sent, [counts[one] for one in travelling]), strict=True):
            parts[expert] = made
        for expert, apply in experts.copies.items():
            parts[expert] = apply(parts[expert])
        return torch.cat(parts)

    def row_bytes(self, *, width: int, item_bytes: int) -> float:
        """Return the bytes of a row in its four crossings, on average over many."""
        ways = (self.tokens.sent_bytes([1024], width=width, item_bytes=item_bytes, backward=b) for b in (False, True))
        return 2 * sum(ways) / 1024


def weights(*, most_streamed: int = 4, most_bytes: int = 1 << 30, code: ActivationCode | None = None) -> Weights:
    """Return the policy by which weights of experts travel where that is less (FSSDP); see `Weights`.

    Reference:
        arXiv 2502.02581.
    """
    return Weights(most_streamed=most_streamed, most_bytes=most_bytes, tokens=Tokens(code=code))
