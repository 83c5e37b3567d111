"""What the benchmark's one loop asks of a contender, and our own contenders' answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.lab.wire_benchmark.contenders import Contender
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.recording import RecordingTransport

ShareNote = Callable[[Mapping[str, Any]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The numbers that all contenders share.

    Attributes:
        sync_interval: H, inner steps.
        overlap_steps: tau, inner steps.
        timeout_s: Seconds that any one wait for a peer may last.
        address: This host's IPv4 address.
        seed: Base of stochastic codecs.
        pace: Whether our methods spread what they send over their overlap.
    """

    sync_interval: int
    overlap_steps: int
    timeout_s: float
    address: str
    seed: int = 0
    pace: bool = False


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A contender at work on one replica.

    Attributes:
        optimizer: Whose `step` and `zero_grad` the loop calls and whose learning rate it sets.
        loss: From tokens and targets, (batch, seq) int64 each, to the loss to go backward from.
        average_gradients: Called between backward and clipping.
        close: Ends the training: everything in flight is taken in, and the global parameters become the mean of the
            replicas'.
        global_parameters: Puts them into the model for as long as a with block lasts.
        stalled_s: Seconds that the training thread has waited for the wire, None where nobody counts them.
        release: Gives back what was made for the training, also after a failure.
        num_fragments: In how many parts the model is exchanged.
        sync_interval: H as it is in effect.
        overlap_steps: tau as it is in effect.
    """

    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    average_gradients: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    global_parameters: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    stalled_s: Callable[[], float | None] = _nothing
    release: Callable[[], None] = _nothing
    num_fragments: int = 1
    sync_interval: int = 1
    overlap_steps: int = 0


def make_trainer(
    contender: Contender, model: nn.Module, inner: torch.optim.Optimizer, *, numbers: TrainerSettings,
    transport: RecordingTransport, tell: ShareNote,
) -> Trainer:  # fmt: skip
    """Put a contender to work on a model.

    Args:
        contender: The way to train.
        model: A language model; all replicas start from the same values.
        inner: Over the model's parameters.
        numbers: What all contenders share.
        transport: Joins the replicas; torch's default group does so too.
        tell: Tells all replicas a note and returns the notes of all.

    Raises:
        MissingExtra: The contender's package is not installed.
        ValueError: A number does not fit the contender.
    """
    if contender.kind == "ddp":
        from thinwire.lab.wire_benchmark.reference_ddp import ddp_trainer

        return ddp_trainer(model, inner, powersgd_rank=contender.powersgd_rank)
    if contender.kind == "torchft":
        from thinwire.lab.wire_benchmark.reference_torchft import torchft_trainer

        return torchft_trainer(model, inner, numbers=numbers, transport=transport, tell=tell)
    return _own_trainer(contender, model, inner, numbers=numbers, transport=transport)


def check_installed(contender: Contender) -> None:
    """Refuse a contender whose package is missing, before anything is started.

    Raises:
        MissingExtra: With the command that installs it.
    """
    if contender.kind == "torchft":
        from thinwire.lab.wire_benchmark.reference_torchft import load_torchft

        load_torchft()


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from tokens and targets to the loss to train on."""
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model.loss  # type: ignore[assignment]
    return lambda tokens, targets: loss(tokens, targets)[0]


def _own_trainer(
    contender: Contender, model: nn.Module, inner: torch.optim.Optimizer, *, numbers: TrainerSettings,
    transport: RecordingTransport,
) -> Trainer:  # fmt: skip
    method = contender.method(sync_interval=numbers.sync_interval, overlap_steps=numbers.overlap_steps)
    optimizer = DistributedOptimizer(
        model, inner, method=method, transport=transport, minimum_deadline_s=numbers.timeout_s, seed=numbers.seed,
        pace=numbers.pace,
    )  # fmt: skip
    return Trainer(
        optimizer=optimizer,
        loss=loss_of(model),
        average_gradients=optimizer.average_gradients,
        close=lambda: optimizer.close(final_exchange=True),
        global_parameters=optimizer.global_parameters,
        stalled_s=lambda: optimizer.statistics.stalled_s,
        num_fragments=optimizer.num_fragments,
        sync_interval=method.schedule.sync_interval,
        overlap_steps=numbers.overlap_steps if contender.has_overlap else 0,
    )
