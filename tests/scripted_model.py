"""A model whose text is known before, for tests of generation and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Scripted(nn.Module):
    """A model that writes given tokens, and counts the positions that it has been given to read."""

    max_seq_len = 1000

    def __init__(self, tokens: Sequence[int], *, value: float = 1000.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.positions: list[int] = []
        self._tokens = iter(tokens)
        self._value = value

    def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        self.positions.append(tokens.shape[1])
        logits = torch.zeros(1, 300)
        logits[0, next(self._tokens)] = self._value
        return logits, object()
