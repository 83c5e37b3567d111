"""A command on a host of a lab."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import LabError

if TYPE_CHECKING:
    from thinwire.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """How a command ended on one host.

    Attributes:
        host: The host.
        exit_code: Its exit code; -N where signal N ended it.
        stdout: What it wrote to stdout.
        stderr: What it wrote to stderr.
    """

    host: int
    exit_code: int
    stdout: str
    stderr: str


class HostProcess:
    """A command that runs, or ran, on a host. Made by `Lab.start`.

    Attributes:
        host: The host.
        command: Its words.
        pid: Its process id inside the lab.
    """

    def __init__(self, lab: Lab, *, host: int, command: list[str], number: int) -> None:
        self.host = host
        self.command = command
        self.pid = 0
        self._lab = lab
        self._number = number
        self._ended = threading.Event()
        self._exit_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, -N where signal N ended it; None while it runs."""
        return self._exit_code

    def wait(self, *, deadline_s: float) -> int:
        """Wait until it ends, and return its exit code.

        Args:
            deadline_s: Seconds at most.

        Raises:
            TimeoutError: It still runs.
            LabError: The lab itself broke, or was closed meanwhile.
        """
        ended = self._ended.wait(timeout=deadline_s)
        self._lab.check()
        if ended and self._exit_code is None:
            raise LabError(f"{self.command[0]} on host {self.host} ended with its lab, which was closed")
        if self._exit_code is None:
            raise TimeoutError(f"{self.command[0]} on host {self.host} has not ended within {deadline_s:g} s")
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and all it started in its group; one that has ended is left alone."""
        self._lab.signal_process(self._number, number)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def end(self, exit_code: int | None) -> None:
        """Note that it ended; None where the lab broke before that was known."""
        self._exit_code = exit_code
        self._ended.set()
