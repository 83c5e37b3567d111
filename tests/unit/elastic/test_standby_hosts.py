"""Hosts that wait to take a lost replica's place: when they are called, and for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_state import CoordinatorConfig, StandbyHosts
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.monitor.detect.live import News
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.remediation import Action
from thinwire.training.elastic.remediation import DowntimeTracker, ElasticRemediation
from thinwire.version import __version__


class Town:
    """A coordinator with replicas on hosts a, b and c, which has started."""

    def __init__(self, lines: list[dict[str, Any]] | None = None) -> None:
        self.said: list[tuple[bytes, str, dict[str, Any]]] = []
        self.lines: list[dict[str, Any]] = []
        self.now_s = 0.0
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=3, sync_interval=10, overlap_steps=1,
                shard_windows=8,
            ),
            generation="g", send=lambda *what: self.said.append(what), record=self._record,
        )  # fmt: skip
        if lines is not None:
            self.coordinator.replay(lines, now_s=0.0)
            return
        for token in (b"a", b"b", b"c"):
            self.join(token)

    def _record(self, what: str, fields: dict[str, Any]) -> None:
        self.lines.append({"what": what, **fields})

    def join(self, token: bytes, host: str = "") -> None:
        self.hear(token, "join", version=VERSION, thinwire=__version__, host=host or token.decode())
        self.hear(token, "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=0, era=0, disk=0)
        self.hear(token, "active", step=0)

    def hear(self, token: bytes, kind: str, **fields: Any) -> None:
        self.coordinator.handle(token, decode(encode(kind, **fields), to_member=False), now_s=self.now_s)

    def command(self, verb: str, target: str = "", token: bytes = b"person") -> dict[str, Any]:
        self.hear(token, "command", verb=verb, target=target)
        return next(fields for to, kind, fields in reversed(self.said) if (to, kind) == (token, "answer"))

    def go_on(self, until_s: float, *, alive: bytes = b"", spares: tuple[str, ...] = ()) -> list[str]:
        """Let seconds pass in which some replicas beat and spares ask; return what the spares were told."""
        told = []
        while self.now_s < until_s:
            self.now_s += 1.0
            for token in alive:
                self.hear(bytes([token]), "beat", step=0, step_s=0.1, roster=0)
            told = [self.command("spare", host, token=host.encode())["text"] for host in spares]
            self.coordinator.tick(self.now_s)
        return told


def test_a_spare_is_called_for_a_replica_that_its_own_host_does_not_bring_back() -> None:
    town = Town()
    assert town.go_on(39.0, alive=b"ab", spares=("s", "t")) == ["", ""]
    status = town.command("status")["status"]
    assert [one["host"] for one in status["members"]] == ["a", "b"] and status["spares"] == ["s", "t"]
    assert town.go_on(43.0, alive=b"ab", spares=("s", "t")) == ["come", ""]
    status = town.command("status")["status"]
    assert status["replaced"] == [{"replica": 2, "host": "s"}] and status["spares"] == ["t"]
    assert status["findings"][-1] == "spare s is called to take the place of replica 2"
    town.join(b"s")
    assert town.go_on(100.0, alive=b"abs", spares=("t",)) == [""]


def test_a_replica_that_comes_back_in_time_needs_no_spare_nor_does_one_that_left() -> None:
    town = Town()
    town.go_on(25.0, alive=b"ab", spares=("s",))
    town.join(b"n", host="c")
    town.hear(b"b", "leave", why="left")
    assert town.go_on(120.0, alive=b"an", spares=("s",)) == [""]
    assert town.command("status")["status"]["replaced"] == []


def test_a_spare_that_does_not_come_has_another_one_called_in_its_stead() -> None:
    town = Town()
    assert town.go_on(42.0, alive=b"ab", spares=("s", "t")) == ["come", ""]
    assert town.go_on(81.0, alive=b"ab", spares=("t",)) == [""]
    assert town.go_on(85.0, alive=b"ab", spares=("t",)) == ["come"]
    assert [one["host"] for one in town.command("status")["status"]["replaced"]] == ["s", "t"]


def test_a_spare_that_reads_another_corpus_leaves_the_place_to_the_next_one() -> None:
    town = Town()
    assert town.go_on(42.0, alive=b"ab", spares=("s", "t")) == ["come", ""]
    town.hear(b"s", "join", version=VERSION, thinwire=__version__, host="s")
    town.hear(b"s", "here", address="127.0.0.1", port=1, corpus="another", windows=100, held=0, era=0, disk=0)
    assert town.go_on(85.0, alive=b"ab", spares=("t",)) == ["come"]
    # one that joins by itself and cannot take part was never part of the run
    town.hear(b"x", "join", version=VERSION, thinwire=__version__, host="x")
    town.hear(b"x", "here", address="127.0.0.1", port=1, corpus="another", windows=100, held=0, era=0, disk=0)
    assert "x" not in {vacancy.host for vacancy in town.coordinator.state.standby_hosts.vacancies}


def test_one_that_has_come_to_the_end_has_no_place_to_be_taken() -> None:
    town = Town()
    town.hear(b"c", "done", note={})
    assert town.go_on(120.0, alive=b"ab", spares=("s",)) == [""]


def test_a_place_is_remembered_by_the_next_process_of_the_coordinator() -> None:
    town = Town()
    town.go_on(25.0, alive=b"ab")
    again = Town(town.lines)
    assert again.go_on(42.0, alive=b"ab", spares=("s",)) == ["come"]


def test_a_spare_is_called_at_once_where_that_is_asked_for_and_only_once_for_a_place() -> None:
    town = Town()
    town.go_on(2.0, alive=b"abc", spares=("s", "t"))
    assert town.command("expel", "2")["ok"]
    answer = town.command("call", "2")
    assert (answer["ok"], answer["text"]) == (True, "spare s takes its place")
    assert town.go_on(3.0, alive=b"ab", spares=("s", "t")) == ["come", ""]
    town.join(b"s")
    assert town.go_on(100.0, alive=b"abs", spares=("t",)) == [""]


@pytest.mark.parametrize("target", ["", "3", "-1", "a", "²", "2" * 70, "2" * 60_000])
def test_nobody_is_called_for_a_replica_that_never_was(target: str) -> None:
    town = Town()
    town.command("spare", "s", token=b"s")
    answer = town.command("call", target)
    assert not answer["ok"] and "there was no replica" in answer["text"] and answer["status"]["replaced"] == []


def test_without_a_spare_a_call_says_how_to_add_one() -> None:
    town = Town()
    town.command("spare", "s", token=b"s")
    town.now_s = 6.0  # it has not asked for so long
    answer = town.command("call", "1")
    assert not answer["ok"] and "--spare" in answer["text"]


def told_of_a_call() -> list[list[int | str]]:
    """Return what a journal holds of a spare that was called, and of a place that waits for its own host."""
    spares = StandbyHosts()
    spares.lost(2, "b", now_s=0.0)
    assert not spares.ask(b"old", "s", now_s=0.0) and spares.call(1, now_s=0.0) == "s"
    told = spares.take_change()
    assert told == [[2, "b", 0], [1, "s", 1]] and spares.take_change() is None
    return told


def test_a_spare_that_has_not_heard_its_call_is_called_again_by_the_next_coordinator() -> None:
    spares = StandbyHosts()
    spares.load(told_of_a_call(), now_s=1.0)
    assert not spares.ask(b"b", "b", now_s=2.0), "its own host's process comes without being called"
    assert not spares.ask(b"t", "t", now_s=2.0)
    assert spares.ask(b"s", "s", now_s=2.0) and spares.ask(b"s", "s", now_s=3.0)
    assert not spares.ask(b"again", "s", now_s=3.0), "one for each place"
    spares.joined("s")
    assert [vacancy.replica for vacancy in spares.vacancies] == [2]


@pytest.mark.parametrize("way", ["it came", "it was passed over"])
def test_a_spare_whose_place_is_not_its_own_any_more_waits_on(way: str) -> None:
    spares = StandbyHosts()
    spares.load(told_of_a_call(), now_s=1.0)
    if way == "it came":
        spares.joined("s")
    elif way == "it was passed over":
        spares.ask(b"t", "t", now_s=30.0)
        assert spares.due(now_s=31.0, patience_s=20.0) == [(2, "t")]
        spares.ask(b"u", "u", now_s=31.0)
        assert spares.due(now_s=31.0, patience_s=20.0) == [(1, "u")]
    assert not spares.ask(b"s", "s", now_s=32.0)


def test_spares_and_places_are_bounded() -> None:
    spares = StandbyHosts()
    for number in range(1000):
        spares.ask(b"%d" % number, f"host {number}", now_s=0.0)
        spares.lost(number, f"host {number}", now_s=0.0)
    assert len(spares.waiting(now_s=1.0)) == 256 and [vacancy.replica for vacancy in spares.vacancies] == [
        *range(936, 1000)
    ]
    spares.ask(b"later", "later", now_s=10.0)
    assert spares.waiting(now_s=10.0) == ("later",)
    assert spares.due(now_s=10.0, patience_s=5.0) == [(936, "later")]


def act(town: Town, tmp_path: Path, *, is_hang: bool) -> str:
    hands = ElasticRemediation(
        tmp_path, status=lambda: town.coordinator.admin.status(now_s=town.now_s),
        send_command=lambda verb, target: str(town.command(verb, target)["text"]),
    )  # fmt: skip
    members = hands.members()
    assert members is not None and members.num_spares == 1
    return hands.act(Action(kind="replace", target=1, case=0, why="It hangs.", is_hang=is_hang))


def test_who_hangs_is_ended_and_who_is_slow_leaves_where_a_spare_takes_the_place(tmp_path: Path) -> None:
    town = Town()
    town.go_on(1.0, alive=b"abc", spares=("s",))
    assert act(town, tmp_path, is_hang=True) == (
        "replica 1 on b was let go, and its host ends its process; spare s takes its place"
    )
    assert list(town.coordinator.state.orders) == [{"replica": 1, "what": "end"}]
    town = Town()
    town.go_on(1.0, alive=b"abc", spares=("s",))
    assert act(town, tmp_path, is_hang=False) == "replica 1 on b was told to leave; spare s takes its place"
    assert (b"b", "leave") in [(to, kind) for to, kind, _ in town.said]


def test_the_time_until_a_spare_takes_part_is_lost_time() -> None:
    def status(*members: tuple[int, str], replaced: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
        told = [
            {"replica": number, "host": host, "state": "active", "step": 10, "step_s": 0.1} for number, host in members
        ]
        return {"members": told, "findings": ["replica 1 on b was let go, since it hangs"], "data": {},
                "replaced": list(replaced)}  # fmt: skip

    called = ({"replica": 1, "host": "s"},)
    lost = DowntimeTracker()
    lost.observe(status((0, "a"), (1, "b")), at_s=100.0)
    lost.observe(status((0, "a"), replaced=called), at_s=103.0)
    lost.observe(status((0, "a"), (2, "other"), replaced=called), at_s=105.0)
    lost.observe(status((0, "a"), (2, "other"), (3, "s"), replaced=called), at_s=109.0)
    hang = Finding(kind="non-communication hang", places=(Place(kind="rank", ranks=(1,)),), since_s=0.0, text="",
                   confidence=0.9, remedy="")  # fmt: skip
    told = [(102.0, News(case=0, state="new", finding=hang, age_s=2.0))]
    found = lost.downtime(told, [], run_s=60.0, end_s=160.0, batch_size=1)
    assert found.num_incidents == 1
    assert found.detection_s + found.diagnosis_s + found.reinitialisation_s == pytest.approx(9.0 / 2)
