"""Source ports and the paths that they take: probes by time to live and by timing, probe files, and a plan's ports.

Switches pick the path of a connection by a hash of its addresses and ports, so a sender that binds its source port
chooses the path, once it knows the table. The hash includes protocol and destination port, so both must be those of the
later connection. There are two ways to ask the network:

- `probe_source_port`, by time to live: the first packet of a TCP connection ends at the spine, which answers with its
  address (as in tcptraceroute, without privileges).
- `probe_by_timing`, where routers do not answer: a host fills one path with datagrams, which no one need receive. The
  first packets of connections from ports that share a cable with them then wait in its queue. Each load finds one path;
  its ports are those that got slow. The ranks of a leaf measure at the same time, so that their paths agree.

A probe file holds what one host found:

```json
{
  "format": "thinwire-path-probe", "version": 1,
  "source": "host-2", "destination_port": 29600,
  "routers": {"host-0": {"20000": "10.80.0.2", "20001": "10.80.0.4"}}
}
```

Paths without an address, found by timing, are called `path-0` and on, for each leaf by itself. Linux only.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import re
import selectors
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Never, Protocol, TypeVar

import msgspec
from msgspec import Meta

from thinwire.errors import ConnectError, DataError, refusal
from thinwire.traffic.fabric import Fabric, read_fields
from thinwire.traffic.planner import PathPiece, TrafficPlan

PROBE_FORMAT = "thinwire-path-probe"
# Below the range from which Linux takes source ports itself (32768 and on), so that they are rarely in use.
DEFAULT_PORTS = range(20_000, 20_064)
SPINE_HOP = 2  # host, leaf, spine
# Ports of the same path after the first: a port that was in use a minute ago may be refused.
NUM_SPARE_PORTS = 3
_TRIES = 3  # routers answer a limited number of packets a second
_TIME_EXCEEDED = 11
_IP_RECVERR = 11  # not in the socket module
# struct sock_extended_err, and the address of the router behind it
_ERROR = struct.Struct("=IBBBBII")
_MOST_ROUTERS = 65_536
_LOADED_PORT, _LOAD_BYTES, _LOAD_FRAME_BYTES = 9, 1400, 1442
_SEND_WAIT_S, _MOST_SOCKETS = 0.1, 256
# The other host itself has answered: it accepted the connection, or refused it.
_ANSWERED = (0, errno.ECONNREFUSED)
# A load has this long to fill a queue, and a queue to get empty; what waits behind it is called slow early.
_SETTLE_S, _MOST_DRAIN_S, _MOST_WAIT_S, _REPEATS = 0.3, 10.0, 0.5, 3
# A port waits in a queue if it is slower than all ports were by this, and by twice their spread.
_LEAST_DELAY_S = 0.001
# Loads of one rank, for each spine, until it gives up on ports that none of them slowed.
_LOADS_PER_SPINE = 8

_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Count = Annotated[int, Meta(ge=0)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class PathProbe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one host about its source ports."""

    source: _Name  # the host
    destination_port: _Port  # port of the connections; another one takes other paths
    # address of the spine of each source port, by destination host; `path-N` where only timing tells it
    routers: dict[_Name, dict[str, Annotated[str, Meta(max_length=64)]]]

    def to_json(self) -> dict[str, Any]:
        """Return the probe as one JSON object."""
        return {"format": PROBE_FORMAT, "version": 1, **msgspec.to_builtins(self)}


def probe_source_port(
    address: str, port: int, *, source_port: int, hop: int = SPINE_HOP, timeout_s: float = 1.0
) -> str | None:
    """Return the router at a hop of the path that a source port takes.

    Args:
        address: IPv4 address of the other host.
        port: Port there; nothing need listen, since no packet arrives.
        source_port: Port of this host.
        hop: Which router; 1 is the leaf.
        timeout_s: Seconds to wait for an answer.

    Returns:
        Its address; None if it does not answer, or the path has no such hop.

    Raises:
        OSError: The source port is in use, or the network is unreachable.
    """
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # close without a goodbye: where the other host was reached, the port is free again at once
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop)
        connection.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        connection.bind(("", source_port))
        connection.settimeout(timeout_s)
        try:
            connection.connect((address, port))
        except TimeoutError:
            return None
        except OSError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.ECONNREFUSED):
                raise
            return _answering_router(connection)
        return None  # the host itself answered


