"""Names of the internal processes, as `python -m` takes them, and their tie to the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time

_PARENT_CHECK_S = 0.25


def process_of(kind: str) -> str:
    """Return a kind of process, such as "replica"."""
    return f"thinwire.cli.processes {kind}"


def exit_with_parent(parent: int) -> None:
    """Kill this process once it is no longer the child of `parent`, which may have been killed; return at once."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
