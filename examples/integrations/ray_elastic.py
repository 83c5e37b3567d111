"""Two elastic replicas as Ray actors, which Ray places and starts again where one dies."""

from pathlib import Path

import ray
import torch

import thinwire
from thinwire.integrations.ray import RayRun, run_elastic


def train(run: RayRun) -> str:
    """Train one replica; Ray calls this again after the replica's process or node died."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    method = thinwire.methods.streaming_diloco(sync_interval=10, overlap_steps=2)
    with run.join(model, inner, method=method, steps=60) as optimizer:
        while not optimizer.is_finished:
            points = torch.randn(16, 8)
            (model(points) - points.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return f"{sum(parameter.sum().item() for parameter in model.parameters()):.6f}"


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)  # ray.init("auto") on a cluster
    sums = run_elastic(train, replicas=2, folder=Path("runs/ray"))
    print(sums)  # the same model on both
    assert len(set(sums)) == 1
