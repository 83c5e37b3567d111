"""Message channel between a lab and its daemon: length-prefixed JSON and open files over a Unix socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 24
MAX_FILES = 3
_LENGTH_BYTES = 4


class Channel:
    """One end; messages arrive whole and in order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the socket's file, for `select`."""
        return self._end.fileno()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message and copies of open files.

        Raises:
            OSError: The other end is gone.
        """
        body = json.dumps(message).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(f"a message must be at most {MAX_BYTES} bytes, got {len(body)}; give a shorter command")
        # files travel with the first bytes, so these go out in a call of their own
        socket.send_fds(self._end, [len(body).to_bytes(_LENGTH_BYTES, "big")], list(files))
        self._end.sendall(body)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message and its files; None when the other end is gone.

        Raises:
            ValueError: The bytes are no message.
        """
        try:
            head, files, _, _ = socket.recv_fds(self._end, _LENGTH_BYTES, MAX_FILES)
            if not head:
                return None
            head += self._exactly(_LENGTH_BYTES - len(head))
            length = int.from_bytes(head, "big")
            if length > MAX_BYTES:
                raise ValueError(f"a message must be at most {MAX_BYTES} bytes, got {length}")
            message = json.loads(self._exactly(length))
        except (ConnectionError, EOFError):
            return None
        if not isinstance(message, dict):
            raise ValueError(f"a message must be an object, got {type(message).__name__}")
        return message, files

    def close(self) -> None:
        """Close this end; the other one sees it."""
        self._end.close()

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._end.recv(length - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)
