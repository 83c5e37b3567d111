"""Leaf/spine fabric and the flows on it, with their files.

A fabric file names each host's leaf, one for each port (rail), and the rates:

```json
{
  "format": "thinwire-fabric", "version": 1,
  "spines": 4,
  "uplink_bits_per_s": "10mbit",
  "port_bits_per_s": "100mbit",
  "hosts": {"host-0": [0], "host-1": [0], "host-2": [1], "host-3": [1]},
  "rates": {"leaf-1/spine-2": "5mbit"}
}
```

A flows file lists what is sent at once; flows of one job complete together:

```json
{
  "format": "thinwire-flows", "version": 1,
  "flows": [{"source": "host-0", "destination": "host-2", "bytes": "12.5MB", "job": "a", "connections": 1}]
}
```

A number is in bits a second or bytes; a text brings its unit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from thinwire.errors import DataError, refusal, unknown_name
from thinwire.units import parse_bytes, parse_rate

FABRIC_FORMAT, FLOWS_FORMAT, VERSION = "thinwire-fabric", "thinwire-flows", 1
# A file of more is a mistake, or an attack.
_MOST_FILE_BYTES = 64 * 2**20
_MOST_SPINES, _MOST_LEAVES, _MOST_FLOWS = 1024, 4096, 1_000_000

_Rate = Annotated[float, Meta(gt=0, le=1e18)]
_Leaf = Annotated[int, Meta(ge=0, lt=_MOST_LEAVES)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Address = Annotated[str, Meta(min_length=2, max_length=64)]
_Parsed = TypeVar("_Parsed", bound=msgspec.Struct)


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two layers of switches: every leaf has one cable to every spine, every host a port on one leaf or more.

    Example:
        >>> hosts = {"a": (0,), "b": (1,)}
        >>> Fabric(spines=4, uplink_bits_per_s=1e7, port_bits_per_s=1e8, hosts=hosts).num_leaves
        2
    """

    spines: Annotated[int, Meta(ge=1, le=_MOST_SPINES)]
    uplink_bits_per_s: _Rate  # rate of each cable between a leaf and a spine, in each direction
    port_bits_per_s: _Rate  # rate of each port of a host, in each direction
    # the leaf of each port of a host; the port's place in the list is its rail
    hosts: dict[_Name, Annotated[tuple[_Leaf, ...], Meta(min_length=1, max_length=64)]]
    rates: dict[str, _Rate] = {}  # cables of another rate, by name, such as `leaf-1/spine-2`
    # IP addresses under which each spine answers probes, if known
    spine_addresses: Annotated[tuple[tuple[_Address, ...], ...], Meta(max_length=_MOST_SPINES)] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        return 1 + max((leaf for leaves in self.hosts.values() for leaf in leaves), default=-1)

    def cables(self, names: Iterable[str]) -> frozenset[tuple[int, int]]:
        """Return the cables that are named, as pairs of leaf and spine; `spine-2` names all of that spine.

        Raises:
            ValueError: A name is no cable or spine of the fabric.
        """
        found: set[tuple[int, int]] = set()
        for name in names:
            match = re.fullmatch(r"(?:leaf-(\d{1,4})/)?spine-(\d{1,4})", name)
            leaves = range(self.num_leaves) if match and match[1] is None else [int(match[1])] if match else []
            if match is None or int(match[2]) >= self.spines or not all(leaf < self.num_leaves for leaf in leaves):
                raise refusal(
                    "no such cable", got=repr(name[:60]), remedy="leaf-0/spine-0",
                    allowed=f"leaf-L/spine-S or spine-S, L below {self.num_leaves} and S below {self.spines}",
                )  # fmt: skip
            found.update((leaf, int(match[2])) for leaf in leaves)
        return frozenset(found)


