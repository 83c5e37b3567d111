"""A graph network cut by layers, not by vertices: each rank holds some layers for the whole graph (GNNPipe).

torchrun --nproc-per-node 2 examples/gnn_pipeline.py

Micro-batches are chunks of vertices. A neighbour outside of the chunk counts with the value that it had when its own
chunk last passed, without a gradient; so the first epoch runs as one chunk. Only chunks' values cross the border, once
forward and once backward, however many layers there are.

Reference:
    GNNPipe, arXiv 2308.10087. No code of it was read.
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import thinwire

COMMUNITIES, EACH, WIDTH, LAYERS, CHUNKS, EPOCHS = 4, 60, 32, 8, 4, 60
VERTICES = COMMUNITIES * EACH


def graph(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a block model: adjacency with rows that sum to 1, features, classes, and which vertices train."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(COMMUNITIES).repeat_interleave(EACH)
    likely = torch.where(classes[:, None] == classes, 0.12, 0.015)
    edges = torch.rand(VERTICES, VERTICES, generator=generator).triu(1) < likely.triu(1)
    adjacency = (edges | edges.T).double() + torch.eye(VERTICES, dtype=torch.float64)
    noise = torch.randn(VERTICES, WIDTH, generator=generator, dtype=torch.float64)
    features = noise + 1.2 * nn.functional.one_hot(classes, WIDTH)
    trains = torch.rand(VERTICES, generator=generator) < 0.3
    return adjacency / adjacency.sum(1, keepdim=True), features, classes, trains


class Layers(nn.Module):
    """Neighbouring layers of the network, for all vertices.

    Args:
        first: Number of the first layer.
        last: Number after the last one.
        adjacency: (vertices, vertices).
        dtype: Of the parameters.
    """

    def __init__(self, first: int, last: int, adjacency: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]  # drawn whole, so that any cut starts alike
        head = nn.Linear(WIDTH, COMMUNITIES)
        self.layers = nn.ModuleList(every[first:last])
        self.head = head if last == LAYERS else None
        self.adjacency = adjacency.to(dtype).to_sparse()
        self.known = [torch.zeros(VERTICES, WIDTH, dtype=dtype) for _ in self.layers]
        self.num_chunks, self._next = 1, 0
        self.to(dtype)

    def forward(self, values: Tensor) -> Tensor:
        """Return the values of the next chunk of vertices behind these layers, or its logits.

        Args:
            values: (vertices / num_chunks, WIDTH).
        """
        size = VERTICES // self.num_chunks
        own = slice(self._next * size, (self._next + 1) * size)
        self._next = (self._next + 1) % self.num_chunks
        for layer, known in zip(self.layers, self.known, strict=True):
            everywhere = known.clone()
            everywhere[own] = values
            known[own] = values.detach()
            values = values + layer((self.adjacency @ everywhere)[own]).relu()
        return values if self.head is None else self.head(values)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a chunk's part of the loss; targets of vertices that do not train are -100."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / VERTICES


class Trainer:
    """One rank's stage, for epochs of any number of chunks.

    Args:
        part: Its layers.
        rank: Its number, and that of the stage.
        num_ranks: Stages.
        code: Of what crosses the borders.
    """

    def __init__(self, part: Layers, rank: int, num_ranks: int, *, code: thinwire.ActivationCode | None) -> None:
        self.part, self.rank, self.num_ranks, self.code = part, rank, num_ranks, code
        self.optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
        self._schedules: dict[int, Schedule1F1B | ScheduleGPipe] = {}

    def epoch(self, features: Tensor, targets: Tensor, *, num_chunks: int) -> list[Tensor]:
        """Train by every vertex once; return the chunks' losses, on the last rank."""
        if num_chunks not in self._schedules:
            dtype = next(self.part.parameters()).dtype
            given = torch.zeros(VERTICES // num_chunks, WIDTH, dtype=dtype, requires_grad=self.rank > 0)
            outputs = COMMUNITIES if self.part.head else WIDTH
            behind = torch.zeros(VERTICES // num_chunks, outputs, dtype=dtype, requires_grad=True)
            stage = thinwire.CodedStage(
                self.part, self.rank, self.num_ranks, torch.device("cpu"), code=self.code, input_args=given,
                output_args=behind,
            )  # fmt: skip
            # 1F1B takes at least as many chunks as there are stages
            schedule = Schedule1F1B if num_chunks >= self.num_ranks else ScheduleGPipe
            self._schedules[num_chunks] = schedule(stage, num_chunks, loss_fn=loss_of, scale_grads=False)
        self.part.num_chunks = num_chunks
        losses: list[Tensor] = []
        given = (features,) if self.rank == 0 else ()
        named = {"target": targets, "losses": losses} if self.rank == self.num_ranks - 1 else {}
        self._schedules[num_chunks].step(*given, **named)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def accuracy(parts: list[Layers], features: Tensor, classes: Tensor, tested: Tensor) -> float:
    """Return the accuracy of the whole graph in one pass, without the history."""
    values = features
    with torch.no_grad():
        for part in parts:
            for layer in part.layers:
                values = values + layer(part.adjacency @ values).relu()
            values = values if part.head is None else part.head(values)
    return float((values.argmax(1) == classes)[tested].float().mean())


def copies_of_a_partition(adjacency: Tensor, parts: int) -> int:
    """Return how many values a layer sends where the graph is cut by vertices: one for each vertex and foreign part."""
    part = torch.arange(VERTICES) * parts // VERTICES
    reached = torch.stack([(adjacency[part == number] > 0).any(0) for number in range(parts)])
    reached[part, torch.arange(VERTICES)] = False
    return int(reached.sum())


def main() -> None:
    """Train, and print accuracy and bytes."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    adjacency, features, classes, trains = graph()
    features, targets = features.float(), torch.where(trains, classes, -100)
    cuts = [number * LAYERS // num_ranks for number in range(num_ranks + 1)]
    code = thinwire.ActivationCode()
    trainer = Trainer(Layers(cuts[rank], cuts[rank + 1], adjacency), rank, num_ranks, code=code)
    for number in range(int(os.environ.get("GNN_EPOCHS", EPOCHS))):
        trainer.epoch(features, targets, num_chunks=CHUNKS if number else 1)
    states: list[dict[str, Tensor]] = [{}] * num_ranks
    dist.all_gather_object(states, trainer.part.state_dict())
    if rank == 0:
        parts = [Layers(first, last, adjacency) for first, last in itertools.pairwise(cuts)]
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        chunk = VERTICES // CHUNKS * WIDTH
        sent = CHUNKS * (num_ranks - 1) * sum(code.payload_bytes(chunk, is_forward=way) for way in (True, False))
        plain = 2 * LAYERS * copies_of_a_partition(adjacency, num_ranks) * WIDTH * 4
        print(f"accuracy {accuracy(parts, features, classes, ~trains):.3f} on vertices that did not train")
        print(f"{sent} bytes an epoch; float32, cut by vertices: {plain}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
