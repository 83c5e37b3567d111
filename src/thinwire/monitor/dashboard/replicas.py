"""Progress of one replica from its own files: step, loss, rate, and whether it still writes."""

from __future__ import annotations

from collections import deque
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.dashboard.downsampling import Curve
from thinwire.monitor.runlog.run_folder import EvaluationLine, StepLine, parse

_MOST_EVALUATIONS = 1000
_MOST_WARNINGS = 10
_MOST_TEXT = 500
# One that is alive writes a line an interval, but evaluating and compiling take their time between two.
_LEAST_SILENCE_S, _INTERVALS = 60.0, 3.0


class Replica:
    """The lines of one replica's metrics.

    Args:
        number: The replica.

    Attributes:
        number: The replica.
        last: Its latest line about steps; none before the first.
        loss: Its training loss by step.
        speed: Its tokens per second, by seconds of its training.
        evaluations: Its parts of the latest evaluations, by step.
        warnings: The latest, with their steps.
        error: Its last words; empty while it goes on.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.restart()

    def restart(self) -> None:
        """Forget all lines: the file is read anew."""
        self.last: StepLine | None = None
        self.loss = Curve()
        self.speed = Curve()
        self.evaluations: dict[int, EvaluationLine] = {}
        self.warnings: deque[tuple[int, str]] = deque(maxlen=_MOST_WARNINGS)
        self.error = ""
        self._interval_s = 0.0

    def take(self, told: dict[str, Any]) -> tuple[StepLine, StepLine | None] | None:
        """Take a line in, and return it with the one before it where it is about steps.

        Raises:
            ValueError: It is no line of metrics.
        """
        try:
            match told.get("kind"):
                case "step":
                    return self._take_step(parse(StepLine, told, source="the line"))
                case "eval":
                    part = parse(EvaluationLine, told, source="the line")
                    self.evaluations[part.step] = part
                    if len(self.evaluations) > _MOST_EVALUATIONS:
                        self.evaluations.pop(next(iter(self.evaluations)))
                case "error":
                    self.error = str(told.get("message", "unknown error"))[:_MOST_TEXT]
                case "warning":
                    self.warnings.append((int(told.get("step", 0)), str(told.get("message", ""))[:_MOST_TEXT]))
                case other:
                    raise ValueError(f"a line of the unknown kind {str(other)[:40]!r}")
        except (DataError, TypeError) as error:
            raise ValueError(str(error)) from None
        return None

    def _take_step(self, line: StepLine) -> tuple[StepLine, StepLine | None]:
        before = self.last if self.last is not None and self.last.step < line.step else None
        self.last, self.error = line, ""  # a resumed run goes on after an error
        if before is not None:
            self._interval_s = max(0.0, line.time_s - before.time_s)
        self.loss.add(line.step, line.loss)
        self.speed.add(line.time_s, line.tokens_per_s)
        return line, before

    @property
    def silence_s(self) -> float:
        """Seconds without a word after which it is taken to be away, where it writes at its intervals only."""
        return max(_LEAST_SILENCE_S, _INTERVALS * self._interval_s)

    def to_json(self) -> dict[str, Any]:
        """Return what the page shows of its latest line."""
        line = self.last
        if line is None:
            return {"replica": self.number, "error": self.error}
        return {
            "replica": self.number, "error": self.error, "step": line.step, "loss": line.loss, "tokens": line.tokens,
            "tokens_per_s": line.tokens_per_s, "compute_fraction": line.compute_fraction,
            "sent_bytes": line.sent_bytes, "received_bytes": line.received_bytes,
            "sent_bits_per_s": line.sent_bits_per_s, "peak_bits_per_s": line.peak_bits_per_s,
            "rounds_in_flight": line.rounds_in_flight, "time_s": line.time_s,
        }  # fmt: skip
