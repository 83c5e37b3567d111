"""Agreed stop of a run: a step after which all its processes save a checkpoint and end.

In a local run, the launcher and the processes share a file of numbers. Each process writes the steps it has done,
then reads whether the run is to stop; the launcher first writes that it is to stop, then reads those steps. Whoever
began a step before it could see the request has at most one more to do than the launcher reads, so the step after the
largest number is one that none has passed. Those behind it train up to it, and none waits for another before.

Processes that torchrun, Slurm or MPI started have no such file. A thread of each answers for it, so that one which
waits for a round of another is no obstacle: it sends the steps done to all others once, when a signal comes or when
the first of theirs does.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from thinwire.errors import PayloadError, TransportError
from thinwire.transport.base import Envelope, Pending, Transport, all_gather_json
from thinwire.transport.replica_mesh import ReplicaMesh
from thinwire.transport.streams import CONTROL

_NUMBER = struct.Struct("<q")
# Slots: the step to stop after, the signal that a process was sent, and two numbers of each process.
_STOP, _SIGNAL, _FIRST = range(3)
_DECIDING, _NOT_BEGUN = -1, -1
_POLL_S = 0.01
# Of control messages: those of the optimizer have the fragments before. Numbers of notes are those of `worker`.
_PART, _NOTE = 3, 100
# torchrun and Slurm kill what has not ended 30 s after a signal.
_ANSWER_S, _WATCH_S = 20.0, 0.1


class AgreedStop:
    """One end of the shared file, at the launcher or at a process of the run.

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
        return [self._read(_FIRST + rank) for rank in range(self._size)]

    def has_begun(self, rank: int) -> bool:
        """Return whether a process has begun to train."""
        return self.steps()[rank] != _NOT_BEGUN

    def num_saved(self) -> int:
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


class NetworkStop:
    """One process's part of an agreed stop over the network.

    Attributes:
        step: The step to stop after, as far as it is known; 0 while the run goes on.
        signal_number: The signal that came here, else 0.
    """

    def __init__(self) -> None:
        self.step = self.signal_number = 0
        self._done = _NOT_BEGUN
        self._is_deciding = False
        self._decided = 0
        self._mesh: ReplicaMesh | None = None
        self._transport: Transport | None = None
        self._receives: list[Pending] = []

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: stop the run, or end this process where there is nothing to save yet."""
        if self._done == _NOT_BEGUN:
            raise SystemExit(128 + number)
        self.signal_number = self.signal_number or number

    def join(self, transport: Transport, *, mesh: ReplicaMesh | None) -> None:
        """Begin to listen to the other replicas; of a replica of several ranks, the first one does."""
        self._transport, self._mesh = transport, mesh
        if mesh is None or mesh.rank == 0:
            others = (peer for peer in range(transport.num_replicas) if peer != transport.replica)
            self._receives = [transport.receive(source=peer, envelope=_envelope()) for peer in others]

    def is_due(self, step: int) -> bool:
        """Return whether to save and end now, and note that `step` steps are done."""
        is_first, self._done = self._done == _NOT_BEGUN, step
        leads = self._mesh is None or self._mesh.rank == 0
        if is_first and leads:
            threading.Thread(target=self._watch, name="agreed-stop", daemon=True).start()
        while self._is_deciding:
            time.sleep(_POLL_S)
        self.step = self._decided
        if self._mesh is not None:  # the ranks of a replica do each step together
            found = torch.tensor([self.signal_number, self._decided], device=self._mesh.device)
            signal_number, self.step = map(int, self._mesh.sum(found).tolist())
            self.signal_number = self.signal_number or (signal_number if leads else 0)
        return 0 < self.step <= step

    def saved(self) -> None:
        """Wait until all processes have saved, which may need what this one has yet to send."""
        assert self._transport is not None
        with contextlib.suppress(TransportError):  # what is missing is found when the run is resumed
            all_gather_json({}, transport=self._transport, number=_NOTE, deadline_s=_ANSWER_S)
        if self._mesh is not None:
            self._mesh.sum(torch.zeros(1, device=self._mesh.device))

    def _watch(self) -> None:
        while not self.signal_number and not any(pending.done() for pending in self._receives):
            time.sleep(_WATCH_S)
        self._is_deciding = True
        with contextlib.suppress(TransportError):  # a replica that is lost ends the run by itself
            self._decided = self._decide(self._done)
        self._is_deciding = False

    def _decide(self, own: int) -> int:
        assert self._transport is not None
        payload = torch.frombuffer(bytearray(_NUMBER.pack(own)), dtype=torch.uint8)
        peers = [peer for peer in range(self._transport.num_replicas) if peer != self._transport.replica]
        sends = [self._transport.send(payload, to=peer, envelope=_envelope()) for peer in peers]
        steps = [own]
        for peer, pending in zip(peers, self._receives, strict=True):
            received = pending.wait(deadline_s=_ANSWER_S)
            assert received is not None
            (done,) = _NUMBER.unpack(bytes(received.payload.numpy()))
            if done < 0:
                raise PayloadError(f"replica {peer} sent {done} steps done; allowed 0 or more")
            steps.append(done)
        for sent in sends:
            sent.wait(deadline_s=_ANSWER_S)
        return max(steps) + 1


def _envelope() -> Envelope:
    return Envelope(stream=CONTROL, key=(0, _PART), payload_bytes=_NUMBER.size)
