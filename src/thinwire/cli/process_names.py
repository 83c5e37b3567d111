"""Names of the internal processes, as `python -m` takes them, and their tie to the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time

_MODULE = "thinwire.cli.processes"
REPLICA = f"{_MODULE} replica"
ELASTIC_REPLICA = f"{_MODULE} elastic-replica"
STANDBY_REPLICA = f"{_MODULE} standby-replica"
REPLICA_RANK = f"{_MODULE} replica-rank"
COORDINATOR = f"{_MODULE} coordinator"
DIAGNOSE_RANK = f"{_MODULE} diagnose-rank"
WATCHDOG = f"{_MODULE} watchdog"

_PARENT_CHECK_S = 0.25


def exit_with_parent(parent: int) -> None:
    """Kill this process as soon as it is no longer the child of `parent`; returns at once.

    Args:
        parent: Process id of the launcher. One that was killed cannot stop its processes.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
