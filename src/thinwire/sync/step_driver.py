"""Carries out what the program of a step asks for: gradients, the inner step and rounds; also a GradScaler's part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from thinwire.errors import refusal
from thinwire.sync.program import (
    ExchangeRound,
    Gradients,
    Receive,
    Request,
    Requests,
    Rounds,
    Scheduled,
    Send,
    TakeInnerStep,
)
from thinwire.sync.round_engine import RoundEngine
from thinwire.transport.base import Envelope, Pending

Closure = Callable[[], Any]


@dataclass(slots=True, kw_only=True)
class StepInput:
    """Input of one call of `DistributedOptimizer.step`.

    Attributes:
        closure: The caller's; None where the backward pass has been.
        grad_scale: A GradScaler's scale that the gradients still hold; None for none.
        found_inf: Whether that GradScaler has found infinity; None without one.
        is_skipped: Whether this replica leaves the step out.
        next_stop: A step that must not be passed over to catch up.
        num_tokens: Tokens of the step.
    """

    closure: Closure | None = None
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    is_skipped: bool = False
    next_stop: int | None = None
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class _MeanStep:
    """Step the inner optimizer with gradients that are means, or become means at each call of a closure."""

    gradients: Callable[[], Requests]


class StepDriver:
    """Drives the program of a method, one step after the other.

    Args:
        engine: Its rounds.
        model: The replica's model.
        inner: Its optimizer.

    Attributes:
        schedule_step: The last step whose rounds were launched; an inner optimizer that calls its closure several times
            makes several in one of its own.
        steps_passed: Steps that the last one has passed over to catch up; -1 where it was held back.
        has_averaged: Whether the gradients of the next step are means already.
    """

    def __init__(self, engine: RoundEngine, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        self._engine, self._model, self._inner = engine, model, inner
        self.schedule_step = 0
        self.steps_passed = 0
        self.has_averaged = False
        self._has_closures = False
        self._input = StepInput()
        self._sends: list[tuple[Pending, float]] = []

    def begin(self, given: StepInput) -> None:
        """Take in what a step brings, before its program is driven."""
        self._input, self.steps_passed = given, 0
        if given.closure is not None and self._engine.program.needs_closure:
            given.closure = repeatable(given.closure, self._model)

    def end(self) -> None:
        """Forget what the step brought, also where it has failed."""
        self.has_averaged, self._input, self._sends = False, StepInput(), []

    def await_sends(self) -> None:
        """Wait for the messages that the step has started to send."""
        for sent, deadline_s in self._sends:
            sent.wait(deadline_s=deadline_s)

    def drive(self, program: Requests) -> Any:
        """Run a program, and carry out what it asks for; return what it returns.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            DesyncError: Replicas hold different parameters.
            NonFiniteError: A replica sent NaN or infinity.
        """
        answer = None
        running: list[Generator[Any, Any, Any]] = [program]  # a program that another one waits for comes behind it
        try:
            while True:
                try:
                    with torch.no_grad():
                        request = running[-1].send(answer)
                except StopIteration as end:
                    running.pop()
                    answer = end.value
                    if not running:
                        return answer
                    continue
                answer = None
                if isinstance(request, Rounds):
                    # launches are called here, since every frame between a step and the wire costs a reader
                    for launch_or_apply in self._rounds(request):
                        launch_or_apply()
                elif isinstance(request, TakeInnerStep) and request.gradients is not None:
                    running.append(self._averaged_step(request.gradients))
                else:
                    answer = self._carry_out(request)
        finally:
            with torch.no_grad():
                for one in reversed(running):
                    one.close()

    def average_ahead(self) -> None:
        """Average the gradients of the next step now.

        Raises:
            RuntimeError: They are means already.
        """
        if self.has_averaged:
            raise RuntimeError("average_gradients() was called twice; call step() in between")
        self.drive(self._engine.program.gradients())
        self.has_averaged = True

    def check_skip(self) -> None:
        """Refuse to leave out a step whose gradients a closure makes.

        Raises:
            ValueError: Names the reason.
        """
        program = self._engine.program
        if program.needs_closure:
            raise refusal(
                f"{self._engine.method.name} asks for gradients within a step, so none can be left out",
                got="skip_step()", allowed="step(closure)", remedy="a closure that computes the loss on another batch",
            )  # fmt: skip
        taken = signature(self._inner.step).parameters.get("closure")
        needs_closure = taken is not None and taken.default is Parameter.empty and program.can_average_ahead
        if not program.has_local_steps and (self._has_closures or needs_closure):
            raise refusal(
                "gradients are averaged at each call of a closure, and a step that is left out has none",
                got="skip_step()", allowed="step(closure)", remedy="a closure that computes the loss on another batch",
            )  # fmt: skip

    def _rounds(self, request: Rounds) -> Iterator[Callable[[], None]]:
        self.schedule_step = step = self.schedule_step + 1
        self.schedule_step = yield from self._engine.advancing(
            step, stop=self._input.next_stop, may_be_infinite=request.may_be_infinite
        )
        self.steps_passed += self.schedule_step - step

    def _carry_out(self, request: Request | _MeanStep) -> Any:
        match request:
            case Gradients():
                return self._own_gradients()
            case TakeInnerStep():
                return self._local_step()
            case _MeanStep():
                return self._mean_step(request.gradients)
            case Scheduled():
                self.schedule_step += 1
                return list(self._engine.launches(self.schedule_step))
            case ExchangeRound():
                return self._engine.exchange(request.round, request.tensor)
            case Send():
                sent = self._engine.transport.send(request.payload, to=request.to, envelope=request.envelope)
                self._sends.append((sent, self._deadline_s(request.envelope)))
            case Receive():
                pending = self._engine.transport.receive(source=request.source, envelope=request.envelope)
                received = pending.wait(deadline_s=self._deadline_s(request.envelope))
                assert received is not None
                return received.payload
        return None

    def _deadline_s(self, envelope: Envelope) -> float:
        return self._engine.deadlines.deadline_s(steps=1, num_bytes=envelope.payload_bytes)

    def _own_gradients(self) -> Any:
        if self._input.closure is not None:
            self._has_closures = True
            with torch.enable_grad():
                return self._input.closure()
        if self._input.is_skipped:  # they count as zero
            for parameter in (p for group in self._inner.param_groups for p in group["params"] if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)
        self._unscale()
        return None

    def _local_step(self) -> Any:
        given, result = self._input, None
        # a program that asks for gradients itself has them by now
        closure = None if self._engine.program.needs_closure else given.closure
        if not given.is_skipped:
            if given.found_inf is None:
                result = self._inner.step(closure) if closure is not None else self._inner.step()
            else:
                self._unscale()
                result = None if bool(given.found_inf) else self._inner.step()
        self._engine.state.work.add_step(num_tokens=given.num_tokens)
        return result

    def _averaged_step(self, gradients: Callable[[], Requests]) -> Generator[Request | _MeanStep, Any, Any]:
        """Return the program of an inner step with gradients that a program makes, at each call of a closure."""
        if self._input.closure is None and not self.has_averaged:
            yield from gradients()
        return (yield _MeanStep(gradients))

    def _mean_step(self, gradients: Callable[[], Requests]) -> Any:
        given = self._input
        if given.closure is not None:
            return self._inner.step(lambda: self.drive(gradients()))
        self._unscale()
        if given.found_inf is None and not given.is_skipped:
            return self._inner.step()
        # The mean is infinite on all replicas as soon as one replica's gradient was. A replica that skips has no
        # GradScaler's word, and leaves the step out where those of the others do.
        is_infinite = given.found_inf is not None and bool(given.found_inf)
        is_infinite = is_infinite or not all(bool(torch.isfinite(p.grad).all()) for p in self._with_gradient())
        return None if is_infinite else self._inner.step()

    def _unscale(self) -> None:
        """Divide a GradScaler's scale out before gradients are averaged: replicas' scales may differ."""
        scale, self._input.grad_scale = self._input.grad_scale, None
        if scale is not None:
            for parameter in self._with_gradient():
                parameter.grad.div_(scale.to(parameter.grad.device))

    def _with_gradient(self) -> list[Any]:
        return [p for group in self._inner.param_groups for p in group["params"] if p.grad is not None]


def repeatable(closure: Closure, model: nn.Module) -> Closure:
    """Return a closure of which every call finds the model's buffers as they are now.

    A forward pass may change them. So all calls compute the same function, and what stays is of the last one alone:
    statistics of BatchNorm belong to the parameters that they were gathered with.

    Args:
        closure: Computes the loss and its gradients.
        model: Whose buffers are kept.

    Example:
        >>> norm = nn.BatchNorm1d(1, momentum=0.5)
        >>> oracle = repeatable(lambda: norm(torch.tensor([[1.0], [3.0]])), norm)
        >>> oracle().mean().item(), oracle().mean().item(), norm.running_mean.item()
        (0.0, 0.0, 1.0)
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def oracle() -> Any:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        return closure()

    return oracle
