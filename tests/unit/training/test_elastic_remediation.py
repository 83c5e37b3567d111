"""What the first host has done to processes of other hosts: by way of the coordinator, which their launchers ask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.training.elastic.remediation import ElasticRemediation, ProcessOrder, orders_of, write_pid
from thinwire.version import __version__


class Town:
    """A coordinator with three replicas."""

    def __init__(self) -> None:
        self.said: list[tuple[bytes, str, dict[str, Any]]] = []
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=3, sync_interval=10, overlap_steps=1,
                shard_windows=8,
            ),
            generation="g", send=lambda *what: self.said.append(what), record=lambda what, fields: None,
        )  # fmt: skip
        for token in (b"a", b"b", b"c"):
            self.hear(token, "join", version=VERSION, thinwire=__version__, host=token.decode())

    def hear(self, token: bytes, kind: str, *, now_s: float = 0.0, **fields: Any) -> None:
        self.coordinator.handle(token, decode(encode(kind, **fields), to_member=False), now_s=now_s)

    def command(self, verb: str, target: str) -> dict[str, Any]:
        self.hear(b"person", "command", verb=verb, target=target)
        return self.said[-1][2]


@pytest.mark.parametrize(("verb", "what", "words"), [("restart", "kill", "starts another"), ("end", "end", "ends its")])
def test_a_status_holds_what_hosts_are_to_do(verb: str, what: str, words: str) -> None:
    town = Town()
    answer = town.command(verb, "1")
    assert answer["ok"] and "replica 1 on b was let go" in answer["text"] and words in answer["text"]
    assert answer["status"]["orders"] == [{"replica": 1, "what": what}]
    assert [one["replica"] for one in answer["status"]["members"]] == [0, 2]
    assert (b"b", "expelled") in [(to, kind) for to, kind, _ in town.said]
    for target in ("1", "", "nobody"):
        refused = town.command(verb, target)
        assert not refused["ok"] and "there is no replica or host" in refused["text"]
        assert len(refused["status"]["orders"]) == 1
    for number in range(200):
        town.hear(b"n%d" % number, "join", version=VERSION, thinwire=__version__, host="n")
        town.command(verb, str(3 + number))
    assert [one["replica"] for one in town.coordinator.admin.status()["orders"]] == list(range(139, 203))


def test_only_a_process_of_this_host_that_is_still_that_replica_is_meant(tmp_path: Path) -> None:
    def told(*orders: Any) -> list[ProcessOrder]:
        return orders_of({"orders": orders}, run_dir=tmp_path)

    assert orders_of({}, run_dir=tmp_path) == told({"replica": 1, "what": "kill"}) == []
    write_pid(tmp_path, 1)
    (found,) = told({"replica": 1, "what": "kill"}, {"replica": 2, "what": "end"})
    assert (found.what, found.pid) == ("kill", os.getpid())
    assert [order.what for order in told({"replica": 1, "what": "end"})] == ["end"]
    assert told({"replica": 1, "what": "format"}, {"replica": "1", "what": "kill"}, {"what": "kill"}) == []
    write_pid(tmp_path, 11)  # it lived, learnt that it was let go, and joined again
    assert told({"replica": 1, "what": "kill"}) == []
    assert len(told({"replica": 11, "what": "kill"})) == 1


def test_who_died_on_another_host_is_known_by_its_connections(tmp_path: Path) -> None:
    town = Town()
    for token in (b"a", b"b", b"c"):
        town.hear(token, "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=0, era=0, disk=0)
        town.hear(token, "active", step=0)
        town.hear(token, "beat", step=0, step_s=0.1, roster=0)
    hands = ElasticRemediation(
        tmp_path, status=lambda: town.coordinator.admin.status(now_s=1.0), send_command=lambda verb, target: ""
    )
    town.hear(b"a", "lost", replica=2, now_s=0.5)
    alone = hands.members()
    assert alone is not None and alone.gone == frozenset()  # its own link may have broken
    town.hear(b"b", "lost", replica=2, now_s=0.5)
    found = hands.members()
    assert found is not None and (found.present, found.gone) == ({0, 1, 2}, {2})
    town.hear(b"c", "beat", step=0, step_s=0.1, roster=0, now_s=1.0)  # it was only the wire
    again = hands.members()
    assert again is not None and again.gone == frozenset()
