"""Messages between a lab and its daemon arrive whole, in order and with their files, or are refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.lab.daemon_client import MAX_BYTES, Channel

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=5), below, max_size=4),
    max_leaves=10,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.settimeout(10)
    with left, right:
        yield left, right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=5))
def test_messages_arrive_whole_and_in_order(
    ends: tuple[socket.socket, socket.socket], messages: list[dict[str, Any]]
) -> None:
    sender, receiver = map(Channel, ends)
    for message in messages:
        sender.send(message)
    assert [receiver.receive() for _ in messages] == [(message, []) for message in messages]


def test_a_message_larger_than_the_sockets_buffers_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    message = {"text": "x" * 3_000_000}
    sending = threading.Thread(target=Channel(ends[0]).send, args=(message,))
    sending.start()
    assert Channel(ends[1]).receive() == (message, [])
    sending.join(timeout=10)


def test_files_arrive_with_the_message_that_they_were_sent_with(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = map(Channel, ends)
    reading, writing = os.pipe()
    sender.send({"number": 0})
    sender.send({"number": 1}, [writing])
    sender.send({"number": 2})
    os.close(writing)
    found = [receiver.receive() for _ in range(3)]
    assert [None if it is None else it[0]["number"] for it in found] == [0, 1, 2]
    assert [None if it is None else len(it[1]) for it in found] == [0, 1, 0]
    assert found[1] is not None
    os.write(found[1][1][0], b"through")
    os.close(found[1][1][0])
    assert os.read(reading, 100) == b"through"
    assert os.read(reading, 100) == b"", "no other copy is open"
    os.close(reading)


@pytest.mark.parametrize("sent", [b"", b"\x00", b"\x00\x00\x00\x05", b"\x00\x00\x00\x05{}"])
def test_an_end_that_goes_away_in_the_midst_is_the_end(ends: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    ends[0].sendall(sent)
    ends[0].close()
    assert Channel(ends[1]).receive() is None


def test_a_head_that_comes_in_pieces_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    timer = threading.Timer(0.05, ends[0].sendall, [b"\x00\x02{}"])
    ends[0].sendall(b"\x00\x00")
    timer.start()
    assert Channel(ends[1]).receive() == ({}, [])
    timer.join(timeout=10)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ((MAX_BYTES + 1).to_bytes(4, "big"), f"at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}"),
        (b"\x00\x00\x00\x02[]", "a message must be an object, got list"),
        (b"\x00\x00\x00\x02{]", "Expecting property name"),
        (b"\x00\x00\x00\x01\xff", "can't decode byte"),
    ],
)
def test_bytes_that_are_no_message_are_refused(
    ends: tuple[socket.socket, socket.socket], sent: bytes, reason: str
) -> None:
    ends[0].sendall(sent)
    with pytest.raises(ValueError, match=reason):
        Channel(ends[1]).receive()


def test_a_message_that_is_too_long_is_not_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match=r"give a shorter command"):
        Channel(ends[0]).send({"text": "x" * MAX_BYTES})
    Channel(ends[0]).send({})
    assert Channel(ends[1]).receive() == ({}, [])
