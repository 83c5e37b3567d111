"""Rounds of an elastic run at the coordinator: launches, calls, votes and decisions.

Each round passes three gates. *Launched*: replicas have published their parts. *Called*: once all that keep pace have,
or the grace for late ones is over, those that have are called to gather each other's parts. *Decided*: once all that
were called have voted, or the time for votes is over, `decide` chooses the parts that make the mean. A decision is
never changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.events import FIRST_LAST_ROUND

# Share of an interval that waiting for late replicas may cost the others.
_SHARE_OF_INTERVAL = 0.1
# A late replica is waited for again in one of so many rounds: it may have only slept. A slow one launches ahead and
# counts without being waited for. So it is waited for again after so many rounds in time in a row, or in one of 16.
_RETRY_ROUNDS, _SLOW_RETRY_ROUNDS = 4, 16
# Seconds beyond the steps, for the scheduler and the messages; and the grace before any step time is known.
MESSAGE_S, _UNKNOWN_GRACE_S = 0.3, 30.0
# Bounds in seconds of the wait for votes after the first one.
_MIN_VOTE_S, _MAX_VOTE_S = 2.0, 60.0
# A mean that a single replica holds is lost with it, and the others could never apply it. A second holder that is near
# is awaited for so many seconds.
_SINGLE_HOLDER_S = 10.0
# Rounds from which it shows which replicas keep pace with each other, and seconds without a launch of the others after
# which a replica that launched alone is called alone.
_PACE_ROUNDS, _MAX_DOUBT_S = 16, 20.0
# Decisions kept for replicas that catch up.
_MAX_DECISIONS = 8192


def max_overdue_steps(*, sync_interval: int, overlap_steps: int) -> float:
    """Return for how many steps after a launch parts may be in flight where training goes on without the result.

    The result is not needed before its apply step; after it, a tenth of the interval is tolerated.

    Example:
        >>> max_overdue_steps(sync_interval=30, overlap_steps=4)
        7.0
    """
    return overlap_steps + _SHARE_OF_INTERVAL * sync_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of a round, which all replicas apply."""

    round_id: int
    launch_step: int
    members: tuple[int, ...]  # replicas whose parts make the mean
    holders: tuple[int, ...]  # replicas that hold all of these parts
    step: int  # the furthest known step of any replica when it was decided


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """A round before its decision."""

    launch_step: int
    first_s: float  # time of the first launch; where only slow replicas launched it, by when the others will
    launched: set[int] = field(default_factory=set)
    called: tuple[int, ...] | None = None  # replicas that gather
    votes: dict[int, Vote] = field(default_factory=dict)
    first_vote_s: float = 0.0
    second_vote_s: float | None = None


def grace_steps(*, sync_interval: int, overlap_steps: int) -> float:
    """Return by how many steps a replica may be behind so that the others still wait for it.

    Half of the steps between launch and apply, when the result is not needed yet, and a tenth of the interval.

    Example:
        >>> grace_steps(sync_interval=30, overlap_steps=4)
        5.0
    """
    return max(1.0, 0.5 * overlap_steps + _SHARE_OF_INTERVAL * sync_interval)


