"""`thinwire train` with 1-bit Adam and its relatives: what is filled in, and what is refused before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.training.build import check
from thinwire.training.config import TrainConfig, resolve

METHODS = ("one-bit-adam", "zero-one-adam", "one-bit-lamb")


def config_of(method: str, **options: int) -> TrainConfig:
    return resolve(TrainConfig.of(method=method, **options), world_size=None, cores=2, home=Path("/home/nobody"))


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_go_together(method: str) -> None:
    config = config_of(method)
    assert config.sync.sync_interval is None
    check(config)


def test_a_learning_rate_that_rises_when_the_variance_freezes_is_refused() -> None:
    check(config_of("one-bit-adam", warmup_steps=100))
    for method in ("one-bit-adam", "one-bit-lamb"):
        with pytest.raises(ValueError, match=r"--warmup-steps.* ends after .*; got 101; allowed 0 to 100"):
            check(config_of(method, warmup_steps=101))
