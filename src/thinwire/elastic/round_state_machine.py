"""State machine of one replica in a round, without I/O: requests for parts, its vote, and its timeout.

Inputs are the parts received, the coordinator's messages and the time; outputs are actions. `RoundDriver` executes them
on real blobs. Tests search all orders of events with a model of a few replicas.
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
class RequestPart:
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


Action = RequestPart | CastVote | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """What the coordinator has said, and how long parts take.

    Attributes:
        called: Who gathers the round's parts, None before the call.
        decision: What was decided, None before.
        active: Who takes part in rounds.
        neighbours: Who is there at all.
        limit_s: For how long a part is waited for.
        silent: From whom nothing has come for a while, not even a sign of life.
        relays: Whom to ask first for a part that is not theirs: it is far, or the wire from its origin is slow.
        relay_limit_s: For how long that is waited for, from the call on, until its origin is asked itself.
        near: The replicas of this one's site, who are asked first for what many hold.
        slow: Those with a slow wire to this one, who are asked last.
        slack_s: For how long a part is waited for where nobody needs the result before.
        is_busy: Whether much comes to this replica just now, so that a part that is late is not so for its source.
        ahead: How many parts earlier rounds still lack that were decided: they come first.
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
    """See the module.

    Args:
        replica: This one's number.
        has_part: Whether it offers a part of its own; one that does not only waits for the decision.

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
        """Whose parts are here, in ascending order."""
        return tuple(sorted(self._has))

    @property
    def called_s(self) -> float | None:
        """When the call was inputs, None before."""
        return self._called_s

    @property
    def has_voted(self) -> bool:
        """Whether nothing is left to do but to wait for the decision."""
        return self._has_voted

    def on_part(self, member: int) -> None:
        """Note that a part came."""
        self._asked.pop(member, None)
        self._has.add(member)

    def on_failure(self, member: int, *, now_s: float, source: int | None = None) -> None:
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

    def advance(self, inputs: RoundInputs, *, now_s: float) -> list[Action]:
        """Return what to do now; it counts as done."""
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
            # who has died or sleeps is not waited for
            awaited = (set(inputs.called) & {*inputs.active, self._replica}) - set(inputs.silent)
            # an origin that was asked in a relay's place has as much time
            limit_s = max(inputs.limit_s, inputs.slack_s)
            if self._has.issuperset(awaited) or now_s > max(self._called_s, self._direct_s) + limit_s:
                self._has_voted = True
                todo.append(CastVote(has=self.has))
        return todo

    def _is_wanted(self, peer: int, inputs: RoundInputs, now_s: float) -> bool:
        """Tell whether to ask for a part of a round that is open: not yet asked for, or in vain."""
        asked = self._asked.get(peer)
        if not asked:
            return self._is_due(peer, inputs, now_s)
        if peer in asked or self._called_s is None:
            return False
        is_called = inputs.called is not None and set(asked) <= set(inputs.called) - set(inputs.silent)
        if is_called and now_s < max(self._called_s, *asked.values()) + inputs.relay_limit_s:
            return False
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
            # where all have gone that held it then, others have fetched it from them meanwhile
            sources = sorted(holders or set(inputs.active) - {self._replica})
            if not sources or now_s > self._until_s:
                return [GiveUp(member=member, sources=tuple(sources))]
            free = [source for source in sources if source not in self._asked.get(member, {})]
            if member not in self._turns:
                free = [source for source in free if source not in inputs.slow] or free
                free = [source for source in free if source in inputs.near] or free
            has_turn = member in self._asked or not inputs.ahead or inputs.ahead + len(self._asked) < _PARTS_AHEAD
            if free and has_turn and self._is_due(member, inputs, now_s):
                turn = self._turns.get(member, member)  # each part from another source first
                self._turns[member] = turn + 1
                todo.append(self._ask(free[turn % len(free)], member, now_s))
        return todo

    def _is_due(self, member: int, inputs: RoundInputs, now_s: float) -> bool:
        """Tell whether a part is not on its way, or has been for so long that another one is asked too.

        Those that were asked before go on: on a wire that has become slow, a part that is asked for anew never comes.
        """
        asked = self._asked.get(member)
        if asked:
            return self._is_late(asked, inputs.limit_s * (_BUSY_TIMES if inputs.is_busy else 1.0), now_s)
        return member not in self._failed or now_s > self._failed[member] + _AGAIN_S

    @staticmethod
    def _is_late(asked: Mapping[int, float], limit_s: float, now_s: float) -> bool:
        return now_s >= max(asked.values()) + limit_s * 2.0 ** (len(asked) - 1)

    def _ask(self, source: int, member: int, now_s: float) -> RequestPart:
        self._failed.pop(member, None)
        self._asked.setdefault(member, {})[source] = now_s
        return RequestPart(source=source, member=member)
