"""Who sleeps or is cut off is seen by its connection, and its part is not waited for."""

from dataclasses import dataclass

from thinwire.membership.bid import Bid, CastVote, Seen
from thinwire.membership.quiet import QUIET_S, QuietPeers


@dataclass
class Reading:
    silence_s: float


class Connections:
    def __init__(self, **silences: float | None) -> None:
        self.readings = {int(name[1:]): s if s is None else Reading(s) for name, s in silences.items()}
        self.looks = 0

    def peers(self) -> list[int]:
        self.looks += 1
        return list(self.readings)

    def reading(self, peer: int) -> Reading | None:
        return self.readings[peer]


def test_those_are_quiet_whose_connection_has_been_for_long() -> None:
    connections, times = Connections(r1=0.1, r2=QUIET_S + 1, r3=None), [10.0, 10.1, 11.0]
    quiet = QuietPeers(connections, now=lambda: times.pop(0))
    assert quiet() == {2}
    connections.readings[2].silence_s = 0.0
    assert quiet() == {2} and connections.looks == 1, "it is not looked for each time"
    assert quiet() == frozenset()


def test_a_vote_waits_for_neither_the_quiet_nor_the_dead_but_for_all_others() -> None:
    words = {"decision": None, "neighbours": (0, 1, 2), "limit_s": 60.0, "called": (0, 1, 2)}
    for more, votes in (
        ({"active": (0, 1, 2)}, False),
        ({"active": (0, 1, 2), "quiet": {2}}, True),
        ({"active": (0, 1)}, True),
        ({"active": (0, 1, 2), "quiet": {1}}, False),
    ):
        bid = Bid(replica=0, has_part=True)
        bid.take(1)
        actions = bid.turn(Seen(**words, **more), now_s=0.0)
        assert [one for one in actions if isinstance(one, CastVote)] == ([CastVote(has=(0, 1))] if votes else [])
