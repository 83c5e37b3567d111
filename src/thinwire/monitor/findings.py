"""A finding: what broke, where, since when, with which evidence, how sure, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "communication hang",
    "non-communication hang",
    "communication slow",
    "non-communication slow",
    "desync",
    "non-finite loss",
    "loss divergence",
    "periodic stall",
    "flapping link",
    "slowing compute",
    "clock",
    "corrupt data",
    "no records",
]

PlaceKind = Literal[
    "link", "link both ways", "sender", "receiver", "endpoint",
    "host link", "host link both ways", "host sender", "host receiver", "host",
    "rank", "communicator", "job",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something broke.

    Attributes:
        kind: What sort of place.
        ranks: The ranks of a link (from, to), a sender, a receiver, an endpoint (its wires both ways) or a rank.
        hosts: The same for places that are hosts.

    Example:
        >>> print(Place(kind="link", ranks=(0, 3)), "|", Place(kind="host", hosts=("b",)))
        link 0 -> 3 | host b
    """

    kind: PlaceKind
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = [str(rank) for rank in self.ranks] or list(self.hosts)
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
        """The place in words, as a sentence begins with it.

        Example:
            >>> Place(kind="host", hosts=("node-A",)).title
            'Host node-A'
        """
        return str(self)[:1].upper() + str(self)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, as far as the records tell.

    Attributes:
        kind: What broke.
        places: Where; more than one where the records cannot tell them apart.
        since_s: Since when, in seconds of the reference clock.
        since_round: Since which round or operation; -1 where unknown.
        seen_round: The round in which it was sure enough to be told; -1 where unknown.
        until_s: When all was as before again; None where it lasts, or nobody knows.
        evidence: Numbers by name, units in the names.
        text: What happened, in one sentence.
        confidence: How sure, in [0, 1].
        remedy: What to do.
        probe: What would tell the places apart; empty where there is one.
    """

    kind: Kind
    places: tuple[Place, ...]
    since_s: float
    since_round: int = -1
    seen_round: int = -1
    evidence: Mapping[str, Any] = field(default_factory=dict)
    text: str
    confidence: float
    remedy: str
    probe: str = ""
    until_s: float | None = None

    @property
    def is_ambiguous(self) -> bool:
        """Whether the records cannot tell several places apart."""
        return len(self.places) > 1

    @property
    def is_own_error(self) -> bool:
        """Whether a rank has ended by an error that it could tell itself."""
        return self.kind == "non-communication hang" and "error" in self.evidence

    @property
    def where(self) -> str:
        """The place in words.

        Example:
            >>> rank = Place(kind="rank", ranks=(1,))
            >>> Finding(kind="clock", places=(rank,), since_s=0, text="", confidence=1, remedy="").where
            'rank 1'
        """
        named = " or ".join(map(str, self.places))
        return f"ambiguous: {named}" if self.is_ambiguous else named

    def to_json(self) -> dict[str, Any]:
        """Return the finding as what JSON can hold."""
        return {
            "kind": self.kind,
            "where": self.where,
            "places": [
                {"kind": place.kind, "ranks": list(place.ranks), "hosts": list(place.hosts)} for place in self.places
            ],
            "is_ambiguous": self.is_ambiguous,
            "since_s": round(self.since_s, 6),
            "since_round": self.since_round,
            "seen_round": self.seen_round,
            "until_s": None if self.until_s is None else round(self.until_s, 6),
            "evidence": dict(self.evidence),
            "text": self.text,
            "confidence": round(self.confidence, 3),
            "remedy": self.remedy,
            "probe": self.probe,
        }


def report(findings: Sequence[Finding]) -> str:
    """Return findings as text, a paragraph each, or a sentence where there are none."""
    return "\n\n".join(map(_paragraph, findings)) if findings else "No fault found."


def _paragraph(finding: Finding) -> str:
    # what a test measured just now has no beginning
    since = f"since {finding.since_s:.3f} s" if finding.since_s or finding.since_round >= 0 else "measured now"
    if finding.since_round >= 0:
        since += f", round {finding.since_round}"
    if finding.until_s is not None:
        since += f"; as before again from {finding.until_s:.3f} s"
    lines = [
        f"{finding.kind}: {finding.where} ({since}; confidence {finding.confidence:.2f})",
        f"  {finding.text}",
        *(f"  {name}: {_told(value)}" for name, value in finding.evidence.items()),
        f"  remedy: {finding.remedy}",
    ]
    if finding.probe:
        lines.append(f"  probe: {finding.probe}")
    return "\n".join(lines)


def _told(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_told, value))
    return str(value)
