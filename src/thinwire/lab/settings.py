"""Settings of a lab: the hosts' accesses, and the links between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from thinwire.errors import refusal
from thinwire.units import parse_rate, parse_seconds

MAX_HOSTS = 200
MAX_SWITCHES = 32
MAX_RAILS = 2
SLOWEST_BITS_PER_S = 8_000.0
FASTEST_BITS_PER_S = 32e9
LONGEST_S = 60.0
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access of one host to the network.

    Attributes:
        up_bits_per_s: What it can send, headers of the link layer included; None is no limit.
        down_bits_per_s: What it can receive; None is no limit.
        is_cut: Whether its cable is pulled: all packets are lost silently.
    """

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None
    is_cut: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        for rate in (self.up_bits_per_s, self.down_bits_per_s):
            _check_rate(rate)

    @property
    def is_limited(self) -> bool:
        """Whether a rate limits it."""
        return self.up_bits_per_s is not None or self.down_bits_per_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between two hosts, one way.

    Attributes:
        rate_bits_per_s: Its own limit, beside those of the hosts' accesses; None is no limit.
        latency_s: Time that a packet needs one way; ping shows the sum of both ways.
        jitter_s: The latency varies evenly within plus or minus this; packets keep their order.
        loss: Probability that a packet is lost, in [0, 1).
        is_cut: Whether every packet is lost.
    """

    rate_bits_per_s: float | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_rate(self.rate_bits_per_s)
        for name, value in (("latency", self.latency_s), ("jitter", self.jitter_s)):
            if not 0 <= value <= LONGEST_S:
                raise refusal(f"the {name} is out of range", got=f"{value:g}s", allowed=f"0s to {LONGEST_S:g}s",
                              remedy="40ms")  # fmt: skip
        if self.jitter_s > self.latency_s:
            raise refusal(
                "the jitter exceeds the latency, so packets would arrive before they were sent",
                got=f"{self.jitter_s:g}s", allowed=f"0s to the latency of {self.latency_s:g}s",
                remedy="a smaller jitter, or a longer latency",
            )  # fmt: skip
        if not 0 <= self.loss < 1:
            raise refusal("the loss is no share of the packets", got=f"{self.loss:g}", allowed="0% to below 100%",
                          remedy="0.1%, or a link that is cut")  # fmt: skip

    @property
    def is_delayed(self) -> bool:
        """Whether packets need time, or get lost by chance."""
        return self.latency_s > 0 or self.loss > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricShape:
    """Leaves and spines between the hosts of a lab.

    Attributes:
        leaves: Number of leaves; the hosts are dealt to them in equal parts.
        spines: Number of spines, each with a cable to each leaf.
        uplink_bits_per_s: Rate of each cable, each way; None is no limit.
        cut: Cables that are pulled, as pairs of leaf and spine.
        silent: Cables that lose every packet while routes still lead there, as a faulty switch does.
        rails: Ports of each host, 1 or 2; the second one is on the next leaf.
    """

    leaves: int
    spines: int
    uplink_bits_per_s: float | None = None
    cut: frozenset[Pair] = frozenset()
    silent: frozenset[Pair] = frozenset()
    rails: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (1 <= self.leaves <= MAX_SWITCHES and 1 <= self.spines <= MAX_SWITCHES):
            raise refusal("the fabric is out of range", got=f"{self.leaves}x{self.spines}",
                          allowed=f"1x1 to {MAX_SWITCHES}x{MAX_SWITCHES}", remedy="2x4")  # fmt: skip
        if not 1 <= self.rails <= MAX_RAILS:
            raise refusal("a host of the lab has no so many rails", got=self.rails, allowed=f"1 to {MAX_RAILS}",
                          remedy="--rails 2")  # fmt: skip
        _check_rate(self.uplink_bits_per_s)
        for leaf, spine in self.cut | self.silent:
            if not (0 <= leaf < self.leaves and 0 <= spine < self.spines):
                raise refusal("this fabric has no such cable", got=f"leaf {leaf}, spine {spine}",
                              allowed=f"leaf below {self.leaves}, spine below {self.spines}",
                              remedy="leaf 0, spine 0")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSettings:
    """A whole lab.

    Attributes:
        accesses: One a host.
        link: Between any two hosts that `links` does not name.
        links: By (source, destination), each one way.
        seed: Of losses and jitter.
        fabric: Leaves and spines between the hosts; None for one switch.
    """

    accesses: tuple[Access, ...]
    link: Link = field(default_factory=Link)
    links: Mapping[Pair, Link] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    fabric: FabricShape | None = None

    def __post_init__(self) -> None:
        """Check the numbers of hosts."""
        if self.fabric is not None and (self.is_delayed or self.num_hosts < self.fabric.leaves):
            raise refusal("this fabric cannot be made", got=f"{self.num_hosts} hosts, or delays",
                          allowed="a host a leaf or more, without latency and loss", remedy="--hosts 4")  # fmt: skip
        if self.fabric is not None and self.fabric.rails > 1 and any(one.is_limited for one in self.accesses):
            raise refusal("hosts with two rails have no limited access", got="--rate or --host", allowed="no limit",
                          remedy="--uplink-rate, which limits the cables of the fabric")  # fmt: skip
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise _wrong_count(self.num_hosts)
        for source, destination in self.links:
            self.check_host(source)
            self.check_host(destination)
            if source == destination:
                raise refusal("a link joins a host to itself", got=f"{source}-{destination}",
                              allowed="two different hosts", remedy="0-1=1mbit")  # fmt: skip

    @classmethod
    def alike(cls, num_hosts: int, access: Access, **others: Any) -> LabSettings:
        """Return a lab whose hosts all have the same access.

        Args:
            num_hosts: How many.
            access: Theirs.
            others: Further fields.

        Raises:
            ValueError: There are too many hosts, or none.
        """
        if num_hosts < 1:
            raise _wrong_count(num_hosts)
        return cls(accesses=(access,) * num_hosts, **others)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.accesses)

    @property
    def is_delayed(self) -> bool:
        """Whether any packet needs time, or gets lost by chance."""
        return self.link.is_delayed or any(link.is_delayed for link in self.links.values())

    def between(self, source: int, destination: int) -> Link:
        """Return what lies between two hosts, one way."""
        return self.links.get((source, destination), self.link)

    def check_host(self, host: int) -> None:
        """Refuse a number that no host has.

        Raises:
            ValueError: Names the number and those that exist.
        """
        if not 0 <= host < self.num_hosts:
            raise refusal("this lab has no such host", got=host, allowed=f"0 to {self.num_hosts - 1}",
                          remedy="one of them, or a larger --hosts")  # fmt: skip

    def with_access(self, host: int, access: Access) -> LabSettings:
        """Return the lab with another access for one host."""
        self.check_host(host)
        accesses = (*self.accesses[:host], access, *self.accesses[host + 1 :])
        return replace(self, accesses=accesses)

    def with_link(self, source: int, destination: int, link: Link) -> LabSettings:
        """Return the lab with something else between two hosts, one way."""
        return replace(self, links=MappingProxyType({**self.links, (source, destination): link}))

    def to_json(self) -> dict[str, Any]:
        """Write the settings as plain values; `from_json` reads them."""
        return {
            "accesses": [_fields(access) for access in self.accesses],
            "link": _fields(self.link),
            "links": [[*pair, _fields(link)] for pair, link in sorted(self.links.items())],
            "seed": self.seed,
            "fabric": None
            if self.fabric is None
            else {
                **_fields(self.fabric),
                "cut": sorted(self.fabric.cut),
                "silent": sorted(self.fabric.silent),
            },
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LabSettings:
        """Read what `to_json` wrote."""
        return cls(
            accesses=tuple(Access(**access) for access in values["accesses"]),
            link=Link(**values["link"]),
            links=MappingProxyType({(source, to): Link(**link) for source, to, link in values["links"]}),
            seed=values["seed"],
            fabric=_fabric(values.get("fabric")),
        )


def parse_access(text: str) -> Access:
    """Read `5mbit` (both ways) or `50mbit/10mbit` (down and up, the order in which providers write it).

    Raises:
        ValueError: It is neither, or out of range.

    Example:
        >>> parse_access("50mbit/10mbit").up_bits_per_s
        10000000.0
    """
    down, slash, up = text.partition("/")
    down_bits_per_s = parse_rate(down)
    return Access(down_bits_per_s=down_bits_per_s, up_bits_per_s=parse_rate(up) if slash else down_bits_per_s)


def parse_host(text: str) -> tuple[int, Access]:
    """Read `1=50mbit/10mbit`: a host's number and its access.

    Raises:
        ValueError: It is not of that form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*=(.+)", text)
    if match is None:
        raise refusal("a host's access cannot be read", got=repr(text), allowed="HOST=RATE or HOST=DOWN/UP",
                      remedy="--host 1=50mbit/10mbit")  # fmt: skip
    return int(match.group(1)), parse_access(match.group(2))


