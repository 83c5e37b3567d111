"""`DistributedOptimizer` wraps the user's optimizer for a training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from thinwire.adaptive_timeout import Deadlines
from thinwire.compat import EagerOptimizer, is_making_state
from thinwire.errors import refusal
from thinwire.sync import missing_steps
from thinwire.sync.buffers import LocalBuffers, average_tensors, saved_buffers
from thinwire.sync.catch_up import CatchUp
from thinwire.sync.consistency_check import handshake
from thinwire.sync.control_messages import ControlMessages, ReplicaStatus
from thinwire.sync.engine_state import (
    OWN_KEYS,
    OWN_STATE,
    STATE_VERSION,
    adopt_state,
    checked_state,
    load_state,
    naming_missing_keys,
    save_state,
    schedule_step,
)
from thinwire.sync.equal_batches import EqualBatches, HashedRounds
from thinwire.sync.in_flight import SyncStatistics
from thinwire.sync.method import Method, method_of
from thinwire.sync.model_checks import ParameterSet, check_parameters, check_tensors, refuse_turns
from thinwire.sync.portable_state import StateLayout, to_portable
from thinwire.sync.round_engine import RoundEngine, StepDriver, StepInput
from thinwire.sync.schedule import Round
from thinwire.sync.weight_copies import copies_of
from thinwire.transport.base import Transport
from thinwire.transport.loopback import single
from thinwire.transport.shards import drop_gathered
from thinwire.transport.shared_models import SharedCollectives, refuse_shared_model


class DistributedOptimizer(EagerOptimizer):
    """Wraps an optimizer so that replicas of a model train together over thin wires.

    It is a `torch.optim.Optimizer` with the inner optimizer's own parameter groups and state: learning-rate
    schedulers, `GradScaler`, clipping and gradient accumulation work as before. Every call of `step` counts as one
    inner step of the schedule, also one that a `GradScaler` skips, so that replicas never drift apart in their rounds.

    As a context manager it ends with `close(final_exchange=True)`; after an exception it ends with `abandon()`.

    Args:
        model: The replica's model, the same on all replicas; its trained values are set to replica 0's here. Frozen
            parameters are never sent: every replica must load the same ones.
        inner: Any optimizer over the model's parameters.
        method: When, with whom, what, in which code and how: see `thinwire.methods`. A name, such as
            `"streaming-diloco"`, stands for that method with its defaults.
        transport: Joins the replicas: `thinwire.connect()`; None trains alone.
        minimum_deadline_s: Floor of every wait for a peer; above it, deadlines follow measured step times.
        seed: Base of the streams of stochastic codecs.
        pace: Whether to spread what is sent over most of the inner steps until it is applied, as long as steps take
            now, rather than to send it as fast as the wire takes it: the same bytes at a lower peak rate.
        catch_up: Policy for a replica that is behind the others; None follows the method's quorum. An elastic run
            gives its `ElasticDriver`.

    Attributes:
        next_stop: A step that must not be passed over by a replica that catches up, since all do something after it.

    Raises:
        TypeError: The method is neither a `Method` nor a name.
        ValueError: No method has the name, or the method does not fit the model, the inner optimizer or the number of
            replicas, or DDP or FSDP joins the ranks of several replicas.
        DesyncError: Another replica runs another model or method.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = thinwire.DistributedOptimizer(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), method=thinwire.methods.diloco(sync_interval=2)
        ... )
        >>> for _ in range(5):
        ...     model(torch.ones(1, 3)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.statistics.rounds_applied
        2
        >>> optimizer.close(final_exchange=True)  # the fifth step is in the global parameters too
    """

    # GradScaler then calls step() also for steps it wants skipped, and reports that in `found_inf`
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, method: Method | str,
        transport: Transport | None = None,
        minimum_deadline_s: float = 60.0, seed: int = 0, pace: bool = False, catch_up: CatchUp | None = None,
    ) -> None:  # fmt: skip
        if isinstance(inner, DistributedOptimizer):
            raise ValueError("inner is a DistributedOptimizer already; wrap the plain optimizer once")
        method = method_of(method)
        check_parameters(model, inner)
        self.inner = inner
        self._is_ready = False
        super().__init__(inner.param_groups, dict(getattr(inner, "defaults", {})))
        self._share_state()
        self._is_ready = True
        self._model = model
        self._deadlines = Deadlines(minimum_s=minimum_deadline_s)
        self._seed, self._pace = seed, pace
        self._is_skipping = False
        self._connect(method, single() if transport is None else transport, catch_up)

    def _connect(self, method: Method, transport: Transport, catch_up: CatchUp | None) -> None:
        """Begin from the model's present values among the replicas of a transport."""
        model = self._model
        check_tensors(model, is_elastic=catch_up is not None and not catch_up.has_fixed_replicas)
        self.transport = transport
        description = method.describe(num_replicas=self.transport.num_replicas)
        num_bytes = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        deadline_s = self._deadlines.deadline_s(steps=1, num_bytes=num_bytes * (self.transport.num_replicas - 1))
        self._has_fixed_replicas = catch_up is None or catch_up.has_fixed_replicas
        self._copies = copies_of(self.inner)
        if self._copies.averaging and not self._has_fixed_replicas:
            raise ValueError(
                f"{type(self._copies.averaging[0]).__name__} keeps a second set of weights, which replicas that join "
                f"an elastic run do not fetch; take torch.optim.AdamW with a schedule there"
            )
        self._shared_collectives: SharedCollectives | None = None
        self._control: ControlMessages | None = None
        self._batches: EqualBatches | None = None
        self._channel = self.transport
        if self._has_fixed_replicas and self.transport.num_replicas > 1:
            self._batches = batches = EqualBatches(model, replica=self.transport.replica)
            self._channel = HashedRounds(self.transport, batches)
        if self._has_fixed_replicas:  # replicas that come and go compare their set-ups as they join
            refuse_shared_model(model, transport=self.transport)
            self._shared_collectives = SharedCollectives(self.transport)
            handshake(model, description=description, transport=self._channel, deadline_s=deadline_s,
                      copies=self._copies.tensors())  # fmt: skip
        with self._copies.in_training():
            self._engine = RoundEngine(
                model, method=method, transport=self._channel, deadlines=self._deadlines, inner=self.inner,
                catch_up=catch_up, seed=self._seed, pace=self._pace,
            )  # fmt: skip
        self._driver = StepDriver(self._engine, model, self.inner)
        self._parameter_set = ParameterSet(model, self._engine.view.parameters)
        self._local_buffers: LocalBuffers | None = None
        # one warning at most among fixed replicas
        is_watching = (transport.num_replicas > 1 and transport.replica == 0) or not self._has_fixed_replicas
        if is_watching and not getattr(method.view, "exchanges_buffers", False):
            remedy = "call average_buffers() before evaluating and saving, or " if self._has_fixed_replicas else ""
            self._local_buffers = LocalBuffers(model, remedy=f"{remedy}make it a parameter that a loss trains")
        if self._has_fixed_replicas:
            self._control = control = ControlMessages(self._channel, progress=self._progress)
            self._engine.checks.append(lambda round: control.check(round.launch_step))
        self.next_stop: int | None = None
        self._steps_done = 0
        self._tokens = 0
        self._buffer_rounds = 0
        self._last_step_s: float | None = None
        self._holds_global = False
        self._is_closed = False
        self._has_warned = False
        if self.transport.replica == 0:  # one line at the end of a run, not one a replica
            missing_steps.watch(self._engine.state.work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close with the final exchange; after an exception, without any exchange."""
        if kind is None:
            self.close(final_exchange=True)
        else:
            self.abandon()

    @property
    def method(self) -> Method:
        """The method that runs."""
        return self._engine.method

    @property
    def steps_done(self) -> int:
        """Inner steps so far, with those that a GradScaler skipped, and those passed over to catch up with others.

        With a method that does not wait for all replicas, train until this is reached, not for so many batches.
        """
        return self._steps_done

    @property
    def needs_closure(self) -> bool:
        """Whether the method asks for gradients at points of its own choice, so that `step` needs a closure."""
        return self._engine.program.needs_closure

    def begin_at(self, step: int) -> None:
        """Count from a step on whose global values the engine holds already, as a replica does that joins others."""
        self._steps_done = self._driver.schedule_step = step
        self._engine.state.reached_step = step

    @property
    def statistics(self) -> SyncStatistics:
        """Costs of synchronisation so far."""
        return self._engine.statistics

    @property
    def engine(self) -> RoundEngine:
        """The engine that drives the rounds."""
        return self._engine

    @property
    def num_fragments(self) -> int:
        """The number of fragments of the model."""
        return self._engine.num_fragments

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each fragment."""
        return self._engine.view.parameters.fragments

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        """Return the shapes of the tensors that rounds of a fragment exchange in a channel."""
        return self._engine.view.shapes(fragment=fragment, channel=channel)

    @property
    def rounds_in_flight(self) -> tuple[Round, ...]:
        """The rounds between launch and apply."""
        return self._engine.in_flight

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one inner step, and the rounds that are due.

        Args:
            closure: As for the inner optimizer; where gradients are exchanged at every step, they are averaged after
                each of its calls, so all replicas must call it equally often. A method that asks for gradients at
                points of its own choice needs it: it clears the gradients, computes the loss on one batch, the same at
                each call within a step, calls `backward`, and returns the loss. Each of its calls finds the buffers as
                they were before the step, so that BatchNorm's statistics are those of the last one.

        Returns:
            What the inner optimizer's `step` returns.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            DesyncError: Replicas hold different global parameters.
            RuntimeError: The optimizer is closed, or the model holds the global parameters just now.
            ValueError: The method needs a closure, does not go with a GradScaler, or parameters are trained that were
                not there at wrapping.

        Warns:
            UserWarning: Training changes a buffer, which is not exchanged; once.
        """
        if closure is None and not self.inner.state and is_making_state():
            return self.inner.step()  # it trains nothing, and must start no round
        self._refuse_step(closure)
        refuse_turns(self._model, self)
        if self._shared_collectives is not None:
            self._shared_collectives.on_step()
        if (batches := self._batches) is not None:
            batches.warn(stacklevel=3)  # torch wraps `step`
            if closure is not None:
                closure = batches.watched(closure)
            elif not self._is_skipping:
                batches.on_gradients()
        now_s = time.monotonic()
        if self._last_step_s is not None:
            self._deadlines.observe_step(now_s - self._last_step_s)
        self._last_step_s = now_s
        self._parameter_set.check_trained(self.inner)
        self._parameter_set.check_replaced()
        if self._local_buffers is not None and not self._steps_done & (self._steps_done - 1):  # at steps 1, 2, 4, 8 ...
            self._local_buffers.check()
        self._steps_done += 1
        num_tokens, self._tokens = self._tokens or 1, 0
        self._driver.begin(
            StepInput(
                closure=closure, is_skipped=self._is_skipping, next_stop=self.next_stop, num_tokens=num_tokens,
                # GradScaler sets these for the time of a step
                grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            )
        )  # fmt: skip
        try:
            result = self._driver.drive(self._engine.program.step(self._engine))
            self._driver.await_sends()
        finally:
            self._driver.end()
            if batches is not None:
                batches.on_step_end()
        self._steps_done += self._driver.steps_passed
        return result

    def skip_step(self) -> None:
        """Count a step in which this replica does not train, as for a batch whose loss is not finite.

        All replicas must do the same number of steps: call it instead of `step`. Rounds that are due take place. Where
        gradients are averaged at every step, this replica's count as zero, and it does the step of the others.

        Raises:
            ValueError: The method or the inner optimizer needs a closure.
            TransportError, DesyncError, RuntimeError: As from `step`.
        """
        self._driver.check_skip()
        self._is_skipping = True
        try:
            self.step()
        finally:
            self._is_skipping = False

    def should_stop(self, local: bool = False) -> bool:
        """Return whether all replicas stop here, because one of them asked for it.

        Call it after each step on all replicas, or after every n-th. The answer is the same on all of them after the
        same step: within two sync intervals of the request, so that nobody waits for the votes.

        Args:
            local: Whether this replica asks to stop, as when its data ends or its loss no longer falls.

        Raises:
            DesyncError: A replica has ended already, or calls it after other steps.
            RuntimeError: The optimizer is closed, or replicas come and go, or some may be late, so they have no common
                step.
            ValueError: `local` is neither True nor False.
            TransportError: A replica did not answer.
        """
        if self._is_closed:
            raise RuntimeError("should_stop() after close(); call it after each step, and close() once it is True")
        value: Any = local
        if getattr(local, "nbytes", 0) == 1:  # of torch or NumPy
            value = value.item()
        if not isinstance(value, bool):
            raise refusal(
                "should_stop() takes whether this replica asks to stop", got=repr(local), allowed="True or False",
                remedy="should_stop(bool(...))",
            )  # fmt: skip
        schedule = self.method.schedule
        if self._control is None or self.method.has_late_replicas:
            raise RuntimeError(
                f"should_stop() needs replicas that do every step together, and {self.method.name} here lets some come "
                f"late or leave; end the loop once steps_done reaches a number that all know"
            )
        deadline_s = self._deadlines.deadline_s(steps=self._engine.drift_steps)
        return self._control.should_stop(value, interval=schedule.sync_interval, deadline_s=deadline_s)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens of the next step, all or some of them, for methods that weight replicas by tokens.

        Without it each step counts the same, so either all replicas must call it, or none.

        Raises:
            ValueError: It is less than 1.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}; a step without tokens counts nothing")
        self._tokens += num_tokens

    def average_gradients(self) -> None:
        """Average the gradients now instead of in the next `step`: to clip the mean, as one process would.

        Call it between `backward` and clipping, with a `GradScaler` after `unscale_`. Where gradients are not what the
        method exchanges, or where it does the inner step itself, it does nothing, so that one loop serves all methods;
        nor where a method remembers what it did not send: there a gradient must be clipped before it is remembered.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            RuntimeError: It was called twice before a step.
        """
        if self._batches is not None:
            self._batches.on_gradients()
        if self._engine.program.can_average_ahead and not self._engine.has_memory:
            self._driver.average_ahead()

    @contextmanager
    def global_parameters(self, *, may_lag: bool = False) -> Iterator[None]:
        """Put the global parameters into the model for as long as the block lasts: evaluate and save these.

        Buffers stay this replica's own (see `average_buffers`). Rounds in flight stay in flight.

        Args:
            may_lag: Whether local steps may be missing without a warning, as between two exchanges while training
                goes on.

        Warns:
            MissingStepsWarning: Local steps are not in the global parameters; once an optimizer.
        """
        work = self._engine.state.work
        if work.num_missing_steps and not may_lag and not self._has_warned:
            self._has_warned = True
            missing_steps.unwatch(work)
            remedy = "call close(final_exchange=True) after the last step, or pass may_lag=True between two exchanges"
            missing_steps.warn_missing(work, remedy=remedy, stacklevel=3)
        self._parameter_set.check_replaced()
        self._holds_global = True
        drop_gathered(self._model)
        try:
            # Schedule-Free trains at y, and its average x is what is evaluated and saved
            with self._copies.in_training(), self._engine.view.parameters.in_model(), self._copies.in_evaluation():
                yield
        finally:
            drop_gathered(self._model)
            self._holds_global = False

    def average_buffers(self) -> None:
        """Replace the model's floating buffers (BatchNorm's statistics) by their mean over the replicas.

        Buffers that are not part of the model's state (`persistent=False`) are caches and left alone. All replicas
        must call it after the same step. Thinwire never does this by itself: statistics belong to the parameters they
        were gathered with. In an elastic run nothing happens: replicas that come have gathered none.

        Raises:
            TransportError: A replica did not take part.
        """
        buffers = saved_buffers(self._model)
        if not buffers or self.transport.num_replicas == 1 or not self._has_fixed_replicas:
            return
        deadline_s = self._deadlines.deadline_s(steps=self.method.schedule.sync_interval)
        average_tensors(buffers, transport=self._channel, number=self._buffer_rounds, deadline_s=deadline_s)
        self._buffer_rounds += 1

    def train(self) -> None:
        """Put a Schedule-Free inner optimizer into training mode; others have no modes."""
        _set_mode(self.inner, "train")

    def eval(self) -> None:
        """Put a Schedule-Free inner optimizer into evaluation mode; others have no modes."""
        _set_mode(self.inner, "eval")

    def close(self, *, final_exchange: bool = False) -> None:
        """Flush the rounds in flight. Closing twice is fine.

        Args:
            final_exchange: Also exchange every fragment once more, and set the global parameters to the mean of the
                replicas' local ones, so that they hold the work since their last rounds. All replicas must give
                the same.

        Raises:
            DesyncError: Replicas end after different numbers of steps, or in different ways; names both.
            TransportError: A replica was lost, or did not come to its end.
        """
        if self._is_closed:
            return
        with self._copies.in_training():
            self._engine.flush()
            if self._control is not None and final_exchange:
                self._control.end(deadline_s=self._deadlines.deadline_s(steps=self._engine.drift_steps))
            elif self._control is not None:
                self._control.leave()
            if final_exchange and self._engine.program.has_local_steps:
                self._engine.merge_everything(self._steps_done)
        if self._batches is not None:
            self._batches.warn(stacklevel=2)
        self.abandon()

    def abandon(self) -> None:
        """Close without waiting for any replica: rounds in flight are not applied. For a run that has failed."""
        missing_steps.unwatch(self._engine.state.work)
        if self._batches is not None:
            self._batches.close()
        self._is_closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: fragments and offsets are fixed once replicas have started.

        Raises:
            ValueError: Always, after construction.
        """
        if self._is_ready:
            raise ValueError(
                "add_param_group() would change the fragments while replicas train; add the group to the inner "
                "optimizer before it is wrapped"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and thinwire's own: global values, momenta, rounds in flight.

        Waits for rounds in flight to arrive, without applying them, so that the state is complete. The first parameter
        group holds thinwire's part too (the same tensors), since torch's `get_optimizer_state_dict` keeps nothing else.
        """
        inner = self.inner.state_dict()
        own = {
            "version": STATE_VERSION,
            "steps_done": self._steps_done,
            "buffer_rounds": self._buffer_rounds,
            "gradient_rounds": self._driver.schedule_step,
            "sync": save_state(self._engine),
        }
        groups = [dict(group) for group in inner["param_groups"]]
        groups[0][OWN_STATE] = to_portable(own, self._layout())
        return {**inner, **own, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the model's own parameters are loaded with the model.

        Raises:
            CheckpointError: The state is of another version, method, replica or model.
        """
        state_dict = checked_state(state_dict, self._layout())
        load_state(self._engine, state_dict["sync"])
        self._load_own(state_dict)

    def adopt_state_dict(self, state_dict: dict[str, Any]) -> tuple[str, ...]:
        """Adopt the state of a run with another number of replicas or other options of the method.

        Load that replica's model first. Each replica takes the state of the old one with its number, and one that is
        new that of any other. H, tau, codec, outer rate and other options may be new, the same on all replicas. Global
        values, momenta and the inner optimizer's state stay, and so do rounds in flight, but for another schedule.
        What a replica has not sent yet stays with it alone; what must be the same at both ends, or was the part of one
        owner, is reset.

        Returns:
            What was reset or dropped, a line each, to show to the user.

        Raises:
            CheckpointError: The state is of another version, method or model, its replicas hold different values, or
                the model does not hold the parameters that it belongs to.
        """
        state_dict = checked_state(state_dict, self._layout())
        with naming_missing_keys():
            reset = adopt_state(self._engine, state_dict["sync"], step=schedule_step(state_dict))
        self._load_own(state_dict)
        if state_dict["sync"].get("replica") != self.transport.replica:
            with self._copies.in_training():  # the copies that came with the inner state are that replica's own
                self._engine.view.parameters.forget_locals()
        return reset

    def _layout(self) -> StateLayout:
        return StateLayout(self._model, self.fragments)

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        own = {OWN_STATE, *OWN_KEYS}
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name not in own})
        self._share_state()
        with torch.no_grad():
            self._copies.follow(p for group in self.param_groups for p in group["params"])
        self._steps_done = state_dict["steps_done"]
        self._buffer_rounds = state_dict["buffer_rounds"]
        self._driver.schedule_step = schedule_step(state_dict)

    def _refuse_step(self, closure: Callable[[], Any] | None) -> None:
        if self._is_closed:
            raise RuntimeError("step() after close(); build a new DistributedOptimizer to train on")
        if self._holds_global:
            raise RuntimeError("step() inside global_parameters(); leave the with block first, then train on")
        if self._engine.has_memory and hasattr(self, "found_inf"):
            raise ValueError(
                f"{self.method.name} remembers what it did not send, and a GradScaler's infinite gradients would spoil "
                f"that for ever; train in bfloat16 without GradScaler, or take a method without memory"
            )
        if self._engine.program.needs_closure and closure is None:
            raise ValueError(
                f"{self.method.name} asks for gradients at points of its own choice, so one backward pass is not "
                f"enough; call step(closure), where closure clears the gradients, computes the loss on this step's "
                f"batch, calls backward() and returns the loss"
            )

    def _progress(self) -> ReplicaStatus:
        return ReplicaStatus(steps=self._steps_done, launched_step=max(self._steps_done, self._driver.schedule_step))

    def _share_state(self) -> None:
        # the very objects of the inner optimizer: a scheduler that sets lr here sets it there
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state


def _set_mode(inner: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    for part in getattr(inner, "parts", (inner,)):
        change = getattr(part, mode, None)
        if callable(change):
            change()
