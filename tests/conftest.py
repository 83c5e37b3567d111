"""How the whole test run is laid out over workers."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# These start processes of their own, some with deadlines: on one worker, one after the other.
WITH_PROCESSES = {"multiprocess", "faults", "cli", "lab"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ROOT in item.path.parents and item.path.relative_to(ROOT).parts[0] in WITH_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))
