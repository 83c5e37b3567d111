"""A host's processes of an elastic run: what serves the others goes on when this host's replicas have ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

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
    until_s = time.monotonic() + 60

    def look() -> None:
        assert time.monotonic() < until_s, "it does not end"

    launch(roles, run_dir=tmp_path, say=lambda text: None, look=look, part=(tmp_path / "alone").touch)
    assert (tmp_path / "served").exists(), "it was told that it is alone, and not ended before it was done"
