"""The round engine: launches and applies the rounds that the schedule names; and the driver of a step's program."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from thinwire.adaptive_timeout import Deadlines
from thinwire.averaging.exchange import BoundExchange, Exchange
from thinwire.averaging.round_context import Average, RoundContext
from thinwire.averaging.topology import Peers
from thinwire.errors import DeadlineExceeded, DesyncError, ThinwireError, refusal
from thinwire.events import FIRST_LAST_ROUND
from thinwire.shared_random import derive_seed
from thinwire.sync.catch_up import CatchUp, QuorumCatchUp
from thinwire.sync.consistency_check import check_hashes
from thinwire.sync.in_flight import (
    EngineState,
    InFlight,
    RoundObserver,
    SyncStatistics,
    UncountedWork,
    drive_exchange,
    mark_launch,
)
from thinwire.sync.method import Method
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
from thinwire.sync.schedule import Round
from thinwire.transport.base import Envelope, Pending, Transport, step_aside

Closure = Callable[[], Any]

# Paced rounds use this share of their overlap. The rest is for the receiver's work and for steps below the median.
_PACED_SHARE = 0.75
# Polling interval in seconds while results for late members are outstanding.
_POLL_S = 0.005


class RoundEngine:
    """Drives one method on one replica.

    Args:
        model: The replica's model.
        inner: Its optimizer, for methods that read or replace its state.
        method: The five parts.
        transport: Joins the replicas.
        deadlines: Turns measured times into deadlines.
        catch_up: Chooses the steps that this replica passes over when it is behind; `QuorumCatchUp` by default.
        seed: Base of the streams of stochastic codecs.
        pace: Whether to spread outgoing bytes over the inner steps until a round is applied.

    Attributes:
        observers: Receive every round.
        checks: Called now and then with a round that is waited for; raise where the others cannot send it any more.
        state: In-flight rounds and counted work.
        has_memory: Whether any exchange keeps a residual.

    Raises:
        ValueError: The method does not fit the model or the number of replicas.
    """

    def __init__(
        self, model: nn.Module, *, method: Method, transport: Transport, deadlines: Deadlines,
        inner: torch.optim.Optimizer | None = None, catch_up: CatchUp | None = None, seed: int = 0, pace: bool = False,
    ) -> None:  # fmt: skip
        count = transport.num_replicas
        self.method = method
        self.transport = transport
        self.deadlines = deadlines
        self.view = method.view.bind(model, inner=inner)
        self.num_fragments = self.view.parameters.num_fragments
        self._where = {"num_fragments": self.num_fragments, "replica": transport.replica}
        self.exchanges = [self._bind(e, channel) for channel, e in enumerate(method.exchanges(count))]
        last = method.last_exchange
        self._last_exchange = self.exchanges[0] if last is None else self._bind(last(count), 0)
        self.has_memory = any(exchange.has_memory for exchange in self.exchanges)
        self.update = method.update(count)
        self.program = self.update.program
        self.update_state = self.update.init(self.view, inner=inner)
        self.statistics = SyncStatistics()
        self.state = EngineState(work=UncountedWork(num_fragments=self.num_fragments))
        self.observers: list[RoundObserver] = []
        self.checks: list[Callable[[Round], None]] = []
        self._seed = seed
        self._pace = pace
        # in steps: how far the others may get ahead of a round that this replica has launched
        self.drift_steps = method.schedule.sync_interval * method.drift_intervals
        self.catch_up = QuorumCatchUp() if catch_up is None else catch_up
        self.catch_up.bind(self)
        method.schedule.check(num_fragments=self.num_fragments, num_replicas=count)

    @property
    def in_flight(self) -> tuple[Round, ...]:
        """The rounds between launch and apply, in the order of their launch."""
        return tuple(flight.round for flight in self.state.in_flight.values())

    def advancing(
        self, step: int, *, stop: int | None = None, may_be_infinite: bool = False
    ) -> Generator[Callable[[], None], None, int]:
        """Yield what is due at inner step `step`, counted from 1: launches and applies, each to be called at once.

        Args:
            step: The step.
            stop: A step that must not be passed over.
            may_be_infinite: Whether replicas may send infinity.

        Returns:
            The step that the replica is at now: `step`, one that it has caught up to, or the one before `step` where
            the catch-up policy holds it back.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            DesyncError: Replicas hold different global parameters.
            NonFiniteError: A replica sent NaN or infinity.
        """
        failed = self.state.failed
        if failed is not None and self.exchanges[failed.channel].shared_hash(failed.fragment):
            raise DesyncError(
                f"round {failed.id} failed on replica {self.transport.replica}, and others may have applied it, so the "
                f"state that {self.method.name} keeps at both ends differs from here on; resume all replicas from a "
                f"checkpoint before that"
            )
        reached = step - 1
        for reached in self.catch_up.steps(step, stop=stop):
            for round in self.catch_up.launches(reached):
                yield partial(self.launch, round, may_be_infinite=may_be_infinite)
            self.state.reached_step = reached
            for round in self.catch_up.applies(reached):
                yield partial(self.apply, round)
            if self.state.applied_early:
                self.state.applied_early -= {r.id for r in self.method.schedule.applies(reached, **self._where)}
        self.statistics.steps_passed += max(0, reached - step)
        for flight in self.state.in_flight.values():
            flight.poll(reached)
        self.state.drop_settled()
        return reached

    def launches(self, step: int) -> Sequence[Round]:
        return self.method.schedule.launches(step, **self._where)

    def applies(self, step: int) -> Sequence[Round]:
        """Return the rounds to apply after a step, without those that `flush` applied early."""
        due = self.method.schedule.applies(step, **self._where)
        return [round for round in due if round.id not in self.state.applied_early]

    def has_arrived(self, round: Round, *, step: int) -> bool:
        """Return whether a round's result is here, or the round is not in flight; `step` ends a grace period."""
        flight = self.state.in_flight.get(round.id)
        return flight is None or flight.poll(step)

    def launch(
        self, round: Round, *, tensor: torch.Tensor | None = None, is_last: bool = False, may_be_infinite: bool = False
    ) -> None:
        """Start the exchange of one round.

        Args:
            round: The round.
            tensor: What is exchanged; None reads it from the view.
            is_last: Whether it belongs to the final exchange, which covers all replicas whatever the topology.
            may_be_infinite: Whether replicas may send infinity, which a GradScaler checks for; a residual must not be.
        """
        began_s = time.perf_counter()
        me, exchange = self.transport.replica, self.exchanges[round.channel]
        everyone = tuple(range(self.transport.num_replicas))
        num_tokens, num_steps = self.state.work.since(round.fragment)
        if is_last:
            exchange, peers = self._last_exchange, Peers(me=me, members=everyone)
            tensor = self.view.read_last(round.fragment)
            num_tokens, num_steps = 1, 1  # all replicas weigh the same, however long ago their last round was
        else:
            peers = self.method.topology.peers(round_id=round.id, me=me, alive=everyone)
            tensor = self.view.read(round) if tensor is None else tensor
        on_arrival = mark_launch(round, tensor, observers=self.observers)
        num_bytes = exchange.sent_bytes(tensor.numel(), num_replicas=len(peers.members))
        self.state.work.launch(round)
        # combined with the exchange state that all members must share
        reference_hash = self.view.reference_hash(round)
        if reference_hash and (shared := exchange.shared_hash(round.fragment)):
            reference_hash = zlib.crc32(shared.to_bytes(4, "little"), reference_hash)
        overlap_steps = round.apply_step - round.launch_step
        context = RoundContext(
            peers=peers, transport=self.transport, round_id=round.id, fragment=round.fragment, step=round.launch_step,
            reference_hash=reference_hash,
            must_be_finite=not may_be_infinite or exchange.has_memory,
            seed=derive_seed(self._seed, "round", round.id, me),
            # a paced round is sent over most of its overlap, at the median step time
            spread_s=_PACED_SHARE * overlap_steps * self.deadlines.median_step_s() if self._pace else 0.0,
            num_tokens=num_tokens, num_steps=num_steps,
            is_closed=not is_last and round.launch_step <= self.catch_up.closed_step,
            reached=lambda: self.state.reached_step, hear=partial(self.catch_up.hear, round),
        )  # fmt: skip
        # while this round is in flight, so many inner steps pass at most, here and at the peers
        steps_meanwhile = self.drift_steps - self.method.schedule.sync_interval
        deadline_s = self.deadlines.deadline_s(steps=steps_meanwhile, num_bytes=num_bytes)
        steps = exchange.steps(tensor, context)
        del tensor  # the generator frees it as soon as it is encoded
        try:
            first = next(steps)  # encodes and starts to send
        except StopIteration as end:  # an exchange that sends nothing
            on_arrival()
            self.state.in_flight[round.id] = InFlight(round, end.value)
        else:
            self.state.in_flight[round.id] = drive_exchange(
                steps, first, round=round, deadline_s=deadline_s, in_background=self.transport.runs_in_background,
                num_bytes=num_bytes, let_others=self._let_others, on_arrival=on_arrival,
                check=partial(self._check, round),
            )  # fmt: skip
        self.statistics.rounds_launched += 1
        self.statistics.launching_s += time.perf_counter() - began_s

    def apply(self, round: Round, *, is_last: bool = False) -> None:
        """Wait for a round's result and apply it; the final exchange sets the global value without an outer step."""
        average = self._take(round)
        began_s = time.perf_counter()
        if is_last:
            self.update.merge(self.update_state, round.fragment, average.mean)
        else:
            self.update.apply(self.update_state, round, average)
        self.statistics.applying_s += time.perf_counter() - began_s
        for observer in self.observers:
            observer.on_applied(round, average)

    def apply_overdue(self) -> None:
        """Wait for all rounds that are due and apply them: the global parameters are then those of the last step."""
        for round in self.catch_up.overdue():
            self.apply(round)

    def exchange(self, round: Round, tensor: torch.Tensor) -> Average:
        """Exchange a tensor in a round and wait for the result, for updates that drive the step themselves."""
        self.launch(round, tensor=tensor)
        return self._take(round)

    def flush(self) -> None:
        """Apply all rounds in flight before they are due, in launch order, then wait for late members."""
        self.apply_overdue()
        for round in self.in_flight:
            self.apply(round)
            self.state.applied_early.add(round.id)  # the schedule names it again if the run continues
        while self.state.settling:
            if self._let_others() or not self.state.settling:
                continue
            if not self.transport.runs_in_background:
                late = ", ".join(str(flight.round.id) for flight in self.state.settling)
                raise DeadlineExceeded(f"no replica in this process can still request the results of the rounds {late}")
            time.sleep(_POLL_S)

    def merge_everything(self, step: int) -> None:
        """Flush, then set every fragment's global value to the mean of the local ones: the end of a run.

        Args:
            step: The last inner step done; all replicas must call this after the same one.
        """
        self.flush()
        # ids above all scheduled ones: those count launches, at most one a step and fragment
        first = FIRST_LAST_ROUND + step * self.num_fragments
        for fragment in range(self.num_fragments):
            round = Round(id=first + fragment, fragment=fragment, launch_step=step, apply_step=step)
            self.launch(round, is_last=True)
        for round in self.in_flight:
            self.apply(round, is_last=True)

    def wait(self, flight: InFlight) -> Average:
        """Wait for a round's result, which stays in flight, and check the peers' reference hashes."""
        began_s = time.perf_counter()
        # a result requested early still has the rest of its grace period
        left = max(0, flight.round.apply_step - max(self.state.reached_step, flight.round.launch_step))
        try:
            average = flight.result(grace_s=left * self.deadlines.median_step_s())
        except ThinwireError:
            self.state.failed = flight.round
            raise
        self.statistics.stalled_s += time.perf_counter() - began_s
        self.deadlines.observe_round(flight.duration_s, num_bytes=flight.num_bytes)
        check_hashes(average.reference_hashes, round=flight.round)
        return average

    def _check(self, round: Round) -> None:
        for check in self.checks:
            check(round)

    def _take(self, round: Round) -> Average:
        """Wait for a round's result and end the round."""
        flight = self.state.in_flight[round.id]
        average = self.wait(flight)
        del self.state.in_flight[round.id]
        if not flight.is_settled():
            self.state.settling.append(flight)
        self.state.work.settle(round, is_counted=average.is_counted)
        self.statistics.rounds_applied += 1
        self.statistics.rounds_missed += not average.is_counted
        return average

    def _bind(self, exchange: Exchange, channel: int) -> BoundExchange:
        shapes = [self.view.shapes(fragment=fragment, channel=channel) for fragment in range(self.num_fragments)]
        return exchange.bind(shapes, replica=self.transport.replica, num_replicas=self.transport.num_replicas)

    def _let_others(self) -> bool:
        self.state.drop_settled()
        return step_aside(self.transport)


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
        self._named: list[Round] = []  # of the step, for the program to exchange itself

    def begin(self, given: StepInput) -> None:
        """Take in what a step brings, before its program is driven."""
        self._input, self.steps_passed = given, 0
        if given.closure is not None and self._engine.program.needs_closure:
            given.closure = repeatable(given.closure, self._model)

    def end(self) -> None:
        self.has_averaged, self._input, self._sends, self._named = False, StepInput(), [], []

    def await_sends(self) -> None:
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
                self._named = list(self._engine.launches(self.schedule_step))
                return list(self._named)
            case ExchangeRound():
                if request.round not in self._named:
                    raise refusal(
                        "a program exchanges a round that this step has not, or twice", got=repr(request.round),
                        allowed=repr(self._named), remedy="a round of the answer to Scheduled(), once",
                    )  # fmt: skip
                self._named.remove(request.round)
                return self._engine.exchange(request.round, request.tensor)
            case Send():
                sent = self._engine.transport.send(request.payload, to=request.to, envelope=request.envelope)
                self._sends.append((sent, self._deadline_s(request.envelope)))
            case Receive():
                pending = self._engine.transport.receive(source=request.source, envelope=request.envelope)
                received = pending.wait(deadline_s=self._deadline_s(request.envelope))
                assert received is not None
                return received.payload
            case _:
                raise refusal(
                    f"a program of {self._engine.method.name} asks for what no engine does", got=repr(request),
                    allowed="the requests of thinwire.sync.program", remedy="yield TakeInnerStep(), then Rounds()",
                )  # fmt: skip
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
