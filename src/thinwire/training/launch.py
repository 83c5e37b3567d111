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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import Stopped, ThinwireError, TransportError, WorkerFailed
from thinwire.files import write_whole
from thinwire.monitor.detect.hangs import HANGS
from thinwire.runlog.writer import last_beat_s, write_obituary
from thinwire.training.agreed_stop import AgreedStop
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints, choose_step, verify_all
from thinwire.training.config import TrainConfig
from thinwire.training.elastic.launch import noted_signals
from thinwire.training.run_origin import run_of
from thinwire.transport.addresses import RENDEZVOUS_FILE

# Folders of the ranks of replicas that do not lead: each holds what a run of its own would, for the same shard.
RANKS = "ranks"
_POLL_S = 0.1
# What ends replicas at once: they take SIGTERM and SIGINT as requests to the launcher, since a whole group gets those.
_END = signal.SIGUSR1
# Seconds from that to SIGKILL for replicas that the launcher stops.
_STOP_S = 10.0
# A stop is given up after so many seconds without a step or a saved checkpoint, and the longest between two steps.
_STUCK_S, _SAVE_S = 10.0, 120.0
# What ends a process again and again would end it once more.
_MOST_RETURNS = 3
# Signals so close together are one: a shell and a wrapper may both pass on Ctrl-C.
_ONE_SIGNAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailure:
    """The end of a replica's process that did not succeed.

    Attributes:
        exitcode: Not 0; negative for a signal.
        was_stopped: Whether the launcher ended it, because another one had failed before.
    """

    exitcode: int
    was_stopped: bool = False


def launch(
    config: TrainConfig, *, module: str, is_resumed: bool, say: Callable[[str], None] = lambda text: None,
    is_saving: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:  # fmt: skip
    """Train all replicas on this machine and return the run's summary.

    Must be called from the main thread: it handles SIGINT, SIGTERM and SIGHUP while replicas run.

    Args:
        config: Resolved and checked; the run's folder is made.
        module: What each replica runs (`python -m`), with the run's folder, this process's id, `resume` or `start`, and
            the file of `AgreedStop`.
        is_resumed: Whether to go on from a checkpoint.
        say: Takes a line about a stop that begins.
        is_saving: Whether replicas save a checkpoint when a signal comes; a run that hangs cannot.

    Raises:
        WorkerFailed: A replica ended; names it and the reason. The others have ended too.
        Stopped: A signal came; the replicas have saved where they could.
    """
    run_dir, ranks = config.run_dir, config.parallel.ranks
    for rank in range(config.num_replicas * ranks):
        _failure_path(run_dir, rank, ranks=ranks).unlink(missing_ok=True)
    command = [sys.executable, "-m", *module.split(), str(run_dir.resolve()), str(os.getpid())]
    command.append("resume" if is_resumed else "start")
    # the folder's mode is 0700: no other user can leave notes for the replicas, and no port is opened for them
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-rendezvous-", ignore_cleanup_errors=True) as folder,
        noted_signals() as signals,
    ):
        names = [process_name(rank, ranks=ranks) for rank in range(config.num_replicas * ranks)]
        stop = AgreedStop.create(Path(folder) / "stop", size=len(names))
        replicas = _Replicas(run_dir / "logs", stop)
        try:
            replicas.start([*command, str(Path(folder) / "stop")], names=names, rendezvous=Path(folder) / "store")
            # stages that micro-batches may skip; with other replicas, these would wait for the same stage
            may_return = range(1, ranks if config.parallel.skip and config.num_replicas == 1 else 1)
            failures = replicas.wait(signals, may_return=may_return, say=say)
            is_finished = bool(signals) and is_saving() and replicas.save(signals, say)
        finally:
            replicas.stop()
            stop.close()
    if signals and not is_finished:
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
    run = run_of(config)
    for replica in range(config.num_replicas):
        for rank in range(config.parallel.ranks):
            own = ReplicaCheckpoints(
                rank_folder(config.run_dir, rank), run=run.run, replica=replica, num_replicas=config.num_replicas,
                config_digest=run.config_digest,
            )  # fmt: skip
            found.append(verify_all(own))
    return choose_step(found)


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Return the folder in which a rank of a replica keeps its files; that of the run for its first rank."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def process_name(rank: int, *, ranks: int) -> str:
    """Return how messages name a process by its rank among those of all replicas, each of so many ranks.

    Example:
        >>> process_name(1, ranks=1), process_name(2, ranks=2), process_name(3, ranks=2)
        ('replica 1', 'replica 1', 'replica 1 rank 1')
    """
    replica, place = divmod(rank, ranks)
    return f"replica {replica} rank {place}" if place else f"replica {replica}"


