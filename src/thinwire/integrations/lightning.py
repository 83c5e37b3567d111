"""Lightning over thin wires: a strategy for `lightning.Trainer` in which each replica is one trainer of its own.

Fabric needs none: `fabric.setup(model, optimizer)` takes a `DistributedOptimizer` as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.errors import CheckpointError, MissingExtra, refusal
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise MissingExtra.of("lightning", extra="lightning") from error

# What the tests have passed with; other versions are not refused, only untried.
TRIED_VERSIONS = {"lightning": "2.6"}
_LOCAL = "thinwire_local_parameters"


class DiLoCoStrategy(SingleDeviceStrategy):
    """Strategy of one replica on one device: pass it as `lightning.Trainer(strategy=...)`.

    The optimizer of `configure_optimizers` is wrapped in a `DistributedOptimizer`. The end of training does the final
    exchange. Validation, test and prediction use the global parameters. Checkpoints hold them as the model, and the
    replica's own parameters beside them. Each replica writes its own: give each its own `default_root_dir`.

    Args:
        method: The method, or its name: see `thinwire.methods`.
        transport: Joins the replicas: `thinwire.connect(solo=True)`.
        device: The replica's device.
        options: Further arguments of `DistributedOptimizer`, by name.
        **more: For Lightning's `SingleDeviceStrategy`.

    Attributes:
        diloco: The optimizer, from the start of training on.
    """

    strategy_name = "thinwire"
    optimizers: Any

    def __init__(
        self, *, method: Method | str, transport: Transport, device: str | torch.device = "cpu",
        options: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(device=device, **more)
        self.transport = transport
        self.diloco: DistributedOptimizer | None = None
        self._method, self._options = method, dict(options or {})
        self._is_finished = False
        self._kept: dict[str, torch.Tensor] | None = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Wrap the one optimizer of the module.

        Raises:
            ValueError: The module has another number of optimizers.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise refusal(
                "the module must have one optimizer", got=len(self.optimizers), allowed="1",
                remedy="thinwire.MultiOptimizer, which joins several",
            )  # fmt: skip
        module = self.lightning_module
        assert module is not None
        self.diloco = DistributedOptimizer(
            module, self.optimizers[0], method=self._method, transport=self.transport, **self._options
        )
        self.optimizers = [self.diloco]
        self._is_finished = False

    def on_train_end(self) -> None:
        """Exchange the last steps and keep the global parameters in the model."""
        assert self.diloco is not None
        self.diloco.close(final_exchange=True)
        self._fill(self._global_values())
        self._is_finished = True

    def on_exception(self, exception: BaseException) -> None:
        """Close without any exchange."""
        if self.diloco is not None:
            self.diloco.abandon()

    def on_validation_start(self) -> None:
        """Put the global parameters into the model."""
        if self.diloco is not None and not self._is_finished and self._kept is None:
            self._kept = {name: p.detach().clone() for name, p in self._trained().items()}
            self._fill(self._global_values())

    def on_validation_end(self) -> None:
        """Put the replica's own parameters back."""
        if self._kept is not None:
            self._fill(self._kept)
            self._kept = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the global parameters."""
        state = super().lightning_module_state_dict()
        return state if self.diloco is None or self._is_finished else {**state, **self._global_values()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with the replica's own parameters."""
        if self.diloco is not None and not self._is_finished:
            own = self._trained() if self._kept is None else self._kept
            checkpoint[_LOCAL] = {name: tensor.detach() for name, tensor in own.items()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer, and the replica's own parameters.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        super().load_optimizer_state_dict(checkpoint)
        if _LOCAL in checkpoint:
            if set(checkpoint[_LOCAL]) != set(self._trained()):
                raise CheckpointError("the checkpoint holds other trained parameters; resume with the same model")
            self._fill(checkpoint[_LOCAL])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        assert self.lightning_module is not None
        return {name: p for name, p in self.lightning_module.named_parameters() if p.requires_grad}

    def _global_values(self) -> dict[str, torch.Tensor]:
        assert self.diloco is not None
        with self.diloco.global_parameters(may_lag=True):
            return {name: p.detach().clone() for name, p in self._trained().items()}

    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(values[name])
