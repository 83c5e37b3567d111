"""The process that waits to become a replica of an elastic run: what the launcher starts. No command of the user's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from thinwire.cli import elastic_worker
from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import finish_output, protect_output


def main(arguments: Sequence[str]) -> int:
    """Import what a replica needs, wait for one's place, and take it.

    Args:
        arguments: The run's folder, and the launcher's process id.

    Returns:
        0 where no work came, else as `elastic_worker.main`.
    """
    run_dir, launcher = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    end_with(int(launcher))
    import thinwire.training.elastic.replica  # noqa: F401  what takes long, before it is needed
    from thinwire.training.elastic.launch import read_work

    words = read_work()
    return 0 if words is None else elastic_worker.main([run_dir, launcher, *words])


if __name__ == "__main__":
    protect_output()
    code = main(sys.argv[1:])
    finish_output()
    os._exit(code)  # threads of rounds in flight must not keep a process that has left
