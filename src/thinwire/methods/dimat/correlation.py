"""How the units of two models of one architecture correlate over the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from thinwire.methods.dimat.permutation_graph import Observation, PermutationGraph

# what a product of two deviations counts for at least: below, a unit counts as one that never changes
MIN_DEVIATIONS = 1e-7


def correlations(
    own: PermutationGraph, neighbour: PermutationGraph, batches: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the correlation of every unit of one model with every unit of another, group by group.

    Every sample and every position of an image counts as one observation. Where several layers read a group, their
    correlations are summed.

    Args:
        own: The groups of one model, which is in eval mode.
        neighbour: The groups of another one of the same architecture, in eval mode too.
        batches: Inputs on the models' device.

    Returns:
        float64, `(num_units, num_units)`, own units by neighbour's units; one for each group.
    """
    moments = [[_Moments() for _ in group.observations] for group in own.groups]
    for batch in batches:
        outputs = [_Recorder(graph).outputs(batch) for graph in (own, neighbour)]
        for group, sums in zip(own.groups, moments, strict=True):
            for observation, one in zip(group.observations, sums, strict=True):
                one.add(*(_features(found[observation.node], observation) for found in outputs))
    return [torch.stack([one.correlation() for one in sums]).sum(dim=0) for sums in moments]


class _Moments:
    """Running sums from which the correlation follows."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, own: torch.Tensor, neighbour: torch.Tensor) -> None:
        """Count observations, `(num_units, num_observations)` each."""
        self._count += own.shape[1]
        terms = {
            "own": own.sum(dim=1), "neighbour": neighbour.sum(dim=1), "product": own @ neighbour.T,
            "own_square": own.square().sum(dim=1), "neighbour_square": neighbour.square().sum(dim=1),
        }  # fmt: skip
        for name, term in terms.items():
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def correlation(self) -> torch.Tensor:
        mean = {name: total / self._count for name, total in self._sums.items()}
        covariance = mean["product"] - torch.outer(mean["own"], mean["neighbour"])
        deviations = [
            (mean[f"{name}_square"] - mean[name].square()).clamp(min=0).sqrt() for name in ("own", "neighbour")
        ]
        return covariance / torch.outer(*deviations).clamp(min=MIN_DEVIATIONS)


class _Recorder(fx.Interpreter):
    """Runs a traced model and keeps what its observed nodes put out."""

    def __init__(self, graph: PermutationGraph) -> None:
        super().__init__(graph.traced)
        self._wanted = {observation.node for group in graph.groups for observation in group.observations}
        self._found: dict[str, torch.Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.name in self._wanted:
            self._found[node.name] = result.to(torch.float64, copy=True)  # the next layer may write in place
        return result

    @torch.no_grad()
    def outputs(self, batch: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the outputs of the observed nodes for one batch."""
        self.run(batch)
        return self._found


def _features(output: torch.Tensor, observation: Observation) -> torch.Tensor:
    """Return an output as `(num_units, num_observations)`."""
    shape = output.shape
    split = (*shape[: observation.dim], -1, observation.block, *shape[observation.dim + 1 :])
    return output.reshape(split).movedim(observation.dim, 0).flatten(start_dim=1)
