"""What a replica makes of words that cannot be, and of a coordinator that says nothing any more."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.elastic.coordinator_session import GONE_S, CoordinatorSession
from thinwire.elastic.protocol import checked_member, printable
from thinwire.errors import ConnectError, PayloadError

GOOD = {"replica": 1, "host": "h", "address": "10.0.0.2", "port": 7, "state": "active", "step": 0}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def seat(clock: Clock, warned: list[str]) -> CoordinatorSession:
    return CoordinatorSession(
        replica=0, interval_steps=4, send=lambda kind, **fields: None, warn=warned.append, now=clock
    )


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        {},
        {**GOOD, "replica": "1"},
        {**GOOD, "replica": True},
        {**GOOD, "replica": -1},
        {**GOOD, "replica": 1 << 20},
        {**GOOD, "address": "10.0.0.2:5;tcp://elsewhere"},
        {**GOOD, "address": ""},
        {**GOOD, "port": 0},
        {**GOOD, "port": 1 << 16},
        {key: value for key, value in GOOD.items() if key != "state"},
    ],
)
def test_a_roster_with_a_member_that_is_none_is_refused_as_a_whole(wrong: Any) -> None:
    with pytest.raises(PayloadError):
        checked_member(wrong)
    session = seat(Clock(), [])
    session.receive({"kind": "roster", "members": [GOOD], "started": True, "number": 1})
    with pytest.raises(PayloadError):
        session.receive({"kind": "roster", "members": [GOOD, wrong], "started": True, "number": 2})
    assert session.active() == (0, 1) and session.view.roster_number == 1, "what was known before still holds"


def test_what_another_host_says_of_itself_moves_no_cursor() -> None:
    assert printable("host\x1b]0;title\x07\n", most=100) == "host?]0;title??"
    assert printable("x" * 500, most=200) == "x" * 200


def test_a_silent_coordinator_is_told_of_and_given_up_in_the_end() -> None:
    clock, warned = Clock(), list[str]()
    session = seat(clock, warned)
    for clock.now_s in (10.0, 29.0):
        session.tick()
    assert not warned
    for clock.now_s in (31.0, 32.0, 59.0, 61.0, 100.0, 121.0):
        session.tick()
    assert [text.split(";")[0] for text in warned] == [
        f"nothing was heard of the coordinator for {seconds} s" for seconds in (31, 61, 121)
    ], "each time after twice as long"
    session.check()
    session.receive({"kind": "progress", "step": 1, "closed": 0, "floor": 0, "kept": 0, "generation": "g"})
    clock.now_s += 31.0
    session.tick()
    assert len(warned) == 4, "and from the beginning once it has been heard of"
    clock.now_s += GONE_S
    with pytest.raises(
        ConnectError, match=r"nothing was heard of the coordinator for 1831 s.*thinwire train --elastic --resume"
    ):
        session.check()
    with pytest.raises(ConnectError):
        session.wait_for(lambda view: None, deadline_s=None, why="")
