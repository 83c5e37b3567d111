"""State machine of one replica in a round, without I/O: requests for parts, its vote, and its timeout.

Inputs are the parts received, the coordinator's messages and the time; outputs are actions. `RoundDriver` executes them
on real blobs. Tests search all orders of events with a model of a few replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.elastic.rounds import Decision

# Seconds until a replica that could not deliver a part is asked again.
_AGAIN_S = 0.2
# Seconds without any part after which a replica gives up a decided round, at least.
_LEAST_FETCH_S = 60.0
# Factor on the time limit while this replica's own link is busy: a second copy of a part would share that link.
_BUSY_TIMES = 8.0
# Parts of later rounds are requested once earlier ones miss fewer than this. A thin link then carries first what is
# applied first, and is never idle between two rounds.
_PARTS_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPart:
    """Action: request a part from a replica; earlier requests for it continue."""

    source: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastVote:
    """Action: report the parts that are here."""

    has: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Action: leave, because no replica delivers a part of the mean."""

    member: int
    sources: tuple[int, ...]


Action = RequestPart | CastVote | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """Inputs of one transition: the coordinator's messages, members, and measured limits.

    Attributes:
        called: Replicas called to gather the round's parts, None before the call.
        decision: The coordinator's decision, None before.
        active: Replicas that take part in rounds.
        neighbours: All connected replicas.
        limit_s: Time limit of a part, seconds.
        silent: Replicas from which no byte has arrived for a while.
        relays: Replica to ask first for a part of another one, where the link to its origin is slow.
        relay_limit_s: Seconds from the call until the origin is asked instead of the relay.
        near: Replicas of the same site; asked first for parts that many hold.
        slow: Replicas with a slow link to this one; asked last.
        slack_s: Seconds after the call before any replica needs the result.
        is_busy: Whether this replica's link is busy, so that a late part is not its source's fault.
        ahead: Missing parts of earlier decided rounds, which come first.
    """

    called: tuple[int, ...] | None
    decision: Decision | None
    active: Collection[int]
    neighbours: Collection[int]
    limit_s: float
    silent: Collection[int] = ()
    relays: Mapping[int, int] = field(default_factory=dict)
    relay_limit_s: float = 0.0
    near: Collection[int] = ()
    slow: Collection[int] = ()
    slack_s: float = 0.0
    is_busy: bool = False
    ahead: int = 0


