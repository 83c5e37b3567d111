"""A worker does not outlive a launcher that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
from live_processes import DEADLINE_S, is_running, until

WORKER = """
import os, time
from thinwire.cli.process_names import exit_with_parent
exit_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"


def test_a_worker_ends_when_its_launcher_is_killed():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        worker = psutil.Process(int(launcher.stdout.readline()))
        assert is_running(worker)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(timeout=DEADLINE_S)
    until(lambda: not is_running(worker))
