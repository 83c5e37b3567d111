"""Classification of scikit-learn's 1,797 images of digits by a small convolutional network.

The images, 8 by 8, are a part of scikit-learn, so nothing is downloaded. A fifth is held out, the same for every seed.
The network has GroupNorm: it keeps no buffers that replicas would have to agree on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.shared_random import derive_seed
from thinwire.workloads.cards import DIGITS
from thinwire.workloads.items import leased_items, own_items, spread_items
from thinwire.workloads.workload import Loss, NoCompanion, RunOptions, Workload, rows_at_once

_NUM_HELD_OUT = 360
_WIDTH, _NUM_GROUPS, _NUM_CLASSES = 16, 4, 10
# Values an image that the backward pass needs, of two stages: before and after norm and ReLU, and pooled.
_KEPT_VALUES = 3 * (8 * 8 * _WIDTH + 4 * 4 * 2 * _WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digits:
    """Images (items, 1, 8, 8) float32 in [0, 1] and their digits (items,) int64."""

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    sha256: str


def open_digits(options: RunOptions) -> Digits:
    """Load the images from scikit-learn, and split them.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    DIGITS.check_installed()
    from sklearn import datasets

    found = datasets.load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed(0, "digits", "split")))
    held_out, train = order[:_NUM_HELD_OUT], order[_NUM_HELD_OUT:]
    content = images[order].numpy().tobytes() + labels[order].numpy().tobytes()
    digits = Digits(
        images=images[train], labels=labels[train], held_out_images=images[held_out], held_out_labels=labels[held_out],
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    own_items(options, digits.images, digits.labels, 0)  # refuses more replicas than images
    return digits


def make_convnet(options: RunOptions, sizes: Mapping[str, int], device: torch.device | str) -> nn.Module:
    """Build two convolutions and a linear layer; the weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(options.run.seed, "digits", "model"))
        model = nn.Sequential(
            *_stage(1, _WIDTH), *_stage(_WIDTH, 2 * _WIDTH), nn.Flatten(), nn.Linear(2 * _WIDTH * 4, _NUM_CLASSES)
        )
    return model.to(device)


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.GroupNorm(_NUM_GROUPS, outputs), nn.ReLU(), nn.MaxPool2d(2)]


def _saved_model(options: RunOptions, sizes: Mapping[str, int], folder: Path) -> nn.Module:
    model = make_convnet(options, sizes, "cpu")
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return model


def _loss(options: RunOptions, model: nn.Module) -> Loss:
    def loss(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images)
        found = functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return found, torch.stack([found.detach().float(), accuracy])

    return loss


DIGIT_CLASSIFICATION = Workload(
    card=DIGITS, open_data=open_digits,
    companion=lambda digits: NoCompanion(), saved_companion=lambda folder: NoCompanion(), sizes=lambda companion: {},
    sketch=lambda options: make_convnet(options, {}, "meta"), make_model=make_convnet, saved_model=_saved_model,
    batches=lambda options, digits, replica: own_items(options, digits.images, digits.labels, replica),
    leased_batches=lambda options, digits, leases: leased_items(options, digits.images, digits.labels, leases),
    held_out=lambda options, digits, num_batches: spread_items(
        digits.held_out_images, digits.held_out_labels, batch_size=options.data.batch_size, max_batches=num_batches
    ),
    loss=_loss, parts=rows_at_once, num_samples=len, window_samples=lambda options: 1,
    activation_bytes=lambda options, model, images: 4.0 * _KEPT_VALUES * images,
)  # fmt: skip
