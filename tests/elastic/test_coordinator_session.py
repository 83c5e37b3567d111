"""What a replica says and does: its session, which says all again until it is answered, and its machines in rounds."""

import itertools
import threading
from typing import Any

import pytest

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.round_driver import CastVote, GiveUp, RequestPart, RoundInputs, RoundStateMachine
from thinwire.elastic.rounds import Decision
from thinwire.errors import Expelled


class Clocked:
    """A session whose clock and coordinator the test is."""

    def __init__(self) -> None:
        self.now_s, self.said = 0.0, []
        self.session = CoordinatorSession(replica=0, interval_steps=10, send=self._say, now=lambda: self.now_s)

    def _say(self, kind: str, **fields: Any) -> None:
        if kind != "beat":
            self.said.append((kind, fields))

    def hear(self, kind: str, **fields: Any) -> None:
        self.session.receive({"kind": kind, **fields})

    def decide(self, number: int) -> None:
        self.hear(
            "decision", round=number, launch_step=10, members=[0], holders=[0], step=10 * number, closed=0
        )  # fmt: skip

    def turn(self, seconds: float) -> list[str]:
        self.now_s += seconds
        self.said.clear()
        self.session.tick()
        return [kind for kind, _ in self.said]


def test_a_council_says_everything_again_until_it_is_answered() -> None:
    one = Clocked()
    one.session.launch(3, launch_step=40)
    one.session.vote(3, has=(0,), reference_hash=1)
    one.session.ask_lease(0)
    one.session.send_reliably("here", address="a")
    assert one.turn(1.0) == []
    assert one.turn(1.5) == ["launch", "vote", "lease", "here"]
    one.decide(2)  # another round's
    one.hear("leased", number=0, shard=4, start=1)
    one.hear("state", step=0, root="seed", bytes=0, holders=[], note={}, era=0)
    assert one.session.lease(0) == (4, 1)
    assert one.turn(2.5) == ["launch", "vote"]
    one.session.settle(3)
    assert one.turn(9.0) == []


def test_records_are_said_until_they_or_later_ones_are_answered() -> None:
    one = Clocked()
    one.session.send_reliably("records", number=4, text="lines")
    one.hear("recorded", number=3)
    assert not one.session.is_acknowledged("records") and one.turn(2.5) == ["records"]
    one.hear("recorded", number=4)
    assert one.session.is_acknowledged("records") and one.turn(9.0) == []


def test_words_in_any_order_lead_to_the_same_view() -> None:
    words = [
        ("call", {"round": 1, "members": [0, 1]}),
        ("decision", {"round": 0, "launch_step": 1, "members": [0], "holders": [0], "step": 9, "closed": 4}),
        ("progress", {"step": 7, "closed": 6, "floor": 0, "kept": 0, "generation": "g"}),
        ("decision", {"round": 2, "launch_step": 2, "members": [1], "holders": [1], "step": 8, "closed": 5}),
    ]
    seen = set()
    for order in itertools.permutations(words):
        one = Clocked()
        for kind, fields in order:
            one.hear(kind, **fields)
        view = one.session.view
        seen.add((view.step, view.closed_step, tuple(sorted(view.decisions)), tuple(sorted(view.calls.items()))))
    assert seen == {(9, 6, (0, 2), ((1, (0, 1)),))}


def test_who_was_let_go_waits_for_nothing_more() -> None:
    one = Clocked()
    waiting = threading.Timer(0.05, one.hear, ["expelled"], {"why": "was silent", "has_bad_parts": False})
    waiting.start()
    with pytest.raises(Expelled, match="replica 0 was silent; it joins again"):
        one.session.wait_for(lambda view: view.finish, deadline_s=None, why="")
    with pytest.raises(Expelled):
        one.session.lease(5)
    waiting.join()


def test_what_nobody_holds_any_more_is_forgotten() -> None:
    one = Clocked()
    one.decide(1)
    one.hear("anew")
    assert not one.session.view.decisions and one.session.view.step == 0


def seen(**more: Any) -> RoundInputs:
    fields = {"called": None, "decision": None, "active": (0, 1, 2), "neighbours": (0, 1, 2), "limit_s": 2.0}
    return RoundInputs(**{**fields, **more})


def decision(*members: int, holders: tuple[int, ...]) -> Decision:
    return Decision(round_id=0, launch_step=1, members=members, holders=holders, step=1)


def test_a_bid_votes_once_with_what_it_has_when_the_time_is_over() -> None:
    machine = RoundStateMachine(replica=0, has_part=True)
    assert machine.advance(seen(), now_s=0.0) == [RequestPart(source=1, member=1), RequestPart(source=2, member=2)]
    machine.on_part(1)
    assert machine.advance(seen(called=(0, 1, 2)), now_s=1.0) == []
    machine.on_failure(2, now_s=1.0)
    assert machine.advance(seen(called=(0, 1, 2)), now_s=1.1) == []
    assert machine.advance(seen(called=(0, 1, 2)), now_s=1.3) == [RequestPart(source=2, member=2)]
    assert machine.advance(seen(called=(0, 1, 2)), now_s=3.1) == [CastVote(has=(0, 1))]
    assert machine.advance(seen(called=(0, 1, 2)), now_s=99.0) == [] and machine.has_voted


def test_a_bid_seeks_what_was_decided_at_its_holders_and_gives_up_where_there_are_none() -> None:
    machine = RoundStateMachine(replica=0, has_part=False)
    assert machine.advance(seen(), now_s=0.0) == []
    found = decision(1, 2, holders=(2,))
    first = machine.advance(seen(decision=found), now_s=0.0)
    assert [action.member for action in first] == [1, 2] and all(action.source in (1, 2) for action in first)
    asked = {first[0].source}
    for turn in range(1, 6):  # a source that is silent is left for another one
        for action in machine.advance(seen(decision=found), now_s=2.5 * turn):
            asked |= {action.source} if action.member == 1 else set()
    assert asked == {1, 2}
    assert machine.num_lacking(found)
    machine.on_part(1)
    gone = machine.advance(seen(decision=found, neighbours=(0, 1)), now_s=14.0)
    assert gone == [RequestPart(source=1, member=2)], "one that is left may have fetched it before the holder went"
    alone = machine.advance(seen(decision=found, neighbours=(0,), active=(0,)), now_s=15.0)
    assert alone == [GiveUp(member=2, sources=())]
    machine.on_part(2)
    assert not machine.num_lacking(found) and machine.advance(seen(decision=found), now_s=99.0) == []


def test_a_bid_gives_up_in_the_end_and_never_asks_itself() -> None:
    machine = RoundStateMachine(replica=0, has_part=False)
    found = decision(0, 1, holders=(0, 1))
    assert all(action.source == 1 for action in machine.advance(seen(decision=found), now_s=0.0))
    assert machine.advance(seen(decision=found), now_s=61.0) == [GiveUp(member=0, sources=(1,))]