def probe_source_ports(
    address: str, port: int, *, source_ports: Iterable[int] = DEFAULT_PORTS, hop: int = SPINE_HOP,
    timeout_s: float = 1.0,
) -> dict[int, str]:  # fmt: skip
    """Return the router of each source port; ports in use, and those without an answer, are left out.

    Raises:
        OSError: The network is unreachable.
    """
    found: dict[int, str] = {}
    num_silent = 0
    for source_port in source_ports:
        for _ in range(_TRIES):
            try:
                router = probe_source_port(address, port, source_port=source_port, hop=hop, timeout_s=timeout_s)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    break
                raise
            if router is not None:
                found[source_port] = router
                break
        else:
            num_silent += 1
            if not found and num_silent >= _TRIES:
                break  # nothing there answers
    return found


class Meeting(Protocol):
    """Ranks that probe together; see `thinwire.transport.rendezvous.Rendezvous`."""

    rank: int
    world_size: int

    def post(self, key: str, text: str) -> None:
        """Post a text under a key."""

    def collect_all(self, topic: str) -> list[str]:
        """Wait for what all ranks posted as `TOPIC/RANK`, and return it in order of rank."""

    def fail(self, text: str) -> Never:
        """Raise a ConnectError here, and in all other ranks."""


class Alone:
    """Meeting of one rank."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Keep a text."""
        self._texts[key] = text

    def collect_all(self, topic: str) -> list[str]:
        """Return what was posted."""
        return [self._texts[f"{topic}/0"]]

    def fail(self, text: str) -> Never:
        """Raise a ConnectError."""
        raise ConnectError(text)

    def leave(self, num_ranks: int) -> None:
        """Do nothing: no other rank waits."""


class _Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank before a load: its leaf, and how many of its ports have no path yet; 0 also if it gave up."""

    leaf: int
    left: _Count


class _Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ports of a rank that a load slowed."""

    # its ports by the path that they are known to take: how many were slow, and how many there are
    known: dict[int, tuple[_Count, Annotated[int, Meta(ge=1)]]]
    new: _Count  # slow ports without a path yet


class _Votes:
    """Loads of the paths of one leaf, and how often each port was slow in them.

    A port takes the path that it is slow with in more than half of the loads. While more than one path fits, as after a
    moment in which something else was slow, it has none, and later loads decide.
    """

    def __init__(self) -> None:
        self._num_loads: Counter[int] = Counter()
        self._num_slow: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)

    def add(self, path: int, slow: Iterable[tuple[str, int]]) -> None:
        """Count a load of a path, with the ports that were slow."""
        self._num_loads[path] += 1
        for ends in slow:
            self._num_slow[ends][path] += 1

    def found(self) -> dict[tuple[str, int], int]:
        """Return the path of each port that one path alone fits."""
        return {ends: paths[0] for ends, paths in self._fitting().items() if len(paths) == 1}

    def seen(self, slow: Iterable[tuple[str, int]]) -> _Slow:
        """Return what slow ports say about the path of a load."""
        fitting = self._fitting()
        num_slow = Counter(path for ends in slow for path in fitting.get(ends, ()))
        num_ports = Counter(path for paths in fitting.values() for path in paths)
        known = {path: (num_slow[path], count) for path, count in num_ports.items()}
        return _Slow(known=known, new=sum(not fitting.get(ends) for ends in slow))

    def _fitting(self) -> dict[tuple[str, int], list[int]]:
        return {
            ends: [path for path, count in counts.items() if 2 * count > self._num_loads[path]]
            for ends, counts in self._num_slow.items()
        }


