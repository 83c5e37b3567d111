"""Which frames the relay loses, when the others are due, and that it moves real frames between real files."""

from __future__ import annotations

import array
import fcntl
import json
import math
import os
import socket
import termios
import threading
import time
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab import network_commands
from thinwire.lab.relay import LinkEmulator, Relay
from thinwire.lab.settings import Access, LabSettings, Link, Pair


def lab(link: Link, *, links: dict[Pair, Link] | None = None, seed: int = 0) -> LabSettings:
    return LabSettings(accesses=(Access(),) * 3, link=link, links=MappingProxyType(links or {}), seed=seed)


def frame(destination: int, *, text: bytes = b"") -> bytes:
    return bytes.fromhex(network_commands.hardware_address_of(destination).replace(":", "")) + bytes(8) + text


TIMES = st.lists(st.floats(0, 0.1), min_size=1, max_size=60)


def dues(delays: LinkEmulator, gaps_s: list[float], *, destination: int = 1) -> list[tuple[float, float | None]]:
    """Return pairs of when a frame comes and when it is due."""
    now_s, found = 100.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        found.append((now_s, delays.due_s(frame(destination), source=0, now_s=now_s)))
    return found


@given(TIMES, st.floats(0, 1))
def test_without_jitter_every_frame_waits_for_the_latency_exactly(gaps_s: list[float], latency_s: float) -> None:
    for now_s, due_s in dues(LinkEmulator(lab(Link(latency_s=latency_s))), gaps_s):
        assert due_s == now_s + latency_s


@given(TIMES, st.floats(0.001, 1), st.floats(0, 1), st.integers(0, 1000))
def test_with_jitter_frames_keep_their_order_and_nearly_their_range(
    gaps_s: list[float], latency_s: float, share: float, seed: int
) -> None:
    jitter_s = share * latency_s
    before_s = 0.0
    for now_s, due_s in dues(LinkEmulator(lab(Link(latency_s=latency_s, jitter_s=jitter_s), seed=seed)), gaps_s):
        assert due_s is not None
        assert now_s + latency_s - jitter_s - 1e-9 <= due_s
        assert due_s <= max(now_s + latency_s + jitter_s, before_s) + 1e-9
        assert due_s <= now_s + latency_s + jitter_s + 1e-9
        assert due_s >= before_s
        before_s = due_s


def test_as_many_frames_are_lost_as_chance_allows_and_the_seed_decides_which() -> None:
    loss, count = 0.03, 20_000
    settings = lab(Link(loss=loss), seed=5)
    lost = [due_s is None for _, due_s in dues(LinkEmulator(settings), [0.001] * count)]
    assert abs(sum(lost) / count - loss) < 5 * math.sqrt(loss * (1 - loss) / count)
    assert lost == [due_s is None for _, due_s in dues(LinkEmulator(settings), [0.001] * count)]
    other = LinkEmulator(lab(Link(loss=loss), seed=6))
    assert lost != [due_s is None for _, due_s in dues(other, [0.001] * count)]


def test_every_direction_of_every_pair_has_its_own_latency() -> None:
    delays = LinkEmulator(lab(Link(latency_s=0.01), links={(0, 1): Link(latency_s=0.03)}))
    assert delays.due_s(frame(1), source=0, now_s=1.0) == pytest.approx(1.03)
    assert delays.due_s(frame(0), source=1, now_s=1.0) == pytest.approx(1.01)
    assert delays.due_s(frame(2), source=0, now_s=1.0) == pytest.approx(1.01)
    assert delays.due_s(b"\xff" * 14, source=0, now_s=1.0) == pytest.approx(1.01), "a broadcast has the usual one"


def test_a_frame_that_is_too_short_to_have_a_destination_does_no_harm() -> None:
    assert LinkEmulator(lab(Link(latency_s=0.01))).due_s(b"", source=0, now_s=1.0) == pytest.approx(1.01)


def test_frames_keep_their_order_when_the_latency_becomes_shorter() -> None:
    delays = LinkEmulator(lab(Link(latency_s=1.0)))
    first = delays.due_s(frame(1), source=0, now_s=0.0)
    delays.change(lab(Link()))
    assert delays.due_s(frame(1), source=0, now_s=0.1) == first == 1.0
    assert delays.due_s(frame(1), source=0, now_s=2.0) == 2.0


class RelayAtWork:
    """A relay of two hosts, whose four devices are pairs of sockets."""

    def __init__(self, settings: LabSettings) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(4)]
        self._theirs = [theirs for _, theirs in pairs]
        self.hosts, self.switches = [pairs[0][0], pairs[2][0]], [pairs[1][0], pairs[3][0]]
        for end in (*self.hosts, *self.switches):
            end.settimeout(50)
        files = [theirs.fileno() for theirs in self._theirs]
        self._control_end, self.control = os.pipe()
        relay = Relay(LinkEmulator(settings), [(files[0], files[1]), (files[2], files[3])], control=self._control_end)
        self.thread = threading.Thread(target=relay.run, daemon=True)
        self.thread.start()

    def tell(self, part: bytes) -> None:
        """Write to the control file, and wait until the relay has taken it; it looks at frames only after that."""
        os.write(self.control, part)
        until_s, left = time.monotonic() + 60, array.array("i", [1])
        while left[0]:
            assert time.monotonic() < until_s, "the relay does not read its control file"
            fcntl.ioctl(self._control_end, termios.FIONREAD, left)
            time.sleep(0.001)

    def end(self) -> None:
        os.close(self.control)
        self.thread.join(timeout=60)
        assert not self.thread.is_alive(), "the end of the control file ends the relay"
        for end in (*self.hosts, *self.switches, *self._theirs):
            end.close()


def test_the_relay_holds_what_a_host_sends() -> None:
    relay = RelayAtWork(lab(Link(latency_s=0.15)))
    try:
        began_s = time.monotonic()
        for number in range(20):
            relay.hosts[0].send(frame(1, text=bytes([number])))
        heard = [relay.switches[0].recv(100) for _ in range(20)]
        assert time.monotonic() - began_s >= 0.15
        assert heard == [frame(1, text=bytes([number])) for number in range(20)]
    finally:
        relay.end()


def test_the_relay_passes_what_a_host_receives_at_once() -> None:
    relay = RelayAtWork(lab(Link(latency_s=60.0)))
    try:
        relay.hosts[0].send(frame(1))
        relay.switches[1].send(frame(1, text=b"received"))
        assert relay.hosts[1].recv(100) == frame(1, text=b"received")
        relay.switches[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # the other frame is held meanwhile
            relay.switches[0].recv(100)
    finally:
        relay.end()


def test_the_relay_takes_new_settings_also_when_they_come_in_pieces() -> None:
    relay = RelayAtWork(lab(Link(latency_s=60.0)))
    try:
        line = json.dumps(lab(Link()).to_json()).encode() + b"\n"
        relay.tell(line[:50])
        relay.tell(line[50:])
        relay.hosts[1].send(frame(0))
        assert relay.switches[1].recv(100) == frame(0)
    finally:
        relay.end()


def test_a_device_that_is_full_loses_frames_and_the_relay_goes_on() -> None:
    relay = RelayAtWork(lab(Link()))
    try:
        for _ in range(2000):  # far more than the switch's end takes unread
            relay.hosts[0].send(frame(1, text=bytes(1400)))
        relay.hosts[1].send(frame(0, text=b"last"))
        assert relay.switches[1].recv(2000) == frame(0, text=b"last")
    finally:
        relay.end()