def explain(failures: Mapping[int, ProcessFailure], *, run_dir: Path, ranks: int = 1) -> str:
    """Describe in one line which replica failed first and why; the others failed because of it.

    A replica that the launcher stopped is named only where it was silent before, as one that is paused is.
    """
    words: dict[int, dict[str, Any] | None] = {}
    for replica in failures:
        words[replica] = None
        with contextlib.suppress(OSError, ValueError):
            words[replica] = json.loads(_failure_path(run_dir, replica, ranks=ranks).read_text())
    own = [replica for replica, said in words.items() if said and not said["is_consequence"]]
    silent = _silent_before_stop(failures, run_dir=run_dir, ranks=ranks)
    killed = [
        replica
        for replica, failure in failures.items()
        if failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, _END) and not failure.was_stopped
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
        is_killed = failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, _END)
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
    """

    def __init__(self, logs: Path, stop: AgreedStop) -> None:
        self._logs = logs
        self._stop = stop
        self._longest_s = 0.0
        # Signals of the launcher's own that a stop takes as the one that began it: a replica was sent that first.
        self._num_echoes = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._num_starts: Counter[int] = Counter()

    def start(self, command: Sequence[str], *, names: Sequence[str], rendezvous: Path) -> None:
        """Start all replicas with one command; the environment holds ranks and the file to meet in, as torchrun."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._command, self._names, self._rendezvous = command, names, rendezvous
        for rank in range(len(names)):
            self._start(rank)

    def _start(self, rank: int) -> None:
        size, mode = str(len(self._names)), "ab" if self._num_starts[rank] else "wb"
        self._num_starts[rank] += 1
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        out_path, err_path = (_log_path(self._logs, self._names[rank], suffix) for suffix in (".out", ".err"))
        with out_path.open(mode) as out, err_path.open(mode) as err:
            self._processes[rank] = subprocess.Popen(
                self._command, env={**os.environ, **ranks, RENDEZVOUS_FILE: str(self._rendezvous)},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def _start_again(self, codes: Mapping[int, int | None], may_return: range, say: Callable[[str], None]) -> None:
        """Start processes again that a signal ended, where the others go on without them."""
        for rank in may_return:
            code, has_begun = codes[rank] or 0, self._stop.has_begun(rank)
            if code < 0 and has_begun and self._num_starts[rank] <= _MOST_RETURNS:
                say(f"{self._names[rank]} was ended by {signal.Signals(-code).name}; it is skipped until it is back")
                self._start(rank)

    def wait(
        self, signals: list[int], *, may_return: range, say: Callable[[str], None]
    ) -> dict[int, ProcessFailure]:  # fmt: skip
        """Wait until all have succeeded, any has failed, or a signal came, to whomever; return the failures."""
        done, done_s = self._stop.steps(), time.monotonic()
        while not signals:
            if number := self._stop.signal():
                signals.append(number)
                self._num_echoes = 1
                break
            if (now := self._stop.steps()) != done:
                if min(done) > 0:  # the first steps of a run take longer than those after them
                    self._longest_s = max(self._longest_s, time.monotonic() - done_s)
                done, done_s = now, time.monotonic()
            self._start_again({rank: one.poll() for rank, one in self._processes.items()}, may_return, say)
            codes = {replica: process.poll() for replica, process in self._processes.items()}
            if any(codes.values()) or all(code == 0 for code in codes.values()):
                return {replica: ProcessFailure(exitcode=code) for replica, code in codes.items() if code}
            time.sleep(_POLL_S)
        return {}

    def save(self, signals: Sequence[int], say: Callable[[str], None]) -> bool:
        """Let all save a checkpoint of one step and end; return whether they came to the end of the run instead.

        Given up by another signal, when one ends otherwise, or when none has done anything for long.
        """
        began_s, most_signals = time.monotonic(), len(signals) + self._num_echoes
        step = self._stop.decide()
        if not step:
            return False
        say(f"stopping: a checkpoint of step {step} is saved first; another signal (Ctrl-C) ends the run at once")
        state, state_s = (self._stop.steps(), 0), time.monotonic()
        while len(signals) <= most_signals:
            if time.monotonic() - began_s < _ONE_SIGNAL_S:
                most_signals = max(most_signals, len(signals))
            codes = [process.poll() for process in self._processes.values()]
            if any(codes) or all(code == 0 for code in codes):
                return not any(codes) and not self._stop.num_saved()
            if (now := (self._stop.steps(), self._stop.num_saved())) != state:
                state, state_s = now, time.monotonic()
            is_written = min(now[0]) >= step
            if time.monotonic() - state_s > (_SAVE_S if is_written else _STUCK_S + 2 * self._longest_s):
                break
            time.sleep(_POLL_S)
        return False

    def stop(self) -> None:
        for number in (_END, signal.SIGKILL):
            self._killed = {replica for replica, process in self._processes.items() if process.poll() is None}
            for replica in self._killed:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._processes[replica].pid, number)
            # bounded: a process that waits for a device in the kernel does not end by SIGKILL either
            until_s = time.monotonic() + _STOP_S
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, until_s - time.monotonic()))

    def later_failures(self, earlier: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Return the failures seen after `earlier`, with those that `stop` caused marked so."""
        codes = {replica: process.poll() for replica, process in self._processes.items() if replica not in earlier}
        return {
            replica: ProcessFailure(exitcode=code, was_stopped=replica in self._killed or code == -_END)
            for replica, code in codes.items()
            if code
        }


def write_failure_report(run_dir: Path, rank: int, error: Exception, *, ranks: int = 1) -> None:
    """Write down why a process of a local run ends, for `launch` to report."""
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
