"""Checkpoints of an elastic run: one state that replicas of any number go on from, and that plain PyTorch loads.

At any instant, also where the writer is killed, a checkpoint either verifies or does not count. One process writes to a
place at a time; any number may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.background_saves import BackgroundSaves
from thinwire.training.checkpoints.checkpoint import reason_of
from thinwire.training.checkpoints.global_state import GlobalState
from thinwire.training.checkpoints.places import open_place
from thinwire.training.checkpoints.state_files import Description, ForeignCheckpoint, StateFiles
from thinwire.training.run_identity import RunIdentity


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


class GlobalCheckpoints:
    """The checkpoints of one elastic run.

    Args:
        folder_or_url: Where they are kept: a folder, or a URL that fsspec knows, such as `s3://bucket/run`.
        keep_last: How many of the newest stay, of those that verify; at least 1.
        keep_every: Those whose step is a multiple of it stay too; None keeps no more.
        run: The run that writes and reads here: states of another run are refused. None, for a loop of your own, reads
            every run's.
        on_warning: Is told in a line what went wrong with a save and what was left out, also by the thread that
            writes. Without it, the next `save` or `wait` raises what went wrong.

    Attributes:
        place: What the place is called in messages; without a URL's password.

    Raises:
        ValueError: A number is out of its range, or the URL is of no known kind.
        MissingExtra: The package for the URL is not installed; says which.

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
        place = open_place(folder_or_url)
        self.place = place.name
        self._run = run
        self._files = StateFiles(place, run=run)
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
        """Wait until nothing is left to write.

        Args:
            deadline_s: How long to wait at most; None waits for ever.

        Returns:
            Whether nothing is left to write.

        Raises:
            CheckpointError: Without `on_warning`: a state could not be written.
        """
        return self._saves.wait(deadline_s)

    def write(self, state: GlobalState) -> None:
        """Write a state here and now, then remove what need not be kept.

        Raises:
            CheckpointError: It could not be written, or older ones not be removed; names the remedy. Checkpoints of
                other steps are untouched.
        """
        self._verified.discard(state.step)
        self._files.write(state)
        self._verified.add(state.step)
        try:
            self._prune(state.step)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {state.step} is whole, but older ones in {self.place} cannot be removed: "
                f"{reason_of(error)}; remove them by hand before they fill it"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps whose checkpoints were brought to an end, in order, verified or not.

        Raises:
            CheckpointError: The place cannot be listed.
        """
        return self._files.steps()

    def problem(self, step: int) -> str:
        """Read all of a checkpoint and check its hashes; return what is wrong with it, or an empty text."""
        self._verified.discard(step)
        try:
            self._files.verify(step)
        except CheckpointError as error:
            return str(error)
        self._verified.add(step)
        return ""

    def describe(self, step: int) -> Description:
        """Read what a checkpoint says of itself; its files' sizes are checked, and their content is not.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        return self._files.describe(step)

    def load(self, step: int) -> GlobalState:
        """Read and check the state after a step. Any number of replicas may go on from it.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        state = self._files.load(step)
        self._verified.add(step)
        return state

    def latest(self) -> Latest:
        """Load the newest state that verifies.

        Raises:
            ForeignCheckpoint: One is of another run; names both.
            CheckpointError: There are checkpoints and none verifies, or the place cannot be listed.
        """
        problems: list[str] = []
        for step in self._files.newest_first():
            try:
                state = self.load(step)
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                problems.append(str(error).partition(";")[0])
            else:
                warnings = tuple(f"{told}; going on from step {step}" for told in problems)
                age = 0 if self._run is None else self._run.age(self.describe(step).run)
                return Latest(state=state, warnings=warnings, age=age)
        if problems:
            raise CheckpointError(f"{problems[0]}, and no earlier one is whole; mend it, or begin in another place")
        return Latest(state=None)

    def readable_step(self, wanted: int = 0) -> int:
        """Return a step whose checkpoint can be read as its JSON states: the wanted one if it can, else the newest.

        Returns:
            The step; 0 where there is none.

        Raises:
            ForeignCheckpoint: One is of another run; names both.
            CheckpointError: The place cannot be listed.
        """
        steps = self._files.newest_first()
        for step in sorted(steps, key=lambda step: step != wanted):
            try:
                self.describe(step)
            except CheckpointError:
                continue
            return step
        return 0

    def remove(self, step: int) -> None:
        """Remove a checkpoint, whichever run's it is.

        Raises:
            CheckpointError: It cannot be removed.
        """
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

        Raises:
            CheckpointError: One could not be removed.
        """
        self.wait()
        for later in self.steps():
            if later > step:
                self.remove(later)

    def _prune(self, just_written: int) -> None:
        folders = self._files.folders()
        oldest_kept = self._oldest_kept([step for step, is_complete in folders.items() if is_complete])
        for step, is_complete in folders.items():
            is_marked = self._keep_every is not None and step % self._keep_every == 0
            is_needless = step < oldest_kept and not is_marked
            # what was not brought to an end is what a killed writer left
            if step != just_written and (is_needless or not is_complete):
                self._verified.discard(step)
                self._files.remove(step)

    def _oldest_kept(self, steps: list[int]) -> int:
        """Return the last of the newest that stay; those that do not verify are no reason to remove one that does."""
        whole = 0
        for step in sorted(steps, reverse=True):
            whole += step in self._verified or not self.problem(step)
            if whole == self._keep_last:
                return step
        return 0
