"""The example of a graph network cut by layers: exact with one chunk, as good with several, bytes as the law."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import run, values
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = (1, 2, 3)


def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    import gnn_pipeline

    return gnn_pipeline


def trained_whole(seed: int, dtype: torch.dtype, epochs: int) -> Any:
    """Train all layers on the whole graph in one process."""
    gnn = example()
    adjacency, features, classes, trains = gnn.graph(seed)
    part = gnn.Layers(0, gnn.LAYERS, adjacency, dtype=dtype)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    for _ in range(epochs):
        values = features.to(dtype)
        for layer in part.layers:
            values = values + layer(part.adjacency @ values).relu()
        gnn.loss_of(part.head(values), torch.where(trains, classes, -100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return part


def rank() -> dict[str, Any]:
    import thinwire
    from thinwire.transport.collective_hooks import CollectiveHooks

    gnn = example()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own, size = dist.get_rank(), dist.get_world_size()
    cut = range(own * gnn.LAYERS // size, (own + 1) * gnn.LAYERS // size)
    found: dict[str, Any] = {}
    adjacency, features, classes, trains = gnn.graph()
    targets = torch.where(trains, classes, -100)
    exact = gnn.Trainer(gnn.Layers(cut.start, cut.stop, adjacency, dtype=torch.float64), own, size, code=None)
    for _ in range(3):
        exact.epoch(features, targets, num_chunks=1)
    found["exact"] = {name: value.tolist() for name, value in exact.part.state_dict().items()}
    observer = SentBytes()
    hooks = CollectiveHooks(observer)
    for seed in SEEDS:
        adjacency, features, classes, trains = gnn.graph(seed)
        targets = torch.where(trains, classes, -100)
        part = gnn.Layers(cut.start, cut.stop, adjacency)
        trainer = gnn.Trainer(part, own, size, code=thinwire.ActivationCode())
        for number in range(gnn.EPOCHS):
            observer.sent = 0
            trainer.epoch(features.float(), targets, num_chunks=gnn.CHUNKS if number else 1)
        found[f"sent {seed}"] = observer.sent
        found[f"state {seed}"] = {name: value.tolist() for name, value in part.state_dict().items()}
    hooks.close()
    dist.destroy_process_group()
    return found


class SentBytes:
    """Observer of calls: bytes sent."""

    def __init__(self) -> None:
        self.sent = 0

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        pass

    def posted(self, call: Any) -> None:
        if call.kind == "send":
            self.sent += call.num_bytes

    def ended(self, call: Any) -> None:
        pass


def test_the_example_prints_accuracy_and_bytes() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, str(EXAMPLES / "gnn_pipeline.py")], env={**os.environ, "OMP_NUM_THREADS": "1", "GNN_EPOCHS": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy 0\.\d+ on vertices", done.stdout), done.stdout
    assert "12400 bytes an epoch; float32, cut by vertices: 425984" in done.stdout


def test_one_chunk_is_exact_and_chunks_with_a_history_and_a_code_are_as_good_for_the_bytes_of_the_law() -> None:
    from thinwire.codecs.activation_code import ActivationCode

    gnn = example()
    outcomes = values(run(rank, num_ranks=2, arguments={}, deadline_s=240))
    whole, half = trained_whole(1, torch.float64, 3), gnn.LAYERS // 2

    def place(number: int, name: str) -> str:
        return name.replace(f"layers.{name.split('.')[1]}", f"layers.{int(name.split('.')[1]) + number * half}") \
            if name.startswith("layers") else name  # fmt: skip

    for number, outcome in enumerate(outcomes):
        for name, value in outcome["exact"].items():
            expected = whole.state_dict()[place(number, name)]
            torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), expected, rtol=1e-12, atol=1e-14)
    code, losses = ActivationCode(), []
    for seed in SEEDS:
        adjacency, features, classes, trains = gnn.graph(seed)
        parts = [gnn.Layers(0, half, adjacency), gnn.Layers(half, gnn.LAYERS, adjacency)]
        for part, outcome in zip(parts, outcomes, strict=True):
            part.load_state_dict({name: torch.tensor(value) for name, value in outcome[f"state {seed}"].items()})
        reference = trained_whole(seed, torch.float32, gnn.EPOCHS)
        losses.append(
            gnn.accuracy([reference], features.float(), classes, ~trains)
            - gnn.accuracy(parts, features.float(), classes, ~trains)
        )
        chunk = gnn.VERTICES // gnn.CHUNKS * gnn.WIDTH
        for outcome, is_forward in zip(outcomes, (True, False), strict=True):
            assert outcome[f"sent {seed}"] == gnn.CHUNKS * code.payload_bytes(chunk, is_forward=is_forward)
    assert isinstance(parts[1].head, nn.Linear) and sum(losses) / len(losses) <= 0.01, losses
