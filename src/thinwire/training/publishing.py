"""Published weights of a run: its global parameters once an interval of rounds, as `thinwire follow` reads them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable

from torch import nn

from thinwire.carriers.open import CarrierAddress, open_carrier, read_address
from thinwire.publish.publisher import WeightPublisher
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.config import TrainConfig, config_text
from thinwire.training.loop import LoopPolicy
from thinwire.transport.secret import SECRET_BYTES, Secret

ADDRESS_FILE = "follow-address.txt"
_FLUSH_S = 600.0


class PublishedSteps(LoopPolicy):
    """Policy of a loop whose replica 0 publishes the global parameters at each multiple of the sync interval.

    Args:
        optimizer: Of the replica.
        model: Whose parameters it trains.
        config: With the address, whose secret lies in a file of the run's folder.
        files: Small files for followers.
        warn: Called with one line for each version that could not be published.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, model: nn.Module, config: TrainConfig, *, files: dict[str, str],
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        self._optimizer = optimizer
        self._interval = max(1, optimizer.method.schedule.sync_interval)
        carrier = open_carrier(_address_of(config), may_create=True)
        given = {name: content.encode() for name, content in {"run.json": config_text(config), **files}.items()}
        self._publisher = WeightPublisher(model, to=carrier, files=given, on_problem=warn)

    def after_step(self, step: int, *, took_s: float) -> None:
        if step % self._interval == 0:
            self._publish(step)

    def close(self, step: int) -> None:
        """Publish the result of the run, and wait until it is uploaded."""
        self._publisher.flush(deadline_s=_FLUSH_S)
        self._publish(step)
        self._publisher.flush(deadline_s=_FLUSH_S)

    def _publish(self, step: int) -> None:
        with self._optimizer.global_parameters(may_lag=True):
            self._publisher.publish(step)


def _address_of(config: TrainConfig) -> CarrierAddress:
    """Return the address with the secret that the run's folder holds, made with the first version."""
    path = config.run_dir / ADDRESS_FILE
    with contextlib.suppress(FileNotFoundError):
        known = read_address(path.read_text())
        if known.place == config.output.publish:
            return known
    address = CarrierAddress(
        place=str(config.output.publish), secret=Secret(key=secrets.token_bytes(SECRET_BYTES))
    )  # fmt: skip
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(address.text() + "\n")
    return address
