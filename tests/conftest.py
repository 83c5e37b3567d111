"""How the whole test run is laid out over workers, and what every Python that a test starts loads first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# These start processes of their own, and make much of it once a file: a file's tests stay together on one worker.
WITH_PROCESSES = ("tests/multiprocess/", "tests/cli/", "tests/lab/", "tests/docs/")

# `untraced/sitecustomize.py` spares the processes that the tests start most of what coverage costs them.
UNTRACED = str(Path(__file__).parent / "untraced")
if UNTRACED not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (UNTRACED, os.environ.get("PYTHONPATH"))))


class WholeFiles(LoadScopeScheduling):
    """Deals out the files that start processes whole, largest first, and all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0] if nodeid.startswith(WITH_PROCESSES) else nodeid


@pytest.hookimpl(optionalhook=True)  # without workers there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles:
    return WholeFiles(config, log)
