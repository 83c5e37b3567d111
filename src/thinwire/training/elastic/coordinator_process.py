"""Process of the coordinator: its server, its journal and the records of the run. It starts fast, without torch."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_server import CoordinatorServer, own_key
from thinwire.elastic.coordinator_state import CoordinatorConfig, CoordinatorState
from thinwire.elastic.journal import HeldMessages, Journal
from thinwire.elastic.one_time_invitations import INVITATIONS_FILE
from thinwire.errors import ThinwireError
from thinwire.files import write_whole
from thinwire.runlog.forwarding import TakenRecords
from thinwire.transport.addresses import RelayPlace
from thinwire.transport.secret import read_secret
from thinwire.units import format_bytes

JOURNAL_FILE = "coordinator.jsonl"
JOB_FILE = "job.json"
PORT_FILE = "coordinator.json"
# Exists once this host has no replicas any more: the coordinator ends when the others have none either.
ALONE_FILE = "coordinator.alone"
# Seconds after the end for the last messages to arrive, and the longest wait for replicas to leave.
_LINGER_S = 5.0
_MAX_LINGER_S = 600.0
# Seconds after which the coordinator of a loop of one's own ends once all replicas have left.
_LEFT_S = 10.0
# Below this a disk counts as full, above twice as much as having room again.
MIN_FREE_BYTES = 1 << 20
_DISK_CHECK_S = 1.0
# A disk may be filled and emptied for days.
_MAX_DISK_REPORTS = 100


def coordinator_config(job: Mapping[str, Any], **more: float) -> CoordinatorConfig:
    """Return the constants of a run that a job describes."""
    return CoordinatorConfig(
        job=job, initial_replicas=job["begin_with"], last_step=job["last_step"],
        sync_interval=job["sync_interval"], overlap_steps=job["overlap_steps"], shard_windows=job["shard_windows"],
        part_share=job.get("part_share", 0.0), allows_overdue=job.get("allows_overdue", False),
        start_timeout_s=job["start_timeout_s"], resumed_step=job["resumed_step"],
        is_invite_only=job.get("is_invite_only", False), **more,
    )  # fmt: skip


def coordinate(
    run_dir: Path, *, secret_path: Path, address: str, port: int, say: Callable[[str], None],
    until: threading.Event, relay: RelayPlace | None = None,
) -> None:  # fmt: skip
    """Run a coordinator until the run has ended and its replicas have left, or `until` is set; port 0 is a free one.

    Raises:
        ThinwireError: The port cannot be had, or the journal not be written.
    """
    job = json.loads((run_dir / JOB_FILE).read_text())
    journal = Journal(run_dir / JOURNAL_FILE, say=say, until=until)
    _check_journal(journal, job["identity"], path=run_dir / JOURNAL_FILE)
    known = read_port(run_dir)
    # a restarted coordinator must be where the earlier one was
    wanted = known[1] if port == 0 and known is not None else port
    secret = read_secret(secret_path)
    server = CoordinatorServer(
        secret=secret, key=own_key(run_dir), address=address, port=wanted, say=say,
        invitations=run_dir / INVITATIONS_FILE, relay=relay,
    )  # fmt: skip
    if known != (address, server.port):  # else there may be no room for it
        write_whole(run_dir / PORT_FILE, json.dumps({"address": address, "port": server.port}) + "\n")
    held = HeldMessages(journal, send=server.send)
    records = TakenRecords(run_dir, say=say)
    coordinator = Coordinator(
        coordinator_config(job),
        send=held.send,
        record=journal.write,
        generation=server.generation,
        keep_records=records.take,
        secret=secret,
    )
    coordinator.replay(journal.lines, now_s=time.monotonic())
    end = EndOfRun(coordinator.state, until, alone=run_dir / ALONE_FILE, idle_s=job.get("idle_s"))
    disk = _DiskCheck(run_dir, journal=journal, report=coordinator.report)

    def turn() -> None:
        held.release()
        # between two messages, as `journal_lines` needs
        journal.compact(lambda: [{"what": "run", **job["identity"]}, *coordinator.state.journal_lines()])
        disk.check(now_s=time.monotonic())

    def is_over() -> bool:
        # else held messages, such as the end of the run, would never be sent
        return end.has_come() and (until.is_set() or not journal.is_behind)

    try:
        server.serve(coordinator, until=is_over, turn=turn)
    finally:
        server.close()
        records.close()
        journal.close()


class _DiskCheck:
    """Reports a full disk of the coordinator's host as a finding, which `thinwire status` and every host show."""

    def __init__(self, run_dir: Path, *, journal: Journal, report: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._journal = journal
        self._report = report
        self._is_full = self._is_behind = False
        self._next_s = -math.inf
        self._num_left = _MAX_DISK_REPORTS

    def check(self, *, now_s: float) -> None:
        if now_s < self._next_s or self._num_left <= 0:
            return
        self._next_s = now_s + _DISK_CHECK_S
        if self._journal.is_behind and not self._is_behind:
            self._report_once("the disk is full, and decisions cannot be written: replicas wait until there is room")
        self._is_behind = self._journal.is_behind
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(self._run_dir).free
            if free_bytes < MIN_FREE_BYTES and not self._is_full:
                self._is_full = True
                self._report_once(
                    f"the disk of the first host's run folder {self._run_dir} is full "
                    f"({format_bytes(free_bytes)} free): checkpoints fail and records wait in memory; make room there"
                )
            elif free_bytes > 2 * MIN_FREE_BYTES and self._is_full:
                self._is_full = False
                self._report_once(f"the disk of the first host's run folder {self._run_dir} has room again")

    def _report_once(self, text: str) -> None:
        self._num_left -= 1
        self._report(text)


def _check_journal(journal: Journal, identity: Mapping[str, Any], *, path: Path) -> None:
    """Refuse a journal of another run or incarnation; begin an empty one with this run's identity."""
    stated = next((line for line in journal.lines if line["what"] == "run"), None)
    if not journal.lines:
        journal.write("run", dict(identity))
        return
    found = [] if stated is None else [stated.get("run"), *list(stated.get("incarnations") or ())[-1:]]
    wanted = [identity["run"], identity["incarnations"][-1]]
    if found != wanted:
        raise ThinwireError(
            f"{path} is the journal of run and incarnation {found}, and this coordinator is of {wanted}; move it away"
        )


class EndOfRun:
    """Whether the coordinator has nothing left to do.

    `alone` exists once this host has no replicas any more; after `idle_s` without any replica it ends too.
    """

    def __init__(
        self, state: CoordinatorState, until: threading.Event, *, alone: Path, idle_s: float | None = None
    ) -> None:
        self._state = state
        self._until = until
        self._alone = alone
        self._idle_s = math.inf if idle_s is None else idle_s
        self._finished_s: float | None = None
        self._idle_since_s = time.monotonic()

    def has_come(self) -> bool:
        if self._until.is_set():
            return True
        if len(self._state.roster):
            self._idle_since_s = time.monotonic()
        # who left without a fault does not come back, and the state has gone with the last one
        is_left = self._state.has_been_left and math.isfinite(self._idle_s)
        idle_s = _LEFT_S if is_left else self._idle_s
        if time.monotonic() - self._idle_since_s > idle_s:
            return True
        is_over = self._state.has_finished or bool(self._state.failure)
        if not is_over and (len(self._state.roster) or not self._alone.exists()):
            return False
        now_s = time.monotonic()
        if self._finished_s is None:
            self._finished_s = now_s
        waited_s = now_s - self._finished_s
        # standby hosts ask once a second, and learn of the end too
        least_s = _LINGER_S / 2 if self._state.standby_hosts.waiting(now_s=now_s) else _LINGER_S / 10
        has_parted = not len(self._state.roster) and waited_s > least_s
        return has_parted or waited_s > _MAX_LINGER_S


def read_port(run_dir: Path) -> tuple[str, int] | None:
    """Return the address of the coordinator of a run on this host, None before it has written it."""
    try:
        found = json.loads((run_dir / PORT_FILE).read_text())
        return str(found["address"]), int(found["port"])
    except (OSError, ValueError, KeyError):
        return None
