"""Replicas as processes of this machine, started and watched by torch's own elastic launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.errors import Stopped, ThinwireError, TransportError, WorkerFailed
from thinwire.files import write_whole
from thinwire.training.checkpoint import Checkpoints, Identity, choose_step, look
from thinwire.training.config import TrainConfig
from thinwire.training.record_file import write_obituary

_STOP_S = 10


def launch(config: TrainConfig, *, module: str, is_resumed: bool) -> dict[str, Any]:
    """Train all replicas on this machine and return the run's summary.

    Must be called from the main thread: the launcher handles SIGINT and SIGTERM while replicas run.

    Args:
        config: Resolved and checked; the run's folder is made.
        module: What each replica runs (`python -m`), with the run's folder, this process's id and `resume` or `start`.
        is_resumed: Whether to go on from a checkpoint.

    Raises:
        WorkerFailed: A replica ended; names it and the reason. The others have ended too.
        Stopped: A signal came.
    """
    run_dir = config.run_dir
    for replica in range(config.num_replicas):
        _words_path(run_dir, replica).unlink(missing_ok=True)
    command = ["-m", module, str(run_dir.resolve()), str(os.getpid())]
    command.append("resume" if is_resumed else "start")
    launcher = elastic_launch(_launch_config(config), sys.executable)
    with _quiet(), _signals_restored():
        try:
            launcher(*command)
        except ChildFailedError as failed:
            _tell_of_killed(failed.failures, run_dir=run_dir)
            raise WorkerFailed(explain(failed.failures, run_dir=run_dir)) from None
        except SignalException as stop:
            raise Stopped(stop.sigval) from None
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def step_to_resume(config: TrainConfig) -> tuple[int, list[str]]:
    """Choose the checkpoint that the replicas of a local run will go on from.

    Returns:
        The step, 0 for the beginning, and warnings about newer checkpoints that cannot be used.

    Raises:
        CheckpointError: There are checkpoints, but none is whole for all replicas.
    """
    found = []
    for replica in range(config.num_replicas):
        identity = Identity(replica=replica, num_replicas=config.num_replicas, config_digest=config.digest())
        found.append(look(Checkpoints(config.run_dir, identity=identity)))
    return choose_step(found)


def explain(failures: Mapping[int, ProcessFailure], *, run_dir: Path) -> str:
    """Say in one line which replica failed first and why; the others failed because of it.

    Args:
        failures: By rank, in the order in which they were seen.
        run_dir: Holds the replicas' last words.
    """
    words = {replica: _last_words(run_dir, replica) for replica in failures}
    own = [replica for replica, said in words.items() if said and not said["is_consequence"]]
    killed = [
        replica for replica, failure in failures.items() if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
    ]
    replica = next(iter([*own, *killed, *failures]))
    failure, said = failures[replica], words[replica]
    if said:
        log = "" if said["is_expected"] else f"; see {run_dir / 'logs' / f'replica-{replica}.err'}"
        return f"replica {replica}: {said['message']}{log}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (by hand, or because the system ran out of memory)" if name == "SIGKILL" else ""
        return f"replica {replica} was ended by {name}{hint}; the other replicas were stopped"
    log_path = run_dir / "logs" / f"replica-{replica}.err"
    return f"replica {replica} ended with exit code {failure.exitcode}; see {log_path}"


def _tell_of_killed(failures: Mapping[int, ProcessFailure], *, run_dir: Path) -> None:
    """Let the records say of a replica that was killed what it could not: the others end because of it."""
    for replica, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            write_obituary(run_dir, rank=replica, at_s=time.monotonic(), error=f"ended by {name}")


class _Logs(LogsSpecs):
    """`logs/replica-N.out` and `logs/replica-N.err`, without the launcher's folders for attempts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), redirects=Std.ALL)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""  # replicas leave their last words in a file of ours
        stem = {rank: self._folder / f"replica-{rank}" for rank in envs}
        return LogsDest(
            stdouts={rank: f"{path}.out" for rank, path in stem.items()},
            stderrs={rank: f"{path}.err" for rank, path in stem.items()},
            error_files=dict.fromkeys(envs, os.devnull),
        )


def _launch_config(config: TrainConfig) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.num_replicas,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_Logs(config.run_dir / "logs"),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        shutdown_timeout=_STOP_S,
    )


def leave_last_words(run_dir: Path, replica: int, error: Exception) -> None:
    """Write down why a replica of a local run ends, for `launch` to tell."""
    if isinstance(error, OSError):
        text = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    elif isinstance(error, ThinwireError | ValueError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    record = {
        "message": text,
        "is_consequence": isinstance(error, TransportError),
        "is_expected": isinstance(error, ThinwireError | ValueError | OSError),
    }
    # on a full disk even this may fail; the replica's log has the reason then
    with contextlib.suppress(OSError):
        write_whole(_words_path(run_dir, replica), json.dumps(record))


def _words_path(run_dir: Path, replica: int) -> Path:
    return run_dir / "logs" / f"replica-{replica}.error.json"


def _last_words(run_dir: Path, replica: int) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = json.loads(_words_path(run_dir, replica).read_text())
    except (OSError, ValueError):
        return None
    return said


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the launcher's own log away: what matters of it is in our error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _signals_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
