"""A store on three hosts outlives the loss of one; what is not there, damaged or hostile has a name."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from store_hosts import SECRET, serving

from thinwire.carriers import hosts as module
from thinwire.carriers.base import as_bytes
from thinwire.carriers.host_store import PIECE_BYTES, HostStore, StoreRequest
from thinwire.carriers.hosts import HostsCarrier
from thinwire.carriers.open import CarrierAddress, open_carrier
from thinwire.errors import DeadlineExceeded, NotThere, PayloadError
from thinwire.transport.addresses import Address, free_port
from thinwire.transport.secret import Secret
from thinwire.transport.wire.zeromq import zmq


class Hosts:
    """Three hosts of which each may stop and come back with its folder."""

    def __init__(self, folder: Path, closing: contextlib.ExitStack, **more: int) -> None:
        self.folder, self._closing, self._more = folder, closing, more
        self.said: list[str] = []
        self.ports = [free_port("127.0.0.1") for _ in range(3)]
        self.stops: list[contextlib.ExitStack] = [closing.enter_context(contextlib.ExitStack()) for _ in range(3)]
        self.stores: dict[int, HostStore] = {}
        for host in range(3):
            self.start(host)

    def start(self, host: int) -> None:
        serve = serving(self.folder / str(host), port=self.ports[host], said=self.said, **self._more)
        self.stores[host] = self.stops[host].enter_context(serve)

    def stop(self, host: int) -> None:
        self.stops[host].close()

    def member(self, secret: Secret = SECRET, **more: int) -> HostsCarrier:
        addresses = [Address(host="127.0.0.1", port=port) for port in self.ports]
        return self._closing.enter_context(contextlib.closing(HostsCarrier(addresses, secret=secret, **more)))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with contextlib.ExitStack() as closing:
        yield Hosts(tmp_path, closing)


def read(carrier: HostsCarrier, name: str) -> bytes:
    return bytes(as_bytes(carrier.get(name, most_bytes=1 << 30, deadline_s=30)))


def test_two_of_three_hosts_hold_all_and_one_that_comes_back_holds_its_promises(hosts: Hosts) -> None:
    ada, bob = hosts.member(), hosts.member()
    assert ada.put("one", b"1", only_new=True)
    hosts.stop(0)
    assert not bob.put("one", b"other", only_new=True) and read(bob, "one") == b"1"
    assert bob.put("two", b"2", only_new=True)
    hosts.start(0)
    hosts.stop(1)  # the hosts left are one that saw both, and one that saw the first alone
    assert read(ada, "two") == b"2" and not ada.put("two", b"other", only_new=True)
    assert [entry.name for entry in ada.listing("two")] == [] and ada.append("journal", 0, b"x")
    hosts.stop(2)


def test_without_a_majority_it_says_which_hosts_to_start(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = hosts.member()
    ada.put("one", b"1", only_new=True)
    hosts.stop(0)
    hosts.stop(2)
    monkeypatch.setattr(module, "_OPERATION_S", 0.5)
    with pytest.raises(
        DeadlineExceeded, match=rf"127.0.0.1:{hosts.ports[0]}, 127.0.0.1:{hosts.ports[2]}.*thinwire store"
    ):
        ada._attempt("two", b"2", deadline_s=0.5)
    hosts.start(0)  # as it says
    assert read(ada, "one") == b"1"


def test_leaders_that_race_while_hosts_stop_and_come_back_never_share_a_position(hosts: Hosts) -> None:
    won: dict[int, list[int]] = {}
    lock, turns = threading.Lock(), 10

    def lead(number: int, carrier: HostsCarrier) -> None:
        for position in range(turns):
            if carrier.put(f"journal/{position}", f"{number}".encode(), only_new=True):
                with lock:
                    won.setdefault(position, []).append(number)

    leaders = [threading.Thread(target=lead, args=(number, hosts.member())) for number in range(2)]
    for leader in leaders:
        leader.start()
    draw = random.Random(5)
    while any(leader.is_alive() for leader in leaders):
        host = draw.randrange(3)
        hosts.stop(host)
        hosts.start(host)
        for leader in leaders:
            leader.join(0.02)
    late = hosts.member()
    for position in range(turns):
        # an answer may be lost with the host: then neither knows, but the value is one
        assert len(won.get(position, [])) <= 1
        assert [read(late, f"journal/{position}")] * len(won.get(position, [])) == [
            f"{number}".encode() for number in won.get(position, [])
        ]
    assert sum(map(len, won.values())) > turns // 2


def test_a_large_blob_lies_on_one_host_whole_or_is_named(hosts: Hosts) -> None:
    ada, bob = hosts.member(home=1), hosts.member()
    data = random.Random(1).randbytes(2 * PIECE_BYTES + 17)
    assert ada.put("state/a", data, only_new=True) and read(bob, "state/a") == data
    assert not bob.put("state/a", data, only_new=True)
    (blob,) = (hosts.folder / "1" / "blobs").iterdir()
    assert [entry.num_bytes for entry in bob.listing("state")] == [len(data)]
    with blob.open("r+b") as file:
        file.write(b"\x00" * 9)
    with pytest.raises(PayloadError, match=r"state/a is damaged on host 127.0.0.1"):
        read(bob, "state/a")
    assert ada.put("state/a", data[::-1], only_new=False) and read(bob, "state/a") == data[::-1]
    assert not blob.exists()
    (blob,) = (hosts.folder / "1" / "blobs").iterdir()
    blob.unlink()
    with pytest.raises((NotThere, DeadlineExceeded), match=r"127.0.0.1"):
        bob.get("state/a", most_bytes=1 << 30, deadline_s=0.5)
    ada.put("state/b", data, only_new=True)
    ada.delete(["state/a", "state/b"])
    assert not list((hosts.folder / "1" / "blobs").iterdir())


def test_a_full_host_is_passed_over_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPERATION_S", 1.5)
    with contextlib.ExitStack() as closing:
        full = Hosts(tmp_path, closing, most_bytes=1000)
        with pytest.raises(DeadlineExceeded, match="at most 1000 are allowed"):
            full.member().put("large", bytes(PIECE_BYTES), only_new=True)
        full.stop(1)
        full._more = {}
        full.start(1)  # with room, as it says
        first = StoreRequest(number=1, what="store", blob="0" * 32, data=bytes(900))
        for _ in range(3):  # a piece that is sent again, since its answer was lost, takes no more room
            full.stores[0]._store(first)
        assert full.stores[0]._held_bytes == 900
        assert full.member().put("large", bytes(PIECE_BYTES), only_new=True)


def test_hostile_requests_and_a_wrong_secret_are_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = hosts.member()
    ada.put("one", b"1", only_new=True)
    bad = [
        StoreRequest(number=1, what="read", name="a key"),
        StoreRequest(number=1, what="store", blob="../../key", data=b"x"),
        StoreRequest(number=1, what="load", blob="0" * 31 + "/"),
        StoreRequest(number=1, what="store", blob="0" * 32, offset=-1, data=b"x"),
        StoreRequest(number=1, what="prepare", name="one", ballot=(2**62, "x")),
        StoreRequest(number=1, what="accept", name="one", ballot=(9, "x" * 65), data=b"forged"),
        StoreRequest(number=1, what="names", name="x" * 2000),
    ]
    for request in bad:
        ada._connections._outgoing.append((0, request))
    for raw in (b"", b"\xff" * 40, msgspec.msgpack.encode({"number": 1, "what": "own"})):
        monkeypatch.setattr(msgspec.msgpack, "encode", lambda value, raw=raw: raw)
        ada._connections._outgoing.append((0, bad[0]))
        ada._connections._rouse()
        while ada._connections._outgoing:
            threading.Event().wait(0.01)
        monkeypatch.undo()
    frames = [[b"\x83\xa6number\x01\xa5now_s\x00\xa7problem\xa1\xff"], [b"\xff"]]

    class Plug:
        def recv_multipart(self, flags: int) -> list[bytes]:
            if not frames:
                raise zmq.Again
            return frames.pop()

    ada._connections._receive(0, Plug())  # type: ignore[arg-type]
    assert not frames and read(ada, "one") == b"1"
    assert len(hosts.said) >= len(bad) and all("a caller sent" in text for text in hosts.said), hosts.said
    monkeypatch.setattr(module, "_OPERATION_S", 0.5)
    with pytest.raises(DeadlineExceeded, match="of 3 hosts of the store 0 answered"):
        hosts.member(Secret(key=bytes(32))).listing("one")
    for number in (0, 10):
        with pytest.raises(ValueError, match="these are no hosts of a store"):
            HostsCarrier([Address(host="a", port=1 + one) for one in range(number)], secret=SECRET)


def test_an_address_opens_it_sealed(hosts: Hosts) -> None:
    place = "hosts://" + ",".join(f"127.0.0.1:{port}" for port in hosts.ports)
    text = CarrierAddress(place=place, secret=SECRET).text()
    with contextlib.closing(open_carrier(text, may_create=True)) as ada:
        assert ada.put("one", b"1", only_new=True)
    with contextlib.closing(open_carrier(text, may_create=False)) as bob:
        assert bytes(as_bytes(bob.get("one", most_bytes=9, deadline_s=30))) == b"1"
    elsewhere = open_carrier(CarrierAddress(place=f"{place}/other", secret=SECRET), may_create=True)
    with contextlib.closing(elsewhere) as eve, pytest.raises(NotThere):
        eve.get("one", most_bytes=9, deadline_s=30)
    with pytest.raises(ValueError, match=r"a host of the store"):
        open_carrier(CarrierAddress(place="hosts://a:7700,b", secret=SECRET), may_create=True)
