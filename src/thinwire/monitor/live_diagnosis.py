"""Live diagnosis of a run while it trains: reads the records of this host, reports findings, and acts on them.

One thread of low priority in the process that started the run. It takes at most a tenth of one core's time, and does
nothing if there are no records. A fault of its own is reported and never ends the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.monitor.detect.live import LiveDetector, News
from thinwire.monitor.findings import Finding
from thinwire.monitor.remediation import Action, Steering
from thinwire.runlog.path_limits import FINDING_LIMIT, PATH_LIMITS_FILE, PathLimit, write_path_limits
from thinwire.runlog.process_state import SilentProcesses
from thinwire.runlog.run_folder import MEMBERS_FILE
from thinwire.runlog.tailer import RecordTailer
from thinwire.runlog.writer import JsonlWriter
from thinwire.transport.addresses import host_name
from thinwire.units import format_bytes, format_moment

FINDINGS_FILE = "findings.jsonl"
ACTIONS_FILE = "actions.jsonl"
_RECORDS = "records-rank-*.jsonl"
LOOK_S = 0.5
# A first detection is checked again so soon, before it is reported.
SOON_S = 0.25
# Of one core: after a poll of 0.2 s come 2 s without one.
_MOST_SHARE = 0.1
_NICER = 10
_STOP_S = 10.0
# A place that is slow again so soon after it was reported is in the same episode.
_EPISODE_S = 120.0
_MOST_FILES = 4096
# Room for what ranks write between two polls.
_LEAST_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Members of a run."""

    present: frozenset[int] = frozenset()  # ranks (an elastic run's replicas) that take part
    resting: frozenset[int] = frozenset()  # of these, the paused ones
    gone: frozenset[int] = frozenset()  # of these, those whose process is known to have ended
    ended: frozenset[int] = frozenset()  # others that the run still lists: they have finished, or not begun
    num_spares: int = 0  # hosts on standby


class Hands(Protocol):
    """Control of a run: its members, and actions on them."""

    def members(self) -> Members | None:
        """Return the members; None if unknown, so that all ranks count."""
        ...

    def act(self, action: Action) -> str:
        """Execute an action, and return a sentence on its result."""
        ...