class TcpPaths:
    """Paths of this host's TCP connections.

    Args:
        destinations: IPv4 addresses of the other hosts, by name. They answer or refuse connections.
        port: Port there.
        source_ports: Ports to try; those in use are left out.
        load_bits_per_s: Rate of a load: above that of a cable, below that of this host's port.
    """

    def __init__(
        self, destinations: Mapping[str, str], port: int, *, source_ports: Iterable[int], load_bits_per_s: float
    ) -> None:
        self._destinations, self._port = destinations, port
        self._source_ports = list(source_ports)
        self._load_bits_per_s = load_bits_per_s

    def round_trips(self) -> dict[tuple[str, int], float]:
        """Return the seconds until each destination answered each source port; infinite if it did not.

        All ports are measured at once, some times; the shortest time counts.
        """
        ends = [(name, source_port) for name in self._destinations for source_port in self._source_ports]
        found: dict[tuple[str, int], float] = {}
        for first in _REPEATS * [*range(0, len(ends), _MOST_SOCKETS)]:
            for one, seconds in self._round_trips_of(ends[first : first + _MOST_SOCKETS]).items():
                found[one] = min(seconds, found.get(one, math.inf))
        return found

    @contextmanager
    def load(self, number: int) -> Iterator[None]:
        """Fill the path of one of many flows, by datagrams to one of the destinations, while the block runs."""
        address = list(self._destinations.values())[number % len(self._destinations)]
        is_over = threading.Event()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_WAIT_S)
            sender.connect((address, _LOADED_PORT))  # the kernel picks a source port at random, and so a path
            thread = threading.Thread(target=self._send, args=(sender, is_over), daemon=True)
            thread.start()
            try:
                time.sleep(_SETTLE_S)
                yield
            finally:
                is_over.set()
                thread.join()

    def _send(self, sender: socket.socket, is_over: threading.Event) -> None:
        data, began_s, sent_bytes = bytes(_LOAD_BYTES), time.monotonic(), 0
        while not is_over.is_set():
            due_bytes = (time.monotonic() - began_s) * self._load_bits_per_s / 8
            # where the rate is beyond this host, what is due is never reached
            while sent_bytes < due_bytes and not is_over.is_set():
                with suppress(OSError):  # no program listens there, or this host's queue is full
                    sender.send(data)
                sent_bytes += _LOAD_FRAME_BYTES
            time.sleep(0.002)

    def _round_trips_of(self, ends: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        with ExitStack() as sockets, selectors.DefaultSelector() as waiting:
            for name, source_port in ends:
                connection = sockets.enter_context(socket.socket())
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # close without a goodbye: the port is free again at once
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                began_s = time.monotonic()
                try:
                    connection.bind(("", source_port))
                    error = connection.connect_ex((self._destinations[name], self._port))
                except OSError as fault:
                    error = fault.errno or errno.EADDRINUSE
                if error in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    continue
                found[name, source_port] = time.monotonic() - began_s if error in _ANSWERED else math.inf
                if error == errno.EINPROGRESS:
                    waiting.register(connection, selectors.EVENT_WRITE, (name, source_port, began_s))
            end_s = time.monotonic() + _MOST_WAIT_S
            while waiting.get_map() and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    now_s = time.monotonic()
                    name, source_port, began_s = key.data
                    assert isinstance(key.fileobj, socket.socket)
                    waiting.unregister(key.fileobj)
                    if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERED:
                        found[name, source_port] = now_s - began_s
                    key.fileobj.close()
        return found


def probe_by_timing(meeting: Meeting, paths: TcpPaths, *, leaf: int, spines: int) -> dict[str, dict[int, str]]:
    """Return the path of each source port to each destination, found by loads that slow the ports that share a cable.

    All ranks call it. Keep the network free of other traffic meanwhile: each load fills a path for about two seconds.

    Args:
        meeting: The ranks; a text of another rank is checked.
        paths: This rank's; without any, as where all destinations are below its leaf, it only takes part.
        leaf: This rank's leaf.
        spines: Number of spines, at most as many paths.

    Returns:
        `path-0` and on, by destination and source port; the numbers agree among the ranks of a leaf.

    Raises:
        ConnectError: A destination does not answer, no load slowed any port, a load slowed all, or there are more paths
            than spines.
    """
    idle = paths.round_trips()
    for name in sorted({name for (name, _), seconds in idle.items() if math.isinf(seconds)}):
        meeting.fail(
            f"{name} does not answer connections at the probed port, so that its paths cannot be timed; let its "
            f"firewall pass or refuse them"
        )
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for (name, _), seconds in idle.items():
        by_name[name].append(seconds)
    # a port counts as slow from so far beyond all ports' times without a load
    limits = {name: max(s) + max(2 * (max(s) - min(s)), _LEAST_DELAY_S) for name, s in by_name.items()}
    votes = _Votes()
    num_paths: Counter[int] = Counter()
    most_loads = _LOADS_PER_SPINE * spines
    for number in itertools.count():
        left = len(idle) - len(votes.found()) if most_loads else 0
        turns = _share(meeting, f"turn/{number}", _Turn(leaf=leaf, left=left), _Turn)
        loader = next((rank for rank, turn in enumerate(turns) if turn.left), None)
        if loader is None:
            break
        most_loads -= loader == meeting.rank
        slow, seen = _one_load(meeting, paths, limits, votes, turns=turns, loader=loader, number=number)
        if spines > 1 and loader == meeting.rank and len(slow) == len(idle):
            meeting.fail(
                "a load slowed every source port, so that it fills this host's own port and not one path; give a "
                "smaller --load-rate, above the rate of a cable, or probe by time to live"
            )
        path = _path_of_load(seen, num_paths, leaf=turns[loader].leaf)
        if leaf == turns[loader].leaf:
            votes.add(path, slow)
    found = votes.found()
    _check_paths(meeting, num_found=len(found), num_probed=len(idle), num_paths=num_paths[leaf], spines=spines)
    by_destination: dict[str, dict[int, str]] = {}
    for (name, source_port), path in sorted(found.items()):
        by_destination.setdefault(name, {})[source_port] = f"path-{path}"
    return by_destination


def _one_load(
    meeting: Meeting, paths: TcpPaths, limits: Mapping[str, float], votes: _Votes, *,
    turns: Sequence[_Turn], loader: int, number: int,
) -> tuple[set[tuple[str, int]], list[_Slow]]:  # fmt: skip
    """Load a path from one rank; return this rank's slow ports, and what all ranks saw."""
    own, slow, one = turns[meeting.rank], set[tuple[str, int]](), _Slow(known={}, new=0)
    with paths.load(number) if loader == meeting.rank else nullcontext():
        _share(meeting, f"load/{number}", own, _Turn)
        if own.leaf == turns[loader].leaf:
            slow = _slow(paths, limits)
            one = votes.seen(slow)
        seen = _share(meeting, f"slow/{number}", one, _Slow)
    end_s = time.monotonic() + _MOST_DRAIN_S
    while loader == meeting.rank and _slow(paths, limits) and time.monotonic() < end_s:
        time.sleep(0.05)  # until the queue is empty again
    _share(meeting, f"over/{number}", own, _Turn)
    return slow, seen


def _check_paths(meeting: Meeting, *, num_found: int, num_probed: int, num_paths: int, spines: int) -> None:
    if num_probed and not num_found:
        meeting.fail(
            "no load slowed any source port: it was below the rate of a cable, or another place is narrower; give "
            "--load-rate, or probe by time to live"
        )
    if num_paths > spines:
        meeting.fail(
            f"{num_paths} paths were found over {spines} spines: other traffic disturbed the probe; try again on a "
            f"quiet network"
        )


def _path_of_load(seen: Sequence[_Slow], num_paths: Counter[int], *, leaf: int) -> int:
    """Return the path that a load has filled: one whose known ports were slow for the most part, or a new one."""
    num_slow: Counter[int] = Counter()
    num_known: Counter[int] = Counter()
    for one in seen:
        for path, (slow, known) in one.known.items():
            if 0 <= path < num_paths[leaf]:
                num_slow[path] += slow
                num_known[path] += known
    path = max(num_known, key=lambda path: (num_slow[path] / num_known[path], -path), default=0)
    if num_known[path] and 2 * num_slow[path] > num_known[path]:
        return path
    path = num_paths[leaf]
    num_paths[leaf] += any(one.new for one in seen)
    return path


def _share(meeting: Meeting, topic: str, own: msgspec.Struct, kind: type[_Struct]) -> list[_Struct]:
    """Post what this rank knows, wait for all, and return theirs."""
    meeting.post(f"{topic}/{meeting.rank}", msgspec.json.encode(own).decode())
    try:
        return [msgspec.json.decode(text, type=kind) for text in meeting.collect_all(topic)]
    except msgspec.MsgspecError as error:
        raise ConnectError(f"a rank posted what no probe does: {error}; run the same thinwire on all hosts") from error


def _slow(paths: TcpPaths, limits: Mapping[str, float]) -> set[tuple[str, int]]:
    return {ends for ends, seconds in paths.round_trips().items() if seconds > limits.get(ends[0], math.inf)}


def read_probes(paths: Iterable[Path]) -> list[PathProbe]:
    """Read probe files, and those of folders.

    Raises:
        DataError: One cannot be read, or is no probe; names the file and the field.
    """
    found = []
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                probe = msgspec.convert(read_fields(file, PROBE_FORMAT), PathProbe)
                for routers in probe.routers.values():
                    if len(routers) > _MOST_ROUTERS:
                        raise ValueError(f"{len(routers)} source ports, more than {_MOST_ROUTERS}")
                    for port, router in routers.items():
                        if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
                            raise ValueError(f"no port: {port[:20]!r}")
                        if _path_number(router) is None:
                            ip_address(router)
            except ValueError as error:  # msgspec's too
                raise DataError(f"{file}: {error}; write it with thinwire traffic probe") from error
            found.append(probe)
    if not found:
        raise DataError("there are no probe files; write some with thinwire traffic probe")
    return found


def with_source_ports(plan: TrafficPlan, probes: Sequence[PathProbe]) -> TrafficPlan:
    """Return the plan with a source port for each piece that crosses a spine, of those that take this spine.

    Pieces between the same hosts get ports of their own. Flows from hosts without a probe stay without ports.

    Raises:
        ValueError: A spine has no address in the fabric, or no probed port takes the path of a piece.
    """
    fabric = plan.paths.fabric
    spine_of = {address: spine for spine, addresses in enumerate(fabric.spine_addresses) for address in addresses}
    routers_of = (routers for probe in probes for routers in probe.routers.values())
    if not spine_of and any(_path_number(router) is None for routers in routers_of for router in routers.values()):
        raise refusal("the fabric does not name its spines' addresses", got='no "spine_addresses"',
                      allowed="a list of addresses for each spine",
                      remedy='"spine_addresses": [["10.80.0.1"], ["10.80.0.2"]]')  # fmt: skip
    by_path: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    destination_port = {}
    for probe in probes:
        for destination, routers in probe.routers.items():
            destination_port[probe.source, destination] = probe.destination_port
            for port, router in routers.items():
                by_path[probe.source, destination, _spine(spine_of, router, fabric)].append(int(port))
    left = {path: iter(sorted(ports)) for path, ports in by_path.items()}

    def placed(source: str, destination: str, piece: PathPiece) -> PathPiece:
        if piece.spine is None or (source, destination) not in destination_port:
            return piece
        ports = list(itertools.islice(left.get((source, destination, piece.spine), iter(())), 1 + NUM_SPARE_PORTS))
        if not ports:
            raise refusal(
                f"no probed source port from {source} to {destination} takes spine-{piece.spine}",
                got=f"{sum(len(found) for path, found in by_path.items() if path[:2] == (source, destination))} ports",
                allowed="a port for each piece", remedy="thinwire traffic probe with more --source-ports",
            )  # fmt: skip
        return dataclasses.replace(
            piece, source_ports=tuple(ports), destination_port=destination_port[source, destination]
        )

    pieces = [
        [placed(flow.source, flow.destination, piece) for piece in row]
        for flow, row in zip(plan.flows, plan.pieces, strict=True)
    ]
    return dataclasses.replace(plan, pieces=pieces)


def _path_number(router: str) -> int | None:
    """Return the number of a path that timing found; it stands for any spine, since only what shares it matters."""
    match = re.fullmatch(r"path-(\d{1,4})", router)
    return None if match is None else int(match[1])


def _spine(spine_of: Mapping[str, int], router: str, fabric: Fabric) -> int:
    number = _path_number(router)
    if number is not None and number < fabric.spines:
        return number
    if router not in spine_of:
        raise refusal(
            "a probe met a router that is no spine of the fabric", got=router,
            allowed=f"the {len(spine_of)} addresses of its {fabric.spines} spines",
            remedy='to add it to "spine_addresses" of the fabric file',
        )  # fmt: skip
    return spine_of[router]


def _answering_router(connection: socket.socket) -> str | None:
    try:
        _, ancillary, _, _ = connection.recvmsg(0, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except OSError:
        return None  # refused by the host itself
    for level, kind, data in ancillary:
        is_error = (level, kind) == (socket.IPPROTO_IP, _IP_RECVERR) and len(data) >= _ERROR.size + 8
        if is_error and _ERROR.unpack_from(data)[2] == _TIME_EXCEEDED:
            return socket.inet_ntoa(data[_ERROR.size + 4 : _ERROR.size + 8])
    return None
