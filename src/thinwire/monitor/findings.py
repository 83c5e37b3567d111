"""Findings of the monitor: fault, place, time, evidence, confidence and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "communication hang", "non-communication hang", "communication slow", "non-communication slow", "desync",
    "non-finite loss", "loss divergence", "periodic stall", "flapping link", "slowing compute", "clock", "corrupt data",
    "no records",
]  # fmt: skip

PlaceKind = Literal[
    "link", "path", "link both ways", "sender", "receiver", "endpoint",
    "host link", "host link both ways", "host sender", "host receiver", "host",
    "rank", "communicator", "job",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a fault: a link, an endpoint, a rank, a host, or all of them.

    Attributes:
        kind: Of the place.
        ranks: The ranks of a link or a path (from, to), a sender, a receiver, an endpoint (its wires both ways) or a
            rank.
        hosts: The same for places that are hosts.
        path: Number of a path, -1 for other places.

    Example:
        >>> print(Place(kind="link", ranks=(0, 3)), "|", Place(kind="host", hosts=("b",)))
        link 0 -> 3 | host b
    """

    kind: PlaceKind
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    path: int = -1

    def __str__(self) -> str:
        names = [str(rank) for rank in self.ranks] or list(self.hosts)
        if self.kind == "path":
            return f"path {self.path} of link {' -> '.join(names)}"
        if self.kind in ("link", "host link"):
            return f"{self.kind} {' -> '.join(names)}"
        if self.kind in ("link both ways", "host link both ways"):
            return f"{self.kind.removesuffix(' both ways')} {' <-> '.join(names)}"
        if self.kind in ("sender", "receiver", "endpoint"):
            return f"{self.kind} rank {names[0]}"
        if self.kind == "rank":
            return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
        return " ".join([self.kind, ", ".join(names)]).strip()

    @property
    def title(self) -> str:
        """The place as a sentence begins with it.

        Example:
            >>> Place(kind="host", hosts=("node-A",)).title
            'Host node-A'
        """
        return str(self)[:1].upper() + str(self)[1:]


def joined(places: Iterable[Place]) -> str:
    """Return places as one phrase.

    Example:
        >>> joined([Place(kind="rank", ranks=(1,)), Place(kind="job")])
        'rank 1 or job'
    """
    return " or ".join(map(str, places))


def ranks_of(places: Iterable[Place], host_of: Mapping[int, str]) -> set[int]:
    """Return the ranks that places name, as ranks or by their host; a whole job names none."""
    found = list(places)
    hosts = {host for place in found for host in place.hosts}
    return {rank for place in found for rank in place.ranks} | {rank for rank in host_of if host_of[rank] in hosts}


def link_names(cells: Iterable[tuple[int, int]]) -> list[str]:
    """Return links as texts, the first 16.

    Example:
        >>> link_names({(1, 0), (0, 2)})
        ['0 -> 2', '1 -> 0']
    """
    return [f"{source} -> {destination}" for source, destination in sorted(cells)][:16]


EvidenceKind = Literal[
    "",  # none
    # own records: links, compute, operations
    "slow_link", "link_peers", "compute_peers", "slow_compute", "stall", "flapping", "slow_operation",
    "placed_operation", "slow_bytes", "slow_path", "desync", "loss", "loss_divergence", "clock", "no_records",
    # ranks that wait
    "missing_rank", "ended_rank", "deadlock", "stuck_message", "one_sided", "silent_rank", "own_error", "slow_transfer",
    "slow_step",
    # NCCL's own tools: RAS and Inspector
    "ras_lost", "ras_error", "ras_state", "ras_suspect", "ras_desync", "ras_lagging", "ras_standstill", "late_rank",
    "ended_file", "missing_file", "slow_nccl", "slow_nccl_message", "nccl_peers",
    # the active test
    "absent_rank", "wire_fault", "slow_loopback", "link_rate", "network_rate", "contention", "wrong_sum",
    "slow_all_reduce",
]  # fmt: skip
# an operation that does not end
STANDSTILLS: tuple[EvidenceKind, ...] = ("missing_rank", "ended_rank", "deadlock", "stuck_message", "one_sided")


