"""Nodes, devices and links of a site, and their file `site.json`, which people write.

```json
{
  "format": "thinwire-site",
  "version": 1,
  "nodes": [
    {"name": "box-0", "devices": 8, "memory_bytes": "80 GB", "flops_per_s": 1.4e14,
     "bandwidth_bits_per_s": "2400gbit", "latency_s": "5us"},
    {"name": "box-1", "devices": 8, "memory_bytes": "80 GB", "flops_per_s": 1.4e14,
     "bandwidth_bits_per_s": "2400gbit", "latency_s": "5us"}
  ],
  "between_nodes": {"bandwidth_bits_per_s": "25gbit", "latency_s": "30us"},
  "links": [{"source": "box-0", "destination": "box-1", "bandwidth_bits_per_s": "20gbit"}]
}
```

Inside a node every pair of devices has its node's bandwidth in each direction. Between nodes a bandwidth is that of the
node's network card: messages of its devices to other nodes share it. `links` replaces `between_nodes` for a pair of
nodes; a link without its reverse counts for both directions. Measured links come from a file of their own: the
`cluster.json` of `thinwire probe`, or the output of mpiGraph (github.com/LLNL/mpiGraph), as Pipette uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import permutations
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.errors import DataError
from thinwire.files import LARGEST_NUMBER, open_regular, read_json, short
from thinwire.planning.cluster import load_cluster
from thinwire.units import parse_bytes, parse_rate, parse_seconds

FORMAT, VERSION = "thinwire-site", 1
# A file of more is a mistake, or an attack. A few bytes may state any number of devices, each of which takes memory.
_MOST_DEVICES, _MOST_BYTES = 1 << 20, 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNode:
    """A machine with one or several equal devices."""

    name: str  # as links name it
    devices: int  # how many
    memory_bytes: float  # of each device
    flops_per_s: float  # FLOP/s that training reaches on each device (6 a parameter and token)
    # that attention reaches in scores and values, where it is not the same: as with products in 8 bits
    attention_flops_per_s: float | None = None
    bandwidth_bits_per_s: float = inf  # between two devices of the node, in each direction
    latency_s: float = 0.0  # one way between two devices of the node
    site: str = ""  # where it stands, if the nodes stand at several sites: messages between sites may be coded


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """Link from one node to another."""

    source: str = ""  # the sender's name; empty for any
    destination: str = ""  # the receiver's name; empty for any
    bandwidth_bits_per_s: float  # for all devices of the node together
    latency_s: float = 0.0  # one way


@dataclass(frozen=True, kw_only=True)
class Site:
    """Nodes and the links between them.

    Raises:
        ValueError: There is no node, a name is there twice or unknown, or a pair of nodes has no link.

    Example:
        >>> box = SiteNode(name="box", devices=2, memory_bytes=8e9, flops_per_s=1e13)
        >>> Site(nodes=(box,)).device_names
        ('box/0', 'box/1')
    """

    nodes: tuple[SiteNode, ...]  # in the order of the devices' numbers
    between_nodes: NodeLink | None = None  # link of every pair of nodes that has none of its own
    links: tuple[NodeLink, ...] = ()  # pairs of nodes with numbers of their own

    def __post_init__(self) -> None:
        """Check names and that every pair of nodes has a link."""
        names = [node.name for node in self.nodes]
        if not names:
            raise ValueError("nodes must name at least one node, got none")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"every node needs a name of its own, got {twice!r} twice; rename one")
        if sum(node.devices for node in self.nodes) > _MOST_DEVICES:
            raise ValueError(f"a site has at most {_MOST_DEVICES} devices, got {self.num_devices}; plan a part of it")
        known = set(names)
        for link in self.links:
            for name in (link.source, link.destination):
                if name not in known:
                    raise ValueError(f"a link names {name!r}, which is no node; there are {', '.join(names[:8])}")
        pairs = {(link.source, link.destination) for link in self.links}
        for source in names if self.between_nodes is None else ():
            for destination in names:
                if source != destination and not {(source, destination), (destination, source)} & pairs:
                    raise ValueError(
                        f"nothing states how fast {source!r} reaches {destination!r}; give between_nodes or that link"
                    )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.devices for node in self.nodes)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Number of the node of each device."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in range(node.devices))

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Name of each device: its node and its number there."""
        return tuple(f"{node.name}/{number}" for node in self.nodes for number in range(node.devices))

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """Number of the place of each node, in the order of their names' first use."""
        names = list(dict.fromkeys(node.site for node in self.nodes))
        return tuple(names.index(node.site) for node in self.nodes)

    @property
    def has_border(self) -> bool:
        """Whether the nodes stand at several places."""
        return max(self.site_of) > 0

    @property
    def memory_bytes(self) -> float:
        """Memory of the smallest device, which all must do with."""
        return min(node.memory_bytes for node in self.nodes)

    def with_speed(self, flops_per_s: float) -> Site:
        """Return the same site with devices of another speed, in FLOP/s that training reaches; attention's follows."""
        nodes = [
            replace(
                node, flops_per_s=flops_per_s,
                attention_flops_per_s=node.attention_flops_per_s
                and node.attention_flops_per_s * flops_per_s / node.flops_per_s,
            )
            for node in self.nodes
        ]  # fmt: skip
        return replace(self, nodes=tuple(nodes))

    def link(self, source: int, destination: int) -> NodeLink:
        """Return the link of a pair of nodes, by their numbers; of a node with itself that between two devices."""
        one, other = self.nodes[source], self.nodes[destination]
        if source == destination:
            return NodeLink(bandwidth_bits_per_s=one.bandwidth_bits_per_s, latency_s=one.latency_s)
        given = self._given
        found = given.get((one.name, other.name)) or given.get((other.name, one.name)) or self.between_nodes
        assert found is not None, "checked when the site was made"
        return found

    @cached_property
    def _given(self) -> dict[tuple[str, str], NodeLink]:
        return {(link.source, link.destination): link for link in self.links}


