"""A loop like nanoGPT's or nanochat's: the lines with an arrow are all that thinwire adds.

torchrun --nproc-per-node 2 nanogpt_loop.py
"""

import os

import torch
from torch import nn

import thinwire

transport = thinwire.connect(solo=True)  # <-- from here on the script sees one process
is_ddp = int(os.environ.get("RANK", -1)) != -1  # nanoGPT's own question; now the answer is no
assert not is_ddp

torch.manual_seed(1337)
text = torch.tensor(list(b"To be, or not to be, that is the question. " * 40))
model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = thinwire.DistributedOptimizer(  # <--
    model, inner, method=thinwire.methods.streaming_diloco(sync_interval=10, overlap_steps=2), transport=transport
)
random = torch.Generator().manual_seed(1337 + transport.replica)  # <-- own batches
for _ in range(40):
    starts = torch.randint(len(text) - 17, (8,), generator=random)
    windows = torch.stack([text[start : start + 17] for start in starts])
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
optimizer.close(final_exchange=True)  # <--
print(f"replica {transport.replica}: loss {loss.item():.2f}")
transport.close()
