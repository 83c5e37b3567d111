"""Findings of the monitor: fault, place, time, typed evidence, confidence and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

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


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers behind a finding, one class for each kind of evidence; units are in the names."""

    def to_json(self) -> dict[str, Any]:
        """Return the evidence for JSON; fields at their defaults are left out."""
        return dict(msgspec.to_builtins(self))

    @property
    def kind(self) -> str:
        """The kind of evidence.

        Example:
            >>> LossEvidence(losses=["nan"]).kind
            'loss'
        """
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__.removesuffix("Evidence")).lower()


# Evidence of one's own records: links, compute, operations.


class SlowdownEvidence(Evidence, frozen=True, kw_only=True):
    """Ratio of a duration to its own past."""

    times_longer: float


class SlowLinkEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Messages that take longer over some links."""

    usual_s: float
    now_s: float
    links: Sequence[str]
    explained: float  # share of all excess delay that the place explains
    retries: int
    clock_error_s: float


class SlowerThanPeersEvidence(Evidence, frozen=True, kw_only=True):
    """Links or ranks that were slow from the start."""

    times_longer_than_peers: float


class LinkPeersEvidence(SlowerThanPeersEvidence, frozen=True, kw_only=True):
    """Links that were slow from the start."""

    peers_s: float
    clock_error_s: float


class ComputePeersEvidence(SlowerThanPeersEvidence, frozen=True, kw_only=True):
    """Ranks whose compute was slow from the start."""

    usual_s: float


class SlowComputeEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Compute that takes longer."""

    usual_s: float
    now_s: float
    waited_least: str  # the rank that others wait for waits least


class StallEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Compute that stalls at regular steps."""

    every_rounds: float


class FlappingEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Links that fail and recover in turns."""

    bad_rounds: Sequence[str]
    explained: float


class SlowOperationEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Collectives that take longer, on a link that is not known."""

    communicator: str
    usual_s: float


class PlacedOperationEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Collectives that take longer, and the links whose bytes do too."""

    communicator: str
    usual_s: float
    byte_times_longer: float
    links: Sequence[str]


class SlowBytesEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """Connections whose bytes take longer, by the kernel's counters."""

    usual_mbit_a_second: float
    now_mbit_a_second: float
    links: Sequence[str]


class SlowPathEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """One of several planned paths whose bytes take longer, while the others' do not."""

    source_port: int
    usual_mbit_a_second: float
    now_mbit_a_second: float


class DesyncEvidence(Evidence, frozen=True, kw_only=True):
    """Operations that differ between ranks."""

    communicator: str
    operation: int
    differs_in: str
    by_rank: Sequence[str]
    deviation: str = ""  # such as "left out", if the calls around tell
    calls: Sequence[str] = ()  # left out, added or swapped
    steps_early: int = 0
    steps_done: int = 0  # by a rank that has left its loop, if all of them are recorded


class LossEvidence(Evidence, frozen=True, kw_only=True):
    """Losses that are not finite."""

    losses: Sequence[str]


class LossDivergenceEvidence(Evidence, frozen=True, kw_only=True):
    """A loss that departs from those of the other ranks."""

    loss_then: float | None
    deviations_from_the_others: float


class ClockEvidence(Evidence, frozen=True, kw_only=True):
    """A clock that was set while it was used."""

    clock: str
    offset_s: float
    error_s: float


class NoRecordsEvidence(Evidence, frozen=True, kw_only=True):
    """A rank that works and writes no records."""

    last_record_s: float
    last_heard_s: float


# Evidence of ranks that wait.


class WaitEvidence(Evidence, frozen=True, kw_only=True):
    """A wait, and the errors that ended it."""

    waited_s: float = 0.0
    errors: Sequence[str] = ()
    gave_up: Sequence[int] = ()
    judged_from: Sequence[int] = ()  # ranks whose records were there, where others' were not


class StandstillEvidence(WaitEvidence, frozen=True, kw_only=True):
    """An operation that does not end."""

    communicator: str = ""
    operation: int = -1
    longer_than_s: float = 0.0  # the limit that it exceeds
    connections_known: int | None = None
    byte_times_longer: float | None = None
    links: Sequence[str] = ()


class MissingRankEvidence(StandstillEvidence, frozen=True, kw_only=True):
    """Ranks that have not come to an operation."""

    waiting: Sequence[int]
    last_sign_s: float
    wait_chain: str
    activity: str = ""  # what the missing rank's training thread does
    stack: Sequence[str] = ()  # of that thread, innermost frame first


