"""Training loop of one replica, with metrics, evaluations, checkpoints and timed passes."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from thinwire import experts
from thinwire.adaptive_timeout import Deadlines
from thinwire.errors import CheckpointError, Stopped, ThinwireError
from thinwire.recording.metrics import Meter, ReplicaCounts
from thinwire.recording.recorder import Recorder
from thinwire.runlog.attempts import note_cost
from thinwire.sync.engine_state import checked_state
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.agreed_stop import AgreedStop, NetworkStop
from thinwire.training.build import lr_factor
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import TrainConfig
from thinwire.training.drift import StepMonitor
from thinwire.training.summary import tensors_sha256
from thinwire.transport.shards import as_shard, local_shard
from thinwire.workloads.workload import Batch, Batches, Loss


class Passes:
    """Adds up the time of a step's forward and backward passes; a method may ask for several of each.

    Passes are timed on the CPU only: a GPU computes after its calls have returned, and waiting for it would cost what
    is to be measured.

    Example:
        >>> passes = Passes(torch.device("cpu"), clock=iter([1.0, 1.25, 2.0, 2.5]).__next__)
        >>> with passes.forward():
        ...     pass
        >>> with passes.backward():
        ...     pass
        >>> passes.take(), passes.take()
        ((0.25, 0.5), (None, None))
    """

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_timed = device.type == "cpu"
        self._clock = clock
        self._seconds: dict[str, float] = {}

    def forward(self) -> contextlib.AbstractContextManager[None]:
        return self._timed("forward")

    def backward(self) -> contextlib.AbstractContextManager[None]:
        return self._timed("backward")

    def take(self) -> tuple[float | None, float | None]:
        """Return the seconds of all forward and of all backward passes since the last call, None if none was timed."""
        taken, self._seconds = self._seconds, {}
        return taken.get("forward"), taken.get("backward")

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = self._clock() if self._is_timed else 0.0
        yield
        if self._is_timed:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began_s


class ModelPasses(Protocol):
    """Forward and backward passes of a replica's model, on one rank or on several."""

    @property
    def timing(self) -> Passes:
        """The timer of this rank's passes."""

    def backward(self, inputs: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a batch, (batch, ...) each; return the loss, and what is shown, as a `Loss` does.

        `factor` is the step's learning rate as a share of its peak.
        """

    def clip(self) -> None:
        """Clip the gradient to `clip_norm`."""

    def held_out(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return what is shown of a held-out batch, (1 + metrics,)."""


class Stateful(Protocol):
    """Anything that remembers from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state."""


class LocalPasses:
    """Passes of a model that one rank holds whole; see `ModelPasses`."""

    def __init__(self, config: TrainConfig, model: nn.Module, *, device: torch.device) -> None:
        self.timing = Passes(device)
        self._config, self._model, self._device = config, model, device
        self._parts = config.workload.parts
        loss = config.workload.loss(config, model)
        self._loss = _compiled(loss) if config.model.compile else loss

    def backward(self, inputs: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        loss_sum, shown_sum = torch.zeros((), device=self._device), torch.zeros((), device=self._device)
        with experts.step(self._model):
            for rows, row_targets, share in self._parts(self._config, inputs, targets):
                with self.timing.forward(), autocast(self._config, self._device):
                    loss, shown = self._loss(rows, row_targets)
                with self.timing.backward():
                    (loss * share if share < 1 else loss).backward()  # type: ignore[no-untyped-call]
                loss_sum += share * loss.detach()
                shown_sum = shown_sum + share * shown.detach()
        return loss_sum, shown_sum

    def clip(self) -> None:
        if self._config.optimizer.clip_norm > 0:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.clip_norm)

    def held_out(self, inputs: Tensor, targets: Tensor) -> Tensor:
        shown_sum = torch.zeros((), device=self._device)
        for rows, row_targets, share in self._parts(self._config, inputs, targets):
            with autocast(self._config, self._device):
                shown_sum = shown_sum + share * self._loss(rows, row_targets)[1]
        return shown_sum


def autocast(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward pass; see `--autocast`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.model.autocast == "bf16")


class LoopPolicy:
    """Decisions around the steps of the loop; these are those of a run whose replicas do not change."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._transport = optimizer.transport

    def before_step(self) -> None:
        """Prepare for a step; may wait, or raise to end the training."""

    def after_step(self, step: int, *, took_s: float) -> None:
        """Observe that inner steps are done, skipped ones among them, in seconds without waits for other replicas."""

    def after_report(self, loss: float) -> None:
        """Observe the latest training loss."""

    def before_evaluation(self) -> None:
        """Bring the global parameters to the state that all replicas evaluate."""

    def share(self) -> tuple[int, int]:
        """Return which part of an evaluation is this replica's, and the number of parts."""
        return self._transport.replica, self._transport.num_replicas

    def lr_scale(self) -> float:
        """Return a factor on the next step's learning rate."""
        return 1.0


@dataclass(kw_only=True, eq=False)
class Training:
    """One replica's training, from any step to the last.

    Attributes:
        config: Resolved options.
        model: The workload's, on `device`; `optimizer` wraps the inner one over its parameters.
        held_out: Returns at most so many held-out batches, the same at every call.
        watch: Detects steps that take longer than planned, if there is a plan.
        recorder: Receives each step's time and loss.
        checkpoints: Receives the states; None where another part saves them.
        policy: Decisions around the steps; `LoopPolicy` by default.
        passes: Passes of the model; `LocalPasses` by default.
        memory: What they remember, if anything.
        step: Inner steps done.
        stop: By which a signal may end the run early.
    """

    config: TrainConfig
    model: nn.Module
    optimizer: DistributedOptimizer
    batches: Batches
    held_out: Callable[[int], Iterable[Batch]]
    meter: Meter
    device: torch.device
    watch: StepMonitor | None = None
    recorder: Recorder | None = None
    checkpoints: ReplicaCheckpoints | None = None
    policy: LoopPolicy | None = None
    passes: ModelPasses | None = None
    memory: Stateful | None = None
    step: int = 0
    stop: AgreedStop | NetworkStop | None = None

    def __post_init__(self) -> None:
        self._policy = self.policy or LoopPolicy(self.optimizer)
        self._passes: ModelPasses = self.passes or LocalPasses(self.config, self.model, device=self.device)
        self._reported_step = self.step
        self._num_samples = self.config.workload.num_samples
        self._step_s = 0.0
        self._frozen: str | None = None
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._deadlines = Deadlines()
        self._last_step_s: float | None = None
        method = self.optimizer.method
        self._drift_steps = method.drift_intervals * method.schedule.sync_interval

    @property
    def deadline_s(self) -> float:
        """Seconds that a replica may keep the others waiting outside of a round, from measured times."""
        return self._deadlines.deadline_s(steps=self._drift_steps)

    def reading(self) -> ReplicaCounts:
        """Return this replica's counts in its latest line, after `run` those of the whole training."""
        if self.meter.latest.time_s:
            return self.meter.latest
        return self.meter.read(stalled_s=self.optimizer.statistics.stalled_s)

    def run(self) -> None:
        """Train to the last step, save the full state, flush the rounds in flight, and write the last line.

        Raises:
            ThinwireError: A replica was lost, a checkpoint could not be written, or the like.
            Stopped: A signal ended the run early, and the state is saved.
        """
        self.model.train()
        self._end_early()
        while self.step < self.config.run.steps:
            self.step += 1
            self._train_step()
            self._report()
            if complaint := self.watch.observe_step(self.step) if self.watch else "":
                replica = self.optimizer.transport.replica
                self.meter.write_warning(self.step, message=f"replica {replica}: {complaint}")
            self._end_early()
            if self._is_due(self.config.output.checkpoint_every):
                with self._apart():
                    self.save()
        self.optimizer.close(final_exchange=self.config.sync.final_exchange)
        self.optimizer.average_buffers()
        if self._reported_step < self.step:
            self._write_step()

    def _end_early(self) -> None:
        if self.stop is None or not self.stop.is_due(self.step):
            return
        with self._apart():
            self.save()
        self.stop.saved()
        raise Stopped(signal.SIGTERM)

    def evaluate(self, num_batches: int, *, part: int = 0, num_parts: int = 1) -> tuple[list[float], int]:
        """Evaluate the global parameters on at most so many held-out batches, shared out in parts, at least one each.

        Returns:
            Mean loss and metric, and over how many samples.
        """
        self._policy.before_evaluation()
        totals: list[float] = []
        count = 0
        batches = list(self.held_out(num_batches))
        self.model.eval()
        with self.optimizer.global_parameters(may_lag=True), torch.no_grad():
            for inputs, targets in batches[part % len(batches) :: num_parts]:
                shown = self._passes.held_out(inputs.to(self.device), targets.to(self.device)).tolist()
                weight = self._num_samples(targets)  # the last batch may be smaller
                before = totals or [0.0] * len(shown)
                totals = [total + value * weight for total, value in zip(before, shown, strict=True)]
                count += weight
        self.model.train()
        return [total / count for total in totals], count

    def lr_factor(self) -> float:
        """Return the present step's learning rate as a share of its peak."""
        return self._policy.lr_scale() * lr_factor(self.step, config=self.config)

    def evaluate_at_end(self) -> list[float]:
        """Evaluate on all the batches that the end deserves, write it down, and return loss and metric."""
        shown, targets = self.evaluate(self.config.output.final_eval_batches)
        self.meter.write_eval(self.step, shown=shown, targets=targets)
        return shown

    def save(self) -> None:
        if self.checkpoints is None:
            return
        state = {
            "model": {name: parameter.detach() for name, parameter in _trained(self.model).items()},
            "frozen": self._frozen_sha256(),
            "buffers": dict(self.model.named_buffers()), "optimizer": checked_state(self.optimizer.state_dict()),
            "batches": self.batches.state_dict(), "random": _random_state(self.device),
            "meter": self.meter.state_dict(stalled_s=self.optimizer.statistics.stalled_s), "step": self.step,
            **({} if self.memory is None else {"memory": self.memory.state_dict()}),
        }  # fmt: skip
        began_s = time.monotonic()
        self.checkpoints.save(state, step=self.step, drift_steps=self._drift_steps)
        if self.optimizer.transport.replica == 0 and self._step_s and self.config.output.out is not None:
            note_cost(self.config.run_dir, cost_s=time.monotonic() - began_s, step_s=self._step_s)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state; refuse one that does not fit this run."""
        try:
            with torch.no_grad():
                if state.get("frozen", "") != self._frozen_sha256():
                    raise ValueError("the frozen weights are not those it was trained beside; restore their folder")
                _copy_all(state["model"], _trained(self.model))
                _copy_all(state["buffers"], dict(self.model.named_buffers()))
            self.optimizer.load_state_dict(_in_shards(state["optimizer"], self.optimizer))
            self.batches.load_state_dict(state["batches"])
            self.meter.load_state_dict(state["meter"])
            if self.memory is not None:
                self.memory.load_state_dict(state["memory"])
            _set_random_state(state["random"], self.device)
            self.step = int(state["step"])
            # a run that was stopped in its final exchange has yet to write its last line
            self._reported_step = self.step - (self.step == self.config.run.steps)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {error!r}; start a new run with --overwrite"
            ) from error

    def _frozen_sha256(self) -> str:
        """Return a hash of the frozen parameters, which checkpoints leave out; empty where there are none."""
        if self._frozen is None:
            frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
            self._frozen = tensors_sha256(frozen) if frozen else ""
        return self._frozen

    def _train_step(self) -> None:
        self._policy.before_step()
        statistics = self.optimizer.statistics
        began_s, exchanged_s, stalled_s = time.monotonic(), statistics.exchanging_s, statistics.stalled_s
        factor = self.lr_factor()
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        inputs, targets = next(self.batches)
        num_samples = self._num_samples(targets)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.optimizer.count_tokens(num_samples)
        self.optimizer.next_stop = self._next_stop()
        needs_closure = self.optimizer.needs_closure
        shown = self._driven_step(inputs, targets) if needs_closure else self._plain_step(inputs, targets)
        self.step = self.optimizer.steps_done
        self.optimizer.zero_grad(set_to_none=True)
        self.meter.train_step(shown[0], samples=num_samples)
        now_s = time.monotonic()
        if self.recorder is not None:
            # steps with an exchange would look like stalls if what it takes counted as their work
            done_s = now_s - (self.optimizer.statistics.exchanging_s - exchanged_s)
            # the value of a loss on a GPU would have to be waited for
            loss = float(shown[0]) if shown.device.type == "cpu" else None
            forward_s, backward_s = self._passes.timing.take()
            self.recorder.add_step(
                self.step, started_s=began_s, done_s=done_s, loss=loss, forward_s=forward_s, backward_s=backward_s,
                stalled_s=statistics.stalled_s - stalled_s,
            )  # fmt: skip
        if self._last_step_s is not None:
            self._deadlines.observe_step(now_s - self._last_step_s)
            self._step_s = now_s - began_s
        self._last_step_s = now_s
        took_s = time.monotonic() - began_s - (self.optimizer.statistics.stalled_s - stalled_s)
        self._policy.after_step(self.step, took_s=took_s)

    def _plain_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        _, shown = self._passes.backward(inputs, targets, factor=self.lr_factor())
        self.optimizer.average_gradients()
        self._passes.clip()
        self.optimizer.step()
        return shown

    def _driven_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Let the method ask for this batch's gradients wherever it wants; return what the last one showed."""
        before = _random_state(self.device)
        found: list[Tensor] = []

        def closure() -> Tensor:
            if found:  # the method takes differences of gradients: dropout must fall alike in all of a step
                _set_random_state(before, self.device)
            self.optimizer.zero_grad(set_to_none=True)
            loss, shown = self._passes.backward(inputs, targets, factor=self.lr_factor())
            self._passes.clip()
            found.append(shown)
            return loss

        self.optimizer.step(closure)
        return found[-1]

    def _next_stop(self) -> int:
        """Return the next step from here after which all replicas do something together."""
        every = [self.config.run.steps, self.config.output.eval_every, self.config.output.checkpoint_every]
        if self.stop is not None and self.stop.step >= self.step:
            every.append(self.stop.step)
        return min(-(-self.step // steps) * steps for steps in every if steps)

    def _report(self) -> None:
        # a replica that catches up may pass over the very step
        is_due = self.step // self.config.output.log_every > self._reported_step // self.config.output.log_every
        is_last = self.step == self.config.run.steps
        if is_due and not is_last:  # the last line follows the final exchange, whose bytes and time it holds
            self._write_step()
        if not is_last and self._is_due(self.config.output.eval_every):
            # shared out, so that no replica waits for the one that evaluates
            part, num_parts = self._policy.share()
            with self._apart():
                shown, targets = self.evaluate(self.config.output.eval_batches, part=part, num_parts=num_parts)
            self.meter.write_eval(self.step, shown=shown, targets=targets)
        self._policy.after_report(self.meter.interval_loss() if is_last else self.meter.latest_loss)

    def _write_step(self) -> None:
        self._reported_step = self.step
        self.meter.write_step(
            self.step, stalled_s=self.optimizer.statistics.stalled_s,
            rounds_in_flight=len(self.optimizer.rounds_in_flight),
        )  # fmt: skip

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        return self.watch.apart() if self.watch else contextlib.nullcontext()

    def _is_due(self, every: int | None) -> bool:
        is_last = self.step == self.config.run.steps
        return is_last or bool(every and self.step % every == 0)


def _compiled(loss: Loss) -> Loss:
    """Compile at the first call; a failure of the compiler ends the run with one error instead of its traceback."""
    compiled = torch.compile(loss)

    def run(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return compiled(inputs, targets)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ThinwireError(
                f"--compile failed: {reason}; fix the compiler, or start a new run without --compile"
            ) from error

    return run


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _in_shards(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state with DTensors where its parameters are; a checkpoint holds their shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            name: as_shard(value, like=parameters[number]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": moments}


def _copy_all(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    if set(saved) != set(own):
        raise ValueError(f"it has {len(saved)} tensors, the model {len(own)}")
    for name, parameter in own.items():
        tensor = local_shard(parameter)
        if saved[name].shape != tensor.shape:
            raise ValueError(f"{name} has the shape {tuple(saved[name].shape)}, the model's {tuple(tensor.shape)}")
        tensor.copy_(saved[name])


def _random_state(device: torch.device) -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), next_gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
