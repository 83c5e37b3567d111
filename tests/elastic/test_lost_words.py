"""Words of the coordinator may be lost, and itself be killed: nobody waits forever for what was said once."""

from typing import Any

import pytest

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import RUN_OVER, VERSION, decode, encode
from thinwire.elastic.roster import LEAST_SILENCE_S, MOST_SILENCE_S
from thinwire.errors import RunOver
from thinwire.events import FIRST_LAST_ROUND
from thinwire.version import __version__


class Desk:
    """A coordinator whose words are kept, and whose time is told."""

    def __init__(self, *, planned: int = 2) -> None:
        self.planned = planned
        self.journal: list[dict[str, Any]] = []
        self.now_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Take the place of the coordinator with one that knows the journal only."""
        self.sent: list[tuple[bytes, str, dict[str, Any]]] = []
        lines = [dict(line) for line in self.journal]
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=self.planned, sync_interval=4, overlap_steps=1,
                shard_windows=8,
            ),
            send=lambda token, kind, fields: self.sent.append((token, kind, fields)),
            record=lambda what, fields: self.journal.append({"what": what, **fields}), generation="g",
        )  # fmt: skip
        self.coordinator.replay(lines, now_s=self.now_s)

    def say(self, token: bytes, kind: str, **fields: Any) -> None:
        message = decode(encode(kind, **fields), to_member=False)
        self.coordinator.handle(token, message, now_s=self.now_s)

    def beat(self, token: bytes, *, step: int = 0) -> None:
        self.say(token, "beat", step=step, step_s=0.5, roster=0)

    def wait(self, seconds: float, *, beating: tuple[bytes, ...] = (), step: int = 0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            for token in beating:
                self.beat(token, step=step)
            self.coordinator.tick(self.now_s)

    def told(self, token: bytes, kind: str) -> list[dict[str, Any]]:
        return [fields for to, what, fields in self.sent if to == token and what == kind]

    def forget(self) -> None:
        """Lose all that was said so far."""
        self.sent.clear()

    def arrive(self, token: bytes) -> None:
        self.say(token, "join", version=VERSION, thinwire=__version__, host=token.decode())
        self.say(token, "here", address="10.0.0.1", port=7, corpus="c", windows=9, held=0, era=0, disk=0)

    def begin(self, *tokens: bytes) -> None:
        for token in tokens:
            self.arrive(token)
        for token in tokens:
            self.say(token, "active", step=0)


def running() -> Desk:
    desk = Desk()
    desk.begin(b"a", b"b")
    return desk


def test_who_is_to_keep_a_state_is_asked_again_until_it_answers() -> None:
    desk = running()
    desk.arrive(b"c")
    step = desk.told(b"a", "capture")[0]["step"]
    desk.forget()
    desk.wait(2, beating=(b"a", b"b", b"c"))
    assert desk.told(b"a", "capture") and desk.told(b"b", "capture")
    desk.say(b"a", "captured", step=step, root="aa" * 32, bytes=5)
    desk.say(b"b", "missed", step=step)
    desk.forget()
    desk.wait(2, beating=(b"a", b"b", b"c"))
    assert not desk.told(b"a", "capture") and not desk.told(b"b", "capture")
    assert desk.told(b"c", "state")[-1]["holders"] == [0], "and what there is to fetch is told again"


def test_a_joiner_gets_its_state_where_the_coordinator_was_killed_before_the_others_were_back() -> None:
    desk = running()
    desk.arrive(b"c")
    desk.restart()
    desk.wait(1)  # nobody is connected: all that is said now is lost
    desk.forget()
    desk.wait(2, beating=(b"a", b"b", b"c"))
    assert desk.told(b"a", "capture")


def test_a_lost_roster_is_told_again() -> None:
    desk = running()
    desk.arrive(b"c")
    number = desk.told(b"a", "roster")[-1]["number"]
    desk.forget()
    desk.say(b"a", "beat", step=0, step_s=0.5, roster=number)
    assert not desk.told(b"a", "roster")
    desk.beat(b"b")
    assert [one["replica"] for one in desk.told(b"b", "roster")[0]["members"]] == [0, 1, 2]
    desk.restart()
    desk.say(b"a", "beat", step=0, step_s=0.5, roster=number)
    assert not desk.told(b"a", "roster"), "another process knows the same roster by the same number"


def test_a_lost_call_is_told_again() -> None:
    desk = running()
    for _ in range(2):
        for token in (b"a", b"b"):
            desk.say(token, "launch", round=0, step=4, used={})
        assert desk.told(b"a", "call") == [{"round": 0, "members": [0, 1]}]
        desk.forget()


def test_replicas_have_time_to_find_a_coordinator_that_was_away() -> None:
    desk = running()
    desk.wait(60, beating=(b"a", b"b"))
    desk.restart()
    desk.wait(LEAST_SILENCE_S + 5, beating=(b"a",))
    assert desk.coordinator.state.roster.active == (0, 1)
    desk.wait(MOST_SILENCE_S, beating=(b"a",))
    assert desk.coordinator.state.roster.active == (0,)


def test_a_coordinator_that_is_killed_at_the_end_lets_all_come_to_it() -> None:
    desk = running()
    desk.say(b"a", "done", note={"n": 1})
    desk.restart()
    desk.say(b"b", "done", note={"n": 2})
    assert desk.told(b"b", "finish")[0]["notes"] == [{"n": 1}, {"n": 2}]
    desk.restart()
    assert desk.coordinator.state.has_finished
    for token, number in ((b"b", 2), (b"a", 1)):
        desk.say(token, "done", note={"n": number})
    assert desk.told(b"a", "finish") and desk.told(b"b", "finish")


def test_who_still_waits_for_a_state_at_the_end_is_told_that_it_is_over() -> None:
    desk = running()
    desk.arrive(b"c")
    for token in (b"a", b"b"):
        desk.say(token, "done", note={})
    for token in (b"a", b"b"):
        desk.say(token, "leave", why="has come to the end")
    assert desk.told(b"c", "expelled") == [{"why": RUN_OVER, "has_bad_parts": False}]
    desk.wait(2)
    assert not desk.told(b"c", "state"), "nobody goes on with a run that is over"
    desk.say(b"d", "join", version=VERSION, thinwire=__version__, host="d")
    assert desk.told(b"d", "refused") == [{"why": RUN_OVER}]
    session = CoordinatorSession(replica=2, interval_steps=4, send=lambda kind, **fields: None)
    session.receive({"kind": "expelled", "why": RUN_OVER, "has_bad_parts": False})
    with pytest.raises(RunOver):
        session.check()


def test_rounds_after_a_state_from_the_disk_are_forgotten() -> None:
    session = CoordinatorSession(replica=2, interval_steps=4, send=lambda kind, **fields: None)
    session.receive({
        "kind": "decision", "round": 9, "launch_step": 12, "members": [0], "holders": [0], "step": 12, "closed": 12,
    })  # fmt: skip
    session.receive({"kind": "state", "step": 0, "root": "disk", "bytes": 0, "holders": [], "note": {}, "era": 0})
    assert not session.view.decisions, "their parts went with those that are gone"


def test_where_a_replica_is_is_said_until_the_roster_names_it() -> None:
    said: list[str] = []
    seconds = [0.0]
    session = CoordinatorSession(
        replica=2, interval_steps=4, send=lambda kind, **fields: said.append(kind), now=lambda: seconds[0]
    )
    session.send_reliably("here", address="10.0.0.1", port=7, corpus="c", windows=9, held=0, era=0, disk=0)
    seconds[0] = 5.0
    session.tick()
    assert said.count("here") == 2
    own = {"replica": 2, "host": "c", "address": "10.0.0.1", "port": 7, "state": "loading"}
    session.receive({"kind": "roster", "members": [own], "started": True, "number": 5})
    seconds[0] = 10.0
    session.tick()
    assert said.count("here") == 2


def test_a_coordinator_that_most_fall_silent_to_at_once_takes_itself_for_the_one_that_is_cut_off() -> None:
    desk = Desk(planned=4)
    tokens = (b"a", b"b", b"c", b"d")
    desk.begin(*tokens)
    desk.wait(60, beating=tokens)
    desk.wait(LEAST_SILENCE_S + 5, beating=tokens[:1])
    assert desk.coordinator.state.roster.active == (0, 1, 2, 3)
    desk.wait(1, beating=tokens)
    desk.wait(LEAST_SILENCE_S + 5, beating=tokens[:3])
    assert desk.coordinator.state.roster.active == (0, 1, 2), "a single one is gone"
    desk.wait(MOST_SILENCE_S + 1, beating=tokens[:1])
    assert desk.coordinator.state.roster.active == (0,), "and the others are too, at last"


def test_who_dies_is_let_go_at_once_and_who_is_silent_for_a_while_stays() -> None:
    desk = Desk(planned=3)
    tokens = (b"a", b"b", b"c")
    desk.begin(*tokens)
    desk.wait(60, beating=tokens)
    desk.wait(12, beating=tokens[:2])
    desk.say(b"a", "lost", replica=2)  # its link is cut, so that the others miss it too
    desk.wait(4, beating=tokens[:2])
    assert desk.coordinator.state.roster.active == (0, 1, 2), "it need not fetch the whole state when it is back"
    desk.wait(1, beating=tokens)
    for token in tokens[:2]:  # its process has died; one of them alone may lie
        desk.say(token, "lost", replica=2)
    desk.wait(4, beating=tokens[:2])
    assert desk.coordinator.state.roster.active == (0, 1)


def test_a_mean_that_only_one_replica_could_make_waits_for_a_second_one_that_is_near() -> None:
    desk = running()
    desk.beat(b"b", step=3)
    desk.say(b"a", "launch", round=0, step=4, used={})
    desk.wait(5, beating=(b"a", b"b"), step=3)  # replica 1 is late, and not waited for any more
    desk.say(b"a", "vote", round=0, step=4, has=[0], hash=1)
    desk.wait(2, beating=(b"a", b"b"), step=3)
    assert not desk.coordinator.state.rounds.decisions, "if replica 0 died now, replica 1 would never get its part"
    desk.say(b"b", "launch", round=0, step=4, used={})
    assert desk.told(b"b", "call") and desk.told(b"b", "call")[-1]["members"] == [0]
    desk.say(b"b", "vote", round=0, step=4, has=[0, 1], hash=1)
    decision = desk.coordinator.state.rounds.decisions[0]
    assert decision.members == (0,) and decision.holders == (0, 1)


@pytest.mark.parametrize("fault", ["silent", "far", "slow"])
def test_who_will_not_come_soon_is_not_waited_for(fault: str) -> None:
    desk = running()
    desk.beat(b"a", step=40)
    desk.beat(b"b", step=36 if fault == "far" else 39)
    beating = (b"a",) if fault == "silent" else (b"a", b"b")
    desk.wait(6, beating=beating)
    desk.say(b"a", "launch", round=0, step=41, used={})
    desk.wait(31 if fault != "silent" else 18, beating=beating)
    desk.say(b"a", "vote", round=0, step=41, has=[0], hash=1)
    desk.wait(12 if fault == "slow" else 1, beating=beating)
    assert desk.coordinator.state.rounds.decisions[0].holders == (0,)


def test_at_the_end_nobody_waits_for_who_had_no_part_in_the_last_word() -> None:
    desk = Desk(planned=3)
    desk.begin(b"a", b"b", b"c")
    for token in (b"a", b"b"):
        desk.beat(token, step=100)
    for token in (b"a", b"b"):
        desk.say(token, "launch", round=FIRST_LAST_ROUND, step=100, used={})
    desk.wait(40.0, beating=(b"a", b"b", b"c"))  # the third one is behind
    for token in (b"a", b"b"):
        desk.say(token, "vote", round=FIRST_LAST_ROUND, step=100, has=[0, 1], hash=0)
    desk.say(b"a", "done", note={})
    assert not desk.coordinator.state.has_finished, "the second one had a part in it, and is there"
    desk.say(b"b", "done", note={})
    assert desk.coordinator.state.has_finished
    assert desk.told(b"c", "expelled")[-1]["why"] == RUN_OVER


def test_rounds_do_not_wait_for_who_is_silent_or_paused() -> None:
    desk = Desk(planned=3)
    desk.begin(b"a", b"b", b"c")
    desk.say(b"a", "beat", step=0, step_s=1000.0, roster=0)  # the grace is hours
    desk.wait(5.0, beating=(b"a", b"b"))
    for token in (b"a", b"b"):
        desk.say(token, "launch", round=0, step=4, used={})
    assert desk.told(b"a", "call")[-1] == {"round": 0, "members": [0, 1]}
    for token in (b"a", b"b"):
        desk.say(token, "vote", round=0, step=4, has=[0, 1], hash=0)
    desk.beat(b"c")
    for token in (b"a", b"b"):
        desk.say(token, "launch", round=1, step=8, used={})
    assert len(desk.told(b"a", "call")) == 1, "it is back"
    desk.say(b"a", "command", verb="pause", target="2")
    desk.wait(1.0, beating=(b"a", b"b", b"c"))
    assert desk.told(b"a", "call")[-1] == {"round": 1, "members": [0, 1]}


def test_who_is_suspected_while_the_coordinator_s_own_link_is_cut_is_not_let_go() -> None:
    desk = Desk(planned=4)
    desk.begin(b"a", b"b", b"c", b"d")
    desk.wait(2.0, beating=(b"a", b"b", b"c", b"d"))
    desk.say(b"a", "lost", replica=3)
    desk.wait(LEAST_SILENCE_S - 1.0, beating=(b"a",))  # it hears only of its own host
    assert [member.replica for member in desk.coordinator.state.roster] == [0, 1, 2, 3]
    desk.wait(2.0, beating=(b"a", b"b", b"c"))
    assert [member.replica for member in desk.coordinator.state.roster] == [0, 1, 2], "the others are back"


def test_a_coordinator_killed_while_it_let_a_replica_go_lends_that_one_s_data_again() -> None:
    desk = running()
    desk.say(b"a", "lease", number=0)
    desk.say(b"a", "leave", why="")
    assert [line["what"] for line in desk.journal].count("gone") == 1
    while desk.journal[-1]["what"] != "gone":  # it was killed before it wrote what the replica had
        desk.journal.pop()
    desk.restart()
    desk.say(b"b", "lease", number=0)
    assert desk.told(b"b", "leased")[-1]["shard"] == 0
