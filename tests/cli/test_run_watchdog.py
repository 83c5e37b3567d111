"""A run that is ended because of a finding: what is stopped hears of no signal, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
from live_processes import descendants, is_running, is_stopped, kill, until

from thinwire.cli.run_watchdog import kill_stopped_children

SLEEPERS = "import subprocess, time; [subprocess.Popen(['sleep', '600']) for _ in range(2)]; print(1, flush=True)"


def test_what_is_stopped_is_killed_and_all_else_is_left_to_the_launcher() -> None:
    line = [sys.executable, "-c", f"{SLEEPERS}; time.sleep(600)"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None and launcher.stdout.readline()
            stopped, running = psutil.Process(launcher.pid).children()
            os.kill(stopped.pid, signal.SIGSTOP)
            until(lambda: is_stopped(stopped))
            kill_stopped_children(launcher.pid)
            until(lambda: stopped.status() == psutil.STATUS_ZOMBIE)  # its parent has not asked for its end
            assert is_running(running)
        finally:
            kill(descendants(launcher.pid))
            launcher.kill()


def test_who_is_gone_already_is_no_error() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    kill_stopped_children(gone.pid)
