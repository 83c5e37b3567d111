"""The rounds of an elastic run, as the coordinator sees them: who launched, who holds what, what was decided.

Each round passes three gates. *Launched*: replicas say that they have published their parts. *Called*: once all
that keep pace have, or the grace for late ones is over, those that have are called to gather each other's parts.
*Decided*: once all that were called have said what they hold, or the time for it is over, the parts that make the mean
are chosen (`decide`). A decision is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic.round_decision import Vote, decide
from thinwire.events import FIRST_LAST_ROUND

# Waiting for late replicas may cost the others so much of an interval.
_SHARE_OF_INTERVAL = 0.1
# One that was late is waited for again in one of so many rounds, since it may have only slept. One that is slow
# launches ahead, and counts without being waited for; so it is waited for again when it was in time in so many rounds
# in a row, or in one of more rounds, where a little patience may be all that it needs.
_AGAIN_ROUNDS, _SLOW_AGAIN_ROUNDS = 4, 16
# Beyond the steps: for the scheduler and the way of the words; and as long as nobody has told how long steps take.
_WORDS_S, _UNKNOWN_S = 0.3, 30.0
_LEAST_VOTE_S, _MOST_VOTE_S = 2.0, 60.0
# A mean that a single replica could make is lost with it, and the others with the mean: for a second one that is near,
# so many seconds are waited.
_ALONE_S = 10.0
# Decisions kept for replicas that catch up.
_KEPT = 8192


def max_overdue_steps(*, sync_interval: int, overlap_steps: int) -> float:
    """Return for how many steps after a launch parts may be on their way where training goes on without the result.

    Up to its step of application nobody misses it; from there on a tenth of the interval.

    Example:
        >>> max_overdue_steps(sync_interval=30, overlap_steps=4)
        7.0
    """
    return overlap_steps + _SHARE_OF_INTERVAL * sync_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all replicas apply, or have applied, as one round.

    Attributes:
        round_id: The round.
        launch_step: The step that it was launched at.
        members: Whose parts make the mean.
        holders: Who holds all of them.
        step: The furthest step that anybody was known to be at when it was decided.
    """

    round_id: int
    launch_step: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    step: int


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """A round before its decision.

    Attributes:
        launch_step: The step that it is launched at.
        first_s: When the first replica launched it, or, where only slow ones have, by when the others will have.
        launched: Who has.
        called: Who gathers, None before the call.
        votes: What those said.
        first_vote_s: When the first did.
    """

    launch_step: int
    first_s: float
    launched: set[int] = field(default_factory=set)
    called: tuple[int, ...] | None = None
    votes: dict[int, Vote] = field(default_factory=dict)
    first_vote_s: float = 0.0


def grace_steps(*, sync_interval: int, overlap_steps: int) -> float:
    """Return by how many steps a replica may be behind so that the others still wait for it.

    Half of the steps between launch and apply, when nobody needs the result yet, and a tenth of the interval.

    Example:
        >>> grace_steps(sync_interval=30, overlap_steps=4)
        5.0
    """
    return max(1.0, 0.5 * overlap_steps + _SHARE_OF_INTERVAL * sync_interval)


