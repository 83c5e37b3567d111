"""Chunked dispatch: rows of one chunk travel while the experts compute another one (FSMoE, arXiv 2501.10714).

Each expert's rows are cut into equal pieces. A pass sends them in groups, all of which leave at once, in their order;
experts compute the pieces of a group when it has arrived, and what they made of it leaves while the next one arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import refusal
from thinwire.experts.exchange import start_exchange
from thinwire.experts.sharing import ExpertRanks

# Makes rows of one piece from those that came in it, sorted by expert.
Work = Callable[[int, Tensor], Tensor]


class Pieces:
    """Pieces of the rows that a rank sends and gets.

    Args:
        counts: Rows that it sends, for each of all experts.
        announced: Rows that each rank sends to it, for each of its experts.
        chunks: Groups of a forward and of a backward pass; one divides the other.
        experts: The ranks.
        code: Of rows that leave a rank, in a message a group and rank.
    """

    def __init__(
        self, counts: Sequence[int], announced: Sequence[Sequence[int]], chunks: tuple[int, int], experts: ExpertRanks,
        code: ActivationCode | None,
    ) -> None:  # fmt: skip
        self.experts, self.code, self.chunks, self.size = experts, code, chunks, len(announced)
        self.count, per_rank = max(chunks), experts.num_own
        # piece and other rank of each row; rows are sorted by rank, then expert
        arriving = [rows for of_rank in announced for rows in of_rank]
        self._sides = [
            (_piece_of(rows, self.count), _numbers_of([sum(rows[first : first + per_rank])
                                                       for first in range(0, len(rows), per_rank)]))
            for rows in (list(counts), arriving)
        ]  # fmt: skip
        kinds = _numbers_of(arriving) % per_rank
        self._own = []
        for piece in range(self.count):
            index = (self._sides[1][0] == piece).nonzero().flatten()
            index = index[kinds[index].argsort(stable=True)]
            self._own.append((index.to(experts.device), kinds[index].bincount(minlength=per_rank).tolist()))

    def compute(self, piece: int, rows: Tensor) -> Tensor:
        """Return what this rank's experts make of the rows of a piece."""
        return self.experts.compute(rows, self._own[piece][1])

    def run(self, rows: Tensor, work: Work, *, is_forward: bool) -> Tensor:
        """Send rows to their experts' ranks in groups, and return what `work` makes of them there."""
        chunks = self.chunks[not is_forward]
        groups = [self._group(group, self.count // chunks) for group in range(chunks)]
        there = [
            start_exchange(rows[sent], self._counts(0, sent), self._counts(1, got), self.experts, self.code,
                           is_forward=is_forward)
            for sent, got in groups
        ]  # fmt: skip
        arrived = rows.new_empty((len(self._sides[1][0]), rows.shape[1]))
        made, back = arrived.new_empty(0), []
        for group, (sent, got) in enumerate(groups):
            arrived[got] = there[group]()
            for piece in range(group * self.count // chunks, (group + 1) * self.count // chunks):
                index = self._own[piece][0]
                own = work(piece, arrived[index])
                if made.ndim == 1:  # under autocast experts make another dtype than they get
                    made = own.new_empty(arrived.shape)
                made[index] = own
            back.append(
                start_exchange(made[got], self._counts(1, got), self._counts(0, sent), self.experts, self.code,
                               is_forward=is_forward)
            )  # fmt: skip
        found = made.new_empty(rows.shape)
        for (sent, _), finish in zip(groups, back, strict=True):
            found[sent] = finish()
        return found

    def _group(self, group: int, share: int) -> tuple[Tensor, Tensor]:
        """Return the places of the rows of a group among those that are sent, and among those that arrive."""
        sent, got = ((pieces // share == group).nonzero().flatten() for pieces, _ in self._sides)
        return sent.to(self.experts.device), got.to(self.experts.device)

    def _counts(self, side: int, index: Tensor) -> list[int]:
        """Return the rows of each other rank among some that are sent (side 0) or arrive (1)."""
        found: list[int] = self._sides[side][1][index.cpu()].bincount(minlength=self.size).tolist()
        return found


def compute_in_chunks(rows: Tensor, pieces: Pieces) -> Tensor:
    """Return what the experts of all ranks make of rows, with gradients.

    The backward pass runs the experts' own inside of it, so gradients of their weights arrive in `.grad` alone:
    `torch.autograd.grad` gives none for them. A checkpoint around them frees nothing of what the experts keep.
    """
    # an input with a gradient: experts have theirs where rows have none
    anchor = rows.new_zeros((), requires_grad=torch.is_grad_enabled())
    found: Tensor = _Chunked.apply(rows, anchor, pieces)  # type: ignore[no-untyped-call]
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, pieces: Pieces) -> Tensor:
        kept: dict[int, tuple[Tensor, Tensor]] = {}

        def work(piece: int, arrived: Tensor) -> Tensor:
            if not anchor.requires_grad:
                return pieces.compute(piece, arrived)
            # hooks of a checkpoint would compute all again for each piece, while messages are on their way
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                arrived.requires_grad_()
                kept[piece] = arrived, pieces.compute(piece, arrived)
            return kept[piece][1].detach()

        ctx.kept, ctx.pieces = kept, pieces
        return pieces.run(rows, work, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.kept:
            raise refusal("a pass in chunks has one backward pass", got="a second one", allowed="retain_graph=False",
                          remedy="experts.tokens(chunks=1)")  # fmt: skip

        def work(piece: int, grads: Tensor) -> Tensor:
            arrived, made = ctx.kept.pop(piece)
            torch.autograd.backward([made], [grads])
            found: Tensor = arrived.grad
            return found

        return ctx.pieces.run(grad.contiguous(), work, is_forward=False), None, None


def _same(kept: Tensor) -> Tensor:
    return kept


def _piece_of(counts: Sequence[int], pieces: int) -> Tensor:
    """Return the piece of each row, of experts with so many rows; each expert's are cut evenly."""
    return torch.cat([torch.arange(count) * pieces // max(1, count) for count in counts])


def _numbers_of(counts: Sequence[int]) -> Tensor:
    """Return a number for each row: that of its count."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(list(counts)))
