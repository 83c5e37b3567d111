"""Small models of many kinds, and data for them, each from a seed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A decoder without mask; what matters is its parameters."""

    def __init__(self, *, layers: int = 5, dim: int = 8, vocab: int = 11, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.stages(images).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(tokens))[0])


class Unused(nn.Module):
    """Has a parameter that never gets a gradient, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.frozen


def build(kind: str, *, seed: int = 0) -> nn.Module:
    """Build a model by name: transformer, shallow, untied, conv, lstm, unused, linear."""
    torch.manual_seed(seed)
    makers = {
        "transformer": Transformer,
        "shallow": lambda: Transformer(layers=3),
        "untied": lambda: Transformer(is_tied=False),
        "conv": Conv,
        "lstm": Recurrent,
        "unused": Unused,
        "linear": lambda: nn.Linear(3, 2),
    }
    return makers[kind]()


def loss_of(model: nn.Module, *, step: int, replica: int) -> torch.Tensor:
    """Return a loss on data that depends on the step and the replica alone."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    if isinstance(model, (Transformer, Recurrent)):
        tokens = torch.randint(0, 11, (3, 7), generator=generator)
        return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    if isinstance(model, Conv):
        images = torch.randn(4, 1, 5, 5, generator=generator)
        return functional.cross_entropy(model(images), torch.randint(0, 3, (4,), generator=generator))
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype)).float().square().mean()
