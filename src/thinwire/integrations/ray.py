"""Elastic replicas as Ray actors: Ray places them and starts them again, and the others go on meanwhile.

In `ray.train.torch.TorchTrainer`, `thinwire.connect()` takes the process group that Ray makes, and `connect()` from
here hides it, so that libraries in the worker see one replica.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.elastic.coordinator_server import coordinator_keys, own_key
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.errors import MissingExtra, RunOver, refusal
from thinwire.sync.method import Method
from thinwire.training.elastic.job import LoopJob
from thinwire.training.elastic.own_loop import ElasticOptimizer, RunPlace, join_at
from thinwire.transport.addresses import free_port
from thinwire.transport.connect import connect as connect_job
from thinwire.transport.connect import replace_default_group
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.secret import SECRET_BYTES, Secret

# Ray starts an actor again, and its task, as often as it dies.
_FOR_EVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRun:
    """Elastic run on a Ray cluster, as one replica sees it; made by `run_elastic`.

    Attributes:
        index: Number of this replica's actor, from 0; it is the same after the actor was started again.
        replicas: Number of actors.
        uri: Address of the run, with its secret.
        coordinator: Actor that starts the coordinator.
    """

    index: int
    replicas: int
    uri: str = field(repr=False)  # holds the secret
    coordinator: Any

    def join(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, method: Method | str = "iso-loco",
        steps: int | None = None,
    ) -> ElasticOptimizer:  # fmt: skip
        """Join the run; see `thinwire.join`."""
        ray = _ray()
        place = RunPlace(
            invitation=read_invitation(self.uri), folder=Path(), secret_file=None, is_here=False, reach={},
            begin=lambda job: ray.get(self.coordinator.begin.remote(job)),
        )  # fmt: skip
        return join_at(place, model, inner, method=method, steps=steps, replicas=self.replicas)


def connect(**options: Any) -> RecordingTransport:
    """Join the workers of a `TorchTrainer`, as `thinwire.connect(solo=True)` does, in place of Ray's process group.

    Call it first in the training function. Move the model by `prepare_model(model, parallel_strategy=None)`: its
    default would average gradients over all replicas.

    Args:
        **options: Of `thinwire.connect`, without `solo`.

    Raises:
        ValueError, ConnectError: As from `thinwire.connect`.
    """
    replace_default_group()
    return connect_job(solo=True, **options)


def run_elastic(
    train: Callable[[RayRun], Any], *, replicas: int, folder: Path | str,
    options: Mapping[str, Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Run a training function in one Ray actor per replica, and return what each returned.

    Ray places the actors, and starts one again whose process or node died: `train` then runs again and joins the run
    that the others have gone on with. The coordinator runs on the node of this call.

    Args:
        train: Gets the run, and trains within `with run.join(model, inner) as optimizer:`.
        replicas: Number of actors.
        folder: Folder of the coordinator's journal and log on this node; a new one for each run.
        options: Options of the actors, such as `{"num_gpus": 1}`; one CPU each by default.

    Returns:
        What `train` returned, by actor; None for one that came back after the end of the run.

    Raises:
        ValueError: There are no replicas.
        MissingExtra: ray is not installed.
        ray.exceptions.RayTaskError: What `train` raised.
    """
    if replicas < 1:
        raise refusal("a run needs replicas", got=replicas, allowed="1 or more", remedy="replicas=2")
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    secret = Secret(key=secrets.token_bytes(SECRET_BYTES))
    Path(folder).mkdir(parents=True, exist_ok=True)
    key = coordinator_keys(own_key(Path(folder), is_made=True) or secret).public_bytes
    uri = Invitation(
        host=ray.util.get_node_ip_address(), port=free_port(), secret=secret, coordinator_key=key
    ).text()  # fmt: skip
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )
    lasting = {"max_restarts": _FOR_EVER, "max_task_retries": _FOR_EVER}
    coordinator = ray.remote(_CoordinatorStarter).options(num_cpus=0, scheduling_strategy=here, **lasting)
    starter = coordinator.remote(uri, str(Path(folder).resolve()))
    actor = ray.remote(_ReplicaActor).options(**{"num_cpus": 1, **lasting, **(options or {})})
    actors = [actor.remote() for _ in range(replicas)]
    runs = [RayRun(index=index, replicas=replicas, uri=uri, coordinator=starter) for index in range(replicas)]
    try:
        results: Sequence[Any] = ray.get(
            [one.train.remote(train, run) for one, run in zip(actors, runs, strict=True)]
        )  # fmt: skip
        return list(results)
    finally:
        for one in (*actors, starter):
            ray.kill(one)


class _ReplicaActor:
    """Runs the training function."""

    def train(self, train: Callable[[RayRun], Any], run: RayRun) -> Any:
        """Run it; an actor that comes back after the end returns None."""
        try:
            return train(run)
        except RunOver:
            return None


class _CoordinatorStarter:
    """Starts the coordinator on its node."""

    def __init__(self, uri: str, folder: str) -> None:
        self._place = RunPlace(
            invitation=read_invitation(uri), folder=Path(folder), secret_file=None, is_here=True, reach={}
        )

    def begin(self, job: Mapping[str, Any]) -> None:
        """Start it with a job, where none runs."""
        self._place.ready(lambda: LoopJob.from_json(job))


def _ray() -> Any:
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise MissingExtra.of("ray", extra="ray") from None
