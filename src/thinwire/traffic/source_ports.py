"""Source ports and the paths that they take: probe by time to live, probe files, and the ports of a plan.

Switches pick the path of a connection by a hash of its addresses and ports, so a sender that binds its source port
chooses the path, once it knows the table. `probe_source_port` asks the network: the first packet of a TCP connection
gets a time to live that ends at the spine, which answers with its address (as in tcptraceroute, without privileges).
The hash includes protocol and destination port, so both must be those of the later connection.

A probe file holds what one host found:

```json
{
  "format": "thinwire-path-probe", "version": 1,
  "source": "host-2", "destination_port": 29600,
  "routers": {"host-0": {"20000": "10.80.0.2", "20001": "10.80.0.4"}}
}
```

Linux only. A network whose routers do not answer cannot be probed in this way.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from thinwire.errors import DataError, refusal
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

_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]


class PathProbe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one host about its source ports.

    Attributes:
        source: The host.
        destination_port: Port of the connections; another one takes other paths.
        routers: Address of the spine of each source port, by destination host.
    """

    source: _Name
    destination_port: _Port
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
    address: str,
    port: int,
    *,
    source_ports: Iterable[int] = DEFAULT_PORTS,
    hop: int = SPINE_HOP,
    timeout_s: float = 1.0,
) -> dict[int, str]:
    """Return the router of each source port; ports in use, and those without an answer, are left out.

    Raises:
        OSError: The network is unreachable.
    """  # fmt: skip
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
    if not spine_of:
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


def _spine(spine_of: Mapping[str, int], router: str, fabric: Fabric) -> int:
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
