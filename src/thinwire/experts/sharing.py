"""Experts of one layer and the ranks that share them: whose each is, and weighted sums over what a token chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from thinwire.errors import refusal
from thinwire.transport.group_peers import RankPeers, check_agreement


class Dispatch(Protocol):
    """A policy of what travels between the ranks that share the experts of a layer; a frozen value."""

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: ExpertRanks) -> Tensor:
        """Return what the experts make of rows, with gradients.

        Args:
            rows: This rank's (rows, width), sorted by expert; a token has one for each expert that it chose.
            counts: Rows for each of all experts.
            experts: Those of the layer: whose they are, and the computation of this rank's.

        Returns:
            (rows, width), in the order of the rows.
        """


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Experts of a layer, and the ranks that share them: rank r holds the r-th of equal parts.

    Attributes:
        name: Of the layer, for errors.
        num_experts: Of the layer.
        compute: Applies this rank's experts to rows (rows, width), sorted by expert, with so many rows for each.
        device: Of the rows.
        peers: The ranks; None where one holds all.
        copies: Computations of other ranks' experts, by number, that this rank has copies of for now.

    Raises:
        ValueError: The ranks do not divide the experts.
    """

    name: str
    num_experts: int
    compute: Callable[[Tensor, Sequence[int]], Tensor]
    device: torch.device
    peers: RankPeers | None = None
    copies: dict[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = 1 if self.peers is None else self.peers.size
        if self.num_experts % size:
            divisors = [ranks for ranks in range(1, self.num_experts + 1) if self.num_experts % ranks == 0]
            fewer = max(ranks for ranks in divisors if ranks < size)
            raise refusal(f"the experts of {self.name} are not divided by the ranks that share them",
                          got=f"{self.num_experts} experts on {size} ranks",
                          allowed=f"{', '.join(map(str, divisors))} ranks", remedy=f"--ep {fewer}")  # fmt: skip

    def check(self, details: str) -> None:
        """Compare the layer with that of the other ranks; all of them call it.

        Args:
            details: What else is alike on all ranks.

        Raises:
            ValueError: Theirs has other experts or details.
        """
        if self.peers is not None:
            check_agreement(self.peers, f"{self.num_experts} experts of {self.name}, {details}", what="experts",
                            remedy="the same model on all ranks")  # fmt: skip

    @property
    def num_own(self) -> int:
        """Experts of this rank."""
        return self.num_experts // (1 if self.peers is None else self.peers.size)

    def apply(self, rows: Tensor, chosen: Tensor, shares: Tensor, *, dispatch: Dispatch) -> Tensor:
        """Return the sum of what the chosen experts make of each token, weighted.

        Args:
            rows: (tokens, width).
            chosen: Experts of each token, (tokens, k) int64.
            shares: Their weights, (tokens, k).
            dispatch: What travels.

        Returns:
            As `rows`.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.num_experts).tolist()
        source = order // chosen.shape[1]  # the token of each sorted row
        made = dispatch(rows[source], counts, self) * shares.flatten()[order].unsqueeze(1).to(rows.dtype)
        return torch.zeros_like(rows).index_add(0, source, made.to(rows.dtype))
