"""State machine of one replica in a round, without I/O: requests for parts, its vote, and its timeout.

What it has got and what the coordinator said go in, with the time; what to do next comes out. `Proposal` does it with
real blobs, and a model of a few replicas can go through all orders in which things may happen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.elastic.rounds import Decision

# After so long somebody is asked again who could not give a part.
_AGAIN_S = 0.2
# For so long, at least, parts of a decided round are sought while none comes.
_LEAST_FETCH_S = 60.0
# While this replica's own link is busy, a part takes longer whoever sends it: a second copy would only share the link.
_BUSY_TIMES = 8.0
# Parts of later rounds are asked for once the earlier ones lack fewer than this: a thin link then brings first what is
# applied first, and is never idle between two rounds.
_PARTS_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """To do: ask a replica for a part; those that were asked for it before go on."""

    source: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastVote:
    """To do: say which parts are here."""

    has: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """To do: leave, because nobody gives a part of the mean."""

    member: int
    sources: tuple[int, ...]


Action = Ask | CastVote | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the coordinator has said, and how long parts take.

    Attributes:
        called: Who gathers the round's parts, None before the call.
        decision: What was decided, None before.
        active: Who takes part in rounds.
        neighbours: Who is there at all.
        limit_s: For how long a part is waited for.
        quiet: From whom nothing has come for a while, not even a sign of life.
        relays: Whom to ask first for a part that is not theirs: it is far, or the wire from its origin is slow.
        relay_limit_s: For how long that is waited for, from the call on, until its origin is asked itself.
        near: The replicas of this one's site, who are asked first for what many hold.
        slow: Those with a slow wire to this one, who are asked last.
        borne_s: For how long a part is waited for where nobody needs the result before.
        is_busy: Whether much comes to this replica just now, so that a part that is late is not so for its source.
        ahead: How many parts earlier rounds still lack that were decided: they come first.
    """

    called: tuple[int, ...] | None
    decision: Decision | None
    active: Collection[int]
    neighbours: Collection[int]
    limit_s: float
    quiet: Collection[int] = ()
    relays: Mapping[int, int] = field(default_factory=dict)
    relay_limit_s: float = 0.0
    near: Collection[int] = ()
    slow: Collection[int] = ()
    borne_s: float = 0.0
    is_busy: bool = False
    ahead: int = 0


