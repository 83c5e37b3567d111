"""Centroids of alike tokens travel to the experts in place of the tokens (LSH-MoE), for comparison with codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import refusal
from thinwire.experts.dispatch import Tokens, Weights
from thinwire.experts.sharing import Dispatch, ExpertRanks
from thinwire.shared_random import derive_seed


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Rows of an expert and rank that all hashes put together travel as their mean, and get what it makes of that.

    A hash is the largest coordinate of a rotated row, with its sign (cross-polytope).

    Attributes:
        hashes: More make clusters smaller, and their number larger.
        compensate: Whether a row's distance from the mean is added to what the expert made: y = E(c) + (x - c), as if
            experts changed little.
        dispatch: What travels, of the means.
        seed: Of the rotations, which all ranks share.

    Reference:
        arXiv 2411.08446.
    """

    hashes: int = 6
    compensate: bool = False
    dispatch: Dispatch = Tokens()  # noqa: RUF009  # frozen
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of hashes, and what carries the means."""
        if not 1 <= self.hashes <= 64:
            raise refusal("hashes is out of range", got=self.hashes, allowed="1 to 64", remedy="hashes=6")
        if isinstance(self.dispatch, Weights):  # they would find no choices to plan by, and stream none
            raise refusal("means travel as tokens do", got=type(self.dispatch).__name__, allowed="experts.tokens(...)",
                          remedy="clusters(dispatch=experts.tokens())")  # fmt: skip

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: ExpertRanks) -> Tensor:
        """See `Dispatch`."""
        kinds = torch.arange(len(counts)).repeat_interleave(torch.tensor(list(counts))).to(rows.device)
        # sorted by expert first, as a dispatch wants it
        keys = torch.cat([kinds[:, None], self._hashed(rows.detach())], dim=1)
        unique, cluster, sizes = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
        means = rows.new_zeros((len(unique), rows.shape[1])).index_add(0, cluster, rows)
        means = means / sizes[:, None].to(rows.dtype)
        own_counts = unique[:, 0].bincount(minlength=len(counts)).tolist()
        made = self.dispatch(means, own_counts, experts)[cluster]
        return made + (rows - means[cluster]) if self.compensate else made

    def _hashed(self, rows: Tensor) -> Tensor:
        """Return the hashes of rows, (rows, hashes)."""
        width = rows.shape[1]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "clusters", str(width)))
        turns = torch.randn(self.hashes, width, width, generator=generator) / math.sqrt(width)
        turned = torch.einsum("nd,hde->nhe", rows.float(), turns.to(rows.device))
        largest = turned.abs().argmax(-1)
        sign = turned.gather(-1, largest[..., None])[..., 0] < 0
        return largest + width * sign


def clusters(*, hashes: int = 6, compensate: bool = False, dispatch: Dispatch | None = None, seed: int = 0) -> Clusters:
    """Return the policy by which means of alike tokens travel; see `Clusters`."""
    return Clusters(
        hashes=hashes, compensate=compensate, dispatch=Tokens() if dispatch is None else dispatch, seed=seed
    )
