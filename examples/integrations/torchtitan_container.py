"""torchtitan's container of optimizers as one replica of several.

torchrun --nproc-per-node 2 torchtitan_container.py
"""

import torch
from torch import nn
from torchtitan.components.optimizer import default_adamw

import thinwire
from thinwire.integrations.titan import DiLoCoOptimizersContainer

transport = thinwire.connect(solo=True)

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
config = DiLoCoOptimizersContainer.Config(  # the section `optimizer` of a job's config
    param_groups=default_adamw(lr=1e-2).param_groups,
    implementation="for-loop",
    method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1),
    transport=transport,
)
container = config.build(model_parts=[model])

for batch in torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(transport.replica)):
    model(batch).pow(2).mean().backward()
    container.step()
    container.zero_grad()
container.close()  # the final exchange
transport.close()
