"""How soon a run finds its own fault and acts on it: one of three replicas on this machine is stopped (SIGSTOP).

    python benchmarks/diagnosis/steering.py --action exclude --repeats 3
    python benchmarks/diagnosis/steering.py --action restart --repeats 3
    python benchmarks/diagnosis/steering.py --action warn --repeats 3
    python benchmarks/diagnosis/steering.py --action restart --repeats 3 --joined
    python benchmarks/diagnosis/steering.py --action replace --repeats 3

Real processes on loopback. Each time is from the signal: until the finding stands in `findings.jsonl`, until the action
was done (`actions.jsonl`), until the coordinator has let the replica go, and, with `restart` and `replace`, until
another one takes part in its place; with `replace` that is one of a spare host, a launcher that waits. With `warn`
nobody acts on the finding, so the replica is let go for its silence, as without any diagnosis. With `--joined` the one
that is stopped belongs to a launcher of its own, as on another host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.errors import ThinwireError
from thinwire.training.elastic.job import LocalSettings
from thinwire.training.elastic.remediation import read_pid
from thinwire.transport.secret import read_secret

RESULTS = Path(__file__).parents[1] / "results" / "steering.jsonl"
_SOON_S = 180.0


def words(out: Path, *, action: str, replicas: int, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "thinwire.cli.main", "train", "--elastic", "--replicas", str(replicas), "--steps",
        str(steps), "--out", str(out), "--port", "0", "--address", "127.0.0.1", "--batch-size", "1", "--seq-len", "32",
        "--sync-interval", "20", "--overlap-steps", "2", "--threads", "1", "--eval-every", "0", "--checkpoint-every",
        "0", "--log-every", "10", "--on-finding", action, "--eval-batches", "1", "--final-eval-batches", "1",
    ]  # fmt: skip


class Play:
    """A run, and what its files and its coordinator say."""

    def __init__(self, out: Path, process: subprocess.Popen[str]) -> None:
        self.out = out
        self.process = process
        self.others: list[Path] = []

    def wait(self, what: Callable[[], Any], *, name: str) -> Any:
        until_s = time.monotonic() + _SOON_S
        while not (found := what()):
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended while {name} was waited for; see {self.out}")
            if time.monotonic() > until_s:
                raise SystemExit(f"{name} did not come in {_SOON_S:g} s; see {self.out}")
            time.sleep(0.1)
        return found

    def status(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, ThinwireError):
            settings = LocalSettings.load(self.out)
            answer = send_command(
                read_invitation(settings.invitation), secret=read_secret(Path(settings.secret)), deadline_s=10,
                verb="status", target="",
            )  # fmt: skip
            found: dict[str, Any] = answer["status"]
            return found
        return None

    def active(self) -> set[int]:
        status = self.status()
        return {one["replica"] for one in status["members"] if one["state"] == "active"} if status else set()

    def step(self) -> int:
        status = self.status()
        return int(status["step"]) if status else 0

    def line(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        path = self.out / name
        lines = path.read_text().splitlines() if path.exists() else []
        return next((told for told in map(json.loads, lines) if holds(told)), None)


@contextlib.contextmanager
def started(out: Path, options: argparse.Namespace) -> Iterator[Play]:
    line = words(out, action=options.action, replicas=options.replicas - options.joined, steps=100_000)
    with (out.parent / "log").open("w") as log, contextlib.ExitStack() as stack:
        process = subprocess.Popen(line, stdout=log, stderr=log, text=True)
        stack.callback(end, process)
        play = Play(out, process)
        if options.joined:
            play.wait(lambda: len(play.active()) == options.replicas - 1, name="the first host's replicas")
            play.others.append(out.parent / "joined")
            stack.callback(end, join(play, play.others[0], log))
        if options.action == "replace":
            play.wait(lambda: len(play.active()) == options.replicas, name="all replicas")
            stack.callback(end, join(play, out.parent / "spare", log, "--spare"))
            play.wait(lambda: (play.status() or {}).get("spares"), name="the spare")
        yield play


def join(play: Play, other: Path, log: Any, *more: str) -> subprocess.Popen[str]:
    settings = LocalSettings.load(play.out)
    line = [sys.executable, "-m", "thinwire.cli.main", "join", settings.invitation, "--secret", settings.secret]
    return subprocess.Popen([*line, "--out", str(other), "--threads", "1", *more], stdout=log, stderr=log, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(60)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, started(Path(folder) / "run", options) as play:
        try:
            play.wait(lambda: len(play.active()) == options.replicas, name="all replicas")
            play.wait(lambda: play.step() >= options.warm_steps, name="the first steps")
            path = play.out / "findings.jsonl"
            early = path.read_text().splitlines() if path.exists() else []
            row = {**stop_one(play, options), "findings_before": early}
            play.process.send_signal(signal.SIGTERM)
            play.process.wait(60)
            lost = play.out / "downtime.json"
            return {**row, "downtime": json.loads(lost.read_text()) if lost.exists() else None}
        finally:
            if options.verbose:
                print((play.out.parent / "log").read_text(), file=sys.stderr)


def stop_one(play: Play, options: argparse.Namespace) -> dict[str, Any]:
    """Stop a replica and see what comes of it."""
    victim = max(play.active())
    pid = next((one for out in (play.out, *play.others) if (one := read_pid(out, victim)) is not None), None)
    assert pid is not None
    began_s = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        found = play.wait(lambda: play.line("findings.jsonl", lambda one: one["at"] > began_s), name="the finding")
        acted = play.wait(lambda: play.line("actions.jsonl", lambda one: one["at"] > began_s), name="the action")
        play.wait(lambda: victim not in play.active(), name="that the replica is let go")
        row = {
            "victim": victim, "kind": found["finding"]["kind"], "where": found["finding"]["where"],
            "found_s": round(found["at"] - began_s, 2), "action": acted["action"], "target": acted["target"],
            "result": acted["result"], "acted_s": round(acted["at"] - began_s, 2),
            "gone_s": round(time.time() - began_s, 2), "back_s": None,
        }  # fmt: skip
        if options.action in ("restart", "replace"):
            play.wait(lambda: len(play.active()) == options.replicas, name="another replica")
            row["back_s"] = round(time.time() - began_s, 2)
        step = play.step()
        play.wait(lambda: play.step() > step, name="the next round")
        return row
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--action", choices=("warn", "exclude", "restart", "replace"), default="exclude")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--joined", action="store_true", help="the one that is stopped is of a host that joined")
    parser.add_argument("--warm-steps", type=int, default=200)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    rows = []
    for _ in range(options.repeats):
        rows.append(measure(options))
        print(json.dumps(rows[-1]), flush=True)
    medians = {
        name: statistics.median(row[name] for row in rows)
        for name in ("found_s", "acted_s", "gone_s", "back_s")
        if rows[0][name] is not None
    }
    whole = {"action": options.action, "replicas": options.replicas, "repeats": options.repeats, "medians": medians}
    print(json.dumps(whole))
    if options.write:
        with RESULTS.open("a") as file:
            asked = {"asked": options.action, "joined": options.joined}
            file.writelines(json.dumps({**asked, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
