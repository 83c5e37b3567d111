"""A host's processes of an elastic run: what serves the others goes on when this host's replicas have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from live_processes import DEADLINE_S, descendants, words_of

from thinwire.training.elastic.launch import Role, launch

pytestmark = pytest.mark.multiprocess

SERVER = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (folder / "alone").exists():
    time.sleep(0.05)
time.sleep(0.5)
(folder / "served").touch()
"""


def test_the_coordinator_ends_by_itself_after_this_host_s_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "role_that_serves.py").write_text(SERVER)
    (tmp_path / "role_that_trains.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    roles = [Role(name="server", module="role_that_serves", is_needed=False), Role(name="r", module="role_that_trains")]
    until_s = time.monotonic() + DEADLINE_S

    def look() -> None:
        assert time.monotonic() < until_s, "it does not end"

    launch(roles, run_dir=tmp_path, report=lambda text: None, on_tick=look, part=(tmp_path / "alone").touch)
    assert (tmp_path / "served").exists(), "it was told that it is alone, and not ended before it was done"


WORKER = """
import os, pathlib, signal, sys
folder, index = pathlib.Path(sys.argv[1]), sys.argv[3]
with (folder / "lives").open("a") as lives:
    print(index, os.getpid(), sys.argv[0].rpartition("/")[2], file=lives)
print("says", index, flush=True)
if len((folder / "lives").read_text().splitlines()) < 3:
    while not (folder / "waiting").exists():  # until a spare is there
        pass
    os.rename(folder / "waiting", folder / "taken")
    os.kill(os.getpid(), signal.SIGKILL)
"""
SPARE = """
import pathlib, runpy, sys
from thinwire.training.elastic.launch import read_work
folder = pathlib.Path(sys.argv[1])
(folder / "waiting").touch()
words = read_work()
if words is not None:
    sys.argv[1:] = [*sys.argv[1:], *words]
    exec(compile((folder / "role_of_a_replica.py").read_text(), "replica", "exec"))
"""


def test_a_process_that_waits_takes_the_place_of_one_that_died_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.training.elastic.launch._SHORT_LIFE_S", 0.2)
    (tmp_path / "role_of_a_replica.py").write_text(WORKER)
    (tmp_path / "role_of_a_spare.py").write_text(SPARE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    role = Role(name="replica 7", module="role_of_a_replica", arguments=("7",), spare="role_of_a_spare")
    until_s, said = time.monotonic() + DEADLINE_S, list[str]()

    def look() -> None:
        assert time.monotonic() < until_s, (tmp_path / "logs" / "spare.err").read_text()

    launch([role], run_dir=tmp_path, report=said.append, on_tick=look)
    lives = [line.split() for line in (tmp_path / "lives").read_text().splitlines()]
    assert [program for _, _, program in lives] == ["role_of_a_replica.py", "role_of_a_spare.py", "role_of_a_spare.py"]
    assert [index for index, _, _ in lives] == ["7"] * 3 and len({pid for _, pid, _ in lives}) == 3
    assert (tmp_path / "logs" / "replica-7.pid").read_text() == lives[-1][1] + "\n"
    assert (tmp_path / "logs" / "replica-7.err").read_text().count("says 7\n") == 3
    assert len(said) == 2 and all("was ended by SIGKILL; starting it again" in text for text in said)
    assert not [one for one in descendants() if str(tmp_path) in " ".join(words_of(one))]
