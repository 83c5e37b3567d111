"""Log of the rounds that a replica applied, with a hash of its global parameters: a JSON line each.

Replicas that applied the same round hold the same bits; the files of all replicas prove it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from thinwire.averaging.round_context import Average
from thinwire.events import RoundMark
from thinwire.monitor.runlog.writer import JsonlWriter
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round


class RoundLog:
    """Writes `rounds-replica-N.jsonl`, a line for each round as it is applied.

    Args:
        run_dir: The run's folder on this host.
        replica: This replica.
        engine: Whose rounds.
        warn: Told where there is no room for the file.
    """

    def __init__(
        self, run_dir: Path, *, replica: int, engine: RoundEngine, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        # a line at a time, so that a replica that is killed leaves whole lines
        self._file = JsonlWriter(run_dir / f"rounds-replica-{replica}.jsonl", warn=warn)
        self._engine = engine
        engine.observers.append(self)

    def close(self) -> None:
        """Write no more."""
        self._engine.observers.remove(self)
        self._file.close()

    def on_mark(self, mark: RoundMark) -> None:
        """Ignore it: only applied rounds are logged."""

    def on_applied(self, round: Round, average: Average) -> None:
        """Write the line of a round."""
        line = {
            "round": round.id, "fragment": round.fragment, "launch_step": round.launch_step,
            "members": list(average.members), "is_counted": average.is_counted,
            "crc": self._engine.view.parameters.reference_hash(round.fragment), "at_s": _milliseconds(time.time()),
        }  # fmt: skip
        self._file.write(json.dumps(line, separators=(",", ":")), is_last=True)


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3)