class RoundStateMachine:
    """One replica's state in one round.

    Args:
        replica: Number of this replica.
        has_part: Whether it offers a part of its own; otherwise it only waits for the decision.

    Example:
        >>> machine = RoundStateMachine(replica=0, has_part=True)
        >>> words = dict(decision=None, active=(0, 1), neighbours=(0, 1), limit_s=2.0)
        >>> machine.advance(RoundInputs(called=None, **words), now_s=0.0)
        [RequestPart(source=1, member=1)]
        >>> machine.on_part(1)
        >>> machine.advance(RoundInputs(called=(0, 1), **words), now_s=0.1)
        [CastVote(has=(0, 1))]
    """

    def __init__(self, *, replica: int, has_part: bool) -> None:
        self._replica = replica
        self._has = {replica} if has_part else set[int]()
        self._asked: dict[int, dict[int, float]] = {}  # by whose part it is: who was asked, and when
        self._failed: dict[int, float] = {}
        self._called_s: float | None = None
        self._until_s, self._num_parts = 0.0, -1
        self._has_voted = not has_part
        self._turns: dict[int, int] = {}
        self._direct: set[int] = set()  # whose parts a relay did not give
        self._direct_s = 0.0

    @property
    def has(self) -> tuple[int, ...]:
        """Members whose parts are here, in ascending order."""
        return tuple(sorted(self._has))

    @property
    def called_s(self) -> float | None:
        """Time at which the call was seen, None before."""
        return self._called_s

    @property
    def has_voted(self) -> bool:
        """Whether this replica has voted and only waits for the decision."""
        return self._has_voted

    def on_part(self, member: int) -> None:
        """Record a part that arrived."""
        self._asked.pop(member, None)
        self._has.add(member)

    def on_failure(self, member: int, *, now_s: float, source: int | None = None) -> None:
        """Record that a source cannot deliver a part; None means every source asked so far."""
        asked = self._asked.get(member, {})
        asked.pop(source, None) if source is not None else asked.clear()
        if source not in (None, member):
            self._direct.add(member)
        if not asked:
            self._asked.pop(member, None)
            self._failed[member] = now_s

    def is_complete(self, decision: Decision) -> bool:
        """Return whether all parts of the mean are here."""
        return not self.num_lacking(decision)

    def num_lacking(self, decision: Decision) -> int:
        """Return the number of parts of the mean that are missing."""
        return len(set(decision.members) - self._has)

    def advance(self, inputs: RoundInputs, *, now_s: float) -> list[Action]:
        """Return the actions due now; they count as done."""
        return (
            self._gather(inputs, now_s) if inputs.decision is None else self._complete(inputs.decision, inputs, now_s)
        )

    def _gather(self, inputs: RoundInputs, now_s: float) -> list[Action]:
        if self._has_voted:
            return []
        todo: list[Action] = []
        for peer in inputs.active:
            if peer not in self._has and self._is_wanted(peer, inputs, now_s):
                todo.append(self._ask(self._first_source(peer, inputs), peer, now_s))
        if inputs.called is not None:
            self._called_s = now_s if self._called_s is None else self._called_s
            # parts of dead or sleeping replicas would only delay the vote
            awaited = (set(inputs.called) & {*inputs.active, self._replica}) - set(inputs.silent)
            # an origin asked in place of its relay gets the full time limit
            limit_s = max(inputs.limit_s, inputs.slack_s)
            if self._has.issuperset(awaited) or now_s > max(self._called_s, self._direct_s) + limit_s:
                self._has_voted = True
                todo.append(CastVote(has=self.has))
        return todo

    def _is_wanted(self, peer: int, inputs: RoundInputs, now_s: float) -> bool:
        """Return whether to request a part of an undecided round: not requested yet, or without success."""
        asked = self._asked.get(peer)
        if not asked:
            return self._is_due(peer, inputs, now_s)
        if peer in asked or self._called_s is None:
            return False
        # a called, responsive relay will fetch the part; the link to the origin is spared until its limit
        is_called = inputs.called is not None and set(asked) <= set(inputs.called) - set(inputs.silent)
        if is_called and now_s < max(self._called_s, *asked.values()) + inputs.relay_limit_s:
            return False
        # from here on the origin itself is asked, with a time limit that starts now
        self._direct.add(peer)
        self._direct_s = now_s
        return True

    def _first_source(self, peer: int, inputs: RoundInputs) -> int:
        relay = inputs.relays.get(peer, peer)
        return relay if peer not in self._direct and relay in set(inputs.active) - set(inputs.silent) else peer

    def _complete(self, decision: Decision, inputs: RoundInputs, now_s: float) -> list[Action]:
        if (
            len(self._has) > self._num_parts or inputs.ahead
        ):  # something comes, however slowly, or is yet to be asked for
            self._num_parts, self._until_s = len(self._has), now_s + max(_LEAST_FETCH_S, 3 * inputs.limit_s)
        todo: list[Action] = []
        for member in sorted(set(decision.members) - self._has):
            holders = (set(inputs.neighbours) & {*decision.holders, member}) - {self._replica}
            # if all holders at decision time have gone, another active replica may have fetched the part since
            sources = sorted(holders or set(inputs.active) - {self._replica})
            if not sources or now_s > self._until_s:
                return [GiveUp(member=member, sources=tuple(sources))]
            # sources without a request for this part; on the first request slow links last, own site first
            free = [source for source in sources if source not in self._asked.get(member, {})]
            if member not in self._turns:
                free = [source for source in free if source not in inputs.slow] or free
                free = [source for source in free if source in inputs.near] or free
            # an unrequested part waits for the parts of earlier rounds, see `_PARTS_AHEAD`
            has_turn = member in self._asked or not inputs.ahead or inputs.ahead + len(self._asked) < _PARTS_AHEAD
            if free and has_turn and self._is_due(member, inputs, now_s):
                # rotate by member, so that the parts of one round start at different sources
                turn = self._turns.get(member, member)
                self._turns[member] = turn + 1
                todo.append(self._ask(free[turn % len(free)], member, now_s))
        return todo

    def _is_due(self, member: int, inputs: RoundInputs, now_s: float) -> bool:
        """Return whether a part is not under way, or is late enough to request it from another source too.

        Earlier requests continue: on a link that became slow, a part requested again would never arrive.
        """
        asked = self._asked.get(member)
        if asked:
            return self._is_late(asked, inputs.limit_s * (_BUSY_TIMES if inputs.is_busy else 1.0), now_s)
        return member not in self._failed or now_s > self._failed[member] + _AGAIN_S

    @staticmethod
    def _is_late(asked: Mapping[int, float], limit_s: float, now_s: float) -> bool:
        # the limit doubles with each source asked: exponential back-off against duplicate transfers
        return now_s >= max(asked.values()) + limit_s * 2.0 ** (len(asked) - 1)

    def _ask(self, source: int, member: int, now_s: float) -> RequestPart:
        self._failed.pop(member, None)
        self._asked.setdefault(member, {})[source] = now_s
        return RequestPart(source=source, member=member)
