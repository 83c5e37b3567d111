"""Which host of an elastic run judges it: the first one all replicas, a joined one its own while it is cut off."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli.elastic_run import ElasticHost, RunStatusPoller
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_server import CoordinatorServer
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.monitor.live_diagnosis import LiveDiagnosis, Members
from thinwire.monitor.remediation import Policy, Steering
from thinwire.runlog.records import Beat, header_line, to_line
from thinwire.training.elastic.remediation import ElasticRemediation, write_pid
from thinwire.transport.secret import Secret
from thinwire.version import __version__

SECRET, HOST, SOON_S = Secret(key=bytes(range(32))), "127.0.0.1", 120.0


class Nobody:
    """Hands that do nothing."""

    def members(self) -> Members | None:
        return None

    def act(self, action: object) -> str:
        raise AssertionError


def coordinator(send: Any) -> Coordinator:
    return Coordinator(
        CoordinatorConfig(
            job={"thinwire": __version__}, initial_replicas=1, sync_interval=10, overlap_steps=1, shard_windows=8,
        ),
        generation="g", send=send, record=lambda what, fields: None,
    )  # fmt: skip


def write_beats(run: Path, rank: int, count: int) -> None:
    lines = [header_line(), *(to_line(Beat(rank=rank, at_s=float(second))) for second in range(count))]
    (run / f"records-rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_host_that_is_not_to_judge_says_nothing_until_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    is_mine = False
    diagnosis = LiveDiagnosis(
        tmp_path, say=said.append, steering=Steering(Policy()), hands=Nobody(), is_mine=lambda: is_mine
    )
    write_beats(tmp_path, 0, 8)
    write_beats(tmp_path, 1, 20)
    for _ in range(4):
        diagnosis.poll()
    assert said == [] and not (tmp_path / "findings.jsonl").exists()
    is_mine = True
    for _ in range(4):
        diagnosis.poll()
    assert len(said) == 1 and "rank 0" in said[0]


def test_a_status_tells_how_long_each_replica_was_not_heard_of() -> None:
    said: list[dict[str, Any]] = []
    found = coordinator(lambda token, kind, fields: said.append(fields))
    join = encode("join", version=VERSION, thinwire=__version__, host="b")
    found.handle(b"replica", decode(join, to_member=False), now_s=1.0)
    found.handle(b"person", decode(encode("command", verb="status", target=""), to_member=False), now_s=3.5)
    (member,) = said[-1]["status"]["members"]
    assert (member["replica"], member["silent_s"]) == (0, 2.5)


def test_who_lives_on_another_host_and_whose_records_are_late_rests_until_they_come(tmp_path: Path) -> None:
    def member(replica: int, silent_s: float) -> dict[str, Any]:
        return {"replica": replica, "state": "active", "paused": False, "silent_s": silent_s}

    for rank in range(4):
        write_beats(tmp_path, rank, 1)
    write_pid(tmp_path, 0)  # its process is here
    for rank in (0, 1, 2):
        os.utime(tmp_path / f"records-rank-{rank}.jsonl", (time.time() - 5, time.time() - 5))
    silent = {0: 0.1, 1: 0.1, 2: 4.0, 3: 0.1}  # nothing at all is heard of 2
    status = {"members": [member(*one) for one in silent.items()]}
    found = ElasticRemediation(tmp_path, status=lambda: status, send_command=lambda verb, target: "").members()
    assert found is not None and found.resting == frozenset({1}) and found.present == frozenset(silent)
    write_beats(tmp_path, 1, 2)
    again = ElasticRemediation(tmp_path, status=lambda: status, send_command=lambda verb, target: "").members()
    assert again is not None and again.resting == frozenset()


def test_a_joined_host_is_cut_off_while_no_coordinator_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub, is_over = CoordinatorServer(secret=SECRET, address=HOST, port=0, say=print), threading.Event()
    serving = threading.Thread(target=hub.serve, args=(coordinator(hub.send),), kwargs={"until": is_over.is_set})
    watch = RunStatusPoller(
        ElasticHost(run_dir=tmp_path, invitation=Invitation(host=HOST, port=hub.port), secret=SECRET), say=print
    )
    try:
        assert not watch.is_cut_off()
        monkeypatch.setattr(watch, "_cut_off_s", -1.0)
        assert watch.is_cut_off()
        monkeypatch.undo()
        watch._answered_s -= 60.0
        assert watch.is_cut_off()
        serving.start()
        until_s = time.monotonic() + SOON_S
        while watch.is_cut_off():
            assert time.monotonic() < until_s, "it answers, and is not heard"
            watch.poll()
            time.sleep(0.02)
    finally:
        watch.close()
        is_over.set()
        if serving.ident:
            serving.join(SOON_S)
        hub.close()
