"""Hooks on every call of this process's groups: kind, size, peers, start and end.

Behaviour of torch 2.13, and its consequences:

- DDP's reducer calls its process group in C++, FSDP2 in Python, functional collectives through operators of their own.
  All pass through the dispatcher's `c10d` operators, so a kernel there sees them all, in any thread, and each group
  and each `Work` stays torch's own object. (A subclass of `ProcessGroup` offers no backend, and DDP bypasses replaced
  Python functions.)
- A collective's future completes in gloo's own thread, whether or not a thread waits.
- A message between two ranks has no future, nor has a reduce-scatter; and of two waits for one message one never ends.
  So a thread of ours waits for each of these, and the caller gets a `Work` that waits for that thread.
- On a GPU a call's end is an event on a stream: `WorkPoller` polls it on request; otherwise such calls are only
  counted. For a collective that is not asynchronous, nccl returns no `Work` and uses the caller's stream, where an
  event of ours marks its end; a barrier has ended on the GPU when it returns. Coalesced calls are not on a stream yet
  when they return, and calls that a CUDA graph captures may not be queried: both are only counted.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire import compat
from thinwire.errors import TransportError
from thinwire.transport.call_sites import user_site
from thinwire.transport.work_poller import CallEnd, CudaEventMark, StreamMark, WorkPoller, is_capturing

_AT_ONCE = timedelta(milliseconds=1)
_CLOSE_S = 2.0
_GPU_CLOSE_S = 5.0  # a job that runs ahead of its GPU closes while the calls of its last step are under way
_CPU = torch.device("cpu")
_MESSAGES = {"send": "dst", "recv_": "src"}
# Kind of each operator, and the argument that holds a rank's input; None if the ranks' inputs may differ.
_KINDS: dict[str, tuple[str, str | None]] = {
    "allreduce_": ("all_reduce", "tensors"), "allreduce_coalesced_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"), "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list"), "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"), "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"), "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"), "gather_": ("gather", "input_tensors"), "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", None), "alltoall_base_": ("all_to_all", None), "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None), "send": ("send", "tensors"), "recv_": ("recv", "tensors"),
}  # fmt: skip
_PASSED_BY = ("recv_any_source_",)  # the source stands in the `Work`, which would be replaced


@dataclass(slots=True, eq=False, kw_only=True)
class GroupCall:
    """One call of a process group."""

    group: int  # number of the group in this process, see `CallObserver.group`
    kind: str  # such as `all_reduce`, `send` or `recv`
    sequence: int  # counts the group's collectives; for a message, those of this pair of ranks and tag
    dtype: str = ""  # torch's name of the elements' dtype; empty without elements
    count: int = -1  # elements of this rank's input; -1 if the ranks' inputs may differ
    num_bytes: int = 0
    posted_s: float
    started_s: float | None = None  # time when the GPU started it; None if unknown
    done_s: float | None = None  # time of its end; None before
    error: str = ""
    peer: int | None = None  # for a message, the other end's rank in the whole job
    tag: int = 0
    polled_on: torch.device | None = None  # the device, if its end is polled; None if it is reported
    site: str = ""  # file and line of the call in the user's code; empty if there is none
    is_async: bool = False  # whether the caller goes on before it has ended; False for messages


IsPolled = Callable[[str, torch.device], bool]


def never_polled(kind: str, device: torch.device) -> bool:
    """Return False: no call is polled, and calls on a GPU are only counted."""
    return False


def calls_on_gpus(kind: str, device: torch.device) -> bool:
    """Return whether a call runs on a GPU, so that its end is polled."""
    return device.type == "cuda"


class CallObserver(Protocol):
    """Observer of calls, from any thread; each method must be quick, and never raise."""

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        """Handle a group before its first call: its name, the same on all ranks, and its members."""
        ...

    def posted(self, call: GroupCall) -> None: ...  # before it is made

    def ended(self, call: GroupCall) -> None: ...  # well or not


@dataclass(slots=True)
class _Group:
    number: int
    ranks: tuple[int, ...]
    calls: itertools.count[int] = field(default_factory=itertools.count)
    messages: dict[tuple[str, int, int], itertools.count[int]] = field(default_factory=dict)


class CollectiveHooks:
    """Hooks on all process groups of this process from here on, later ones too.

    Calls are numbered from here on, so all ranks must begin at the same call.

    Args:
        is_polled: Returns, by kind and device, whether a call's end is polled; other calls on a GPU are only counted.
        mark: Puts an event on a device's current stream, for calls without a `Work`.

    Attributes:
        num_passed_by: Calls that were not recorded: on a GPU, or a receive from any source. It includes calls on a GPU
            whose end could not be polled, which are reported as ended when they returned.

    Raises:
        TransportError: This build of torch lacks what this needs, or the process is watched already.
    """

    _lock = threading.Lock()
    _is_in_use = False

    def __init__(
        self, watcher: CallObserver, *, clock: Callable[[], float] = time.monotonic, is_polled: IsPolled = never_polled,
        mark: Callable[[torch.device], StreamMark] = CudaEventMark,
    ) -> None:  # fmt: skip
        gathering = compat.gathering_groups(dist)
        lacking = compat.missing_names()
        if gathering is None and is_polled is not never_polled:
            lacking.append("the list of groups that gather calls")
        if lacking:
            raise TransportError(
                f"torch {torch.__version__} lacks {', '.join(lacking)}; watching was tried with torch "
                f"{', '.join(compat.TRIED_VERSIONS)}"
            )
        with CollectiveHooks._lock:
            if CollectiveHooks._is_in_use:
                raise TransportError("this process is being watched already; close that first")
            CollectiveHooks._is_in_use = True
        self.num_passed_by = 0
        self._is_paused = False
        self._watcher, self._clock, self._is_polled, self._mark = watcher, clock, is_polled, mark
        self._poller = WorkPoller(clock=clock)
        self._gathering = () if gathering is None else gathering
        self._groups: dict[str, _Group] = {}
        self._waiting: dict[_Waiter, None] = {}
        operators = sorted(compat.group_operators() & {*_KINDS, *_PASSED_BY})
        self._at = {name: compat.positions(name) for name in operators}
        # A thread that gloo lets go while the interpreter ends would take the process down with it.
        atexit.register(self._release)
        self._restore = compat.intercept(operators, self._around)
        self._is_closed = False

    def pause(self) -> None:
        """Only number calls, and stop polling: no query is running when this returns."""
        self._is_paused = True
        self._poller.hold()

    def resume(self) -> None:
        self._poller.release()
        self._is_paused = False

    def close(self) -> None:
        """Remove the hooks; ends of open calls are still reported. A second call does nothing.

        Polled ends are reported while this waits for them, five seconds at most.
        """
        if not self._is_closed:
            self._is_closed = True
            self._restore()
            self._poller.close(wait_s=_GPU_CLOSE_S)
            CollectiveHooks._is_in_use = False

    def _around(self, operator: str, arguments: tuple[Any, ...], go_on: Callable[[], Any]) -> Any:
        call = self._call(operator, arguments)
        if call is None:
            return go_on()
        self._watcher.posted(call)
        try:
            result = go_on()
        except BaseException as error:
            self._end(call, str(error) or type(error).__name__)
            raise
        if result is None:  # the call had ended when it returned
            self._end(call)
            return None
        work = compat.unboxed_work(result)
        if call.polled_on is not None:
            self._watch_end(call, work, call.polled_on, self._is_asynchronous(operator, arguments))
            return result
        if operator not in _MESSAGES and (future := _future_of(work)) is not None:
            future.add_done_callback(partial(self._end_with, call))
            return result
        waiter = _Waiter(work, partial(self._waited, call))
        self._waiting[waiter] = None
        waiter.start()
        return compat.with_wait(result, waiter.wait)

    def _call(self, operator: str, arguments: tuple[Any, ...]) -> GroupCall | None:
        """Return a call to report, or None for one that is only counted or numbered (also while paused)."""
        at = self._at[operator]
        kind, brought = _KINDS.get(operator, ("", None))
        tensors = _tensors(arguments[at[brought] if brought is not None else 0])
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), _CPU)
        is_polled = bool(kind) and self._is_polled(kind, device)
        if not kind or (device != _CPU and not is_polled):
            self.num_passed_by += 1
            return None
        own = compat.unboxed_group(arguments[at["process_group"]])
        group = self._group(own)
        peer, tag = None, 0
        if operator in _MESSAGES:
            peer, tag = group.ranks[arguments[at[_MESSAGES[operator]]]], int(arguments[at["tag"]])
            numbers = group.messages.setdefault((kind, peer, tag), itertools.count())
        else:
            numbers = group.calls
        sequence = next(numbers)
        if self._is_paused:
            return None
        # whether a call's end can be polled must be known before the call is reported
        if is_polled and (own in self._gathering or not self._poller.has_room or is_capturing(device)):
            self.num_passed_by += 1
            return None
        call = GroupCall(
            group=group.number, kind=kind, sequence=sequence, posted_s=self._clock(), peer=peer, tag=tag,
            polled_on=device if is_polled else None, site=user_site(),
            is_async="async_op" in at and self._is_asynchronous(operator, arguments),
        )  # fmt: skip
        if brought is not None:
            call.count = sum([tensor.numel() for tensor in tensors])
            call.num_bytes = sum([tensor.nbytes for tensor in tensors])
            call.dtype = str(tensors[0].dtype)[6:] if tensors else ""  # without "torch."
        return call

    def _is_asynchronous(self, operator: str, arguments: tuple[Any, ...]) -> bool:
        at = self._at[operator].get("async_op", len(arguments))
        return at >= len(arguments) or bool(arguments[at])  # an omitted argument has its default, True

    def _watch_end(self, call: GroupCall, work: Any, device: torch.device, is_asynchronous: bool) -> None:
        """Poll a call's `Work`, or else an event on the caller's stream; without both it ended when it returned."""
        line: Hashable | None = call.group if call.peer is None else None
        if work is None and call.kind != "barrier":
            # an asynchronous call runs on the group's own stream: an event on the caller's would not mark its end
            with contextlib.suppress(Exception):  # a CUDA error: the job goes on, and gets it from its own calls
                work = None if is_asynchronous else self._mark(device)
            self.num_passed_by += work is None
            line = None if work is None else (call.group, work.stream)
        if work is None:
            self._end(call)
        else:
            self._poller.watch(work, partial(self._on_polled_end, call), group=call.group, stream=line)

    def _on_polled_end(self, call: GroupCall, end: CallEnd) -> None:
        call.done_s, call.error = end.done_s, end.error
        if end.duration_s is not None:
            # the end is seen late, so the call's own duration gives a later start
            call.started_s = max(call.posted_s, end.done_s - end.duration_s)
        self._watcher.ended(call)

    def _group(self, group: dist.ProcessGroup) -> _Group:
        name = group.group_name
        known = self._groups.get(name)
        if known is None:
            with CollectiveHooks._lock:
                ranks = tuple(dist.get_process_group_ranks(group))
                known = self._groups.setdefault(name, _Group(len(self._groups), ranks))
                self._watcher.group(known.number, f"{name} {group.group_desc}".strip(), ranks)
        return known

    def _end_with(self, call: GroupCall, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            self._end(call, str(error))
        else:
            self._end(call)

    def _waited(self, call: GroupCall, waiter: _Waiter) -> None:
        self._waiting.pop(waiter, None)
        self._end(call, "" if waiter.error is None else str(waiter.error))

    def _end(self, call: GroupCall, error: str = "") -> None:
        call.done_s = self._clock()
        call.error = error
        self._watcher.ended(call)

    def _release(self) -> None:
        for waiter in list(self._waiting):
            waiter.release()
        self._poller.close()


class _Waiter(threading.Thread):
    """Waits for one `Work` once, for any number of callers."""

    def __init__(self, work: Any, on_end: Callable[[_Waiter], None]) -> None:
        super().__init__(name="thinwire-watch-wait", daemon=True)
        self.error: BaseException | None = None
        self._work = work
        self._on_end = on_end
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Wait as long as the group's own timeout lets it."""
        try:
            self._work.wait()
        except BaseException as error:
            self.error = error
        self._on_end(self)
        self._has_ended.set()

    def wait(self, limit: timedelta) -> bool:
        """Wait for the end as a caller's `Work.wait(limit)` does; no limit, or 0, means the group's own."""
        limit_s = limit.total_seconds()
        if not self._has_ended.wait(limit_s if limit_s > 0 else None):
            raise RuntimeError(f"Timed out waiting {limit_s * 1000:.0f}ms for the operation")
        if self.error is not None:
            raise self.error
        return True

    def release(self) -> None:
        """End the wait of a message that may never come, by a wait with a tiny limit, which closes its connection."""
        if not self._has_ended.is_set():
            try:
                self._work.wait(_AT_ONCE)
            except RuntimeError:
                self._has_ended.wait(_CLOSE_S)


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:
        return None


def _tensors(found: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument: one, a list, or a list of lists."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for part in found for tensor in _tensors(part)]
