"""Contenders of `bench wire`: methods of thinwire, one part at a time.

| contender | fragments | overlap | payload |
| --- | --- | --- | --- |
| `all-reduce` | no | no | float32 gradients, every step |
| `all-reduce-bf16` | no | no | bfloat16 gradients, every step |
| `diloco` | no | no | float32 |
| `diloco-e3m0` | no | no | E3M0 |
| `overlap-only` | no | yes | float32 |
| `fragments-only` | yes | no | float32 |
| `streaming-dense` | yes | yes | float32 |
| `streaming-e3m0` | yes | yes | E3M0 |
| `streaming-sparse` | yes | yes | 64 of 4,096 values, in 2 bits |
| `iso-e3m0` | yes | yes | E3M0, with IsoLoCo's outer step: thinwire's default |
| `iso-2bit` | yes | yes | 2 bits and error feedback, with IsoLoCo's outer step |

Other programs can join: `CONTENDERS` takes subclasses that make a trainer of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from thinwire.errors import unknown_name

if TYPE_CHECKING:  # a command line is checked against the names here before torch is imported
    import torch
    from torch import Tensor, nn

    from thinwire.sync.method import Method
    from thinwire.transport.recording import RecordingTransport

Kind = Literal["every-step", "diloco", "streaming", "streaming-sparse", "iso"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One row of the table: a way to train, without the numbers that all rows share.

    Attributes:
        name: What the command line and the results call it.
        kind: Family of the method; `"every-step"` exchanges at every step.
        codec: Name of the payloads' codec; for other programs the dtype they send.
        has_fragments: Whether the model is exchanged in fragments.
        has_overlap: Whether a round may last `overlap_steps` inner steps.
        error_feedback: Share of what the codec dropped that the next round adds; None for no residual.
        program: Arguments of Python by which a host runs it.
        is_reference: Whether another program than thinwire trains, whose bytes and stalls nobody counts.
        payload_share: Part of the codec's bytes that it sends, for budgets of time.
    """

    program: ClassVar[tuple[str, ...]] = ("-m", "thinwire.cli.processes")
    is_reference: ClassVar[bool] = False

    name: str
    kind: Kind
    codec: str = "float32"
    has_fragments: bool = False
    has_overlap: bool = False
    error_feedback: float | None = None
    payload_share: float = 1.0

    def method(self, *, sync_interval: int, overlap_steps: int) -> Method:
        """Return its method.

        Raises:
            ValueError: A number is out of its range.

        Example:
            >>> contender("streaming-e3m0").method(sync_interval=30, overlap_steps=3).schedule.overlap_of(0)
            3
        """
        from thinwire import codecs, methods

        codec = codecs.by_name(self.codec)
        if self.kind == "every-step":
            return methods.all_reduce(codec=codec)
        if self.kind == "diloco":
            return methods.diloco(sync_interval=sync_interval, codec=codec)
        overlaps: dict[str, Any] = {"overlap_steps": overlap_steps if self.has_overlap else 0}
        if self.kind == "streaming-sparse":
            return methods.streaming_sparse_loco(sync_interval=sync_interval, **overlaps)
        if self.kind == "iso":
            return methods.iso_loco(
                sync_interval=sync_interval, codec=codec, error_feedback=self.error_feedback, **overlaps
            )
        pieces: dict[str, Any] = {} if self.has_fragments else {"num_fragments": 1}
        return methods.streaming_diloco(sync_interval=sync_interval, codec=codec, **overlaps, **pieces)

    def trainer(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, numbers: TrainerSettings,
        transport: RecordingTransport,
    ) -> Trainer:  # fmt: skip
        """Put it to work on a model.

        Raises:
            ValueError: A number does not fit the contender.
        """
        from thinwire.sync.optimizer import DistributedOptimizer

        method = self.method(sync_interval=numbers.sync_interval, overlap_steps=numbers.overlap_steps)
        optimizer = DistributedOptimizer(
            model, inner, method=method, transport=transport, minimum_deadline_s=numbers.timeout_s, seed=numbers.seed,
            pace=numbers.pace,
        )  # fmt: skip
        return Trainer(
            optimizer=optimizer, loss=loss_of(model), average_gradients=optimizer.average_gradients,
            close=lambda: optimizer.close(final_exchange=True), release=optimizer.abandon,
            global_parameters=optimizer.global_parameters, stalled_s=lambda: optimizer.statistics.stalled_s,
            num_fragments=optimizer.num_fragments, sync_interval=method.schedule.sync_interval,
            overlap_steps=numbers.overlap_steps if self.has_overlap else 0,
        )  # fmt: skip


_ALL = (
    Contender(name="all-reduce", kind="every-step"),
    Contender(name="all-reduce-bf16", kind="every-step", codec="bfloat16"),
    Contender(name="diloco", kind="diloco"),
    Contender(name="diloco-e3m0", kind="diloco", codec="e3m0"),
    Contender(name="overlap-only", kind="streaming", has_overlap=True),
    Contender(name="fragments-only", kind="streaming", has_fragments=True),
    Contender(name="streaming-dense", kind="streaming", has_fragments=True, has_overlap=True),
    Contender(name="streaming-e3m0", kind="streaming", codec="e3m0", has_fragments=True, has_overlap=True),
    Contender(
        name="streaming-sparse", kind="streaming-sparse", codec="chunked-top-k-2bit", has_fragments=True,
        has_overlap=True,
    ),
    Contender(name="iso-e3m0", kind="iso", codec="e3m0", has_fragments=True, has_overlap=True),
    Contender(
        name="iso-2bit", kind="iso", codec="block-2bit", has_fragments=True, has_overlap=True, error_feedback=1.0,
    ),
)  # fmt: skip
CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}
# From DiLoCo to Streaming DiLoCo, one part at a time; then overlap and E3M0 alone.
ABLATION = ("diloco", "fragments-only", "streaming-dense", "streaming-e3m0", "overlap-only", "diloco-e3m0")


def contender(name: str) -> Contender:
    """Return the contender of a name.

    Raises:
        ValueError: There is none; names the nearest.

    Example:
        >>> contender("diloco").codec
        'float32'
    """
    if name in CONTENDERS:
        return CONTENDERS[name]
    raise unknown_name("contender", name, CONTENDERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The numbers that all contenders share.

    Attributes:
        timeout_s: Seconds that any one wait for a peer may last.
        pace: Whether our methods spread what they send over their overlap.
    """

    sync_interval: int
    overlap_steps: int
    timeout_s: float
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
        stalled_s: Seconds that the training thread has waited for the wire, None if not counted.
        release: Gives back what was made for the training, also after a failure.
        num_fragments: In how many parts the model is exchanged.
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


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from tokens and targets to the loss to train on."""
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model.loss  # type: ignore[assignment]
    return lambda tokens, targets: loss(tokens, targets)[0]
