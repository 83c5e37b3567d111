"""Rendezvous of a run's ranks before they are connected: short texts in a store that all of them reach.

torch's own rendezvous reports "timed out" if a rank is missing. Here every rank posts texts under its own number, so
that a missing rank is named, and one rank's failure reaches all, so that every log holds the same reason.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Never, TypeVar

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from thinwire.errors import ConnectError

T = TypeVar("T")
MAX_TEXT_BYTES = 1 << 16
# A heartbeat may be late by this: the store answers in round trips, and processors are busy.
GRACE_S = 5.0
POLL_S = 0.05
_PROMISE_AGAIN_S, _PROMISED_S, _MAX_PROMISED_S = 1.0, 3.0, 3600.0


def open_store(host: str, port: int, *, serve: bool, deadline_s: float) -> TCPStore:
    """Serve or join the store of a run.

    A store served here listens on `host` alone if that is an IPv4 address of this host (or `localhost`). torch's own
    choice, every interface, remains for names and for addresses of a router in front of this host.

    Under torchrun the agent may serve it already. One that does not answer within `deadline_s` counts as missing.

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


class Rendezvous:
    """Texts that ranks post for each other, and heartbeats that tell a stopped rank from a busy one.

    Args:
        store: A store that all ranks share and that holds no texts of an earlier rendezvous.
        place: What the store is called in an error's text.
        ranks_per_replica: To name the replica of a missing rank.
        deadline_s: Seconds each rank has to post a text that `collect_all` waits for.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, place: str, ranks_per_replica: int = 1,
        deadline_s: float = math.inf, max_bytes: int = MAX_TEXT_BYTES,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self._store, self._place = rank, world_size, store, place
        self._ranks_per_replica, self._deadline_s, self._max_bytes = ranks_per_replica, deadline_s, max_bytes
        self._num_heartbeats = 0
        self._last_heartbeats: dict[int, tuple[str, float]] = {}  # the text, and when it was first seen here

    def post(self, key: str, text: str) -> None:
        """Post a text.

        Raises:
            ConnectError: The store does not answer.
        """
        self._call(lambda: self._store.set(key, text))

    def read(self, key: str) -> str | None:
        """Return a text, or None if it was not posted yet.

        Raises:
            ConnectError: The store does not answer, or the text is too long.
        """
        if not self._call(lambda: self._store.check([key])):
            return None
        raw: bytes = self._call(lambda: self._store.get(key))
        if len(raw) > self._max_bytes:
            raise ConnectError(
                f"a text at {self._place} has {len(raw)} bytes, at most {self._max_bytes} are allowed; run the same "
                f"thinwire on all hosts, and keep others away from that port"
            )
        text = raw.decode(errors="replace")
        # any process that reaches the store can write there, and the text is shown: a terminal must not obey it
        return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)

    def collect_all(self, topic: str) -> list[str]:
        """Wait for the texts of all ranks on a topic, and return them in order of rank.

        Raises:
            ConnectError: A rank posted none in time, or another rank gave up.
        """
        end = time.monotonic() + self._deadline_s
        found: dict[int, str] = {}
        while absent := [rank for rank in range(self.world_size) if rank not in found]:
            for rank in absent:
                if (text := self.read(f"{topic}/{rank}")) is not None:
                    found[rank] = text
            if (failure := self.read("failure")) is not None:
                raise ConnectError(failure)
            if len(found) < self.world_size:
                if time.monotonic() > end:
                    late = ", ".join(
                        f"rank {rank} (replica {rank // self._ranks_per_replica})"
                        for rank in absent
                        if rank not in found
                    )
                    self.fail(
                        f"{late} did not come to {self._place} within {self._deadline_s:g} s; {self.world_size} ranks "
                        f"are expected: start each with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and see its "
                        f"log" if topic == "endpoint" else
                        f"{late} came, but did not answer within {self._deadline_s:g} s while joining; see its log"
                    )  # fmt: skip
                time.sleep(POLL_S)
        return [found[rank] for rank in range(self.world_size)]

    def fail(self, text: str) -> Never:
        """Let every rank know that the run cannot start, and raise it here.

        Raises:
            ConnectError: Always.
        """
        self.post("failure", text)
        raise ConnectError(text)

    def promise(self, seconds: float) -> None:
        """Post a heartbeat: the next one follows within so many seconds."""
        self._num_heartbeats += 1
        self.post(f"beat/{self.rank}", f"{self._num_heartbeats} {seconds:.3f}")

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank's next heartbeat is overdue."""
        now_s, text = time.monotonic(), self.read(f"beat/{rank}") or ""
        last = self._last_heartbeats.get(rank)
        if last is None or last[0] != text:
            self._last_heartbeats[rank] = (text, now_s)
            return False
        return now_s - last[1] > _promised_s(text) + GRACE_S

    def collect_responsive(self, topic: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the texts of ranks on a topic; ranks that go silent are left out."""
        missing, found, promised_s = set(ranks), dict[int, str](), -math.inf
        while missing:
            for rank in sorted(missing):
                text = self.read(f"{topic}/{rank}")
                if text is not None:
                    found[rank] = text
                if text is not None or (rank != self.rank and self.is_silent(rank)):
                    missing.discard(rank)
            if missing:
                promised_s = self._wait_a_little(promised_s)
        return found

    def wait_for(self, key: str, *, whom: int) -> str:
        """Return a text of a rank as soon as it is posted.

        Raises:
            ConnectError: That rank went silent.
        """
        promised_s = -math.inf
        while (text := self.read(key)) is None:
            if self.is_silent(whom):
                raise ConnectError(f"rank {whom}, which leads the test, has stopped; see its log")
            promised_s = self._wait_a_little(promised_s)
        return text

    def leave(self, num_ranks: int, *, wait_s: float = 2.0) -> None:
        """Leave; rank 0, which may serve the store, first waits until the others have read what they need."""
        try:
            left = self._store.add("left", 1)
            end = time.monotonic() + wait_s
            while self.rank == 0 and left < num_ranks and time.monotonic() < end:
                time.sleep(POLL_S)
                left = self._store.add("left", 0)
        except RuntimeError:
            return  # the store is gone, and so is every rank that could wait for it

    def _wait_a_little(self, promised_s: float) -> float:
        """Sleep, and post a heartbeat if the last one is a while ago; return when the last one was posted."""
        if time.monotonic() - promised_s > _PROMISE_AGAIN_S:
            self.promise(_PROMISED_S)
            promised_s = time.monotonic()
        time.sleep(POLL_S / 2)
        return promised_s

    def _call(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise ConnectError(
                f"the meeting point {self._place} does not answer any more; see the log of rank 0, and whether this "
                f"host still reaches it"
            ) from error


def _promised_s(text: str) -> float:
    """Return the seconds that a heartbeat promises; a peer's text is untrusted."""
    try:
        seconds = float(text.split()[1])
    except (IndexError, ValueError):
        return 0.0
    return min(seconds, _MAX_PROMISED_S) if seconds >= 0 else 0.0
