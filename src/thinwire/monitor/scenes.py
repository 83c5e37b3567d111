"""Scenes: jobs to rehearse, with the faults that one asks for; `thinwire.monitor.synthetic_jobs` plays them.

Ranks compute and exchange in rounds, in virtual seconds, on hosts whose clocks show different times and drift apart.
Times vary as on cores that are shared. The same scene gives the same records.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from thinwire.monitor.findings import Place

FaultKind = Literal[
    "slow link", "slow work", "growing work", "paused", "killed", "black hole", "flapping",
    "skipped", "wrong shape", "stalls",
]  # fmt: skip
Pattern = Literal["all_gather", "two_phase", "ring", "rotating_ring", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: What.
        place: Where: links, ends or hosts for wires, ranks or hosts for work and processes.
        begin: The first round with it.
        severity: How many times as long things take.
        period: Rounds between stalls.
        end: The first round without it.
    """

    kind: FaultKind
    place: Place
    begin: int
    severity: float = 1.0
    period: int = 6
    end: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How times vary.

    Attributes:
        sigma: Of the logarithm of every time.
        spikes: Share of times that are much longer.
        tail: Exponent of how much longer: the smaller, the longer.
        bursts: Share of rounds in which other load comes to a host, for one or two rounds.
        unevenness: Links differ by up to this factor.
    """

    sigma: float = 0.1
    spikes: float = 0.0
    tail: float = 1.5
    bursts: float = 0.0
    unevenness: float = 1.5


NOISES: dict[str, Noise] = {
    "calm": Noise(sigma=0.04),
    "shared": Noise(sigma=0.12, spikes=0.02),
    "heavy": Noise(sigma=0.2, spikes=0.05, tail=1.2),
    "bursts": Noise(sigma=0.12, spikes=0.02, bursts=0.02, unevenness=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A job to rehearse.

    Attributes:
        hosts: The host of each rank.
        pattern: How ranks exchange; `torch` is a collective whose messages nobody records.
        rounds: How many.
        seed: For all that is drawn.
        noise: How times vary.
        faults: What goes wrong.
        compute_s: Usual seconds of work in a round.
        message_s: Usual seconds of a message between hosts.
        watched_s: Seconds that records go on after the job stands still.
    """

    hosts: tuple[str, ...]
    pattern: Pattern = "all_gather"
    rounds: int = 60
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    faults: tuple[Fault, ...] = ()
    compute_s: float = 0.2
    message_s: float = 0.05
    watched_s: float = 5.0

    def orders(self) -> list[list[int]]:
        """Return the orders in which ranks stand in a ring, by turns where it rotates."""
        draw = random.Random(self.seed + 1)
        first, other = (draw.sample(range(len(self.hosts)), len(self.hosts)) for _ in range(2))
        # back and forth, so that clocks are bounded from both sides
        return [first, first[::-1], other] if self.pattern == "rotating_ring" else [first]

    def uses(self, place: Place) -> bool:
        """Return whether messages take the way that a fault of wires is on, in both directions where it has two."""
        ranks = range(len(self.hosts))
        pairs = [(i, j) for i in ranks for j in ranks if i != j]
        if self.pattern in ("ring", "rotating_ring", "torch"):
            pairs = [(order[i - 1], order[i]) for order in self.orders() for i in ranks]
        hit = {pair for pair in pairs if affects(place, *pair, self.hosts)}
        is_both = any((destination, source) in hit for source, destination in hit)
        return bool(hit) and (is_both or not place.kind.endswith("both ways"))


def affects(place: Place, source: int, destination: int, hosts: tuple[str, ...]) -> bool:
    """Return whether a fault of wires at `place` is on the way from one rank to another."""
    pair, sites = (source, destination), (hosts[source], hosts[destination])
    if place.kind in ("link", "host link"):
        return pair == place.ranks or sites == place.hosts
    if place.kind in ("link both ways", "host link both ways"):
        return {*pair} == {*place.ranks} or {*sites} == {*place.hosts}
    if place.kind == "sender":
        return source in place.ranks
    if place.kind == "receiver":
        return destination in place.ranks
    is_between = sites[0] != sites[1]
    if place.kind == "host sender":
        return is_between and sites[0] in place.hosts
    if place.kind == "host receiver":
        return is_between and sites[1] in place.hosts
    return bool({*pair} & {*place.ranks}) or (is_between and bool({*sites} & {*place.hosts}))