class RoundTracker:
    """All rounds of a run; time comes in as a number, so that nothing here waits.

    Args:
        sync_interval: H, inner steps.
        overlap_steps: tau, inner steps.
        bears: Whether training goes on where a result is overdue, so that thin links may take longer to bring a part.
        last_step: The run's last inner step: what is in flight then is waited for by all.

    Attributes:
        decisions: The latest, by round.
        step: The furthest step that was heard of.
        num_decided: How many rounds have been decided so far.
        late: Who was not there when the last round was called; nobody waits for these until they are in time again, but
            in every fourth round. A slow one must be in time four times in a row, but in every sixteenth round.
    """

    def __init__(
        self, *, sync_interval: int, overlap_steps: int, bears: bool = False, last_step: float = math.inf
    ) -> None:
        self.decisions: dict[int, Decision] = {}
        self.step = 0
        self.late: set[int] = set()
        self.num_decided = 0
        self._open: dict[int, OpenRound] = {}
        self._rounds_without = 0
        self._in_time: dict[int, int] = {}  # by slow replica: in how many rounds in a row
        # by undecided round and by replica: how many bad parts in a row it had, this round's among them
        self._withheld: dict[int, dict[int, int]] = {}
        self._sync_interval = sync_interval
        self._grace_steps = grace_steps(sync_interval=sync_interval, overlap_steps=overlap_steps)
        bearable = max_overdue_steps(sync_interval=sync_interval, overlap_steps=overlap_steps)
        self._bearable_steps = bearable if bears else 0.0
        self._last_step = last_step
        self._spreads = AdaptiveTimeout(least_s=_LEAST_VOTE_S, most_s=_MOST_VOTE_S)

    @property
    def open_rounds(self) -> Mapping[int, OpenRound]:
        """Rounds before their decision."""
        return self._open

    @property
    def withheld(self) -> Mapping[int, Mapping[int, int]]:
        """By round before its decision, the replicas that have no finite part for it, and their bad parts in a row."""
        return self._withheld

    @property
    def closed_step(self) -> int:
        """A step up to which all rounds that anybody launched are decided."""
        if self._open:
            return min(found.launch_step for found in self._open.values()) - 1
        return max((found.launch_step for found in self.decisions.values()), default=0)

    def grace_s(self, *, step_s: float) -> float:
        """Return for how long late replicas are waited for.

        One that is behind by no more than `grace_steps` comes up with the others in that time; one that is further
        behind passes over what it lacks, and comes after the step that it is in.

        Args:
            step_s: Seconds that an inner step takes; 0 where nobody has said so yet.
        """
        return _UNKNOWN_S if step_s <= 0 else (self._grace_steps + 1) * step_s + _WORDS_S

    @property
    def vote_s(self) -> float:
        """For how long the rest is waited for once one has gathered all."""
        return self._spreads.limit_s

    def launch(
        self, member: int, *, round_id: int, launch_step: int, now_s: float, ahead_s: float = 0.0
    ) -> Decision | None:
        """Note that a replica has published its part; return the decision where there is one already.

        Args:
            member: The replica.
            round_id: The round.
            launch_step: The step that it is launched at.
            now_s: When it was.
            ahead_s: A slow replica launches that long before the others at most. So it does not say where they are, and
                nobody is late before that is over.
        """
        if ahead_s:
            self._in_time.setdefault(member, 0)
        else:
            self._in_time.pop(member, None)
            self.step = max(self.step, launch_step)
        if round_id in self.decisions:
            return self.decisions[round_id]
        found = self._open.get(round_id)
        if found is None:
            found = self._open[round_id] = OpenRound(launch_step=launch_step, first_s=now_s + ahead_s)
        found.first_s = min(found.first_s, now_s + ahead_s)
        found.launched.add(member)
        return None

    def withhold(self, member: int, *, round_id: int, parts: int) -> Decision | None:
        """Note that a replica's part of a round is not finite: it is not waited for; return the decision, if any.

        Args:
            member: The replica.
            round_id: The round.
            parts: How many bad parts in a row it has had, this one among them.
        """
        if round_id not in self.decisions:
            self._withheld.setdefault(round_id, {})[member] = parts
        return self.decisions.get(round_id)

    def take_withheld(self, round_id: int) -> Mapping[int, int]:
        """Return, once, who had no finite part for a round, and their bad parts in a row."""
        return self._withheld.pop(round_id, {})

    def is_hopeless(self, round_id: int, active: Collection[int]) -> bool:
        """Tell whether no active replica has a finite part for a round, so that it can never be decided."""
        found = self._open.get(round_id)
        has_parts = found is not None and bool(found.launched or found.votes)
        return bool(active) and not has_parts and set(active) <= set(self._withheld.get(round_id, ()))

    def vote(self, member: int, vote: Vote, *, round_id: int, step: int, now_s: float) -> None:
        """Note what a replica holds; a vote that comes after the decision only tells how long they take."""
        self.step = max(self.step, step)
        found = self._open.get(round_id)
        if found is None or member not in vote.has:
            return
        if not found.votes:
            found.first_vote_s = now_s
        elif member not in found.votes:
            self._spreads.observe(now_s - found.first_vote_s)
        found.votes[member] = vote

    def forget(self, member: int) -> None:
        """Let a replica go; its part may count still where others hold it."""
        self.late.discard(member)
        self._in_time.pop(member, None)
        for round_id, withheld in list(self._withheld.items()):
            withheld.pop(member, None)
            if not withheld:
                del self._withheld[round_id]
        for found in self._open.values():
            found.votes.pop(member, None)
            found.launched.discard(member)
            if found.called is not None:
                found.called = tuple(one for one in found.called if one != member) or None

    def drop_empty(self) -> None:
        """Forget rounds whose launchers are all gone: who comes to them launches them anew."""
        for round_id in [number for number, found in self._open.items() if not found.launched]:
            del self._open[round_id]

    def calls(self, active: Collection[int], *, step_s: float, now_s: float) -> dict[int, tuple[int, ...]]:
        """Return, by round, who is to gather its parts now."""
        found = {}
        for round_id, one in self._open.items():
            if one.called is not None or not one.launched:
                continue
            withheld = set(self._withheld.get(round_id, ()))
            waited_for = set(active) - self.late - one.launched - withheld
            if waited_for and now_s < one.first_s + self.grace_s(step_s=step_s):
                continue
            one.called = tuple(sorted(one.launched))
            self.step = max(self.step, one.launch_step)
            found[round_id] = one.called
            self._note_late(one.launched, missing=set(active) - one.launched - withheld)
        return found

    def _note_late(self, launched: Collection[int], *, missing: set[int]) -> None:
        for slow, rounds in self._in_time.items():
            self._in_time[slow] = rounds + 1 if slow in launched else 0
        self.late = {one for one in self.late if one not in launched or self._is_unsteady(one)} | missing
        self._rounds_without = self._rounds_without + 1 if self.late else 0
        if self._rounds_without % (_SLOW_AGAIN_ROUNDS - 1) == 0:
            self.late.clear()
        elif self._rounds_without % (_AGAIN_ROUNDS - 1) == 0:
            self.late = set(filter(self._is_unsteady, self.late))

    def _is_unsteady(self, member: int) -> bool:
        return self._in_time.get(member, _AGAIN_ROUNDS) < _AGAIN_ROUNDS

    def decided(
        self, active: Collection[int], *, steps: Mapping[int, int], now_s: float, step_s: float = 0.0
    ) -> list[Decision]:
        """Decide what can be, in the order of the rounds.

        Args:
            active: Who takes part.
            steps: The steps of those of them that were heard of just now.
            now_s: The time.
            step_s: Seconds that an inner step takes; 0 where nobody has said so yet.
        """
        found = []
        for round_id in sorted(self._open):
            one = self._open[round_id]
            if one.called is None or not one.votes:
                continue
            is_complete = not set(one.called) & set(active) - set(one.votes)
            if not is_complete and now_s < max(one.first_vote_s + self.vote_s, self._borne_until_s(round_id, step_s)):
                continue
            choice = decide(one.votes)
            is_overdue = now_s >= one.first_vote_s + _ALONE_S
            if len(choice.holders) == 1 and self._is_anybody_near(one, steps) and not is_overdue:
                continue
            decision = Decision(
                round_id=round_id, launch_step=one.launch_step, members=choice.members, holders=choice.holders,
                step=self.step,
            )  # fmt: skip
            self.adopt(decision)
            found.append(decision)
        return found

    def _borne_until_s(self, round_id: int, step_s: float) -> float:
        """Return until when a round may be open without anybody waiting for it; the last ones are waited for."""
        one = self._open[round_id]
        is_at_end = round_id >= FIRST_LAST_ROUND or one.launch_step + self._bearable_steps > self._last_step
        if not self._bearable_steps or is_at_end:
            return 0.0
        return one.first_s + (self._bearable_steps + 1) * step_s + _WORDS_S

    def begin_anew(self, step: int) -> None:
        """Forget all rounds: the run goes on from an earlier state."""
        self.decisions.clear()
        self._open.clear()
        self._withheld.clear()
        self.step = step

    def _is_anybody_near(self, one: OpenRound, steps: Mapping[int, int]) -> bool:
        """Tell whether somebody who has not voted will come to a round soon."""
        first_step = one.launch_step - self._sync_interval
        return any(step >= first_step for replica, step in steps.items() if replica not in one.votes)

    def adopt(self, decision: Decision) -> None:
        """Take a decision in: one of its own, or one read from the journal."""
        self._open.pop(decision.round_id, None)
        self.num_decided += decision.round_id not in self.decisions
        self.decisions[decision.round_id] = decision
        self.step = max(self.step, decision.step)
        while len(self.decisions) > _KEPT:
            del self.decisions[next(iter(self.decisions))]
