"""Faults of the long lab runs: how they are struck and taken back, and which findings are right about them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.lab import Lab
from thinwire.monitor.findings import Finding, Place

RATE = 100
STEP_S = 0.06
STALL_EVERY = 8
SLOW = ("slow link", "slow link one way", "slow sender", "slow receiver", "slow host", "slow work")
# How long each is left there at most, in seconds.
LASTS_S = {"flapping": 24.0, "stalls": 18.0, "black hole": 9.0, "half-open": 9.0, "paused": 8.0}
# What stalls for twenty times as long comes back as often only in twice the time.
LONG_STALLS_S = 36.0
KINDS = {
    "paused": ("non-communication hang",), "black hole": ("communication hang",), "half-open": ("communication hang",),
    **dict.fromkeys(SLOW[:5], ("communication slow",)), "slow work": ("non-communication slow",),
    "slow cpu": ("non-communication slow", "slowing compute"), "stalls": ("periodic stall",),
    "flapping": ("flapping link",),
}  # fmt: skip
MARKS = ("right", "ambiguous", "wider place", "wrong place", "wrong kind", "missed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One fault.

    Attributes:
        fault: What breaks.
        victim: The host that breaks, or a link's source.
        other: A link's destination.
        severity: How many times as slow.
    """

    fault: str
    victim: int
    other: int
    severity: float


def deck(seed: int) -> list[tuple[str, float]]:
    """Return faults and severities in a drawn order; `two at once` stands for two slow ones."""
    cards = [
        *itertools.product(SLOW, (1.5, 3.0, 5.0, 20.0)), ("slow cpu", 5.0), ("slow cpu", 20.0),
        *itertools.product(("stalls",), (3.0, 5.0, 20.0)), ("flapping", 5.0), ("flapping", 20.0),
        *[("black hole", 0.0), ("half-open", 0.0)] * 2, *[("paused", 0.0)] * 3,
        *itertools.product(("two at once",), (3.0, 5.0, 20.0)), *itertools.product(("two at once",), (3.0, 5.0)),
    ]  # fmt: skip
    random.Random(f"deck {seed}").shuffle(cards)
    return cards


def deal(seed: int, number: int, hosts: int, count: int) -> list[list[Part]]:
    """Return the scenarios of a job: its share of the deck, with victims drawn."""
    draw = random.Random(f"{seed}/{number}/{hosts}")
    cards = itertools.islice(itertools.cycle(deck(seed)), number * count, (number + 1) * count)
    return [_parts(fault, severity, hosts, draw) for fault, severity in cards]


def _parts(fault: str, severity: float, hosts: int, draw: random.Random) -> list[Part]:
    victim, other, third = draw.sample(range(hosts), 3)
    if fault != "two at once":
        return [Part(fault=fault, victim=victim, other=other, severity=severity)]
    first, second = draw.sample(("slow link", "slow sender", "slow host", "slow work"), 2)
    if hosts == 3 and first == "slow link":  # of three hosts one is left that is no end of the link
        other = next(host for host in range(3) if host not in (victim, third))
    others = [host for host in range(hosts) if host not in (victim, third)]
    return [
        Part(fault=first, victim=victim, other=other, severity=severity),
        Part(fault=second, victim=third, other=draw.choice(others), severity=severity),
    ]


def lasts_s(part: Part, usual_s: float) -> float:
    """Return for how long a fault is left there at least, if it is not told rightly before."""
    if part.fault == "stalls" and part.severity > 10:
        return LONG_STALLS_S
    return LASTS_S.get(part.fault, usual_s)


