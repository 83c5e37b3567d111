"""A Lightning Trainer as one replica of several.

torchrun --nproc-per-node 2 lightning_strategy.py
"""

import lightning
import torch
from torch import nn

import thinwire
from thinwire.integrations.data import ReplicaSampler
from thinwire.integrations.lightning import DiLoCoStrategy


class Module(lightning.LightningModule):
    """A module as it was; nothing in it knows of thinwire."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch):
        """Return the loss."""
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        """Return the inner optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


transport = thinwire.connect(solo=True)
points = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
model = Module()
trainer = lightning.Trainer(
    strategy=DiLoCoStrategy(
        method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1), transport=transport
    ),
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=f"runs/lightning/replica-{transport.replica}",
)  # fmt: skip
sampler = ReplicaSampler(points, transport)
trainer.fit(model, torch.utils.data.DataLoader(points, batch_size=4, sampler=sampler))
transport.close()
