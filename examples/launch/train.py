"""One loop for every launcher: each rank, or group of ranks, that is started becomes a replica."""

import argparse
import hashlib

import torch
from torch import nn

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--ranks-per-replica", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

# first: takes the launcher's variables and hides them from libraries
transport = thinwire.connect(solo=True, ranks_per_replica=options.ranks_per_replica)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
data = torch.Generator().manual_seed(transport.replica)  # each replica has data of its own

with thinwire.DistributedOptimizer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    method=thinwire.methods.iso_loco(sync_interval=5, overlap_steps=1),
    transport=transport,
) as optimizer:
    for _ in range(options.steps):
        points = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(points), points.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with optimizer.global_parameters():
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
digest = hashlib.sha256(weights).hexdigest()[:16]
name = f"replica {transport.replica} of {transport.num_replicas}"
print(f"{name}: loss {loss.item():.4f}, parameters {digest}", flush=True)
transport.close()
