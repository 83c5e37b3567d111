"""Parts of a decided round on a wire that has become slow: they are waited for, not asked for again.

Time here is a number that only waiting moves, so nothing depends on the machine.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic import round_driver as proposal_module
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.round_driver import HEAD_BYTES, CastVote, RequestPart, RoundDriver, RoundInputs, RoundStateMachine
from thinwire.elastic.rounds import Decision, ElasticRounds, Vote
from thinwire.events import FIRST_LAST_ROUND

LONG_S, USUAL_S = 0.6, 0.05


class Clock:
    """In the place of `time` in the module under test."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(proposal_module, "time", found)

    def pause(self: RoundDriver) -> None:
        found.now_s += proposal_module._POLL_S

    monkeypatch.setattr(RoundDriver, "_pause", pause)
    yield found


class SlowFetch:
    """Takes long; what is cancelled never comes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.there_s = clock.now_s + LONG_S
        self.is_cancelled = False

    def done(self) -> bool:
        return not self.is_cancelled and self.clock.now_s > self.there_s

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        blob = torch.zeros(HEAD_BYTES + 3, dtype=torch.uint8)
        blob[0], blob[8] = 77, 9  # the hash of the global value, and the round
        return blob

    def cancel(self) -> None:
        self.is_cancelled = True


class SlowShelf:
    """Counts who was asked."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked: list[tuple[int, SlowFetch]] = []

    def publish(self, name: bytes, payload: torch.Tensor) -> None: ...

    def get(self, source: int, name: bytes, *, most_bytes: int) -> SlowFetch:
        self.asked.append((source, SlowFetch(self.clock)))
        return self.asked[-1][1]

    def forget_past(self) -> None: ...


def member(replica: int) -> dict[str, Any]:
    return {"replica": replica, "host": "h", "address": "10.0.0.1", "port": 7, "state": "active"}


def proposal_of(shelf: SlowShelf, *, holders: list[int], there: range) -> RoundDriver:
    """Return replica 2's view of a decided round whose mean is replica 0's part."""
    session = CoordinatorSession(replica=2, interval_steps=4, send=lambda kind, **fields: None)
    session.transfer_timeout = AdaptiveTimeout(least_s=USUAL_S, most_s=USUAL_S)
    session.receive({"kind": "roster", "members": [member(n) for n in there], "started": True, "number": 1})
    session.receive({
        "kind": "decision", "round": 9, "launch_step": 12, "members": [0], "holders": holders, "step": 12, "closed": 12,
    })  # fmt: skip
    return RoundDriver(
        session=session, store=shelf, round_id=9, launch_step=12, part=None, reference_hash=77, most_bytes=10
    )


def test_a_part_whose_first_holders_have_gone_is_had_from_those_that_fetched_it(clock: Clock) -> None:
    shelf = SlowShelf(clock)
    proposal = proposal_of(shelf, holders=[0], there=range(1, 4))
    proposal.wait(deadline_s=1)
    assert proposal.agreed is not None and {source for source, _ in shelf.asked} <= {1, 3}


def test_a_part_that_takes_longer_than_usual_still_comes(clock: Clock) -> None:
    shelf = SlowShelf(clock)
    proposal = proposal_of(shelf, holders=[0, 1], there=range(3))
    proposal.wait(deadline_s=1)
    assert proposal.agreed is not None and list(proposal.agreed.parts) == [0]
    assert clock.now_s == pytest.approx(LONG_S, abs=2 * proposal_module._POLL_S)
    assert sorted(source for source, _ in shelf.asked) == [0, 1], "each holder is asked once"
    assert sum(fetch.is_cancelled for _, fetch in shelf.asked) == 1, "and the later one no longer when it has come"


def test_a_part_that_is_late_on_a_busy_link_is_not_asked_for_twice(clock: Clock) -> None:
    shelf = SlowShelf(clock)
    proposal = proposal_of(shelf, holders=[0, 1], there=range(3))
    proposal._session.activity = SimpleNamespace(is_link_busy=lambda: True, silent_peers=frozenset)
    proposal._session.transfer_timeout = AdaptiveTimeout(least_s=2 * USUAL_S, most_s=1.0)
    proposal._session.transfer_timeout.observe(0.0)
    proposal.wait(deadline_s=1)
    assert [source for source, _ in shelf.asked] == [0]
    assert clock.now_s == pytest.approx(LONG_S, abs=2 * proposal_module._POLL_S)
    assert not proposal._session.missing_parts, "nothing is lacking when it is there"


def decided(*members: int) -> Decision:
    return Decision(round_id=9, launch_step=12, members=members, holders=members, step=12)


def test_parts_of_a_later_round_are_asked_for_when_few_of_the_earlier_ones_are_lacking() -> None:
    machine = RoundStateMachine(replica=9, has_part=False)
    words = {"called": None, "active": (0, 1, 2, 9), "neighbours": (0, 1, 2, 9), "limit_s": 2.0}

    def asked(ahead: int, *, now_s: float) -> list[int]:
        actions = machine.advance(RoundInputs(decision=decided(0, 1, 2), ahead=ahead, **words), now_s=now_s)
        assert all(isinstance(one, RequestPart) for one in actions), "it never gives up what it has not asked for"
        return [one.member for one in actions if isinstance(one, RequestPart)]

    assert [asked(5, now_s=0.0), asked(2, now_s=500.0)] == [[], []]
    assert asked(1, now_s=501.0) == [0], "so that the link is not idle between two rounds"
    assert asked(1, now_s=502.0) == []
    assert asked(0, now_s=502.5) == [1, 2]


def test_a_part_on_a_thin_link_is_waited_for_as_long_as_nobody_needs_the_result() -> None:
    words = {"called": (0, 1), "decision": None, "active": (0, 1), "neighbours": (0, 1), "limit_s": 2.0}
    for slack_s, voted in ((0.0, [False, True, True]), (6.0, [False, False, True])):
        machine = RoundStateMachine(replica=0, has_part=True)
        found = [machine.advance(RoundInputs(slack_s=slack_s, **words), now_s=now_s) for now_s in (0.0, 3.0, 6.5)]
        votes = [any(isinstance(one, CastVote) for one in actions) for actions in found]
        assert [any(votes[: n + 1]) for n in range(3)] == voted


@pytest.mark.parametrize(
    ("bears", "round_id", "last_step", "open_s"),
    [(False, 0, 31, 3.0), (True, 0, 31, 7.0), (True, 0, 30, 3.0), (True, FIRST_LAST_ROUND, 31, 3.0)],
)
def test_a_vote_is_waited_for_as_long_as_nobody_needs_the_result(
    bears: bool, round_id: int, last_step: int, open_s: float
) -> None:
    book = ElasticRounds(sync_interval=60, overlap_steps=5, allows_overdue=bears, last_step=last_step)
    for replica in (0, 1):
        book.launch(replica, round_id=round_id, launch_step=20, now_s=0.0)
    assert book.calls((0, 1), step_s=0.5, now_s=0.5) == {round_id: (0, 1)}
    book.vote(0, Vote(has=frozenset({0, 1})), round_id=round_id, step=21, now_s=0.9)

    def is_decided(now_s: float) -> bool:
        return bool(book.decided((0, 1), steps={0: 21}, now_s=now_s, step_s=0.5))

    book._spreads = AdaptiveTimeout(least_s=2.0, most_s=2.0)
    assert not is_decided(open_s - 1) and is_decided(open_s)
