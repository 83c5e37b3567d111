"""A TCP relay that keeps what its connections carry, and the sizes of the HTTP bodies in it by path."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Carried:
    """Bytes of each connection to the server, and back."""

    port: int
    connections: list[tuple[bytearray, bytearray]] = field(default_factory=list)

    def body_bytes(self, path: str) -> tuple[int, int]:
        """Return the bytes of all bodies to a path, and of the bodies of the answers."""
        sizes = [0, 0]
        for up, down in self.connections:
            # an answer may be missing where the connection ended
            for (line, asked), (_, answered) in zip(_messages(bytes(up)), _messages(bytes(down)), strict=False):
                if line.startswith(f"POST {path} "):
                    sizes[0] += asked
                    sizes[1] += answered
        return sizes[0], sizes[1]


def _messages(stream: bytes) -> Iterator[tuple[str, int]]:
    while b"\r\n\r\n" in stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.I)
        assert length or b"chunked" not in head.lower(), head
        size = int(length[1]) if length else 0
        yield head.partition(b"\r\n")[0].decode(), size
        stream = rest[size:]


@contextmanager
def counting_relay(to_port: int) -> Iterator[Carried]:
    """Relay connections of a free port of this machine to another one."""
    listener = socket.create_server(("127.0.0.1", 0))
    carried = Carried(listener.getsockname()[1])

    def pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", to_port))
            except OSError:
                return
            up, down = bytearray(), bytearray()
            carried.connections.append((up, down))
            threading.Thread(target=pump, args=(client, server, up), daemon=True).start()
            threading.Thread(target=pump, args=(server, client, down), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield carried
    finally:
        listener.close()
