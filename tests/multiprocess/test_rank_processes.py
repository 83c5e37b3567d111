"""The processes of a replica's ranks: whichever dies or hangs, all are gone, and it is said why."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live_processes import descendants, send, until, words_of

from thinwire.training.elastic import replica_ranks
from thinwire.training.elastic.replica_ranks import RankProcesses

pytestmark = pytest.mark.multiprocess

SLEEPER = "import sys, time; open(sys.argv[2] + sys.argv[1], 'w').close(); time.sleep(600)"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def ranks(tmp_path: Path, told: list[str]) -> Iterator[RankProcesses]:
    command = [sys.executable, "-c", SLEEPER]
    started = RankProcesses(
        command, num_ranks=3, logs=tmp_path / "logs", name="replica-process-0", report=told.append,
        end=lambda: told.append("ended"),
    )  # fmt: skip
    yield started
    started.close()


def own_ranks() -> list[psutil.Process]:
    return [one for one in descendants() if SLEEPER in words_of(one)]


def both_ranks() -> list[psutil.Process]:
    """Return the two processes that this one has started, once they are what they are to be."""
    return until(lambda: found if len(found := own_ranks()) == 2 else [])


def test_a_rank_that_dies_takes_the_others_with_it_and_is_named(ranks: RankProcesses, told: list[str]) -> None:
    assert send(both_ranks()[1], signal.SIGKILL)
    until(lambda: told)
    assert told[0].startswith("rank 2 of this replica was ended by SIGKILL; see ")
    assert told[0].endswith("replica-process-0-rank-2.err")
    until(lambda: not own_ranks())
    until(lambda: told[1:] == ["ended"])  # this process did not come to its end by itself


def test_a_rank_that_hangs_is_ended_after_the_time_that_it_was_given(ranks: RankProcesses, told: list[str]) -> None:
    assert send(both_ranks()[0], signal.SIGSTOP)
    ranks.expect("a step", 600.0)
    time.sleep(0.5)
    for _ in range(6):  # each order is given the whole time, however alike they are
        ranks.expect("a step", 0.4)
        time.sleep(0.2)
    ranks.expect_nothing()
    time.sleep(0.5)
    assert told == []
    ranks.expect("the norm of the gradient", 0.3)
    until(lambda: told)
    assert "a rank of this replica hangs: the norm of the gradient took longer than 0.3 s" in told[0]
    until(lambda: not own_ranks())


def test_slow_steps_leave_more_time_to_say_goodbye(
    ranks: RankProcesses, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_ranks, "_LEAVE_S", 0.0)
    rank = both_ranks()[0]
    ranks.expect("a step", 600.0)
    time.sleep(0.5)
    ranks.expect("a step", 600.0)
    began_s = time.monotonic()
    assert send(rank, signal.SIGKILL)
    until(lambda: told[1:] == ["ended"])
    assert time.monotonic() - began_s >= 1.0, "twice the time between two steps"


def test_at_the_end_no_rank_and_no_folder_is_left(ranks: RankProcesses, told: list[str]) -> None:
    both_ranks()
    folder = ranks.meeting.parent
    assert folder.stat().st_mode & 0o077 == 0, "nobody else on this host can take part"
    ranks.close()
    assert not own_ranks() and not folder.exists() and told == []
