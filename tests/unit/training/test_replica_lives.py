"""How long a replica waits that was dropped for bad parts, life after life, before it takes part again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from thinwire.errors import DroppedBadParts
from thinwire.training.elastic import replica
from thinwire.training.elastic.replica import run_replica

INTERVAL_S = 4.0


def waits(monkeypatch: pytest.MonkeyPatch, *, lives: int, counted: frozenset[int] = frozenset()) -> list[float]:
    """Return how long each life waited; all but the last end with bad parts, and those in `counted` counted before."""
    waited: list[float] = []
    discarded: list[int] = []

    class Life:
        why = fault = ""

        def __init__(self, *_: object, wait_s: float, **__: object) -> None:
            self.number = len(waited)
            waited.append(wait_s)

        has_counted = property(lambda self: self.number in counted)

        def live(self) -> bool:
            if self.number < lives - 1:
                raise DroppedBadParts("replica 2 was dropped: 2 of its parts in a row hold NaN or infinity")
            return True

        def discard(self) -> None:
            discarded.append(self.number)

        def interval_s(self) -> float:
            return INTERVAL_S

        def close(self) -> None:
            pass

    monkeypatch.setattr(replica, "_Stay", Life)
    monkeypatch.setattr(replica, "read_secret", lambda path: None)
    monkeypatch.setattr(replica.time, "sleep", lambda seconds: None)
    settings = cast("Any", SimpleNamespace(threads=1, secret=Path("secret")))
    assert run_replica(settings, report=lambda line: None)
    assert discarded == list(range(lives - 1)), "what went bad on disk is no state to begin from"
    return waited


def test_it_waits_twice_as_many_intervals_each_time_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = [INTERVAL_S * 2**power for power in range(7)]
    assert waits(monkeypatch, lives=11) == [0.0, 0.0, *doubled, doubled[-1], doubled[-1]]
    monkeypatch.setattr(replica, "_LONGEST_BAD_AGAIN_S", 10.0)
    assert waits(monkeypatch, lives=7) == [0.0, 0.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_a_part_that_counted_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, lives=7, counted=frozenset({3})) == [0.0, 0.0, 4.0, 8.0, 0.0, 4.0, 8.0]