class Strikes:
    """Strikes faults in a lab whose hosts train, and takes them back.

    Args:
        lab: The lab.
        steps: The file of each host that its steps' times stand in.
        marks: What the command line of each host's process holds and no other's does.
    """

    def __init__(self, lab: Lab, steps: list[Path], marks: list[Path]) -> None:
        self._lab, self._steps, self._marks = lab, steps, marks
        self._whole = lab.settings
        self._is_down: dict[Part, bool] = {}
        self._group = Path(f"/sys/fs/cgroup/cpu/thinwire-lab-{os.getpid()}")

    def strike(self, part: Part) -> None:
        """Break it."""
        lab, victim = self._lab, part.victim
        if part.fault == "paused":
            lab.stop_host(victim)
        elif part.fault == "black hole":
            lab.cut(victim, part.other)
        elif part.fault == "half-open":
            link = replace(lab.settings.between(victim, part.other), is_cut=True)
            lab.shape(lab.settings.with_link(victim, part.other, link))
        elif part.fault in ("slow link", "slow link one way"):
            self._slow_link(part)
        elif part.fault in ("slow sender", "slow receiver", "slow host"):
            down, up = (
                f"{RATE / part.severity if part.fault in (only, 'slow host') else RATE:g}mbit"
                for only in ("slow receiver", "slow sender")
            )
            lab.set_rate(victim, f"{down}/{up}")
        elif part.fault == "slow work":
            self.set_step(victim, times=part.severity)
        elif part.fault == "stalls":
            self.set_step(victim, every=STALL_EVERY, longer=part.severity)
        elif part.fault == "slow cpu":
            self._throttle(part)

    def tick(self, part: Part, after_s: float) -> None:
        """Let a fault that comes and goes do so: down in one second of three."""
        is_down = after_s % 3.0 < 1.0
        if part.fault == "flapping" and is_down != self._is_down.get(part, False):
            self._is_down[part] = is_down
            self._slow_link(part) if is_down else self._lab.shape(self._whole)

    def heal(self, parts: Collection[Part]) -> None:
        """Take everything back."""
        self._is_down.clear()
        for part in parts:
            if part.fault == "paused":
                self._lab.continue_host(part.victim)
            elif part.fault in ("slow work", "stalls"):
                self.set_step(part.victim)
            elif part.fault == "slow cpu":
                self._free()
        if self._lab.settings != self._whole:
            self._lab.shape(self._whole)

    def set_step(self, host: int, *, times: float = 1.0, every: int = 0, longer: float = 1.0) -> None:
        """Say how long a host's steps take."""
        fresh = self._steps[host].with_suffix(".new")
        fresh.write_text(f"{STEP_S} {times} {every} {longer}")
        fresh.replace(self._steps[host])

    def _slow_link(self, part: Part) -> None:
        # what a host can send goes to all its peers: a link of its own rate is slower than its share of that
        rate = 1e6 * RATE / (self._lab.num_hosts - 1) / part.severity
        settings = self._lab.settings
        pairs = [(part.victim, part.other), (part.other, part.victim)]
        for pair in pairs[:1] if part.fault == "slow link one way" else pairs:
            settings = settings.with_link(*pair, replace(settings.between(*pair), rate_bits_per_s=rate))
        self._lab.shape(settings)

    def _throttle(self, part: Part) -> None:
        """Give a host's process a share of a core: two fifths by the severity."""
        self._group.mkdir(exist_ok=True)
        (self._group / "cpu.cfs_period_us").write_text("20000")
        (self._group / "cpu.cfs_quota_us").write_text(str(max(1000, round(8000 / part.severity))))
        mark = str(self._marks[part.victim]).encode()
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and mark in _words(path):
                (self._group / "cgroup.procs").write_text(path.name)

    def _free(self) -> None:
        for number in (self._group / "cgroup.procs").read_text().split():
            (self._group.parent / "cgroup.procs").write_text(number)
        self._group.rmdir()


def _words(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def truth(part: Part) -> str:
    """Return the name of the place that is right.

    Where one way of a connection is cut, nothing comes through the other way either: acknowledgements are lost.
    """
    low, high = sorted((part.victim, part.other))
    both_ways = str(Place(kind="link both ways", ranks=(low, high)))
    return {
        **dict.fromkeys(("black hole", "half-open", "slow link", "flapping"), both_ways),
        "slow link one way": f"link {part.victim} -> {part.other}",
        "slow sender": f"sender rank {part.victim}", "slow receiver": f"receiver rank {part.victim}",
        "slow host": f"host {part.victim}",
    }.get(part.fault, f"rank {part.victim}")  # fmt: skip


def _wider(part: Part) -> set[str]:
    """Return places that hold the one that broke, and more."""
    ends = (part.victim, part.other) if "link" in truth(part) else (part.victim,)
    found = {f"host {end}" for end in ends}
    if "->" in truth(part):
        low, high = sorted(ends)
        found |= {f"link {low} <-> {high}", f"sender rank {part.victim}", f"receiver rank {part.other}"}
    return found


def mark(finding: Finding, part: Part) -> str:
    """Return how right a finding is about a fault; one of `MARKS`."""
    if finding.kind not in KINDS[part.fault]:
        return "wrong kind"
    named = {place_name(place) for place in finding.places}
    if truth(part) in named:
        return "right" if len(named) == 1 else "ambiguous"
    return "wider place" if named & _wider(part) else "wrong place"


def place_name(place: Place) -> str:
    """Return a place's name, with hosts by their number."""
    hosts = tuple(host.partition(" ")[0].removeprefix("host-") for host in place.hosts)
    return str(replace(place, hosts=hosts))
