"""Hosts of a store, each served by a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from thinwire.carriers.host_store import HostStore
from thinwire.transport.secret import Secret

SECRET = Secret(key=bytes(range(32)))


@contextlib.contextmanager
def serving(folder: Path, *, port: int = 0, said: list[str] | None = None, **more: int) -> Iterator[HostStore]:
    """Serve one host's part until the context ends."""
    say = (lambda text: None) if said is None else said.append
    store, has_ended = HostStore(secret=SECRET, folder=folder, address="127.0.0.1", port=port, say=say, **more), []
    thread = threading.Thread(target=lambda: store.serve(until=lambda: bool(has_ended)))
    thread.start()
    try:
        yield store
    finally:
        has_ended.append(True)
        thread.join()
        store.close()
