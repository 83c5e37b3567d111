"""Claims of one replica that the others' reports contradict: they do not count, and die with it."""

from typing import Any

import pytest
from test_coordinator import Desk

from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.errors import PayloadError
from thinwire.version import __version__

HUGE = 1 << 62
STEPS_A_S = 10.0


class Watched(Desk):
    """Three replicas that do ten steps a second, the last of which lies."""

    def __init__(self) -> None:
        super().__init__(planned=3)
        for token in (b"a", b"b", b"x"):
            self.come(token)
        for token in (b"a", b"b", b"x"):
            self.hear(token, "active", step=0)
        self.train(until_s=5.0)
        self.said.clear()

    def train(self, *, until_s: float, **lie: Any) -> None:
        while self.now_s < until_s:
            self.now_s += 0.5
            for token in (b"a", b"b"):
                self.hear(token, "beat", step=int(STEPS_A_S * self.now_s), step_s=0.1, roster=0)
            self.hear(b"x", "beat", step=lie.get("step", int(STEPS_A_S * self.now_s)), step_s=0.1, roster=0)
            self.coordinator.tick(self.now_s)

    @property
    def furthest(self) -> int:
        return self.coordinator.state.furthest_step()


def test_a_step_that_no_time_allows_does_not_count_and_dies_with_its_member() -> None:
    desk = Watched()
    desk.train(until_s=10.0, step=HUGE)
    desk.hear(b"x", "vote", round=0, step=HUGE, has=[2], hash=0)
    assert desk.furthest <= 100 + 2 * 10 + 1 + 10, "two intervals and the overlap ahead of where the others may be"
    assert desk.coordinator.state.floor_step() < 100 and desk.coordinator.state.keep_from() <= 100
    assert not desk.words(b"a", "expelled"), "no honest one is behind"
    desk.hear(b"x", "leave", why="")
    assert desk.furthest == desk.coordinator.state.roster.in_state("active")[0].step == 100  # type: ignore[arg-type]


def test_one_of_two_claims_no_step_that_no_time_allows() -> None:
    desk = Watched()
    desk.hear(b"b", "leave", why="")
    for _ in range(10):
        desk.now_s += 0.5
        desk.hear(b"a", "beat", step=int(STEPS_A_S * desk.now_s), step_s=0.1, roster=0)
        desk.hear(b"x", "beat", step=HUGE, step_s=0.1, roster=0)
    desk.coordinator.tick(desk.now_s)
    assert desk.furthest <= 100 + 2 * 10 + 1 + 10 and not desk.words(b"a", "expelled")


def test_claimed_tokens_a_second_are_bounded_by_the_steps_that_the_coordinator_saw() -> None:
    desk = Watched()
    desk.coordinator.state.config.job["config"] = {"data": {"batch_size": 2}, "model": {"seq_len": 8}}  # type: ignore[index]
    desk.train(until_s=10.0, step=HUGE)
    for token, loss, tokens_s in ((b"a", 2.0, 160.0), (b"b", 2.0, 160.0), (b"x", 9e9, float(HUGE))):
        desk.hear(token, "work", steps_per_interval=10.0, tokens_s=tokens_s, loss=loss)
    honest, _, liar = (one["tokens_s"] for one in desk.coordinator.admin.status()["members"])
    assert honest == 160.0 and liar <= 64 * 16 * 40, "64 batches a step, at four times the others' rate"


def test_a_replica_that_joins_beside_a_liar_gets_a_state_of_a_step_that_comes() -> None:
    desk = Watched()
    desk.train(until_s=6.0, step=HUGE)
    desk.come(b"n")
    desk.train(until_s=6.5, step=HUGE)
    (step,) = {one["step"] for one in desk.words(b"a", "capture")}
    assert 65 <= step <= 65 + 2 * 10 + 1 + 10 + 6


@pytest.mark.parametrize("kind", ["launch", "withhold"])
def test_a_round_at_a_step_that_no_time_allows_is_refused(kind: str) -> None:
    desk = Watched()
    more = {"parts": 1} if kind == "withhold" else {}
    with pytest.raises(PayloadError, match=r"round 9 of replica 2 at step \d+, where it can have reached \d\d at most"):
        desk.hear(b"x", kind, round=9, step=HUGE, used={}, **more)
    assert 9 not in desk.coordinator.state.rounds.open_rounds


def test_a_replica_that_launches_before_all_others_is_not_called_alone() -> None:
    desk = Watched()
    desk.hear(b"x", "launch", round=6, step=70, used={})  # the others are at 50
    desk.train(until_s=6.9)
    assert not desk.words(b"x", "call")
    for token in (b"a", b"b"):
        desk.hear(token, "launch", round=6, step=70, used={})
    assert [one["members"] for one in desk.words(b"x", "call")] == [[0, 1, 2]]


def test_a_loader_takes_part_from_no_step_that_the_run_has_not_reached() -> None:
    desk = Watched()
    desk.come(b"n")
    with pytest.raises(PayloadError, match=r"a state of step \d+, where the run has reached \d\d at most"):
        desk.hear(b"n", "active", step=HUGE)
    assert len(desk.coordinator.state.roster.active) == 3


def test_one_replica_alone_suspects_none_and_throws_out_none_by_a_hash() -> None:
    desk = Watched()
    for _ in range(3):
        desk.hear(b"x", "lost", replica=0)
        assert not desk.coordinator.state.roster.get(0).is_suspect  # type: ignore[union-attr]
    desk.hear(b"x", "captured", step=50, root=64 * "e", bytes=9)
    desk.hear(b"a", "captured", step=50, root=64 * "a", bytes=5)
    assert desk.coordinator.state.roster.active == (0, 1, 2), "of two hashes it is not known which one is wrong"
    desk.hear(b"b", "captured", step=50, root=64 * "a", bytes=5)
    assert desk.coordinator.state.roster.active == (0, 1)