def load_site(path: Path, *, links: Path | None = None) -> Site:
    """Read `site.json`.

    Args:
        path: The site file.
        links: Measured links between its nodes, which replace those that it states: a `cluster.json` of `thinwire
            probe` whose replicas have the nodes' names, or the output of mpiGraph with one task on each node.

    Raises:
        DataError: There is no such file, or it is no site; names the place, the value and the remedy.
    """
    content = read_json(path, most_bytes=_MOST_BYTES, remedy="write one as docs/plan-inside.md shows")
    measured = {} if links is None else load_links(links)
    try:
        return site_from_json(content, measured=measured)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def join_sites(sites: Mapping[str, Site], border: Callable[[str, str], NodeLink]) -> Site:
    """Return the nodes of several sites as one, joined by the links between the sites.

    Nodes of the same name get the name of their site before it.

    Args:
        sites: By name.
        border: Returns the link from one site to another.
    """
    names = [node.name for site in sites.values() for node in site.nodes]
    nodes = [
        replace(node, site=place, name=f"{place}.{node.name}" if names.count(node.name) > 1 else node.name)
        for place, site in sites.items() for node in site.nodes
    ]  # fmt: skip
    places = [(site, number) for site in sites.values() for number in range(len(site.nodes))]
    links = [
        replace(site.link(number, other) if one.site == two.site else border(one.site, two.site),
                source=one.name, destination=two.name)
        for one, (site, number) in zip(nodes, places, strict=True)
        for two, (_, other) in zip(nodes, places, strict=True) if one is not two
    ]  # fmt: skip
    return Site(nodes=tuple(nodes), links=tuple(links))


def load_links(path: Path) -> dict[tuple[str, str], NodeLink]:
    """Read measured links by sender and receiver; a latency of 0 was not measured.

    Raises:
        DataError: There is no such file, or it is neither a cluster nor mpiGraph's output.
    """
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1).decode(errors="replace")
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; give cluster.json or mpiGraph's output"
        ) from error
    if len(text) > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES} bytes; give cluster.json or mpiGraph's output")
    if not text.lstrip().startswith("{"):
        try:
            return _mpigraph_links(text)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    cluster = load_cluster(path)
    names = [machine.name for machine in cluster.machines]
    wires = [cluster.wire(one, other) for one in names for other in names if one != other]
    return {
        (wire.source, wire.destination): NodeLink(
            source=wire.source, destination=wire.destination, bandwidth_bits_per_s=wire.bandwidth_bits_per_s,
            latency_s=wire.latency_s,
        )
        for wire in wires
    }  # fmt: skip


def _mpigraph_links(text: str) -> dict[tuple[str, str], NodeLink]:
    """Return the lower of the rates that sender and receiver measured; mpiGraph counts in 2^20 bytes a second."""
    tables: dict[str, dict[tuple[str, str], float]] = {"Send": {}, "Recv": {}}
    names: list[str] = []
    table = ""
    for line in text.splitlines():
        first, *cells = line.rstrip().split("\t")
        if first in tables and len(cells) > 1:
            table, names = first, [cell.rpartition(":")[0] for cell in cells]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(f"{short(twice)} ran two tasks; run mpiGraph with one task on each node")
        elif table and first.endswith((" to", " from")):
            own = first.rpartition(":")[0]
            for other, cell in zip(names, cells, strict=False):
                pair = (own, other) if table == "Send" else (other, own)
                tables[table][pair] = _mebibytes(cell, pair)
    if not names:
        raise DataError("this is neither a cluster.json nor the output of mpiGraph: it has no table of rates")
    links = {}
    for pair in permutations(names, 2):
        rates = [found[pair] for found in tables.values() if pair in found]
        if not rates or min(rates) <= 0:
            raise DataError(f"no rate from {short(pair[0])} to {short(pair[1])}; run mpiGraph to its end")
        links[pair] = NodeLink(source=pair[0], destination=pair[1], bandwidth_bits_per_s=8 * 2**20 * min(rates))
    return links


