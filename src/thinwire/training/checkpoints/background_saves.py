"""States are written behind the back of training: one at a time, the newest waits, a failure is told and not thrown."""

from __future__ import annotations

import copy as copying
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.global_state import GlobalState

_Copies = dict[tuple[str, str], Tensor]


class BackgroundSaves:
    """Hands states to a thread that writes them.

    Args:
        write: Writes one state; raises CheckpointError where it cannot.
        on_warning: Is told what went wrong and what was left out, by the writing thread or by the caller's. Without
            it, a failure is raised at the next call, and what was left out is a Python warning.
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
        """Let a state be written; in place of one that still waits.

        Args:
            state: What is written.
            copy: Whether its tensors may change after this call, so that they are copied first.

        Raises:
            CheckpointError: An earlier one could not be written, and there is no `on_warning`; this one is written all
                the same.
        """
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
        """Wait until nothing is left to write.

        Args:
            deadline_s: How long to wait at most; None waits for ever.

        Returns:
            Whether nothing is left to write.

        Raises:
            CheckpointError: One could not be written, and there is no `on_warning`.
        """
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
                    self._fail(CheckpointError(f"the checkpoint of step {state.step} could not be written: {error!r}"))
                with self._changed:
                    self._spare = copies or self._spare
        except BaseException:
            # `on_warning` has failed: whoever waits goes on, and the next state gets a thread of its own
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            raise

    def _take(self) -> tuple[GlobalState, _Copies] | None:
        with self._changed:
            handed, self._waiting = self._waiting, None
            if handed is None:  # said under the same lock, so that nothing is handed to a thread that ends
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

    def _warn(self, words: str) -> None:
        if self._on_warning is None:
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        else:
            self._on_warning(words)


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