def parse_link(text: str, *, base: Link) -> dict[Pair, Link]:
    """Read `0-1=1mbit`, `0-1=20mbit,40ms,5ms,0.1%` or, one way only, `0>1=1mbit`.

    Args:
        text: Hosts, then a rate, a latency, a jitter and a loss; each may be left out, a second time is the jitter.
        base: What holds for what is left out.

    Raises:
        ValueError: It is not of that form.

    Example:
        >>> sorted(parse_link("0-1=1mbit", base=Link()))
        [(0, 1), (1, 0)]
    """
    match = re.fullmatch(r"\s*(\d+)\s*([->])\s*(\d+)\s*=(.+)", text)
    if match is None:
        raise refusal(
            "a link cannot be read", got=repr(text),
            allowed="HOST-HOST or HOST>HOST, = and a rate, latency, jitter, loss",
            remedy="--link 0-1=20mbit,40ms,5ms,0.1%",
        )  # fmt: skip
    source, destination = int(match.group(1)), int(match.group(3))
    values: dict[str, Any] = {}
    for part in match.group(4).split(","):
        values.update(_link_part(part.strip(), has_latency="latency_s" in values))
    link = replace(base, **values)
    pairs = [(source, destination)] if match.group(2) == ">" else [(source, destination), (destination, source)]
    return dict.fromkeys(pairs, link)


