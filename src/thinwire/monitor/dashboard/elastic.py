"""Elastic part of a run's folder: the coordinator's journal, and the rounds that replicas applied."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from thinwire.monitor.dashboard.findings_reader import text

_MOST_MEMBERS, _MOST_SAID, _MOST_ROUNDS = 512, 30, 24


class Journal:
    """Who takes part, as the coordinator wrote it; it holds what only replicas may know, and nothing of that is kept.

    Attributes:
        members: By replica: host, standing, and how it did when its standing last changed.
        is_finished: Whether the coordinator wrote that the job is over.
        is_there: Whether there was any line.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all."""
        self.members: dict[int, dict[str, Any]] = {}
        self.is_finished = False
        self.is_there = False
        self._said: deque[str] = deque(maxlen=_MOST_SAID)

    def take(self, line: dict[str, Any]) -> None:
        """Take a line in.

        Raises:
            ValueError: It holds what the coordinator does not write.
        """
        self.is_there = True
        match line.get("what"):
            case "member":
                number = _replica(line.get("replica"))
                if number not in self.members and len(self.members) >= _MOST_MEMBERS:
                    self.members.pop(next(iter(self.members)))
                self.members[number] = {
                    "replica": number, "host": text(line.get("host")), "standing": text(line.get("state")),
                    "step": int(_number(line.get("step"))), "loss": _number(line.get("loss")),
                    "tokens_per_s": _number(line.get("tokens_s")), "is_paused": line.get("paused") is True,
                }  # fmt: skip
            case "gone":
                own = self.members.get(_replica(line.get("replica")))
                if own is not None and own["standing"] != "done":
                    own["standing"] = "gone"
            case "finding":
                self._said.append(text(line.get("text")))
            case "finished":
                self.is_finished = True

    def said(self) -> list[str]:
        """Return what the coordinator noted, the latest first."""
        return list(reversed(self._said))


class AppliedRounds:
    """The latest rounds that one replica applied, from its `rounds-replica-N.jsonl`."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._rounds: deque[dict[str, Any]] = deque(maxlen=_MOST_ROUNDS)

    def restart(self) -> None:
        """Forget all."""
        self._rounds.clear()

    def take(self, line: dict[str, Any]) -> None:
        """Take a line in.

        Raises:
            ValueError: It is no line about a round.
        """
        members = line.get("members")
        if not isinstance(members, list):
            raise ValueError("members is no list")
        self._rounds.append({
            "round": int(_number(line.get("round"))), "fragment": int(_number(line.get("fragment"))),
            "launch_step": int(_number(line.get("launch_step"))), "at": _number(line.get("at_s")),
            "members": [_replica(one) for one in members[:_MOST_MEMBERS]], "is_counted": line.get("is_counted") is True,
            "told_by": self._replica,
        })  # fmt: skip

    def rounds(self) -> list[dict[str, Any]]:
        """Return them, the latest first."""
        return list(reversed(self._rounds))


def _replica(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 20:
        raise ValueError(f"no number of a replica: {str(value)[:40]!r}")
    return value


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(value) > 1e15:  # type: ignore[arg-type]
        raise ValueError(f"no number: {str(value)[:40]!r}")
    return float(value)  # type: ignore[arg-type]
