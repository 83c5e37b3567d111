"""Laws of every carrier: a new one is added to `STORES` and runs through all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from s3_server import s3_server
from store_hosts import SECRET, serving

from thinwire.carriers.base import MOST_NAME_CHARACTERS, Carrier, CarrierCost, CarrierLease, as_bytes
from thinwire.carriers.bucket import BucketCarrier
from thinwire.carriers.folder import FolderCarrier
from thinwire.carriers.hosts import HostsCarrier
from thinwire.carriers.memory import CarrierFault, MemoryCarrier, MemoryStore
from thinwire.carriers.sealed import SealedCarrier
from thinwire.errors import AccessRefused, DeadlineExceeded, NotThere, PayloadError, Throttled, TransportError
from thinwire.transport.addresses import Address

Member = Callable[[], Carrier]


def in_memory(folder: Path, closing: contextlib.ExitStack) -> Member:
    store = MemoryStore()
    return lambda: MemoryCarrier(store)


def in_a_folder(folder: Path, closing: contextlib.ExitStack) -> Member:
    return lambda: FolderCarrier(folder / "store")


def sealed_in_memory(folder: Path, closing: contextlib.ExitStack) -> Member:
    store = MemoryStore()
    return lambda: SealedCarrier(MemoryCarrier(store), SECRET, may_create=True, part_bytes=1024)


def on_hosts(folder: Path, closing: contextlib.ExitStack) -> Member:
    hosts = [closing.enter_context(serving(folder / str(number))) for number in range(3)]
    addresses = [Address(host="127.0.0.1", port=host.port) for host in hosts]
    return lambda: closing.enter_context(contextlib.closing(HostsCarrier(addresses, secret=SECRET, folder="run")))


def in_a_bucket(folder: Path, closing: contextlib.ExitStack) -> Member:
    server = s3_server()
    url = f"s3://{server.reset()}/run"
    return lambda: BucketCarrier(url, options=server.options())


def by_fsspec(folder: Path, closing: contextlib.ExitStack) -> Member:
    return lambda: BucketCarrier(f"memory://{folder.name}")


STORES = {
    "memory": in_memory, "folder": in_a_folder, "sealed": sealed_in_memory, "s3": in_a_bucket, "fsspec": by_fsspec,
    "hosts": on_hosts,
}  # fmt: skip


@pytest.fixture(params=STORES)
def member(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Member]:
    """Give a function that returns another member's access to the same store."""
    with contextlib.ExitStack() as closing:
        yield STORES[request.param](tmp_path, closing)


def read(carrier: Carrier, name: str, most_bytes: int = 1 << 20) -> bytes:
    return bytes(as_bytes(carrier.get(name, most_bytes=most_bytes, deadline_s=30)))


def test_what_one_member_puts_another_gets_at_awkward_sizes(member: Member) -> None:
    ada, bob = member(), member()
    for size in (0, 1, 4099, 65_537):
        payload = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        assert ada.put(f"sizes/{size}", payload, only_new=True)
        found = bob.get(f"sizes/{size}", most_bytes=size, deadline_s=30)
        assert found.dtype == torch.uint8 and torch.equal(found, payload)
        found.fill_(7)  # its reader may write to it
        assert read(bob, f"sizes/{size}") == bytes(as_bytes(payload))
    with pytest.raises(ValueError, match="no row of bytes"):
        ada.put("float", torch.zeros(3), only_new=False)


def test_a_duplicate_changes_nothing_and_a_replacement_is_whole(member: Member) -> None:
    ada, bob = member(), member()
    assert ada.put("one", b"first", only_new=True)
    assert not bob.put("one", b"second", only_new=True) and read(ada, "one") == b"first"
    assert bob.put("one", b"third", only_new=False) and read(ada, "one") == b"third"
    ada.delete(["one", "one", "never"])
    with pytest.raises(NotThere, match="one"):
        read(bob, "one")
    assert bob.put("one", b"fourth", only_new=True)


def test_of_many_that_put_at_once_exactly_one_wins(member: Member) -> None:
    for turn in range(3):
        carriers, won = [member() for _ in range(4)], []
        barrier = threading.Barrier(len(carriers))

        def contend(number: int, name: str = f"lead/{turn}") -> None:
            barrier.wait(30)  # noqa: B023
            if carriers[number].put(name, bytes([number]) * 1000, only_new=True):  # noqa: B023
                won.append(number)  # noqa: B023

        threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(won) == 1 and read(carriers[0], f"lead/{turn}") == bytes(won) * 1000


