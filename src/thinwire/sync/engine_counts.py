"""Counts of a round engine between two steps: costs, work that no round has counted, and rounds in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import CheckpointError
from thinwire.sync.in_flight import InFlight
from thinwire.sync.schedule import Round


@dataclass(slots=True)
class SyncStatistics:
    """Costs of synchronisation on this replica so far.

    Attributes:
        rounds_launched: Rounds sent.
        rounds_applied: Rounds applied.
        rounds_missed: Rounds among them whose mean does not hold this replica's part, because it came too late.
        steps_passed: Steps that this replica passed over to catch up with faster ones.
        stalled_s: Seconds the training thread waited for the wire.
        launching_s: Seconds it spent on reading, encoding and starting to send.
        applying_s: Seconds it spent on outer steps and blends.
    """

    rounds_launched: int = 0
    rounds_applied: int = 0
    rounds_missed: int = 0
    steps_passed: int = 0
    stalled_s: float = 0.0
    launching_s: float = 0.0
    applying_s: float = 0.0

    @property
    def exchanging_s(self) -> float:
        """Seconds of the training thread that were not training: waiting, launching and applying."""
        return self.stalled_s + self.launching_s + self.applying_s


class UncountedWork:
    """Tokens and inner steps of one replica: all of them, and up to each fragment's last round that counted them.

    Args:
        num_fragments: How many fragments there are.

    Example:
        >>> work = UncountedWork(num_fragments=1)
        >>> work.add_step(num_tokens=5)
        >>> work.since(0)
        (5, 1)
    """

    def __init__(self, *, num_fragments: int) -> None:
        self._done = (0, 0)
        self._counted = [(0, 0)] * num_fragments
        self._launched: dict[int, tuple[int, int]] = {}

    @property
    def num_steps(self) -> int:
        """All inner steps."""
        return self._done[1]

    @property
    def num_missing_steps(self) -> int:
        """Inner steps since the last counted round of the fragment whose one lies furthest back."""
        return max((self._done[1] - num_steps for _, num_steps in self._counted), default=0)

    def add_step(self, *, num_tokens: int) -> None:
        """Take in one inner step."""
        self._done = (self._done[0] + num_tokens, self._done[1] + 1)

    def since(self, fragment: int) -> tuple[int, int]:
        """Return tokens and steps since the fragment's last round that counted this replica's part."""
        counted = self._counted[fragment]
        return self._done[0] - counted[0], self._done[1] - counted[1]

    def launch(self, round: Round) -> None:
        """Record the work in a round's part."""
        self._launched[round.id] = self._done

    def discard(self, round: Round) -> None:
        """Forget that a round was launched, since it exchanges no work of inner steps."""
        self._launched.pop(round.id, None)

    def settle(self, round: Round, *, is_counted: bool) -> None:
        """Record whether a round counted its part."""
        launched = self._launched.pop(round.id, None)
        if is_counted and launched is not None:
            self._counted[round.fragment] = launched

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        launched = {str(number): list(done) for number, done in self._launched.items()}
        return {"done": list(self._done), "counted": [list(one) for one in self._counted], "launched": launched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It is of another number of fragments.
        """
        if len(state["counted"]) != len(self._counted):
            raise CheckpointError(
                f"the checkpoint counts the work of {len(state['counted'])} fragments, this run has "
                f"{len(self._counted)}; resume with its method and model"
            )
        self._done = _pair(state["done"])
        self._counted = [_pair(one) for one in state["counted"]]
        self._launched = {int(number): _pair(done) for number, done in state["launched"].items()}


def _pair(numbers: list[int]) -> tuple[int, int]:
    num_tokens, num_steps = numbers
    return num_tokens, num_steps


@dataclass(slots=True, kw_only=True)
class EngineState:
    """Engine state between two steps.

    Attributes:
        work: Tokens and steps that no round has counted yet.
        in_flight: Rounds between launch and apply, by id in the order of their launch.
        applied_early: Ids of rounds that a flush applied before they were due.
        settling: Applied rounds whose result late members may still request.
        failed: The round that failed last.
        reached_step: The last step whose rounds were launched.
    """

    work: UncountedWork
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    applied_early: set[int] = field(default_factory=set)
    settling: list[InFlight] = field(default_factory=list)
    failed: Round | None = None
    reached_step: int = 0

    def drop_settled(self) -> None:
        """Drop the rounds whose result no member can request any more."""
        if self.settling:
            self.settling = [flight for flight in self.settling if not flight.is_settled()]
