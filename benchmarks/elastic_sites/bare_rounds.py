"""Rounds of an elastic run with nothing trained between them: real seats, sessions and connections in hosts of the lab.

What `thin_sites.py` and `slow_wire.py` share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_server import CoordinatorServer
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.join import JoinPlan, Membership, join
from thinwire.transport.secret import Secret
from thinwire.version import __version__

PORT, INTERVAL = 4000, 10
SECRET = Secret(key=bytes(32))
RESULTS = Path(__file__).resolve().parent.parent / "results" / "elastic_sites.jsonl"
_DEADLINE_S = 300.0


def wait_for(path: Path) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def await_all(folder: Path, names: list[str], logs: list[Path]) -> None:
    """Wait until each has left its file, and print what all said where one does not."""
    for one in names:
        try:
            wait_for(folder / one)
        except AssertionError:
            print(*(log.read_text() for log in logs))
            raise


def coordinate(folder: Path, address: str, *, planned: int, has_detours: bool = True) -> None:
    """Be the coordinator until the file `over` is there."""
    hub = CoordinatorServer(secret=SECRET, address=address, port=PORT, say=print)
    coordinator = Coordinator(
        CoordinatorConfig(
            job={"thinwire": __version__}, initial_replicas=planned, sync_interval=INTERVAL, overlap_steps=0,
            shard_windows=8,
        ),
        send=hub.send, record=lambda what, fields: print(what, fields, flush=True), generation=hub.generation,
    )  # fmt: skip
    if not has_detours:
        coordinator.state.detours.look = lambda active: []  # type: ignore[method-assign]
    hub.serve(coordinator, until=(folder / "over").exists)
    hub.close()


def sit_down(coordinator: str, address: str, *, planned: int, change: Callable[[Membership], None]) -> Membership:
    """Join, be changed, and become active once all are there."""
    invitation = Invitation(host=coordinator, port=PORT)
    membership, here = join(
        invitation,
        secret=SECRET,
        plan_of=lambda job: JoinPlan(num_replicas=planned, interval_steps=INTERVAL),
        address=address,
        deadline_s=60.0,
    )
    change(membership)
    session = membership.session
    membership.announce(corpus="c", num_windows=1, address=here.host, port=here.port)
    session.wait_for(lambda view: view.has_started and view.offer, deadline_s=_DEADLINE_S, why="")
    session.report_work(step_s=1.0)  # nobody is late only because the last round came to it later
    session.send_reliably("active", step=0)
    session.wait_for(lambda view: len(session.active()) == planned, deadline_s=_DEADLINE_S, why="")
    session.stop_resending("active")
    everyone = [number for number in session.active() if number != membership.replica]
    membership.transport.inner.wait_until_connected(everyone, deadline_s=_DEADLINE_S)  # type: ignore[attr-defined]
    return membership


def take_round(membership: Membership, round_id: int, *, num_bytes: int) -> tuple[float, int]:
    """Take part in one round; return its seconds and how many parts it had."""
    began_s, step = time.monotonic(), INTERVAL * (round_id + 1)
    part = torch.full((num_bytes,), membership.replica, dtype=torch.uint8)
    membership.session.reach(step)
    proposal = membership.rounds.propose(
        part, round_id=round_id, launch_step=step, reference_hash=1, most_bytes=num_bytes
    )
    proposal.wait(deadline_s=0.0)
    assert proposal.agreed is not None
    assert all(bool((found == member).all()) for member, found in proposal.agreed.parts.items())
    return time.monotonic() - began_s, len(proposal.agreed.parts)


def at_once(tasks: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
