"""What this process's own connections to a host have received, found by the address of their other end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from loopback_connections import HERE, OTHER, THERE, connection

from thinwire.events import TransferLog
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.tcp_stats import LocalSockets

OPEN = Path("/proc/self/fd")


def received(sockets: LocalSockets, rank: int, wanted: int) -> int:
    """Return what has come, as soon as it is as much as wanted: the kernel takes a moment."""
    until_s = time.monotonic() + 5.0
    while True:
        found = sockets.reading(rank)
        if found is not None and found.received_bytes >= wanted:
            return found.received_bytes
        assert time.monotonic() < until_s, found
        time.sleep(0.01)


def test_all_connections_to_a_rank_count_together_and_nobody_else_s(stack: ExitStack, tmp_path: Path) -> None:
    now_s = 0.0
    sockets = LocalSockets({0: HERE, 1: THERE, 2: OTHER}, now=lambda: now_s)
    assert sockets.reading(1) is None, "nothing leads there yet"
    num_open = len(list(OPEN.iterdir()))
    pairs = [connection(stack, address) for address in (THERE, THERE, OTHER)]
    assert sockets.reading(1) is None, "it has looked just now"
    now_s += 6.0
    for (_, far), count in zip(pairs, (1000, 200, 30), strict=True):
        far.sendall(bytes(count))
    assert received(sockets, 1, 1200) == 1200 and received(sockets, 2, 30) == 30
    found = sockets.reading(1)
    assert (
        found is not None
        and not found.has_signs
        and found.busy_s >= found.held_s >= 0
        and found.rtt_s > 0
        and found.silence_s >= 0
    )
    assert pairs[0][0].recv(10) == bytes(10), "the connection is as it was"
    for own, _ in pairs[:2]:
        own.close()
    stack.enter_context((tmp_path / "something else").open("w"))  # takes the number of one
    assert sockets.reading(1) is None and sockets.reading(7) is None
    stack.close()
    assert len(list(OPEN.iterdir())) == num_open


def test_ranks_with_one_address_cannot_be_told_apart(stack: ExitStack) -> None:
    connection(stack, THERE)
    sockets = LocalSockets({0: HERE, 1: THERE, 2: THERE, 3: OTHER})
    assert sockets.reading(1) is None and sockets.reading(2) is None
    assert LocalSockets({0: HERE, 1: THERE}).reading(1) is not None


def test_a_transport_that_cannot_tell_says_nothing() -> None:
    assert RecordingTransport(LoopbackWorld(2).transports[0], log=TransferLog()).reading(1) is None
