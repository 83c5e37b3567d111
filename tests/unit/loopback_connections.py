"""Connections of this process to addresses of its own loopback interface, which stand for other hosts."""

from __future__ import annotations

import socket
from contextlib import ExitStack

HERE, THERE, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def connection(stack: ExitStack, address: str) -> tuple[socket.socket, socket.socket]:
    """Return this host's end of a connection to an address, and the other one."""
    server = stack.enter_context(socket.create_server((address, 0)))
    own = stack.enter_context(socket.create_connection(server.getsockname(), source_address=(HERE, 0)))
    return own, stack.enter_context(server.accept()[0])
