"""Jobs whose calls' ends are learned by asking, as those on GPUs are: here gloo's collectives, in real processes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes, run, values
from test_watched_jobs import break_at, first_finding, model, train, train_both
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire import compat
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.recording import torch_recorder as watching_module
from thinwire.runlog.records import Operation
from thinwire.runlog.run_folder import read_files
from thinwire.transport.collective_hooks import CollectiveHooks, GroupCall

pytestmark = pytest.mark.multiprocess

SOON_S = 600.0
# of gloo's calls these have no end before somebody waits for them
NEVER_ASKED = ("send", "recv", "reduce_scatter")
_KEPT: list[Any] = []


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
        ("stops", "non-communication hang", "is stopped by a signal or a debugger"),
    ],
)
def test_the_rank_that_breaks_a_job_is_named_where_ends_are_asked_for(
    tmp_path: Path, fault: str, kind: str, says: str
) -> None:
    with Processes(break_at_asked, num_ranks=3, arguments={"folder": str(tmp_path), "fault": fault}):
        found = first_finding(tmp_path, says)
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
        self.calls: list[GroupCall] = []
        self.ends: list[GroupCall] = []

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        self.groups.append(name)

    def posted(self, call: GroupCall) -> None:
        self.calls.append(call)

    def ended(self, call: GroupCall) -> None:
        self.ends.append(call)


def give_no_work() -> list[str]:
    """Let all-reduces on "meta", and barriers, give no `Work`, as nccl does; return what is being done."""
    done: list[str] = []
    no_work = torch._C._distributed_c10d.Work.boxed(None)  # type: ignore[arg-type]
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(
        "allreduce_", lambda tensors, *_: (done.append("call"), (tensors, no_work))[1], "Meta", allow_override=True
    )
    library.impl("barrier", lambda *_: (done.append("barrier"), no_work)[1], "CPU", allow_override=True)
    _KEPT.append(library)  # torch takes a library's kernels away with it
    return done


def pass_some_by() -> dict[str, Any]:
    dist.init_process_group("gloo")
    seen = Seen()
    groups = CollectiveHooks(seen, is_polled=collectives)
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
    give_no_work()
    dist.all_reduce(torch.ones(5, device="meta"))  # no event of CUDA can be recorded for it
    dist.all_reduce(torch.ones(6))
    groups.close()
    return {
        "calls": [(call.sequence, call.count) for call in seen.calls], "passed_by": groups.num_passed_by,
        "ends": sorted((call.sequence, call.error) for call in seen.ends),
    }  # fmt: skip


def test_calls_that_pass_by_are_counted_and_numbered_all_the_same() -> None:
    assert values(run(pass_some_by, num_ranks=1)) == [
        {"calls": [[0, 1], [4, 5], [5, 6]], "passed_by": 3, "ends": [[0, ""], [4, ""], [5, ""]]}
    ]


class Mark:
    """A mark on a stream that a test's call is said to be on, passed when the test says so."""

    def __init__(self, stream: str, *, refusal: Exception | None = None) -> None:
        self.stream = stream
        self.has_passed = False
        self._refusal = refusal

    def is_completed(self) -> bool:
        if self._refusal is not None:
            raise self._refusal
        return self.has_passed


def told(seen: Seen, number: int) -> list[Any]:
    """Return the ends that were told, as soon as there are as many, or a little later where there are more."""
    until_s = time.monotonic() + SOON_S
    while len(seen.ends) < number and time.monotonic() < until_s:
        time.sleep(0.005)
    time.sleep(0.05)
    return [(call.count, call.error) for call in seen.ends]


