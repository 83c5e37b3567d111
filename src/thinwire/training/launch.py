"""Local launcher: replicas as processes of this machine, which meet in a private file and stop together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.errors import Stopped, ThinwireError, TransportError, WorkerFailed
from thinwire.files import write_whole
from thinwire.monitor.detect.hangs import HANGS
from thinwire.monitor.runlog.run_identity import read_identity
from thinwire.monitor.runlog.writer import last_beat_s, write_obituary
from thinwire.training.checkpoints.replica_checkpoints import Identity, ReplicaCheckpoints, choose_step, verify_all
from thinwire.training.config import TrainConfig
from thinwire.transport.addresses import RENDEZVOUS_FILE

# Folders of the ranks of replicas that do not lead: each holds what a run of its own would, for the same shard.
RANKS = "ranks"
_POLL_S = 0.1
# Seconds from SIGTERM to SIGKILL for replicas that the launcher stops.
_STOP_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailure:
    """The end of a replica's process that did not succeed.

    Attributes:
        exitcode: Not 0; negative for a signal.
        was_stopped: Whether the launcher ended it, because another one had failed before.
    """

    exitcode: int
    was_stopped: bool = False


def launch(config: TrainConfig, *, module: str, is_resumed: bool) -> dict[str, Any]:
    """Train all replicas on this machine and return the run's summary.

    Must be called from the main thread: it handles SIGINT, SIGTERM and SIGHUP while replicas run.

    Args:
        config: Resolved and checked; the run's folder is made.
        module: What each replica runs (`python -m`), with the run's folder, this process's id and `resume` or `start`.
        is_resumed: Whether to go on from a checkpoint.

    Raises:
        WorkerFailed: A replica ended; names it and the reason. The others have ended too.
        Stopped: A signal came.
    """
    run_dir, ranks = config.run_dir, config.parallel.ranks
    for rank in range(config.num_replicas * ranks):
        _failure_path(run_dir, rank, ranks=ranks).unlink(missing_ok=True)
    command = [sys.executable, "-m", *module.split(), str(run_dir.resolve()), str(os.getpid())]
    command.append("resume" if is_resumed else "start")
    # the folder's mode is 0700: no other user can leave notes for the replicas, and no port is opened for them
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-rendezvous-", ignore_cleanup_errors=True) as folder,
        _noted_signals() as signals,
    ):
        replicas = _Replicas(run_dir / "logs")
        names = [process_name(rank, ranks=ranks) for rank in range(config.num_replicas * ranks)]
        try:
            replicas.start(command, names=names, rendezvous=Path(folder) / "store")
            failures = replicas.wait(signals)
        finally:
            replicas.stop(signals[0] if signals else signal.SIGTERM)
    if signals:
        raise Stopped(signals[0])
    if failures:
        failures |= replicas.later_failures(failures)
        _report_killed(failures, run_dir=run_dir, ranks=ranks)
        raise WorkerFailed(explain(failures, run_dir=run_dir, ranks=ranks))
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
    run = read_identity(config.run_dir).run
    for replica in range(config.num_replicas):
        identity = Identity(
            run=run, replica=replica, num_replicas=config.num_replicas, config_digest=config.digest()
        )  # fmt: skip
        for rank in range(config.parallel.ranks):
            folder = rank_folder(config.run_dir, rank)
            found.append(verify_all(ReplicaCheckpoints(folder, identity=identity)))
    return choose_step(found)


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Return the folder in which a rank of a replica keeps its files; that of the run for its first rank."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def process_name(rank: int, *, ranks: int) -> str:
    """Return how messages name a process of a run.

    Args:
        rank: Among the processes of all replicas.
        ranks: Of each replica.

    Example:
        >>> process_name(1, ranks=1), process_name(2, ranks=2), process_name(3, ranks=2)
        ('replica 1', 'replica 1', 'replica 1 rank 1')
    """
    replica, place = divmod(rank, ranks)
    return f"replica {replica} rank {place}" if place else f"replica {replica}"


def explain(failures: Mapping[int, ProcessFailure], *, run_dir: Path, ranks: int = 1) -> str:
    """Describe in one line which replica failed first and why; the others failed because of it.

    A replica that the launcher stopped is named only where it was silent before, as one that is paused is.

    Args:
        failures: By rank, in the order in which the launcher saw them.
        run_dir: Holds the replicas' last words and records.
        ranks: Of each replica.
    """
    words = {replica: _read_failure(run_dir, replica, ranks=ranks) for replica in failures}
    own = [replica for replica, said in words.items() if said and not said["is_consequence"]]
    silent = _silent_before_stop(failures, run_dir=run_dir, ranks=ranks)
    killed = [
        replica
        for replica, failure in failures.items()
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM and not failure.was_stopped
    ]
    others = [replica for replica, failure in failures.items() if not failure.was_stopped]
    replica = next(iter([*own, *killed, *silent, *others, *failures]))
    failure, said, name = failures[replica], words[replica], process_name(replica, ranks=ranks)
    log_path = _log_path(run_dir / "logs", name, ".err")
    if said:
        log = "" if said["is_expected"] else f"; see {log_path}"
        return f"{name}: {said['message']}{log}"
    if replica in silent:
        heard = ((process_name(other, ranks=ranks), words[other]) for other in others)
        more = next((f"; {other}: {said['message']}" for other, said in heard if said), "")
        return f"{name} {_silence_text(silent[replica])}{more}"
    if failure.exitcode < 0:
        signal_name = signal.Signals(-failure.exitcode).name
        hint = " (by hand, or because the system ran out of memory)" if signal_name == "SIGKILL" else ""
        return f"{name} was ended by {signal_name}{hint}; the other replicas were stopped"
    return f"{name} ended with exit code {failure.exitcode}; see {log_path}"


def _silent_before_stop(
    failures: Mapping[int, ProcessFailure], *, run_dir: Path, ranks: int
) -> dict[int, float]:  # fmt: skip
    """Return the replicas that the launcher had to kill and that were silent before, with the seconds of silence."""
    found = {}
    for rank, failure in failures.items():
        if not failure.was_stopped or -failure.exitcode != signal.SIGKILL:
            continue
        replica, place = divmod(rank, ranks)
        last_s = last_beat_s(rank_folder(run_dir, place), rank=replica)
        if last_s is not None and time.monotonic() - last_s > _STOP_S + HANGS.silence_s:
            found[rank] = time.monotonic() - last_s
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _silence_text(silent_s: float) -> str:
    return f"was silent for {silent_s:.0f} s; stopped by the launcher"


def _report_killed(failures: Mapping[int, ProcessFailure], *, run_dir: Path, ranks: int) -> None:
    """Add the last record of each replica that could not write it: killed, silent, or stopped by the launcher.

    One that the launcher stopped, and that was not silent before, ends without a fault of its own.
    """
    silent = _silent_before_stop(failures, run_dir=run_dir, ranks=ranks)
    for rank, failure in failures.items():
        is_killed = failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
        if rank in silent:
            error = _silence_text(silent[rank])
        elif failure.was_stopped:
            error = ""
        elif is_killed:
            error = f"was ended by {signal.Signals(-failure.exitcode).name}"
        else:
            continue
        replica, place = divmod(rank, ranks)
        write_obituary(rank_folder(run_dir, place), rank=replica, at_s=time.monotonic(), error=error)


def _log_path(logs: Path, name: str, suffix: str) -> Path:
    return logs / (name.replace(" ", "-") + suffix)


class _Replicas:
    """The processes of all replicas, each with a session and log files (`replica-N.out`, `replica-N.err`) of its own.

    Where a replica has several ranks, those of its rank K are named `replica-N-rank-K`.

    Args:
        logs: Folder of the log files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()

    def start(self, command: Sequence[str], *, names: Sequence[str], rendezvous: Path) -> None:
        """Start all replicas.

        Args:
            command: The same for each; ranks are in the environment, as torchrun would set them.
            names: Of the processes, by rank.
            rendezvous: File that they meet in.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        size = str(len(names))
        for rank, name in enumerate(names):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            out_path, err_path = (_log_path(self._logs, name, suffix) for suffix in (".out", ".err"))
            with out_path.open("wb") as out, err_path.open("wb") as err:
                self._processes[rank] = subprocess.Popen(
                    command, env={**os.environ, **ranks, RENDEZVOUS_FILE: str(rendezvous)}, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip

    def wait(self, signals: Sequence[int]) -> dict[int, ProcessFailure]:
        """Wait until all have succeeded, any has failed, or a signal came; return the failures."""
        while not signals:
            codes = {replica: process.poll() for replica, process in self._processes.items()}
            failures = {replica: ProcessFailure(exitcode=code) for replica, code in codes.items() if code}
            if failures or all(code == 0 for code in codes.values()):
                return failures
            time.sleep(_POLL_S)
        return {}

    def stop(self, number: int) -> None:
        """Send a signal to all that still run, and SIGKILL to those that do not end by it."""
        self._send(number)
        until_s = time.monotonic() + _STOP_S
        self._wait_until(until_s)
        self._killed = self._send(signal.SIGKILL)
        # bounded: a process that waits for a device in the kernel does not end by SIGKILL either
        self._wait_until(time.monotonic() + _STOP_S)

    def later_failures(self, earlier: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Return the failures seen after `earlier`, with those that `stop` caused marked so."""
        codes = {replica: process.poll() for replica, process in self._processes.items() if replica not in earlier}
        return {
            replica: ProcessFailure(exitcode=code, was_stopped=replica in self._killed or code == -signal.SIGTERM)
            for replica, code in codes.items()
            if code
        }

    def _send(self, number: int) -> set[int]:
        running = {replica for replica, process in self._processes.items() if process.poll() is None}
        for replica in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[replica].pid, number)
        return running

    def _wait_until(self, until_s: float) -> None:
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until_s - time.monotonic()))


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run in a list instead of acting on them."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_failure_report(run_dir: Path, rank: int, error: Exception, *, ranks: int = 1) -> None:
    """Write down why a process of a local run ends, for `launch` to report.

    Args:
        run_dir: The run's folder.
        rank: Among the processes of all replicas.
        error: Why.
        ranks: Of each replica.
    """
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
        write_whole(_failure_path(run_dir, rank, ranks=ranks), json.dumps(record))


def _failure_path(run_dir: Path, rank: int, *, ranks: int) -> Path:
    return _log_path(run_dir / "logs", process_name(rank, ranks=ranks), ".error.json")


def _read_failure(run_dir: Path, rank: int, *, ranks: int) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = json.loads(_failure_path(run_dir, rank, ranks=ranks).read_text())
    except (OSError, ValueError):
        return None
    return said
