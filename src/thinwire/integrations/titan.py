"""torchtitan over thin wires: an `OptimizersContainer` whose optimizers step one replica of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.errors import CheckpointError, MissingExtra, refusal
from thinwire.sync.multi_optimizer import MultiOptimizer
from thinwire.sync.optimizer import DistributedOptimizer

try:
    from torchtitan.components.optimizer import OptimizersContainer
except ImportError as error:
    raise MissingExtra.of("torchtitan", extra="titan") from error


class DiLoCoOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container of optimizers, of which one `DistributedOptimizer` wraps all.

    Call `close` after training: it does the final exchange. torchtitan's checkpoints would hold the inner optimizers
    alone, so they are refused: save with `thinwire.integrations.dcp`.

    Args:
        config: The section of the job's config.
        model_parts: The model; without pipeline parallelism there is one part.

    Attributes:
        diloco: The optimizer of the replica.

    Raises:
        ValueError: There are several model parts.
    """

    optimizers: Any

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Section `optimizer` of a job's config: torchtitan's own fields, and these.

        Attributes:
            method: The method's name, or a `Method`.
            transport: Joins the replicas: `thinwire.connect(solo=True)`; None trains alone.
            options: Further arguments of `DistributedOptimizer`, by name.
        """

        method: Any = "iso-loco"
        transport: Any = None
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if len(model_parts) != 1:
            raise refusal(
                "the model is cut into parts by pipeline parallelism", got=len(model_parts), allowed="1 part",
                remedy="FSDP inside the replica",
            )  # fmt: skip
        super().__init__(config, model_parts=model_parts)
        inner = self.optimizers[0] if len(self.optimizers) == 1 else MultiOptimizer(self.optimizers)
        self.diloco = DistributedOptimizer(
            model_parts[0], inner, method=config.method, transport=config.transport, **config.options
        )
        self.optimizers = [self.diloco]

    def close(self) -> None:
        """Exchange the last steps, and put the global parameters into the model."""
        self.diloco.close(final_exchange=True)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: torchtitan's layout has no place for rounds in flight.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            "torchtitan's checkpoint would lack thinwire's state; set checkpoint.enable to False, and call "
            "thinwire.integrations.dcp.save(path, model, container.diloco)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, as `state_dict` does.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            "torchtitan's checkpoint lacks thinwire's state; call thinwire.integrations.dcp.load(path, model, "
            "container.diloco)"
        )