def test_a_larger_blob_than_expected_is_refused(member: Member) -> None:
    ada = member()
    ada.put("large", bytes(1001), only_new=True)
    with pytest.raises(PayloadError, match=r"large.*1000"):
        read(ada, "large", most_bytes=1000)


def test_a_name_that_leaves_the_folder_is_refused(member: Member) -> None:
    ada = member()
    for name in ("", "/a", "a/", "a//b", "..", "a/../b", ".hidden", "a b", "ü", "a" * (MOST_NAME_CHARACTERS + 1)):
        with pytest.raises(ValueError, match="no such name"):
            ada.put(name, b"", only_new=True)
        with pytest.raises(ValueError, match="no such name"):
            ada.get(name, most_bytes=1, deadline_s=1)
        with pytest.raises(ValueError, match="no such name"):
            ada.delete([name])


def test_a_listing_holds_whole_folders_in_order_and_continues_after_a_name(member: Member) -> None:
    ada, bob = member(), member()
    for name in ("rounds/10/b", "rounds/10/a", "rounds/9/c", "rounds-2/x", "roundsish"):
        ada.put(name, b"12345", only_new=True)
    listed = bob.listing("rounds")
    assert [entry.name for entry in listed] == ["rounds/10/a", "rounds/10/b", "rounds/9/c"]
    assert all(abs(entry.modified_s - bob.now()) < 600 and entry.num_bytes >= 5 for entry in listed)
    assert [entry.name for entry in bob.listing("rounds", after="rounds/10/a")] == ["rounds/10/b", "rounds/9/c"]
    assert [entry.name for entry in bob.listing("rounds/10")] == ["rounds/10/a", "rounds/10/b"]
    assert bob.listing("nothing") == bob.wait("nothing", after="", deadline_s=0) == []


def test_a_late_blob_is_waited_for_by_name_and_by_folder(member: Member) -> None:
    ada, bob = member(), member()
    with pytest.raises(DeadlineExceeded, match="late/1"):
        bob.fetch("late/1", most_bytes=9, deadline_s=0.05)
    timer = threading.Timer(0.1, lambda: ada.put("late/1", b"here", only_new=True))
    timer.start()
    assert bytes(as_bytes(bob.fetch("late/1", most_bytes=9, deadline_s=30))) == b"here"
    assert [entry.name for entry in bob.wait("late", after="late/0", deadline_s=30)] == ["late/1"]
    timer.join()


def test_a_journal_has_one_entry_a_position_and_the_order_of_positions(member: Member) -> None:
    ada, bob = member(), member()
    assert ada.append("journal", 0, b"ada 0") and not bob.append("journal", 0, b"bob 0")
    assert ada.append("journal", 0, b"ada 0")  # a repeated write finds itself
    assert bob.append("journal", 1, b"bob 1") and not ada.append("journal", 1, b"ada 1")
    assert [bob.entry("journal", position) for position in (0, 1)] == [b"ada 0", b"bob 1"]
    with pytest.raises(NotThere):
        ada.entry("journal", 2)
    with pytest.raises(ValueError, match="no such position"):
        ada.append("journal", -1, b"")


def test_a_lease_has_one_holder_and_is_taken_over_when_its_member_vanishes(member: Member) -> None:
    ada, bob = member(), member()
    first = ada.lease("lease", term=1, holder="ada", seconds=3000)
    assert first is not None and first.position == 0 and not first.is_over(ada.now())
    for term in (1, 2, 3):
        assert bob.lease("lease", term=term, holder="bob", seconds=30) is None
    assert bob.newest_lease("lease") == first
    renewed = ada.lease("lease", term=1, holder="ada", seconds=1e-3, known=first)  # and then it vanishes
    assert renewed is not None and (renewed.position, renewed.term) == (1, 1)
    while not renewed.is_over(bob.now()):
        bob.pause(1e-3)
    assert bob.lease("lease", term=3, holder="bob", seconds=30) is None  # a term is not left out
    taken = bob.lease("lease", term=2, holder="bob", seconds=30)
    assert taken is not None and taken.term == 2 and taken.position == 2
    # the old holder comes back, with what it knew
    assert ada.lease("lease", term=1, holder="ada", seconds=30, known=renewed) is None
    assert ada.newest_lease("lease", known=first) == taken
    with pytest.raises(ValueError, match="no such duration"):
        ada.lease("lease", term=3, holder="ada", seconds=0)


