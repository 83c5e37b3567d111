"""The process of one replica of an elastic run: what the launcher starts. Not a command of the user's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import finish_output, protect_output

if TYPE_CHECKING:
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.replica_ranks import Rank0Driver


def main(arguments: Sequence[str]) -> int:
    """Run one replica.

    Args:
        arguments: The run's folder, the launcher's process id, and which of the host's replicas this is.

    Returns:
        0 at the end or after leaving, `launch.REFUSED` for what another attempt would not mend,
        `launch.UNANSWERED` where the coordinator did not answer, 1 for all else.
    """
    run_dir, launcher, index = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    signal.signal(signal.SIGTERM, _leave)
    end_with(launcher)
    from thinwire.errors import ConnectError, ThinwireError
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.launch import REFUSED, UNANSWERED
    from thinwire.training.elastic.replica import run_replica

    try:
        settings = LocalSettings.load(run_dir)
        with _rank0(settings, run_dir, index=index) as rank0:
            run_replica(settings, report=_report, device_index=index, rank0=rank0)
    except ConnectError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return UNANSWERED
    except (ThinwireError, ValueError) as error:
        traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return REFUSED
    except SystemExit:
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _rank0(
    settings: LocalSettings, run_dir: Path, *, index: int
) -> contextlib.AbstractContextManager[Rank0Driver | None]:
    """Start the replica's other ranks, where it has several."""
    if settings.ranks_per_replica == 1:
        return contextlib.nullcontext()
    from thinwire.training.elastic.replica_ranks import start_ranks

    return start_ranks(
        run_dir, module="thinwire.cli.elastic_rank", leader=os.getpid(), index=index,
        num_ranks=settings.ranks_per_replica, report=_complain, end=lambda: os._exit(1),
    )  # fmt: skip


def _complain(why: str) -> None:
    print(f"error: {why}", file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    # unwinds the stack, so that the replica says goodbye
    raise SystemExit(0)


def _report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    protect_output()
    code = main(sys.argv[1:])
    finish_output()
    os._exit(code)  # threads of rounds in flight must not keep a process that has left
