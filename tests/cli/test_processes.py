"""A worker does not outlive a launcher that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = """
import os, time
from thinwire.cli.process_names import exit_with_parent
exit_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a killed process that nobody has waited for yet is gone too
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_worker_ends_when_its_launcher_is_killed():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        assert is_there(worker)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(timeout=10)
    end = time.monotonic() + 20
    while is_there(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_there(worker)
