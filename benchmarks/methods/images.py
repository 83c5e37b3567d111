"""Images for the benchmarks of methods: scikit-learn's 8x8 digits, and a small convnet for them.

    python benchmarks/methods/images.py

trains the convnet in one process and prints its accuracy. The 1,797 images come inside scikit-learn's wheel, so nothing
is downloaded. The split, the initial values and the order of the batches follow from seeds alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from thinwire.shared_random import derive_seed

NUM_CLASSES = 10
NUM_TEST = 360  # a fifth


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images `(samples, 1, 8, 8)` float32 in [0, 1] and labels `(samples,)` int64, for training and for the test."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(*, seed: int = 0) -> Digits:
    """Load the digits and split them; the same seed gives the same split."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=_generator(seed, "split"))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Digits(
        train_images=images[train], train_labels=labels[train], test_images=images[test], test_labels=labels[test]
    )


def convnet(*, width: int = 16, seed: int = 0) -> nn.Sequential:
    """Build two convolutions with BatchNorm and one linear layer; the same seed gives the same initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, NUM_CLASSES),
        )


def batches(
    images: torch.Tensor, labels: torch.Tensor, *, batch_size: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end; every epoch has an order of its own, and its incomplete last batch is left out."""
    if not 1 <= batch_size <= len(labels):
        raise ValueError(f"batch_size must be in 1 to {len(labels)} samples, got {batch_size}")
    epoch = 0
    while True:
        order = torch.randperm(len(labels), generator=_generator(seed, "epoch", epoch))
        for start in range(0, len(labels) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], labels[chosen]
        epoch += 1


def train(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, steps: int, batch_size: int = 64,
    lr: float = 3e-3, seed: int = 0,
) -> None:  # fmt: skip
    """Train a model in place with AdamW, in this process alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    source = batches(images, labels, batch_size=batch_size, seed=seed)
    model.train()
    for _ in range(steps):
        inputs, targets = next(source)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean cross entropy in eval mode; the model's mode is kept."""
    return functional.cross_entropy(_logits(model, images), labels).item()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that get their label, in [0, 1], in eval mode; the model's mode is kept."""
    return (_logits(model, images).argmax(dim=1) == labels).double().mean().item()


def _logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    was_training = model.training
    logits: torch.Tensor = model.eval()(images)
    model.train(was_training)
    return logits


def _generator(seed: int, *labels: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, "images", *labels))


def main() -> None:
    digits = load_digits()
    model = convnet()
    print(f"parameters: {sum(parameter.numel() for parameter in model.parameters())}")
    for steps in (0, 50, 150, 400):
        train(model, digits.train_images, digits.train_labels, steps=steps, seed=steps)
        test = digits.test_images, digits.test_labels
        print(f"{steps:4d} steps more: test loss {loss(model, *test):.4f}, accuracy {accuracy(model, *test):.4f}")


if __name__ == "__main__":
    main()
