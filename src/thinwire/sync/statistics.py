"""Counters of what synchronisation costs."""

from __future__ import annotations

from dataclasses import dataclass


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
