"""Log of the rounds that a replica applied, with a hash of its global parameters: a JSON line each.

Replicas that applied the same round hold the same bits; the files of all replicas prove it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from thinwire.averaging.round_context import Average
from thinwire.monitor.runlog.line_file import LineFile
from thinwire.sync.engine import Engine
from thinwire.sync.schedule import Round


class RoundLog:
    """Writes `rounds-replica-N.jsonl`, a line for each round as it is applied.

    Args:
        run_dir: The run's folder on this host.
        replica: This replica.
        engine: Whose rounds; its `on_applied` is taken.
        warn: Told where there is no room for the file.
    """

    def __init__(
        self, run_dir: Path, *, replica: int, engine: Engine, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        # a line at a time, so that a replica that is killed leaves whole lines
        self._file = LineFile(run_dir / f"rounds-replica-{replica}.jsonl", warn=warn)
        self._engine = engine
        engine.on_applied = self._note

    def close(self) -> None:
        """Write no more."""
        self._engine.on_applied = lambda round, average: None
        self._file.close()

    def _note(self, round: Round, average: Average) -> None:
        line = {
            "round": round.id, "fragment": round.fragment, "launch_step": round.launch_step,
            "members": list(average.members), "is_counted": average.is_counted,
            "crc": self._engine.view.parameters.reference_hash(round.fragment), "at_s": _milliseconds(time.time()),
        }  # fmt: skip
        self._file.write(json.dumps(line, separators=(",", ":")), is_last=True)


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3)
