"""Rendezvous of a run's ranks before there is a connection: JSON notes on a store that all of them reach.

torch's own joining says "timed out" where a rank is missing. Here every rank leaves notes under its own number, so that
who is missing has a name, and one rank's failure is told to all, so that every log holds the same reason.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from thinwire.errors import ConnectError

T = TypeVar("T")
POLL_S = 0.05
FAREWELL_S = 2.0
MOST_NOTE_BYTES = 1 << 16


def open_store(host: str, port: int, *, serve: bool, deadline_s: float) -> TCPStore:
    """Serve or join the store of a run.

    A store served here listens on `host` alone if that is an IPv4 address of this host (or `localhost`). torch's own
    choice, every interface, remains for names and for addresses of a router in front of this host.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        serve: Whether this process opens the port; under torchrun the agent may already have.
        deadline_s: Seconds until a store that does not answer counts as missing.

    Raises:
        ConnectError: The port is taken, or no process serves it.
    """
    try:
        timeout = timedelta(seconds=deadline_s)
        listener = _listener_on(host, port) if serve else None
        if listener is None:
            return TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timeout)
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
    except (RuntimeError, ValueError, OSError) as error:
        is_taken = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
        if serve and is_taken:
            raise ConnectError(
                f"port {port} is in use on this host, so rank 0 cannot meet the others there; "
                f"end the program that holds it or choose another MASTER_PORT (torchrun --master-port)"
            ) from error
        what = "could not be opened" if serve else f"did not answer within {deadline_s:g} s"
        raise ConnectError(
            f"the meeting point {host}:{port} (MASTER_ADDR, MASTER_PORT) {what}; check that rank 0 runs there and that "
            f"a firewall lets the port pass"
        ) from error


def _listener_on(host: str, port: int) -> socket.socket | None:
    """Listen on one address of this host; None if `host` does not say which."""
    address = "127.0.0.1" if host == "localhost" else host
    try:
        own = ipaddress.IPv4Address(address)
    except ValueError:
        # a name may stand for another address on the other hosts
        return None
    try:
        return socket.create_server((str(own), port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None  # NAT: the address is not on any interface here


def open_file_store(path: str, *, world_size: int) -> FileStore:
    """Open the store of a run whose ranks share a file system, where nothing listens.

    Args:
        path: File in a folder that only this user can enter; need not exist.
        world_size: Number of ranks.

    Raises:
        ConnectError: Its folder is gone.
    """
    folder = Path(path).parent
    if not os.access(folder, os.W_OK | os.X_OK):  # FileStore itself would try again for minutes
        raise ConnectError(
            f"the rendezvous file {path} cannot be opened: {folder} is no folder that this user can write to; start "
            f"the run again"
        )
    return FileStore(path, world_size)


class Meeting:
    """The notes of all ranks.

    Args:
        store: A store that all ranks share and that holds no notes of an earlier meeting.
        rank: This rank.
        world_size: How many ranks are expected.
        ranks_per_replica: To name the replica of a missing rank.
        deadline_s: Seconds each rank has to leave the note that is waited for.
        place: What the store is called in an error's text.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        ranks_per_replica: int,
        deadline_s: float,
        place: str,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._ranks_per_replica = ranks_per_replica
        self._deadline_s = deadline_s
        self._place = place

    def leave(self, topic: str, text: str) -> None:
        """Leave this rank's note on a topic."""
        self._ask(lambda: self._store.set(f"{topic}/{self._rank}", text))

    def collect(self, topic: str) -> list[str]:
        """Wait for the notes of all ranks on a topic and return them in order of rank.

        Raises:
            ConnectError: A rank left none in time, or another rank gave up.
        """
        end = time.monotonic() + self._deadline_s
        absent = set(range(self._world_size))
        while absent:
            absent = {rank for rank in absent if not self._exists(f"{topic}/{rank}")}
            if self._exists("failure"):
                raise ConnectError(self._read("failure"))
            if absent and time.monotonic() > end:
                self.fail(self._missing(sorted(absent), topic))
            time.sleep(POLL_S if absent else 0.0)
        return [self._read(f"{topic}/{rank}") for rank in range(self._world_size)]

    def fail(self, text: str) -> None:
        """Tell every rank that the run cannot start, and raise it here.

        Raises:
            ConnectError: Always.
        """
        self._ask(lambda: self._store.set("failure", text))
        raise ConnectError(text)

    def part(self) -> None:
        """Leave; rank 0, which may hold the store, lets the others read what they came for first."""
        try:
            left = self._store.add("parted", 1)
            end = time.monotonic() + FAREWELL_S
            while self._rank == 0 and left < self._world_size and time.monotonic() < end:
                time.sleep(POLL_S)
                left = self._store.add("parted", 0)
        except RuntimeError:
            return  # the store is gone, and so is everybody who could be waiting on it

    def _exists(self, key: str) -> bool:
        found: bool = self._ask(lambda: self._store.check([key]))
        return found

    def _read(self, key: str) -> str:
        text: bytes = self._ask(lambda: self._store.get(key))
        if len(text) > MOST_NOTE_BYTES:
            raise ConnectError(
                f"a note at {self._place} has {len(text)} bytes, at most {MOST_NOTE_BYTES} are allowed; run the same "
                f"thinwire on all hosts, and keep others away from that port"
            )
        # whoever reaches the store can write there, and the text is shown: a terminal must not obey it
        return "".join(letter if letter.isprintable() else "?" for letter in text.decode(errors="replace"))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise ConnectError(
                f"the meeting point {self._place} went away while the ranks were joining; see the log of rank 0"
            ) from error

    def _missing(self, ranks: list[int], topic: str) -> str:
        names = ", ".join(f"rank {rank} (replica {rank // self._ranks_per_replica})" for rank in ranks)
        if topic == "station":
            return (
                f"{names} did not come to {self._place} within {self._deadline_s:g} s; {self._world_size} ranks are "
                f"expected: start each with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and see its log"
            )
        return f"{names} came, but did not answer within {self._deadline_s:g} s while joining; see its log"


def prefixed(store: Any, prefix: str) -> Store:
    """Return a view of a store in which every key is the prefix's own."""
    return PrefixStore(prefix, store)
