"""Batches of shuffled windows or documents of a corpus: split among replicas without overlap, or lent in shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import CheckpointError, DataError
from thinwire.shared_random import derive_seed
from thinwire.workloads.language.token_files import TokenArray

PADDING = -1  # the target of a place that counts nothing
_SCANNED_TOKENS = 2**24  # of a file, searched for ends of documents at once


class Sampler:
    """An endless iterator over the batches of one replica.

    The corpus is cut into windows of `seq_len` tokens, one after the other. In each epoch all windows are put in an
    order that follows from the seed and the epoch, the same on every replica, and replica r takes every
    `num_replicas`-th from the r-th on. So in an epoch each window is used by exactly one replica, once. A batch may end
    one epoch and begin the next; replicas whose share is one window larger begin the next epoch one window later.

    With `end_of_text` whole documents take the place of windows. One of more than `seq_len` tokens is cut into pieces
    of that length and a rest.

    Args:
        tokens: (tokens,) of any integer dtype, such as `Corpus.train`.
        replica: This replica, in [0, num_replicas).
        num_replicas: Number of replicas that share the corpus.
        batch_size: Windows or documents a batch.
        seq_len: Tokens a window, and at most in a document's piece.
        seed: The run's seed, the same on all replicas.
        end_of_text: The token after each document; None for windows.

    Example:
        >>> sampler = Sampler(np.arange(9), replica=0, num_replicas=1, batch_size=2, seq_len=4, seed=0)
        >>> inputs, targets = next(sampler)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(
        self, tokens: TokenArray, *, replica: int, num_replicas: int, batch_size: int, seq_len: int, seed: int,
        end_of_text: int | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("num_replicas", num_replicas), ("batch_size", batch_size), ("seq_len", seq_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica must be in [0, {num_replicas}), got {replica}")
        self._tokens = tokens
        # What a state must agree on to be continued here.
        self._identity = {
            "seed": seed, "replica": replica, "num_replicas": num_replicas, "batch_size": batch_size,
            "seq_len": seq_len, "num_tokens": len(tokens),
        }  # fmt: skip
        self._pieces: NDArray[np.int64] | None = None
        if end_of_text is None:
            self.num_windows = count_windows(tokens, seq_len=seq_len, at_least=num_replicas, what="replica")
        else:
            self._identity["end_of_text"] = end_of_text
            self._pieces = document_pieces(tokens, end_of_text=end_of_text, seq_len=seq_len)
            self.num_windows = len(self._pieces)
            if self.num_windows < num_replicas:
                raise DataError(
                    f"the text has {self.num_windows} documents, and there are {num_replicas} replicas; give more "
                    f"text, or leave --sequences documents out"
                )
        self.epoch = 0
        self.numbers: list[int] = []  # of the latest batch's windows
        self._position = 0
        self._shard = self._shard_of(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, seq_len) int64; a target is the token after its input.

        Documents are as wide as the longest of the batch; targets behind the end of a shorter one are `PADDING`.
        """
        wanted = self._identity["batch_size"]
        chosen: list[NDArray[np.int64]] = []
        while wanted:
            if self._position == len(self._shard):
                self.epoch += 1
                self._position = 0
                self._shard = self._shard_of(self.epoch)
            taken = self._shard[self._position : self._position + wanted]
            self._position += len(taken)
            wanted -= len(taken)
            chosen.append(taken)
        numbers = np.concatenate(chosen)
        self.numbers = numbers.tolist()
        if self._pieces is not None:
            return padded(self._tokens, self._pieces[numbers])
        return windows(self._tokens, numbers, seq_len=self._identity["seq_len"])

    def state_dict(self) -> dict[str, int]:
        """Return the position and what it refers to, all integers."""
        return {**self._identity, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken: the following batches are the same bit for bit.

        Raises:
            CheckpointError: The state is of another corpus, replica, seed or shape of batch, or is no state.
        """
        if set(state) != set(self.state_dict()) or any(type(value) is not int for value in state.values()):
            raise CheckpointError(
                f"this is no state of a sampler: it must hold the integers {', '.join(self.state_dict())}, "
                f"got {', '.join(map(str, state)) or 'nothing'}; load what its state_dict() returned"
            )
        different = [name for name in self._identity if state[name] != self._identity[name]]
        if different:
            said = ", ".join(f"{name} {state[name]} instead of {self._identity[name]}" for name in different)
            raise CheckpointError(
                f"the sampler's state is of another run: {said}; resume with the same data and options"
            )
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= len(self._shard):
            raise CheckpointError(
                f"the sampler's state is corrupt: epoch {epoch}, position {position} of {len(self._shard)}; take "
                f"an earlier checkpoint"
            )
        self.epoch, self._position, self._shard = epoch, position, self._shard_of(epoch)

    def _shard_of(self, epoch: int) -> NDArray[np.int64]:
        order = shuffled(self.num_windows, seed=self._identity["seed"], epoch=epoch)
        # A copy, so that the whole order is not kept alive by a part of it.
        return order[self._identity["replica"] :: self._identity["num_replicas"]].copy()


def validation_batches(
    tokens: TokenArray, *, batch_size: int, seq_len: int, max_batches: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return batches to validate on, the same every time; with a limit, windows spread evenly over all tokens.

    Returns:
        An iterator over (inputs, targets), each (up to batch_size, seq_len) int64; the last batch may be smaller.

    Raises:
        ValueError: An argument is below 1.
        DataError: The tokens do not fill one window.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    available = count_windows(tokens, seq_len=seq_len, at_least=1, what="validation")
    count = available if max_batches is None else min(available, max_batches * batch_size)
    chosen = np.arange(count, dtype=np.int64) * available // count
    return (
        windows(tokens, chosen[start : start + batch_size], seq_len=seq_len) for start in range(0, count, batch_size)
    )


def shuffled(num_windows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch's windows, (num_windows,), the same on every replica."""
    # Sorted by raw draws, not `Generator.permutation`: numpy keeps the raw stream the same in all versions, and
    # replicas with different versions must not come to different orders.
    draws = np.random.Philox(key=derive_seed(seed, "sampler", epoch)).random_raw(num_windows)
    return np.argsort(draws, kind="stable").astype(np.int64)


def count_windows(tokens: TokenArray, *, seq_len: int, at_least: int, what: str) -> int:
    """Return how many windows of `seq_len` tokens, each with one token to follow, there are; refuse too few."""
    available = max(0, len(tokens) - 1) // seq_len
    if available < at_least:
        raise DataError(
            f"{len(tokens)} tokens are too few: {at_least} {what} windows of {seq_len} tokens need "
            f"{at_least * seq_len + 1}; give more text, or a shorter sequence"
        )
    return available


def windows(tokens: TokenArray, numbers: NDArray[np.int64], *, seq_len: int) -> tuple[Tensor, Tensor]:
    """Read windows by their numbers (batch,); return inputs and targets, each (batch, seq_len) int64."""
    places = numbers[:, None] * seq_len + np.arange(seq_len + 1)
    read = torch.from_numpy(tokens[places].astype(np.int64))
    return read[:, :-1].contiguous(), read[:, 1:].contiguous()


def document_pieces(tokens: TokenArray, *, end_of_text: int, seq_len: int) -> NDArray[np.int64]:
    """Find the documents of a corpus, cut into pieces of at most `seq_len` targets.

    Every token but the first of a document is a target once, its end of text included.

    Returns:
        (pieces, 2): the place of the first input, and the number of targets, at least 1.

    Example:
        >>> document_pieces(np.array([5, 6, 7, 0, 0, 8, 0]), end_of_text=0, seq_len=2).tolist()
        [[0, 2], [2, 1], [5, 1]]
    """
    found = [
        np.flatnonzero(tokens[first : first + _SCANNED_TOKENS] == end_of_text) + first
        for first in range(0, len(tokens), _SCANNED_TOKENS)
    ]
    last = np.concatenate([*found, [len(tokens) - 1]]).astype(np.int64)  # where no end of text is behind the rest
    starts = np.concatenate([[0], last[:-1] + 1])
    counts = np.maximum(last - starts, 0)
    num_pieces = -(-counts // seq_len)
    number = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offsets = number * seq_len
    sizes = np.minimum(np.repeat(counts, num_pieces) - offsets, seq_len)
    return np.stack([np.repeat(starts, num_pieces) + offsets, sizes], axis=1)


def padded(tokens: TokenArray, pieces: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Read pieces (batch, 2) of documents; return inputs and targets, each (batch, longest piece) int64."""
    starts, sizes = pieces[:, :1], pieces[:, 1:]
    places = np.arange(sizes.max() + 1)
    read = torch.from_numpy(tokens[np.minimum(starts + places, len(tokens) - 1)].astype(np.int64))
    is_there = torch.from_numpy(places[:-1] < sizes)
    return read[:, :-1].where(is_there, 0), read[:, 1:].where(is_there, PADDING)


# Newest shards kept in `ShardBatches.used`: each round counts all earlier use, so older shards are counted already.
_MOST_USED = 64


class ShardBatches:
    """An endless iterator over batches of leased shards; see `Leases`.

    The windows of all epochs, each epoch in its own order, form one sequence; shard k begins at window
    `k * shard_windows` of it. `used` holds how many windows of each shard have been read.

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
        self._tokens, self._batch_size, self._seq_len, self._seed = tokens, batch_size, seq_len, seed
        self._shard_windows, self._lend, self._ask_ahead = shard_windows, lend, ask_ahead
        self.num_windows = count_windows(tokens, seq_len=seq_len, at_least=1, what="training")
        self.used: dict[int, int] = {}
        self._orders: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=2)
        self._number = -1
        self._shard = 0
        self._next = shard_windows

    def __iter__(self) -> ShardBatches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        chosen = np.array([self._take() for _ in range(self._batch_size)], dtype=np.int64)
        return windows(self._tokens, chosen, seq_len=self._seq_len)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the coordinator remembers the leases

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""

    def _take(self) -> int:
        if self._next == self._shard_windows:
            self._number += 1
            self._shard, self._next = self._lend(self._number)
            self._ask_ahead(self._number + 1)
            while len(self.used) >= _MOST_USED:
                del self.used[next(iter(self.used))]
        place = self._shard * self._shard_windows + self._next
        self._next += 1
        self.used[self._shard] = self._next
        epoch, number = divmod(place, self.num_windows)
        order = dict(self._orders).get(epoch)
        if order is None:
            order = shuffled(self.num_windows, seed=self._seed, epoch=epoch)
            self._orders.append((epoch, order))
        return int(order[number])
