"""Agreed stop of a local run: a step after which all its processes save a checkpoint and end.

The launcher and the processes share a file of numbers. Each process writes the steps it has done, then reads whether
the run is to stop; the launcher first writes that it is to stop, then reads those steps. Whoever began a step before it
could see the request has at most one more to do than the launcher reads, so the step after the largest number is one
that none has passed. Those behind it train up to it, and none waits for another before.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

_NUMBER = struct.Struct("<q")
# Slots: the step to stop after, the signal that a process was sent, and two numbers of each process.
_STOP, _SIGNAL, _FIRST = range(3)
_DECIDING, _NOT_BEGUN = -1, -1
_POLL_S = 0.01


class AgreedStop:
    """One end of the shared file, at the launcher or at a process of the run.

    Args:
        path: The file, which `create` made.
        size: Processes of the run.
        rank: Of this process among them; None for the launcher.

    Attributes:
        step: The step to stop after, as far as it is known; 0 while the run goes on.
    """

    def __init__(self, path: Path, *, size: int, rank: int | None = None) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._size, self._rank = size, rank
        self.step = 0

    @classmethod
    def create(cls, path: Path, *, size: int) -> AgreedStop:
        """Make the file of a run whose processes have not begun."""
        path.write_bytes(_NUMBER.pack(0) * (_FIRST + 2 * size))
        made = cls(path, size=size)
        for rank in range(size):
            made._write(_FIRST + rank, _NOT_BEGUN)
        return made

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def decide(self) -> int:
        """Choose the step to stop after, at the launcher.

        Returns:
            It, or 0 where a process has not begun to train, so that there is nothing to save.
        """
        self._write(_STOP, _DECIDING)
        done = self.steps()
        self.step = 0 if _NOT_BEGUN in done else max(done) + 1
        self._write(_STOP, self.step)
        return self.step

    def steps(self) -> list[int]:
        """Return the steps that each process has done."""
        return [self._read(_FIRST + rank) for rank in range(self._size)]

    def num_saved(self) -> int:
        """Return how many processes have saved their checkpoint."""
        return sum(self._read(_FIRST + self._size + rank) for rank in range(self._size))

    def signal(self) -> int:
        """Return the signal that a process of the run was sent in the launcher's place, else 0."""
        return self._read(_SIGNAL)

    def request(self, signal_number: int) -> None:
        """Ask the launcher, from a process that was sent a signal, to stop the run."""
        self._write(_SIGNAL, signal_number)

    def is_due(self, step: int) -> bool:
        """Return whether to save and end now, and note that `step` steps are done."""
        assert self._rank is not None
        self._write(_FIRST + self._rank, step)
        while (stop := self._read(_STOP)) == _DECIDING:
            time.sleep(_POLL_S)
        self.step = stop
        return 0 < stop <= step

    def saved(self) -> None:
        """Note that this process has saved, and wait for the others, which may need what it has yet to send."""
        assert self._rank is not None
        self._write(_FIRST + self._size + self._rank, 1)
        while self.num_saved() < self._size:
            time.sleep(_POLL_S)

    def _read(self, slot: int) -> int:
        (number,) = _NUMBER.unpack(os.pread(self._file, _NUMBER.size, slot * _NUMBER.size))
        return int(number)

    def _write(self, slot: int, number: int) -> None:
        os.pwrite(self._file, _NUMBER.pack(number), slot * _NUMBER.size)
