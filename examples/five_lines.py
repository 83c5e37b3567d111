"""A plain PyTorch loop that trains over thin wires: the lines marked with an arrow are all that thinwire adds.

    python examples/five_lines.py                                              # alone: one replica, nothing is sent
    torchrun --standalone --nproc-per-node 2 examples/five_lines.py            # two replicas on this machine

The task is made up, so that the example needs no data: to tell which of four random directions a point lies in.
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire

torch.set_num_threads(1)
transport = thinwire.connect()  # <-- torchrun's ranks become replicas

torch.manual_seed(0)
directions = torch.randn(4, 16)
model = nn.Sequential(
    nn.Linear(16, 32), *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 4)
)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
method = thinwire.methods.streaming_diloco(sync_interval=10, overlap_steps=2)  # <-- when, what, in which code
optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)  # <-- wraps the optimizer
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)  # knows nothing of thinwire


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 points and the direction that each lies in."""
    points = torch.randn(64, 16, generator=generator)
    return points, (points @ directions.T).argmax(dim=1)


# Replicas must see different data: that is what they tell each other about.
own = torch.Generator().manual_seed(1 + transport.replica)
for _ in range(100):
    points, labels = batch(own)
    nn.functional.cross_entropy(model(points), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
optimizer.close(final_exchange=True)  # <-- the last steps' work is exchanged too

with optimizer.global_parameters(), torch.no_grad():  # <-- evaluate and save what all replicas agree on
    points, labels = batch(torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(points), labels).item()

sent = transport.log.totals("sent")
print(
    f"replica {transport.replica} of {transport.num_replicas}: loss of the global parameters {loss:.4f}, "
    f"{sent.wire_bytes:,} bytes sent in {sent.messages} messages"
)
transport.close()
