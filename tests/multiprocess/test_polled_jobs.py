"""Jobs whose calls' ends are learned by asking, as those on GPUs are: here gloo's collectives, in real processes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes, run, values
from test_watched_jobs import break_at, first_finding, train_both

import thinwire
from thinwire import compat
from thinwire.diagnosis.diagnose import diagnose
from thinwire.diagnosis.records import Operation
from thinwire.diagnosis.sources import read_files
from thinwire.training import watching as watching_module
from thinwire.transport.watched_group import Call, WatchedGroups

pytestmark = pytest.mark.multiprocess

SOON_S = 20.0
# of gloo's calls these have no end before somebody waits for them
NEVER_ASKED = ("send", "recv", "reduce_scatter")


def collectives(kind: str, device: torch.device) -> bool:
    return kind not in NEVER_ASKED


def ask_for_collectives() -> None:
    """Let `thinwire.watch(gpu_calls=True)` take gloo's collectives for calls on a GPU."""
    watching_module.calls_on_gpus = collectives  # type: ignore[assignment]


def is_asking() -> bool:
    return any(thread.name == "thinwire-watch-poll" for thread in threading.enumerate())


def train_told_and_asked(folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    plain = train_both()
    with thinwire.watch(f"{folder}/told"):
        told = train_both()
        was_asking = is_asking()
    ask_for_collectives()
    with thinwire.watch(f"{folder}/asked", gpu_calls=True) as watching:
        asked = train_both()
        is_asked = is_asking()
    dist.destroy_process_group()
    return {
        "is_equal": plain == told == asked, "asking": [was_asking, is_asked, is_asking()],
        "lost": watching.lost, "passed_by": watching.num_passed_by,
    }  # fmt: skip


def calls(operations: list[Operation], rank: int) -> list[tuple[Any, ...]]:
    return sorted(
        (one.sequence, one.kind, one.dtype, one.count, one.done_s is not None)
        for one in operations
        if one.rank == rank and one.done_s is not None
    )


def test_a_job_whose_ends_are_asked_for_computes_and_records_the_same(tmp_path: Path) -> None:
    outcomes = values(run(train_told_and_asked, num_ranks=2, arguments={"folder": str(tmp_path)}))
    expected = {"is_equal": True, "asking": [False, True, False], "lost": "", "passed_by": 0}
    assert outcomes == [expected, expected]
    told, asked = (read_files([tmp_path / name]) for name in ("told", "asked"))
    for rank in (0, 1):
        recorded = calls(asked.operations, rank)
        assert recorded == calls(told.operations, rank) and len(recorded) > 20
        assert {kind for _, kind, *_ in recorded} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert diagnose(told) == diagnose(asked) == []
    assert not asked.num_refused
    assert sorted(beat.rank for beat in asked.beats if beat.is_last) == [0, 1]
    together = defaultdict[tuple[str, int], list[Operation]](list)
    for one in asked.operations:
        if one.done_s is not None and one.kind in ("all_reduce", "all_gather"):
            together[one.communicator, one.sequence].append(one)
    for both in together.values():
        # the ranks share a clock: none may be told to have ended before the other one came, nor seconds later
        came_s = max(one.posted_s for one in both)
        assert all(one.done_s is not None and came_s <= one.done_s < came_s + 5.0 for one in both)


def break_at_asked(folder: str, fault: str) -> None:
    ask_for_collectives()
    usual = thinwire.watch
    thinwire.watch = lambda own: usual(own, gpu_calls=True)  # type: ignore[assignment, misc]
    break_at(folder, fault)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("skips a collective", "desync", ""),
        ("stops", "non-communication hang", "is paused, killed or cut off"),
    ],
)
def test_the_rank_that_breaks_a_job_is_named_where_ends_are_asked_for(
    tmp_path: Path, fault: str, kind: str, says: str
) -> None:
    with Processes(break_at_asked, num_ranks=3, arguments={"folder": str(tmp_path), "fault": fault}):
        found = first_finding(tmp_path)
    assert (found.kind, found.where) == (kind, "rank 1")
    assert says in found.text
    assert found.confidence >= 0.9


def let_a_call_fail(folder: str) -> bool:
    """Call what the other rank does not, and return whether that it failed was written down while nobody waited."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    ask_for_collectives()
    with thinwire.watch(folder, gpu_calls=True):
        work = dist.all_reduce(torch.ones(3), async_op=True) if dist.get_rank() == 0 else None
        until_s = time.monotonic() + SOON_S
        while not any("a call failed" in beat.error for beat in read_files([Path(folder)]).beats):
            if time.monotonic() > until_s:
                return False
            time.sleep(0.1)
    return work is None or isinstance(work, dist.Work)


def test_a_call_that_fails_is_told_as_failed_though_nobody_waits(tmp_path: Path) -> None:
    assert values(run(let_a_call_fail, num_ranks=2, arguments={"folder": str(tmp_path)})) == [True, True]
    open_ones = [one for one in read_files([tmp_path]).operations if one.kind == "all_reduce" and one.rank == 0]
    assert open_ones and all(one.done_s is None for one in open_ones)


def say_how_long(folder: str, seconds: float) -> None:
    """Reduce once, where torch says how long the GPU was in it, as it does not on gloo."""
    dist.init_process_group("gloo")
    ask_for_collectives()
    compat.duration_s = lambda work: seconds  # type: ignore[assignment]
    with thinwire.watch(folder, gpu_calls=True):
        dist.all_reduce(torch.ones(3))
        dist.barrier()


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_where_torch_times_calls_it_is_written_when_the_gpu_came_to_one(tmp_path: Path, seconds: float) -> None:
    values(run(say_how_long, num_ranks=1, arguments={"folder": str(tmp_path), "seconds": seconds}))
    records = read_files([tmp_path])
    ended = [one for one in records.operations if one.done_s is not None]
    assert len(ended) == 2 and not records.num_refused
    for one in ended:
        # an end is seen late, so what began before the call was made began with it
        assert one.started_s == (one.posted_s if seconds else one.done_s)


class Seen:
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.calls: list[Call] = []
        self.ends: list[Call] = []

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        self.groups.append(name)

    def posted(self, call: Call) -> None:
        self.calls.append(call)

    def ended(self, call: Call) -> None:
        self.ends.append(call)


def pass_some_by() -> dict[str, Any]:
    dist.init_process_group("gloo")
    seen = Seen()
    groups = WatchedGroups(seen, is_polled=collectives)
    dist.all_reduce(torch.ones(1))
    gathering = dist.distributed_c10d._world.pg_coalesce_state
    gathering[dist.group.WORLD] = []  # type: ignore[index]
    dist.broadcast(torch.ones(2), 0)
    gathering.clear()
    groups.pause()
    dist.all_reduce(torch.ones(3))
    groups.resume()
    groups._poller._most = 0  # as if 4,096 calls were under way
    dist.all_reduce(torch.ones(4))
    groups._poller._most = 4096
    dist.all_reduce(torch.ones(5, device="meta"))  # not asynchronous and not on the CPU, as nccl gives no `Work` for
    dist.all_reduce(torch.ones(6))
    groups.close()
    return {
        "calls": [(call.sequence, call.count) for call in seen.calls], "passed_by": groups.num_passed_by,
        "ends": [(call.sequence, call.error) for call in seen.ends],
    }  # fmt: skip


def test_calls_that_pass_by_are_counted_and_numbered_all_the_same() -> None:
    assert values(run(pass_some_by, num_ranks=1)) == [
        {"calls": [[0, 1], [5, 6]], "passed_by": 3, "ends": [[0, ""], [5, ""]]}
    ]
