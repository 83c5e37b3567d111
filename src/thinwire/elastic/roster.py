"""Members of an elastic run: replica numbers that are never reused, and the state of each replica."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic.adaptive_local_steps import is_slower
from thinwire.roles import ROLES

# Heartbeats come once a second. The limit on silence adapts between these bounds. Rounds wait for a silent replica only
# once, and a removed one has to fetch the whole state: patience is cheap.
LEAST_SILENCE_S, MOST_SILENCE_S = 20.0, 30.0
# Limit for a replica whose connections to others broke: its process has died.
SUSPECT_SILENCE_S = 3.0
# What another replica may have done since its last report, in its usual rates; and how many must contradict a claim.
_MOST_RATES, _LEAST_WITNESSES = 2.0, 2


class MemberState(StrEnum):
    """Progress of a replica from joining to the end."""

    ARRIVING = "arriving"
    """It has a number, and no peer can reach it yet."""
    LOADING = "loading"
    """It fetches the state from others."""
    ACTIVE = "active"
    """It takes part in rounds."""
    DONE = "done"
    """It has come to the end."""


@dataclass(slots=True, kw_only=True)
class RosterMember:
    """One replica."""

    replica: int
    token: bytes  # names its connection
    host: str
    heard_s: float  # time of its last message
    invitation: int = 0  # number of the invitation that it joined by, 0 for none
    origin: str = ""  # IP address from which its connection comes; empty until it is heard
    address: str = ""  # for other replicas, with the port
    port: int = 0
    state: MemberState = MemberState.ARRIVING
    step: int = 0  # last reported
    moved_s: float = 0.0  # time at which that rose
    first_move: tuple[int, float] | None = None  # the first step that it reported as active, and when
    step_s: float = 0.0  # 0 before a report
    steps_per_interval: float = 0.0  # inner steps that it does itself
    loss: float = 0.0  # mean of its latest steps, nats a token; 0 before a report
    tokens_s: float = 0.0  # tokens a second, waits included
    suspected_by: set[int] = field(default_factory=set)  # replicas that lost their connections to it
    relayed: tuple[int, ...] = ()  # replicas that it reaches by the relay
    is_suspect: bool = False  # most others lost their connections to it
    is_paused: bool = False
    is_awaited: bool = False  # known to an earlier process of the coordinator, and has yet to find this one
    held_step: int = 0  # step of its own state that it goes on from, 0 for another state
    begin_step: int = 0  # it holds the parts of rounds since this step, and may hold none before
    disk_step: int = 0  # step of the checkpoint that it can read, 0 for none
    own_step: int = 0  # step of its own state that it reported, 0 for none
    own_era: int = 0  # era of that state
    role: str = ROLES[0]  # what it does in the run
    first_values: str = ""  # hash of the values that its model began with; empty where all begin with the same
    has_counted: bool = False  # a part of it has been in a mean
    named_at: int | None = None  # number of rounds decided at the latest report of its bad parts

    @property
    def steps_per_s(self) -> float:
        """Steps a second since its first report as an active replica, with its waits; 0 where it is unknown."""
        first_step, first_s = self.first_move or (self.step, self.moved_s)
        return (self.step - first_step) / (self.moved_s - first_s) if self.moved_s > first_s else 0.0

    def describe(self) -> dict[str, object]:
        """Return its entry in the roster and in the status."""
        return {
            "replica": self.replica, "role": self.role, "host": self.host, "address": self.address, "port": self.port,
            "state": str(self.state), "step": self.step, "step_s": round(self.step_s, 4),
            "paused": self.is_paused, "steps_per_interval": round(self.steps_per_interval, 1),
            "tokens_s": round(self.tokens_s, 1), "loss": round(self.loss, 4),
        }  # fmt: skip


class Roster:
    """The replicas of a run; pure, time comes in as a number.

    Example:
        >>> roster = Roster()
        >>> roster.add(b"a", host="alpha", now_s=0.0).replica, roster.add(b"b", host="beta", now_s=0.0).replica
        (0, 1)
        >>> [member.host for member in roster.silent(now_s=1000.0)]
        ['alpha', 'beta']
    """

    def __init__(self, *, next_replica: int = 0, suspect_silence_s: float = SUSPECT_SILENCE_S) -> None:
        self.next_replica = next_replica
        self._suspect_silence_s = suspect_silence_s
        self._members: dict[int, RosterMember] = {}
        self._by_token: dict[bytes, int] = {}
        self._gaps = AdaptiveTimeout(least_s=LEAST_SILENCE_S, most_s=MOST_SILENCE_S)

    def __iter__(self) -> Iterator[RosterMember]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, token: bytes, *, host: str, now_s: float, role: str = ROLES[0]) -> RosterMember:
        """Give a replica a number."""
        member = RosterMember(replica=self.next_replica, token=token, host=host, heard_s=now_s, role=role)
        self.next_replica += 1
        self.put(member)
        return member

    def put(self, member: RosterMember) -> None:
        """Take in a replica that has a number already."""
        self.next_replica = max(self.next_replica, member.replica + 1)
        self._members[member.replica] = member
        self._by_token[member.token] = member.replica

    def remove(self, replica: int) -> None:
        """Remove a replica; its number is not used again."""
        member = self._members.pop(replica, None)
        if member is not None:
            self._by_token.pop(member.token, None)

    def get(self, replica: int) -> RosterMember | None:
        """Return one by its number."""
        return self._members.get(replica)

    def by_token(self, token: bytes) -> RosterMember | None:
        """Return one by its connection."""
        replica = self._by_token.get(token)
        return None if replica is None else self._members[replica]

    def hear(self, member: RosterMember, *, now_s: float, is_beat: bool) -> None:
        """Note a message of a replica."""
        if is_beat and not member.is_awaited:
            self._gaps.observe(now_s - member.heard_s)
        if member.is_awaited:
            member.moved_s = now_s
        member.heard_s = now_s
        member.is_suspect = member.is_awaited = False
        member.suspected_by.clear()

    def reach(self, member: RosterMember, step: int, *, now_s: float) -> None:
        """Note the step that a replica reports."""
        if step > member.step:
            member.step, member.moved_s = step, now_s
            member.first_move = member.first_move or (step, now_s)

    def most_step(self, member: RosterMember, *, now_s: float) -> float:
        """Return the furthest step that others may have reached; infinite where there are none.

        One of them may have been held up, so twice its usual rate counts since its last report.
        """
        return max(self._reached_by_others(member, now_s=now_s, rates=_MOST_RATES), default=math.inf)

    def witnessed_step(self) -> int:
        """Return the furthest step that two active replicas have reached, or one where there are only two."""
        steps = sorted((member.step for member in self.in_state(MemberState.ACTIVE)), reverse=True)
        return max(steps[1:] if len(steps) > _LEAST_WITNESSES else steps, default=0)

    def lead_s(self, member: RosterMember, step: int, *, now_s: float, grace_steps: float) -> float:
        """Return the seconds until another replica gets to a step, where one is further ahead of all than the grace."""
        reached = self._reached_by_others(member, now_s=now_s, rates=1.0)
        if len(reached) < _LEAST_WITNESSES or step <= max(reached) + grace_steps:
            return 0.0
        fastest = max(one.steps_per_s for one in self.in_state(MemberState.ACTIVE) if one is not member)
        return (step - max(reached)) / fastest if fastest else 0.0

    def _reached_by_others(self, member: RosterMember, *, now_s: float, rates: float) -> list[float]:
        others = [one for one in self.in_state(MemberState.ACTIVE) if one is not member and not one.is_paused]
        return [one.step + rates * one.steps_per_s * (now_s - one.moved_s) for one in others]

    def suspect(self, replica: int, *, by: int, now_s: float) -> None:
        """Note that another replica lost its connection to one; where that one is silent anyway, it means nothing.

        Only where most others say so: one that lies, or whose own link broke, suspects none for all.
        """
        member = self._members.get(replica)
        if member is not None and now_s - member.heard_s < self._suspect_silence_s:
            member.suspected_by.add(by)
            others = set(self.active) - {replica}
            member.is_suspect = self.are_most(member.suspected_by & others, others)

    def are_most(self, reporters: set[int], of: set[int]) -> bool:
        """Return whether replicas are more than half of others, and their addresses more than half of the addresses.

        So that a holder of the secret gets no majority by joining many times from one host.
        """
        origins = [{m.origin for one in group if (m := self.get(one)) is not None} for group in (reporters, of)]
        return 2 * len(reporters) > len(of) and 2 * len(origins[0]) > len(origins[1])

    @property
    def silence_s(self) -> float:
        """Limit on a replica's silence."""
        return self._gaps.limit_s

    def silent(self, *, now_s: float) -> list[RosterMember]:
        """Return the replicas that have been silent for too long."""
        found = [m for m in self._members.values() if now_s - m.heard_s > self._silence_limit_s(m, now_s=now_s)]
        if len(found) > 1 and 2 * len(found) >= len(self._members):
            # so many at once: this host's own link is more likely cut
            return [member for member in found if now_s - member.heard_s > MOST_SILENCE_S]
        return found

    def _silence_limit_s(self, member: RosterMember, *, now_s: float) -> float:
        if member.is_awaited:  # it dials again, with growing back-off
            return MOST_SILENCE_S
        others = [other for other in self._members.values() if other is not member]
        num_silent = sum(now_s - other.heard_s > self._suspect_silence_s for other in others)
        # where half of the others are silent too, this host's own link is more likely cut
        has_died = member.is_suspect and (2 * num_silent < len(others) or not others)
        return self._suspect_silence_s if has_died else self.silence_s

    @property
    def number(self) -> int:
        """A hash of the members and their addresses, the same in each process."""
        known = [(m.replica, m.host, m.address, m.port, str(m.state)) for m in self._members.values()]
        return zlib.crc32(repr(sorted(known)).encode())

    def in_state(self, *states: MemberState) -> list[RosterMember]:
        """Return the replicas in these states, in the order of their numbers."""
        return sorted((m for m in self._members.values() if m.state in states), key=lambda m: m.replica)

    @property
    def active(self) -> tuple[int, ...]:
        """Numbers of the replicas that take part in rounds."""
        return tuple(member.replica for member in self.in_state(MemberState.ACTIVE))

    def fresh_steps(self, *, now_s: float, within_s: float) -> dict[int, int]:
        """Return the steps of active replicas that were heard of just now and do a step within the time."""
        found = [member for member in self._heard(now_s) if not member.is_awaited and member.step_s <= within_s]
        return {member.replica: member.step for member in found}

    def present(self, *, now_s: float) -> tuple[int, ...]:
        """Return the active replicas that are neither silent nor paused.

        Replicas known to an earlier process of the coordinator have time to find this one.
        """
        return tuple(member.replica for member in self._heard(now_s))

    def _heard(self, now_s: float) -> list[RosterMember]:
        return [
            member
            for member in self.in_state(MemberState.ACTIVE)
            if member.is_awaited
            or not (now_s - member.heard_s >= self._suspect_silence_s or member.is_suspect or member.is_paused)
        ]

    def ahead_s(self, member: RosterMember) -> float:
        """Return how long before the others a slow replica may launch a round: its next step would be too late."""
        return member.step_s if is_slower(member.step_s, fastest_s=self.step_s()) else 0.0

    def loss(self) -> float:
        """Return the mean of the active replicas' losses, weighted by tokens; 0 before a report.

        So a replica that comes or goes moves it by no more than its share.
        """
        known = [(m.loss, m.tokens_s) for m in self.in_state(MemberState.ACTIVE) if m.loss and m.tokens_s]
        return sum(loss * tokens for loss, tokens in known) / sum(tokens for _, tokens in known) if known else 0.0

    def step_s(self) -> float:
        """Return the time of an inner step at the fastest active replica, 0 before a report."""
        return min(
            (m.step_s for m in self._members.values() if m.state is MemberState.ACTIVE and m.step_s), default=0.0
        )
