"""Who comes to a port without the secret: what it says first, and what it may cost."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import psutil

# as an honest program that speaks ZMTP 3.1 begins
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"%s" + bytes(32)
SOON_S = 600.0
GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3,
    os.urandom(100_000),
    b"\xff" * 200_000,
    GREETING % b"NULL".ljust(20, b"\0") + b"\x04\x05\x05READY" + b"\x02" + b"\xff" * 8,
    GREETING % b"CURVE".ljust(20, b"\0") + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(100_000),
    GREETING % b"CURVE".ljust(20, b"\0") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(193),
    b"\x01\x00" + bytes(5000),
]
GARBAGE_NAMES = ["http", "random", "ones", "plain ZMTP", "oversized", "false hello", "ZMTP 1"]


@contextlib.contextmanager
def memory_is_bounded(most_bytes: int = 60_000_000) -> Iterator[None]:
    """Fail where this process grows by more meanwhile."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    grown = process.memory_info().rss - before
    assert grown < most_bytes, f"{grown / 1e6:.0f} MB"


def hangs_up(stranger: socket.socket) -> bool:
    """Tell whether the other end closes the connection soon."""
    stranger.settimeout(SOON_S)
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1 << 16):
            continue
    return True