def parse_loss(text: str) -> float:
    """Read `0.1%` or `0.001` as a probability.

    Raises:
        ValueError: It is neither.

    Example:
        >>> parse_loss("0.1%")
        0.001
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*", text)
    if match is None:
        raise refusal("the loss cannot be read", got=repr(text), allowed="0% to below 100%, or 0 to below 1",
                      remedy="0.1%")  # fmt: skip
    return float(match.group(1)) / (100 if match.group(2) else 1)


def _link_part(part: str, *, has_latency: bool) -> dict[str, Any]:
    if part == "cut":
        return {"is_cut": True}
    if part.endswith("%"):
        return {"loss": parse_loss(part)}
    if re.search(r"[0-9.]\s*(us|ms|s|min|h)$", part.lower()):
        return {"jitter_s" if has_latency else "latency_s": parse_seconds(part)}
    return {"rate_bits_per_s": parse_rate(part)}


def _wrong_count(num_hosts: int) -> ValueError:
    return refusal(
        "the number of hosts is out of range", got=num_hosts, allowed=f"1 to {MAX_HOSTS}", remedy="--hosts 2"
    )


def parse_fabric(text: str, *, uplink_bits_per_s: float | None, rails: int = 1) -> FabricShape:
    """Read `2x4`: leaves and spines.

    Raises:
        ValueError: It is not of that form, or out of range.

    Example:
        >>> parse_fabric("2x4", uplink_bits_per_s=1e7).spines
        4
    """
    match = re.fullmatch(r"\s*(\d{1,3})\s*x\s*(\d{1,3})\s*", text)
    if match is None:
        raise refusal("the fabric cannot be read", got=repr(text), allowed="LEAVESxSPINES", remedy="--fabric 2x4")
    return FabricShape(leaves=int(match[1]), spines=int(match[2]), uplink_bits_per_s=uplink_bits_per_s, rails=rails)


def _fabric(values: Mapping[str, Any] | None) -> FabricShape | None:
    if values is None:
        return None
    cables = {name: frozenset((leaf, spine) for leaf, spine in values[name]) for name in ("cut", "silent")}
    return FabricShape(**{**values, **cables})


def _fields(value: Access | Link | FabricShape) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _check_rate(rate: float | None) -> None:
    if rate is not None and not (math.isfinite(rate) and SLOWEST_BITS_PER_S <= rate <= FASTEST_BITS_PER_S):
        raise refusal("the rate is out of range", got=f"{rate:g} bit/s", allowed="8kbit to 32gbit, or no limit",
                      remedy="5mbit")  # fmt: skip