class Evidence(dict[str, Any]):
    """Numbers behind a finding, by names that hold their units; as JSON can hold them.

    Args:
        kind: What they show.
        values: Those that are None are left out.

    Example:
        >>> Evidence("loss", losses=["nan"], steps=None)
        {'losses': ['nan']}
    """

    def __init__(self, kind: EvidenceKind, /, **values: Any) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.kind = kind

    def with_values(self, **values: Any) -> Evidence:
        """Return the same evidence with some values added or replaced."""
        return Evidence(self.kind, **(self | values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, as far as the records show.

    Attributes:
        kind: Of the fault.
        places: More than one if the records cannot distinguish them.
        since_s: Begin, in seconds of the reference clock.
        since_round: First round or operation; -1 if unknown.
        seen_round: Round in which the evidence sufficed; -1 if unknown.
        until_s: End; None if it lasts or is unknown.
        evidence: Numbers behind the finding.
        text: One or two sentences that describe it.
        confidence: In [0, 1].
        remedy: Advice.
        probe: Measurement that would distinguish the places; empty if there is one place.
    """

    kind: Kind
    places: tuple[Place, ...]
    since_s: float
    since_round: int = -1
    seen_round: int = -1
    evidence: Evidence = field(default_factory=lambda: Evidence(""))
    text: str
    confidence: float
    remedy: str
    probe: str = ""
    until_s: float | None = None

    @property
    def is_ambiguous(self) -> bool:
        """Whether the records cannot distinguish several places."""
        return len(self.places) > 1

    @property
    def is_own_error(self) -> bool:
        """Whether a rank has ended by an error that its own log shows."""
        return self.kind == "non-communication hang" and self.evidence.kind in ("own_error", "ras_error")

    @property
    def times_longer(self) -> float | None:
        """Ratio of a slow duration to its own past; None if the evidence holds none."""
        return self.evidence.get("times_longer")

    @property
    def slower_by_s(self) -> float:
        """Seconds by which a duration became longer; 0 if the evidence does not show them."""
        if self.evidence.kind not in ("slow_compute", "slow_operation", "placed_operation"):
            return 0.0
        return float(self.evidence["usual_s"] * (self.evidence["times_longer"] - 1))

    @property
    def where(self) -> str:
        """The places as one phrase.

        Example:
            >>> rank = Place(kind="rank", ranks=(1,))
            >>> Finding(kind="clock", places=(rank,), since_s=0, text="", confidence=1, remedy="").where
            'rank 1'
        """
        return f"ambiguous: {joined(self.places)}" if self.is_ambiguous else joined(self.places)

    def to_json(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {
            "kind": self.kind, "where": self.where,
            "places": [
                {"kind": place.kind, "ranks": list(place.ranks), "hosts": list(place.hosts)} for place in self.places
            ],
            "is_ambiguous": self.is_ambiguous, "since_s": round(self.since_s, 6), "since_round": self.since_round,
            "seen_round": self.seen_round, "until_s": None if self.until_s is None else round(self.until_s, 6),
            "evidence_kind": self.evidence.kind, "evidence": dict(self.evidence), "text": self.text,
            "confidence": round(self.confidence, 3), "remedy": self.remedy, "probe": self.probe,
        }  # fmt: skip


def report(findings: Sequence[Finding]) -> str:
    """Return findings as text, one paragraph each."""
    paragraphs = []
    for finding in findings:
        # a test that measured just now has no beginning
        since = f"since {finding.since_s:.3f} s" if finding.since_s or finding.since_round >= 0 else "measured now"
        if finding.since_round >= 0:
            since += f", round {finding.since_round}"
        if finding.until_s is not None:
            since += f"; as before again from {finding.until_s:.3f} s"
        paragraphs.append("\n".join([
            f"{finding.kind}: {finding.where} ({since}; confidence {finding.confidence:.2f})",
            f"  {finding.text}",
            *(f"  {name}: {_formatted(value)}" for name, value in finding.evidence.items()),
            f"  remedy: {finding.remedy}",
            *([f"  probe: {finding.probe}"] if finding.probe else []),
        ]))  # fmt: skip
    return "\n\n".join(paragraphs) or "No fault found."


def _formatted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_formatted, value))
    return str(value)
