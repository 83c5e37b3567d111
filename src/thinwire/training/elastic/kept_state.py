"""A replica's own state on its host's disk, so that one whose process died, or that was let go, need not fetch it.

It holds the global parameters and momenta after a step, and what the inner optimizer remembered there. Whoever comes
back with it takes in the rounds that were decided since; the coordinator says whether their parts can still be had.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from thinwire.errors import ThinwireError
from thinwire.files import replace_whole
from thinwire.sync.elastic import global_tensors, load_global_tensors
from thinwire.sync.inner_memory import inner_tensors, load_inner_tensors
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.global_state import GlobalState, pack, unpack

# Copying may take such a share of the training's time, and writing such a share of the disk's and of a core's.
_COPY_SHARE, _WRITE_SHARE = 0.005, 0.05
_INNER = "inner."


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A state that was read from the disk.

    Attributes:
        step: Of the state.
        era: How often the run had gone on from a disk before; a state of another era is of another past.
        state: The global parameters, momenta, and the inner optimizer's tensors.
    """

    step: int
    era: int
    state: GlobalState

    def take_in(self, *, model: nn.Module, optimizer: DistributedOptimizer) -> None:
        """Begin from it.

        Raises:
            CheckpointError: It is of another model or method.
        """
        of_outer = {name: t for name, t in self.state.outer.items() if not name.startswith(_INNER)}
        inner = {name.removeprefix(_INNER): t for name, t in self.state.outer.items() if name.startswith(_INNER)}
        load_global_tensors(optimizer.engine, model, dict(self.state.parameters), of_outer)
        load_inner_tensors(optimizer.inner, model, inner)


class KeptState:
    """The file of one replica process; a thread writes it.

    Args:
        path: The file.
        run: Names the job: a state of another one is not read.
        warn: Told once where it cannot be written.
        now: Gives seconds that only grow.
    """

    def __init__(
        self, path: Path, *, run: str, warn: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._run = run
        self._warn = warn
        self._now = now
        self._next_s = 0.0
        self._next_step = 0
        self._writer: threading.Thread | None = None
        self._has_failed = False

    def read(self) -> Held | None:
        """Return the state, None where there is none of this run that is whole."""
        try:
            vector = torch.from_numpy(np.fromfile(self._path, dtype=np.uint8))
            state = unpack(vector, source=str(self._path))
        except (OSError, ThinwireError, ValueError):
            return None
        era = state.note.get("era")
        if state.note.get("run") != self._run or not isinstance(era, int) or state.step < 1:
            return None
        return Held(step=state.step, era=era, state=state)

    def discard(self) -> None:
        """Read it no more."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def offer(self, step: int, *, era: int, every: int, model: nn.Module, optimizer: DistributedOptimizer) -> bool:
        """Keep the state after a step where it is time to; called between two steps.

        Args:
            step: The step; its rounds are all applied.
            era: See `Held`.
            every: Inner steps between two states, at least.
            model: The model.
            optimizer: Over it.

        Returns:
            Whether it is being written.
        """
        is_busy = self._writer is not None and self._writer.is_alive()
        if step < self._next_step or is_busy or self._has_failed or self._now() < self._next_s:
            return False
        began_s = self._now()
        parameters, outer = global_tensors(optimizer.engine, model)
        outer |= {_INNER + name: tensor for name, tensor in inner_tensors(optimizer.inner, model).items()}
        state = GlobalState(step=step, parameters=parameters, outer=outer, note={"run": self._run, "era": era})
        self._next_step = step + every
        self._next_s = self._now() + (self._now() - began_s) / _COPY_SHARE
        self._writer = threading.Thread(target=self._write, args=(state,), name="thinwire-kept", daemon=True)
        self._writer.start()
        return True

    def close(self) -> None:
        """Let what is being written be finished."""
        if self._writer is not None:
            self._writer.join(timeout=60)

    def _write(self, state: GlobalState) -> None:
        began_s = self._now()
        try:
            vector = pack(state)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_whole(self._path, lambda temporary: vector.numpy().tofile(temporary))
        except (OSError, ValueError, MemoryError) as error:
            self._has_failed = True
            self._warn(f"this replica's own state cannot be kept at {self._path}: {error}; it would fetch it again")
            return
        self._next_s = max(self._next_s, self._now() + (self._now() - began_s) / _WRITE_SHARE)
