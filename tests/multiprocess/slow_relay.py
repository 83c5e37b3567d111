"""A relay between two ports of this machine with a rate for each connection, which may change."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType

_ROOM = 1 << 16


class SlowRelay:
    """Relays each connection to a port, in a thread.

    Args:
        port: The port to listen on.
        target: The port that it relays to.
        bytes_per_s: Rate of each connection, each way.

    Attributes:
        slower: Other rates, by source port; may change at any time.
    """

    def __init__(self, port: int, *, target: int, bytes_per_s: float) -> None:
        self.slower: Mapping[int, float] = {}
        self._target, self._bytes_per_s, self._ends = target, bytes_per_s, False
        self._listener = socket.create_server(("127.0.0.1", port))
        self._others: dict[socket.socket, tuple[socket.socket, int]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SlowRelay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends = True
        self._thread.join()
        for one in (self._listener, *self._others):
            one.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            paused: dict[socket.socket, float] = {}
            while not self._ends:
                now_s = time.monotonic()
                for source in [source for source, until_s in paused.items() if until_s <= now_s]:
                    del paused[source]
                    selector.register(source, selectors.EVENT_READ)
                for key, _ in selector.select(0.001 if paused else 0.05):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._listener:
                        self._accept(selector)
                    elif source in self._others:
                        pause_s = self._relay(source, selector)
                        if pause_s > 0:
                            selector.unregister(source)
                            paused[source] = time.monotonic() + pause_s

    def _accept(self, selector: selectors.BaseSelector) -> None:
        caller, address = self._listener.accept()
        try:
            called = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            caller.close()
            return
        for one, other in ((caller, called), (called, caller)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._others[one] = other, address[1]
            selector.register(one, selectors.EVENT_READ)

    def _relay(self, source: socket.socket, selector: selectors.BaseSelector) -> float:
        """Pass on what has arrived; return for how many seconds nothing more may be read."""
        other, port = self._others[source]
        try:
            data = source.recv(_ROOM)
            if data:
                other.sendall(data)
        except OSError:
            data = b""
        if data:
            return len(data) / self.slower.get(port, self._bytes_per_s)
        for one in (source, other):
            self._others.pop(one, None)
            if one in selector.get_map():
                selector.unregister(one)
            one.close()
        return 0.0
