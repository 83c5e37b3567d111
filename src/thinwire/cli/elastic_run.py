"""Shared parts of `thinwire train --elastic` and `thinwire join`: the processes of this host and their output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.cli.steered import diagnosis_of, tell_end
from thinwire.elastic.admin_commands import COME
from thinwire.elastic.coordinator_client import Line, ask_once
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.protocol import Message
from thinwire.errors import RunOver, Stopped, ThinwireError, WorkerFailed
from thinwire.training.elastic.launch import Role, launch
from thinwire.training.elastic.remediation import ElasticHands, LostTime, Order, orders_of
from thinwire.transport.secret import Secret

CUT_OFF_S = 10.0
# After so long without an answer a host that joined says how to go on without the first host.
_LOST_S = 60.0
_ASK_S, _TELL_S, _COMMAND_S = 1.0, 15.0, 5.0
# So long a spare waits for a coordinator that has answered it before, which may come back.
_ALONE_S = 600.0


class Watch:
    """Asks the coordinator how the run goes, and tells what is new.

    Args:
        invitation: Where the coordinator is.
        secret: The job's.
        say: Told what people should know.
        run_dir: The run's folder on this host.
        spare: What this host calls itself where it waits as a spare, else empty.
        is_joined: Whether the coordinator is on another host.

    Attributes:
        status: What the coordinator said last.
        lost: What was lost of replicas' time.
    """

    def __init__(
        self, invitation: Invitation, *, secret: Secret, say: Callable[[str], None], run_dir: Path, spare: str = "",
        is_joined: bool = False,
    ) -> None:  # fmt: skip
        self._say = say
        self._spare = spare
        self._is_called = not spare
        self._run_dir = run_dir
        self._orders: list[Order] = []
        self._line = Line(invitation, secret=secret, hear=self._hear)
        self._latest: dict[str, Any] | None = None
        self.status: dict[str, Any] | None = None
        self.lost = LostTime()
        self._told: list[str] = []
        self._ask_s = self._tell_s = 0.0
        self._heard_s = time.monotonic()
        self._is_told_lost = not is_joined

    def look(self) -> None:
        """Ask again when it is time, and tell what has come."""
        now_s = time.monotonic()
        if not self._is_told_lost and self.status is not None and now_s - self._heard_s > _LOST_S:
            self._is_told_lost = True
            self._say(
                f"the coordinator has not answered for {now_s - self._heard_s:.0f} s. If its host is lost: press "
                f"Ctrl-C here, then go on from one host with: thinwire train --elastic --resume {self._run_dir}"
            )
        if now_s >= self._ask_s:
            self._ask_s = now_s + _ASK_S
            verb = "status" if self._is_called else "spare"
            self._line.say("command", verb=verb, target="" if self._is_called else self._spare)
        status, self._latest = self._latest, None
        if status is None:
            return
        self.status = status
        self._orders = orders_of(status, run_dir=self._run_dir)
        self.lost.see(status, at_s=time.time())
        for finding in _new(self._told, status["findings"]):
            self._say(finding)
        self._told = status["findings"]
        if now_s >= self._tell_s and status["started"]:
            self._tell_s = now_s + _TELL_S
            self._say(describe(status))

    def take_orders(self) -> list[Order]:
        """Return what the coordinator wants done to this host's processes, once."""
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Ask no more."""
        self._line.close()

    def _hear(self, message: Message) -> None:
        if message["kind"] == "answer":
            self._latest, self._heard_s = message["status"], time.monotonic()
            self._is_called = self._is_called or message["text"] == COME

    def is_waiting(self) -> bool:
        """Tell whether this host waits as a spare.

        Raises:
            RunOver: The run has come to its end, and has not needed it.
            WorkerFailed: The coordinator has not answered for too long.
        """
        if self._is_called:
            return False
        if self.status is not None and self.status["finished"]:
            raise RunOver("the run has come to its end, and this spare was not needed")
        silent_s = time.monotonic() - self._heard_s
        if silent_s > _ALONE_S:
            raise WorkerFailed(
                f"the coordinator has not answered for {silent_s:.0f} s: the run has ended, or its first host is gone; "
                f"start this spare again once thinwire status answers"
            )
        return True

    def is_cut_off(self) -> bool:
        """Tell whether the coordinator has not answered for a while."""
        return time.monotonic() - self._heard_s > CUT_OFF_S


def describe(status: dict[str, Any]) -> str:
    """Say in one line how a run goes."""
    active = [one for one in status["members"] if one["state"] == "active"]
    paused = ", paused" if status["paused"] else ""
    loss = f", loss {status['loss']:.3f}" if status["loss"] else ""
    return f"step {status['step']}, {len(active)} replicas take part{loss}, {status['rounds']} rounds decided{paused}"


def _new(told: list[str], findings: list[str]) -> list[str]:
    """Return what stands at the end of a list that moves on."""
    for start in range(len(told) + 1):
        if findings[: len(told) - start] == told[start:]:
            return findings[len(told) - start :]
    return findings


def run_here(
    roles: Sequence[Role], *, run_dir: Path, invitation: Invitation, secret: Secret, is_quiet: bool,
    part: Callable[[], None] = lambda: None, on_finding: str = "warn", steer_dry_run: bool = False, batch_size: int = 1,
    is_joined: bool = False, spare: str = "",
) -> int:  # fmt: skip
    """Run this host's processes to the end; return the exit code.

    The first host judges the replicas of all. One that joined judges its own only while no coordinator is heard of. A
    spare, which has a name, starts them once it is called.
    """
    say = _say_nothing if is_quiet else tell
    watch = Watch(invitation, secret=secret, say=say, run_dir=run_dir, spare=spare, is_joined=is_joined)

    def command(verb: str, target: str) -> str:
        answer = ask_once(invitation, secret=secret, deadline_s=_COMMAND_S, verb=verb, target=target)
        return str(answer["text"]) if answer["ok"] else f"failed: {answer['text']}"

    hands = ElasticHands(run_dir, status=lambda: watch.status, tell=command)
    diagnosis = diagnosis_of(
        run_dir, on_finding=on_finding, is_dry_run=steer_dry_run, hands=hands, say=tell,
        is_mine=watch.is_cut_off if is_joined else lambda: True,
    )  # fmt: skip
    began_s = time.time()
    try:
        with diagnosis or contextlib.nullcontext():
            launch(
                roles, run_dir=run_dir, say=tell, look=watch.look, part=part,
                orders=lambda: hands.take_orders() + watch.take_orders(), is_answered=lambda: watch.status is not None,
                is_waiting=watch.is_waiting,
            )  # fmt: skip
    except RunOver as over:
        say(str(over))
        return 0
    except Stopped as stop:
        tell(f"{stop}; this host's replicas have left")
        return 128 + stop.signal_number
    except WorkerFailed as error:
        print(f"thinwire: error: {error}; see {run_dir / 'logs'}", file=sys.stderr, flush=True)
        return 1
    finally:
        watch.close()
        if diagnosis is not None:
            end_s = time.time()
            downtime = watch.lost.downtime(
                diagnosis.news, diagnosis.actions, run_s=end_s - began_s, end_s=end_s, batch_size=batch_size
            )
            tell_end(run_dir, diagnosis, downtime, say=say)
    return 0


@contextlib.contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Keep a second command out of a run's folder on this host.

    Raises:
        ThinwireError: Another one works in it.
    """
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


def replica_roles(count: int, *, first: int = 0) -> list[Role]:
    """Return the processes of so many replicas."""
    return [
        Role(
            name=f"replica-process {index}",
            module="thinwire.cli.elastic_worker",
            words=(str(index),),
            spare="thinwire.cli.elastic_spare",
        )
        for index in range(first, first + count)
    ]


def tell(text: str) -> None:
    """Say something to people."""
    print(f"thinwire: {text}", file=sys.stderr, flush=True)


def show_status(status: dict[str, Any], *, as_json: bool) -> None:
    """Print what the coordinator says of the run."""
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
        print(f"  {name} step {one['step']:<8} {speed}{paused}")
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


def _say_nothing(text: str) -> None:
    """Stands in for `tell` in a quiet run."""