class ElasticRounds:
    """All rounds of a run; pure, time comes in as a number.

    Args:
        sync_interval: H, inner steps.
        overlap_steps: tau, inner steps.
        allows_overdue: Whether training goes on where a result is overdue, so that thin links may take longer.
        last_step: The run's last inner step: rounds in flight then are awaited by all.
        message_s: Seconds that messages to the coordinator may differ in.

    Attributes:
        decisions: The latest, by round.
        decided_step: The step at which the latest decided round was launched.
        num_decided: Number of rounds decided so far.
        open_rounds: Rounds before their decision.
        withheld: By undecided round, the replicas without a finite part for it, and their bad parts in a row.
        late: Replicas that missed the last call; they are awaited again once they are in time, or in every fourth round
            (slow ones: after four in time in a row, or in every sixteenth).
    """

    def __init__(
        self, *, sync_interval: int, overlap_steps: int, allows_overdue: bool = False, last_step: float = math.inf,
        message_s: float = MESSAGE_S,
    ) -> None:  # fmt: skip
        self.decisions: dict[int, Decision] = {}
        self.decided_step = 0
        self._claims: dict[int, int] = {}  # by replica that is there, the furthest step that its messages show
        self.late: set[int] = set()
        self.num_decided = 0
        self.open_rounds: dict[int, OpenRound] = {}
        self._rounds_without = 0
        self._in_time: dict[int, int] = {}  # by slow replica: in how many rounds in a row
        self.withheld: dict[int, dict[int, int]] = {}
        self._together: deque[frozenset[int]] = deque(maxlen=_PACE_ROUNDS)  # who launched the latest decided rounds
        self._launched_s: dict[int, float] = {}  # by replica, when it launched last
        self._sync_interval = sync_interval
        self.grace_steps = grace_steps(sync_interval=sync_interval, overlap_steps=overlap_steps)
        overdue_steps = max_overdue_steps(sync_interval=sync_interval, overlap_steps=overlap_steps)
        self._overdue_steps = overdue_steps if allows_overdue else 0.0
        self._last_step = last_step
        self._spreads = AdaptiveTimeout(least_s=min(_MAX_VOTE_S, max(_MIN_VOTE_S, 3 * message_s)), most_s=_MAX_VOTE_S)
        self._message_s = message_s

    @property
    def step(self) -> int:
        """The furthest known step of any replica that is there, or of a decided round."""
        return max([self.decided_step, *self._claims.values()])

    @property
    def closed_step(self) -> int:
        """A step up to which all launched rounds are decided."""
        # what one replica alone launched an interval ago holds up no other
        oldest = self.decided_step - self._sync_interval
        known = [
            one for one in self.open_rounds.values() if one.called or len(one.launched) > 1 or one.launch_step > oldest
        ]
        if known:
            return max(0, min(found.launch_step for found in known) - 1)
        return max((found.launch_step for found in self.decisions.values()), default=0)

    def grace_s(self, *, step_s: float) -> float:
        """Return for how long late replicas are waited for.

        A replica behind by at most `grace_steps` catches up in that time. One that is further behind skips the rounds
        that it lacks, and continues after its present step.

        Args:
            step_s: Seconds of an inner step; 0 where it is unknown.
        """
        return _UNKNOWN_GRACE_S if step_s <= 0 else (self.grace_steps + 1) * step_s + self._message_s

    @property
    def vote_s(self) -> float:
        """Wait for the other votes after the first."""
        return self._spreads.limit_s

    def launch(
        self, member: int, *, round_id: int, launch_step: int, now_s: float, ahead_s: float = 0.0,
        lead_s: float = 0.0,
    ) -> Decision | None:  # fmt: skip
        """Note that a replica has published its part; return the decision where there is one already.

        Args:
            member: The replica.
            round_id: The round.
            launch_step: Its launch step.
            now_s: The time.
            ahead_s: How long before the others a slow replica may launch: its step does not show theirs, and none is
                late before that time is over.
            lead_s: How long before all others a replica that is too far ahead launches: they are not late before that.
        """
        if ahead_s:
            self._in_time.setdefault(member, 0)
        else:
            self._in_time.pop(member, None)
            self._claim(member, launch_step)
        if round_id in self.decisions:
            return self.decisions[round_id]
        found = self.open_rounds.get(round_id)
        if found is None:
            found = self.open_rounds[round_id] = OpenRound(launch_step=launch_step, first_s=math.inf)
        found.first_s = min(found.first_s, now_s + max(ahead_s, lead_s))
        found.launched.add(member)
        self._launched_s[member] = now_s
        return None

    def withhold(self, member: int, *, round_id: int, parts: int) -> Decision | None:
        """Note that a replica's part of a round is not finite, so it is not awaited; return the decision, if any.

        `parts` is how many bad parts in a row it has had, this one among them.
        """
        if round_id not in self.decisions:
            self.withheld.setdefault(round_id, {})[member] = parts
        return self.decisions.get(round_id)

    def take_withheld(self, round_id: int) -> Mapping[int, int]:
        """Remove and return the replicas without a finite part for a round, and their bad parts in a row."""
        return self.withheld.pop(round_id, {})

    def is_hopeless(self, round_id: int, active: Collection[int]) -> bool:
        """Return whether no active replica has a finite part for a round, so that it can never be decided."""
        found = self.open_rounds.get(round_id)
        has_parts = found is not None and bool(found.launched or found.votes)
        return bool(active) and not has_parts and set(active) <= set(self.withheld.get(round_id, ()))

    def vote(self, member: int, vote: Vote, *, round_id: int, step: int, now_s: float) -> None:
        """Note a replica's vote; one after the decision shows only the furthest step."""
        self._claim(member, step)
        found = self.open_rounds.get(round_id)
        # one that has launched nothing has no part to vote for
        if found is None or member not in vote.has or member not in found.launched:
            return
        if not found.votes:
            found.first_vote_s = now_s
        elif member not in found.votes:
            found.second_vote_s = now_s if found.second_vote_s is None else found.second_vote_s
            self._spreads.observe(now_s - found.first_vote_s)
        found.votes[member] = vote

    def num_alone(self, member: int) -> int:
        """Return how many open rounds a replica alone has launched."""
        return sum(found.launched == {member} for found in self.open_rounds.values())

    def forget(self, member: int) -> None:
        """Remove a replica; its part still counts where others hold it."""
        self.late.discard(member)
        self._in_time.pop(member, None)
        self._claims.pop(member, None)
        self._launched_s.pop(member, None)
        for round_id, withheld in list(self.withheld.items()):
            withheld.pop(member, None)
            if not withheld:
                del self.withheld[round_id]
        for found in self.open_rounds.values():
            found.votes.pop(member, None)
            found.launched.discard(member)
            if found.called is not None:
                found.called = tuple(one for one in found.called if one != member) or None

    def drop_empty(self) -> None:
        """Forget rounds whose launchers are all gone: a replica that gets there launches them again."""
        for round_id in [number for number, found in self.open_rounds.items() if not found.launched]:
            del self.open_rounds[round_id]

    def calls(self, active: Collection[int], *, step_s: float, now_s: float) -> dict[int, tuple[int, ...]]:
        """Return, by round, the replicas that are to gather its parts now."""
        found = {}
        for round_id, one in self.open_rounds.items():
            if one.called is not None or not one.launched:
                continue
            withheld = set(self.withheld.get(round_id, ()))
            # replicas that are late already, or have no finite part, are not awaited
            waited_for = set(active) - self.late - one.launched - withheld
            if waited_for and now_s < one.first_s + self.grace_s(step_s=step_s):
                continue
            if self._is_doubtful(one, active, now_s=now_s):
                continue
            one.called = tuple(sorted(one.launched))
            for member in one.launched:
                self._claim(member, one.launch_step)
            found[round_id] = one.called
            self._note_late(one.launched, missing=set(active) - one.launched - withheld)
        return found

    def _is_doubtful(self, one: OpenRound, active: Collection[int], *, now_s: float) -> bool:
        """Return whether a replica launched alone what those that keep pace with each other know nothing of yet.

        They come to it once they have the results that they wait for, or the round is none. Where they launch nothing
        any more, though nothing holds them up, it is no doubt about the round.
        """
        others = set(active) - one.launched
        if len(one.launched) > 1 or len(others) < 2:
            return False
        num_together = sum(len(found & others) >= 2 for found in self._together)
        latest_s = max(self._launched_s.setdefault(other, now_s) for other in others)
        is_held_up = any(found.launched & others for found in self.open_rounds.values())
        is_moving = is_held_up or now_s - latest_s < _MAX_DOUBT_S
        return 2 * num_together >= len(self._together) and is_moving

    def _claim(self, member: int, step: int) -> None:
        self._claims[member] = max(self._claims.get(member, 0), step)

    def _note_late(self, launched: Collection[int], *, missing: set[int]) -> None:
        # a late replica would cost every round the whole grace: it is awaited only in one round of several
        for slow, rounds in self._in_time.items():
            self._in_time[slow] = rounds + 1 if slow in launched else 0
        self.late = {one for one in self.late if one not in launched or self._is_unsteady(one)} | missing
        self._rounds_without = self._rounds_without + 1 if self.late else 0
        if self._rounds_without % (_SLOW_RETRY_ROUNDS - 1) == 0:
            self.late.clear()
        elif self._rounds_without % (_RETRY_ROUNDS - 1) == 0:
            self.late = set(filter(self._is_unsteady, self.late))

    def _is_unsteady(self, member: int) -> bool:
        return self._in_time.get(member, _RETRY_ROUNDS) < _RETRY_ROUNDS

    def decided(
        self, active: Collection[int], *, steps: Mapping[int, int], now_s: float, step_s: float = 0.0
    ) -> list[Decision]:
        """Decide the rounds that can be, in their order.

        Args:
            active: Replicas that take part.
            steps: Steps of those that were heard of just now.
            now_s: The time.
            step_s: Seconds of an inner step; 0 where it is unknown.
        """
        found = []
        for round_id in sorted(self.open_rounds):
            one = self.open_rounds[round_id]
            if one.called is None or not one.votes:
                continue
            # a called replica that has died has no vote to wait for
            is_complete = not set(one.called) & set(active) - set(one.votes)
            until_s = max(self._votes_until_s(one, active), self._overdue_until_s(round_id, step_s))
            if not is_complete and now_s < until_s:
                continue
            choice = decide(one.votes)
            # one holder: wait for a second one that is near, since its death would stop all that lack the parts
            is_overdue = now_s >= one.first_vote_s + _SINGLE_HOLDER_S
            near = [replica for replica, step in steps.items() if step >= one.launch_step - self._sync_interval]
            if len(choice.holders) == 1 and set(near) - one.votes.keys() and not is_overdue:
                continue
            self._together.append(frozenset(one.launched))
            decision = Decision(
                round_id=round_id, launch_step=one.launch_step, members=choice.members, holders=choice.holders,
                step=self.step,
            )  # fmt: skip
            self.adopt(decision)
            self._launched_s.update(dict.fromkeys(one.launched, now_s))  # from now on they can go on
            found.append(decision)
        return found

    def _votes_until_s(self, one: OpenRound, active: Collection[int]) -> float:
        """Return until when votes are awaited: of three or more replicas, one alone decides nothing for the others."""
        called = set(one.called or ())
        if len(called) == 1 or len(called | set(active)) <= 2:
            return one.first_vote_s + self.vote_s
        return one.first_vote_s + _MAX_VOTE_S if one.second_vote_s is None else one.second_vote_s + self.vote_s

    def _overdue_until_s(self, round_id: int, step_s: float) -> float:
        """Return until when a round may stay open because no replica waits for it; the last rounds are awaited."""
        one = self.open_rounds[round_id]
        is_at_end = round_id >= FIRST_LAST_ROUND or one.launch_step + self._overdue_steps > self._last_step
        if not self._overdue_steps or is_at_end:
            return 0.0
        return one.first_s + (self._overdue_steps + 1) * step_s + self._message_s

    def restart(self, step: int) -> None:
        """Forget all rounds: the run goes on from an earlier state."""
        self.decisions.clear()
        self.open_rounds.clear()
        self.withheld.clear()
        self._claims.clear()
        self.decided_step = step

    def adopt(self, decision: Decision) -> None:
        """Adopt a decision: a new one, or one from the journal."""
        self.open_rounds.pop(decision.round_id, None)
        self.num_decided += decision.round_id not in self.decisions
        self.decisions[decision.round_id] = decision
        self.decided_step = max(self.decided_step, decision.launch_step)
        while len(self.decisions) > _MAX_DECISIONS:
            del self.decisions[next(iter(self.decisions))]


