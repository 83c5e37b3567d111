"""A plain loop of accelerate as one replica of several.

torchrun --nproc-per-node 2 accelerate_loop.py
"""

import accelerate
import torch
from torch import nn

import thinwire
from thinwire.integrations.data import ReplicaSampler

transport = thinwire.connect(solo=True)  # before Accelerator
accelerator = accelerate.Accelerator(cpu=True)

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
points = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(points, batch_size=4, sampler=ReplicaSampler(points, transport))
optimizer = thinwire.DistributedOptimizer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1),
    transport=transport,
)
prepared, stepper, batches = accelerator.prepare(model, optimizer, loader)

for batch in batches:
    accelerator.backward(prepared(batch).pow(2).mean())
    stepper.step()
    stepper.zero_grad()
optimizer.close(final_exchange=True)
transport.close()
