"""A job of torchft's in a lab: a Lighthouse on the last host, a replica on each other one, and what they told."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.lab import HostProcess, Lab, rank_environment

REPLICA = Path(__file__).parent / "torchft_replica.py"
LIGHTHOUSE = str(Path(sys.executable).parent / "torchft_lighthouse")
PORT = 29510
POLL_S = 0.05
Event = dict[str, Any]


class Job:
    """What runs in one lab; the lab ends it all."""

    def __init__(
        self, lab: Lab, *, num_replicas: int, min_replicas: int = 1, state_bytes: int = 4, **more: str
    ) -> None:
        self.lab = lab
        self.num_replicas = num_replicas
        self._min_replicas = min_replicas
        self._state_bytes = state_bytes
        self.lighthouse_host = num_replicas
        self.url = f"http://{lab.address(self.lighthouse_host)}:{PORT}"
        self.logs: dict[int, Path] = {}
        self._variables = more
        self._starts = 0
        self.limit_s = 60
        self.go = lab.folder / "go"
        self.go.touch()

    def start_lighthouse(self) -> HostProcess:
        """Start it with its own default time-outs: heartbeat 5 s, join 60 s, tick 100 ms."""
        words = [LIGHTHOUSE, "--bind", f"[::]:{PORT}", "--min_replicas", str(self._min_replicas)]
        return self._start(words, host=self.lighthouse_host, name="lighthouse")

    def start(self, replica: int, *, host: int | None = None, first_step: int = 0) -> HostProcess:
        place = replica if host is None else host
        words = [
            sys.executable, str(REPLICA), f"replica_{replica}", self.url, self.lab.address(place),
            str(self._min_replicas), str(self._state_bytes), str(first_step), str(self.go), str(self.limit_s),
        ]  # fmt: skip
        return self._start(words, host=place, name=f"replica-{replica}")

    def events(self, replica: int) -> list[Event]:
        """Return what the latest process of a replica has told so far."""
        lines = self.logs[replica].read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def commits(self, replica: int, *, since_s: float = 0.0, participants: int | None = None) -> list[Event]:
        return [
            event
            for event in self.events(replica)
            if event["event"] == "step" and event["ok"] and event["at_s"] > since_s
            and participants in (None, event["participants"])
        ]  # fmt: skip

    def has_committed(self, replicas: range | list[int], *, steps: int, since_s: float, participants: int) -> bool:
        return all(len(self.commits(n, since_s=since_s, participants=participants)) >= steps for n in replicas)

    def _start(self, words: list[str], *, host: int, name: str) -> HostProcess:
        self._starts += 1
        log = self.lab.folder / f"{name}-{self._starts}.out"
        if name.startswith("replica"):
            self.logs[int(name.split("-")[1])] = log
        variables = {**rank_environment(host, self.lab.num_hosts), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        variables |= self._variables
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            return self.lab.start(words, host=host, environment=variables, stdout=out, stderr=err)


def wait_until(condition: Callable[[], bool], *, deadline_s: float) -> bool:
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"never in {len(values)} runs"
    text = f"{statistics.median(known):.1f} ({min(known):.1f} to {max(known):.1f}, {len(known)} runs)"
    return text if len(known) == len(values) else f"{text}, never in {len(values) - len(known)}"


def note(path: Path, row: dict[str, Any]) -> None:
    """Append a row to the results, and show it."""
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
