"""A state that is fetched over real connections: from several, from liars, from those that die half way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import content
from open_wires import HOST, SOON_S, Site, site, sites
from processes import Processes

from thinwire.elastic.state_transfer import (
    CHUNK_BYTES,
    CorruptChunk,
    StateTransfer,
    chunk_name,
    hashes_name,
    num_chunks_of,
    publish_state,
    root_of,
    withdraw_state,
)
from thinwire.errors import DeadlineExceeded, NotThere
from thinwire.transport.addresses import Address
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.secret import make_secret, read_secret
from thinwire.transport.wire.wire_transport import WireTransport

pytestmark = pytest.mark.multiprocess
NAME = b"state/12"
CHUNK = 1 << 16
NEVER_S = 200.0


def state_of(size: int) -> torch.Tensor:
    return content(size, sender=1, round_id=12)


def fetch_state(
    library: BlobStore, holders: list[int], name: bytes, *, root: bytes, deadline_s: float, **options: Any
) -> torch.Tensor:
    """Fetch a state from these holders, and fail where none of them has it."""
    transfer = StateTransfer(library, name, root=root, **options)
    for holder in holders:
        transfer.add_holder(holder)
    return transfer.run(deadline_s=deadline_s, may_wait=False)


def received(site: Site) -> int:
    return site.recording.log.totals("received").payload_bytes


def brought(site: Site) -> list[int]:
    """Return from whom each message came that has come whole."""
    return [one.peer for one in site.recording.log if one.direction == "received" and not one.error]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5_000_011])
def test_every_size_comes_bit_for_bit_and_is_not_copied_by_its_holder(size: int) -> None:
    with sites(0, 1) as (new, holder):
        vector = state_of(size)
        root = publish_state(holder.library, NAME, vector, chunk_bytes=CHUNK)
        assert holder.library.num_bytes == size + 32 * num_chunks_of(size, chunk_bytes=CHUNK)
        blobs = holder.library._blobs
        assert all(
            blobs[chunk_name(NAME, index)].payload.data_ptr() == vector.data_ptr() + index * CHUNK
            for index in range(num_chunks_of(size, chunk_bytes=CHUNK))
        )
        steps: list[tuple[int, int]] = []
        found = fetch_state(
            new.library, [1], NAME, num_bytes=size, chunk_bytes=CHUNK, root=root, deadline_s=SOON_S,
            on_progress=lambda here, total: steps.append((here, total)),
        )  # fmt: skip
        assert torch.equal(found, vector)
        assert len(steps) == num_chunks_of(size, chunk_bytes=CHUNK)
        assert not steps or (steps == sorted(steps) and steps[-1] == (size, size))
        withdraw_state(holder.library, NAME, num_bytes=size, chunk_bytes=CHUNK)
        assert holder.library.num_bytes == 0
        if size:
            with pytest.raises(NotThere, match=r"no replica is left that has it; .*replica 1 does not have blob"):
                fetch_state(new.library, [1], NAME, num_bytes=size, chunk_bytes=CHUNK, root=root, deadline_s=SOON_S)


def test_several_holders_share_the_work_and_each_chunk_comes_once() -> None:
    size = 12_000_007
    with sites(0, 1, 2, 3) as (new, *holders):
        roots = {publish_state(holder.library, NAME, state_of(size)) for holder in holders}
        assert len(roots) == 1
        found = fetch_state(new.library, [1, 2, 3], NAME, num_bytes=size, root=roots.pop(), deadline_s=SOON_S)
        assert torch.equal(found, state_of(size))
        by_peer = {record.peer for record in new.recording.log if record.direction == "received"}
        assert by_peer == {1, 2, 3}
        assert size <= received(new) <= 1.05 * size


def lie(site: Site, size: int, indices: range) -> None:
    """Publish a state of which some chunks are wrong under the names and hashes of the right one."""
    right = state_of(size)
    publish_state(site.library, NAME, right, chunk_bytes=CHUNK)
    for index in indices:
        wrong = right[index * CHUNK : (index + 1) * CHUNK].clone()
        wrong[-1] ^= 1
        site.library.withdraw(chunk_name(NAME, index))
        site.library.publish(chunk_name(NAME, index), wrong, is_bulk=True)


def test_wrong_chunks_are_not_used_and_their_sender_is_named_once_and_asked_no_more() -> None:
    size = 6_000_011
    with sites(0, 1, 2) as (new, good, bad):
        root = publish_state(good.library, NAME, state_of(size), chunk_bytes=CHUNK)
        lie(bad, size, range(num_chunks_of(size, chunk_bytes=CHUNK)))
        findings: list[CorruptChunk] = []
        found = fetch_state(
            new.library, [2, 1], NAME, num_bytes=size, chunk_bytes=CHUNK, root=root, deadline_s=SOON_S,
            on_finding=findings.append,
        )  # fmt: skip
        assert torch.equal(found, state_of(size))
        assert [finding.holder for finding in findings] == [2]
        assert "replica 2 sent wrong bytes for 'state/12/" in findings[0].describe()
        assert received(new) <= 1.05 * size


def test_a_wrong_list_of_hashes_is_not_believed() -> None:
    size = 1_000_003
    with sites(0, 1, 2) as (new, good, bad):
        root = publish_state(good.library, NAME, state_of(size), chunk_bytes=CHUNK)
        other = publish_state(bad.library, NAME, state_of(size).flip(0), chunk_bytes=CHUNK)
        assert other != root
        fetch = StateTransfer(new.library, NAME, num_bytes=size, chunk_bytes=CHUNK, root=root)
        fetch.add_holder(2)
        with pytest.raises(NotThere, match=r"list of the hashes .* did not come: no replica is left .* wrong bytes"):
            fetch.run(deadline_s=SOON_S, may_wait=False)
        assert [finding.name for finding in fetch.findings] == [hashes_name(NAME)]
        fetch.add_holder(2)  # is not asked again
        fetch.add_holder(1)
        assert torch.equal(fetch.run(deadline_s=SOON_S, may_wait=False), state_of(size))
        assert len(fetch.findings) == 1


def hold(dialled: int, secret: str, size: int) -> None:
    """Be replica 2 in a process of its own, which holds the state until it is killed."""
    key = read_secret(Path(secret))
    wire = WireTransport(replica=2, num_replicas=3, secret=key, address=HOST, is_open=True)
    publish_state(BlobStore(wire), NAME, state_of(size), chunk_bytes=CHUNK)
    wire.add(0, address=Address(host=HOST, port=dialled))
    time.sleep(120)  # killed long before


def test_a_holder_that_is_killed_half_way_costs_no_more_than_what_was_under_way(tmp_path: Path) -> None:
    size, secret = 20_000_003, make_secret(tmp_path / "job.secret")
    new, one = site(0, secret=secret), site(1, secret=secret)
    arguments = {"dialled": new.wire.port, "secret": str(tmp_path / "job.secret"), "size": size}
    try:
        new.meet(one)
        one.meet(new)
        new.wire.add(2)
        root = publish_state(one.library, NAME, state_of(size), chunk_bytes=CHUNK)
        with Processes(hold, num_ranks=1, arguments=arguments) as processes:
            assert new.wire.wait_until_connected([1, 2], deadline_s=60) == (1, 2)
            killed: list[int] = []

            def kill(here: int, total: int) -> None:
                if here > total // 2 and not killed:
                    killed.append(here)
                    # on a busy machine the other one may have brought all of it so far
                    until_s = time.monotonic() + 60.0
                    while 2 not in brought(new) and time.monotonic() < until_s:
                        time.sleep(0.01)
                    processes.kill(0)

            found = fetch_state(
                new.library, [1, 2], NAME, num_bytes=size, chunk_bytes=CHUNK, root=root, deadline_s=SOON_S,
                on_progress=kill,
            )  # fmt: skip
        assert killed and torch.equal(found, state_of(size))
        assert 2 in brought(new), "both brought some"
        assert received(new) <= 1.05 * size
    finally:
        new.close()
        one.close()


def test_a_holder_that_ends_half_way_costs_no_more_than_what_was_under_way() -> None:
    size = 20_000_003
    with sites(0, 1, 2) as (new, one, two):
        root = publish_state(one.library, NAME, state_of(size), chunk_bytes=CHUNK)
        publish_state(two.library, NAME, state_of(size), chunk_bytes=CHUNK)
        ended = threading.Event()

        def end_one(here: int, total: int) -> None:
            if here > total // 2 and not ended.is_set():
                ended.set()
                one.wire.close()

        found = fetch_state(
            new.library, [1, 2], NAME, num_bytes=size, chunk_bytes=CHUNK, root=root, deadline_s=SOON_S,
            on_progress=end_one,
        )  # fmt: skip
        assert ended.is_set() and torch.equal(found, state_of(size))
        assert received(new) <= 1.05 * size


def test_what_is_here_stays_when_all_holders_go_and_others_come() -> None:
    size = 8_000_009
    with sites(0, 1, 2) as (new, one, two):
        root = publish_state(one.library, NAME, state_of(size), chunk_bytes=CHUNK)
        gone = threading.Event()
        fetch = StateTransfer(
            new.library, NAME, num_bytes=size, chunk_bytes=CHUNK, root=root,
            on_progress=lambda here, total: gone.set() if here > total // 2 else None,
        )  # fmt: skip

        def take_one_away() -> None:
            assert gone.wait(SOON_S)
            one.library.close()  # from here on it says of everything that it is gone

        helper = threading.Thread(target=take_one_away)
        helper.start()
        fetch.add_holder(1)
        try:
            fetch.run(deadline_s=SOON_S, may_wait=False)
        except NotThere as error:
            assert "chunks of state 'state/12' did not come" in str(error)
        helper.join()
        here = fetch.bytes_here
        assert here > size // 2
        before = received(new)
        publish_state(two.library, NAME, state_of(size), chunk_bytes=CHUNK)
        fetch.add_holder(2)
        assert torch.equal(fetch.run(deadline_s=SOON_S), state_of(size))
        assert received(new) - before <= size - here + 8 * CHUNK


def test_a_fetch_may_begin_before_anybody_holds_the_state() -> None:
    size = 2_000_003
    with sites(0, 1) as (new, holder):
        root = publish_state(new.library, b"mine", state_of(size), chunk_bytes=CHUNK)
        fetch = StateTransfer(new.library, NAME, num_bytes=size, chunk_bytes=CHUNK, root=root)
        results: list[torch.Tensor] = []
        runner = threading.Thread(target=lambda: results.append(fetch.run(deadline_s=SOON_S)))
        runner.start()
        fetch.add_holder(1)
        time.sleep(0.2)
        publish_state(holder.library, NAME, state_of(size), chunk_bytes=CHUNK)
        runner.join()
        assert torch.equal(results[0], state_of(size))


def test_what_does_not_come_is_named_at_the_deadline_and_nothing_waits_any_more() -> None:
    size = 10 * CHUNK
    with sites(0, 1) as (new, holder):
        vector = state_of(size)
        root = publish_state(holder.library, NAME, vector, chunk_bytes=CHUNK)
        withdraw_state(holder.library, NAME, num_bytes=size, chunk_bytes=CHUNK)
        publish_state(holder.library, NAME, vector, chunk_bytes=CHUNK)
        never = b"state/13"
        for index in range(8):
            holder.library.publish(chunk_name(never, index), vector[index * CHUNK : (index + 1) * CHUNK], is_bulk=True)
        holder.library.publish(hashes_name(never), holder.library._blobs[hashes_name(NAME)].payload)
        for is_stall in (False, True):
            for limit_s in (0.5, 2.0, 8.0, 32.0):  # a busy machine gets more time for the eight that come
                fetch = StateTransfer(new.library, never, num_bytes=size, chunk_bytes=CHUNK, root=root)
                fetch.add_holder(1)
                stall_s, deadline_s = (limit_s, NEVER_S) if is_stall else (NEVER_S, limit_s)
                with pytest.raises(DeadlineExceeded) as error:
                    fetch.run(deadline_s=deadline_s, stall_s=stall_s)
                if fetch.bytes_here == 8 * CHUNK:
                    break
            assert fetch.bytes_here == 8 * CHUNK
            assert "2 of 10 chunks of state 'state/13' did not come (8, 9)" in str(error.value)
        end = time.monotonic() + SOON_S
        while holder.library.num_waiting:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_state_comes_through_while_rounds_go_on() -> None:
    size = 8_000_009
    with sites(0, 1) as (new, holder):
        root = publish_state(holder.library, NAME, state_of(size))
        is_over = threading.Event()
        rounds: list[int] = []

        def go_on() -> None:
            while not is_over.is_set():
                name = b"round/%d" % len(rounds)
                holder.library.publish(name, content(200_003, sender=1, round_id=len(rounds)))
                loan = new.library.get(1, name, most_bytes=300_000)
                assert torch.equal(loan.wait(deadline_s=SOON_S), content(200_003, sender=1, round_id=len(rounds)))
                holder.library.withdraw(name)
                rounds.append(1)

        def look(here: int, total: int) -> None:  # chunks are under way all the time until the last has come
            end = time.monotonic() + SOON_S
            while here > total // 4 and len(rounds) <= 3 and time.monotonic() < end:
                time.sleep(0.01)

        trainer = threading.Thread(target=go_on)
        trainer.start()
        found = fetch_state(new.library, [1], NAME, num_bytes=size, root=root, deadline_s=60, on_progress=look)
        is_over.set()
        trainer.join()
        assert torch.equal(found, state_of(size)) and len(rounds) > 3


def test_arguments_that_cannot_be_are_refused() -> None:
    with sites(0, 1) as (new, holder):
        with pytest.raises(ValueError, match="a root has 32 bytes, got 5"):
            StateTransfer(new.library, NAME, num_bytes=1, root=b"short")
        with pytest.raises(ValueError, match="at least 1, got 1 in chunks of 0"):
            StateTransfer(new.library, NAME, num_bytes=1, chunk_bytes=0, root=bytes(32))
        with pytest.raises(ValueError, match="take larger chunks"):
            num_chunks_of(1 << 40, chunk_bytes=1)
        with pytest.raises(ValueError, match="has 1 to 56 bytes, got 57"):
            publish_state(holder.library, b"x" * 57, state_of(1))
        with pytest.raises(ValueError, match="an empty state has the root"):
            fetch_state(new.library, [1], NAME, num_bytes=0, root=bytes(32), deadline_s=1)
        with pytest.raises(NotThere):
            fetch_state(new.library, [], NAME, num_bytes=1, root=bytes(32), deadline_s=1)
        holder.library.publish(chunk_name(NAME, 2), state_of(1))
        with pytest.raises(ValueError, match="published already"):
            publish_state(holder.library, NAME, state_of(3 * CHUNK), chunk_bytes=CHUNK)
        assert holder.library.num_bytes == 1, "what was published before the slip is withdrawn"


def test_the_root_stands_for_every_byte_and_for_how_it_is_cut() -> None:
    roots = {root_of(bytes(32), num_bytes=size, chunk_bytes=chunk) for size in (1, 2) for chunk in (2, CHUNK_BYTES)}
    assert len(roots | {root_of(bytes(31) + b"x", num_bytes=1, chunk_bytes=2)}) == 5
