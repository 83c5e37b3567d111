"""Connection: limits of silence and of bytes without messages."""

from __future__ import annotations

import os
import socket
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.transport.tcp_stats import connection_stats
from thinwire.transport.wire.connection import (
    LEAST_SILENCE_S,
    MOST_SILENCE_S,
    Liveness,
    borrow_socket,
    endpoint_of,
    unseen_limit_bytes,
)


@given(st.lists(st.floats(0, 1e4), max_size=100))
def test_the_limit_is_always_within_its_bounds(rtts_s: list[float]) -> None:
    liveness = Liveness()
    for rtt_s in rtts_s:
        liveness.observe(rtt_s)
    assert LEAST_SILENCE_S <= liveness.limit_s <= MOST_SILENCE_S


def test_one_odd_round_trip_does_not_change_it_and_a_change_for_good_does() -> None:
    liveness = Liveness()
    for rtt_s in (0.05,) * 20 + (9.0,):
        liveness.observe(rtt_s)
    assert liveness.limit_s == LEAST_SILENCE_S
    for _ in range(64):
        liveness.observe(3.0)
    assert LEAST_SILENCE_S < liveness.limit_s == 15.0


def test_a_connection_is_looked_at_only_where_the_descriptor_is_still_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        two, _ = server.accept()
        with two:
            one.sendall(b"12345")
            peer = endpoint_of(two)
            with borrow_socket(two.fileno(), peer=peer) as found:
                assert found is not None
                reading = connection_stats(found)
                assert reading is not None and reading.received_bytes == 5 and reading.silence_s < 60
            with borrow_socket(two.fileno(), peer=("127.0.0.1", 1)) as found:
                assert found is None
            with borrow_socket(server.fileno(), peer=peer) as found:
                assert found is None
        with open(os.devnull) as file, borrow_socket(file.fileno(), peer=None) as found:  # noqa: PTH123
            assert found is None
        with borrow_socket(10_000, peer=peer) as found:
            assert found is None


class Told:
    """A connection of which a kernel tells so many bytes."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return self.raw[:size]


@pytest.mark.parametrize("num_bytes", [0, 135, 136, 160, 191, 192, 400])
def test_a_kernel_that_tells_less_is_read_as_far_as_it_tells(num_bytes: int) -> None:
    whole = struct.pack("<8x24I4Q6I4Q", *range(1, 25), 7, 7, 5000, 6000, *[9] * 6, 8, 2_500_000, 500_000, 0).ljust(400)
    reading = connection_stats(Told(whole[:num_bytes]))  # type: ignore[arg-type]
    assert (reading is None) == (num_bytes < 136)
    if reading is not None:
        assert (reading.sent_bytes, reading.received_bytes, reading.silence_s) == (5000, 6000, 0.012)
        assert (reading.busy_s, reading.held_s) == ((2.5, 0.5) if num_bytes >= 192 else (0.0, 0.0))


def test_time_in_which_there_was_something_to_send_is_read_from_this_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        two, _ = server.accept()
        with two:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):  # who does not read holds it up
                while True:
                    one.send(bytes(1 << 20))
            end_s = time.monotonic() + 10
            while (reading := connection_stats(one)) is None or reading.held_s < 0.2:
                assert time.monotonic() < end_s, reading
                time.sleep(0.02)
            assert reading.busy_s >= reading.held_s


def test_what_makes_no_message_is_bounded_however_much_does() -> None:
    usual = unseen_limit_bytes(seen_bytes=0, seen_frames=0, age_s=0)
    assert 16e6 < usual < 100e6
    assert unseen_limit_bytes(seen_bytes=10**12, seen_frames=10**7, age_s=0) < 1.01 * 10**12 + 2 * usual + 1.3e9
    assert unseen_limit_bytes(seen_bytes=0, seen_frames=0, age_s=86_400) < 2 * usual
