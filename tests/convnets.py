"""Small models with hidden units of every kind that matching understands."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Module):
    """Two hidden layers over rows of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.second(self.first(rows).relu()).relu())
        return out


class MlpMixer(nn.Module):
    """Residual blocks with LayerNorm: one stream and two inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(8, 11) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(11, 8) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            hidden = hidden + down(nn.functional.gelu(up(norm(hidden))))
        out: torch.Tensor = self.head(hidden)
        return out


class Block(nn.Module):
    """Two convolutions with BatchNorm and a skip, which is a convolution where the number of channels changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(images)))))
        out: torch.Tensor = self.relu(hidden + self.skip(images))
        return out


class ResNet(nn.Module):
    """A stem, a block with a plain skip, a block with a skip of its own, and a linear layer over what is left."""

    def __init__(self, *, in_channels: int = 2, num_outputs: int = 3, width: int = 4) -> None:
        super().__init__()
        wide = width + width // 2
        self.stem, self.norm = nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width), nn.MaxPool2d(2), Block(width, wide))
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(wide * 4, num_outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.pool(self.blocks(torch.relu(self.norm(self.stem(images)))))
        out: torch.Tensor = self.head(torch.flatten(hidden, 1))
        return out
