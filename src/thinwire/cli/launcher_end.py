"""Ends a worker whose launcher was killed: a dead launcher cannot stop anybody."""

from __future__ import annotations

import os
import signal
import threading
import time

WATCH_S = 0.25


def end_with(launcher: int) -> None:
    """Kill this process as soon as it is no longer the child of `launcher`; returns at once.

    Args:
        launcher: Process id of the launcher.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
