"""Programs: what a method does in one step, as a generator whose requests the step driver carries out.

| program | what it asks for |
| --- | --- |
| `LocalSteps` | an inner step, then the rounds that are due |
| `AveragedGradients` | an inner step with gradients that the rounds average, at each call of a closure |
| `AveragedStep` | gradients, then rounds whose update does the step in the inner optimizer's place |

A program of its own is a subclass with another `step`, in the file of its paper: it may ask for gradients at points of
its own choice and exchange what it computes. Between two requests it runs without gradients of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from thinwire.sync.schedule import Round
from thinwire.transport.base import Envelope, Transport

if TYPE_CHECKING:
    from thinwire.sync.views import BoundView


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Put the gradients at the model's present parameters into `.grad`.

    Without a closure they are those of the backward pass that has been. The answer is the closure's loss, or None.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeInnerStep:
    """Step the inner optimizer. The answer is what its `step` returns.

    It gets the caller's closure, unless the program asks for gradients itself.

    Attributes:
        gradients: The program that makes the gradients of this step, run at each call of a closure. None: they are the
            replica's own, so the step is one that only later rounds exchange.
    """

    gradients: Callable[[], Requests] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Launch and apply what the schedule names for its next step. The answer is None.

    Attributes:
        may_be_infinite: Whether replicas may send infinity, as gradients that a GradScaler has yet to check.
    """

    may_be_infinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Name the rounds of the schedule's next step, which the program exchanges itself. The answer is a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRound:
    """Exchange a tensor in a round, and wait for it. The answer is an `Average`, which the update does not apply.

    Attributes:
        round: One of those that `Scheduled` named; each is exchanged once.
        tensor: float32, `(numel,)`.
    """

    round: Round
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Start to send a message of the method's own. The step ends once it is sent; the answer is None.

    Attributes:
        to: The replica.
        payload: uint8, `(numel,)`, contiguous, on the CPU.
        envelope: In a stream that the method has registered.
    """

    to: int
    payload: torch.Tensor
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Wait for what another replica sends under the same envelope. The answer is the payload, which is untrusted.

    Attributes:
        source: The replica.
        envelope: In a stream that the method has registered.
    """

    source: int
    envelope: Envelope


Request = Gradients | TakeInnerStep | Rounds | Scheduled | ExchangeRound | Send | Receive
Requests = Generator[Request, Any, Any]
"""A running program: it yields requests, is sent their answers, and returns what `DistributedOptimizer.step` does."""


class Parts(Protocol):
    """The parts of a method on one replica, for programs that compute with them."""

    @property
    def view(self) -> BoundView: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def update(self) -> Any: ...

    @property
    def update_state(self) -> Any: ...


class Program:
    """Course of a method's step; a value without state.

    Attributes:
        needs_closure: Whether it asks for gradients at points of its own choice, so that one backward pass is not
            enough. Each call of the closure then finds the model's buffers as they were before the step.
        has_local_steps: Whether inner steps stay a replica's own until a round: then a run ends with a final exchange.
        can_average_ahead: Whether the `gradients` of a step may run before it, so that a loop can clip the mean.
    """

    needs_closure = False
    has_local_steps = False
    can_average_ahead = False

    def step(self, parts: Parts) -> Requests:
        """Return the generator of one step; when it is closed early, it puts the parameters back."""
        raise NotImplementedError

    def gradients(self) -> Requests:
        """Return the generator of the mean gradients of one step, or of one call of a closure."""
        raise NotImplementedError


class LocalSteps(Program):
    """Each replica steps on its own, and rounds follow after the step."""

    has_local_steps = True

    def step(self, parts: Parts) -> Requests:
        result = yield TakeInnerStep()
        yield Rounds()
        return result


class AveragedGradients(Program):
    """Rounds turn the replicas' gradients into their mean, with which each steps its inner optimizer."""

    can_average_ahead = True

    def step(self, parts: Parts) -> Requests:
        return (yield TakeInnerStep(gradients=self.gradients))

    def gradients(self) -> Requests:
        loss = yield Gradients()
        yield Rounds(may_be_infinite=True)
        return loss


class AveragedStep(AveragedGradients):
    """As `AveragedGradients`, but the update does the step itself when it applies a round."""

    can_average_ahead = False

    def step(self, parts: Parts) -> Requests:
        return self.gradients()
