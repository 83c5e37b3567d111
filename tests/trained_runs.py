"""Runs of `thinwire train` inside this process: real training and real files, without processes and sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.runlog.run_identity import new_identity
from thinwire.training import worker
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.worker import ReplicaStart, make_run_folder
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

TEXT = "".join(
    f"{number} replicas say little over a thin wire, and it carries {number + 1}.\n" for number in range(300)
)


def train(folder: Path, **options: Any) -> TrainConfig:
    """Train two replicas of nano for a few steps on a small text; return the resolved options.

    Args:
        folder: Gets the text, the cache and the run.
        options: By their names on the command line, beside or instead of those here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    given = {
        "replicas": 2, "steps": 7, "data": str(folder / "text.txt"), "vocab_size": 300, "batch_size": 2, "seq_len": 32,
        "method": "diloco", "sync_interval": 3, "eval_every": 0, "checkpoint_every": 4, "out": folder / "run",
        "cache_dir": folder / "cache", "threads": 1,
    }  # fmt: skip
    return train_here(TrainConfig.of(**{**given, **options}), home=folder)


def train_here(given: TrainConfig, *, home: Path) -> TrainConfig:
    """Train as `thinwire train` does with these options, with replicas in threads; return the resolved options."""
    config = resolve(given, world_size=None, cores=1, home=home)
    make_run_folder(config, run=new_identity(config_digest=config.digest()), is_resumed=False)

    def replica_main(transport: LoopbackTransport) -> None:
        patch.setattr(worker, "connect", lambda **rest: RecordingTransport(transport))
        worker.run_replica(config, place=ReplicaStart(local_rank=transport.replica, is_prepared=True))

    with pytest.MonkeyPatch.context() as patch:
        thinwire.run_replicas(config.num_replicas, replica_main)
    return config
