"""A rank of a plain torch job under `thinwire.watch`, which works and reduces until it ends: `script FOLDER NUMEL`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import thinwire

folder, numel = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
thinwire.watch(folder, probe_wires=True)
while True:
    time.sleep(0.05)
    total = torch.full((numel,), float(rank))
    dist.all_reduce(total)
    assert bool((total == sum(range(size))).all())