def test_a_record_that_is_no_lease_is_named(member: Member) -> None:
    ada = member()
    ada.put("lease/foreign", b"", only_new=True)
    assert ada.newest_lease("lease") is None
    ada.append("lease", 0, b'{"name":"lease","position":0,"term":1,"holder":"x","start_s":0,"seconds":1e9}')
    with pytest.raises(PayloadError, match="record 0 of lease lease"):
        ada.lease("lease", term=1, holder="ada", seconds=30)


def test_requests_and_bytes_are_counted(member: Member) -> None:
    ada = member()
    before = ada.cost()
    ada.put("a", bytes(100), only_new=True)
    read(ada, "a")
    ada.listing("a")
    ada.delete(["a"])
    used = ada.cost() - before
    assert (used.puts, used.lists, used.deletes) == (1, 1, 1) and 1 <= used.gets <= 2
    assert used.requests == sum((used.puts, used.gets, used.lists, used.deletes))
    assert used.sent_bytes >= 100 and used.received_bytes >= 100 and used + CarrierCost() == used


# Faults that only the carrier in memory can inject; what is above it must stand them.


def test_a_virtual_clock_moves_with_the_pauses_of_members() -> None:
    store = MemoryStore(is_virtual=True)
    ada, began_s = MemoryCarrier(store), store.now()
    assert ada.wait("none", after="", deadline_s=9.0) == []
    assert store.now() - began_s == 9.0 and ada.cost().lists == 5  # at 0, 1, 3, 7 and 9 s


def test_a_listing_that_lags_hides_nothing_from_expected_names() -> None:
    store = MemoryStore(is_virtual=True)
    ada, bob = MemoryCarrier(store), MemoryCarrier(store)
    bob.inject(CarrierFault(on="list", kind="late", seconds=60, times=2))
    first = ada.lease("lease", term=1, holder="ada", seconds=30)
    assert bob.newest_lease("lease") == first  # though the listing is empty
    assert bob.listing("lease") == [] and len(bob.listing("lease")) == 1
    ada.inject(CarrierFault(on="put", kind="late", below="round", seconds=5))
    ada.put("round/1", b"x", only_new=True)
    assert bytes(as_bytes(bob.fetch("round/1", most_bytes=1, deadline_s=60))) == b"x"


def test_a_lost_answer_leaves_one_entry_which_its_writer_knows_for_its_own() -> None:
    store = MemoryStore(is_virtual=True)
    ada, bob = MemoryCarrier(store), MemoryCarrier(store)
    ada.inject(CarrierFault(on="put", kind="unanswered"))
    with pytest.raises(TransportError, match="may be done"):
        ada.append("journal", 0, b"ada")
    assert ada.append("journal", 0, b"ada") and not bob.append("journal", 0, b"bob")
    ada.inject(CarrierFault(on="put", kind="unanswered"))
    with pytest.raises(TransportError, match="may be done"):
        ada.lease("lease", term=1, holder="ada", seconds=30)
    lease = ada.lease("lease", term=1, holder="ada", seconds=30)
    assert lease is not None and lease.position == 1 and bob.newest_lease("lease") == lease


def test_faults_of_a_store_are_named_errors_and_the_same_request_may_go_on() -> None:
    ada = MemoryCarrier(MemoryStore(is_virtual=True))
    for kind, error in (("failed", TransportError), ("refused", AccessRefused), ("throttled", Throttled)):
        ada.inject(CarrierFault(on="put", kind=kind, seconds=3.0))
        with pytest.raises(error) as raised:
            ada.put(kind, b"x", only_new=True)
        assert ada.put(kind, b"x", only_new=True)
    assert isinstance(raised.value, Throttled) and raised.value.retry_after_s == 3.0


def test_a_lease_of_a_clock_that_is_ahead_holds_nothing() -> None:
    lease = CarrierLease(name="lease", position=0, term=1, holder="ada", start_s=1000.0, seconds=30.0)
    assert not lease.is_over(990.0) and not lease.is_over(1029.0)
    assert lease.is_over(1030.0) and lease.is_over(400.0)