def mark_some() -> dict[str, Any]:
    """GroupCall what gives no `Work`, on two streams, and return which ends were told as their marks were passed."""
    dist.init_process_group("gloo")
    seen, done = Seen(), give_no_work()
    first, second, other, gone = Mark("a"), Mark("a"), Mark("b"), Mark("c", refusal=RuntimeError("gone"))
    coming = [first, second, other, RuntimeError("CUDA error"), gone]

    def mark(device: torch.device) -> Any:
        done.append(f"mark on {device}")
        made = coming.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    groups = CollectiveHooks(seen, is_polled=collectives, mark=mark)
    for count in (1, 2, 3):
        dist.all_reduce(torch.ones(count, device="meta"))
    steps = [told(seen, 0)]
    other.has_passed = second.has_passed = True
    steps.append(told(seen, 1))
    first.has_passed = True
    steps.append(told(seen, 3))
    dist.all_reduce(torch.ones(4, device="meta"))
    passed_by = [groups.num_passed_by]
    dist.all_reduce(torch.ones(5, device="meta"))
    steps.append(told(seen, 5))
    dist.all_reduce(torch.ones(6, device="meta"), async_op=True)
    dist.barrier()
    steps.append(told(seen, 7))
    groups.close()
    return {"steps": steps, "done": done, "passed_by": [*passed_by, groups.num_passed_by], "left": len(coming)}


def test_a_call_without_work_ends_when_its_stream_has_come_to_the_mark_behind_it() -> None:
    (outcome,) = values(run(mark_some, num_ranks=1))
    first, second, other = [1, ""], [2, ""], [3, ""]
    no_mark, refused = [4, ""], [5, "gone"]
    assert outcome["steps"] == [
        [],
        [other],
        [other, first, second],
        [other, first, second, no_mark, refused],
        # what is asynchronous is on another stream than the caller's, and a barrier has ended when it returns
        [other, first, second, no_mark, refused, [6, ""], [-1, ""]],
    ]
    assert outcome["done"] == [*["call", "mark on meta"] * 5, "call", "barrier"]
    assert outcome["passed_by"] == [1, 2]
    assert outcome["left"] == 0


class PassedSoon:
    """A mark that is passed some milliseconds after it was made."""

    def __init__(self, device: torch.device) -> None:
        self.stream = f"stream of {device}"
        self._passed_s = time.monotonic() + 0.02

    def is_completed(self) -> bool:
        return time.monotonic() >= self._passed_s


def shard_without_work(folder: str) -> dict[str, Any]:
    """Train under FSDP2 over gloo, as it is and as nccl would have it: the calls have run, and give no `Work`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))

    def train_sharded() -> list[str]:
        sharded = model()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return train(sharded)

    plain = train_sharded()
    with thinwire.watch(f"{folder}/told"):
        told = train_sharded()
    usual = compat.unboxed_work
    compat.unboxed_work = lambda result: usual(result).wait() and None
    watching_module.calls_on_gpus = lambda kind, device: True  # type: ignore[assignment]
    watching_module.CollectiveHooks = partial(CollectiveHooks, mark=PassedSoon)  # type: ignore[assignment, misc]
    with thinwire.watch(f"{folder}/marked", gpu_calls=True) as watching:
        marked = train_sharded()
    dist.destroy_process_group()
    return {"is_equal": plain == told == marked, "lost": watching.lost, "passed_by": watching.num_passed_by}


def test_all_calls_of_fsdp2_are_recorded_where_they_give_no_work(tmp_path: Path) -> None:
    outcomes = values(run(shard_without_work, num_ranks=2, arguments={"folder": str(tmp_path)}))
    assert outcomes == [{"is_equal": True, "lost": "", "passed_by": 0}] * 2
    told, marked = (read_files([tmp_path / name]) for name in ("told", "marked"))
    for rank in (0, 1):
        recorded = calls(marked.operations, rank)
        assert recorded == calls(told.operations, rank) and len(recorded) > 10
        assert {kind for _, kind, *_ in recorded} == {"all_gather", "reduce_scatter"}
    assert diagnose(marked) == []
    ended = [one for one in marked.operations if one.done_s is not None]
    assert all(one.done_s is not None and one.done_s - one.posted_s >= 0.02 for one in ended)