class FabricFlow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes from one host to another."""

    source: _Name  # the sending host
    destination: _Name  # the receiving host
    num_bytes: Annotated[int, Meta(ge=1, le=10**18)] = msgspec.field(name="bytes")  # how many; `bytes` in the file
    job: _Name = "job"  # flows of one job complete together
    # number of connections that share the bytes evenly; each takes one path
    connections: Annotated[int, Meta(ge=1, le=4096)] = 1


class _FlowsFile(msgspec.Struct, forbid_unknown_fields=True):
    flows: Annotated[list[FabricFlow], Meta(min_length=1, max_length=_MOST_FLOWS)]


@dataclass(frozen=True, slots=True)
class LeafFlow:
    """A connection as the path choosers see it: the ports are chosen, the spine is not."""

    source_leaf: int  # leaf of the sending port
    destination_leaf: int  # leaf of the receiving port
    size: Fraction  # bytes; exact
    # host and rail that send, for choosers that spread the connections of a port
    source_port: tuple[str, int] = ("", 0)


# The parts of one connection: the spine of each and its share of the bytes. The shares add up to 1.
Parts = list[tuple[int, Fraction]]


@dataclass(frozen=True)
class SpinePaths:
    """Paths between leaves over the spines whose two cables work."""

    fabric: Fabric
    failed: frozenset[tuple[int, int]] = frozenset()  # cables that carry nothing, as pairs of leaf and spine

    @cached_property
    def _rates(self) -> dict[tuple[int, int], Fraction]:
        rates = {
            (leaf, spine): Fraction(self.fabric.uplink_bits_per_s)
            for leaf in range(self.fabric.num_leaves)
            for spine in range(self.fabric.spines)
        }
        for name, rate in self.fabric.rates.items():
            rates.update(dict.fromkeys(self.fabric.cables([name]), Fraction(rate)))
        rates.update(dict.fromkeys(self.failed, Fraction(0)))
        return rates

    @cached_property
    def _healthy(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    @cached_property
    def are_alike(self) -> bool:
        """Whether all cables work, at one rate."""
        return len(set(self._rates.values())) == 1 and not self.failed

    def reaches(self, source_leaf: int, destination_leaf: int) -> bool:
        """Return whether a spine joins two leaves."""
        spines = range(self.fabric.spines)
        return any(self.rate(source_leaf, spine) and self.rate(destination_leaf, spine) for spine in spines)

    def rate(self, leaf: int, spine: int) -> Fraction:
        """Return the rate of a cable in bits a second; 0 where it has failed."""
        return self._rates[leaf, spine]

    def healthy(self, source_leaf: int, destination_leaf: int) -> tuple[int, ...]:
        """Return the spines that join two leaves.

        Raises:
            ValueError: None does; names the leaves.
        """
        key = source_leaf, destination_leaf
        if key not in self._healthy:
            self._healthy[key] = tuple(
                spine
                for spine in range(self.fabric.spines)
                if self.rate(source_leaf, spine) and self.rate(destination_leaf, spine)
            )
        if not self._healthy[key]:
            raise refusal(
                f"no path from leaf-{source_leaf} to leaf-{destination_leaf}", got="every spine cut off from one",
                allowed="at least one spine with both cables", remedy="fewer cables in --failed",
            )  # fmt: skip
        return self._healthy[key]


def read_fabric(path: Path) -> Fabric:
    """Read a fabric file.

    Raises:
        DataError: It cannot be read, or is no fabric; names the file and the field.
    """
    fields = read_fields(path, FABRIC_FORMAT)
    for name in ("uplink_bits_per_s", "port_bits_per_s"):
        fields[name] = _number(path, fields.get(name), parse_rate)
    if isinstance(rates := fields.get("rates"), dict):
        fields["rates"] = {name: _number(path, rate, parse_rate) for name, rate in rates.items()}
    fabric = _convert(path, fields, Fabric)
    try:
        fabric.cables(fabric.rates)
    except ValueError as error:
        raise DataError(f"{path}: rates: {error}") from error
    addresses = [address for spine in fabric.spine_addresses for address in spine]
    if len(fabric.spine_addresses) not in (0, fabric.spines) or len(set(addresses)) < len(addresses):
        raise DataError(
            f"{path}: spine_addresses: {len(fabric.spine_addresses)} lists with {len(set(addresses))} different "
            f"addresses of {len(addresses)}; expected one list for each of {fabric.spines} spines, no address twice"
        )
    return fabric


def read_flows(path: Path) -> list[FabricFlow]:
    """Read a flows file.

    Raises:
        DataError: It cannot be read, or holds no flows; names the file and the field.
    """
    fields = read_fields(path, FLOWS_FORMAT)
    listed = fields.get("flows")
    for flow in listed if isinstance(listed, list) else ():
        if isinstance(flow, dict):
            size = _number(path, flow.get("bytes"), parse_bytes)
            flow["bytes"] = int(size) if isinstance(size, float) and size == int(size) else size
    return _convert(path, fields, _FlowsFile).flows


def check_hosts(fabric: Fabric, flows: Sequence[FabricFlow]) -> None:
    """Check that every flow goes from one host of the fabric to another.

    Raises:
        ValueError: Names the host.
    """
    for flow in flows:
        for host in (flow.source, flow.destination):
            if host not in fabric.hosts:
                raise unknown_name("host of a flow", host, list(fabric.hosts)[:20])
        if flow.source == flow.destination:
            raise refusal("a flow has one host at both ends", got=repr(flow.source), allowed="two hosts",
                          remedy="to leave it out")  # fmt: skip


def read_fields(path: Path, kind: str) -> dict[str, Any]:
    """Read a JSON file of a kind; return its fields but format and version.

    Raises:
        DataError: It cannot be read, or is of another kind.
    """
    try:
        if (size := path.stat().st_size) > _MOST_FILE_BYTES:
            raise DataError(f"{path} has {size} bytes, more than {_MOST_FILE_BYTES}; is it a {kind} file?")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; examples/traffic has such files") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}; examples/traffic has such files") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != kind or fields.pop("version", None) != VERSION:
        raise DataError(f'{path} is no {kind} file: it lacks "format": "{kind}", "version": {VERSION}')
    return fields


def _number(path: Path, found: Any, parse: Any) -> Any:
    try:
        return parse(found) if isinstance(found, str) else found
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _convert(path: Path, fields: Mapping[str, Any], kind: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}") from error
