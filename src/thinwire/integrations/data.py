"""Shares of data sets: each replica reads its own part, none twice, and goes on from a checkpoint where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from thinwire.data.sampler import shuffled
from thinwire.errors import CheckpointError, MissingExtra, refusal
from thinwire.transport.base import Transport


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
        other = [name for name, value in self._identity.items() if state.get(name) != value]
        if other:
            said = ", ".join(f"{name} {state.get(name)} instead of {self._identity[name]}" for name in other)
            raise CheckpointError(
                f"the sampler's state is of another run: {said}; resume with the same data and options"
            )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self):
            raise CheckpointError(f"the sampler's state is corrupt: epoch {epoch}, position {position} of {len(self)}")
        self.epoch, self.position = epoch, position

    def _indices(self) -> list[int]:
        count, replicas = self._identity["num_examples"], self._identity["num_replicas"]
        order = (
            shuffled(count, seed=self._identity["seed"], epoch=self.epoch).tolist()
            if self._identity["shuffle"]
            else list(range(count))
        )
        return order[self._identity["replica"] :: replicas][: len(self)]
