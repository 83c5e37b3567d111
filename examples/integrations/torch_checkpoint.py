"""Checkpoints by torch.distributed.checkpoint, written in the background.

torchrun --nproc-per-node 2 torch_checkpoint.py
"""

import torch
from torch import nn

import thinwire
from thinwire.integrations import dcp

transport = thinwire.connect(solo=True)


def build():
    """Return the model and its optimizer, as at the start of the run."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1)
    return model, thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)


model, optimizer = build()
batches = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(transport.replica))
for batch in batches[:5]:
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.async_save("runs/dcp/step-5", model, optimizer).result()  # or wait for it later

model, optimizer = build()
dcp.load("runs/dcp/step-5", model, optimizer)
for batch in batches[optimizer.steps_done :]:
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.close(final_exchange=True)
transport.close()
