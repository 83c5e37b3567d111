"""Two replicas of two ranks each: FSDP2 shards a replica over its ranks, thinwire joins the replicas.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_replicas.py

Ranks 0 and 1 are replica 0, ranks 2 and 3 are replica 1. FSDP's own traffic stays within a replica, where the wire is
fast; thinwire's crosses between ranks that hold the same shard (0 with 2, and 1 with 3), each with its part only.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire

RANKS_PER_REPLICA = 2

torch.set_num_threads(1)
transport = thinwire.connect(ranks_per_replica=RANKS_PER_REPLICA)
mesh = init_device_mesh("cpu", (transport.num_replicas, RANKS_PER_REPLICA), mesh_dim_names=("replica", "shard"))

# --8<-- [start:sharding]
torch.manual_seed(0)  # the same first weights everywhere
blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(16, 4))
for block in blocks:
    fully_shard(block, mesh=mesh["shard"])  # the axis "replica" is thinwire's
fully_shard(model, mesh=mesh["shard"])

optimizer = thinwire.DistributedOptimizer(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),  # built after sharding
    method=thinwire.methods.streaming_diloco(sync_interval=10, overlap_steps=2),
    transport=transport,
)
# --8<-- [end:sharding]
parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
elements, own_elements = sum(p.numel() for p in parameters), sum(p.to_local().numel() for p in parameters)

directions = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
# Every rank has data of its own: FSDP averages gradients over the ranks of a replica.
own = torch.Generator().manual_seed(1 + transport.replica * RANKS_PER_REPLICA + mesh.get_local_rank("shard"))
for _ in range(60):
    points = torch.randn(64, 16, generator=own)
    nn.functional.cross_entropy(model(points), (points @ directions.T).argmax(dim=1)).backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.close(final_exchange=True)

with optimizer.global_parameters(), torch.no_grad():
    # All ranks of a replica must take part: FSDP gathers the parameters for the forward pass.
    points = torch.randn(256, 16, generator=torch.Generator().manual_seed(9))
    loss = nn.functional.cross_entropy(model(points), (points @ directions.T).argmax(dim=1)).item()

sent = transport.log.totals("sent")
print(
    f"replica {transport.replica}, shard {mesh.get_local_rank('shard')}: loss of the global parameters {loss:.4f}, "
    f"{own_elements:,} of {elements:,} elements, {sent.wire_bytes:,} bytes sent"
)
transport.close()
