"""How the whole test run is laid out over workers."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# These start processes of their own, and make much of it once a file: a file's tests stay together on one worker.
WITH_PROCESSES = ("tests/multiprocess/", "tests/cli/", "tests/lab/", "tests/docs/")


class WholeFiles(LoadScopeScheduling):
    """Deals out the files that start processes whole, largest first, and all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0] if nodeid.startswith(WITH_PROCESSES) else nodeid


@pytest.hookimpl(optionalhook=True)  # without workers there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles:
    return WholeFiles(config, log)
