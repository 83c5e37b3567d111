"""Shares of data sets: each replica reads its own part, none twice, and goes on from a checkpoint where it was.

`LengthBalancedSampler` shares the sequences of a step among the ranks of a replica by their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import CheckpointError, MissingExtra, refusal
from thinwire.transport.base import Transport
from thinwire.workloads.language.lengths import SequenceCost, assign_sequences, pack
from thinwire.workloads.sampler import shuffled


def split_dataset(dataset: Any, transport: Transport, *, equal: bool = False) -> Any:
    """Return a replica's share of a Hugging Face data set, map-style or streamed.

    The shares do not overlap, and together they are the data set. Shuffle it before with the same seed on all replicas.

    Args:
        dataset: A `datasets.Dataset` or `datasets.IterableDataset`.
        transport: Its `replica` and `num_replicas` choose the share.
        equal: Leave out the rest that does not divide, fewer examples than replicas, so that the replicas do equally
            many steps; only for a map-style data set.

    Returns:
        A data set of the same kind.

    Raises:
        MissingExtra: The datasets package is not installed.
        ValueError: `equal` for a stream, whose length is unknown.
    """
    try:
        from datasets import IterableDataset
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise MissingExtra.of("datasets", extra="hf") from error
    if equal and isinstance(dataset, IterableDataset):
        raise refusal(
            "equal shares need a known length", got="a stream", allowed="a map-style data set",
            remedy="the same max_steps on all replicas",
        )  # fmt: skip
    if equal:
        dataset = dataset.select(range(len(dataset) // transport.num_replicas * transport.num_replicas))
    return split_dataset_by_node(dataset, rank=transport.replica, world_size=transport.num_replicas)


class ReplicaSampler(torch.utils.data.Sampler[int]):
    """Indices of one replica's share of a map-style data set, for torch's `DataLoader`; its position is saved.

    Every epoch has an order of its own, the same on all replicas; the replicas take turns in it. Iterating goes on
    where the last iteration stopped, and begins the next epoch after the end of one.

    Args:
        dataset: Anything with a length, the same on all replicas.
        transport: Its `replica` and `num_replicas` choose the share.
        seed: Base of the orders, the same on all replicas.
        shuffle: Whether to shuffle; otherwise each epoch has the data set's own order.
        equal: Leave out the rest that does not divide, so that the replicas do equally many steps.

    Attributes:
        epoch: The epoch that is read, from 0.
        position: Indices of it that were taken.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> first, second = LoopbackWorld(2).transports
        >>> sorted([*ReplicaSampler(range(5), first), *ReplicaSampler(range(5), second)])
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self, dataset: Sized, transport: Transport, *, seed: int = 0, shuffle: bool = True, equal: bool = False
    ) -> None:
        count = len(dataset)
        if count < transport.num_replicas:
            raise refusal(
                "the data set has fewer examples than there are replicas", got=count,
                allowed=f"{transport.num_replicas} or more", remedy="fewer replicas",
            )  # fmt: skip
        self._identity = {
            "num_examples": count, "replica": transport.replica, "num_replicas": transport.num_replicas, "seed": seed,
            "shuffle": int(shuffle), "equal": int(equal),
        }  # fmt: skip
        self.epoch = self.position = 0

    def __len__(self) -> int:
        """Return the number of indices of one whole epoch."""
        count, replicas = self._identity["num_examples"], self._identity["num_replicas"]
        if self._identity["equal"]:
            return count // replicas
        return len(range(self._identity["replica"], count, replicas))

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of this epoch."""
        own = self._indices()
        while self.position < len(own):
            self.position += 1
            yield own[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position and what it refers to.

        A `DataLoader` with workers takes indices ahead of time: set the position with `seek` before you save.
        """
        return {**self._identity, "epoch": self.epoch, "position": self.position}

    def seek(self, num_taken: int) -> None:
        """Set the position to so many indices since the first epoch began, as counted by the training loop."""
        self.epoch, self.position = divmod(num_taken, len(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            CheckpointError: It is of another data set, replica or option, or is no state.
        """
        self.epoch, self.position = _position(state, identity=self._identity, size=len(self))

    def _indices(self) -> list[int]:
        count, replicas = self._identity["num_examples"], self._identity["num_replicas"]
        order = (
            shuffled(count, seed=self._identity["seed"], epoch=self.epoch).tolist()
            if self._identity["shuffle"]
            else list(range(count))
        )
        return order[self._identity["replica"] :: replicas][: len(self)]


def _position(state: dict[str, Any], *, identity: dict[str, int], size: int) -> tuple[int, int]:
    """Return the epoch and position of a state, after a check."""
    other = [name for name, value in identity.items() if state.get(name) != value]
    if other:
        said = ", ".join(f"{name} {state.get(name)} instead of {identity[name]}" for name in other)
        raise CheckpointError(f"the sampler's state is of another run: {said}; resume with the same data and options")
    epoch, position = state.get("epoch"), state.get("position")
    if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= size:
        raise CheckpointError(
            f"the sampler's state is corrupt: epoch {epoch}, position {position} of {size}; take an earlier one"
        )
    return epoch, position


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """A rank's part of one step.

    Attributes:
        passes: Indices of the sequences of each forward and backward pass; every rank has at least one.
        num_tokens: Of the whole step, on all ranks.
        num_ranks: Ranks whose gradients are averaged.
    """

    passes: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_ranks: int

    def loss(self, token_losses: torch.Tensor) -> torch.Tensor:
        """Return what a pass calls `backward` on.

        Summed over the passes and averaged over the ranks, its gradient is that of the mean over all tokens of the step
        in one process.

        Args:
            token_losses: Of the pass, any shape, zero at padding.
        """
        return token_losses.sum() * (self.num_ranks / self.num_tokens)


class LengthBalancedSampler:
    """Steps over sequences of unlike lengths, shared among the ranks of a replica so that all finish together.

    Every rank computes the same assignment from the lengths alone (`assign_sequences`), and sends
    nothing. Ranks can have unlike numbers of passes in a step, so average gradients once a step, after the last pass.
    Iterating gives the rest of an epoch; each epoch has an order of its own, and leaves out what does not fill a step.

    Args:
        lengths: Tokens of each sequence that this replica reads.
        rank: This rank's number within the replica.
        num_ranks: Ranks that share a step.
        sequences_per_step: Sequences of a step on all ranks, at least one for each.
        max_tokens: Most tokens of a pass; a longer sequence is refused.
        cost: Time of a sequence; by default its tokens alone count.
        seed: Base of the orders, the same on all ranks.

    Attributes:
        epoch: The epoch that is read, from 0.
        position: Steps of it that were taken.

    Raises:
        ValueError: A number is out of its range, or a sequence is too long; names the value, the limit and the remedy.

    Example:
        >>> lengths = [9, 1, 1, 1, 8, 2, 3, 3]
        >>> ranks = [
        ...     LengthBalancedSampler(lengths, rank=n, num_ranks=2, sequences_per_step=8, max_tokens=9) for n in (0, 1)
        ... ]
        >>> [sum(lengths[i] for one in next(iter(rank)).passes for i in one) for rank in ranks]
        [14, 14]
    """

    def __init__(
        self, lengths: Sequence[int], *, rank: int, num_ranks: int, sequences_per_step: int, max_tokens: int,
        cost: SequenceCost | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if not 0 <= rank < num_ranks:
            raise refusal("rank is no rank of the replica", got=rank, allowed=f"0 to {num_ranks - 1}", remedy="rank=0")
        if not num_ranks <= sequences_per_step <= len(lengths):
            raise refusal(
                "sequences_per_step does not fit the ranks and the data", got=sequences_per_step,
                allowed=f"{num_ranks} ranks to {len(lengths)} sequences", remedy=f"sequences_per_step={num_ranks}",
            )  # fmt: skip
        self._cost = cost or SequenceCost(seconds_per_token=1.0)
        # said before training, not when the longest one comes
        assign_sequences(lengths, num_devices=1, cost=self._cost, max_tokens=max_tokens, may_share=False)
        self._lengths = list(lengths)
        self._rank = rank
        self._identity = {
            "num_sequences": len(lengths), "num_tokens": sum(lengths), "num_ranks": num_ranks,
            "sequences_per_step": sequences_per_step, "max_tokens": max_tokens, "seed": seed,
        }  # fmt: skip
        self.epoch = self.position = 0

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._identity["num_sequences"] // self._identity["sequences_per_step"]

    def __iter__(self) -> Iterator[StepShare]:
        """Yield the rest of this epoch."""
        order = shuffled(len(self._lengths), seed=self._identity["seed"], epoch=self.epoch).tolist()
        size = self._identity["sequences_per_step"]
        while self.position < len(self):
            self.position += 1
            yield self._share(order[(self.position - 1) * size : self.position * size])
        self.epoch, self.position = self.epoch + 1, 0

    def _share(self, chosen: Sequence[int]) -> StepShare:
        lengths = [self._lengths[index] for index in chosen]
        ranks, max_tokens = self._identity["num_ranks"], self._identity["max_tokens"]
        found = assign_sequences(lengths, num_devices=ranks, cost=self._cost, max_tokens=max_tokens, may_share=False)
        own = found.of_device(self._rank)
        passes = pack([lengths[place] for place in own], max_tokens=max_tokens)
        return StepShare(
            passes=tuple(tuple(chosen[own[place]] for place in one) for one in passes),
            num_tokens=found.num_tokens, num_ranks=ranks,
        )  # fmt: skip

    def state_dict(self) -> dict[str, int]:
        """Return the position and what it refers to; the same on all ranks."""
        return {**self._identity, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            CheckpointError: It is of other data or options, or is no state.
        """
        self.epoch, self.position = _position(state, identity=self._identity, size=len(self))
