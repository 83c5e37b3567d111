"""`Workload`: model, batches, loss, numbers, samples and export as one value, so that the loop knows no subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.workloads.cards import WorkloadCard

Batch = tuple[Tensor, Tensor]
# Computes from inputs and targets the loss to train on, and what is shown, (1 + metrics,): a loss, then the metric.
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RunOptions(Protocol):
    """Options of a run that a workload reads; `thinwire.training.config.TrainConfig` has it."""

    @property
    def run(self) -> Any:
        """Seed and length."""

    @property
    def model(self) -> Any:
        """The model and how it computes."""

    @property
    def data(self) -> Any:
        """Batch size and data."""

    @property
    def parallel(self) -> Any:
        """Ranks of a replica."""

    @property
    def num_replicas(self) -> int:
        """Replicas that share the data."""


class Companion(Protocol):
    """Files that belong beside the weights of a saved model: its tokenizer."""

    def files(self) -> Mapping[str, str]:
        """Return the content of its files, by name."""


@dataclass(frozen=True, slots=True)
class NoCompanion:
    """Companion of a model that needs its weights alone."""

    def files(self) -> Mapping[str, str]:
        return {}


class Data(Protocol):
    """Opened data of a run."""

    @property
    def sha256(self) -> str:
        """Hash of all that is learnt from: equal on two hosts where the data are."""


class Batches(Protocol):
    """Endless iterator over one replica's share of the training data."""

    def __next__(self) -> Batch:
        """Return inputs and targets, (batch, ...) each, on the CPU."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""


class LeasedBatches(Batches, Protocol):
    """Batches of leased shards of the data, for elastic replicas."""

    used: dict[int, int]
    num_windows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """Leases of an elastic replica on shards of the data. A window is what is leased: a sequence, an image.

    Attributes:
        shard_windows: Windows of a shard.
        lend: Returns this replica's n-th shard and the first window there; may wait.
        ask_ahead: Called with n when the n-th shard will be needed soon.
    """

    shard_windows: int
    lend: Callable[[int], tuple[int, int]]
    ask_ahead: Callable[[int], None] = lambda number: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutputs:
    """Shows on a few inputs what a model does before and after training.

    Attributes:
        prompts: Returns the inputs, as texts, from the data.
        answers: Returns what a model makes of each, given the companion.
    """

    prompts: Callable[[Any], list[str]]
    answers: Callable[[nn.Module, Any, Sequence[str]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A subject of training; the functions take the run's options and the data that `open_data` returned.

    Attributes:
        card: Name, units and options.
        open_data: Opens the data, and checks that there are enough; raises `DataError`.
        companion: Returns what belongs beside the weights, of opened data.
        saved_companion: Reads it from a run's `model/`.
        sizes: Returns what the model's shape takes from it, by name.
        sketch: Returns the model on the meta device, before data are read; refuses options that do not fit it.
        make_model: Builds the model with these sizes on a device; weights that are not loaded follow from the seed.
        saved_model: Builds the model with the weights in a run's `model/`.
        batches: Returns the share of a replica.
        leased_batches: Returns batches of leased shards.
        held_out: Returns at most so many held-out batches, the same at every call.
        loss: Returns the loss function of a model.
        parts: Yields the parts of a batch that are computed at once, each with its share of the batch.
        num_samples: Counts the samples in a batch's targets: tokens, images.
        window_samples: Samples of a window, see `Leases`.
        activation_bytes: Estimates what a forward pass over so many rows keeps for the backward pass.
        samples: Shows what the model does; None shows nothing.
    """

    card: WorkloadCard
    open_data: Callable[[RunOptions], Data]
    companion: Callable[[Any], Companion]
    saved_companion: Callable[[Path], Companion]
    sizes: Callable[[Any], Mapping[str, int]]
    sketch: Callable[[RunOptions], nn.Module]
    make_model: Callable[[RunOptions, Mapping[str, int], torch.device | str], nn.Module]
    saved_model: Callable[[RunOptions, Mapping[str, int], Path], nn.Module]
    batches: Callable[[RunOptions, Any, int], Batches]
    leased_batches: Callable[[RunOptions, Any, Leases], LeasedBatches]
    held_out: Callable[[RunOptions, Any, int], Iterable[Batch]]
    loss: Callable[[RunOptions, nn.Module], Loss]
    parts: Callable[[RunOptions, Tensor, Tensor], Iterator[tuple[Tensor, Tensor, float]]]
    num_samples: Callable[[Tensor], int]
    window_samples: Callable[[RunOptions], int]
    activation_bytes: Callable[[RunOptions, nn.Module, int], float]
    samples: SampleOutputs | None = None


def rows_at_once(options: RunOptions, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield a batch in parts of `--micro-batch` rows; see `Workload.parts`."""
    size = options.data.micro_batch or len(inputs)
    for rows, row_targets in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
        yield rows, row_targets, len(rows) / len(inputs)
