"""What the coordinator says when a word was lost, when it comes back from its journal, when all who knew are gone."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.elastic.coordinator import MOST_BAD_PARTS, Coordinator
from thinwire.elastic.coordinator_session import Neighbour
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import VERSION, Message, checked_member, decode, encode
from thinwire.errors import PayloadError
from thinwire.training.elastic.coordinator_process import EndOfRun
from thinwire.version import __version__


class Desk:
    """A coordinator without wires."""

    def __init__(
        self, journal: list[dict[str, Any]] | None = None, *, planned: int = 2, resumed_step: int = 0,
        is_invite_only: bool = False,
    ) -> None:  # fmt: skip
        self.journal: list[dict[str, Any]] = [] if journal is None else journal
        self.said: list[tuple[bytes, Message]] = []
        self.now_s = 0.0
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=planned, sync_interval=10, overlap_steps=1,
                shard_windows=8, resumed_step=resumed_step, is_invite_only=is_invite_only,
            ),
            send=self._send, record=lambda what, fields: self.journal.append({"what": what, **fields}),
            generation="g",
        )  # fmt: skip
        self.coordinator.replay([dict(line) for line in self.journal], now_s=0.0)

    def _send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        self.said.append((token, decode(encode(kind, **fields), to_member=True)))

    def hear(self, token: bytes, kind: str, **fields: Any) -> None:
        message = decode(encode(kind, **fields), to_member=False)
        self.coordinator.handle(token, message, now_s=self.now_s)

    def words(self, token: bytes, kind: str) -> list[Message]:
        """Return what was said of a kind to a connection, and forget it."""
        found = [message for to, message in self.said if to == token and message["kind"] == kind]
        self.said = [one for one in self.said if one[1] not in found or one[0] != token]
        return found

    def come(self, token: bytes, *, corpus: str = "c", disk: int = 0) -> None:
        self.hear(token, "join", version=VERSION, thinwire=__version__, host=token.decode())
        self.hear(token, "here", address="127.0.0.1", port=1, corpus=corpus, windows=100, held=0, era=0, disk=disk)

    def begun(self) -> "Desk":
        for token in (b"a", b"b"):
            self.come(token)
        for token in (b"a", b"b"):
            self.hear(token, "active", step=0)
            self.hear(token, "beat", step=0, step_s=0.1, roster=0)
        self.said.clear()
        return self

    def again(self) -> "Desk":
        """Return the coordinator that comes after this one was killed."""
        return Desk(self.journal)

    def decide(self, *, used: dict[str, int]) -> None:
        for token in (b"a", b"b"):
            self.hear(token, "launch", round=0, step=10, used=used if token == b"a" else {})
        for token in (b"a", b"b"):
            self.hear(token, "vote", round=0, step=10, has=[0, 1], hash=0)


def test_replicas_with_other_first_values_wait_for_the_state_of_those_that_begin() -> None:
    desk = Desk(planned=3)
    for token, values in ((b"a", "a"), (b"b", "b"), (b"c", "a")):
        desk.hear(token, "join", version=VERSION, thinwire=__version__, host="h")
        where = {"address": "127.0.0.1", "port": 1, "corpus": "", "windows": 1, "held": 0, "era": 0, "disk": 0}
        desk.hear(token, "here", **where, first_values=64 * values)
    for now in (desk, desk.again()):
        now.coordinator.tick(1.0)
        assert now.coordinator.state.first_values == 64 * "a"
        assert [*now.words(b"b", "state")] == []
    roots = {token: [one["root"] for one in desk.words(token, "state")] for token in (b"a", b"b", b"c")}
    assert roots == {b"a": ["seed"], b"b": [], b"c": ["seed"]}
    desk.hear(b"a", "active", step=0)
    assert desk.words(b"a", "capture") and desk.coordinator.state.snapshots.of(1) is not None
    for token in (b"a", b"c"):
        desk.hear(token, "leave", why="")
    assert [one["root"] for one in desk.words(b"b", "state")] == ["seed"]  # nobody holds the others any more


def test_a_member_has_a_role_that_others_learn_and_an_unknown_one_is_refused_by_name() -> None:
    desk = Desk().begun()
    desk.hear(b"c", "join", version=VERSION, thinwire=__version__, host="h", role="reader")
    desk.hear(b"c", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=0, era=0, disk=0)
    roles = ["replica", "replica", "reader"]
    assert [one["role"] for one in desk.words(b"a", "roster")[-1]["members"]] == roles
    assert [member.role for member in desk.again().coordinator.state.roster] == roles
    desk.hear(b"d", "join", version=VERSION, thinwire=__version__, host="h", role="king\x1b[2J")
    (refusal,) = desk.words(b"d", "refused")
    assert refusal["why"].startswith(
        "there is no role 'king?[2J'; allowed are replica, stage, server, client, rollout,"
    )
    where = {"replica": 1, "host": "h", "address": "127.0.0.1", "port": 1, "state": "active"}
    assert Neighbour.of(checked_member({**where, "role": "stage"})).role == "stage"
    with pytest.raises(
        PayloadError, match="a member of the roster: there is no role 'king'; allowed are replica, stage"
    ):
        checked_member({**where, "role": "king"})


def test_a_lost_call_is_said_again_to_who_launches_again() -> None:
    desk = Desk().begun()
    for token in (b"a", b"b"):
        desk.hear(token, "launch", round=0, step=10, used={})
    assert len(desk.words(b"a", "call")) == 1
    desk.hear(b"a", "launch", round=0, step=10, used={})
    assert desk.words(b"a", "call") == [{"kind": "call", "round": 0, "members": [0, 1]}]


def test_a_lost_state_is_offered_again_to_who_says_again_where_it_is() -> None:
    desk = Desk(planned=1)
    desk.come(b"a")
    assert [one["root"] for one in desk.words(b"a", "state")] == ["seed"]
    desk.hear(b"a", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=0, era=0, disk=0)
    assert [one["root"] for one in desk.words(b"a", "state")] == ["seed"]
    desk.hear(b"a", "active", step=0)
    desk.come(b"b")
    step = desk.words(b"a", "capture")[0]["step"]
    desk.hear(b"a", "captured", step=step, root="ab" * 32, bytes=5)
    assert [one["step"] for one in desk.words(b"b", "state")] == [step]
    desk.hear(b"b", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=0, era=0, disk=0)
    assert [one["step"] for one in desk.words(b"b", "state")] == [step]


def test_who_says_again_that_it_takes_part_is_told_again_that_it_does() -> None:
    desk = Desk().begun()
    desk.hear(b"a", "active", step=0)
    states = {one["replica"]: one["state"] for one in desk.words(b"a", "roster")[0]["members"]}
    assert states == {0: "active", 1: "active"}


def test_the_end_is_told_again_and_after_a_crash_among_those_that_are_done() -> None:
    desk = Desk().begun()
    for number, token in enumerate((b"a", b"b")):
        desk.hear(token, "done", note={"number": number})
    assert desk.words(b"b", "finish")[0]["notes"] == [{"number": 0}, {"number": 1}]
    desk.hear(b"b", "done", note={"number": 1})
    assert len(desk.words(b"b", "finish")) == 1
    after = desk.again()
    after.coordinator.tick(0.1)
    assert after.words(b"a", "finish")[0]["notes"] == [{"number": 0}, {"number": 1}]


def test_what_a_round_counted_is_counted_also_after_a_crash() -> None:
    desk = Desk().begun()
    desk.hear(b"a", "lease", number=0)
    desk.decide(used={"0": 5})
    assert desk.coordinator.state.leases.counted == 5
    after = desk.again()
    assert after.coordinator.state.leases.state_dict() == desk.coordinator.state.leases.state_dict()
    after.hear(b"a", "leave", why="")
    assert (after.coordinator.state.leases.counted, after.coordinator.state.leases.repeated) == (5, 0)
    after.hear(b"b", "lease", number=0)
    assert after.words(b"b", "leased")[0]["start"] == 5


@pytest.mark.parametrize("is_again", [False, True])
def test_a_state_is_noted_with_the_account_of_its_own_step(is_again: bool) -> None:
    desk = Desk().begun()
    desk.hear(b"a", "lease", number=0)
    desk.decide(used={"0": 5})  # launched at step 10, and applied at 11
    for token, used in ((b"a", {"0": 7}), (b"b", {})):
        desk.hear(token, "launch", round=1, step=20, used=used)
    for token in (b"a", b"b"):
        desk.hear(token, "vote", round=1, step=20, has=[0, 1], hash=0)
    if is_again:
        desk = desk.again()
    counted = {}
    for step in (10, 11, 20, 21):
        desk.hear(b"b", "account", step=step)
        desk.hear(b"a", "captured", step=step, root="ab" * 32, bytes=5)
        noted = desk.words(b"b", "account")[0]["note"]["data"]
        assert desk.words(b"a", "state")[0]["note"]["data"] == noted, "a checkpoint's is the same"
        counted[step] = noted["counted"]
    assert counted == {10: 0, 11: 5, 20: 5, 21: 7}


def test_a_run_that_goes_back_lends_again_what_its_state_does_not_hold() -> None:
    desk = Desk().begun()
    desk.hear(b"a", "lease", number=0)
    desk.decide(used={"0": 5})
    for token in (b"a", b"b"):
        desk.hear(token, "leave", why="all are lost")
    assert desk.coordinator.state.leases.counted == 5
    desk.come(b"c", disk=8)
    assert [(one["root"], one["step"]) for one in desk.words(b"c", "state")] == [("disk", 0)]
    desk.hear(b"c", "active", step=8)
    assert (desk.coordinator.state.leases.counted, desk.coordinator.state.leases.repeated) == (0, 5)
    desk.hear(b"c", "lease", number=0)
    assert [(one["shard"], one["start"]) for one in desk.words(b"c", "leased")] == [(0, 0)]
    assert desk.again().coordinator.state.leases.state_dict() == desk.coordinator.state.leases.state_dict()


def test_a_resumed_run_goes_on_only_from_the_state_that_its_account_belongs_to() -> None:
    desk = Desk(planned=1, resumed_step=40)
    for token, disk in ((b"a", 0), (b"b", 60)):
        desk.come(token, disk=disk)
        assert not desk.words(token, "state"), "with a lower number, and without that state"
    desk.come(b"c", disk=40)
    assert [(one["root"], one["step"]) for one in desk.words(b"c", "state")] == [("disk", 40)]
    desk.hear(b"c", "active", step=40)
    assert desk.coordinator.state.rounds.step == 40


def test_those_that_hold_the_state_of_a_resumed_run_need_not_fetch_it() -> None:
    desk = Desk(planned=1, resumed_step=40)
    for token, held in ((b"a", 40), (b"b", 40), (b"c", 36)):
        desk.hear(token, "join", version=VERSION, thinwire=__version__, host="h")
        where = {"address": "127.0.0.1", "port": 1, "corpus": "c", "windows": 100}
        desk.hear(token, "here", **where, held=held, era=1 if held == 40 else 0, disk=held)
    assert [one["root"] for one in desk.words(b"a", "state")] == ["disk"]
    assert not desk.words(b"b", "state"), "nobody takes part before the first one does"
    desk.hear(b"a", "active", step=40)
    assert [(one["root"], one["step"]) for one in desk.words(b"b", "state")] == [("own", 40)]
    assert not desk.words(b"c", "state") and desk.coordinator.state.snapshots.of(2) is not None, "it is to fetch one"
    desk.hear(b"d", "join", version=VERSION, thinwire=__version__, host="h")
    desk.hear(b"d", "here", **where, held=40, era=1, disk=40)
    assert [(one["root"], one["step"]) for one in desk.words(b"d", "state")] == [("own", 40)], "also who comes later"


def test_of_those_that_come_back_after_all_were_lost_the_one_with_the_newest_state_is_first() -> None:
    desk = Desk().begun()
    desk.decide(used={})
    desk.hear(b"a", "leave", why="")
    desk.come(b"c")
    desk.come(b"d", disk=20)
    desk.hear(b"b", "leave", why="")
    assert not desk.words(b"c", "state")
    assert [one["root"] for one in desk.words(b"d", "state")] == ["disk"]


def test_a_host_of_another_version_is_told_both_protocol_versions() -> None:
    desk = Desk()
    desk.hear(b"x", "join", version=VERSION - 1, thinwire=__version__, host="x")
    assert desk.words(b"x", "refused")[0]["why"] == (
        f"the job runs thinwire {__version__} with protocol version {VERSION}, and this host thinwire {__version__} "
        f"with protocol version {VERSION - 1}; install the same thinwire on all hosts"
    )


def test_another_corpus_is_refused_also_after_a_crash() -> None:
    after = Desk().begun().again()
    after.come(b"x", corpus="another")
    assert "another corpus" in after.words(b"x", "refused")[0]["why"]


def test_decisions_that_nobody_holds_any_more_are_forgotten_by_all() -> None:
    desk = Desk().begun()
    desk.decide(used={})
    desk.come(b"x")
    assert len(desk.words(b"x", "decision")) == 1
    desk.hear(b"a", "leave", why="")
    desk.hear(b"b", "leave", why="")
    assert desk.words(b"x", "anew") and [one["root"] for one in desk.words(b"x", "state")] == ["disk"]
    assert not desk.coordinator.state.rounds.decisions and desk.coordinator.state.rounds.step == 0
    for found in (desk, desk.again()):  # also one that comes back must not offer the seed
        found.hear(b"x", "leave", why="")
        found.come(b"y")
        assert [one["root"] for one in found.words(b"y", "state")] == ["disk"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("vote", {"round": 0, "step": 10, "has": [0, 1, 2], "hash": 0}),
        ("lease", {"number": 1000}),
        ("launch", {"round": 10_000, "step": 10, "used": {}}),
    ],
)
def test_what_cannot_be_is_refused_and_takes_no_memory(kind: str, fields: dict[str, Any]) -> None:
    desk = Desk().begun()
    desk.hear(b"a", "launch", round=0, step=10, used={})
    if kind == "lease":
        for number in range(256):
            desk.hear(b"a", "lease", number=number)
    if kind == "launch":
        for number in range(1, 128):
            desk.hear(b"a", "launch", round=number, step=10, used={})
    with pytest.raises(PayloadError, match=r"at most|unknown replicas"):
        desk.hear(b"a", kind, **fields)


def test_notes_without_an_end_are_cut_off() -> None:
    desk = Desk().begun()
    for number in range(1000):
        desk.hear(b"a", "note", level="warning", text=str(number))
    assert len([line for line in desk.journal if line["what"] == "finding"]) < 200
    desk.hear(b"b", "note", level="warning", text="heard")
    assert desk.coordinator.state.findings[-1].endswith("heard")


def test_records_are_kept_once_and_answered_each_time_also_by_the_next_coordinator() -> None:
    desk, kept = Desk().begun(), []
    desk.coordinator._keep_records = lambda replica, text: kept.append((replica, text))
    for number, text in ((0, "x"), (0, "x"), (1, "y")):
        desk.hear(b"b", "records", number=number, text=text)
    assert kept == [(1, "x"), (1, "y")]
    assert [word["number"] for word in desk.words(b"b", "recorded")] == [0, 0, 1]
    again = desk.again()
    again.hear(b"b", "records", number=1, text="y")  # the answer was lost with the one before
    assert again.words(b"b", "recorded") == [{"kind": "recorded", "number": 1}]


def test_a_part_whose_launch_nobody_heard_is_told_of() -> None:
    desk = Desk(planned=3)
    for token in (b"a", b"b", b"c"):
        desk.come(token)
    for token in (b"a", b"b", b"c"):
        desk.hear(token, "active", step=0)
    desk.hear(b"c", "launch", round=0, step=10, used={"0": 3})
    again = desk.again()  # it never heard the third one's launch, whose part the others have
    again.hear(b"c", "leave", why="")
    for token in (b"a", b"b"):
        again.hear(token, "launch", round=0, step=10, used={})
    for token in (b"a", b"b"):
        again.hear(token, "vote", round=0, step=10, has=[0, 1, 2], hash=0)
    assert again.coordinator.state.rounds.decisions[0].members == (0, 1, 2)
    assert any("counts a part of replica 2, which went before" in text for text in again.coordinator.state.findings)
    desk.hear(b"a", "launch", round=0, step=10, used={})
    desk.hear(b"c", "leave", why="")
    desk.hear(b"b", "launch", round=0, step=10, used={})
    for token in (b"a", b"b"):
        desk.hear(token, "vote", round=0, step=10, has=[0, 1, 2], hash=0)
    assert not any("counts a part" in text for text in desk.coordinator.state.findings), "its launch was heard here"


def test_the_loss_of_a_run_is_that_of_its_replicas_by_their_tokens_and_moves_little_when_one_comes() -> None:
    desk = Desk().begun()
    assert desk.coordinator.admin.status()["loss"] == 0
    for token, tokens_s, loss in ((b"a", 300.0, 2.0), (b"b", 100.0, 3.0)):
        desk.hear(token, "work", steps_per_interval=10.0, tokens_s=tokens_s, loss=loss)
    assert desk.coordinator.admin.status()["loss"] == 2.25
    desk.come(b"c")
    desk.hear(b"c", "active", step=5)
    assert desk.coordinator.admin.status()["loss"] == 2.25, "it has told none yet"
    desk.hear(b"c", "work", steps_per_interval=1.0, tokens_s=4.0, loss=9.0)
    assert abs(desk.coordinator.admin.status()["loss"] - 2.25) < 0.07
    desk.hear(b"b", "leave", why="")
    assert desk.coordinator.admin.status()["loss"] == round((600 + 36) / 304, 4)


class Three(Desk):
    """Three replicas that take part; c has been lent a shard."""

    def __init__(self, journal: list[dict[str, Any]] | None = None) -> None:
        super().__init__(journal, planned=3)

    def begun(self) -> "Three":
        for token in (b"a", b"b", b"c"):
            self.come(token)
        for token in (b"a", b"b", b"c"):
            self.hear(token, "active", step=0)
        self.hear(b"c", "lease", number=0)
        self.said.clear()
        return self

    def round(self, number: int, *, used: int, parts: int = 0) -> None:
        """Decide a round; c has trained up to a window, and withholds its part where it is one of several bad ones."""
        step, members = 10 * (number + 1), [0, 1] if parts else [0, 1, 2]
        if parts:
            self.hear(b"c", "withhold", round=number, step=step, used={"0": used}, parts=parts)
        for token in (b"a", b"b") if parts else (b"a", b"b", b"c"):
            self.hear(token, "launch", round=number, step=step, used={"0": used} if token == b"c" else {})
        for token in (b"a", b"b") if parts else (b"a", b"b", b"c"):
            self.hear(token, "vote", round=number, step=step, has=members, hash=0)
        assert self.coordinator.state.rounds.decisions[number].members == tuple(members)

    def told_of_nan(self) -> list[str]:
        return [text for text in self.coordinator.state.findings if "NaN" in text]


def test_a_replica_is_dropped_after_some_bad_parts_and_its_windows_since_the_last_good_one_go_back() -> None:
    desk = Three().begun()
    desk.round(0, used=2)
    for parts in range(1, MOST_BAD_PARTS):
        desk.round(parts, used=2 + parts, parts=parts)
    assert not desk.words(b"c", "expelled") and desk.coordinator.state.leases.counted == 2
    desk.round(MOST_BAD_PARTS, used=6, parts=MOST_BAD_PARTS)
    assert [one["has_bad_parts"] for one in desk.words(b"c", "expelled")] == [True]
    assert (desk.coordinator.state.leases.counted, desk.coordinator.state.leases.repeated) == (2, 4)
    desk.hear(b"a", "lease", number=0)
    assert desk.words(b"a", "leased")[0]["start"] == 2
    assert len(desk.told_of_nan()) == 1


def test_nobody_waits_for_a_bad_part_and_a_bad_replica_is_not_called_late() -> None:
    desk = Three().begun()
    desk.hear(b"c", "withhold", round=0, step=10, used={}, parts=1)
    desk.hear(b"c", "withhold", round=0, step=10, used={}, parts=1)  # said again until it is answered
    for token in (b"a", b"b"):
        desk.hear(token, "launch", round=0, step=10, used={})
    assert desk.words(b"a", "call") == [{"kind": "call", "round": 0, "members": [0, 1]}]
    assert not desk.coordinator.state.rounds.late


def test_one_that_is_bad_again_before_any_part_of_it_counted_is_the_same_episode() -> None:
    desk = Three().begun()
    desk.round(0, used=2, parts=MOST_BAD_PARTS)
    for number in (1, 2):
        desk.said.clear()
        desk.come(b"c")
        desk.hear(b"c", "active", step=10 * number)
        desk.round(number, used=0, parts=MOST_BAD_PARTS)
        assert desk.words(b"c", "expelled") and len(desk.told_of_nan()) == 1
    desk.come(b"c")
    desk.hear(b"c", "active", step=30)
    replica = desk.coordinator.state.roster.next_replica - 1
    for token in (b"a", b"b", b"c"):
        desk.hear(token, "launch", round=3, step=40, used={})
    for token in (b"a", b"b", b"c"):
        desk.hear(token, "vote", round=3, step=40, has=[0, 1, replica], hash=0)
    desk.round(4, used=0, parts=MOST_BAD_PARTS)
    assert len(desk.told_of_nan()) == 2, "it had recovered meanwhile: that is another episode"


def test_what_rounds_counted_of_parts_that_most_others_found_bad_is_trained_again() -> None:
    desk = Three().begun()
    for number, used in enumerate((2, 5, 8)):  # the third round counts the whole shard
        desk.round(number, used=used)
    assert desk.coordinator.state.leases.counted == 8
    desk.hear(b"a", "reject", round=2, member=2, parts=2, since=1, fault="non_finite", why="")
    assert not desk.words(b"c", "expelled"), "one of two others is not most of them"
    desk.hear(b"b", "reject", round=2, member=2, parts=1, since=2, fault="non_finite", why="")
    assert not desk.words(b"c", "expelled"), "one bad part may be an accident"
    again = Three(desk.journal)
    for found in (desk, again):  # also where the coordinator is another process by now
        found.hear(b"a", "reject", round=3, member=2, parts=2, since=1, fault="non_finite", why="")
        found.hear(b"b", "reject", round=3, member=2, parts=2, since=1, fault="non_finite", why="")
        assert [one["has_bad_parts"] for one in found.words(b"c", "expelled")] == [True]
        assert (found.coordinator.state.leases.counted, found.coordinator.state.leases.repeated) == (2, 6)
        for process in (found, Three(found.journal)):  # a state of a step in between counts none of the bad rounds
            process.hear(b"a", "account", step=21)
            assert process.words(b"a", "account")[0]["note"]["data"]["counted"] == 2
        found.hear(b"a", "lease", number=0)
        assert found.words(b"a", "leased")[0]["start"] == 2


def test_a_replica_that_finds_its_own_part_bad_needs_nobody_else_to_say_so() -> None:
    desk = Three().begun()
    desk.round(0, used=2)
    desk.hear(b"c", "reject", round=0, member=2, parts=2, since=0, fault="non_finite", why="")
    assert desk.words(b"c", "expelled") and desk.coordinator.state.leases.counted == 0


def test_a_run_without_a_finite_part_fails_for_all_also_for_those_that_come_and_after_a_crash() -> None:
    desk = Desk().begun()
    desk.come(b"x")
    desk.hear(b"a", "withhold", round=0, step=10, used={}, parts=1)
    desk.hear(b"a", "withhold", round=1, step=12, used={}, parts=MOST_BAD_PARTS)
    assert not desk.words(b"a", "expelled") and not desk.coordinator.state.failure, "b may have a finite part"
    desk.hear(b"b", "withhold", round=0, step=10, used={}, parts=1)
    for token in (b"a", b"b", b"x"):
        assert "all 2 active replicas hold NaN" in desk.words(token, "failed")[0]["why"]
    assert not desk.words(b"a", "expelled") and not desk.words(b"b", "expelled")
    for found in (desk, desk.again()):
        found.come(b"y")
        assert "the model has diverged" in found.words(b"y", "refused")[0]["why"]
        assert found.coordinator.admin.status()["finished"]


def test_a_bad_replica_is_the_last_one_when_the_others_go() -> None:
    desk = Desk().begun()
    desk.hear(b"a", "withhold", round=0, step=10, used={}, parts=1)
    desk.hear(b"b", "leave", why="")
    assert "the part of the one active replica holds NaN" in desk.words(b"a", "failed")[0]["why"]


def test_a_replica_that_beats_but_does_no_step_joins_again_once_it_is_too_far_behind() -> None:
    desk = Desk().begun()
    most = desk.coordinator.state.most_steps_behind
    for second in range(1, 60):
        desk.now_s = float(second)
        desk.hear(b"a", "beat", step=(most + 1 if second > 30 else most), step_s=0.1, roster=0)
        desk.hear(b"b", "beat", step=0, step_s=0.1, roster=0)
        desk.coordinator.tick(desk.now_s)
        if second == 30:
            assert not desk.words(b"b", "expelled"), "it can still follow"
        if desk.words(b"b", "expelled"):
            break
    assert second == 31
    assert f"b did no step for 31.0 s and is {most + 1} steps behind" in desk.coordinator.state.findings[-1]
    assert desk.coordinator.state.roster.active == (0,)


def test_a_replica_with_long_steps_one_that_is_paused_and_one_that_comes_back_are_not_taken_for_stalled() -> None:
    desk = Desk().begun()
    most = desk.coordinator.state.most_steps_behind
    desk.hear(b"b", "beat", step=0, step_s=10.0, roster=0)
    desk.now_s = 39.0
    for token, step, step_s in ((b"a", 10 * most, 0.1), (b"b", 0, 10.0)):
        desk.hear(token, "beat", step=step, step_s=step_s, roster=0)
    desk.coordinator.tick(desk.now_s)
    assert not desk.words(b"b", "expelled"), "its step takes 10 s"
    desk.coordinator.state.roster.get(1).is_paused = True
    desk.now_s = 45.0
    for token in (b"a", b"b"):
        desk.hear(token, "rates", rates={}, latest={}, probes={})
    desk.coordinator.tick(desk.now_s)
    assert not desk.words(b"b", "expelled")
    later = desk.again()  # whose replicas have yet to find it
    later.hear(b"a", "beat", step=10 * most, step_s=0.1, roster=0)
    later.now_s = 25.0
    later.hear(b"b", "rates", rates={}, latest={}, probes={})
    later.coordinator.tick(25.0)
    assert not later.words(b"b", "expelled")


def test_the_reason_of_a_refusal_is_one_finding_however_often_a_host_asks() -> None:
    desk = Desk().begun()
    for number in range(5):
        for host in ("new", "newer"):
            desk.hear(b"%d" % number, "join", version=VERSION, thinwire="0.0.1", host=host)
    told = [text for text in desk.coordinator.admin.status()["findings"] if "was refused" in text]
    assert len(told) == 2 and told[0].startswith(f"a replica of new was refused: the job runs thinwire {__version__}")
    assert "install the same thinwire on all hosts" in told[0]


def test_a_loop_that_all_replicas_have_left_needs_no_coordinator_and_one_that_lost_them_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("thinwire.training.elastic.coordinator_process.time", clock)
    for reasons, until_s in ((("left", "has come to the end"), 11), (("left", "left after an error"), 601)):
        desk = Desk().begun()
        end = EndOfRun(desk.coordinator.state, threading.Event(), alone=tmp_path / "alone", idle_s=600.0)
        assert not end.has_come()
        for token, reason in zip((b"a", b"b"), reasons, strict=True):
            desk.hear(token, "leave", why=reason)
        began_s = clock.now_s
        while not end.has_come():
            clock.now_s += 1.0
        assert clock.now_s - began_s == until_s


def test_one_episode_of_bad_parts_is_one_finding_whoever_reports_it() -> None:
    desk = Three().begun()

    def num_found() -> int:
        return sum("was applied without the part of replica 2" in text for text in desk.coordinator.state.findings)

    for number, since in ((5, 5), (6, 6), (6, 5), (8, 8)):  # observers see it begin in other rounds
        for token in (b"a", b"b"):
            desk.hear(token, "reject", round=number, member=2, parts=1, since=since, fault="foreign", why="")
            desk.coordinator.state.rounds.num_decided = number
    assert num_found() == 1
    desk.coordinator.state.rounds.num_decided = 8 + 33
    desk.hear(b"b", "reject", round=41, member=2, parts=1, since=41, fault="foreign", why="")
    assert num_found() == 2, "a later episode is another finding"


def test_what_several_replicas_note_about_one_holder_of_a_state_is_one_finding() -> None:
    desk = Three().begun()
    for token, step in ((b"a", 20), (b"b", 20), (b"a", 40)):
        about = f"state of step {step} from replica 2"
        desk.hear(token, "note", level="warning", text="replica 2 sent wrong bytes", about=about)
    for _ in range(2):  # notes about nothing in particular count each
        desk.hear(b"a", "note", level="warning", text="plain")
    found = desk.coordinator.state.findings
    assert sum("wrong bytes" in text for text in found) == 2 == sum("plain" in text for text in found)