class EndedRankEvidence(MissingRankEvidence, frozen=True, kw_only=True):
    """Ranks that have ended without a fault, and that others wait for."""

    last_operation: int  # -1 if they took part in none


class DeadlockEvidence(MissingRankEvidence, frozen=True, kw_only=True):
    """Ranks that wait for each other, in operations of different communicators."""


class StuckMessageEvidence(StandstillEvidence, frozen=True, kw_only=True):
    """Messages that do not arrive though both ends are ready."""

    stuck: Sequence[str]
    arrived: int


class OneSidedEvidence(StandstillEvidence, frozen=True, kw_only=True):
    """A standstill seen by one side of a partition."""

    not_heard: Sequence[int]
    num_peers: int


class SilentRankEvidence(WaitEvidence, frozen=True, kw_only=True):
    """A rank whose heartbeats have stopped."""

    last_sign_s: float
    silent_s: float
    longer_than_s: float
    usual_between_s: float


class OwnErrorEvidence(Evidence, frozen=True, kw_only=True):
    """A rank that has ended by an error of its own."""

    error: str
    others_ended: Sequence[int]


class SlowTransferEvidence(WaitEvidence, frozen=True, kw_only=True):
    """Messages that are under way and slow."""

    times_longer: float
    bytes_a_second: int
    links: Sequence[str]


class SlowStepEvidence(WaitEvidence, frozen=True, kw_only=True):
    """Ranks that others wait for and that work slowly."""

    times_longer: float
    usual_s: float
    now_s: float
    steps: int


# Evidence from NCCL's own tools: RAS and Inspector.


class RasEvidence(Evidence, frozen=True, kw_only=True):
    """A state that NCCL RAS shows."""

    communicators: Sequence[str] = ()
    ranks: Sequence[int] = ()
    hosts: Sequence[str] = ()  # names of the addresses that are mentioned
    locations: Sequence[str] = ()  # host, process and GPU of each rank


class RasLostEvidence(RasEvidence, frozen=True, kw_only=True):
    """Processes that RAS cannot reach."""

    state: str
    host: str
    processes: Sequence[str]


class RasErrorEvidence(RasEvidence, frozen=True, kw_only=True, rename={"phase": "while"}):
    """Ranks that have failed."""

    error: str
    phase: str


class RasStateEvidence(RasEvidence, frozen=True, kw_only=True):
    """Ranks in another state than the rest."""

    states: Sequence[str]
    unchanged_s: float | str


class RasSuspectEvidence(RasEvidence, frozen=True, kw_only=True):
    """A communicator that RAS calls faulty without naming ranks."""

    ras_says: str
    size: int


class RasDesyncEvidence(RasEvidence, frozen=True, kw_only=True):
    """Ranks that call different collectives."""

    launched: Sequence[str]


class RasLaggingEvidence(RasEvidence, frozen=True, kw_only=True, rename={"kind_of_collective": "kind"}):
    """Ranks that have launched fewer collectives."""

    kind_of_collective: str
    launched: int
    others_launched: int
    num_behind: int
    num_others: int
    unchanged_s: float | str
    answers: int


class RasStandstillEvidence(RasEvidence, frozen=True, kw_only=True):
    """Communicators that do not move."""

    unchanged_s: float | str
    answers: int
    launched: Sequence[int]


class LateRankEvidence(Evidence, frozen=True, kw_only=True):
    """Ranks that come late to collectives."""

    late_s: float
    operation_takes_s: float
    came_last: float  # share of the operations
    late: Sequence[int]
    waiting: Sequence[int]
    locations: Sequence[str]
    communicators: Sequence[str]
    kinds: Sequence[str]
    ranks_without_files: int


class EndedFileEvidence(Evidence, frozen=True, kw_only=True):
    """Inspector files that end before the others."""

    communicator: str
    last_operation: int
    ranks: Sequence[int]
    others_last: int
    others_went_on_s: float
    locations: Sequence[str]


class MissingFileEvidence(Evidence, frozen=True, kw_only=True):
    """Ranks without an Inspector file."""

    communicator: str
    ranks: Sequence[int]
    num_ranks: int
    with_files: int


