"""Every test in this folder makes real labs, or is skipped with the name of what is missing."""

from __future__ import annotations

import pytest
from machine import skip_where_labs_are_impossible


@pytest.fixture(scope="session", autouse=True)
def _machine() -> None:
    skip_where_labs_are_impossible()
