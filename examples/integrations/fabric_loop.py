"""A loop of Lightning Fabric as one replica of several.

torchrun --nproc-per-node 2 fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn

import thinwire

transport = thinwire.connect(solo=True)
fabric = Fabric(accelerator="cpu", devices=1)

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = thinwire.DistributedOptimizer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1),
    transport=transport,
)
prepared, stepper = fabric.setup(model, optimizer)

for batch in torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(transport.replica)):
    fabric.backward(prepared(batch).pow(2).mean())
    stepper.step()
    stepper.zero_grad()
optimizer.close(final_exchange=True)
transport.close()
