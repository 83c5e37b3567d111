"""Batches from shards of the shuffled windows that somebody lends, one shard after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thinwire.training.corpora.sampler import count_windows, shuffled, windows
from thinwire.training.corpora.token_files import TokenArray

# How many shards' use is told: a round counts all that was used before it, so older ones are counted long since.
_TOLD = 64


class ShardBatches:
    """An endless iterator over batches of lent shards.

    All epochs' windows, each epoch in its own order, stand in one row; shard k is its windows from `k * shard_windows`
    on.

    Args:
        tokens: (tokens,) of any integer dtype.
        batch_size: Windows a batch.
        seq_len: Tokens a window.
        seed: The run's seed, the same on all replicas.
        shard_windows: Windows of a shard.
        lend: Returns this replica's n-th shard and the first window there; may wait.
        ask_ahead: Told that the n-th shard will be needed soon.

    Attributes:
        used: By shard, up to which window it has been handed out.

    Raises:
        DataError: The tokens do not fill one window.

    Example:
        >>> batches = ShardBatches(
        ...     np.arange(41), batch_size=2, seq_len=4, seed=0, shard_windows=3, lend=lambda number: (2 * number, 0)
        ... )
        >>> [next(batches)[0].shape for _ in range(2)], batches.used
        ([torch.Size([2, 4]), torch.Size([2, 4])], {0: 3, 2: 1})
    """

    def __init__(
        self, tokens: TokenArray, *, batch_size: int, seq_len: int, seed: int, shard_windows: int,
        lend: Callable[[int], tuple[int, int]], ask_ahead: Callable[[int], None] = lambda number: None,
    ) -> None:  # fmt: skip
        self._tokens = tokens
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._seed = seed
        self._shard_windows = shard_windows
        self._lend = lend
        self._ask_ahead = ask_ahead
        self.num_windows = count_windows(tokens, seq_len=seq_len, at_least=1, what="training")
        self.used: dict[int, int] = {}
        self._orders: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=2)
        self._number = -1
        self._shard = 0
        self._next = shard_windows

    def __iter__(self) -> ShardBatches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, seq_len) int64; a target is the token after its input."""
        chosen = np.array([self._take() for _ in range(self._batch_size)], dtype=np.int64)
        return windows(self._tokens, chosen, seq_len=self._seq_len)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: who is lent what is the lender's to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""

    def _take(self) -> int:
        if self._next == self._shard_windows:
            self._number += 1
            self._shard, self._next = self._lend(self._number)
            self._ask_ahead(self._number + 1)
            while len(self.used) >= _TOLD:
                del self.used[next(iter(self.used))]
        place = self._shard * self._shard_windows + self._next
        self._next += 1
        self.used[self._shard] = self._next
        epoch, number = divmod(place, self.num_windows)
        return int(self._order(epoch)[number])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        for known, order in self._orders:
            if known == epoch:
                return order
        order = shuffled(self.num_windows, seed=self._seed, epoch=epoch)
        self._orders.append((epoch, order))
        return order
