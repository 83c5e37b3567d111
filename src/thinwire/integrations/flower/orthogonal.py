"""Federated orthogonal training: later tasks leave the inputs of earlier ones alone (FOT, arXiv 2309.01289, ICLR 2024).

After a task each client sends, for each linear layer, a sketch `Y = A R` of its inputs A (features, samples), with R
(samples, columns) uniform in [-1, 1]; what an earlier basis U covers is taken off A first. The server only adds
sketches up, and appends to U the fewest left singular vectors of the sum that hold the wanted energy. From then on its
steps are projected: `G <- G - G U U^T`, G being the old weights less the new ones, (out, in). Clients train as before.

Changed from the authors' code: columns may be fewer than features; the default is all. Sketches and bases travel as
float16, a sketch over its largest magnitude: that adds about 1e-7 of the energy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinwire.errors import PayloadError, refusal
from thinwire.integrations.flower.updates import Arrays

_WEIGHT, _RATIO = ".sketch", ".ratio"


@dataclass(kw_only=True)
class OrthogonalTasks:
    """Rule of `wrap` that projects the server's steps, and learns a basis from sketches at the end of each task.

    Raises:
        ValueError: `eps` is out of its range.
    """

    eps: float = 0.96  # share of the energy of a task's inputs that the basis must hold, in (0, 1)
    eps_step: float = 0.0  # added to it after each task
    columns: int | None = None  # of a sketch; None for as many as a layer has features
    # for each layer's weight, by name, an orthonormal basis (features, rank)
    bases: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise refusal("eps is out of its range", got=self.eps, allowed="between 0 and 1", remedy="eps=0.96")

    def project(self, before: Arrays, after: Arrays) -> Arrays:
        """Return the new arrays without the part of the step that the bases cover."""
        new = dict(after)
        for name, basis in self.bases.items():
            old = before[name].astype(np.float64)
            step = old - after[name].astype(np.float64)
            rows = step.reshape(step.shape[0], -1)
            kept = rows - (rows @ basis) @ basis.T
            new[name] = (old - kept.reshape(step.shape)).astype(after[name].dtype)
        return new

    def settings(self) -> Arrays:
        """Return the bases as arrays, for the sketch query."""
        return {name: basis.astype(np.float16) for name, basis in self.bases.items()}

    def check(
        self, found: Mapping[str, npt.NDArray[Any]], shapes: Mapping[str, tuple[int, ...]], count: float = 1
    ) -> None:
        """Raise PayloadError for a client's sketch, of `count` samples, that is none of matrices of these shapes."""
        wanted: dict[str, tuple[int, ...]] = {}
        for name in (key.removesuffix(_WEIGHT) for key in found if key.endswith(_WEIGHT)):
            if name not in shapes:
                raise PayloadError(f"a sketch of {name[:100]!r}, which is no matrix of the model")
            wanted |= {name + _WEIGHT: (shapes[name][1], self.columns or shapes[name][1]), name + _RATIO: (2,)}
        if not wanted or {key: one.shape for key, one in found.items()} != wanted:
            raise PayloadError("a sketch has other layers or shapes than the model")
        if self.bases and {name + _WEIGHT for name in self.bases} - set(found):
            raise PayloadError("a sketch has fewer layers than earlier ones")
        if not all(bool(np.isfinite(one).all()) for one in found.values()) or not all(
            0 <= float(one[0]) <= 1.001 and float(one[1]) > 0 for key, one in found.items() if key.endswith(_RATIO)
        ):
            raise PayloadError("a sketch holds NaN, infinity, no scale, or a ratio outside of 0 to 1")
        if not 0 < count < 2**53:
            raise PayloadError(f"a sketch of {count} samples")

    def extend(self, sketches: Sequence[tuple[Mapping[str, npt.NDArray[Any]], float]]) -> dict[str, int]:
        """Extend the bases by what `sketches_of` returned for each client, and return the rank of each basis."""
        if not sketches:
            return {name: basis.shape[1] for name, basis in self.bases.items()}
        first = sketches[0][0]
        total = sum(count for _, count in sketches)
        for key in [name for name in first if name.endswith(_WEIGHT)]:
            name = key.removesuffix(_WEIGHT)
            summed = np.sum([found[key].astype(np.float64) * found[name + _RATIO][1] for found, _ in sketches], axis=0)
            ratio = sum(float(found[name + _RATIO][0]) * count for found, count in sketches) / total
            self._append(name, summed, ratio)
        self.eps = min(self.eps + self.eps_step, 0.999)
        return {name: basis.shape[1] for name, basis in self.bases.items()}

    def _append(self, name: str, sketch: npt.NDArray[np.float64], ratio: float) -> None:
        basis = self.bases.get(name, np.zeros((sketch.shape[0], 0)))
        # what the basis holds already counts: the rest needs only this share of its own energy
        wanted = (ratio - (1 - self.eps)) / ratio if ratio > 0 else 0.0
        if wanted <= 0 or basis.shape[1] == sketch.shape[0]:
            self.bases[name] = basis
            return
        left, singular, _ = np.linalg.svd(sketch, full_matrices=False)
        energy = np.cumsum(singular**2) / max(float(np.sum(singular**2)), np.finfo(np.float64).tiny)
        rank = min(int(np.searchsorted(energy, wanted, side="right")) + 1, left.shape[1])
        joined, _ = np.linalg.qr(np.concatenate([basis, left[:, :rank]], axis=1))
        self.bases[name] = joined[:, : sketch.shape[0]]


def sketches_of(
    model: nn.Module, batches: Iterable[Tensor], *, bases: Mapping[str, npt.NDArray[Any]], seed: int,
    columns: int | None = None,
) -> tuple[Arrays, int]:  # fmt: skip
    """Return sketches of the inputs of a model's linear layers, and the number of samples; convolutions count as none.

    `bases` of earlier tasks are by the name of a layer's weight. The seed of the random columns is the client's own, so
    that sums of sketches cover all clients. For each layer's weight there is its sketch (features, columns), float16,
    and its ratio (2,): the norm of the inputs that the basis does not cover over that of all, and the sketch's scale.
    """
    layers = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    generator = torch.Generator().manual_seed(seed)
    sums = {name: torch.zeros(one.in_features, columns or one.in_features) for name, one in layers.items()}
    squares = {name: [0.0, 0.0] for name in layers}
    inputs: dict[str, Tensor] = {}
    hooks = [
        one.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given[0].detach()))
        for name, one in layers.items()
    ]
    samples = 0
    try:
        with torch.no_grad():
            for batch in batches:
                model(batch)
                samples += len(batch)
                for name, value in inputs.items():
                    rows = value.reshape(-1, value.shape[-1]).float()
                    squares[name][1] += float(rows.double().square().sum())
                    if name in bases and bases[name].shape[1]:
                        basis = torch.from_numpy(np.ascontiguousarray(bases[name])).float()
                        rows = rows - rows @ basis @ basis.T
                    squares[name][0] += float(rows.double().square().sum())
                    random = torch.rand(rows.shape[0], sums[name].shape[1], generator=generator) * 2 - 1
                    sums[name] += rows.T @ random
    finally:
        for hook in hooks:
            hook.remove()
    found: Arrays = {}
    for name, (rest, whole) in squares.items():
        scale = float(sums[name].abs().max()) or 1.0
        found[name + _WEIGHT] = (sums[name] / scale).numpy().astype(np.float16)
        found[name + _RATIO] = np.array([(rest / whole) ** 0.5 if whole else 0.0, scale], np.float32)
    return found, samples
