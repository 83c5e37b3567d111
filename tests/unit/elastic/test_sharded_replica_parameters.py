"""Parameters of a replica of several ranks, seen from the rank that leads, which holds no whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from thinwire.elastic.elastic_method import ShardedReplicaParameters
from thinwire.sync.views import GlobalParameters


class OtherRanks:
    """Holds the whole parameters, as the ranks of a replica do together."""

    def __init__(self, model: nn.Module) -> None:
        self._held = dict(model.named_parameters())

    def gather(self, names: Sequence[str]) -> torch.Tensor:
        return torch.cat([self._held[name].detach().reshape(-1).float() for name in names])

    def scatter(self, names: Sequence[str], values: torch.Tensor, *, blend: float = 0.0) -> None:
        start = 0
        for name in names:
            own = self._held[name].detach()
            own.copy_(torch.lerp(values[start : start + own.numel()].view(own.shape), own.float(), blend))
            start += own.numel()

    def keep(self) -> None: ...

    def restore(self) -> None: ...


def test_what_a_replica_of_several_ranks_trained_is_what_a_replica_of_one_trained() -> None:
    torch.manual_seed(0)
    wide, narrow = nn.Linear(3, 2), nn.Linear(2, 5).bfloat16()
    for parameter in narrow.parameters():
        nn.init.ones_(parameter)
    model = nn.Sequential(wide, narrow)
    fragments = [list(dict(model.named_parameters()))]
    of_several = ShardedReplicaParameters(model, fragments, pieces=OtherRanks(model))
    of_one = GlobalParameters(model, fragments)
    for parameters in (of_several, of_one):
        parameters.values[0].add_(1e-4)  # less than bfloat16 resolves
    with torch.no_grad():
        wide.weight.add_(0.5)
    found = of_several.trained(0)
    assert torch.equal(found, of_one.trained(0))
    assert not found[-narrow.weight.numel() - narrow.bias.numel() :].any() and found[: wide.weight.numel()].all()
