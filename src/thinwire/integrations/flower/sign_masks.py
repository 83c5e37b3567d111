"""Sign masks on frozen random weights: one bit a kept weight, both ways (HideNseek, arXiv 2206.04385).

Server and clients make the same random network from a seed, keep the share of its weights that SynFlow scores highest,
once and without data, and freeze them. A client trains one score for each kept weight; the network computes with
`sign(score) * weight`, and gradients pass the sign unchanged. Signs travel, the server takes the weighted majority, and
sends signs again: `Uplink("sign", sends="signs")`, `rules=[MajoritySigns()]`, `down=Downlink("sign", sends="values")`.

It sends 32 times fewer bytes than kept float32 weights, and costs accuracy: see docs/benchmarks/flower.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.errors import refusal
from thinwire.integrations.flower.updates import Arrays


def sign_mask(model: nn.Module, *, keep: float = 0.5, seed: int = 7, scale: float = 0.01) -> str:
    """Freeze a model with random weights, and let signs of its kept ones be trained.

    Matrices and convolutions are kept in part; all else is frozen, vectors as they are, biases as zero. The model's
    `state_dict` then holds scores alone, one row of the kept weights for each such layer.

    Args:
        model: Its weights are replaced by those of the seed.
        keep: Share of all weights that is kept, in (0, 1].
        seed: Of the weights; all clients and the server need the same.
        scale: Magnitude of the first scores, of what `MajoritySigns` sends too: a step of this size flips a sign.

    Returns:
        A fingerprint of weights and masks, for `Uplink(tag=)`: signs for another network are then refused.

    Raises:
        ValueError: `keep` is out of its range, or the model has no weights to mask.
    """
    if not 0 < keep <= 1:
        raise refusal("keep is out of its range", got=keep, allowed="above 0, at most 1", remedy="keep=0.5")
    weights = {
        (module, name): weight
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False) if weight.dim() > 1
    }  # fmt: skip
    if not weights:
        raise refusal("the model has nothing to mask", got="no matrix", allowed="matrices", remedy="nn.Linear layers")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, vector in module.named_parameters(recurse=False):
                if vector.dim() <= 1:
                    vector.requires_grad_(False)
                    if name == "bias":
                        vector.zero_()
        for weight in weights.values():
            deviation = (2 / (weight[0].numel() * keep)) ** 0.5  # Kaiming's, of the inputs that are kept
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    scores = torch.cat([one.reshape(-1) for one in synflow_scores(model, list(weights.values()))])
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.topk(max(1, round(keep * scores.numel())), sorted=False).indices] = True
    digest = hashlib.sha256()
    masks = torch.split(kept, [weight.numel() for weight in weights.values()])
    for ((module, name), weight), mask in zip(weights.items(), masks, strict=True):
        frozen, places = weight.detach().clone(), mask.nonzero().view(-1)
        digest.update(np.packbits(mask.numpy()).tobytes() + frozen.numpy().tobytes())
        parametrize.register_parametrization(module, name, _SignedWeights(frozen, places, scale))
    for vector in (one for one in model.parameters() if one.dim() == 1 and not one.requires_grad):
        digest.update(vector.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def mask_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the scores of a masked model by name: what travels; `load_subset` takes it."""
    return {name: one for name, one in model.state_dict().items() if ".parametrizations." in f".{name}"}


def synflow_scores(model: nn.Module, weights: list[nn.Parameter]) -> list[Tensor]:
    """Return |weight * dR/dweight| of each weight, R being the sum of the outputs of |weights| for an input of ones.

    Reference: arXiv 2006.05467, equation 7; biases are zero here.
    """
    was_training, signs = model.training, [weight.detach().sign() for weight in weights]
    model.eval()
    with torch.no_grad():
        for weight in weights:
            weight.abs_()
    first = weights[0]
    # the input of the first layer: features of a matrix, channels and any size of a convolution
    shape = (1, first.shape[1], *(max(8, size) for size in first.shape[2:]))
    total = model(torch.ones(shape)).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True)
    scores = [
        torch.zeros_like(weight) if gradient is None else (weight.detach() * gradient).abs()
        for weight, gradient in zip(weights, found, strict=True)
    ]
    with torch.no_grad():
        for weight, sign in zip(weights, signs, strict=True):
            weight.mul_(sign)
    model.train(was_training)
    return scores


class _SignedWeights(nn.Module):
    """Weights as a function of the scores of those that are kept."""

    def __init__(self, frozen: Tensor, places: Tensor, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.register_buffer("frozen", frozen.reshape(-1)[places], persistent=False)
        self.register_buffer("places", places, persistent=False)
        self._shape = frozen.shape

    def forward(self, scores: Tensor) -> Tensor:
        frozen: Any = self.frozen
        signs = torch.where(scores < 0, -1.0, 1.0)
        # straight-through: the value is the sign, the gradient that of the score
        kept = frozen * (signs + scores - scores.detach())
        whole = torch.zeros(self._shape.numel(), dtype=kept.dtype, device=kept.device)
        return whole.index_put((self.places,), kept).view(self._shape)  # type: ignore[arg-type]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the first scores: all positive, so that the model computes with the frozen weights."""
        frozen: Any = self.frozen
        return torch.full_like(frozen, self._scale)


@dataclass(frozen=True)
class MajoritySigns:
    """The weighted majority of the clients' signs, as scores of one magnitude; a tie keeps the sign before."""

    scale: float = 0.01  # magnitude, that of `sign_mask`

    def project(self, before: Arrays, after: Arrays) -> Arrays:
        """Return the signs of the mean."""
        return {
            name: np.where(
                # the strategy's mean of signs is float32: its rounding decides nothing
                abs(mean) < 1e-6,
                before[name],
                np.where(mean < 0, -self.scale, self.scale),
            ).astype(np.float32)
            for name, mean in after.items()
        }
