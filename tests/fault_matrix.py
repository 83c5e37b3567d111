"""Fault matrix: scenes of all faults, severities and patterns, and a comparison of findings with the faults.

Results are of synthetic jobs: they show that the detectors agree with each other, not their accuracy on a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.synthetic_jobs import NOISES, FaultKind, InjectedFault, Pattern, Scene
from thinwire.monitor.findings import Finding, Kind, Place

Verdict = Literal["right", "ambiguous", "wrong place", "wrong kind", "missed"]

SHAPES: tuple[tuple[str, ...], ...] = (
    ("a", "b", "c"),
    ("a", "b", "c", "d"),
    ("a", "a", "b", "b"),
    ("a", "a", "b", "c"),
    ("a", "a", "b", "b", "c", "c"),
    ("a", "a", "b", "b", "c", "c", "d", "d"),
)
PATTERNS: tuple[Pattern, ...] = ("all_gather", "two_phase", "rotating_ring")
LINK_KINDS = ("link", "link both ways", "sender", "receiver", "host")
_ROUNDS_BEFORE = 32
_ROUNDS_AFTER = 24
# In a ring that turns each link is seen in every third round only.
_RING_ROUNDS_BEFORE = 72
_RING_ROUNDS_AFTER = 48
_MOST_RING = 6

_EXPECTED: dict[FaultKind, tuple[Kind, ...]] = {
    "slow link": ("communication slow",),
    "slow work": ("non-communication slow",),
    "growing work": ("slowing compute", "non-communication slow"),
    "paused": ("non-communication hang",),
    "killed": ("non-communication hang",),
    "black hole": ("communication hang",),
    "flapping": ("flapping link",),
    "skipped": ("desync",),
    "wrong shape": ("desync",),
    "stalls": ("periodic stall",),
}
_OF_WIRES = ("communication slow", "communication hang", "flapping link")
HANGS: tuple[FaultKind, ...] = ("paused", "killed", "black hole", "skipped", "wrong shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """Diagnosis of one fault.

    Attributes:
        fault: Injected fault.
        verdict: `ambiguous` is right: the place is among those that the records cannot tell apart.
        rounds: Rounds from the fault to the evidence; -1 if unknown.
    """

    fault: InjectedFault
    verdict: Verdict
    rounds: int = -1


def compare(scene: Scene, findings: Sequence[Finding]) -> tuple[list[FaultResult], list[Finding]]:
    """Return the result for each fault, and the findings that belong to none."""
    left = list(findings)
    judgements = []
    for fault in scene.faults:
        alike = [finding for finding in left if finding.kind in _EXPECTED[fault.kind]]
        exact = [finding for finding in alike if finding.places == (fault.place,)]
        among = [finding for finding in alike if fault.place in finding.places]
        verdict: Verdict = "right" if exact else "ambiguous" if among else "wrong place" if alike else "missed"
        chosen = next(iter(exact or among or alike), None)
        if chosen is None and left:
            verdict = "wrong kind"
        if chosen is not None:
            left.remove(chosen)
        rounds = chosen.seen_round - fault.begin if chosen is not None and chosen.seen_round >= 0 else -1
        judgements.append(FaultResult(fault=fault, verdict=verdict, rounds=rounds))
    return judgements, left


def scenes(*, seed: int, per_cell: int = 1, severities: Sequence[float] = (1.5, 3.0, 6.0, 20.0)) -> Iterator[Scene]:
    """Yield scenes with one fault each: every kind of fault and place, at every severity.

    Args:
        seed: Of all random choices.
        per_cell: Scenes of each kind, place and severity.
        severities: Of faults that have one.
    """
    draw = random.Random(seed)
    for _ in range(per_cell):
        for severity in severities:
            for kind in LINK_KINDS:
                yield wire_scene(draw, "slow link", kind, severity)
            yield work_scene(draw, "slow work", severity, whole_host=False)
            yield work_scene(draw, "slow work", severity, whole_host=True)
            if severity >= 3.0:
                yield wire_scene(draw, "flapping", draw.choice(("link", "link both ways")), severity)
                yield work_scene(draw, "stalls", severity, whole_host=False)
                yield work_scene(draw, "growing work", severity, whole_host=False)
        for _ in range(2):  # a connection whose one way is cut carries nothing the other way either
            yield wire_scene(draw, "black hole", "link both ways", 1.0)
        hangs: tuple[FaultKind, ...] = ("paused", "killed", "skipped", "wrong shape")
        for fault in hangs:
            yield work_scene(draw, fault, 1.0, whole_host=False)


def pairs_of_faults(*, seed: int, count: int) -> Iterator[Scene]:
    """Yield scenes with a slow wire and a slow rank at once, at three times and more."""
    draw = random.Random(seed)
    for _ in range(count):
        wire = wire_scene(draw, "slow link", draw.choice(LINK_KINDS[:3]), draw.choice((3.0, 6.0, 20.0)))
        rank = draw.randrange(len(wire.hosts))
        work = InjectedFault(
            kind="slow work", place=Place(kind="rank", ranks=(rank,)), begin=_before(wire.pattern) + draw.randrange(8),
            severity=draw.choice((3.0, 6.0)),
        )  # fmt: skip
        yield _scene(draw, wire.hosts, wire.pattern, (*wire.faults, work))


def clean_scenes(*, seed: int, rounds: int) -> Iterator[Scene]:
    """Yield scenes without faults, each as long as this many rounds in all, with every noise."""
    draw = random.Random(seed)
    for noise in NOISES.values():
        shape, pattern = _shape(draw, (*PATTERNS, "torch"))
        yield Scene(hosts=shape, pattern=pattern, rounds=rounds, seed=draw.randrange(1 << 30), noise=noise)


def wire_scene(
    draw: random.Random, fault: FaultKind, kind: str, severity: float, *, patterns: Sequence[Pattern] = PATTERNS
) -> Scene:
    """Return a scene with a fault of the wires."""
    hosts, pattern = _shape(draw, patterns)
    place = _wire_place(draw, hosts, kind)
    begin = _before(pattern) + draw.randrange(8)
    return _scene(draw, hosts, pattern, (InjectedFault(kind=fault, place=place, begin=begin, severity=severity),))


def work_scene(draw: random.Random, fault: FaultKind, severity: float, *, whole_host: bool) -> Scene:
    """Return a scene with a fault of ranks."""
    hosts, pattern = _shape(draw, (*PATTERNS, "torch"))
    shared = sorted({host for host in hosts if hosts.count(host) > 1})
    if whole_host and shared:
        place = Place(kind="host", hosts=(draw.choice(shared),))
    else:
        place = Place(kind="rank", ranks=(draw.randrange(len(hosts)),))
    begin = _before(pattern) + draw.randrange(8)
    made = InjectedFault(kind=fault, place=place, begin=begin, severity=severity, period=draw.randrange(5, 10))
    return _scene(draw, hosts, pattern, (made,))


def _shape(draw: random.Random, patterns: Sequence[Pattern]) -> tuple[tuple[str, ...], Pattern]:
    pattern = draw.choice(patterns)
    most = _MOST_RING if pattern == "rotating_ring" else max(map(len, SHAPES))
    return draw.choice([shape for shape in SHAPES if len(shape) <= most]), pattern


def _before(pattern: Pattern) -> int:
    return _RING_ROUNDS_BEFORE if pattern == "rotating_ring" else _ROUNDS_BEFORE


def _scene(draw: random.Random, hosts: tuple[str, ...], pattern: Pattern, faults: tuple[InjectedFault, ...]) -> Scene:
    long = any(fault.kind in ("flapping", "stalls", "growing work") for fault in faults)
    weak = any(fault.severity < 3.0 for fault in faults)
    name = draw.choice(tuple(NOISES))
    # a hang is found after 1.5 times the longest operation, which takes up to 8 s under these noises
    watched_s = 12.0 if name in ("heavy", "bursts") else 5.0
    after = _RING_ROUNDS_AFTER if pattern == "rotating_ring" else _ROUNDS_AFTER
    rounds = _before(pattern) + 8 + after * (2 if long or weak else 1)
    name = draw.choice(tuple(NOISES))
    # a hang is found after 1.5 times the longest operation, which takes up to 8 s under these noises
    watched_s = 12.0 if name in ("heavy", "bursts") else 5.0
    while True:
        scene = Scene(
            hosts=hosts, pattern=pattern, rounds=rounds, seed=draw.randrange(1 << 30), noise=NOISES[name],
            faults=faults, watched_s=watched_s,
        )  # fmt: skip
        wires = [fault.place for fault in faults if _EXPECTED[fault.kind][0] in _OF_WIRES]
        if all(map(scene.uses, wires)):  # a ring may never take the way that is broken
            return scene


def _wire_place(draw: random.Random, hosts: tuple[str, ...], kind: str) -> Place:
    """Draw a place between hosts, by the name that it has there: hosts of one rank are called by their rank."""
    alone = len(set(hosts)) == len(hosts)
    one, other = draw.sample(sorted(set(hosts)), 2)
    source, destination = hosts.index(one), hosts.index(other)
    if kind == "link":
        return Place(kind="link", ranks=(source, destination)) if alone else _between(hosts, one, other)
    if kind == "link both ways":
        low, high = sorted((source, destination))
        first, second = sorted((one, other))
        is_pair = hosts.count(one) == hosts.count(other) == 1
        return (
            Place(kind="link both ways", ranks=(low, high))
            if is_pair
            else Place(kind="host link both ways", hosts=(first, second))
        )
    if kind == "sender":
        return Place(kind="sender", ranks=(source,))
    return Place(kind="receiver", ranks=(destination,)) if kind == "receiver" else Place(kind="host", hosts=(one,))


def _between(hosts: tuple[str, ...], one: str, other: str) -> Place:
    if hosts.count(one) == hosts.count(other) == 1:
        return Place(kind="link", ranks=(hosts.index(one), hosts.index(other)))
    return Place(kind="host link", hosts=(one, other))
