"""Refusals of `thinwire.join` before any process is started."""

import fcntl
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.errors import Refused, RunOver, ThinwireError
from thinwire.runlog.run_identity import new_identity
from thinwire.sync.method import method_of
from thinwire.training.elastic.coordinator_process import JOB_FILE, JOURNAL_FILE
from thinwire.training.elastic.job import ElasticJob, LoopJob
from thinwire.training.elastic.own_loop import RunPlace

ELSEWHERE = "192.0.2.7:29400"


@pytest.mark.parametrize(
    ("uri", "more", "text"),
    [
        (None, {}, "the address of the run is missing; got nothing; allowed thinwire://HOST:PORT; try to set"),
        ("127.0.0.1:29400", {"steps": 0}, "steps is too low; got 0; allowed at least 1"),
        ("127.0.0.1:29400", {"replicas": -1}, "replicas is too low; got -1; allowed at least 1"),
        (ELSEWHERE, {}, "the address holds no secret; got HOST:PORT alone"),
        (
            f"{ELSEWHERE}/{52 * 'a'}",
            {"secret": "file"},
            "secret does not go with this address: it holds",
        ),
        ("127.0.0.1", {}, "the address cannot be read"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_remedy(
    uri: str | None, more: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("THINWIRE_JOIN", "THINWIRE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError) as error:
        thinwire.join(uri, model, torch.optim.SGD(model.parameters(), lr=0.1), **more)
    assert text in str(error.value)


def test_address_and_secret_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("THINWIRE_JOIN", ELSEWHERE)
    monkeypatch.setenv("THINWIRE_SECRET_FILE", str(tmp_path / "job.secret"))
    place = RunPlace.find(None, secret=None, folder=None, reach={})
    assert (place.invitation.host, place.invitation.port, place.is_here) == ("192.0.2.7", 29400, False)
    assert place.secret_file == tmp_path / "job.secret"
    assert RunPlace.find("127.0.0.1:1", secret=tmp_path / "x", folder=tmp_path, reach={}).secret_file == tmp_path / "x"


def test_a_start_that_another_process_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("thinwire.training.elastic.own_loop._START_S", 0.05)
    with (tmp_path / "start.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ThinwireError, match=r"another process has held .*start\.lock"):
            thinwire.join("127.0.0.1:29399", model, inner, folder=tmp_path)


def test_an_ended_run_is_named_also_while_its_coordinator_still_holds_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / JOB_FILE).write_text("{}\n")
    (tmp_path / JOURNAL_FILE).write_text('{"what":"finished"}\n')
    with (tmp_path / "coordinator.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        model = nn.Linear(2, 1)
        with pytest.raises(RunOver, match="has ended; begin another one with folder=NEW-FOLDER") as late:
            thinwire.join("127.0.0.1:1", model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    assert isinstance(late.value, SystemExit) and late.value.code is None  # the script exits with 0 ...
    [line] = [record.getMessage() for record in caplog.records]  # ... after one line
    assert line.startswith("thinwire: nothing to do: the run in ") and "\n" not in line


def test_a_coordinator_that_listens_no_more_is_waited_for_and_one_that_listens_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []
    monkeypatch.setattr(RunPlace, "_start", lambda self, lock: started.append(lock))
    identity = new_identity(config_digest=32 * "0")
    job = LoopJob.of(method_of("diloco"), setup={}, num_replicas=1, last_step=0, identity=identity)
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "coordinator.lock").open("a") as held:
        place = RunPlace.find(f"127.0.0.1:{server.getsockname()[1]}", secret=None, folder=tmp_path, reach={})
        fcntl.flock(held, fcntl.LOCK_EX)
        place.ready(lambda: job)
        assert not started
        server.close()
        freed = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
        freed.start()
        place.ready(lambda: job)
        freed.join()
    assert len(started) == 1


def test_a_run_of_own_loops_and_one_of_the_command_refuse_each_others_replicas() -> None:
    identity = new_identity(config_digest=32 * "0")
    method = method_of("streaming-diloco")
    job = LoopJob.of(method, setup={"parameters": "p", "method": "m"}, num_replicas=2, last_step=9, identity=identity)
    assert LoopJob.from_json(job.to_json()) == job
    with pytest.raises(Refused, match="have training loops of their own; start the same script here"):
        ElasticJob.from_json(job.to_json())
    with pytest.raises(Refused, match=r"is one of thinwire train --elastic; add a replica with: thinwire join"):
        LoopJob.from_json({"config": {}})
    with pytest.raises(Refused, match="describes no job of this thinwire"):
        LoopJob.from_json({**job.to_json(), "begin_with": -1})
