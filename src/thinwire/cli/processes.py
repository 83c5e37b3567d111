"""Internal processes: what the launchers start, as `python -m thinwire.cli.processes KIND ...`. Not a user command.

Each kind is a function here that returns an exit code. A process imports what its kind needs only after it watches its
parent: torch takes seconds to import, and a launcher may be killed in them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.output import finish_output, log_if_possible, protect_output
from thinwire.cli.process_names import exit_with_parent, process_of

if TYPE_CHECKING:
    from thinwire.training.elastic.replica_ranks import Rank0Driver

# A process that ends may have written more; the watchdog reads it.
_LAST_READ_S = 0.5


def replica(arguments: Sequence[str]) -> int:
    """Run one replica of a local run.

    Args:
        arguments: The run's folder, the launcher's process id, `resume` or `start`, and the file of `AgreedStop`.
    """
    run_dir, launcher, mode = Path(arguments[0]), int(arguments[1]), arguments[2]
    exit_with_parent(launcher)
    from thinwire.training.agreed_stop import AgreedStop

    rank = int(os.environ["RANK"])  # ranks that share a replica get others as they join
    stop = AgreedStop(Path(arguments[3]), size=int(os.environ["WORLD_SIZE"]), rank=rank)
    for number in (signal.SIGINT, signal.SIGTERM):
        # the launcher decides when to stop, and reports it
        signal.signal(number, lambda number, frame: stop.request(number))
    from thinwire.errors import Stopped
    from thinwire.training.config import read_config
    from thinwire.training.launch import write_failure_report
    from thinwire.training.worker import ReplicaStart, run_replica

    ranks = 1
    try:
        config = read_config(run_dir)
        ranks = config.parallel.ranks
        place = ReplicaStart(local_rank=int(os.environ["LOCAL_RANK"]), is_prepared=True, is_resumed=mode == "resume")
        run_replica(config, place=place, stop=stop)
    except Stopped:
        return 0
    except Exception as error:
        traceback.print_exc()
        write_failure_report(run_dir, rank, error, ranks=ranks)
        return 1
    return 0


def elastic_replica(arguments: Sequence[str]) -> int:
    """Run one replica of an elastic run.

    Args:
        arguments: The run's folder, the launcher's process id, and the replica's index on this host.

    Returns:
        0 at the end or after leaving, `launch.REFUSED` for what another attempt would not fix,
        `launch.UNANSWERED` where the coordinator did not answer, 1 for all else.
    """
    run_dir, launcher, index = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    # unwinds the stack, so that the replica leaves the run in order
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    exit_with_parent(launcher)
    from thinwire.errors import ConnectError, ThinwireError
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.launch import REFUSED, UNANSWERED
    from thinwire.training.elastic.replica import run_replica
    from thinwire.training.elastic.replica_ranks import start_ranks

    try:
        settings = LocalSettings.load(run_dir)
        others: contextlib.AbstractContextManager[Rank0Driver | None] = contextlib.nullcontext()
        if settings.ranks_per_replica > 1:
            others = start_ranks(
                run_dir, module=process_of("replica-rank"), leader=os.getpid(), index=index,
                num_ranks=settings.ranks_per_replica, report=_print_problem, end=lambda: os._exit(1),
            )  # fmt: skip
        with others as rank0:
            run_replica(settings, report=_log_with_time, device_index=index, rank0=rank0)
    except ConnectError as error:
        _print_problem(error)
        return UNANSWERED
    except (ThinwireError, ValueError) as error:
        traceback.print_exc()
        _print_problem(error)
        return REFUSED
    except SystemExit:
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def standby_replica(arguments: Sequence[str]) -> int:
    """Import what an elastic replica needs, wait until one dies, and take its place.

    Args:
        arguments: The run's folder, and the launcher's process id.
    """
    run_dir, launcher = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    exit_with_parent(int(launcher))
    import thinwire.training.elastic.replica  # noqa: F401  takes long, so it comes before it is needed
    from thinwire.training.elastic.launch import read_work

    work = read_work()
    return 0 if work is None else elastic_replica([run_dir, launcher, *work])


def replica_rank(arguments: Sequence[str]) -> int:
    """Run a rank of an elastic replica that is not its first.

    Args:
        arguments: The run's folder, the first rank's process id, the replica's index on this host, its number of
            ranks, this rank, and the file by which the ranks find each other.
    """
    run_dir, leader, index, num_ranks = Path(arguments[0]), int(arguments[1]), int(arguments[2]), int(arguments[3])
    rank, meeting = int(arguments[4]), Path(arguments[5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    exit_with_parent(leader)
    import torch

    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.replica_ranks import follow, join_ranks

    try:
        torch.set_num_threads(LocalSettings.load(run_dir).threads)
        follow(join_ranks(meeting, index=index, rank=rank, num_ranks=num_ranks))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def coordinator(arguments: Sequence[str]) -> int:
    """Run the coordinator of an elastic run.

    Args:
        arguments: The run's folder, the launcher's process id, the secret's file, the address and the port; or the
            URI of the run's carrier, where this process leads once no other does. Without a launcher, 0, the process
            goes on in the background after whoever started it has ended.
    """
    run_dir, launcher, secret_path = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    until = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: until.set())
    if launcher:
        exit_with_parent(launcher)
    elif os.fork():
        os._exit(0)
    from thinwire.errors import ThinwireError
    from thinwire.training.elastic.coordinator_process import coordinate
    from thinwire.training.elastic.job import LOCAL_FILE, LocalSettings
    from thinwire.training.elastic.launch import REFUSED

    try:
        if "://" in arguments[3]:
            from thinwire.training.elastic.carried_coordinator import coordinate_on_carrier

            coordinate_on_carrier(run_dir, uri=arguments[3], secret_path=secret_path, say=_log_with_time, until=until)
            return 0
        address, port = arguments[3], int(arguments[4])
        # a loop of one's own has no such file
        relay = LocalSettings.load(run_dir).relay_place() if (run_dir / LOCAL_FILE).exists() else None
        coordinate(
            run_dir, secret_path=secret_path, address=address, port=port, say=_log_with_time, until=until, relay=relay
        )
    except (ThinwireError, ValueError) as error:
        _print_problem(error)
        return REFUSED
    return 0


def diagnose_rank(arguments: Sequence[str]) -> int:
    """Run one rank of `thinwire diagnose test --replicas N`.

    Args:
        arguments: The launcher's process id, and the arguments of the command without `--replicas`.
    """
    # the launcher decides when to stop, and reports it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_with_parent(int(arguments[0]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from thinwire.cli.diagnose_test import main as test

    return test(arguments[1:])


def run_replica(arguments: Sequence[str]) -> int:
    """Run one replica of `thinwire run --replicas N`.

    Args:
        arguments: The launcher's process id, and the arguments of the command.
    """
    exit_with_parent(int(arguments[0]))
    from thinwire.cli.run import main as run

    return run(arguments[1:])


def watchdog(arguments: Sequence[str]) -> int:
    """Diagnose a run that torchrun started until the rank that started this process closes its stdin.

    Args:
        arguments: The run's folder, the rank and its process id.
    """
    run_dir, rank, parent = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    # what ends the run ends the rank, and that ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(parent)
    from thinwire.cli.run_watchdog import NoHands, diagnosis_of
    from thinwire.monitor.live_diagnosis import end_report

    first = run_dir / "records-rank-0.jsonl"
    diagnosis = diagnosis_of(
        run_dir, on_finding="warn", is_dry_run=False, hands=NoHands(), say=log_if_possible,
        # of hosts that share a folder the first one's process diagnoses, since it sees all ranks
        is_mine=lambda: rank == 0 or not first.exists(),
    )  # fmt: skip
    assert diagnosis is not None
    with diagnosis:
        while sys.stdin.buffer.read(1):
            pass
        time.sleep(_LAST_READ_S)
    for line in end_report(diagnosis):
        log_if_possible(line)
    return 0


def bench_host(arguments: Sequence[str]) -> int:
    """Run one contender of `thinwire bench wire` on this host, and write its file of numbers.

    Args:
        arguments: Fields of `WorkerOptions` as options; `{rank}` in the result's path stands for the rank. RANK,
            WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read from the environment.

    Returns:
        The exit code: 0, 1 for an error while running, 2 for a wrong option; the reason is on stderr.
    """
    from thinwire.cli.argument_parsing import parse_options
    from thinwire.errors import ThinwireError
    from thinwire.transport.addresses import address_towards
    from thinwire.transport.secret import SECRET_VARIABLE
    from thinwire.wire_benchmark.worker import WorkerOptions, run_worker

    contender = dict(itertools.pairwise(arguments)).get("--contender", "bench-host")
    try:
        # this host's address is the one that MASTER_ADDR is reached from, unless the arguments name another
        usual = ["--cache-dir", str(Path.home() / ".cache" / "thinwire")]
        if "--address" not in arguments:
            usual += ["--address", address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))]
        # one command line serves all hosts
        own = [word.replace("{rank}", os.environ.get("RANK", "0")) for word in arguments]
        options = parse_options(WorkerOptions, [*usual, *own], prog="python -m thinwire.cli.processes bench-host")
        os.environ.pop(SECRET_VARIABLE, None)  # else thinwire would be measured over connections of its own
        run_worker(options)
    except ValueError as error:
        sys.stderr.write(f"{contender}: {error}\n")
        return 2
    except (ThinwireError, OSError) as error:
        sys.stderr.write(f"{contender}: {type(error).__name__}: {error}\n")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _print_problem(error: object) -> None:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def _log_with_time(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


KINDS: dict[str, Callable[[Sequence[str]], int]] = {
    kind.__name__.replace("_", "-"): kind
    for kind in (
        replica, elastic_replica, standby_replica, replica_rank, coordinator, diagnose_rank, run_replica, watchdog,
        bench_host,
    )
}  # fmt: skip
# Threads of rounds in flight must not keep such a process alive.
_ENDED_AT_ONCE = ("elastic-replica", "standby-replica", "replica-rank")


def main(kind: str, arguments: Sequence[str]) -> None:
    """Run a process of a kind to its end, and exit."""
    if kind not in ("bench-host", "run-replica"):  # scripts of others write as they like, also through descriptors
        protect_output()
    code = KINDS[kind](arguments)
    if kind in _ENDED_AT_ONCE:
        finish_output()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
