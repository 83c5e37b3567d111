"""Messages between real processes over gloo: awkward sizes, orders, and every way in which a peer can fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import HANGS_S, SOON_S, content, envelope_of, failure_of
from processes import Processes, announce, run, values

from thinwire.transport.base import Pending
from thinwire.transport.connect import connect
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.process_group import MOST_PARTS, OPENING_BYTES, ProcessGroupTransport
from thinwire.transport.recording import RecordingTransport

pytestmark = pytest.mark.multiprocess

BORDER = OPENING_BYTES - HEADER_BYTES
SIZES = (
    0,
    1,
    7,
    1009,
    BORDER - 1,
    BORDER,
    BORDER + 1,
    1_299_709,
    3 * OPENING_BYTES,
    (MOST_PARTS + 1) * OPENING_BYTES + 7,
)


def bare(transport: Any) -> ProcessGroupTransport:
    found = transport.inner
    assert isinstance(found, ProcessGroupTransport)
    return found


def exchange_everything(ranks_per_replica: int) -> dict[str, Any]:
    transport = connect(ranks_per_replica=ranks_per_replica, deadline_s=600)
    me, shard = transport.replica, bare(transport).shard
    others = [replica for replica in range(transport.num_replicas) if replica != me]
    order = list(enumerate(SIZES))
    receives = {
        (peer, round_id): transport.receive(source=peer, envelope=envelope_of(size, round_id))
        for peer in others
        for round_id, size in order
    }
    # Half of the replicas send the last round first: nothing may depend on the order.
    sends = [
        transport.send(content(size, sender=me + 10 * shard, round_id=r), to=peer, envelope=envelope_of(size, r))
        for peer in others
        for r, size in (order if me % 2 else reversed(order))
    ]
    wrong: list[str] = []

    def check(peer: int, round_id: int, pending: Pending) -> None:
        received = pending.wait(deadline_s=60)
        expected = content(SIZES[round_id], sender=peer + 10 * shard, round_id=round_id)
        if received is None or not torch.equal(received.payload, expected):
            wrong.append(f"{peer} {round_id}")

    threads = [threading.Thread(target=check, args=(*key, pending)) for key, pending in receives.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pending in sends:
        pending.wait(deadline_s=60)
    answer = {
        "replica": me,
        "shard": shard,
        "wrong": wrong,
        "done": all(p.done() for p in [*sends, *receives.values()]),
        "sent": transport.log.totals("sent").wire_bytes,
        "received": transport.log.totals("received").wire_bytes,
        "errors": [t.error for t in transport.log if t.error],
        "backwards": [t.round_id for t in transport.log if t.finished_s < t.started_s],
    }
    dist.barrier()
    transport.close()
    transport.close()
    return answer


@pytest.mark.parametrize(("num_replicas", "ranks_per_replica"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_every_size_arrives_whole_in_any_order_and_is_counted(num_replicas: int, ranks_per_replica: int) -> None:
    outcomes = values(
        run(
            exchange_everything,
            num_ranks=num_replicas * ranks_per_replica,
            arguments={"ranks_per_replica": ranks_per_replica},
        )
    )
    wire_bytes = (num_replicas - 1) * sum(size + HEADER_BYTES for size in SIZES)
    for rank, found in enumerate(outcomes):
        assert found == {
            "replica": rank // ranks_per_replica,
            "shard": rank % ranks_per_replica,
            "wrong": [],
            "done": True,
            "sent": wire_bytes,
            "received": wire_bytes,
            "errors": [],
            "backwards": [],
        }


def send_wrong_messages() -> dict[str, Any]:
    transport = connect(deadline_s=600)
    found: dict[str, Any] = {}
    wire = bare(transport)
    sizes = {"smaller": (100, 10), "larger": (10, 100), "opening for more": (10, 2 * OPENING_BYTES)}
    sizes |= {"more for opening": (2 * OPENING_BYTES, 10), "both large": (2 * OPENING_BYTES, 3 * OPENING_BYTES)}
    for round_id, (name, (expected, sent)) in enumerate(sizes.items()):
        if transport.replica == 0:
            found[name] = failure_of(transport.receive(source=1, envelope=envelope_of(expected, round_id)))
        else:
            payload = content(sent, sender=1, round_id=round_id)
            transport.send(payload, to=0, envelope=envelope_of(sent, round_id))
    damages: dict[str, Any] = {
        "foreign": lambda message: torch.full_like(message, 0x5A),
        "short": lambda message: message[:10].clone(),
        "empty": lambda message: message[:0].clone(),
        "flipped": lambda message: torch.cat([message[:-1], message[-1:] ^ 1]),
        "whole": None,
    }
    for round_id, (name, damage) in enumerate(damages.items(), start=100):
        for size in (1000, 2 * OPENING_BYTES):
            if size > OPENING_BYTES and name in ("short", "empty"):
                continue
            envelope = envelope_of(size, round_id, fragment=int(size > 1000))
            if transport.replica == 0:
                found[f"{name} {size}"] = failure_of(transport.receive(source=1, envelope=envelope))
            else:
                wire.tamper = damage
                transport.send(content(size, sender=1, round_id=round_id), to=0, envelope=envelope)
                wire.tamper = None
    dist.barrier()
    found["errors in the log"] = len([transfer for transfer in transport.log if transfer.error])
    transport.close()
    return found


def test_a_wrong_message_is_refused_by_name_and_the_next_one_still_arrives() -> None:
    found = values(run(send_wrong_messages, num_ranks=2))[0]
    for name in ("smaller", "larger", "opening for more", "more for opening", "both large"):
        kind, text, seconds = found[name]
        assert (kind, seconds < 5) == ("PayloadError", True), (name, kind, text, seconds)
        assert "from replica 1: elements is" in text or "from replica 1: payload bytes is" in text
    for name in ("foreign 1000", f"foreign {2 * OPENING_BYTES}", "short 1000", "empty 1000"):
        assert found[name][0] == "PayloadError", (name, found[name])
        assert "header's checksum is wrong" in found[name][1], (name, found[name])
    for name in ("flipped 1000", f"flipped {2 * OPENING_BYTES}"):
        assert found[name][0] == "PayloadError", (name, found[name])
        assert "payload's checksum is wrong" in found[name][1]
    assert found["whole 1000"][0] == found[f"whole {2 * OPENING_BYTES}"][0] == ""
    assert found["errors in the log"] == 11


def send_late() -> dict[str, Any]:
    transport = connect(deadline_s=600)
    if transport.replica == 0:
        return wait_for_the_late(transport)
    dist.barrier()
    late = transport.send(content(1000, sender=1, round_id=3), to=0, envelope=envelope_of(1000, 3, fragment=2))
    unwatched = transport.send(content(5, sender=1, round_id=4), to=0, envelope=envelope_of(5, 4))
    for pending in (late, unwatched):
        pending.wait(deadline_s=SOON_S)
    dist.barrier()
    transport.close()
    return {}


def wait_for_the_late(transport: RecordingTransport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    envelope = envelope_of(1000, 3, fragment=2)
    late = transport.receive(source=1, envelope=envelope)
    found["missed"] = failure_of(late, deadline_s=0.3)
    found["done before"] = late.done()
    dist.barrier()  # the user's own collective, while a message is in flight
    found["late"] = failure_of(late)
    # Nobody waits for this receive: it must be seen to end all the same.
    unwatched = transport.receive(source=1, envelope=envelope_of(5, 4))
    end = time.monotonic() + SOON_S
    while not unwatched.done() and time.monotonic() < end:
        time.sleep(0.01)
    found["unwatched"] = [t.round_id for t in transport.log if t.direction == "received" and not t.error]
    never = transport.receive(source=1, envelope=envelope_of(5, 5))
    untaken = transport.send(content(9, sender=0, round_id=6), to=1, envelope=envelope_of(9, 6))
    dist.barrier()
    start = time.monotonic()
    transport.close()
    found["closing took"] = time.monotonic() - start
    found["never"] = failure_of(never)
    found["untaken"] = failure_of(untaken)
    found["after"] = failure_of(transport.receive(source=1, envelope=envelope_of(5, 7)))
    transport.close()
    found["is initialised"] = dist.is_initialized()
    return found


def test_a_late_message_still_arrives_and_close_ends_what_is_in_flight() -> None:
    found = values(run(send_late, num_ranks=2))[0]
    kind, text, seconds = found["missed"]
    assert kind == "DeadlineExceeded" and 0.25 < seconds < HANGS_S
    for part in ("replica 1 (rank 1)", "round 3 (fragment 2)", "0.3 s", "measured times"):
        assert part in text
    assert found["done before"] is False
    assert found["late"][0] == ""
    assert found["unwatched"] == [3, 4]
    assert found["closing took"] < HANGS_S
    # The peer may leave at the same moment; either way nobody hangs.
    for name in ("never", "untaken"):
        assert found[name][0] in ("TransportError", "PeerLost"), found[name]
        assert "replica 1 (rank 1)" in found[name][1]
    assert found["after"][0] == "TransportError" and "closed" in found["after"][1]
    assert found["is initialised"] is False


def wait_for_a_failing_peer(deadline_s: float) -> dict[str, Any]:
    transport = connect(deadline_s=600)
    if transport.replica == 1:
        announce("ready")
        time.sleep(60)
    receive = transport.receive(source=1, envelope=envelope_of(1000, 12, fragment=3))
    # Larger than the kernel's buffers, so that it cannot leave.
    send = transport.send(torch.zeros(40_000_000, dtype=torch.uint8), to=1, envelope=envelope_of(40_000_000, 13))
    announce("ready")
    found = {"receive": failure_of(receive, deadline_s=deadline_s), "at": time.time()}
    found["send"] = failure_of(send, deadline_s=deadline_s)
    found["next"] = failure_of(transport.receive(source=1, envelope=envelope_of(1, 14)), deadline_s=0.1)
    start = time.monotonic()
    transport.close()
    found["closing took"] = time.monotonic() - start
    return found


def test_a_killed_peer_is_named_within_seconds() -> None:
    with Processes(wait_for_a_failing_peer, num_ranks=2, arguments={"deadline_s": 50}) as processes:
        for rank in (0, 1):
            processes.wait_for("ready", rank=rank)
        killed_at = time.time()
        processes.kill(1)
        (found,) = values(processes.join(ranks=[0]))
    assert found["at"] - killed_at < HANGS_S
    for name, what in (("receive", "round 12 (fragment 3)"), ("send", "round 13 (fragment 0)"), ("next", "round 14")):
        kind, text, _ = found[name]
        assert kind == "PeerLost" and "replica 1 (rank 1)" in text and what in text, (name, kind, text)
        assert "resume from the last checkpoint" in text
    assert found["closing took"] < HANGS_S


def test_a_stopped_peer_runs_into_the_deadline_and_close_does_not_wait_for_it() -> None:
    with Processes(wait_for_a_failing_peer, num_ranks=2, arguments={"deadline_s": 0.8}) as processes:
        processes.wait_for("ready", rank=1)
        processes.signal(1, signal.SIGSTOP)
        (found,) = values(processes.join(ranks=[0]))
    for name in ("receive", "send"):
        kind, text, seconds = found[name]
        assert kind == "DeadlineExceeded" and "replica 1 (rank 1)" in text, (name, kind, text)
        assert 0.75 < seconds < HANGS_S
    assert found["next"][0] == "DeadlineExceeded"
    assert found["closing took"] < HANGS_S


def leave_without_closing() -> int:
    transport = connect(deadline_s=600)
    transport.receive(source=1 - transport.replica, envelope=envelope_of(1000, 0))
    dist.barrier()  # one that ends while the other still connects would be another fault
    return os.getpid()


def test_a_process_that_ends_with_messages_in_flight_ends_cleanly() -> None:
    values(run(leave_without_closing, num_ranks=2))


def ask_for_the_impossible() -> list[str]:
    transport = connect(deadline_s=600)
    texts = []
    for peer, owner in ((transport.replica, 0), (2, 0), (-1, 0), (1 - transport.replica, 1 << 6)):
        try:
            transport.receive(source=peer, envelope=envelope_of(1, 0, owner=owner))
        except ValueError as error:
            texts.append(str(error))
    dist.barrier()
    transport.close()
    return texts


def test_a_peer_or_owner_that_cannot_be_is_refused_with_its_number() -> None:
    for rank, texts in enumerate(values(run(ask_for_the_impossible, num_ranks=2))):
        assert [text.rsplit("got ")[-1].split(";")[0] for text in texts] == [str(rank), "2", "-1", "owner 65"]
