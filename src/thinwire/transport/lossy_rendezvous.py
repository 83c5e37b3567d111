"""Ranks that meet although some of them cannot reach each other: notes in the run's store, and wires that may fail.

`connect` refuses a job in which one host does not reach another; who looks for that very fault cannot be refused. Here
the ranks agree over the store at MASTER_ADDR, which each of them must reach, and talk over an open `WireTransport`,
whose connections come up and fail one by one.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.errors import ConnectError
from thinwire.transport.addresses import Address, RankEndpoint, host_identity
from thinwire.transport.connect import REACH_S, address_at, job_place, stores
from thinwire.transport.rendezvous import POLL_S, prefixed
from thinwire.transport.secret import SECRET_BYTES, Secret, need_pyzmq, read_secret

if TYPE_CHECKING:
    from thinwire.transport.wire.wire_transport import WireTransport

MOST_NOTE_BYTES = 1 << 20
# A beat may be late by this: the store answers in round trips, and processors are busy.
GRACE_S = 5.0
_FAREWELL_S = 5.0
_LOOK_S, _MOST_PROMISED_S = 0.02, 3600.0


class Board:
    """Notes that ranks leave for each other, and beats by which a rank that has stopped is told from one at work.

    Args:
        store: Shared by all ranks; holds no notes of an earlier meeting.
        rank: This rank.
        world_size: How many there are.
        place: What the store is called in an error's text.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, place: str) -> None:
        self._store = store
        self._place = place
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self.rank = rank
        self.world_size = world_size

    def leave(self, key: str, text: str) -> None:
        """Leave a note.

        Raises:
            ConnectError: The store does not answer.
        """
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise self._gone() from error

    def read(self, key: str) -> str | None:
        """Return a note, or None where nobody has left it.

        Raises:
            ConnectError: The store does not answer, or the note is too long.
        """
        try:
            if not self._store.check([key]):
                return None
            text: bytes = self._store.get(key)
        except RuntimeError as error:
            raise self._gone() from error
        if len(text) > MOST_NOTE_BYTES:
            raise ConnectError(f"a note at {self._place} has {len(text)} bytes, more than {MOST_NOTE_BYTES}")
        return text.decode(errors="replace")

    def promise(self, seconds: float) -> None:
        """Let the others know that this rank is heard of again within so many seconds."""
        self._beats += 1
        self.leave(f"beat/{self.rank}", f"{self._beats} {seconds:.3f}")

    def is_silent(self, rank: int) -> bool:
        """Tell whether a rank has not been heard of for longer than it promised."""
        now_s, text = time.monotonic(), self.read(f"beat/{rank}") or ""
        last = self._seen.get(rank)
        if last is None or last[0] != text:
            self._seen[rank] = (text, now_s)
            return False
        return now_s - last[1] > _promised_s(text) + GRACE_S

    def collect(self, topic: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the notes of ranks on a topic; who goes silent is left out."""
        missing, found = set(ranks), {}
        last_s = 0.0
        while missing:
            for rank in sorted(missing):
                text = self.read(f"{topic}/{rank}")
                if text is not None:
                    found[rank] = text
                    missing.discard(rank)
                elif rank != self.rank and self.is_silent(rank):
                    missing.discard(rank)
            if missing and time.monotonic() - last_s > 1.0:
                self.promise(3.0)
                last_s = time.monotonic()
            time.sleep(_LOOK_S if missing else 0.0)
        return found

    def wait_for(self, key: str, *, whom: int) -> str:
        """Return a note of a rank as soon as it is there.

        Raises:
            ConnectError: That rank went silent.
        """
        last_s = 0.0
        while (text := self.read(key)) is None:
            if self.is_silent(whom):
                raise ConnectError(f"rank {whom}, which leads the test, has stopped; see its log")
            if time.monotonic() - last_s > 1.0:
                self.promise(3.0)
                last_s = time.monotonic()
            time.sleep(_LOOK_S)
        return text

    def part(self, ranks: Collection[int]) -> None:
        """Leave; rank 0, which may hold the store, lets the others read what they came for first."""
        try:
            left = self._store.add("parted", 1)
            end = time.monotonic() + _FAREWELL_S
            while self.rank == 0 and left < len(ranks) and time.monotonic() < end:
                time.sleep(POLL_S)
                left = self._store.add("parted", 0)
        except RuntimeError:
            return  # the store is gone, and so is everybody who could be waiting on it

    def _gone(self) -> ConnectError:
        return ConnectError(
            f"the meeting point {self._place} (MASTER_ADDR, MASTER_PORT) does not answer any more; see the log of "
            f"rank 0, and whether this host still reaches it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialJob:
    """Ranks that have met.

    Attributes:
        rank: This rank.
        world_size: How many were expected.
        board: Their notes.
        stations: Of those that came.
        transport: Between them; not all may be connected.
        connected: To whom this rank is.
        connect_s: How long that took.
    """

    rank: int
    world_size: int
    board: Board
    stations: Mapping[int, RankEndpoint]
    transport: WireTransport
    connected: tuple[int, ...] = field(default=())
    connect_s: float = 0.0


def connect_reachable(
    *, interface: str | None = None, address: str | None = None, secret: Path | None = None, deadline_s: float = 60.0
) -> PartialJob:
    """Meet the other ranks of torchrun's environment; who does not come, or is not reached, is left out.

    Args:
        interface: Network interface whose address the others shall use.
        address: Or that address.
        secret: The job's secret, the same file on all hosts. Without one, rank 0 makes a key for this meeting and
            leaves it in the store, where whoever reaches the store can read it.
        deadline_s: Seconds that ranks may come one after another.

    Returns:
        The same stations on all ranks; transport and board are this rank's, which closes them.

    Raises:
        MissingExtra: pyzmq is not installed.
        ValueError: A bad argument, or an incomplete environment.
        ConnectError: The store is not reached, or ranks hold other secrets.
    """
    from thinwire.transport.wire.wire_transport import WireTransport

    if interface is not None and address is not None:
        raise ValueError(f"give interface or address, not both, got interface={interface!r} and address={address!r}")
    need_pyzmq()
    own_secret = None if secret is None else read_secret(secret)
    place = job_place()
    if place is None:
        raise ValueError("nobody to meet: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set; start by torchrun")
    own_address = address_at(place, interface=interface, address=address)
    serve = place.rank == 0 and not place.agent_serves_store
    store, prefix = stores.open(place, serve=serve, deadline_s=deadline_s)
    store.set_timeout(timedelta(seconds=deadline_s))
    board = Board(
        prefixed(store, f"{prefix}/board"), rank=place.rank, world_size=place.world_size, place=place.name
    )  # fmt: skip
    board.promise(deadline_s)
    key = own_secret or _shared_key(board, deadline_s=deadline_s)
    transport = WireTransport(
        replica=place.rank, num_replicas=place.world_size, secret=key, address=own_address, is_open=True
    )
    try:
        own = RankEndpoint(
            rank=place.rank, replica=place.rank, hostname=socket.gethostname(), host=host_identity(),
            address=own_address, port=transport.port, secret="" if own_secret is None else own_secret.fingerprint,
        )  # fmt: skip
        stations = _introduce(own, board, deadline_s=deadline_s)
        connected, connect_s = _reach(transport, stations, rank=place.rank)
    except BaseException:
        transport.close()
        raise
    return PartialJob(
        rank=place.rank, world_size=place.world_size, board=board, stations=stations, transport=transport,
        connected=connected, connect_s=connect_s,
    )  # fmt: skip


def _shared_key(board: Board, *, deadline_s: float) -> Secret:
    if board.rank == 0:
        board.leave("key", secrets.token_bytes(SECRET_BYTES).hex())
    try:
        key = bytes.fromhex(_from_rank_0(board, "key", deadline_s=deadline_s))
    except ValueError:
        key = b""
    if len(key) != SECRET_BYTES:
        raise ConnectError("rank 0 left a key that is none; run the same thinwire on all hosts")
    return Secret(key=key)


def _from_rank_0(board: Board, key: str, *, deadline_s: float) -> str:
    """Return a note of rank 0, which may not have begun yet."""
    end = time.monotonic() + deadline_s
    while (text := board.read(key)) is None:
        if time.monotonic() > end:
            raise ConnectError(f"rank 0 did not begin within {deadline_s:g} s; start it, and see its log")
        time.sleep(POLL_S)
    return text


def _introduce(own: RankEndpoint, board: Board, *, deadline_s: float) -> dict[int, RankEndpoint]:
    """Return the stations of all that came in time, as rank 0 saw it."""
    board.leave(f"station/{own.rank}", own.to_json())
    board.promise(2 * deadline_s)
    if own.rank == 0:
        end, here = time.monotonic() + deadline_s, {0}
        while len(here) < board.world_size and time.monotonic() < end:
            here |= {rank for rank in range(board.world_size) if board.read(f"station/{rank}") is not None}
            time.sleep(POLL_S)
        board.leave("present", " ".join(map(str, sorted(here))))
    _from_rank_0(board, "station/0", deadline_s=deadline_s)
    stations = {}
    for rank in _present_ranks(board.wait_for("present", whom=0), world_size=board.world_size):
        stations[rank] = RankEndpoint.from_json(board.read(f"station/{rank}") or "", rank=rank)
    if own.rank not in stations:
        raise ConnectError(
            f"rank {own.rank} came after the others had begun; start all within {deadline_s:g} s (--deadline)"
        )
    odd = [rank for rank, station in stations.items() if station.secret != stations[0].secret]
    if odd:
        raise ConnectError(
            f"rank {odd[0]} on host {stations[odd[0]].hostname} and rank 0 on host {stations[0].hostname} do not have "
            f"the same secret; give every rank the same secret file (--secret), or none"
        )
    return stations


def _present_ranks(text: str, *, world_size: int) -> list[int]:
    """Read rank 0's list of the ranks that came.

    Raises:
        ConnectError: It is no such list, or lacks rank 0, which wrote it.
    """
    words = text.split()
    # the length is checked first: Python refuses to convert thousands of digits
    is_list = all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words)
    ranks = [int(word) for word in words] if is_list else []
    if 0 not in ranks or any(rank >= world_size for rank in ranks):
        raise ConnectError("rank 0 left a list of ranks that is none; run the same thinwire on all hosts")
    return ranks


def _reach(
    transport: WireTransport, stations: Mapping[int, RankEndpoint], *, rank: int
) -> tuple[tuple[int, ...], float]:
    """Dial all others; nobody is waited for ten times as long as the slowest that answered, and 5 s."""
    others = sorted(set(stations) - {rank})
    began_s, latest_s, count = time.monotonic(), 0.0, 0
    for peer in others:
        place = Address(host=stations[peer].address, port=stations[peer].port)
        transport.add(peer, address=place if peer < rank else None)
    while True:
        connected = transport.wait_until_connected(others, deadline_s=0.1)
        elapsed_s = time.monotonic() - began_s
        if len(connected) > count:
            count, latest_s = len(connected), elapsed_s
        if len(connected) == len(others) or elapsed_s > max(REACH_S, 10 * latest_s):
            return connected, latest_s


def _promised_s(text: str) -> float:
    try:
        seconds = float(text.split()[1])
    except (IndexError, ValueError):
        return 0.0
    return min(seconds, _MOST_PROMISED_S) if seconds >= 0 else 0.0
