"""Shared parts of `thinwire train --elastic` and `thinwire join`: the processes of this host and their output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli.output import log, log_nothing, print_error
from thinwire.cli.process_names import process_of
from thinwire.cli.run_watchdog import diagnosis_of, report_end
from thinwire.elastic.admin_commands import COME
from thinwire.elastic.coordinator_client import connect_coordinator, send_command
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.protocol import Message
from thinwire.errors import RunOver, Stopped, ThinwireError, WorkerFailed
from thinwire.training.elastic.launch import Role, launch
from thinwire.training.elastic.remediation import DowntimeTracker, ElasticRemediation, ProcessOrder, orders_of
from thinwire.transport.secret import Secret

CUT_OFF_S, _CARRIED_CUT_OFF_S = 10.0, 60.0
# A host that joined then reports how to go on without the first host.
_LOST_S = 60.0
_POLL_S, _REPORT_S, _COMMAND_S = 1.0, 15.0, 5.0
_CARRIED_POLL_S, _CARRIED_COMMAND_S = 10.0, 30.0
# A spare waits this long for a coordinator that has answered before and may come back.
_ALONE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticHost:
    """Place of this host in an elastic run.

    Attributes:
        run_dir: The run's folder on this host.
        invitation: Where the coordinator is.
        secret: The job's.
        is_quiet: Whether only faults are reported.
        is_joined: Whether the coordinator is on another host.
        spare: This host's name where it waits as a spare, else empty.
    """

    run_dir: Path
    invitation: Invitation
    secret: Secret
    is_quiet: bool = False
    is_joined: bool = False
    spare: str = ""


class RunStatusPoller:
    """Polls the coordinator for the state of the run, and reports what is new.

    Args:
        host: This host.
        say: Takes lines for people.

    Attributes:
        status: The latest state from the coordinator.
        lost: Lost time of the replicas.
    """

    def __init__(self, host: ElasticHost, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._spare = host.spare
        self._is_called = not host.spare
        self._run_dir = host.run_dir
        self._orders: list[ProcessOrder] = []
        self._line = connect_coordinator(host.invitation, secret=host.secret, on_message=self._on_message)
        # a request through a carrier costs money and time
        self._every_s = _CARRIED_POLL_S if host.invitation.carrier else _POLL_S
        self._cut_off_s = _CARRIED_CUT_OFF_S if host.invitation.carrier else CUT_OFF_S
        self._latest: dict[str, Any] | None = None
        self.status: dict[str, Any] | None = None
        self.lost = DowntimeTracker()
        self._reported: list[str] = []
        self._poll_s = self._report_s = 0.0
        self._answered_s = time.monotonic()
        self._has_reported_loss = not host.is_joined or bool(host.invitation.carrier)  # another host takes over

    def poll(self) -> None:
        """Ask again when it is time, and report what has come."""
        now_s = time.monotonic()
        if not self._has_reported_loss and self.status is not None and now_s - self._answered_s > _LOST_S:
            self._has_reported_loss = True
            self._say(
                f"the coordinator has not answered for {now_s - self._answered_s:.0f} s. If its host is lost: press "
                f"Ctrl-C here, then go on from one host with: thinwire train --elastic --resume {self._run_dir}"
            )
        if now_s >= self._poll_s:
            self._poll_s = now_s + self._every_s
            verb = "status" if self._is_called else "spare"
            self._line.send("command", verb=verb, target="" if self._is_called else self._spare)
        status, self._latest = self._latest, None
        if status is None:
            return
        self.status = status
        self._orders = orders_of(status, run_dir=self._run_dir)
        self.lost.observe(status, at_s=time.time())
        for finding in _new(self._reported, status["findings"]):
            self._say(finding)
        self._reported = status["findings"]
        if now_s >= self._report_s and status["started"]:
            self._report_s = now_s + _REPORT_S
            self._say(describe(status))

    def take_orders(self) -> list[ProcessOrder]:
        """Return the coordinator's orders for this host's processes, once."""
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        self._line.close()

    def _on_message(self, message: Message) -> None:
        if message["kind"] == "answer":
            self._latest, self._answered_s = message["status"], time.monotonic()
            self._is_called = self._is_called or message["text"] == COME

    def is_waiting(self) -> bool:
        """Return whether this host waits as a spare; raise where the run has ended or its coordinator is gone."""
        if self._is_called:
            return False
        if self.status is not None and self.status["finished"]:
            raise RunOver("the run has come to its end, and this spare was not needed")
        silent_s = time.monotonic() - self._answered_s
        if silent_s > _ALONE_S:
            raise WorkerFailed(
                f"the coordinator has not answered for {silent_s:.0f} s: the run has ended, or its first host is gone; "
                f"start this spare again once thinwire status answers"
            )
        return True

    def is_cut_off(self) -> bool:
        return time.monotonic() - self._answered_s > self._cut_off_s


def describe(status: dict[str, Any]) -> str:
    """Return the state of a run in one line."""
    active = [one for one in status["members"] if one["state"] == "active"]
    paused = ", paused" if status["paused"] else ""
    loss = f", loss {status['loss']:.3f}" if status["loss"] else ""
    return f"step {status['step']}, {len(active)} replicas take part{loss}, {status['rounds']} rounds decided{paused}"


def _new(reported: list[str], findings: list[str]) -> list[str]:
    """Return the findings that were appended to a list that drops its oldest."""
    for start in range(len(reported) + 1):
        if findings[: len(reported) - start] == reported[start:]:
            return findings[len(reported) - start :]
    return findings


def run_here(
    roles: Sequence[Role], *, host: ElasticHost, part: Callable[[], None] = lambda: None, on_finding: str = "warn",
    is_dry_run: bool = False, batch_size: int = 1,
) -> int:  # fmt: skip
    """Run this host's processes to the end; return the exit code.

    The first host diagnoses all replicas. One that joined diagnoses its own only while no coordinator answers. A
    spare, which has a name, starts them once it is called.
    """
    say, run_dir = log_nothing if host.is_quiet else log, host.run_dir
    poller = RunStatusPoller(host, say=say)

    def command(verb: str, target: str) -> str:
        deadline_s = _CARRIED_COMMAND_S if host.invitation.carrier else _COMMAND_S
        answer = send_command(host.invitation, secret=host.secret, deadline_s=deadline_s, verb=verb, target=target)
        return str(answer["text"]) if answer["ok"] else f"failed: {answer['text']}"

    hands = ElasticRemediation(run_dir, status=lambda: poller.status, send_command=command)
    diagnosis = diagnosis_of(
        run_dir, on_finding=on_finding, is_dry_run=is_dry_run, hands=hands, say=log,
        is_mine=poller.is_cut_off if host.is_joined else lambda: True,
    )  # fmt: skip
    began_s = time.time()
    try:
        with diagnosis or contextlib.nullcontext():
            launch(
                roles, run_dir=run_dir, report=log, on_tick=poller.poll, part=part,
                orders=lambda: hands.take_orders() + poller.take_orders(),
                is_answered=lambda: poller.status is not None, is_waiting=poller.is_waiting,
            )  # fmt: skip
    except RunOver as over:
        say(str(over))
        return 0
    except Stopped as stop:
        log(f"{stop}; this host's replicas have left")
        return 128 + stop.signal_number
    except WorkerFailed as error:
        print_error("", f"{error}; see {run_dir / 'logs'}")
        return 1
    finally:
        poller.close()
        if diagnosis is not None:
            end_s = time.time()
            downtime = poller.lost.downtime(
                diagnosis.news, diagnosis.actions, run_s=end_s - began_s, end_s=end_s, batch_size=batch_size
            )
            report_end(run_dir, diagnosis, downtime, say=say)
    return 0


@contextlib.contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Keep a second command out of a run's folder on this host."""
    path = run_dir / f".launcher-{os.uname().nodename}.lock"
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ThinwireError(
                f"{run_dir} is in use by another thinwire command, process {file.read(20).strip() or 'unknown'}; end "
                f"that one first (Ctrl-C there), or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if is_new:
                with contextlib.suppress(OSError):  # nothing was written into it
                    run_dir.rmdir()


def coordinator_role(secret_path: Path, invitation: Invitation, *, address: str = "", port: int = 0) -> Role:
    """Return the process of a coordinator that listens, or of one that may lead on the run's carrier."""
    return Role(
        name="coordinator", module=process_of("coordinator"), is_needed=False,
        arguments=(str(secret_path), invitation.carrier or address, str(port)),
    )  # fmt: skip


def replica_roles(count: int) -> list[Role]:
    """Return the processes of a number of replicas."""
    module, spare = process_of("elastic-replica"), process_of("standby-replica")
    return [
        Role(name=f"replica-process {index}", module=module, arguments=(str(index),), spare=spare)
        for index in range(count)
    ]


def show_status(status: dict[str, Any], *, as_json: bool) -> None:
    """Print the state that the coordinator reports."""
    if as_json:
        print(json.dumps(status))
        return
    print(describe(status) if status["started"] else "waiting for replicas to begin")
    for one in status["members"]:
        paused = " (paused)" if one["paused"] else ""
        speed = f"{one['step_s']:.3f} s a step" if one["step_s"] else "-"
        if one["tokens_s"]:
            speed += f", {one['steps_per_interval']:g} steps an interval, {one['tokens_s']:.0f} tokens/s"
        if one["loss"]:
            speed += f", loss {one['loss']:.3f}"
        name = f"replica {one['replica']:<4} {one['host']:<24} {one['state']:<9}"
        by_relay = f", to {', '.join(map(str, one['relayed']))} by the relay" if one.get("relayed") else ""
        print(f"  {name} step {one['step']:<8} {speed}{paused}{by_relay}")
    grace_s, vote_s, silence_s = (f"{status[name]:g} s" for name in ("grace_s", "vote_s", "silence_s"))
    print(f"deadlines: late replicas {grace_s}, votes {vote_s}, silence {silence_s}")
    if status["sites"]:
        print("sites: " + "; ".join("replicas " + ", ".join(map(str, site)) for site in status["sites"]))
    if status["spares"]:
        print("spares: " + ", ".join(status["spares"]))
    for one in status["detours"]:
        print(f"detour: {one['text']}")
    for finding in status["findings"][-5:]:
        print(f"  {finding}")
