"""The wire by a relay: the same messages in nearly the same bytes, unreadable on the way, and back after a restart."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from relay_tap import HOST, SOON_S, TOKEN, Tap

from thinwire.elastic.coordinator_client import CoordinatorConnection
from thinwire.elastic.coordinator_server import CoordinatorServer, coordinator_keys
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.transport.addresses import Address, RelayPlace, free_port
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.recording import RecordingRequestTransport
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import key_pair
from thinwire.transport.wire.wire_transport import WireTransport

SECRET = Secret(key=bytes(range(32)))
SIZES = (1, 65_537, 3_000_001)
NAMES = [f"round/7/part-of-a-name-{size}".encode() for size in SIZES]


@contextmanager
def pair(relay: RelayPlace | None) -> Iterator[tuple[list[WireTransport], list[BlobStore]]]:
    """Join two replicas: directly, or by a relay since the address that one shows leads nowhere."""
    wires = [
        WireTransport(replica=number, num_replicas=2, secret=SECRET, address=HOST, is_open=True, relay=relay)
        for number in range(2)
    ]
    stores = [BlobStore(RecordingRequestTransport(wire)) for wire in wires]
    try:
        port = wires[0].port if relay is None else free_port(HOST)
        wires[0].add(1, address=None)
        wires[1].add(0, address=Address(host=HOST, port=port))
        assert wires[1].wait_until_connected((0,), deadline_s=SOON_S) == (0,)
        assert wires[0].wait_until_connected((1,), deadline_s=SOON_S) == (1,)
        yield wires, stores
    finally:
        for store, wire in zip(stores, wires, strict=True):
            store.close()
            wire.close()


def exchange(stores: list[BlobStore], *, turn: str = "") -> None:
    """Let each replica fetch blobs of awkward sizes from the other, and compare them."""
    for number, store in enumerate(stores):
        for name, size in zip(NAMES, SIZES, strict=True):
            payload = torch.full((size,), 65 + number, dtype=torch.uint8)
            stores[1 - number].publish(name + turn.encode(), payload)
            found = store.get(1 - number, name + turn.encode(), most_bytes=size)
            assert torch.equal(found.wait(deadline_s=SOON_S), payload)


def test_blobs_by_a_relay_take_the_bytes_of_the_direct_wire_and_show_nothing() -> None:
    with pair(None) as (wires, stores):
        assert wires[0].relayed_peers() == wires[1].relayed_peers() == ()
        exchange(stores)
        readings = [wires[number].reading(1 - number) for number in range(2)]
        direct = [one.sent_bytes + one.received_bytes for one in readings if one is not None]
    with closing(Tap()) as tap:
        with pair(tap.place) as (wires, stores):
            assert (wires[0].relayed_peers(), wires[1].relayed_peers()) == ((1,), (0,))
            exchange(stores)
            passed = sum(map(len, tap.captured))  # each byte once on its way to the relay and once from it
            assert len(direct) == 2 and passed <= 1.03 * sum(direct), (passed, direct)
            # the relay is gone for a while, and nothing but time is lost
            tap.stop()
            for wire, other in ((wires[0], 1), (wires[1], 0)):
                until_s = time.monotonic() + SOON_S
                while wire.reading(other) is not None:
                    assert time.monotonic() < until_s
                    time.sleep(0.05)
            tap.start()
            assert wires[1].wait_until_connected((0,), deadline_s=SOON_S) == (0,)
            assert wires[0].wait_until_connected((1,), deadline_s=SOON_S) == (1,)
            exchange(stores, turn="again")
        captured = b"".join(tap.captured)
    keys = [key_pair(SECRET, replica=number, role=role) for number in range(2) for role in ("door", "dialler")]
    for plain in (
        *NAMES, SECRET.key, TOKEN.key, b"A" * 64, b"B" * 64,
        *(form for key in keys for form in (key.public, key.public_bytes, key.private)),
    ):  # fmt: skip
        assert plain not in captured, plain


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_coordinator_by_a_relay_takes_no_host_for_its_own(address: str) -> None:
    """A join by the relay is a stranger's, though the kernel sees it come from loopback."""
    calls: list[tuple[str, bool]] = []

    class Coordinator:
        def handle(self, caller: bytes, message: object, *, origin: str, is_own_host: bool, **more: object) -> None:
            calls.append((origin, is_own_host))

        def tick(self, now_s: float) -> None: ...

    with closing(Tap()) as tap:
        server = CoordinatorServer(secret=SECRET, address=address, port=0, say=print, relay=tap.place)
        key = coordinator_keys(SECRET).public_bytes
        near = Invitation(host=address, port=server.port, secret=SECRET, coordinator_key=key)
        connections = [
            CoordinatorConnection(read_invitation(one.text()), secret=SECRET, on_message=lambda message: None)
            for one in (near, near.by(tap.place))
        ]
        for connection in connections:
            connection.send("join", version=1, thinwire="1", host=socket.gethostname())
        until_s = time.monotonic() + SOON_S
        server.serve(Coordinator(), until=lambda: len(calls) >= 2 or time.monotonic() > until_s)  # type: ignore[arg-type]
        for connection in connections:
            connection.close()
        server.close()
    assert sorted(calls) == sorted([(address, True), ("relay:127.0.0.1", False)])
