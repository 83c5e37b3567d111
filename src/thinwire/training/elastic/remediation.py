"""Remediation in an elastic run: actions on the replicas of a host, and the time that faults cost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from thinwire.files import write_whole
from thinwire.monitor.detect.live import News
from thinwire.monitor.live_diagnosis import Members
from thinwire.monitor.remediation import Action, target_of
from thinwire.runlog.downtime import Downtime, Incident, account
from thinwire.runlog.writer import record_paths

SendCommand = Callable[[str, str], str]
# A replica beats, and the coordinator is asked, once a second: one that was heard of so lately lives.
_HEARD_S = 2.5
# A recorder beats twice a second, and what it writes is forwarded four times a second.
_LATE_S = 3.0
# Reasons of the coordinator for which a replica leaves without a fault.
_GOOD_REASONS = ("was told to leave", "left", "has come to the end", "came too late")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """Order to the launcher, which owns the processes.

    Attributes:
        what: Kill a process so that another one takes its place, end it for good, or end the whole run.
        pid: The process; 0 for the whole run.
        why: Reason, for the log.
    """

    what: Literal["kill", "end", "abort"]
    pid: int = 0
    why: str = ""


class ElasticRemediation:
    """See `thinwire.monitor.live_diagnosis.Hands`.

    `status` gives what the coordinator said last, None before it did; `send_command` sends it a verb and a replica's
    number, and returns its answer.
    """

    def __init__(
        self, run_dir: Path, *, status: Callable[[], Mapping[str, Any] | None], send_command: SendCommand
    ) -> None:
        self._run_dir = run_dir
        self._status = status
        self._send_command = send_command
        self._orders: list[ProcessOrder] = []
        self._lock = threading.Lock()

    def members(self) -> Members | None:
        status = self._status()
        if status is None:
            return None
        active = {int(one["replica"]): one for one in status["members"] if one["state"] == "active"}
        present = frozenset(active)
        pids = {number: pid for number in present if (pid := read_pid(self._run_dir, number)) is not None}
        return Members(
            present=present,
            gone=frozenset(n for n, one in active.items() if (_has_ended(pids[n]) if n in pids else one.get("lost"))),
            resting=frozenset(n for n, one in active.items() if one["paused"] or self._is_late(n, one)),
            ended=frozenset(int(one["replica"]) for one in status["members"] if one["state"] != "active"),
            num_spares=len(status.get("spares", ())),
        )  # fmt: skip

    def _is_late(self, replica: int, member: Mapping[str, Any]) -> bool:
        """Tell whether a replica of another host lives and its records do not come: their silence is not its own."""
        if "silent_s" not in member or member["silent_s"] >= _HEARD_S or read_pid(self._run_dir, replica) is not None:
            return False
        path, _ = record_paths(self._run_dir, rank=replica)
        try:
            return time.time() - path.stat().st_mtime > _LATE_S
        except OSError:
            return False

    def act(self, action: Action) -> str:
        if action.kind == "abort":
            self._order(ProcessOrder(what="abort", why=action.why))
            return "the run ends"
        assert action.target is not None
        pid = read_pid(self._run_dir, action.target)
        if action.kind == "restart":
            if pid is None:
                return self._send_command("restart", str(action.target))
            self._order(ProcessOrder(what="kill", pid=pid, why=action.why))
            self._send_command("expel", str(action.target))  # the others need not wait until its silence is noticed
            return "its process was killed, and another one takes its place"
        verb = "leave"
        if action.is_hang:
            verb = "end" if pid is None else "expel"
        if verb == "expel":  # it would never come to its end by itself
            self._order(ProcessOrder(what="end", pid=pid or 0, why=action.why))
        removed = self._send_command(verb, str(action.target))
        return f"{removed}; {self._send_command('call', str(action.target))}" if action.kind == "replace" else removed

    def take_orders(self) -> list[ProcessOrder]:
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

    def _order(self, order: ProcessOrder) -> None:
        with self._lock:
            self._orders.append(order)


def write_pid(run_dir: Path, replica: int) -> None:
    """Write down that this process is a replica of an elastic run."""
    path = _pid_path(run_dir, replica)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{os.getpid()}\n")


def read_pid(run_dir: Path, replica: int) -> int | None:
    """Return the process that a replica said it is; None where none on this host did."""
    try:
        return int(_pid_path(run_dir, replica).read_text())
    except (OSError, ValueError):
        return None


def orders_of(status: Mapping[str, Any], *, run_dir: Path) -> list[ProcessOrder]:
    """Return the coordinator's orders for processes of this host; repeated until executed."""
    found = []
    for one in status.get("orders", ()):
        what, replica = one.get("what"), one.get("replica")
        pid = read_pid(run_dir, replica) if isinstance(replica, int) and what in ("kill", "end") else None
        numbers = [path.stem.rpartition("-")[2] for path in (run_dir / "logs").glob("replica-*.pid")]
        latest = max((int(n) for n in numbers if n.isdecimal() and read_pid(run_dir, int(n)) == pid), default=-1)
        if pid is not None and replica == latest:  # who lived and joined again has another one
            found.append(ProcessOrder(what=what, pid=pid, why="the run's diagnosis found that it hangs"))
    return found


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def _pid_path(run_dir: Path, replica: int) -> Path:
    return run_dir / "logs" / f"replica-{replica}.pid"


