"""Rejected lines of a run's files: counted, and the first few quoted."""

from __future__ import annotations

_MOST_NAMED = 12


class Refused:
    """Counts what was refused.

    Attributes:
        count: How many lines or files.
    """

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, where: str, reason: str) -> None:
        """Count one, and name it where it is among the first.

        Args:
            where: The file and line.
            reason: Why.
        """
        self.count += 1
        if len(self._named) < _MOST_NAMED:
            self._named.append(f"{where}: {reason[:300]}")

    def told(self) -> list[str]:
        """Return those that were named, and how many were not."""
        left = self.count - len(self._named)
        return [*self._named, *([f"{left} more"] if left else [])]
