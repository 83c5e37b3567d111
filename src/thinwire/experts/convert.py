"""Conversion of trained layers of experts to such whose tokens travel in fewer dimensions (MoLE)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import NonFiniteError, refusal
from thinwire.experts.layer import ExpertLayer
from thinwire.experts.narrow_rows import low_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spectrum:
    """Squared singular values of what a conversion cuts, the largest first, and how many it kept."""

    squares: Tensor
    kept: int

    @property
    def energy(self) -> float:
        """Kept share of the squared weights."""
        return 1 - self.squared_error / total if (total := float(self.squares.sum())) > 0 else 1.0

    @property
    def squared_error(self) -> float:
        """Sum of the dropped squared singular values, which is that of the squared differences of the weights."""
        return float(self.squares[self.kept :].sum())

    def rank_of(self, share: float) -> int:
        """Return the fewest values that keep a share of the squared weights."""
        wanted = share * float(self.squares.sum())
        return 1 + int((self.squares.cumsum(0) < wanted * (1 - 1e-12)).sum())


def to_low_rank(layer: ExpertLayer, rank: int) -> tuple[ExpertLayer, tuple[Spectrum, Spectrum]]:
    """Return a layer whose tokens travel in fewer dimensions, and the spectra of its input and output weights.

    Input weights W_i of all experts, stacked by rows, become A_i B, where B holds the first right singular vectors;
    output weights, stacked by columns, become C D_i, where C holds the first left ones. No such factors are nearer.

    Args:
        layer: On one rank.
        rank: Dimensions on the way.

    Raises:
        ValueError: The tokens of the layer travel in no more dimensions than these already.
        NonFiniteError: A weight is NaN or infinite.

    Reference:
        arXiv 2503.23100: experts that share a projection into a latent space. How near they come is Eckart-Young.
    """
    dim, (num_experts, hidden, width) = layer.router.in_features, layer.up.shape
    if not 1 <= rank < width:
        raise refusal("a conversion is to fewer dimensions than tokens travel in", got=rank,
                      allowed=f"1 to {width - 1} of {width}", remedy=f"--rank {max(1, width // 2)}")  # fmt: skip
    for name, parameter in layer.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(f"{layer.name}: {name} holds NaN or infinity; convert an earlier checkpoint")
    up, down = layer.up.detach().double(), layer.down.detach().double()
    basis, into = _first_vectors(torch.einsum("ehd,ehf->df", up, up), rank)
    rise, out_of = _first_vectors(torch.einsum("edh,efh->df", down, down), rank)
    found = ExpertLayer(
        dim, hidden, num_experts, layer.top_k, dispatch=low_rank(ratio=rank / dim, dispatch=layer.dispatch)
    )
    assert found.narrow is not None and found.widen is not None
    narrow = basis.T if layer.narrow is None else basis.T @ layer.narrow.weight.double()
    widen = rise if layer.widen is None else layer.widen.weight.double() @ rise
    values = (layer.router.weight, narrow, widen, up @ basis, rise.T @ down)
    weights = (found.router.weight, found.narrow.weight, found.widen.weight, found.up, found.down)
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    return found.to(layer.up), (into, out_of)


def _first_vectors(gram: Tensor, rank: int) -> tuple[Tensor, Spectrum]:
    """Return the first singular vectors (width, rank), from a product of the matrix with itself."""
    squares, vectors = torch.linalg.eigh(gram)  # ascending
    return vectors.flip(1)[:, :rank], Spectrum(squares=squares.flip(0).clamp(min=0), kept=rank)
