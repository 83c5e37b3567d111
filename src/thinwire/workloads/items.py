"""Batches of the items of a table, such as images: shared by replicas without overlap, or lent in shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.errors import DataError
from thinwire.workloads.sampler import Sampler, ShardBatches
from thinwire.workloads.workload import Batch, Leases, RunOptions


class ItemBatches:
    """Endless iterator over batches of a table; the order of each epoch follows from the seed, as for texts.

    Args:
        numbers: Yields the numbers of the items, as windows of one token.
        inputs: (items, ...).
        targets: (items, ...).

    Example:
        >>> import torch
        >>> inputs, targets = torch.arange(6.0), torch.arange(6)
        >>> numbers = Sampler(np.arange(7), replica=0, num_replicas=2, batch_size=3, seq_len=1, seed=0)
        >>> batch = next(ItemBatches(numbers, inputs, targets))
        >>> len(batch[0]), bool((batch[0] == batch[1]).all())
        (3, True)
    """

    def __init__(self, numbers: Sampler | ShardBatches, inputs: Tensor, targets: Tensor) -> None:
        self._numbers, self._inputs, self._targets = numbers, inputs, targets
        self.num_windows = numbers.num_windows
        self.used = numbers.used if isinstance(numbers, ShardBatches) else {}

    def __iter__(self) -> ItemBatches:
        return self

    def __next__(self) -> Batch:
        chosen = next(self._numbers)[0][:, 0]
        return self._inputs[chosen], self._targets[chosen]

    def state_dict(self) -> dict[str, Any]:
        return self._numbers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.load_state_dict(state)


def own_items(options: RunOptions, inputs: Tensor, targets: Tensor, replica: int) -> ItemBatches:
    """Return a replica's share of a table."""
    if len(inputs) < options.num_replicas:
        raise DataError(
            f"there are {len(inputs)} items and {options.num_replicas} replicas; give --replicas {len(inputs)} at most"
        )
    numbers = Sampler(
        np.arange(len(inputs) + 1), replica=replica, num_replicas=options.num_replicas,
        batch_size=options.data.batch_size, seq_len=1, seed=options.run.seed,
    )  # fmt: skip
    return ItemBatches(numbers, inputs, targets)


def leased_items(options: RunOptions, inputs: Tensor, targets: Tensor, leases: Leases) -> ItemBatches:
    """Return batches of leased shards of a table."""
    numbers = ShardBatches(
        np.arange(len(inputs) + 1), batch_size=options.data.batch_size, seq_len=1, seed=options.run.seed,
        shard_windows=leases.shard_windows, lend=leases.lend, ask_ahead=leases.ask_ahead,
    )  # fmt: skip
    return ItemBatches(numbers, inputs, targets)


def spread_items(inputs: Tensor, targets: Tensor, *, batch_size: int, max_batches: int) -> list[Batch]:
    """Return at most so many batches of items spread evenly over a table, the same every time."""
    count = min(len(inputs), max_batches * batch_size)
    chosen = np.arange(count) * len(inputs) // count
    return [
        (inputs[chosen[start : start + batch_size]], targets[chosen[start : start + batch_size]])
        for start in range(0, count, batch_size)
    ]
