"""The private names of torch that thinwire uses, and the versions with which they were tried."""

from __future__ import annotations

import pytest
import torch

from thinwire import compat
from thinwire.errors import TransportError
from thinwire.transport.watched_group import WatchedGroups


def test_the_tests_run_with_a_version_that_is_told_to_be_tried() -> None:
    assert torch.__version__.startswith(compat.TRIED_VERSIONS)
    assert compat.missing_names() == []


def test_a_torch_without_a_name_is_refused_with_the_name_and_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_NAMES", (*compat._NAMES, "DispatchKeySet.no_such_name"))
    with pytest.raises(TransportError, match=r"lacks torch\._C\.DispatchKeySet\.no_such_name; .* with torch 2\.13"):
        WatchedGroups(None)  # type: ignore[arg-type]


def test_every_operator_that_is_watched_is_there_and_names_its_group() -> None:
    for operator in ("allreduce_", "broadcast_", "send", "recv_", "barrier", "_reduce_scatter_base_"):
        assert operator in compat.group_operators()
        assert "process_group" in compat.positions(operator)
