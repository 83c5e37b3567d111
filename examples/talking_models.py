"""Distillation by messages: a student asks a frozen teacher at another host, and both learn what to send.

The teacher's middle layers are the body of a split session whose width is that of a message, so what crosses the wire
is a message of 16 to 64 numbers for each position instead of a hidden state. Samples and labels stay with the student.

A turn: m_s = enc_s(h), m_t = enc_t(middle(dec_t(m_s))), h <- h + dec_s(m_t). The loss, ours:

    task(h) + weight |enc_s(dec_s(m_t)) - m_t|**2 + weight_t |enc_t(dec_t(m_s)) - m_s|**2, summed over turns

The last term is computed where enc_t and dec_t are: its gradient joins the one that comes from the student. Bytes of a
pass are `split_round_bytes` with the message as width, times the turns.

Reference:
    Talking Models, arXiv 2310.03188: encoder, decoder and several turns. It states neither weights nor number of turns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.errors import refusal


class TalkingTeacher(nn.Module):
    """Layers of a teacher that read and answer messages; the body of a `BodyServer`.

    Args:
        middle: Maps hidden states (..., hidden) to ones of the same shape; it is frozen, and put into evaluation.
        hidden: Width of its hidden states.
        width: Numbers of a message.
        weight: Of the teacher's term of the loss.
    """

    def __init__(self, middle: nn.Module, *, hidden: int, width: int, weight: float = 0.1) -> None:
        super().__init__()
        _check_width(width)
        self.width, self.weight = width, weight
        self.middle = middle.eval().requires_grad_(False)
        self.decoder, self.encoder = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def train(self, mode: bool = True) -> TalkingTeacher:
        """Train encoder and decoder; the middle stays in evaluation."""
        super().train(mode)
        self.middle.eval()
        return self

    def forward(self, messages: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the answer to messages (batch, seq, width), of the same shape."""
        read = self.decoder(messages)
        answer = self.encoder(self.middle(read))
        term = self.weight * (self.encoder(read) - messages).square().mean()
        found: Tensor = _WithTerm.apply(answer, term)  # type: ignore[no-untyped-call]
        return found


class TalkingStudent(nn.Module):
    """The student's side: asks the teacher about hidden states.

    Args:
        body: The teacher: a `RemoteBody` of message width, or any module that maps messages to answers.
        hidden: Width of the student's hidden states.
        width: Numbers of a message.
        turns: Questions for each hidden state.
        weight: Of the student's term of the loss.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, body: nn.Module, *, hidden: int, width: int, turns: int = 1, weight: float = 0.1) -> None:
        super().__init__()
        _check_width(width)
        if turns < 1:
            raise refusal("a student asks at least once", got=f"turns={turns}", allowed="1 or more", remedy="turns=1")
        self.turns, self.weight = turns, weight
        self.encoder, self.decoder = nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.body = body

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states (batch, seq, hidden) that hold the answers, and the student's term of the loss."""
        term = hidden.new_zeros(())
        for _ in range(self.turns):
            answer = self.body(self.encoder(hidden))
            read = self.decoder(answer)
            hidden = hidden + read
            term = term + self.weight * (self.encoder(read) - answer).square().mean()
        return hidden, term


class _WithTerm(torch.autograd.Function):
    """The first argument, whose backward pass also counts the second as a part of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, term: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


def _check_width(width: int) -> None:
    if width < 1:
        raise refusal("a message holds numbers", got=f"width={width}", allowed="1 or more", remedy="width=32")