# Up to this many voters all groups are compared (2**12); beyond it a greedy search grows one group per voter.
_MAX_EXACT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The parts of a round that one replica holds."""

    # replicas whose parts it holds, itself among them; only parts of the same global value as its own
    has: frozenset[int]
    reference_hash: int = 0  # hash of that value


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The parts that make a mean, and the replicas that hold all of them."""

    members: tuple[int, ...]  # replicas whose parts are in the mean, ascending
    holders: tuple[int, ...]  # replicas that hold all of these, also with no part of their own among them; ascending


def decide(votes: Mapping[int, Vote]) -> Choice:
    """Choose the largest group of voters that hold each other's parts; all parts that it has in common make the mean.

    So a part counts as soon as the group holds it, whatever became of its sender, and no replica needs a part that
    only some hold. Ties are decided by the number of holders, then of parts, then by the lowest replica numbers. A
    single voter is a group.

    Raises:
        ValueError: There is no vote, or one does not hold its own part.

    Example:
        >>> whole, cut_off = frozenset({0, 1}), frozenset({1, 2})
        >>> decide({0: Vote(has=whole), 1: Vote(has=whole | cut_off), 2: Vote(has=cut_off)})
        Choice(members=(0, 1), holders=(0, 1))
        >>> decide({0: Vote(has=frozenset({0, 7})), 1: Vote(has=frozenset({0, 1, 7}))})  # 1 has not reached 0
        Choice(members=(0, 7), holders=(0, 1))
    """
    if not votes:
        raise ValueError("votes must hold at least one vote, got none")
    for voter, vote in votes.items():
        if voter not in vote.has:
            raise ValueError(f"replica {voter} must hold its own part, got {sorted(vote.has)}")
    # the key is a total order, so that the result does not depend on the order of the votes
    choices = []
    for group in _groups(votes):
        members = frozenset.intersection(*(votes[voter].has for voter in group))
        # a part is a difference from the global value: one of another value must not be applied to this one
        alike = [one for one in sorted(votes) if votes[one].reference_hash == votes[group[0]].reference_hash]
        holders = tuple(one for one in alike if members <= votes[one].has)
        rank = len(group), len(holders), len(members), [-one for one in group]
        choices.append((rank, Choice(members=tuple(sorted(members)), holders=holders)))
    return max(choices, key=lambda choice: choice[0])[1]


def _groups(votes: Mapping[int, Vote]) -> list[tuple[int, ...]]:
    voters = sorted(votes)
    if len(voters) > _MAX_EXACT:
        return [_grown(votes, first) for first in voters]
    for size in range(len(voters), 0, -1):
        groups = combinations(voters, size)
        found = [group for group in groups if all(_are_mutual(votes, *pair) for pair in combinations(group, 2))]
        if found:
            return found
    raise AssertionError("a single voter is a group")


def _grown(votes: Mapping[int, Vote], first: int) -> tuple[int, ...]:
    """Return a group around a voter: voters that agree with most others are tried first."""
    group = [first]
    ties = {voter: sum(_are_mutual(votes, voter, other) for other in votes if other != voter) for voter in votes}
    for voter in sorted(votes, key=lambda one: (-ties[one], one)):
        if voter != first and all(_are_mutual(votes, voter, member) for member in group):
            group.append(voter)
    return tuple(sorted(group))


def _are_mutual(votes: Mapping[int, Vote], one: int, other: int) -> bool:
    first, second = votes[one], votes[other]
    return first.reference_hash == second.reference_hash and other in first.has and one in second.has
