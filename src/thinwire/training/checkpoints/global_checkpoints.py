"""Checkpoints of an elastic run: one state that replicas of any number go on from, and that plain PyTorch loads.

A step's folder holds `model.safetensors` (the global parameters by the model's names), `outer.safetensors` (the outer
optimizer's state) and `checkpoint.json`; see `checkpoint_files`. One process writes to a place at a time.
"""

from __future__ import annotations

import copy as copying
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.elastic.global_state import GlobalState
from thinwire.errors import CheckpointError
from thinwire.runlog.run_identity import RunIdentity
from thinwire.training.checkpoints.checkpoint_files import (
    CheckpointFiles,
    Description,
    ForeignCheckpoint,
    Storage,
    open_storage,
    reason_of,
)

MODEL_FILE = "model.safetensors"
OUTER_FILE = "outer.safetensors"
JSON_FILE = "checkpoint.json"

_Copies = dict[tuple[str, str], Tensor]


def global_files(storage: Storage, *, run: RunIdentity | None = None) -> CheckpointFiles:
    """Return the files of global states in a storage, of every run, or of one, which refuses those of another."""

    def foreign(body: Mapping[str, Any]) -> str:
        return "" if run is None else run.foreign(body["run"])

    return CheckpointFiles(
        storage, json_file=JSON_FILE, tensor_files=(MODEL_FILE, OUTER_FILE),
        header={"run": None if run is None else run.stamp()}, foreign=foreign,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latest:
    """The newest state that verifies.

    Attributes:
        state: The state; None where there is no checkpoint at all.
        warnings: What is wrong with newer ones, a line each.
        age: Place of the incarnation that wrote it in the run's list; 0 without a run.
    """

    state: GlobalState | None
    warnings: tuple[str, ...] = ()
    age: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Incarnation, era and step; a newer state has more of the first that differs."""
        era = None if self.state is None else self.state.note.get("era")
        return (-1, 0, 0) if self.state is None else (self.age, era if type(era) is int else 0, self.state.step)


class GlobalCheckpoints:
    """The checkpoints of one elastic run.

    Args:
        folder_or_url: Where they are kept: a folder, or a URL that fsspec knows, such as `s3://bucket/run`.
        keep_last: How many of the newest stay, of those that verify; at least 1.
        keep_every: Those whose step is a multiple of it stay too; None keeps no more.
        run: The run that writes and reads here: states of another run are refused. None, for a loop of your own, reads
            every run's.
        on_warning: Takes a line for each save that failed or was left out, also from the thread that writes. Without
            it, the next `save` or `wait` raises the failure.

    Attributes:
        place: Name of the place in messages; without a URL's password.

    Raises:
        ValueError: A number is out of its range, or the URL is of no known kind.
        MissingExtra: The package for the URL is not installed; names it.

    Example:
        >>> checkpoints = GlobalCheckpoints("memory://example", keep_last=1)
        >>> for step in (100, 200):
        ...     checkpoints.save(GlobalState(step=step, parameters={}))
        ...     checkpoints.wait()
        True
        True
        >>> checkpoints.steps(), checkpoints.problem(200)
        ([200], '')
    """

    def __init__(
        self, folder_or_url: str | Path, *, keep_last: int = 2, keep_every: int | None = None,
        run: RunIdentity | None = None, on_warning: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}; a run goes on from what is kept")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every must be at least 1 step, got {keep_every}; None keeps the last only")
        storage = open_storage(folder_or_url)
        self.place = storage.name
        self._run = run
        self._files = global_files(storage, run=run)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._saves = BackgroundSaves(self.write, on_warning=on_warning)
        # what this process has read or written whole need not be read again to be kept
        self._verified: set[int] = set()

    def save(self, state: GlobalState, *, copy: bool = True) -> None:
        """Let a thread write a state, and return as soon as its tensors are copied.

        One is written at a time. Where one is still being written, the newest waits, and one that has waited before it
        is left out. The memory of one copy is kept for the next save, and a second one's while two are on their way.

        Args:
            state: The state; it need not be of a later step than earlier ones.
            copy: False where nobody will change its tensors, so that they need no copy.

        Raises:
            CheckpointError: Without `on_warning`: an earlier state could not be written; this one is written all the
                same, so a caller that catches it goes on.
        """
        self._saves.hand_over(state, copy=copy)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until nothing is left to write, at most for that time; return whether nothing is left."""
        return self._saves.wait(deadline_s)

    def write(self, state: GlobalState) -> None:
        """Write a state here and now, then remove what need not be kept.

        Raises:
            CheckpointError: It could not be written, or older ones not be removed; names the remedy. Checkpoints of
                other steps are untouched.
        """
        self._verified.discard(state.step)
        self._refuse_foreign()
        self._files.write(state.step, {MODEL_FILE: state.parameters, OUTER_FILE: state.outer}, state.note)
        self._verified.add(state.step)
        try:
            self._prune(state.step)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {state.step} is whole, but older ones in {self.place} cannot be removed: "
                f"{reason_of(error)}; remove them by hand before they fill it"
            ) from error

    def steps(self) -> list[int]:
        return self._files.steps()

    def problem(self, step: int) -> str:
        self._verified.discard(step)
        problem = self._files.problem(step)
        if not problem:
            self._verified.add(step)
        return problem

    def describe(self, step: int) -> Description:
        return self._files.describe(step)

    def load(self, step: int) -> GlobalState:
        """Read and check the state after a step. Any number of replicas may go on from it."""
        tensors, note = self._files.load(step)
        try:
            state = GlobalState(step=step, parameters=tensors[MODEL_FILE], outer=tensors[OUTER_FILE], note=note)
        except ValueError as error:
            raise CheckpointError(
                f"{self._files.path(step)} holds no state: {error}; {self._files.remedy(step)}"
            ) from error
        self._verified.add(step)
        return state

    def latest(self) -> Latest:
        """Load the newest state that verifies.

        Raises:
            ForeignCheckpoint: One is of another run; names both.
            CheckpointError: There are checkpoints and none verifies, or the place cannot be listed.
        """
        problems: list[str] = []
        for step in self._newest_first():
            try:
                state = self.load(step)
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                problems.append(str(error).partition(";")[0])
            else:
                warnings = tuple(f"{problem}; going on from step {step}" for problem in problems)
                age = 0 if self._run is None else self._run.age(self.describe(step).run)
                return Latest(state=state, warnings=warnings, age=age)
        if problems:
            raise CheckpointError(f"{problems[0]}, and no earlier one is whole; restore it, or begin in another place")
        return Latest(state=None)

    def readable_step(self, wanted: int = 0) -> int:
        """Return the wanted step if its checkpoint can be read as its JSON states, else the newest such; 0 for none."""
        steps = self._newest_first()
        for step in sorted(steps, key=lambda step: step != wanted):
            try:
                self.describe(step)
            except CheckpointError:
                continue
            return step
        return 0

    def remove(self, step: int) -> None:
        self._verified.discard(step)
        try:
            self._files.remove(step)
        except Exception as error:
            raise CheckpointError(
                f"cannot remove the checkpoint of step {step} from {self.place}: {reason_of(error)}; remove it by "
                f"hand, or a later start goes on from it"
            ) from error

    def forget_after(self, step: int) -> None:
        """Remove later checkpoints: for a run that goes on from an earlier one, and would find them newer than its own.

        Waits for what is being written.
        """
        self.wait()
        for later in self.steps():
            if later > step:
                self.remove(later)

    def _refuse_foreign(self) -> None:
        """Refuse a place in which another run keeps states: a later start could go on from the wrong one."""
        for step in self.steps() if self._run is not None else ():
            try:
                self._files.body(step)
            except ForeignCheckpoint:
                raise
            except CheckpointError:
                continue  # a damaged one does not count, and is reported where it is read

    def _newest_first(self) -> list[int]:
        """Return the steps, the newest state first: by incarnation, then era, then step.

        A run that goes back to an earlier checkpoint begins a new era; states of later steps may be of an older one.
        A state whose JSON is damaged comes before the others, so that it is reported.
        """
        steps = self.steps()
        steps.reverse()  # so that of several foreign ones the newest is named
        return sorted(steps, key=self._order, reverse=True)

    def _order(self, step: int) -> tuple[int, int, int]:
        try:
            body = self._files.body(step)
        except ForeignCheckpoint:
            raise
        except CheckpointError:
            return 1 << 62, 0, step
        era = body["state"].get("era")
        age = 0 if self._run is None else self._run.age(body["run"])
        return age, era if type(era) is int else 0, step

    def _prune(self, just_written: int) -> None:
        folders = self._files.folders()
        oldest_kept = whole = 0
        for step in sorted((step for step, is_complete in folders.items() if is_complete), reverse=True):
            # those that do not verify are no reason to remove one that does
            whole += step in self._verified or not self.problem(step)
            if whole == self._keep_last:
                oldest_kept = step
                break
        for step, is_complete in folders.items():
            is_marked = self._keep_every is not None and step % self._keep_every == 0
            is_needless = step < oldest_kept and not is_marked
            # a killed writer leaves incomplete ones
            if step != just_written and (is_needless or not is_complete):
                self._verified.discard(step)
                self._files.remove(step)


