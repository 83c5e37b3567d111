"""Replicas that come and go over real connections, and pull from each other what they have."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from messages import content, envelope_of, failure_of
from open_wires import HOST, SECRET, SOON_S, Site, site, sites
from processes import Processes, announce

from thinwire.errors import DeadlineExceeded, NotThere, PeerLost, TransportError
from thinwire.transport.addresses import Address
from thinwire.transport.base import MOST_REPLICAS
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.secret import Secret, make_secret, read_secret
from thinwire.transport.wire.framing import MAX_REQUESTS, OPENING_BYTES, RequestFrame
from thinwire.transport.wire.wire_transport import WireTransport

pytestmark = pytest.mark.multiprocess
BORDER = OPENING_BYTES - HEADER_BYTES
SIZES = (0, 1, 1009, BORDER - 1, BORDER, BORDER + 1, 65_535, 65_536, 65_537, 3_000_017)
MOST = 4_000_000


def until(condition: Any) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_every_size_is_pulled_whole_before_and_after_its_publication_and_is_counted() -> None:
    with sites(3, 70_000) as (low, high):
        for asker, owner in ((low, high), (high, low)):
            early = [asker.library.get(owner.replica, b"early/%d" % size, most_bytes=MOST) for size in SIZES]
            for size in SIZES:
                owner.library.publish(b"late/%d" % size, content(size, sender=owner.replica, round_id=1))
            late = [asker.library.get(owner.replica, b"late/%d" % size, most_bytes=MOST) for size in SIZES]
            until(lambda owner=owner: owner.library.num_waiting == len(SIZES))
            assert not any(loan.done() for loan in early)
            for size in reversed(SIZES):
                owner.library.publish(b"early/%d" % size, content(size, sender=owner.replica, round_id=0))
            for round_id, loans in enumerate((early, late)):
                for size, loan in zip(SIZES, loans, strict=True):
                    found = loan.wait(deadline_s=SOON_S)
                    assert torch.equal(found, content(size, sender=owner.replica, round_id=round_id))
                    assert size % 4 or found.view(torch.float32).numel() == size // 4, "payloads stay aligned"
        moved = 2 * sum(size + HEADER_BYTES for size in SIZES)
        for one in (low, high):
            until(lambda one=one: one.recording.log.totals("sent").wire_bytes == moved)
            assert one.recording.log.totals("received").wire_bytes == moved
            assert {record.kind for record in one.recording.log} == {"blob"}


def test_eight_replicas_pull_from_each_other_at_once() -> None:
    with sites(*range(0, 80, 10)) as everybody:
        loans = [
            (one, two, one.library.get(two.replica, b"round/%d" % number, most_bytes=MOST))
            for number in range(3)
            for one in everybody
            for two in everybody
        ]
        for number in range(3):
            for one in everybody:
                one.library.publish(b"round/%d" % number, content(200_003, sender=one.replica, round_id=number))
        for count, (_, two, loan) in enumerate(loans):
            number = count // len(everybody) ** 2
            assert torch.equal(loan.wait(deadline_s=SOON_S), content(200_003, sender=two.replica, round_id=number))


def test_messages_without_an_ask_go_as_in_a_fixed_set_and_unknown_replicas_are_lost_not_wrong() -> None:
    with sites(1, 5) as (low, high):
        receive = low.recording.receive(source=5, envelope=envelope_of(100_000, 0))
        high.recording.send(content(100_000, sender=5, round_id=0), to=1, envelope=envelope_of(100_000, 0))
        received = receive.wait(deadline_s=SOON_S)
        assert received is not None and torch.equal(received.payload, content(100_000, sender=5, round_id=0))
        for pending in (
            low.recording.receive(source=4, envelope=envelope_of(1, 1)),
            low.recording.send(torch.zeros(1, dtype=torch.uint8), to=9, envelope=envelope_of(1, 1)),
        ):
            with pytest.raises(PeerLost, match=r"does not take part during round 1.*the others go on without it"):
                pending.wait(deadline_s=SOON_S)
        with pytest.raises(PeerLost, match="replica 4 does not take part during blob 'x'"):
            low.library.get(4, b"x", most_bytes=1).wait(deadline_s=SOON_S)
        for wrong in (1, -1, MOST_REPLICAS):
            with pytest.raises(ValueError, match=f"got {wrong}"):
                low.wire.request(wrong, b"x", most_bytes=1)
            with pytest.raises(ValueError, match=f"got {wrong}"):
                low.wire.add(wrong, address=low.address)
        for name in (b"", b"x" * 65):
            with pytest.raises(ValueError, match=f"1 to 64 bytes, got {len(name)}"):
                low.wire.request(5, name, most_bytes=1)
        assert low.wire.num_replicas == 4


@pytest.mark.parametrize("low_first", [True, False])
def test_replicas_may_be_told_of_each_other_in_any_order(low_first: bool) -> None:
    with sites(2, 9, joined=False) as (low, high):
        first, second = (low, high) if low_first else (high, low)
        first.meet(second)
        assert first.wire.peers() == (second.replica,) and not first.wire.is_connected(second.replica)
        # long enough for a dial that fails; how soon it is dialled again is tried without a socket (test_wire_asking)
        time.sleep(1.0)
        second.meet(first)
        first.wait_for(second)
        second.wait_for(first)
        first.meet(second)  # once more is no harm
        low.library.publish(b"x", content(5, sender=2, round_id=0))
        assert high.library.get(2, b"x", most_bytes=5).wait(deadline_s=SOON_S).numel() == 5


def test_who_is_removed_fails_at_once_and_never_comes_back() -> None:
    with sites(0, 1, 2) as (zero, one, two):
        waits = zero.library.get(1, b"never", most_bytes=1)
        receive = zero.recording.receive(source=1, envelope=envelope_of(1, 7))
        large = zero.recording.send(
            torch.zeros(30_000_000, dtype=torch.uint8), to=1, envelope=envelope_of(30_000_000, 8)
        )
        until(lambda: one.library.num_waiting == 1)
        zero.wire.remove(1)
        for pending in (waits, receive, large):
            with pytest.raises(PeerLost, match=r"replica 1 was removed during .*the others go on without it"):
                pending.wait(deadline_s=SOON_S)
        with pytest.raises(PeerLost, match="replica 1 does not take part"):
            zero.library.get(1, b"never", most_bytes=1).wait(deadline_s=SOON_S)
        zero.wire.remove(1)
        zero.wire.remove(77)
        start = time.monotonic()
        assert zero.wire.wait_until_connected([1, 2, 50], deadline_s=SOON_S) == (2,)
        assert time.monotonic() - start < SOON_S / 2, "who does not take part is not waited for until the deadline"
        assert zero.wire.peers() == (2,)
        assert not zero.wire.add(1, address=one.address) and not zero.wire.add(77)
        until(lambda: one.library.num_waiting == 0)  # who asked is gone
        time.sleep(1.5)  # it dials again and again, and is not let in
        assert not zero.wire.is_connected(1) and not one.wire.is_connected(0)
        for asker, owner in ((zero, two), (two, one)):
            owner.library.publish(b"x", content(9, sender=owner.replica, round_id=0))
            assert asker.library.get(owner.replica, b"x", most_bytes=9).wait(deadline_s=SOON_S).numel() == 9


def test_who_removes_one_that_it_dials_dials_it_no_longer() -> None:
    with sites(0, 1) as (zero, one):
        one.wire.remove(0)
        until(lambda: not zero.wire.is_connected(1))
        time.sleep(1.5)
        assert not zero.wire.is_connected(1) and one.wire.peers() == ()


def cut(one: Site, peer: int) -> None:
    line: Any = one.wire._loop.peers[peer].connection
    line.tap.shut()


def test_a_link_that_was_cut_fails_its_asks_comes_back_and_answers_none_of_them() -> None:
    with sites(0, 1) as (zero, one):
        for asker, owner in ((one, zero), (zero, one)):
            broken = asker.library.get(owner.replica, b"x%d" % owner.replica, most_bytes=MOST)
            until(lambda owner=owner: owner.library.num_waiting == 1)
            cut(zero, 1)
            with pytest.raises(PeerLost, match="closed its connection during blob"):
                broken.wait(deadline_s=SOON_S)
            until(lambda owner=owner: owner.library.num_waiting == 0)
            until(lambda asker=asker, owner=owner: asker.wire.is_connected(owner.replica))
            sent = len(owner.recording.log)
            owner.library.publish(b"x%d" % owner.replica, content(2_000_003, sender=9, round_id=0))
            again = asker.library.get(owner.replica, b"x%d" % owner.replica, most_bytes=MOST)
            assert torch.equal(again.wait(deadline_s=SOON_S), content(2_000_003, sender=9, round_id=0))
            until(lambda owner=owner, sent=sent: len(owner.recording.log) == sent + 1)  # one answer, not two


def test_a_late_answer_to_an_ask_of_a_broken_connection_is_lost_by_name() -> None:
    with sites(0, 1) as (zero, one):
        wants: list[tuple[int, int]] = []
        one.wire.on_request = lambda peer, number, name: wants.append((peer, number))
        zero.wire.request(1, b"x", most_bytes=9)
        until(lambda: wants)
        cut(zero, 1)
        until(lambda: not one.wire.is_connected(0))
        one.wait_for(zero)
        answer = one.wire.respond(*wants[0], torch.zeros(9, dtype=torch.uint8))
        with pytest.raises(PeerLost, match="replica 0 does not wait for the response to its request any more"):
            answer.wait(deadline_s=SOON_S)


def test_gone_is_an_answer_and_a_deadline_can_be_waited_for_again() -> None:
    with sites(0, 1) as (zero, one):
        one.library.is_past = lambda name: name.startswith(b"old/")
        for name in (b"old/1", b"withdrawn"):
            one.library.withdraw(b"withdrawn")
            with pytest.raises(NotThere, match="replica 1 does not have blob"):
                zero.library.get(1, name, most_bytes=1).wait(deadline_s=SOON_S)
        loan = zero.library.get(1, b"soon", most_bytes=100)
        with pytest.raises(DeadlineExceeded, match="replica 1 did not send blob 'soon' within"):
            loan.wait(deadline_s=0.05)
        one.library.publish(b"soon", content(100, sender=1, round_id=0))
        assert loan.wait(deadline_s=SOON_S).numel() == 100
        with pytest.raises(TransportError, match="expected at most 99"):
            zero.library.get(1, b"soon", most_bytes=99).wait(deadline_s=SOON_S)


def test_a_cancelled_ask_is_forgotten_at_both_ends() -> None:
    with sites(0, 1) as (zero, one):
        loans = [zero.library.get(1, b"x", most_bytes=MOST) for _ in range(100)]
        until(lambda: one.library.num_waiting == 100)
        for loan in loans:
            loan.cancel()
            with pytest.raises(TransportError, match="is not wanted any more"):
                loan.wait(deadline_s=0)
        until(lambda: one.library.num_waiting == one.recording.num_open_requests == 0)
        one.library.publish(b"x", content(3_000_000, sender=1, round_id=0))
        crossed = [zero.library.get(1, b"x", most_bytes=MOST) for _ in range(10)]
        for loan in crossed:
            loan.cancel()
        assert zero.library.get(1, b"x", most_bytes=MOST).wait(deadline_s=SOON_S).numel() == 3_000_000


def test_who_asks_without_an_end_is_disconnected_for_good() -> None:
    with sites(0, 1, 2) as (zero, one, two):
        for _ in range(MAX_REQUESTS):
            zero.wire.request(1, b"never", most_bytes=1)
        with pytest.raises(TransportError, match=f"{MAX_REQUESTS} requests to replica 1"):
            zero.wire.request(1, b"never", most_bytes=1).wait(deadline_s=SOON_S)
        until(lambda: one.library.num_waiting == MAX_REQUESTS)
        links: Any = zero.wire._loop.peers
        zero.wire._loop.call_soon(lambda: links[1]._requests.frames.append(RequestFrame(number=1 << 40, name=b"x")))
        until(lambda: not one.wire.is_connected(0))
        with pytest.raises(PeerLost, match=f"replica 0 sent more than {MAX_REQUESTS} requests without a response"):
            one.library.get(0, b"x", most_bytes=1).wait(deadline_s=SOON_S)
        until(lambda: one.library.num_waiting == 0)
        time.sleep(1.5)
        assert not one.wire.is_connected(0) and one.wire.is_connected(2)
        two.library.publish(b"x", content(3, sender=2, round_id=0))
        assert one.library.get(2, b"x", most_bytes=3).wait(deadline_s=SOON_S).numel() == 3


def test_strangers_and_replicas_that_were_not_announced_are_not_let_in() -> None:
    with sites(4, 8) as (low, high):
        for stranger in (site(6), site(8), site(5, secret=Secret(key=bytes(32)))):
            try:
                stranger.wire.add(4, address=low.address)
                assert stranger.wire.wait_until_connected([4], deadline_s=1.2) == ()
                with pytest.raises(PeerLost, match="replica 4 is not connected"):
                    stranger.library.get(4, b"x", most_bytes=1).wait(deadline_s=SOON_S)
            finally:
                stranger.close()
        assert low.wire.is_connected(8) and low.wire.peers() == (8,)
        fixed = WireTransport(replica=1, num_replicas=9, secret=SECRET, address=HOST)
        try:  # a run of a fixed set does not mix with this one
            high.wire.add(1, address=Address(host=HOST, port=fixed.port))
            assert high.wire.wait_until_connected([1], deadline_s=1.2) == ()
            for wrong in (lambda: fixed.add(2), lambda: fixed.remove(2)):
                with pytest.raises(ValueError, match="is_open=True"):
                    wrong()
        finally:
            fixed.close()
        with pytest.raises(ValueError, match="replica 3 needs an address"):
            low.wire.add(3)
        with pytest.raises(ValueError, match="add them one by one"):
            high.wire.dial({4: low.address}, deadline_s=1)
        with pytest.raises(ValueError, match=f"replica must be in 0..{MOST_REPLICAS - 1}"):
            site(MOST_REPLICAS)


def test_a_blob_that_many_pull_is_held_once() -> None:
    with sites(*range(5)) as everybody:
        owner, askers = everybody[0], everybody[1:]
        payload = content(40_000_000, sender=0, round_id=0)
        loans = [asker.library.get(0, b"x", most_bytes=50_000_000) for asker in askers]
        until(lambda: owner.library.num_waiting == len(askers))
        before = psutil.Process().memory_info().rss
        owner.library.publish(b"x", payload)
        most = 0
        while not all(loan.done() for loan in loans):
            most = max(most, psutil.Process().memory_info().rss - before)
            time.sleep(0.005)
        assert all(torch.equal(loan.wait(deadline_s=0), payload) for loan in loans)
        # the askers live in this process too, each with what it got; beyond that there is little
        assert most < (len(askers) + 0.5) * payload.numel() + 60_000_000, f"{most / 1e6:.0f} MB"


def test_bulk_leaves_the_wire_to_a_round() -> None:
    with sites(0, 1) as (zero, one):
        ended: list[bytes] = []
        names = [b"round", *(b"state/%d" % number for number in range(12))]
        loans = [zero.library.get(1, name, most_bytes=20_000_000) for name in names]
        for loan in loans:
            loan.on_finish(lambda loan=loan: ended.append(loan.name))
        until(lambda: one.library.num_waiting == len(loans))
        one.library.publish(b"round", content(20_000_000, sender=1, round_id=0))
        for number, name in enumerate(names[1:]):
            one.library.publish(name, content(1 << 20, sender=1, round_id=number), is_bulk=True)
        for number, loan in enumerate(loans[1:]):
            assert torch.equal(loan.wait(deadline_s=SOON_S), content(1 << 20, sender=1, round_id=number))
        # on the slowest of machines one bulk answer a second comes before it
        assert ended.index(b"round") <= 2, ended


def serve(port_of: int, secret: str) -> None:
    """Be replica 1: dial replica 0, publish what it has, and never what it is asked for."""
    wire = WireTransport(replica=1, num_replicas=2, secret=read_secret(Path(secret)), address=HOST, is_open=True)
    wire.on_request = lambda peer, number, name: announce("asked")
    wire.add(0, address=Address(host=HOST, port=port_of))
    time.sleep(120)


def test_a_killed_replica_fails_its_asks_at_once_and_the_others_go_on(tmp_path: Any) -> None:
    secret = make_secret(tmp_path / "job.secret")
    zero, two = site(0, secret=secret), site(2, secret=secret)
    try:
        zero.meet(two)
        two.meet(zero)
        zero.wait_for(two)
        zero.wire.add(1)
        arguments = {"port_of": zero.wire.port, "secret": str(tmp_path / "job.secret")}
        with Processes(serve, num_ranks=1, arguments=arguments) as processes:
            assert zero.wire.wait_until_connected([1], deadline_s=60) == (1,)
            loan = zero.library.get(1, b"x", most_bytes=1)
            processes.wait_for("asked", rank=0)
            processes.kill(0)
            kind, text, _ = failure_of(loan)
            # by its closed connection, and not by its silence, which takes seconds
            assert kind == "PeerLost" and "replica 1 closed its connection during blob 'x'" in text
            assert "the others go on without it" in text
        two.library.publish(b"x", content(70_000, sender=2, round_id=0))
        assert zero.library.get(2, b"x", most_bytes=MOST).wait(deadline_s=SOON_S).numel() == 70_000
    finally:
        zero.close()
        two.close()


def test_replicas_come_and_go_from_many_threads_without_harm() -> None:
    with sites(0, 1) as (zero, one):
        one.library.publish(b"x", content(100_003, sender=1, round_id=0))
        failures: list[BaseException] = []

        def churn(first: int) -> None:
            try:
                for number in range(first, first + 60):
                    zero.wire.add(number)
                    zero.library.get(number, b"x", most_bytes=1)
                    zero.wire.remove(number)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=churn, args=(1000 * (n + 1),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert zero.library.get(1, b"x", most_bytes=MOST).wait(deadline_s=SOON_S).numel() == 100_003
        for thread in threads:
            thread.join()
        assert failures == [] and zero.wire.peers() == (1,)
        until(lambda: set(zero.wire._loop.peers) == {1})
        assert len(zero.wire._loop._known_keys) == 1