def _mebibytes(cell: str, pair: tuple[str, str]) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LARGEST_NUMBER:
        raise DataError(f"the rate from {short(pair[0])} to {short(pair[1])} must be a number, got {short(cell)}")
    return value


def site_from_json(content: object, *, measured: Mapping[tuple[str, str], NodeLink] = MappingProxyType({})) -> Site:
    """Check a file's content and return the site.

    Args:
        content: The JSON object.
        measured: Links by sender and receiver, which replace those of the file; a latency of 0 is taken from the file.

    Raises:
        DataError: It is no site; names the place, the value and the remedy.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f'this is no site: it must be an object with "format": "{FORMAT}"')
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise DataError(f"the site has version {short(content.get('version'))}; this thinwire reads {VERSION}")
    _check_keys(content, allowed=("format", "version", "nodes", "between_nodes", "links", "note"), where="the site")
    nodes = [SiteNode(**_values(entry, SiteNode, f"nodes[{n}]")) for n, entry in _entries(content, "nodes")]
    links = [NodeLink(**_values(entry, NodeLink, f"links[{n}]")) for n, entry in _entries(content, "links")]
    between = content.get("between_nodes")
    default = None if between is None else NodeLink(**_values(between, NodeLink, "between_nodes"))
    if measured:
        links = _replaced([node.name for node in nodes], links, default, measured)
    try:
        return Site(nodes=tuple(nodes), between_nodes=default, links=tuple(links))
    except ValueError as error:
        raise DataError(str(error)) from error


def _replaced(
    names: Sequence[str], links: Sequence[NodeLink], default: NodeLink | None,
    measured: Mapping[tuple[str, str], NodeLink],
) -> list[NodeLink]:  # fmt: skip
    """Return the measured links of every pair of nodes."""
    stated = {(link.source, link.destination): link for link in links}
    found = []
    for source in names:
        for destination in names:
            if source == destination:
                continue
            link = measured.get((source, destination))
            if link is None:
                known = sorted({name for pair in measured for name in pair})
                raise DataError(
                    f"the links were not measured from {source!r} to {destination!r}; there are "
                    f"{', '.join(known[:8])}, and nodes need the same names"
                )
            own = stated.get((source, destination)) or stated.get((destination, source)) or default
            found.append(replace(link, latency_s=link.latency_s or (own.latency_s if own is not None else 0.0)))
    return found


_READ: Mapping[str, Callable[[str], float]] = {
    "bandwidth_bits_per_s": parse_rate, "memory_bytes": parse_bytes, "latency_s": parse_seconds,
}  # fmt: skip


def _entries(content: Mapping[str, Any], key: str) -> list[tuple[int, Any]]:
    found = content.get(key, [])
    if not isinstance(found, list):
        raise DataError(f'"{key}" must be a list, got {short(found)}')
    return list(enumerate(found))


def _values(entry: object, kind: type[SiteNode | NodeLink], where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{where} must be an object, got {short(entry)}")
    _check_keys(entry, allowed=[field.name for field in fields(kind)], where=where)
    needed = ("name", "devices", "memory_bytes", "flops_per_s") if kind is SiteNode else ("bandwidth_bits_per_s",)
    if where.startswith("links"):
        needed = ("source", "destination", *needed)
    if missing := [name for name in needed if name not in entry]:
        raise DataError(f"{where} lacks {missing[0]!r}")
    return {name: _value(found, name, where) for name, found in entry.items()}


def _value(found: object, name: str, where: str) -> str | int | float:
    if name in ("name", "source", "destination", "site"):
        if not isinstance(found, str) or not found or len(found) > 200:
            raise DataError(f"{where}.{name} must be a text of 1 to 200 characters, got {short(found)}")
        return found
    value: object = found
    if isinstance(found, str) and name in _READ:
        try:
            value = _READ[name](found)
        except ValueError as error:
            raise DataError(f"{where}.{name}: {error}") from error
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= LARGEST_NUMBER
        or not isfinite(value)
    ):
        raise DataError(f"{where}.{name} must be a number of at least 0, got {short(found)}")
    if name == "devices":
        if value != int(value) or not 1 <= value <= _MOST_DEVICES:
            raise DataError(f"{where}.devices must be a whole number of 1 to {_MOST_DEVICES}, got {short(found)}")
        return int(value)
    if value == 0 and name != "latency_s":
        raise DataError(f"{where}.{name} must be above 0, got {short(found)}")
    return float(value)


def _check_keys(entry: Mapping[str, Any], *, allowed: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise DataError(f"{where} has {short(key)}, which means nothing here; there are {', '.join(allowed)}")
