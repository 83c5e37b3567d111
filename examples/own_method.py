"""A method of one's own, put together from the five parts, on two replicas in one process.

    python examples/own_method.py

One part is new, an outer optimizer. A part is any object with the methods of its protocol: nothing is derived from
anything, and the engine is not told about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import thinwire
from thinwire.averaging.exchange import AllGather
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import block_int8
from thinwire.sync.fragments import Pattern
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient
from thinwire.transport.loopback import LoopbackTransport


# --8<-- [start:outer]
@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedHeavyBall:
    """Heavy ball on a clipped pseudo-gradient; see `thinwire.sync.outer_optimizer.OuterOptimizer`."""

    lr: float
    momentum: float
    max_norm: float

    @property
    def has_momentum(self) -> bool:
        """Ask the engine to keep a momentum for each fragment."""
        return True

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Update the fragment's global value and its momentum in place; float32 vectors."""
        assert momentum is not None
        pseudo_gradient *= (self.max_norm / (pseudo_gradient.norm() + 1e-12)).clamp(max=1.0)
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        value.add_(momentum, alpha=-self.lr)


# --8<-- [end:outer]


# --8<-- [start:method]
def clipped_int8(*, sync_interval: int, overlap_steps: int) -> thinwire.Method:
    """Choose the five parts. What all replicas must agree on is their `repr`: it is compared before the first step."""
    outer = ClippedHeavyBall(lr=0.7, momentum=0.6, max_norm=5.0)
    return thinwire.Method(
        name="clipped-int8",
        schedule=Staggered(sync_interval=sync_interval, overlap_steps=overlap_steps),  # when
        topology=AllReplicas(),  # with whom
        view=PseudoGradient(fragments=Pattern(order="sequential", layers_per_fragment=2)),  # what
        exchange=lambda num_replicas: AllGather(codec=block_int8()),  # in which code
        update=lambda num_replicas: OuterStep(optimizer=outer, blend=0.5),  # how the result is applied
    )


# --8<-- [end:method]


def train(transport: LoopbackTransport) -> tuple[float, int]:
    """Train one replica; return the loss of the global parameters and the bytes this replica sent."""
    recorded = thinwire.RecordingTransport(transport)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = clipped_int8(sync_interval=8, overlap_steps=2)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=recorded)
    target = torch.randn(16, 1, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1 + transport.replica)
    for _ in range(80):
        points = torch.randn(32, 16, generator=own)
        nn.functional.mse_loss(model(points), (points @ target).tanh()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close(final_exchange=True)
    with optimizer.global_parameters(), torch.no_grad():
        points = torch.randn(256, 16, generator=torch.Generator().manual_seed(9))
        loss = nn.functional.mse_loss(model(points), (points @ target).tanh()).item()
    return loss, recorded.log.totals("sent").wire_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    for replica, (loss, sent) in enumerate(thinwire.run_replicas(2, train)):
        print(f"replica {replica}: loss of the global parameters {loss:.4f}, {sent:,} bytes sent")