def test_a_replica_that_joins_is_offered_the_state_that_most_hold() -> None:
    desk = Watched()
    desk.come(b"n")
    desk.coordinator.tick(desk.now_s)
    (step,) = {one["step"] for one in desk.words(b"a", "capture")}
    desk.hear(b"x", "captured", step=step, root=64 * "e", bytes=1 << 38)
    assert not desk.words(b"n", "state")
    for token in (b"a", b"b"):
        desk.hear(token, "captured", step=step, root=64 * "a", bytes=5)
    assert {(one["root"], one["bytes"]) for one in desk.words(b"n", "state")} == {(64 * "a", 5)}


def test_a_round_that_no_other_replica_knows_is_not_decided_while_they_go_on() -> None:
    desk = Watched()
    for round_id in (7, 1 << 40):
        desk.hear(b"x", "launch", round=round_id, step=50, used={})
        desk.hear(b"x", "vote", round=round_id, step=50, has=[2], hash=0)
    for number in range(40):
        desk.train(until_s=desk.now_s + 1.0)
        for kind, more in (("launch", {"used": {}}), ("vote", {"has": [0, 1], "hash": 0})):
            for token in (b"a", b"b"):
                desk.hear(token, kind, round=100 + number, step=60 + 10 * number, **more)
    assert desk.words(b"a", "progress")[-1]["closed"] > 400, "nor do the others wait for it"
    assert not {7, 1 << 40} & set(desk.coordinator.state.rounds.decisions)
    assert {100, 130} <= set(desk.coordinator.state.rounds.decisions)


def test_many_members_of_one_address_are_no_majority_and_their_number_is_limited() -> None:
    desk = Desk(planned=2)
    tokens = {b"a": "10.0.0.1", b"b": "10.0.0.2", **{b"x%d" % number: "10.0.0.9" for number in range(3)}}

    def say(token: bytes, kind: str, **fields: Any) -> None:
        message = decode(encode(kind, **fields), to_member=False)
        desk.coordinator.handle(token, message, now_s=desk.now_s, origin=tokens[token])

    def come(token: bytes) -> None:
        say(token, "join", version=VERSION, thinwire=__version__, host="h")
        say(token, "here", address="10.9.9.9", port=1, corpus="c", windows=1, held=0, era=0, disk=0)

    for token in tokens:
        come(token)
    for token in tokens:
        say(token, "active", step=0)
    for token in [token for token in tokens if token.startswith(b"x")]:
        for honest in (0, 1):
            for kind in ("reject", "lost"):
                more = {"round": 0, "member": honest, "parts": 2, "since": 0, "fault": "non_finite", "why": ""}
                say(token, kind, **(more if kind == "reject" else {"replica": honest}))
    assert desk.coordinator.state.roster.active == (0, 1, 2, 3, 4)
    assert not any(member.is_suspect for member in desk.coordinator.state.roster)
    for number in range(3, 70):
        tokens[b"x%d" % number] = "10.0.0.9"
        say(b"x%d" % number, "join", version=VERSION, thinwire=__version__, host="h")
    assert len(desk.coordinator.state.roster) == 2 + 64
    assert "64 replicas take part from the address 10.0.0.9" in desk.words(b"x69", "refused")[0]["why"]


def test_an_invitation_stays_with_the_address_that_used_it_also_at_another_coordinator() -> None:
    desk = Desk(planned=1, is_invite_only=True)

    def ask(desk: Desk, token: bytes, *, invitation: int, origin: str) -> None:
        message = {"kind": "join", "version": VERSION, "thinwire": __version__, "host": token.decode()}
        desk.coordinator.handle(
            token, message, now_s=desk.now_s, origin=origin, invitation=invitation, is_own_host=False
        )

    ask(desk, b"a", invitation=1, origin="10.0.0.1")
    ask(desk, b"thief", invitation=1, origin="10.0.0.9")
    assert "a replica has joined by this invitation" in desk.words(b"thief", "refused")[-1]["why"]
    desk.hear(b"a", "leave", why="")
    again = Desk(list(desk.journal), planned=1, is_invite_only=True)
    for found in (desk, again):
        ask(found, b"thief", invitation=1, origin="10.0.0.9")
        why = found.words(b"thief", "refused")[-1]["why"]
        assert "this invitation was used from 10.0.0.1, and admits one replica" in why
        ask(found, b"b", invitation=1, origin="10.0.0.1")
        assert found.words(b"b", "welcome"), "its host comes back"
        for _ in range(3):  # the process was killed, and another one started at once
            ask(found, b"c", invitation=1, origin="10.0.0.1")
            assert not found.words(b"c", "refused") and not found.words(b"c", "welcome")
            found.now_s += 1.5
        ask(found, b"c", invitation=1, origin="10.0.0.1")
        assert found.words(b"c", "welcome") and len(found.coordinator.state.roster) == 1, "a killed process makes room"
        for _ in range(4):  # this one lives
            ask(found, b"d", invitation=1, origin="10.0.0.1")
            found.now_s += 1.0
            found.hear(b"c", "beat", step=0, step_s=0.1, roster=0)
        assert "a replica has joined by this invitation" in found.words(b"d", "refused")[-1]["why"]
