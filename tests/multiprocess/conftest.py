from __future__ import annotations

from collections.abc import Iterator

import pytest
from namespaces import Hosts, missing, two_hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts on this machine, or a skip that says what it lacks for them."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made
