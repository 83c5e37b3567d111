"""Ends of calls that are learned by asking; only the answers are made up, since no GPU is here to give them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.transport import default_group
from thinwire.transport.work_poller import CallEnd, CudaEventMark, WorkPoller, is_capturing

SOON_S = 600.0
POLL_S = 0.002


class Work:
    """Answers as a test tells it to."""

    def __init__(self, *, error: Any = None, refusal: Exception | None = None, took_ms: float | None = None) -> None:
        self.has_ended = False
        self.num_asked = 0
        self.num_timed = 0
        self.refusal = refusal
        self._error = error
        self._took_ms = took_ms

    def is_completed(self) -> bool:
        self.num_asked += 1
        if self.refusal is not None:
            raise self.refusal
        return self.has_ended

    def exception(self) -> Any:
        if isinstance(self._error, NotImplementedError):
            raise self._error
        return self._error

    def _get_duration(self) -> float:
        self.num_timed += 1
        if self._took_ms is None:
            raise RuntimeError("getDuration only works if timing was enabled")
        return self._took_ms


class Passed:
    """A mark that has been passed."""

    def __init__(self, device: torch.device) -> None:
        self.stream = 0

    def is_completed(self) -> bool:
        return True


class Event:
    """Stands for an event of CUDA, which cannot be made here."""

    def __init__(self, is_timed: bool) -> None:
        self.is_timed, self.has_come = is_timed, False
        self.recorded_on: list[Any] = []

    def record(self, stream: Any) -> None:
        self.recorded_on.append(stream)

    def query(self) -> bool:
        return self.has_come


@pytest.fixture
def poller() -> Iterator[WorkPoller]:
    made = WorkPoller(poll_s=POLL_S)
    yield made
    made.close()
    assert not threads(), "its thread has not ended"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-watch-poll"]


def wait_until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        time.sleep(POLL_S)


def test_an_end_is_seen_soon_after_it_came_and_told_once(poller: WorkPoller) -> None:
    work, ends = Work(), list[CallEnd]()
    poller.watch(work, ends.append, group=0)
    wait_until(lambda: work.num_asked > 3)
    assert not ends
    before_s = time.monotonic()
    work.has_ended = True
    wait_until(lambda: ends)
    assert before_s <= ends[0].done_s <= time.monotonic()
    assert (ends[0].error, ends[0].duration_s) == ("", None)
    asked = work.num_asked
    time.sleep(10 * POLL_S)
    assert len(ends) == 1 and work.num_asked == asked


def test_nothing_is_asked_and_no_thread_runs_before_the_first_call() -> None:
    WorkPoller(poll_s=POLL_S).close()
    assert not threads()


def test_calls_of_a_stream_are_asked_oldest_first_and_no_further_than_the_first_that_lasts(poller: WorkPoller) -> None:
    works, told = [Work() for _ in range(3)], list[int]()
    other = Work()
    for number, work in enumerate(works):
        poller.watch(work, lambda _, number=number: told.append(number), group=0, stream="a")  # type: ignore[misc]
    poller.watch(other, lambda _: told.append(9), group=0, stream="b")
    works[1].has_ended = other.has_ended = True
    wait_until(lambda: told == [9])
    wait_until(lambda: works[0].num_asked > 3)
    assert works[1].num_asked == 0
    works[0].has_ended = True
    wait_until(lambda: told == [9, 0, 1])
    assert works[2].num_asked > 0


def test_messages_are_asked_whichever_ends_first(poller: WorkPoller) -> None:
    first, second, told = Work(), Work(), list[str]()
    poller.watch(first, lambda _: told.append("first"), group=0)
    poller.watch(second, lambda _: told.append("second"), group=0)
    second.has_ended = True
    wait_until(lambda: told == ["second"])
    first.has_ended = True
    wait_until(lambda: told == ["second", "first"])


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (Work(error=RuntimeError("the other end is gone")), "the other end is gone"),
        (Work(error=RuntimeError()), "RuntimeError"),
        (Work(error=NotImplementedError("no such question")), ""),
        (Work(refusal=RuntimeError("CUDA error: an illegal memory access")), "CUDA error: an illegal memory access"),
        (Work(refusal=ValueError()), "ValueError"),
    ],
)
def test_a_failure_is_told_as_one_and_a_question_that_is_refused_ends_the_asking(
    poller: WorkPoller, work: Work, says: str
) -> None:
    later, ends = Work(), list[CallEnd]()
    work.has_ended = later.has_ended = True
    poller.watch(work, ends.append, group=0, stream=0)
    poller.watch(later, ends.append, group=0, stream=0)
    wait_until(lambda: len(ends) == 2)
    assert [end.error for end in ends] == [says, ""]
    assert work.num_asked == 1


def test_how_long_the_gpu_took_is_told_where_torch_times_calls_and_not_asked_again_where_not(
    poller: WorkPoller,
) -> None:
    timed, untimed, ends = Work(took_ms=250.0), [Work(), Work()], list[CallEnd]()
    timed.has_ended = untimed[0].has_ended = untimed[1].has_ended = True
    poller.watch(timed, ends.append, group=0)
    wait_until(lambda: ends)
    assert ends[0].duration_s == 0.25
    for work in untimed:
        poller.watch(work, ends.append, group=1)
    wait_until(lambda: len(ends) == 3)
    assert [work.num_timed for work in untimed] == [1, 0]
    assert ends[1].duration_s is ends[2].duration_s is None


def test_a_mark_that_knows_no_duration_does_not_keep_its_group_from_telling_it(poller: WorkPoller) -> None:
    ends, device = list[CallEnd](), torch.device("meta")
    poller.watch(Passed(device), ends.append, group=0)
    wait_until(lambda: ends)
    timed = Work(took_ms=250.0)
    timed.has_ended = True
    poller.watch(timed, ends.append, group=0)
    wait_until(lambda: len(ends) == 2)
    assert [(end.error, end.duration_s) for end in ends] == [("", None), ("", 0.25)]


def test_a_mark_is_an_event_behind_what_the_current_stream_of_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    # without a GPU only which of CUDA's functions are called, and with what, can be seen
    seen, events = list[str](), list[Event]()
    streams = {number: SimpleNamespace(device_index=number, cuda_stream=0) for number in (0, 1)}
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(seen.append(f"on {device}")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: events.append(Event(enable_timing)) or events[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(seen.append("capturing")) or True)
    marks = [CudaEventMark(torch.device("cuda", number)) for number in (0, 1, 1)]
    assert seen == ["on cuda:0", "on cuda:1", "on cuda:1"]
    assert [event.recorded_on for event in events] == [[streams[0]], [streams[1]], [streams[1]]]
    assert not any(event.is_timed for event in events)
    assert marks[0].stream != marks[1].stream == marks[2].stream
    assert [mark.is_completed() for mark in marks] == [False, False, False]
    events[1].has_come = True
    assert [mark.is_completed() for mark in marks] == [False, True, False]
    assert is_capturing(torch.device("cuda", 1)) and seen[-2:] == ["on cuda:1", "capturing"]


def test_there_is_room_for_as_many_calls_as_said_and_again_once_one_has_ended() -> None:
    poller, works, ends = WorkPoller(poll_s=POLL_S, most=2), [Work(), Work()], list[CallEnd]()
    for work in works:
        assert poller.has_room
        poller.watch(work, ends.append, group=0)
    assert not poller.has_room
    works[0].has_ended = True
    wait_until(lambda: poller.has_room)
    poller.close()
    assert len(ends) == 1 and not threads()


def test_closing_tells_what_has_ended_waits_for_what_ends_soon_and_leaves_the_rest() -> None:
    poller, works, ends = WorkPoller(poll_s=POLL_S), [Work(), Work(), Work()], list[CallEnd]()
    poller.hold()
    for work in works:
        poller.watch(work, ends.append, group=0)
    works[0].has_ended = True
    soon = threading.Timer(0.1, lambda: setattr(works[1], "has_ended", True))
    soon.start()
    began_s = time.monotonic()
    poller.close(wait_s=0.5)
    assert len(ends) == 2 and not threads()
    assert time.monotonic() - began_s >= 0.5
    poller.close()


def test_closing_does_not_wait_where_all_calls_have_ended() -> None:
    poller, work, ends = WorkPoller(poll_s=POLL_S), Work(), list[CallEnd]()
    work.has_ended = True
    poller.watch(work, ends.append, group=0)
    poller.close(wait_s=SOON_S * 6)
    assert len(ends) == 1 and not threads()


def test_while_it_is_held_nobody_is_asked(poller: WorkPoller) -> None:
    work, ends = Work(), list[CallEnd]()
    poller.watch(work, ends.append, group=0)
    wait_until(lambda: work.num_asked)
    poller.hold()
    asked, work.has_ended = work.num_asked, True
    time.sleep(20 * POLL_S)
    assert (work.num_asked, ends) == (asked, [])
    poller.release()
    wait_until(lambda: ends)


@pytest.mark.parametrize(
    ("backend", "gpu_calls", "says"),
    [
        ("cuda:nccl", False, "this process group is cuda:nccl; gpu_calls=True records calls on GPUs too"),
        ("cpu:mpi,cuda:mpi", True, "with gpu_calls=True; this process group is cpu:mpi,cuda:mpi"),
        ("cpu:mpi,cuda:mpi", False, "with gpu_calls=True; this process group is cpu:mpi,cuda:mpi"),
    ],
)
def test_a_group_whose_calls_are_not_recorded_is_refused_and_the_switch_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpu_calls: bool, says: str
) -> None:
    # a group over nccl or MPI cannot be made without them, so only its name is here
    monkeypatch.setattr(default_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(default_group.dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(default_group.dist, "get_rank", lambda: 3)
    with pytest.raises(ValueError, match=says):
        default_group.own_rank(gpu_calls=gpu_calls)


@pytest.mark.parametrize(("backend", "gpu_calls"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", False)])
def test_a_group_over_nccl_alone_is_taken_with_the_switch(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpu_calls: bool
) -> None:
    monkeypatch.setattr(default_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(default_group.dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(default_group.dist, "get_rank", lambda: 3)
    assert default_group.own_rank(gpu_calls=gpu_calls) == 3


def test_without_any_group_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group before"):
        default_group.own_rank(gpu_calls=True)
