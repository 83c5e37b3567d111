"""Ladder residual: the all-reduces of tensor parallelism run while the next half of a block computes.

    torchrun --standalone --nproc-per-node 2 examples/ladder_residual.py

In a usual block, attention waits for the sum of the MLP before it. In a ladder block it takes the stream without that
sum, which is still on its way; the MLP takes the stream without this block's attention. So every all-reduce has half a
block of time. The model is another one, and it is trained as such: the ranks compare it with the same ladder model on
one process. The bytes stay those of tensor parallelism, so it belongs inside a site.

Reference:
    arXiv 2501.06589, section 3 (Ladder-residual).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, LAYERS = 32, 4, 3


class Half(nn.Module):
    """Attention or MLP on this rank's heads or columns; the ranks' outputs add up to that of one process."""

    def __init__(self, kind: str, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.kind, self.heads = kind, HEADS // num_ranks
        wide = 3 * DIM if kind == "attention" else 4 * DIM
        into, out = torch.randn(wide, DIM) / DIM**0.5, torch.randn(DIM, DIM if kind == "attention" else wide) / DIM
        parts = into.view(
            3 if kind == "attention" else 1, num_ranks, -1, DIM
        )  # queries, keys and values have parts each
        self.into = nn.Parameter(parts[:, rank].reshape(-1, DIM).clone())
        self.out = nn.Parameter(out.chunk(num_ranks, dim=1)[rank].clone())

    def forward(self, stream: Tensor) -> Tensor:
        hidden = F.linear(F.rms_norm(stream, (DIM,)), self.into)
        if self.kind == "mlp":
            return F.linear(F.gelu(hidden), self.out)
        query, key, value = hidden.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(attended.transpose(1, 2).flatten(2), self.out)


class Wire:
    """Sums over the ranks that run while the caller computes, in order, and the order of what happened.

    Args:
        delay: Called before each sum, in place of a slow wire.
    """

    def __init__(self, delay: Callable[[int], None]) -> None:
        self.events: list[tuple[str, int]] = []
        self._delay, self._thread = delay, ThreadPoolExecutor(max_workers=1)

    def start(self, number: int, part: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of a half's output, and return a wait for it."""
        self.events.append(("computed", number))
        return self._thread.submit(self._sum, number, part.detach().clone()).result

    def _sum(self, number: int, part: Tensor) -> Tensor:
        self._delay(number)
        if dist.is_initialized():
            dist.all_reduce(part)
        self.events.append(("arrived", number))
        return part

    def num_hidden(self) -> int:
        """Return how many sums arrived after the next half had been computed."""
        place = {event: index for index, event in enumerate(self.events)}
        numbers = range(len(self.events) // 2 - 1)
        return sum(place["computed", each + 1] < place["arrived", each] for each in numbers)


class Model(nn.Module):
    """Halves of blocks on one rank; gradients are those of one process.

    Args:
        lag: 2 for a ladder: a half starts before the sum of the half before it; 1 for usual blocks.
        rank: Of this process.
        num_ranks: Which share the heads.
    """

    def __init__(self, *, lag: int = 2, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same whole weights on every rank
        self.lag = lag
        self.halves = nn.ModuleList(Half(kind, rank, num_ranks) for _ in range(LAYERS) for kind in ("attention", "mlp"))

    def run(self, stream: Tensor, loss_of: Callable[[Tensor], Tensor], *, forward: Wire, backward: Wire) -> Tensor:
        """Run both passes; leave gradients in the parameters and return the loss."""
        passes: list[tuple[Tensor, Tensor]] = []

        def compute() -> Iterator[Callable[[Tensor], Tensor]]:
            for half in self.halves:

                def run(stream: Tensor, half: nn.Module = half) -> Tensor:
                    own = stream.detach().requires_grad_()
                    passes.append((own, half(own)))
                    return passes[-1][1]

                yield run

        def run_back(grad: Tensor) -> Tensor:
            own, output = passes.pop()
            output.backward(grad)
            assert own.grad is not None
            return own.grad

        result = self._add(stream, compute(), forward).requires_grad_()
        loss = loss_of(result)
        [grad] = torch.autograd.grad(loss, result)
        self._add(grad, (run_back for _ in self.halves), backward)
        return loss.detach()

    # --8<-- [start:ladder]
    def _add(self, stream: Tensor, halves: Iterator[Callable[[Tensor], Tensor]], wire: Wire) -> Tensor:
        """Add the sum of each half to the stream, `lag` halves later; the backward pass has the same form."""
        coming: list[Callable[[], Tensor]] = []
        for number, half in enumerate(halves):
            if len(coming) == self.lag:
                stream = stream + coming.pop(0)()
            coming.append(wire.start(number, half(stream)))
        for wait in coming:
            stream = stream + wait()
        return stream

    # --8<-- [end:ladder]


def main() -> None:
    """Run usual blocks and the ladder over a slow wire."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(1))
    for name, lag in (("usual", 1), ("ladder", 2)):
        wires = [Wire(lambda _: time.sleep(0.05)) for _ in range(2)]
        model = Model(lag=lag, rank=rank, num_ranks=num_ranks)
        begin = time.perf_counter()
        loss = model.run(tokens, lambda stream: stream.square().mean(), forward=wires[0], backward=wires[1])
        elapsed = time.perf_counter() - begin
        hidden, most = sum(wire.num_hidden() for wire in wires), 2 * (2 * LAYERS - 1)
        if rank == 0:
            print(f"{name}: loss {loss:.6f}, {hidden} of {most} sums of 50 ms behind computing, {elapsed:.2f} s")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
