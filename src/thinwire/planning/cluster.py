"""Machines and wires of a job, and their file `cluster.json`, which people read and change.

```json
{
  "format": "thinwire-cluster",
  "version": 1,
  "replicas": [
    {"name": "attic", "flops_per_s": 2.1e13, "memory_bytes": "24 GB", "up_bits_per_s": "20mbit"},
    {"name": "office", "flops_per_s": 2.1e13, "memory_bytes": "24 GB", "up_bits_per_s": "1gbit"}
  ],
  "links": [
    {"source": "attic", "destination": "office", "bandwidth_bits_per_s": "18.6mbit", "latency_s": "21ms"},
    {"source": "office", "destination": "attic", "bandwidth_bits_per_s": "93mbit", "latency_s": "21ms"}
  ]
}
```

Every name says its unit; a number is in that unit, and a text may bring another one with it (`"5mbit"`, `"40ms"`,
`"24 GB"`).
A replica's access bounds all that it sends or receives at once; a link bounds one pair in one direction. Where a pair
has no link of its own, the two accesses make it; where neither is there, the file is refused with the pair's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import DataError
from thinwire.files import LARGEST_NUMBER, read_json, short, write_json
from thinwire.units import parse_bytes, parse_rate, parse_seconds

_Item = TypeVar("_Item", str, tuple[str, str])
_Kind = TypeVar("_Kind", "Machine", "Wire")

FORMAT, VERSION = "thinwire-cluster", 1
# A file of more is a mistake, or an attack.
_MOST_REPLICAS, _MOST_BYTES = 10_000, 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One replica's machine."""

    name: str  # as the links name it
    # floating-point operations a second that training reaches there (6 a parameter and token), measured or the
    # accelerator's peak times the share that is usual; None if unknown
    flops_per_s: float | None = None
    memory_bytes: float | None = None  # memory for parameters, optimizer and activations; None if unknown
    # bytes of float32 that it codes or decodes a second in E3M0; None if unknown
    encode_bytes_per_s: float | None = None
    # operations a second of the outer step's matrix products (IsoLoCo); None if unknown
    float64_flops_per_s: float | None = None
    up_bits_per_s: float | None = None  # what it sends at most, to all others together; None for no limit of its own
    # what it receives at most, from all others together; None for no limit of its own
    down_bits_per_s: float | None = None
    latency_s: float = 0.0  # one way from it to the middle of the net, for pairs without a link of their own
    step_s: float | None = None  # seconds of an inner step where one was measured, and of how many tokens
    step_tokens: float | None = None  # tokens of that step


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Bandwidth and latency of one pair of replicas in one direction, while no other replica sends."""

    source: str  # the sender's name
    destination: str  # the receiver's name
    bandwidth_bits_per_s: float  # payload bits a second
    latency_s: float = 0.0  # one way, of an empty message
    bandwidth_low_bits_per_s: float | None = None  # lower end of a 95 % interval, where the number was measured
    bandwidth_high_bits_per_s: float | None = None  # upper end of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines and the wires between them.

    Raises:
        ValueError: A name is there twice or unknown, or a pair has neither a link nor accesses.

    Example:
        >>> home = Machine(name="home", up_bits_per_s=20e6, down_bits_per_s=100e6, latency_s=0.01)
        >>> Cluster(machines=(home, Machine(name="lab", up_bits_per_s=1e9, down_bits_per_s=1e9))).wire("home", "lab")
        Wire(source='home', destination='lab', bandwidth_bits_per_s=20000000.0, latency_s=0.01, \
bandwidth_low_bits_per_s=None, bandwidth_high_bits_per_s=None)
    """

    machines: tuple[Machine, ...]  # in the order of the replicas' numbers
    wires: tuple[Wire, ...] = ()  # pairs with numbers of their own, each direction apart

    def __post_init__(self) -> None:
        """Check the names and that every pair has a wire."""
        names = [machine.name for machine in self.machines]
        if not names:
            raise ValueError("replicas must name at least one machine, got none")
        if (twice := _first_twice(names)) is not None:
            raise ValueError(f"every replica needs a name of its own, got {twice!r} twice; rename one")
        pairs = [(wire.source, wire.destination) for wire in self.wires]
        known = set(names)
        for source, destination in pairs:
            if missing := {source, destination} - known:
                raise ValueError(
                    f"a link names {sorted(missing)[0]!r}, which is no replica; there are {', '.join(names[:8])}"
                )
            if source == destination:
                raise ValueError(f"a link leads from {source!r} to itself; leave it out")
        if (pair := _first_twice(pairs)) is not None:
            raise ValueError(f"the link from {pair[0]!r} to {pair[1]!r} is there twice; leave one out")
        bare_up = [m.name for m in self.machines if m.up_bits_per_s is None]
        bare_down = [m.name for m in self.machines if m.down_bits_per_s is None]
        wired = set(pairs)
        for source, destination in product(bare_up, bare_down):
            if source != destination and (source, destination) not in wired:
                raise ValueError(
                    f"nothing says how fast {source!r} reaches {destination!r}; give that link, or up_bits_per_s "
                    f"of {source!r}, or down_bits_per_s of {destination!r}"
                )

    @property
    def num_replicas(self) -> int:
        """Number of machines."""
        return len(self.machines)

    def machine(self, name: str) -> Machine:
        """Return a machine by its name.

        Raises:
            ValueError: There is none.
        """
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise ValueError(f"there is no replica {name!r}; there are {', '.join(m.name for m in self.machines[:8])}")

    def wire(self, source: str, destination: str) -> Wire:
        """Return what a pair has in one direction: its own link, or what the two accesses leave."""
        for wire in self.wires:
            if (wire.source, wire.destination) == (source, destination):
                return wire
        one, other = self.machine(source), self.machine(destination)
        rates = [rate for rate in (one.up_bits_per_s, other.down_bits_per_s) if rate is not None]
        return Wire(
            source=source, destination=destination, bandwidth_bits_per_s=min(rates),
            latency_s=one.latency_s + other.latency_s,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the file's content; what is unknown is left out."""
        return {
            "format": FORMAT, "version": VERSION,
            "replicas": [_entry(machine) for machine in self.machines],
            "links": [_entry(wire) for wire in self.wires],
        }  # fmt: skip

    @staticmethod
    def from_json(content: object) -> Cluster:
        """Check a file's content and return the cluster.

        Raises:
            DataError: It is no cluster; names the place, the value and the remedy.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f'this is no cluster: it must be an object with "format": "{FORMAT}"')
        if content.get("version") != VERSION:
            raise DataError(f"the cluster has version {short(content.get('version'))}; this thinwire reads {VERSION}")
        _check_keys(content, allowed=("format", "version", "replicas", "links", "note"), where="the cluster")
        machines = [read_entry(entry, Machine, f"replicas[{n}]") for n, entry in _entries(content, "replicas")]
        wires = [read_entry(entry, Wire, f"links[{n}]") for n, entry in _entries(content, "links")]
        try:
            return Cluster(machines=tuple(machines), wires=tuple(wires))
        except ValueError as error:
            raise DataError(str(error)) from error


def load_cluster(path: Path) -> Cluster:
    """Read `cluster.json`.

    Raises:
        DataError: There is no such file, or it is no cluster.
    """
    content = read_json(path, most_bytes=_MOST_BYTES, command="thinwire probe")
    try:
        return Cluster.from_json(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write `cluster.json`, whole or not at all.

    Raises:
        OSError: The place cannot be written.
    """
    write_json(path, cluster.to_json())


# How a field's text is read, and whether zero is a number it can have.
_UNITS: Mapping[str, Callable[[str], float]] = {"bits_per_s": parse_rate, "bytes": parse_bytes, "s": parse_seconds}
_MAY_BE_ZERO = ("latency_s",)


def _entries(content: Mapping[str, Any], key: str) -> Iterator[tuple[int, Any]]:
    found = content.get(key, [])
    most = _MOST_REPLICAS if key == "replicas" else _MOST_REPLICAS**2
    if not isinstance(found, list) or len(found) > most:
        raise DataError(f'"{key}" must be a list of at most {most} entries, got {short(found)}')
    yield from enumerate(found)


def read_entry(entry: object, kind: type[_Kind], where: str) -> _Kind:
    """Check the description of a machine or a wire, called `where` in an error's text.

    Raises:
        DataError: It is none.
    """
    if not isinstance(entry, dict):
        raise DataError(f"{where} must be an object, got {short(entry)}")
    allowed = [field.name for field in fields(kind)]
    _check_keys(entry, allowed=allowed, where=where)
    names = ("name",) if kind is Machine else ("source", "destination", "bandwidth_bits_per_s")
    if missing := [name for name in names if name not in entry]:
        raise DataError(f"{where} lacks {missing[0]!r}")
    values: dict[str, Any] = {}
    for name, found in entry.items():
        if name not in ("name", "source", "destination"):
            values[name] = _number(found, name, where)
        elif not isinstance(found, str) or not found or len(found) > 200:
            raise DataError(f"{where}.{name} must be a text of 1 to 200 characters, got {short(found)}")
        else:
            values[name] = found
    return kind(**values)


def _check_keys(entry: Mapping[str, Any], *, allowed: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in allowed:
            stem = key.split("_")[0]
            near = [name for name in allowed if name.startswith(stem)]
            hint = f"; use {' or '.join(near)}" if near else f"; there are {', '.join(allowed)}"
            raise DataError(f"{where} has {short(key)}, which means nothing here{hint}")


def _number(found: object, name: str, where: str) -> float:
    value: object = found
    if isinstance(found, str):
        unit = next((suffix for suffix in ("bits_per_s", "bytes", "_s") if name.endswith(suffix)), "")
        read = _UNITS.get(unit.lstrip("_"))
        if read is None or name.endswith(("flops_per_s", "bytes_per_s")):
            raise DataError(f"{where}.{name} must be a number, got {short(found)}")
        try:
            value = read(found)
        except ValueError as error:
            raise DataError(f"{where}.{name}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise DataError(f"{where}.{name} must be a finite number, got {short(found)}")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
        raise DataError(f"{where}.{name} must be {least}, got {short(found)}")
    return float(value)


def _entry(value: Machine | Wire) -> dict[str, Any]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: item for name, item in found.items() if item is not None}


def _first_twice(items: Sequence[_Item]) -> _Item | None:
    seen: set[_Item] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None