@dataclass(slots=True)
class _LiveReplica:
    """A replica as it was seen last."""

    host: str
    step: int
    moved_s: float


@dataclass(slots=True)
class _LostReplica:
    """A replica that was removed."""

    replica: int
    host: str
    since_s: float
    gone_s: float
    share: float
    back_s: float | None = None


class DowntimeTracker:
    """Tracks lost replicas and their replacements in the coordinator's status.

    Times are as exact as the status is frequent. A replica that was asked to leave is not lost.
    """

    def __init__(self) -> None:
        self._lives: dict[int, _LiveReplica] = {}
        self._lost: list[_LostReplica] = []
        self._arrivals: list[tuple[str, float]] = []
        self._spare_of: dict[int, str] = {}
        self._repeated_windows = 0
        self._first_windows: int | None = None
        self._step_s = 0.0
        self._num_active = 1

    def observe(self, status: Mapping[str, Any], *, at_s: float) -> None:
        """Process a status, at a time in seconds since 1970."""
        members = {int(one["replica"]): one for one in status["members"]}
        active = {number: one for number, one in members.items() if one["state"] == "active"}
        self._spare_of |= {int(one["replica"]): str(one["host"]) for one in status.get("replaced", ())}
        for number, life in [*self._lives.items()]:
            if number not in members:
                del self._lives[number]
                begin = f"replica {number} on "
                said = next((text for text in reversed(status["findings"]) if text.startswith(begin)), "")
                went_well = any(reason in said for reason in _GOOD_REASONS) and "left after an error" not in said
                if not went_well:
                    self._lose(number, life, at_s)
            elif number not in active:  # it has come to the end
                del self._lives[number]
        for number, one in active.items():
            known = self._lives.get(number)
            if known is None:
                host = str(one["host"])
                self._lives[number] = _LiveReplica(host, int(one["step"]), at_s)
                waiting = [lost for lost in self._lost if lost.back_s is None and self._may_come(host, lost)]
                if waiting:
                    waiting[0].back_s = at_s
                else:
                    self._arrivals.append((host, at_s))
            elif one["step"] > known.step:
                known.step, known.moved_s = int(one["step"]), at_s
        self._num_active = max(1, len(active))
        repeated = int(status["data"].get("repeated", 0))
        if self._first_windows is None:
            self._first_windows = repeated
        self._repeated_windows = max(self._repeated_windows, repeated - self._first_windows)
        steps_s = [float(one["step_s"]) for one in active.values() if one["step_s"]]
        self._step_s = sum(steps_s) / len(steps_s) if steps_s else self._step_s

    def _lose(self, replica: int, life: _LiveReplica, at_s: float) -> None:
        lost = _LostReplica(replica, life.host, life.moved_s, at_s, share=1 / self._num_active)
        self._lost.append(lost)
        # its replacement may have arrived before it was removed
        came = [one for one in self._arrivals if self._may_come(one[0], lost) and one[1] > life.moved_s]
        if came:
            lost.back_s = came[0][1]
            self._arrivals.remove(came[0])

    def _may_come(self, host: str, lost: _LostReplica) -> bool:
        """Tell whether a replica of a host takes the place of one that was lost."""
        return host in (lost.host, self._spare_of.get(lost.replica))

    def downtime(
        self, news: list[tuple[float, News]], actions: list[dict[str, Any]], *, run_s: float, end_s: float,
        batch_size: int,
    ) -> Downtime:  # fmt: skip
        """Return what a run of `run_s` seconds lost, from timed findings and the lines of `actions.jsonl`."""
        done_s = {str(one["target"]): float(one["at"]) for one in reversed(actions) if not one["dry_run"]}
        hangs = [(at_s, one) for at_s, one in news if one.state == "new" and "hang" in one.finding.kind]
        found = [self._incident(lost, hangs, done_s) for lost in self._lost]
        gone = {lost.replica for lost in self._lost}
        over_s = {one.case: at_s for at_s, one in news if one.state == "over"}
        for at_s, one in hangs:  # it stood still and went on by itself
            target = target_of(one.finding)
            if target is not None and target not in gone:
                since_s = at_s - one.age_s
                found.append(Incident(
                    since_s=since_s, found_s=at_s, acted_s=done_s.get(str(target)),
                    back_s=over_s.get(one.case, end_s), share=1 / self._num_active,
                ))  # fmt: skip
        whole = account(found, run_s=run_s, end_s=end_s)
        # what a replica had trained on and no round had counted is trained on again, by whom it is lent to
        again_s = self._repeated_windows / max(1, batch_size) * self._step_s / self._num_active
        return replace(whole, post_checkpoint_s=whole.post_checkpoint_s + again_s)

    def _incident(self, lost: _LostReplica, hangs: list[tuple[float, News]], done_s: Mapping[str, float]) -> Incident:
        reported = [at_s for at_s, one in hangs if target_of(one.finding) == lost.replica and at_s <= lost.gone_s]
        found_s = min([lost.gone_s, *reported])
        return Incident(
            since_s=lost.since_s, found_s=found_s, acted_s=done_s.get(str(lost.replica), lost.gone_s),
            back_s=lost.back_s, share=lost.share, text=f"replica {lost.replica} on {lost.host} was lost",
        )  # fmt: skip
