"""What every transport promises, held by all that can live in one process; processes: tests/multiprocess/."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import free_port

from thinwire.errors import PayloadError, ThinwireError
from thinwire.transport.addresses import Address, DialPaths
from thinwire.transport.base import Envelope, Transport
from thinwire.transport.loopback import run_replicas
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.secret import Secret
from thinwire.transport.streams import ROUNDS
from thinwire.transport.wire.framing import OPENING_BYTES
from thinwire.transport.wire.wire_transport import WireTransport

SOON_S = 600.0
SECRET = Secret(key=bytes(range(32)))
BORDER = OPENING_BYTES - HEADER_BYTES
SIZES = (0, 1, 7, 1009, BORDER - 1, BORDER, BORDER + 1, 65_535, 65_536, 65_537, 1_299_709, 3 * OPENING_BYTES)
Main = Callable[[Any], Any]


def in_loopback(num_replicas: int, replica_main: Main) -> list[Any]:
    return list(run_replicas(num_replicas, replica_main))


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def on_paths(num_replicas: int, replica_main: Main) -> list[Any]:
    """Do the same over three connections from chosen source ports, some spare, between any two replicas."""
    return on_wires(num_replicas, replica_main, num_paths=3)


def on_wires(num_replicas: int, replica_main: Main, *, num_paths: int = 0) -> list[Any]:
    """Give each replica a thread and a transport, joined by real sockets."""
    transports = [
        WireTransport(replica=replica, num_replicas=num_replicas, secret=SECRET, address="127.0.0.1")
        for replica in range(num_replicas)
    ]
    results: list[Any] = [None] * num_replicas
    failures: list[BaseException] = []

    def body(replica: int) -> None:
        try:
            below = {peer: Address(host="127.0.0.1", port=transports[peer].port) for peer in range(replica)}
            paths = {
                peer: DialPaths(
                    source_ports=tuple(tuple(free_ports(4)) for _ in range(num_paths)), port=at.port,
                    shares=(1 / num_paths,) * num_paths,
                )
                for peer, at in below.items() if num_paths
            }  # fmt: skip
            transports[replica].dial(below, deadline_s=SOON_S, paths=paths)
            everybody_is_there.wait(SOON_S)
            results[replica] = replica_main(transports[replica])
        except BaseException as failure:
            failures.append(failure)

    everybody_is_there = threading.Barrier(num_replicas)
    threads = [threading.Thread(target=body, args=(replica,)) for replica in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transport in transports:
        transport.close()
    if failures:
        raise failures[0]
    return results


RUNS = {"loopback": in_loopback, "wire": on_wires, "paths": on_paths}
law = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def content(size: int, *, sender: int, round_id: int) -> torch.Tensor:
    return ((torch.arange(size) * 31 + 97 * sender + 13 * round_id) % 251).to(torch.uint8)


def envelope_of(size: int, round_id: int, **more: Any) -> Envelope:
    return Envelope(**{"stream": ROUNDS, "key": (round_id,), "payload_bytes": size, "numel": size, **more})


def is_whole(pending: Any, expected: torch.Tensor) -> bool:
    received = pending.wait(deadline_s=SOON_S)
    return received is not None and torch.equal(received.payload, expected)


def others(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.num_replicas) if peer != transport.replica]


@law
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_every_size_arrives_whole_in_any_order_and_is_counted(run: Any, num_replicas: int) -> None:
    def replica_main(bare: Transport) -> tuple[bool, int, int]:
        transport, me = RecordingTransport(bare), bare.replica
        order = list(enumerate(SIZES))
        receives = [
            (transport.receive(source=peer, envelope=envelope_of(size, r)), content(size, sender=peer, round_id=r))
            for peer in others(transport)
            for r, size in order
        ]
        sends = [
            transport.send(content(size, sender=me, round_id=r), to=peer, envelope=envelope_of(size, r))
            for peer in others(transport)
            for r, size in (order if me % 2 else reversed(order))
        ]
        whole = all(is_whole(pending, expected) for pending, expected in receives)
        for pending in sends:
            pending.wait(deadline_s=SOON_S)
        return whole, transport.log.totals("sent").wire_bytes, transport.log.totals("received").wire_bytes

    wire_bytes = (num_replicas - 1) * sum(size + HEADER_BYTES for size in SIZES)
    assert run(num_replicas, replica_main) == [(True, wire_bytes, wire_bytes)] * num_replicas


@law
@pytest.mark.parametrize("size", [3, 2 * OPENING_BYTES])
def test_messages_under_one_envelope_are_matched_in_the_order_of_posting(run: Any, size: int) -> None:
    def replica_main(transport: Transport) -> bool:
        envelope = envelope_of(size, 0)
        if transport.replica == 0:
            sends = [transport.send(content(size, sender=0, round_id=r), to=1, envelope=envelope) for r in range(5)]
            for pending in sends:
                pending.wait(deadline_s=SOON_S)
            return True
        receives = [transport.receive(source=0, envelope=envelope) for _ in range(5)]
        return all(is_whole(p, content(size, sender=0, round_id=r)) for r, p in enumerate(receives))

    assert run(2, replica_main) == [True, True]


@law
@pytest.mark.parametrize("size", [0, 1000, 3 * OPENING_BYTES + 1])
def test_a_message_that_comes_before_its_receive_waits_for_it(run: Any, size: int) -> None:
    def replica_main(transport: Transport) -> bool:
        early, turn = envelope_of(size, 1), envelope_of(1, 2)
        if transport.replica == 0:
            send = transport.send(content(size, sender=0, round_id=1), to=1, envelope=early)
            transport.send(content(1, sender=0, round_id=2), to=1, envelope=turn)
            send.wait(deadline_s=SOON_S)
            return True
        # by the time that the later message is here, so is the earlier one's opening
        after = transport.receive(source=0, envelope=turn)
        return is_whole(after, content(1, sender=0, round_id=2)) and is_whole(
            transport.receive(source=0, envelope=early), content(size, sender=0, round_id=1)
        )

    assert run(2, replica_main) == [True, True]


@law
def test_a_receiver_that_takes_less_gets_what_was_sent(run: Any) -> None:
    limit, sizes = 4 * OPENING_BYTES, (0, 5, OPENING_BYTES, 3 * OPENING_BYTES + 7)

    def replica_main(transport: Transport) -> bool:
        sends = [
            transport.send(
                content(size, sender=transport.replica, round_id=r),
                to=1 - transport.replica,
                envelope=envelope_of(size, r, numel=9),
            )
            for r, size in enumerate(sizes)
        ]
        receives = [
            transport.receive(source=1 - transport.replica, envelope=envelope_of(limit, r, numel=9, takes_less=True))
            for r in range(len(sizes))
        ]
        whole = all(
            is_whole(p, content(sizes[r], sender=1 - transport.replica, round_id=r)) for r, p in enumerate(receives)
        )
        for pending in sends:
            pending.wait(deadline_s=SOON_S)
        return whole

    assert run(2, replica_main) == [True, True]


DAMAGES: dict[str, Any] = {
    "foreign": lambda message: torch.full_like(message, 0x5A),
    "short": lambda message: message[:10].clone(),
    "empty": lambda message: message[:0].clone(),
    "flipped": lambda message: torch.cat([message[:-1], message[-1:] ^ 1]),
    "cut": lambda message: message[:-1].clone(),
    "longer": lambda message: torch.cat([message, message[:1]]),
}


@law
@pytest.mark.parametrize("size", [1000, 2 * OPENING_BYTES])
def test_damaged_bytes_are_a_payload_error_that_names_the_message_and_the_next_one_arrives(run: Any, size: int) -> None:
    def replica_main(transport: Any) -> dict[str, str]:
        found = {}
        for round_id, (name, damage) in enumerate(DAMAGES.items()):
            if transport.replica == 1:
                transport.tamper = damage
                transport.send(content(size, sender=1, round_id=round_id), to=0, envelope=envelope_of(size, round_id))
                transport.tamper = None
            else:
                try:
                    transport.receive(source=1, envelope=envelope_of(size, round_id)).wait(deadline_s=SOON_S)
                except PayloadError as error:
                    found[name] = str(error)
        if transport.replica == 1:
            transport.send(content(size, sender=1, round_id=99), to=0, envelope=envelope_of(size, 99)).wait(
                deadline_s=SOON_S
            )
        else:
            next_one = transport.receive(source=1, envelope=envelope_of(size, 99))
            found["next"] = str(is_whole(next_one, content(size, sender=1, round_id=99)))
        return found

    found = run(2, replica_main)[0]
    assert found.pop("next") == "True"
    assert set(found) == set(DAMAGES)
    for number, name in enumerate(DAMAGES):
        assert f"round {number} (fragment 0) from replica 1" in found[name]


@law
def test_a_lost_message_is_never_received_and_the_sender_does_not_wait(run: Any) -> None:
    def replica_main(transport: Any) -> str:
        envelope = envelope_of(10, 0)
        if transport.replica == 0:
            transport.tamper = lambda message: None
            transport.send(content(10, sender=0, round_id=0), to=1, envelope=envelope).wait(deadline_s=SOON_S)
            return ""
        try:
            transport.receive(source=0, envelope=envelope).wait(deadline_s=0.1)
        except ThinwireError as error:
            return type(error).__name__
        return ""

    assert run(2, replica_main)[1] == "DeadlineExceeded"