class SlowNcclEvidence(SlowdownEvidence, frozen=True, kw_only=True, rename={"kind_of_collective": "kind"}):
    """NCCL collectives that take longer."""

    usual_s: float
    communicators: Sequence[str]
    kind_of_collective: str
    hosts: Sequence[str]


class SlowNcclMessageEvidence(SlowdownEvidence, frozen=True, kw_only=True):
    """NCCL messages that take longer."""

    usual_s: float
    links: Sequence[str]
    hosts: Sequence[str]
    communicator: str


class NcclPeersEvidence(SlowerThanPeersEvidence, frozen=True, kw_only=True):
    """NCCL messages that were slow from the start."""

    peers_s: float
    links: Sequence[str]
    hosts: Sequence[str]
    communicator: str


# Evidence of the active test.


class AbsentRankEvidence(Evidence, frozen=True, kw_only=True):
    """A rank that does not take part."""

    host: str = ""
    rank: int


class WireFaultEvidence(Evidence, frozen=True, kw_only=True):
    """Links that carry nothing, or other bytes than were sent."""

    links: Sequence[str]
    said: Sequence[str]  # details that the ends report


class SlowLoopbackEvidence(Evidence, frozen=True, kw_only=True):
    """A host that is slow without any link."""

    loopback_bits_per_s: float
    others_bits_per_s: float
    times_slower: float


class LinkRateEvidence(Evidence, frozen=True, kw_only=True):
    """Links that carry less than others, or than expected."""

    rate_bits_per_s: float
    reference_bits_per_s: float
    times_slower: float
    links: Sequence[str]
    explained: float


class NetworkRateEvidence(Evidence, frozen=True, kw_only=True):
    """All links carry less than expected."""

    rate_bits_per_s: float
    expected_bits_per_s: float


class ContentionEvidence(Evidence, frozen=True, kw_only=True):
    """Links that are slow while others send."""

    times_slower_than_alone: float
    rate_bits_per_s: float | None = None
    links: Sequence[str] = ()


class WrongSumEvidence(Evidence, frozen=True, kw_only=True):
    """An all-reduce with a wrong sum."""

    links: Sequence[str]
    elements: int


class SlowAllReduceEvidence(Evidence, frozen=True, kw_only=True):
    """An all-reduce slower than its links allow."""

    seconds: float
    expected_s: float
    num_bytes: int


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
    evidence: Evidence | None = None
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
        return self.kind == "non-communication hang" and isinstance(self.evidence, OwnErrorEvidence | RasErrorEvidence)

    @property
    def times_longer(self) -> float | None:
        """Ratio of a slow duration to its own past; None if the evidence holds none."""
        if isinstance(self.evidence, SlowdownEvidence | SlowTransferEvidence | SlowStepEvidence):
            return self.evidence.times_longer
        return None

    @property
    def slower_by_s(self) -> float:
        """Seconds by which a duration became longer; 0 if the evidence does not show them."""
        if isinstance(self.evidence, SlowComputeEvidence | SlowOperationEvidence | PlacedOperationEvidence):
            return self.evidence.usual_s * (self.evidence.times_longer - 1)
        return 0.0

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
            "evidence_kind": "" if self.evidence is None else self.evidence.kind,
            "evidence": {} if self.evidence is None else self.evidence.to_json(),
            "text": self.text,
            "confidence": round(self.confidence, 3),
            "remedy": self.remedy,
            "probe": self.probe,
        }


def report(findings: Sequence[Finding]) -> str:
    """Return findings as text, one paragraph each."""
    return "\n\n".join(map(_paragraph, findings)) if findings else "No fault found."


def _paragraph(finding: Finding) -> str:
    # a test that measured just now has no beginning
    since = f"since {finding.since_s:.3f} s" if finding.since_s or finding.since_round >= 0 else "measured now"
    if finding.since_round >= 0:
        since += f", round {finding.since_round}"
    if finding.until_s is not None:
        since += f"; as before again from {finding.until_s:.3f} s"
    lines = [
        f"{finding.kind}: {finding.where} ({since}; confidence {finding.confidence:.2f})",
        f"  {finding.text}",
        *(f"  {name}: {_formatted(value)}" for name, value in finding.to_json()["evidence"].items()),
        f"  remedy: {finding.remedy}",
    ]
    if finding.probe:
        lines.append(f"  probe: {finding.probe}")
    return "\n".join(lines)


def _formatted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_formatted, value))
    return str(value)