class BackgroundSaves:
    """Writes states in a thread, one at a time; the newest waits, and a failure does not end training.

    Args:
        write: Writes one state; raises CheckpointError where it cannot.
        on_warning: Takes a line for each failed and each left-out save, from the writing thread or the caller's.
            Without it, a failure is raised at the next call, and a left-out save is a Python warning.
    """

    def __init__(
        self, write: Callable[[GlobalState], None], *, on_warning: Callable[[str], None] | None = None
    ) -> None:
        self._write = write
        self._on_warning = on_warning
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: tuple[GlobalState, _Copies] | None = None
        self._spare: _Copies = {}
        self._failure: CheckpointError | None = None

    def hand_over(self, state: GlobalState, *, copy: bool = True) -> None:
        """Queue a state, in place of one that still waits; see `GlobalCheckpoints.save`."""
        with self._changed:
            left_out, self._waiting = self._waiting, None
            buffers = left_out[1] if left_out else self._spare
            if buffers is self._spare:
                self._spare = {}
        try:
            handed = _copied(state, buffers) if copy else (state, {})
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            self._fail(
                CheckpointError(
                    f"the checkpoint of step {state.step} is left out, since no memory is left for a copy of its "
                    f"{state.num_bytes} bytes ({error}); free host memory, or save with copy=False"
                )
            )
        else:
            with self._changed:
                self._waiting = handed
                if self._thread is None:
                    # no daemon: a program that ends has its last checkpoint written first
                    self._thread = threading.Thread(target=self._run, name="thinwire-checkpoints")
                    self._thread.start()
        if left_out:
            self._warn(
                f"the checkpoint of step {left_out[0].step} is left out: an earlier one was still being written when "
                f"that of step {state.step} came; save less often, or to a faster place"
            )
        self._raise_failure()

    def wait(self, deadline_s: float | None = None) -> bool:
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._thread is None, timeout=deadline_s)
        self._raise_failure()
        return is_done

    def _run(self) -> None:
        try:
            while (handed := self._take()) is not None:
                state, copies = handed
                try:
                    self._write(state)
                except CheckpointError as error:
                    self._fail(error)
                except Exception as error:  # a fault of the file system's own code, or of ours
                    self._fail(
                        CheckpointError(
                            f"the checkpoint of step {state.step} could not be written: {error!r}; see whether "
                            f"its place has room and can be written"
                        )
                    )
                with self._changed:
                    self._spare = copies or self._spare
        except BaseException:
            # `on_warning` has failed: waiting calls return, and the next state gets a thread of its own
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            raise

    def _take(self) -> tuple[GlobalState, _Copies] | None:
        with self._changed:
            handed, self._waiting = self._waiting, None
            if handed is None:  # under the same lock, so that nothing is handed to a thread that ends
                self._thread = None
                self._changed.notify_all()
            return handed

    def _fail(self, error: CheckpointError) -> None:
        if self._on_warning is None:
            with self._changed:
                self._failure = error
        else:
            self._warn(f"{error}; training goes on without it")

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _warn(self, text: str) -> None:
        if self._on_warning is None:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        else:
            self._on_warning(text)


def _copied(state: GlobalState, buffers: _Copies) -> tuple[GlobalState, _Copies]:
    """Copy a state into the tensors of an earlier copy: fresh memory takes several times as long to fill."""
    copies: _Copies = {}
    groups: dict[str, dict[str, Tensor]] = {"parameters": {}, "outer": {}}
    for group, members in groups.items():
        for name, tensor in getattr(state, group).items():
            old = buffers.pop((group, name), None)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                old = torch.empty(tensor.shape, dtype=tensor.dtype)
            members[name] = copies[group, name] = old.copy_(tensor.detach())
    note = copying.deepcopy(dict(state.note))
    return GlobalState(step=state.step, note=note, **groups), copies