class Bid:
    """See the module.

    Args:
        replica: This one's number.
        has_part: Whether it offers a part of its own; one that does not only waits for the decision.

    Example:
        >>> bid = Bid(replica=0, has_part=True)
        >>> words = dict(decision=None, active=(0, 1), neighbours=(0, 1), limit_s=2.0)
        >>> bid.turn(Seen(called=None, **words), now_s=0.0)
        [Ask(source=1, member=1)]
        >>> bid.take(1)
        >>> bid.turn(Seen(called=(0, 1), **words), now_s=0.1)
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
        """Whose parts are here, in ascending order."""
        return tuple(sorted(self._has))

    @property
    def called_s(self) -> float | None:
        """When the call was seen, None before."""
        return self._called_s

    @property
    def only_waits(self) -> bool:
        """Whether nothing is left to do but to wait for the decision."""
        return self._has_voted

    def take(self, member: int) -> None:
        """Note that a part came."""
        self._asked.pop(member, None)
        self._has.add(member)

    def fail(self, member: int, *, now_s: float, source: int | None = None) -> None:
        """Note that a replica that was asked for a part cannot give it, or none of those that were."""
        asked = self._asked.get(member, {})
        asked.pop(source, None) if source is not None else asked.clear()
        if source not in (None, member):
            self._direct.add(member)
        if not asked:
            self._asked.pop(member, None)
            self._failed[member] = now_s

    def is_complete(self, decision: Decision) -> bool:
        """Tell whether all parts of the mean are here."""
        return not self.num_lacking(decision)

    def num_lacking(self, decision: Decision) -> int:
        """Return how many parts of the mean are not here."""
        return len(set(decision.members) - self._has)

    def turn(self, seen: Seen, *, now_s: float) -> list[Action]:
        """Return what to do now; it counts as done."""
        return self._gather(seen, now_s) if seen.decision is None else self._complete(seen.decision, seen, now_s)

    def _gather(self, seen: Seen, now_s: float) -> list[Action]:
        if self._has_voted:
            return []
        todo: list[Action] = []
        for peer in seen.active:
            if peer not in self._has and self._is_wanted(peer, seen, now_s):
                todo.append(self._ask(self._first_source(peer, seen), peer, now_s))
        if seen.called is not None:
            self._called_s = now_s if self._called_s is None else self._called_s
            # who has died or sleeps is not waited for
            awaited = (set(seen.called) & {*seen.active, self._replica}) - set(seen.quiet)
            # an origin that was asked in a relay's place has as much time
            limit_s = max(seen.limit_s, seen.borne_s)
            if self._has.issuperset(awaited) or now_s > max(self._called_s, self._direct_s) + limit_s:
                self._has_voted = True
                todo.append(CastVote(has=self.has))
        return todo

    def _is_wanted(self, peer: int, seen: Seen, now_s: float) -> bool:
        """Tell whether to ask for a part of a round that is open: not yet asked for, or in vain."""
        asked = self._asked.get(peer)
        if not asked:
            return self._is_due(peer, seen, now_s)
        if peer in asked or self._called_s is None:
            return False
        is_called = seen.called is not None and set(asked) <= set(seen.called) - set(seen.quiet)
        if is_called and now_s < max(self._called_s, *asked.values()) + seen.relay_limit_s:
            return False
        self._direct.add(peer)
        self._direct_s = now_s
        return True

    def _first_source(self, peer: int, seen: Seen) -> int:
        relay = seen.relays.get(peer, peer)
        return relay if peer not in self._direct and relay in set(seen.active) - set(seen.quiet) else peer

    def _complete(self, decision: Decision, seen: Seen, now_s: float) -> list[Action]:
        if len(self._has) > self._num_parts or seen.ahead:  # something comes, however slowly, or is yet to be asked for
            self._num_parts, self._until_s = len(self._has), now_s + max(_LEAST_FETCH_S, 3 * seen.limit_s)
        todo: list[Action] = []
        for member in sorted(set(decision.members) - self._has):
            holders = (set(seen.neighbours) & {*decision.holders, member}) - {self._replica}
            # where all have gone that held it then, others have fetched it from them meanwhile
            sources = sorted(holders or set(seen.active) - {self._replica})
            if not sources or now_s > self._until_s:
                return [GiveUp(member=member, sources=tuple(sources))]
            free = [source for source in sources if source not in self._asked.get(member, {})]
            if member not in self._turns:
                free = [source for source in free if source not in seen.slow] or free
                free = [source for source in free if source in seen.near] or free
            has_turn = member in self._asked or not seen.ahead or seen.ahead + len(self._asked) < _PARTS_AHEAD
            if free and has_turn and self._is_due(member, seen, now_s):
                turn = self._turns.get(member, member)  # each part from another source first
                self._turns[member] = turn + 1
                todo.append(self._ask(free[turn % len(free)], member, now_s))
        return todo

    def _is_due(self, member: int, seen: Seen, now_s: float) -> bool:
        """Tell whether a part is not on its way, or has been for so long that another one is asked too.

        Those that were asked before go on: on a wire that has become slow, a part that is asked for anew never comes.
        """
        asked = self._asked.get(member)
        if asked:
            return self._is_late(asked, seen.limit_s * (_BUSY_TIMES if seen.is_busy else 1.0), now_s)
        return member not in self._failed or now_s > self._failed[member] + _AGAIN_S

    @staticmethod
    def _is_late(asked: Mapping[int, float], limit_s: float, now_s: float) -> bool:
        return now_s >= max(asked.values()) + limit_s * 2.0 ** (len(asked) - 1)

    def _ask(self, source: int, member: int, now_s: float) -> Ask:
        self._failed.pop(member, None)
        self._asked.setdefault(member, {})[source] = now_s
        return Ask(source=source, member=member)
