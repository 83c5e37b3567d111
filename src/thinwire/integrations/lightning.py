"""Lightning over thin wires: a strategy for `lightning.Trainer` in which each replica is one trainer of its own.

Fabric needs none: `fabric.setup(model, optimizer)` takes a `DistributedOptimizer` as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.errors import CheckpointError, DesyncError, MissingExtra, excluded, refusal
from thinwire.integrations.hooks import check_hooks
from thinwire.integrations.run_schedule import RunSchedule
from thinwire.integrations.tracking import metrics
from thinwire.sync.method import Method
from thinwire.sync.multi_optimizer import split_model
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport
from thinwire.transport.connect import check_way_to_join
from thinwire.transport.secret import need_pyzmq

if TYPE_CHECKING:
    from thinwire.training.elastic.own_loop import ElasticOptimizer

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
except ImportError as error:
    raise MissingExtra.of("lightning", extra="lightning") from error

_KINDS = (Trainer, SingleDeviceStrategy, DDPStrategy, CSVLogger, _TrainingEpochLoop, _AcceleratorConnector)
# Of TensorBoard's and CSV's loggers, and of others; a logger makes its folder when it logs first.
_LOGGER_FOLDERS = ("_root_dir", "_save_dir")
_LOCAL = "thinwire_local_parameters"


class DiLoCoStrategy(SingleDeviceStrategy):
    """Strategy of one replica on one device: pass it as `lightning.Trainer(strategy=...)`.

    Each optimizer of `configure_optimizers` is wrapped in a `DistributedOptimizer`, over its own parameters where there
    are several. The end of training does the final exchange. Validation, test and prediction use the global parameters.
    Checkpoints hold them as the model, and the replica's own parameters beside them. Each replica writes to `replica-N`
    below the trainer's, the loggers' and the checkpoints' folders. thinwire's numbers are logged as `thinwire/NAME`.

    In an elastic run, `max_steps` is the last step of the run, and `global_step` the step that the run has reached.

    Args:
        method: The method, or its name: see `thinwire.methods`.
        transport: Joins the replicas: `thinwire.connect(solo=True)`; None for an elastic run.
        uri: Address of the elastic run, see `thinwire.join`; None for the variable THINWIRE_JOIN.
        device: The replica's device; by default the first one of the trainer's accelerator.
        options: Further arguments by name: of `DistributedOptimizer`, or of `thinwire.join`.
        **more: For Lightning's `SingleDeviceStrategy`.

    Attributes:
        wrapped: The optimizers, in the order of `configure_optimizers`, from the start of training on.
        diloco: The first of them.

    Raises:
        ValueError: Nothing joins this trainer to the others.
        ThinwireError: This version of Lightning lacks a name that is needed.
    """

    strategy_name = "thinwire"
    optimizers: Any

    def __init__(
        self, *, method: Method | str, transport: Transport | None = None, uri: str | None = None,
        device: str | torch.device | None = None, options: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        check_hooks("lightning", _KINDS)
        check_way_to_join(transport, uri)
        super().__init__(device="cpu" if device is None else device, **more)
        # Lightning fills it with the accelerator's devices, unless it holds some
        self.parallel_devices: list[torch.device] = [] if device is None else [self._root_device]
        self.transport = transport
        self.wrapped: tuple[DistributedOptimizer, ...] = ()
        self._method, self._uri, self._options = method, uri, dict(options or {})
        self._is_finished = False
        self._kept: dict[str, torch.Tensor] | None = None
        self._trained: dict[str, torch.nn.Parameter] = {}
        self._schedules: list[RunSchedule] = []

    @property
    def root_device(self) -> torch.device:
        """The replica's device."""
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @property
    def diloco(self) -> DistributedOptimizer | None:
        """The first optimizer, from the start of training on."""
        return self.wrapped[0] if self.wrapped else None

    def setup_environment(self) -> None:
        """Move the folders of this replica apart from those of the others."""
        super().setup_environment()
        if self.transport is not None and self.transport.num_replicas > 1 and self.lightning_module is not None:
            _write_as(self.lightning_module.trainer, self.transport.replica)

    def setup_optimizers(self, trainer: Any) -> None:
        """Wrap the optimizers of the module; in an elastic run, join it now.

        Raises:
            ValueError: Two optimizers hold one parameter, or an elastic run has several or lacks `max_steps`.
            DesyncError: The elastic run ends at another step.
        """
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self.transport is None:
            self.wrapped = (self._join(trainer, module),)
        elif self.optimizers:
            parts = split_model(module, self.optimizers) if len(self.optimizers) > 1 else [module]
            self.wrapped = tuple(
                DistributedOptimizer(part, one, method=self._method, transport=self.transport, **self._options)
                for part, one in zip(parts, self.optimizers, strict=True)
            )
        self.optimizers = list(self.wrapped)
        self._is_finished = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Do the module's step, and log thinwire's numbers beside what it logs."""
        result = super().training_step(*args, **kwargs)
        module = self.lightning_module
        assert module is not None
        for index, one in enumerate(self.wrapped):
            prefix = f"thinwire/{index}/" if len(self.wrapped) > 1 else "thinwire/"
            module.log_dict({f"{prefix}{name}": float(value) for name, value in metrics(one).items()})
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step; in an elastic run, count the steps that were passed over, and stop with the run."""
        if self.transport is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        one: Any = self.wrapped[0]
        before = one.steps_done
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        self._move_by(self.lightning_module.trainer, one.steps_done - before - 1)
        if one.is_finished:
            self.lightning_module.trainer.should_stop = True
        return result

    def on_train_end(self) -> None:
        """Exchange the last steps and keep the global parameters in the model."""
        for one in self.wrapped:
            one.close(final_exchange=True)
        self._fill(self._global_values())
        self._is_finished = True

    def on_exception(self, exception: BaseException) -> None:
        """Close without any exchange."""
        for one in self.wrapped:
            one.__exit__(type(exception), exception, exception.__traceback__)

    def on_validation_start(self) -> None:
        """Put the global parameters into the model."""
        if self.wrapped and not self._is_finished and self._kept is None:
            self._kept = {name: p.detach().clone() for name, p in self._trained.items()}
            self._fill(self._global_values())

    def on_validation_end(self) -> None:
        """Put the replica's own parameters back."""
        if self._kept is not None:
            self._fill(self._kept)
            self._kept = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the global parameters."""
        state = super().lightning_module_state_dict()
        return state if not self.wrapped or self._is_finished else {**state, **self._global_values()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with the replica's own parameters."""
        if self.wrapped and not self._is_finished:
            own = self._trained if self._kept is None else self._kept
            checkpoint[_LOCAL] = {name: tensor.detach() for name, tensor in own.items()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and the replica's own parameters.

        Raises:
            CheckpointError: The checkpoint is of another model.
            ValueError: The run is elastic.
        """
        if self.transport is None:
            raise excluded(
                "ckpt_path", "an elastic run", why="a trainer goes on from the state of the others",
                remedy="to load the model of a checkpoint by load_from_checkpoint() for a new run",
            )  # fmt: skip
        super().load_optimizer_state_dict(checkpoint)
        if _LOCAL in checkpoint:
            if set(checkpoint[_LOCAL]) != set(self._trained):
                raise CheckpointError("the checkpoint holds other trained parameters; resume with the same model")
            self._fill(checkpoint[_LOCAL])

    def _join(self, trainer: Any, module: Any) -> ElasticOptimizer:
        if len(self.optimizers) != 1:
            raise refusal(
                "an elastic run has one optimizer", got=len(self.optimizers), allowed="1",
                remedy="transport=thinwire.connect(solo=True) for optimizers that step in turns, or "
                "thinwire.MultiOptimizer where all step together",
            )  # fmt: skip
        if trainer.max_steps < 1:
            raise refusal("an elastic run counts steps, not epochs", got=f"max_steps={trainer.max_steps}",
                          allowed="at least 1", remedy="lightning.Trainer(max_steps=1000)")  # fmt: skip
        need_pyzmq()
        from thinwire.training.elastic.own_loop import join  # needs pyzmq, which other trainers do without

        self._schedules = [RunSchedule(one.scheduler) for one in self.lr_scheduler_configs if one.interval == "step"]
        found = join(
            self._uri, module, self.optimizers[0], method=self._method, steps=trainer.max_steps, **self._options
        )
        if found.next_stop != trainer.max_steps:
            found.__exit__(DesyncError, None, None)
            raise DesyncError(
                f"the run ends at step {found.next_stop}, and this trainer at {trainer.max_steps}; give it the same "
                f"max_steps"
            )
        self._move_by(trainer, found.steps_done)
        _write_as(trainer, found.transport.replica)
        return found

    def _move_by(self, trainer: Any, passed: int) -> None:
        """Count steps that others did, so that the trainer's limits and its schedules are those of the run."""
        if not passed:
            return
        loop = trainer.fit_loop.epoch_loop
        step = (
            loop.automatic_optimization.optim_progress.optimizer.step
            if trainer.lightning_module.automatic_optimization
            else loop.manual_optimization.optim_step_progress
        )
        step.total.completed += passed
        step.total.ready += passed
        for schedule in self._schedules:
            schedule.move_by(passed)

    def _global_values(self) -> dict[str, torch.Tensor]:
        with ExitStack() as stack:
            for one in self.wrapped:
                stack.enter_context(one.global_parameters(may_lag=True))
            return {name: p.detach().clone() for name, p in self._trained.items()}

    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(values[name])


def _write_as(trainer: Any, replica: int) -> None:
    """Let a trainer, its loggers and its checkpoints write below `replica-N` folders; once a trainer."""
    name = f"replica-{replica}"

    def own(path: Any) -> str:
        return str(path if name in Path(path).parts else Path(path) / name)

    trainer._default_root_dir = own(trainer._default_root_dir)
    for logger in trainer.loggers:
        for folder in _LOGGER_FOLDERS:
            if getattr(logger, folder, None) is not None:
                setattr(logger, folder, own(getattr(logger, folder)))
    saving: list[Any] = [one for one in trainer.callbacks if isinstance(one, Checkpoint)]
    for callback in saving:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = own(callback.dirpath)
