"""Listening sockets of process trees, in whatever network namespace they live, and the table that documents them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from live_processes import DEADLINE_S, kill, marked, words_of
from namespaces import Hosts

MARK = "LISTENERS_OF_TEST"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "listeners.md"
LOOPBACK, OWN, EVERY = "loopback", "own address", "every interface"
_TCP_LISTENS = "0A"
_HEADER = re.compile(r"^\| id \| .*\|$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that takes what others send.

    Attributes:
        protocol: tcp or udp.
        address: Where it listens.
        port: Its port.
        command: Of its process.
    """

    protocol: str
    address: str
    port: int
    command: str

    @property
    def interface(self) -> str:
        """The word of the documented table for the address."""
        found = ipaddress.ip_address(self.address)
        return LOOPBACK if found.is_loopback else EVERY if found.is_unspecified else OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A documented listener."""

    id: str
    protocol: str
    interface: str


def documented() -> dict[str, Row]:
    """Return the rows of the table of listeners in `docs/reference/listeners.md`, by id."""
    text = PAGE.read_text()
    header = _HEADER.search(text)
    assert header is not None, f"{PAGE.name} has no table whose first column is `id`"
    names = [cell.strip() for cell in header.group().strip("|").split("|")]
    rows = {}
    for line in text[header.end() :].strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = dict(zip(names, (cell.strip() for cell in line.strip().strip("|").split("|")), strict=True))
        row = Row(
            id=cells["id"].strip("`"),
            protocol=cells["port"].split()[0].strip(",").lower(),
            interface=cells["interface"],
        )
        assert row.id not in rows, f"{row.id} stands there twice"
        assert row.protocol in ("tcp", "udp"), f"{row.id}: the port begins with TCP or UDP, got {cells['port']}"
        assert row.interface in (LOOPBACK, OWN, EVERY), f"{row.id}: unknown interface {row.interface}"
        assert all(cells.values()), f"{row.id}: an empty cell"
        rows[row.id] = row
    return rows


def listeners_of(processes: Sequence[psutil.Process]) -> set[Listener]:
    """Return what processes listen on: TCP and UDP, IPv4 and IPv6, each as its own network namespace shows it."""
    found: set[Listener] = set()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = " ".join(words_of(process))
            if not command:
                continue  # it is ending: its memory is gone, and its sockets are about to be closed
            inodes = _socket_inodes(process.pid)
            for protocol in ("tcp", "udp"):
                for family in ("", "6"):
                    table = Path(f"/proc/{process.pid}/net/{protocol}{family}")
                    lines = table.read_text().splitlines()[1:] if table.exists() else []
                    found |= {
                        Listener(protocol=protocol, address=address, port=port, command=command)
                        for address, port, inode in _listening(lines, protocol)
                        if inode in inodes
                    }
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def _listening(lines: Sequence[str], protocol: str) -> list[tuple[str, int, str]]:
    found = []
    for line in lines:
        _, local, remote, state, *rest = line.split()
        is_open = state == _TCP_LISTENS if protocol == "tcp" else int(remote.rsplit(":", 1)[1], 16) == 0
        if is_open:
            address, port = local.split(":")
            # 32-bit words in the byte order of this machine
            words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
            found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16), rest[5]))
    return found


class Command:
    """A command on a host of its own, with all processes that it starts; what is left of it is killed at the end.

    Args:
        words: The command.
        hosts: The hosts.
        host: Which of them.
        environment: More variables.
        log: File for what it prints.
    """

    def __init__(
        self, words: Sequence[str], *, hosts: Hosts, host: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        self.ever: set[Listener] = set()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", hosts.namespaces[host], *words], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), MARK: self.mark},
            )  # fmt: skip

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kill(self.family())
        self.process.wait(timeout=DEADLINE_S)

    def family(self) -> list[psutil.Process]:
        """Return all that runs now and carries the command's mark."""
        return marked(MARK, self.mark)

    def listeners(self) -> set[Listener]:
        """Return what it listens on now, and remember it."""
        now = listeners_of(self.family())
        self.ever |= now
        return now

    def until(self, is_there: Callable[[], bool], what: str) -> set[Listener]:
        """Look at its listeners again and again until something is there; return those of the last look."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            has_come = is_there()
            now = self.listeners()
            if has_come:
                return now
            assert self.process.poll() is None or is_there(), f"ended before {what}: {self.log.read_text()}"
            assert time.monotonic() < end_s, f"no {what} within {DEADLINE_S} s: {self.log.read_text()}"
            time.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A row of the table as a scenario meets it.

    Attributes:
        id: Of the row.
        process: Part of the command line of the process that listens.
        port: Its port; None for one that the kernel chose.
    """

    id: str
    process: str
    port: int | None = None

    def fits(self, listener: Listener, row: Row) -> bool:
        """Tell whether a listener is the one that the row describes."""
        return (
            self.process in listener.command
            and (self.port is None or self.port == listener.port)
            and row.protocol == listener.protocol
            and row.interface == listener.interface
        )


def check(found: set[Listener], *, expected: Sequence[Expected], must_see: Sequence[str] | None = None) -> None:
    """Hold listeners against the documented table.

    Args:
        found: What was seen.
        expected: What a scenario may show; nothing else is allowed.
        must_see: The ids that have to be there; all that are expected by default.
    """
    rows = documented()
    missing_rows = {one.id for one in expected} - set(rows)
    assert not missing_rows, f"{PAGE.name} has no row {missing_rows}"
    unknown = [listener for listener in found if not any(one.fits(listener, rows[one.id]) for one in expected)]
    assert not unknown, f"these listeners do not stand in {PAGE.name} as it says: {unknown}"
    seen = {one.id for one in expected for listener in found if one.fits(listener, rows[one.id])}
    wanted = {one.id for one in expected} if must_see is None else set(must_see)
    assert wanted <= seen, f"{wanted - seen} stand in {PAGE.name} and were not seen, but {found}"
