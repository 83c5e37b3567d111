"""Who sleeps or is cut off is seen by its connection, and its part is not waited for."""

from dataclasses import dataclass

from thinwire.elastic.coordinator_session import SILENT_S, PeerActivity
from thinwire.elastic.round_driver import CastVote, RoundInputs, RoundStateMachine


@dataclass
class Reading:
    silence_s: float
    received_bytes: int = 0


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
    connections, times = Connections(r1=0.1, r2=SILENT_S + 1, r3=None), [10.0, 10.1, 11.0]
    activity = PeerActivity(connections, now=lambda: times.pop(0))
    assert activity.silent_peers() == {2}
    connections.readings[2].silence_s = 0.0
    assert activity.silent_peers() == {2} and connections.looks == 1, "it is not looked for each time"
    assert activity.silent_peers() == frozenset()


def test_a_link_is_busy_that_brings_much_for_what_it_can() -> None:
    connections, now_s = Connections(r1=0.0, r2=0.0), [0.0]
    activity = PeerActivity(connections, now=lambda: now_s[0])

    def after(seconds: float, *, first: int, second: int) -> bool:
        for _ in range(round(2 * seconds)):
            now_s[0] += 0.5
            connections.readings[1].received_bytes += first // 2
            connections.readings[2].received_bytes += second // 2
            found = activity.is_link_busy()
        return found

    assert not activity.is_link_busy(), "nothing is known yet"
    assert not after(3, first=500, second=500), "words are no work"
    assert after(3, first=1_000_000, second=1_000_000)
    assert after(10, first=100_000, second=100_000), "the link has become ten times slower"
    assert not after(3, first=50_000, second=0), "only a sender trickles that is slow itself"
    assert after(70, first=50_000, second=0), "that this was once a faster link is long over"
    connections.readings[1].received_bytes = 0  # the connection was made anew
    assert after(0.5, first=50_000, second=0) and after(3, first=50_000, second=0)


def test_a_vote_waits_for_neither_the_quiet_nor_the_dead_but_for_all_others() -> None:
    words = {"decision": None, "neighbours": (0, 1, 2), "limit_s": 60.0, "called": (0, 1, 2)}
    for more, votes in (
        ({"active": (0, 1, 2)}, False),
        ({"active": (0, 1, 2), "silent": {2}}, True),
        ({"active": (0, 1)}, True),
        ({"active": (0, 1, 2), "silent": {1}}, False),
    ):
        machine = RoundStateMachine(replica=0, has_part=True)
        machine.on_part(1)
        actions = machine.advance(RoundInputs(**words, **more), now_s=0.0)
        assert [one for one in actions if isinstance(one, CastVote)] == ([CastVote(has=(0, 1))] if votes else [])