class LiveDiagnosis:
    """Diagnoses a run in a thread; use it as a context, or call `start` and `stop`.

    Args:
        run_dir: The run's folder on this host.
        say: Receives one line for each finding and action.
        steering: Decides on actions.
        hands: Executes them.
        is_dry_run: Whether actions are only reported.
        judge: Detectors; made by default.
        is_mine: Whether this host diagnoses now; if another one does, records are read and nothing is reported.
        is_said: Whether a finding is reported and counted, and not only written to `findings.jsonl`.
    """

    def __init__(
        self, run_dir: Path, *, say: Callable[[str], None], steering: Steering, hands: Hands, is_dry_run: bool = False,
        judge: LiveDetector | None = None, is_mine: Callable[[], bool] = lambda: True,
        is_said: Callable[[Finding], bool] = lambda finding: True,
    ) -> None:  # fmt: skip
        self._run_dir = run_dir
        self._say = say
        self._steering = steering
        self._hands = hands
        self._is_dry_run = is_dry_run
        self._judge = judge or LiveDetector(own_host=host_name())
        self._is_mine = is_mine
        self._is_said = is_said
        self._tails: dict[Path, RecordTailer] = {}
        self._processes = SilentProcesses(run_dir)
        self._earlier = {path: _mark(path) for path in run_dir.glob(_RECORDS)}
        self._stop = threading.Event()
        self._last_problem = ""
        self._ever: frozenset[int] = frozenset()
        self._noted: tuple[frozenset[int], frozenset[int]] | None = None
        self._is_full = False
        self._files: dict[str, JsonlWriter] = {}
        self._limits: dict[int, PathLimit] = {}
        self._slow_s: dict[str, float] = {}  # by slow place: when it was last reported, new or over
        self._unsaid: set[int] = set()  # cases of places that were reported shortly before
        # reported findings, new or over, with the time in seconds since 1970
        self.news: list[tuple[float, News]] = []
        # the lines of `actions.jsonl`
        self.actions: list[dict[str, Any]] = []
        self.num_looks = 0  # polls so far
        self.busy_s = 0.0  # seconds of one core that they took
        self._thread = threading.Thread(target=self._run, name="thinwire-diagnosis", daemon=True)

    def __enter__(self) -> LiveDiagnosis:
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread; limits of paths that an earlier part of the run has left are over."""
        with contextlib.suppress(OSError):
            (self._run_dir / PATH_LIMITS_FILE).unlink(missing_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; stopping twice is fine."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        for file in self._files.values():
            file.close()

    def poll(self) -> None:
        """Read new records, diagnose, report and act; called by the thread."""
        began_s = time.thread_time()
        self._see_room()
        self._read()
        members = self._hands.members() if self._tails else None
        self._note_members(members)
        if self._tails and self._is_mine():
            self.num_looks += 1
            # ranks with records that take no part any more, or are paused
            without = frozenset() if members is None else self._judge.ranks() - members.present | members.resting
            for news in self._judge.update(without=without):
                self._report(news)
                if news.finding.places[0].kind == "path":
                    self._limit_path(news)
                else:
                    self._act(news, members)
            for news in self._judge.open_findings() if self._steering.unsure else ():
                if news.case in self._steering.unsure:
                    self._act(news, members)
        self._warn_once(self._judge.problem and f"the rules failed: {self._judge.problem}")
        self.busy_s += time.thread_time() - began_s

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICER)
        pause_s = LOOK_S
        while not self._stop.wait(pause_s):
            busy_s, was_soon = self.busy_s, pause_s == SOON_S
            try:
                self.poll()
            except Exception as error:  # the run goes on without its diagnosis
                self._warn_once(f"{type(error).__name__}: {error}")
            pause_s = max(LOOK_S, (self.busy_s - busy_s) / _MOST_SHARE)
            if self._judge.is_unsure and not was_soon:
                pause_s = SOON_S

    def _read(self) -> None:
        for path in sorted(self._run_dir.glob(_RECORDS)):
            if path.name.endswith(".old.jsonl"):
                continue
            if path not in self._tails:  # written now, and not of an earlier part of the run
                mark = _mark(path)
                if len(self._tails) >= _MOST_FILES or mark is None or mark == self._earlier.get(path):
                    continue
            tail = self._tails.setdefault(path, RecordTailer(path))
            self._judge.add(tail.new_records())
        self._judge.add(self._processes.sample())

    def _note_members(self, members: Members | None) -> None:
        """Write the present and removed members whenever they change, for `thinwire diagnose`."""
        if members is None:
            return
        self._ever |= members.present
        removed = self._ever - members.present - members.ended
        if (members.present, removed) != self._noted:
            self._noted = members.present, removed
            line = {"at": round(time.time(), 3), "present": sorted(members.present), "removed": sorted(removed)}
            self._append(MEMBERS_FILE, line)

    def _see_room(self) -> None:
        """Warn about a full disk: the diagnosis then lacks the records that wait."""
        for file in self._files.values():
            file.flush()
        try:
            free_bytes = shutil.disk_usage(self._run_dir).free
        except FileNotFoundError:  # the ranks of this host make the folder once all hosts have joined
            return
        bound = 2 * _LEAST_FREE_BYTES if self._is_full else _LEAST_FREE_BYTES
        if self._is_full != (free_bytes < bound):
            self._is_full = not self._is_full
            self._say(
                f"warning: the disk of {self._run_dir} is full ({format_bytes(free_bytes)} free): checkpoints fail and "
                f"records and metrics wait in memory until there is room; make room there"
                if self._is_full
                else f"there is room on the disk of {self._run_dir} again"
            )

    def _report(self, news: News) -> None:
        at_s, finding = time.time(), news.finding
        self._append(FINDINGS_FILE, news.to_json(at_s=at_s))
        if not self._is_said(finding) or self._is_in_episode(news, now_s=at_s):
            return
        self.news.append((at_s, news))
        if news.state == "over":
            self._say(f"over: {finding.kind}: {finding.where}")
            return
        self._say(f"finding: {finding.kind}: {finding.where} (confidence {finding.confidence:.2f}). {finding.text}")

    def _is_in_episode(self, news: News, *, now_s: float) -> bool:
        """Return whether a slow link or sender was reported a moment ago: it comes and goes in one episode."""
        where = news.finding.where
        if news.finding.kind != "communication slow":
            return False
        if news.state == "new" and now_s - self._slow_s.get(where, -math.inf) < _EPISODE_S:
            self._unsaid.add(news.case)
        self._slow_s[where] = now_s
        return news.case in self._unsaid

    def _limit_path(self, news: News) -> None:
        """Have a rank send less over a path while a finding names it: that loses nothing, so no option asks for it."""
        place, why = news.finding.places[0], f"{news.finding.kind}: {news.finding.where}"
        if news.state == "new":
            rank, peer = place.ranks[:2]
            self._limits[news.case] = PathLimit(rank=rank, peer=peer, path=place.path, limit=FINDING_LIMIT, why=why)
        elif self._limits.pop(news.case, None) is None:
            return
        if self._is_dry_run:
            result = "nothing, since this is a dry run"
        else:
            try:
                write_path_limits(self._run_dir, self._limits.values())
                part = "the rate that is measured" if news.state == "over" else (
                    f"{self._limits[news.case].limit:.0%} of the rate that is measured"
                )  # fmt: skip
                result = f"rank {place.ranks[0]} counts {part}"
            except OSError as error:
                result = f"failed: {error.strerror}"
        verb = "limit path" if news.state == "new" else "lift limit"
        self._append(ACTIONS_FILE, {
            "at": round(time.time(), 3), "action": verb, "target": str(place), "dry_run": self._is_dry_run,
            "finding": why, "case": news.case, "why": news.finding.text, "result": result,
        })  # fmt: skip
        self._say(f"action: {verb}, {place}: {result}")

    def _act(self, news: News, members: Members | None) -> None:
        members = Members(present=self._judge.ranks()) if members is None else members
        action = self._steering.decide(
            news, now_s=time.monotonic(), present=members.present, gone=members.gone, num_spares=members.num_spares
        )
        if action is None:
            return
        finding = f"{news.finding.kind}: {news.finding.where}"
        if action.kind == "warn":
            result = "reported"
        elif self._is_dry_run:
            result = "nothing, since this is a dry run"
        else:
            try:
                result = self._hands.act(action)
            except Exception as error:
                result = f"failed: {' '.join(str(error).split())}"
        line = action.to_json(at_s=time.time(), finding=finding, dry_run=self._is_dry_run, result=result)
        self._append(ACTIONS_FILE, line)
        if action.kind != "warn":
            target = "" if action.target is None else f" replica {action.target}"
            self._say(f"action: {action.kind}{target}, because of {finding}: {result}")
        elif self._steering.policy.on_finding != "warn":
            self._say(f"no action: {action.why}")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if name == ACTIONS_FILE:
            self.actions.append(line)
        try:
            if name not in self._files:
                self._files[name] = JsonlWriter(self._run_dir / name, warn=self._warn_once)
            self._files[name].write(json.dumps(line, separators=(",", ":")), is_last=True)
        except OSError as error:
            self._warn_once(f"cannot write {self._run_dir / name}: {error.strerror}")

    def _warn_once(self, problem: str) -> None:
        """Warn of a fault of its own once."""
        if problem and problem != self._last_problem:
            self._last_problem = problem
            self._say(f"warning: the run's own diagnosis: {problem}")


def end_report(diagnosis: LiveDiagnosis) -> list[str]:
    """Return a line for each finding and its action, for the end of a run."""
    new = [(at_s, news) for at_s, news in diagnosis.news if news.state == "new"]
    over_s = {news.case: at_s for at_s, news in diagnosis.news if news.state == "over"}
    lines = []
    for at_s, news in new:
        done = [line for line in diagnosis.actions if line["case"] == news.case and line["action"] != "warn"]
        what = f"; {done[0]['action']} {done[0]['target']}: {done[0]['result']}" if done else ""
        lasted = f"over after {over_s[news.case] - at_s:.0f} s" if news.case in over_s else "not over"
        lines.append(f"{format_moment(at_s)} {news.finding.kind}: {news.finding.where}; {lasted}{what}")
    return lines


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
