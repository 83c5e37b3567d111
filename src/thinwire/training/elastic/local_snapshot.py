"""Local snapshot of a replica on its host's disk, so that a restarted replica need not fetch the state.

It holds the global parameters, momenta, and the inner optimizer's state after a step. A replica that returns with it
applies the rounds decided since; the coordinator reports whether their parts are still available.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.elastic.global_state import GlobalState, non_finite, spans, tensors_sha256, unpack
from thinwire.elastic.replica_state import global_tensors, inner_tensors, load_global_tensors, load_inner_tensors
from thinwire.errors import ThinwireError
from thinwire.files import replace_whole
from thinwire.runlog.run_identity import RunIdentity
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.checkpoints.global_checkpoints import Latest

# Shares of training time spent on copying, and of the disk and a core on writing, at most.
_COPY_SHARE, _WRITE_SHARE = 0.005, 0.05
_INNER = "inner."
_FOLDER = "kept"
# The era that a resumed run begins with its first state.
RESUMED_ERA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """A state that was read from the disk.

    Attributes:
        step: Of the state.
        era: How often the run had gone on from a disk before; a state of another era is of another past.
        state: The global parameters, momenta, and the inner optimizer's tensors.
    """

    step: int
    era: int
    state: GlobalState

    @property
    def has_inner(self) -> bool:
        return any(name.startswith(_INNER) for name in self.state.outer)

    def take_in(self, *, model: nn.Module, optimizer: DistributedOptimizer) -> None:
        of_outer = {name: t for name, t in self.state.outer.items() if not name.startswith(_INNER)}
        inner = {name.removeprefix(_INNER): t for name, t in self.state.outer.items() if name.startswith(_INNER)}
        load_global_tensors(optimizer.engine, model, dict(self.state.parameters), of_outer)
        load_inner_tensors(optimizer.inner, model, inner)


class LocalSnapshot:
    """The file of one replica process; a thread writes it.

    Args:
        path: The file.
        run: The run: a state of another one, or of another incarnation, is not read.
        account: Returns the coordinator's account of the data at a step, for a host that goes on with the run alone;
            None where it does not come: then the state before, which has one, is not replaced. Called by the thread.
        warn: Told once where it cannot be written.
        now: Gives seconds that only grow.
    """

    def __init__(
        self, path: Path, *, run: RunIdentity, warn: Callable[[str], None],
        account: Callable[[int], Mapping[str, Any] | None] = lambda step: {}, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._path = path
        self._run = run
        self._account = account
        self._warn = warn
        self._now = now
        self._next_s = 0.0
        self._next_step = 0
        self._writer: threading.Thread | None = None
        self._has_failed = False

    def read(self) -> HeldState | None:
        """Return the state, None where there is none of this run that is whole and finite."""
        state = _read(self._path)
        is_own = state is not None and state.note["run"] == self._run.stamp()
        return HeldState(step=state.step, era=state.note["era"], state=state) if state is not None and is_own else None

    def read_resumed(self, *, step: int, sha256: str) -> HeldState | None:
        """Return the state of this hash, kept before the run was resumed, that it goes on from; None without one."""
        state = _read(self._path)
        if state is None or state.step != step or self._run.foreign(state.note["run"]):
            return None
        is_same = tensors_sha256(_global(state)) == sha256
        return HeldState(step=step, era=RESUMED_ERA, state=state) if is_same else None

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def offer(self, step: int, *, era: int, every: int, model: nn.Module, optimizer: DistributedOptimizer) -> bool:
        """Write the state after a step when due, at least `every` steps apart; called with all rounds applied.

        Returns:
            Whether it is being written; one that holds NaN or infinity is not.
        """
        is_busy = self._writer is not None and self._writer.is_alive()
        if step < self._next_step or is_busy or self._has_failed or self._now() < self._next_s:
            return False
        began_s = self._now()
        parameters, outer = global_tensors(optimizer.engine, model)
        outer |= {_INNER + name: tensor for name, tensor in inner_tensors(optimizer.inner, model).items()}
        note = {"run": self._run.stamp(), "era": era}
        state = GlobalState(step=step, parameters=parameters, outer=outer, note=note)
        is_bad = bool(non_finite(state))
        self._next_step = step + every
        self._next_s = self._now() + (self._now() - began_s) / _COPY_SHARE
        if is_bad:
            return False
        self._writer = threading.Thread(target=self._write, args=(state,), name="thinwire-kept", daemon=True)
        self._writer.start()
        return True

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join(timeout=60)

    def _write(self, state: GlobalState) -> None:
        began_s = self._now()
        try:
            if (account := self._account(state.step)) is None:
                return
            note = {**state.note, "account": dict(account)}
            state = GlobalState(step=state.step, parameters=state.parameters, outer=state.outer, note=note)
            self._path.parent.mkdir(parents=True, exist_ok=True)

            def write_spans(path: Path) -> None:
                with path.open("wb") as file:
                    file.writelines(spans(state))

            replace_whole(self._path, write_spans)
        except (OSError, ValueError, MemoryError) as error:
            self._has_failed = True
            self._warn(f"this replica's own state cannot be kept at {self._path}: {error}; it would fetch it again")
            return
        self._next_s = max(self._next_s, self._now() + (self._now() - began_s) / _WRITE_SHARE)


def snapshot_path(run_dir: Path, index: int) -> Path:
    """Return the file of a host's replica process."""
    return run_dir / _FOLDER / f"replica-process-{index}.state"


def newest_snapshot(run_dir: Path, *, run: RunIdentity) -> Latest:
    """Return the newest state that replicas of a host keep of a run, with the account of the data, as a checkpoint."""
    states = [state for path in sorted((run_dir / _FOLDER).glob("*.state")) if (state := _read(path)) is not None]
    own = [state for state in states if not run.foreign(state.note["run"]) and state.note.get("account")]
    newest = max(own, key=lambda state: (run.age(state.note["run"]), state.note["era"], state.step), default=None)
    if newest is None:
        return Latest(state=None)
    note = {**newest.note["account"], "era": newest.note["era"]}
    return Latest(state=dataclasses.replace(_global(newest), note=note), age=run.age(newest.note["run"]))


def _global(state: GlobalState) -> GlobalState:
    """Return a kept state without what is the replica's own."""
    outer = {name: tensor for name, tensor in state.outer.items() if not name.startswith(_INNER)}
    return GlobalState(step=state.step, parameters=state.parameters, outer=outer)


def _read(path: Path) -> GlobalState | None:
    """Read a kept state, None where it is missing, damaged, of another format or not finite."""
    try:
        vector = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
        state = unpack(vector, source=str(path))
    except (OSError, ThinwireError, ValueError):
        return None
    is_whole = isinstance(state.note.get("run"), Mapping) and type(state.note.get("era")) is int and state.step > 0
    is_whole = is_whole and isinstance(state.note.get("account", {}), Mapping)
    return state if is_whole and not non_finite(state) else None
