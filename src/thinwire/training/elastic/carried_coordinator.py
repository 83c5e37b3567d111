"""Process of the coordinator on a carrier: it waits until no other process leads the run, then leads from the journal.

Every host of such a run has one. So the run needs no host that stays: where the leader's host is lost, another one's
process reads the journal, and goes on.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.elastic.carried_blobs import PollBudget
from thinwire.elastic.carried_journal import CarriedJournal, JournalWriter, LostLeadership, run
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.journal import HeldMessages, read_journal
from thinwire.elastic.mailbox import GONE_S, LeaderWatch, MailboxServer, open_run
from thinwire.errors import ThinwireError, TransportError
from thinwire.runlog.forwarding import TakenRecords
from thinwire.training.elastic.coordinator_process import (
    ALONE_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    EndOfRun,
    coordinator_config,
)
from thinwire.transport.secret import read_secret

if TYPE_CHECKING:
    from thinwire.carriers.base import Carrier

_LOOK_S, _ALONE_LOOK_S = 4.0, 0.25
# Messages of replicas arrive when the leader polls: they may differ by so many seconds, and heartbeats are rare.
_MESSAGE_S, _SUSPECT_SILENCE_S = 2.0, 12.0


def coordinate_on_carrier(
    run_dir: Path, *, uri: str, secret_path: Path, say: Callable[[str], None], until: threading.Event,
) -> None:  # fmt: skip
    """Lead the run on a carrier whenever no other process does, until it or this host's part has ended.

    Raises:
        ThinwireError: The carrier holds another run of this secret.
    """
    first_lines = first_lines_of(run_dir)
    carrier = open_run(uri, secret=read_secret(secret_path), may_create=bool(first_lines))
    coordinate_on(carrier, run_dir=run_dir, first_lines=first_lines, say=say, until=until)


def coordinate_on(
    carrier: Carrier, *, run_dir: Path, first_lines: list[dict[str, Any]], say: Callable[[str], None],
    until: threading.Event, gone_s: float = GONE_S, look_s: float = _LOOK_S,
) -> None:  # fmt: skip
    """Lead the run of an open carrier; see `coordinate_on_carrier`.

    Args:
        carrier: The run's place.
        run_dir: This host's folder of the run.
        first_lines: Lines of a run that this host begins; none where it joined.
        say: Takes lines for people.
        until: Ends it.
        gone_s: Seconds without a sign of a leader after which this process tries to lead.
        look_s: Seconds between two looks.
    """
    budget = PollBudget(an_hour=carrier.limits().requests_per_hour)
    watch = LeaderWatch(carrier, budget=budget, gone_s=gone_s)
    is_first = bool(first_lines)
    while not (until.is_set() or (run_dir / ALONE_FILE).exists()):
        try:
            if watch.is_gone() or is_first:
                is_first = False
                journal = CarriedJournal(carrier=carrier, holder=secrets.token_hex(8), term=watch.term)
                if run(journal.lead(first_lines=first_lines or None)):
                    _lead(journal, run_dir=run_dir, budget=budget, say=say, until=until, first_lines=first_lines)
                    return
                watch.begin_again()
        except LostLeadership as lost:
            say(f"{lost}; this host goes on as one that may lead later")
            watch.begin_again()
        except TransportError as error:
            say(f"the carrier does not answer: {error}")
        _wait(look_s, until, run_dir / ALONE_FILE)


def _wait(seconds: float, until: threading.Event, alone: Path) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not until.wait(_ALONE_LOOK_S) and not alone.exists():
        pass


def first_lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines with which a run begins that this host starts; none where it joined."""
    lines = read_journal(run_dir / JOURNAL_FILE)
    if not lines:
        return []
    return [{"what": "job", "job": json.loads((run_dir / JOB_FILE).read_text())}, *lines]


def _job_of(lines: list[dict[str, Any]], first_lines: list[dict[str, Any]]) -> dict[str, Any]:
    job: dict[str, Any] = next(line["job"] for line in lines if line["what"] == "job")
    if first_lines and first_lines[0]["job"]["identity"] != job["identity"]:
        raise ThinwireError(
            f"the carrier holds run {job['identity'].get('run')} of this secret already; leave --secret out, which "
            f"makes a new one, or name another folder in --via"
        )
    return job


def _lead(
    journal: CarriedJournal, *, run_dir: Path, budget: PollBudget, say: Callable[[str], None],
    until: threading.Event, first_lines: list[dict[str, Any]],
) -> None:  # fmt: skip
    job = _job_of(journal.lines, first_lines)
    carrier = journal.carrier
    server = MailboxServer(carrier, term=journal.term, generation=journal.holder, say=say, budget=budget)

    def all_lines() -> list[Mapping[str, Any]]:
        return [{"what": "job", "job": job}, {"what": "run", **job["identity"]}, *coordinator.state.journal_lines()]

    writer = JournalWriter(journal, all_lines=all_lines)
    held = HeldMessages(writer, send=server.send)
    records = TakenRecords(run_dir, say=say)
    coordinator = Coordinator(
        coordinator_config(job, message_s=_MESSAGE_S, suspect_silence_s=_SUSPECT_SILENCE_S), send=held.send,
        record=writer.write, generation=server.generation, keep_records=records.take,
    )  # fmt: skip
    coordinator.replay(journal.lines, now_s=time.monotonic())
    if journal.term > 1:
        say(f"this host leads the run now, in term {journal.term}")
        coordinator.report(f"another process leads the run now, in term {journal.term}")
    end = EndOfRun(coordinator.state, until, alone=run_dir / ALONE_FILE)
    try:
        server.serve(coordinator, until=end.has_come, turn=held.release)
        held.release()
        server.flush(has_resigned=not coordinator.state.has_finished)
        if coordinator.state.has_finished:
            _clean(carrier)
    finally:
        records.close()


def _clean(carrier: Carrier) -> None:
    """Delete the parts and states of a run that has ended; its journal stays."""
    carrier.delete([entry.name for entry in carrier.listing("blobs")])
