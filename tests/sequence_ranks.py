"""Ranks that share sequences as threads of one process, with counted bytes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

# No exchange of these tests takes so long, however slow the machine is.
DEADLINE_S = 120.0


@dataclass
class Ways:
    """Queues between each two ranks, and the bytes that went through them."""

    queues: dict[tuple[int, int], SimpleQueue[Tensor]] = field(default_factory=lambda: defaultdict(SimpleQueue))
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


class ThreadPeers:
    """`RankPeers` whose tensors are copied between threads."""

    def __init__(self, ways: Ways, rank: int, size: int) -> None:
        self.ways, self.rank, self.size = ways, rank, size

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        for target, tensor in sends:
            assert tensor.is_contiguous() and target != self.rank
            self.ways.sent[self.rank, target] += tensor.nbytes
            self.ways.queues[self.rank, target].put(tensor.detach().clone())

        def receive() -> None:
            for source, tensor in receives:
                arrived = self.ways.queues[source, self.rank].get(timeout=DEADLINE_S)
                assert arrived.shape == tensor.shape and arrived.dtype == tensor.dtype
                tensor.copy_(arrived)

        return receive, lambda: None


def on_ranks(size: int, work: Callable[[ThreadPeers], Any]) -> tuple[list[Any], dict[tuple[int, int], int]]:
    """Run a function on each rank; return their results, and the bytes sent by (source, target)."""
    ways = Ways()
    for pair in ((source, target) for source in range(size) for target in range(size)):
        _ = ways.queues[pair], ways.sent[pair]
    found: list[Any] = [None] * size
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadPeers(ways, rank, size))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found, {way: count for way, count in ways.sent.items() if count}


def whole_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """Attend causally in one process; heads of keys are repeated, documents do not meet."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    if documents is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    met = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=met)
