"""Record any job of torch.distributed, in one line: `thinwire.watch("runs/watch")`.

Each rank appends its calls to a file; `thinwire diagnose runs/watch` names ranks that are missing, late, desynchronised
or stopped. A call is on disk before it is made, so that it is there even if gloo ends the process during the call.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

from thinwire.recording.connection_records import RankPlace, WatchedWires
from thinwire.recording.own_fault import fault_text
from thinwire.recording.thread_state import TrainingThread
from thinwire.runlog.process_state import SilentProcesses, write_process
from thinwire.runlog.records import Beat, Communicator, Span, to_line
from thinwire.runlog.writer import MOST_FILE_BYTES, JsonlWriter, record_writer
from thinwire.transport.addresses import clock_name, host_name, outer_addresses
from thinwire.transport.burst_probe import open_probe_port
from thinwire.transport.collective_hooks import CollectiveHooks, GroupCall, IsPolled, calls_on_gpus, never_polled
from thinwire.transport.default_group import all_gather_text, own_rank, store_port

WRITE_S = 0.25
BEAT_S = 0.5
# A call that is open for so long may never end: then idle connections are written down too.
LONG_S = 1.0
_MOST_ERROR = 400
_CLOSE_S = 10.0


class Watching:
    """A job that is being recorded at this rank; see `watch`.

    Args:
        store: The port of the store that the ranks met at; 0 where it is not known.
        door: Where bursts that probe the wires come in; none where they are not probed.
        is_polled: Which calls' ends are learned by asking, see `CollectiveHooks`.

    Attributes:
        lost: Why nothing is recorded any more, such as a full disk; empty while all is well.
    """

    def __init__(
        self, file: JsonlWriter, run_dir: Path, *, rank: int, places: Sequence[RankPlace], store: int = 0,
        door: socket.socket | None = None, clock: Callable[[], float] = time.monotonic,
        is_polled: IsPolled = never_polled,
    ) -> None:  # fmt: skip
        self.lost = ""
        self._file, self._rank, self._places, self._clock = file, rank, places, clock
        self._names: dict[int, str] = {}
        self._communicators: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wires = WatchedWires(rank, places, store=store, door=door, clock=clock)
        self._open: dict[GroupCall, None] = {}
        self._ended: deque[GroupCall] = deque()
        self._errors: deque[str] = deque(maxlen=4)
        self._num_steps = 0
        self._step_began_s = clock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="thinwire-watch", daemon=True)
        self._trained = TrainingThread(rank, clock())
        self._others = SilentProcesses(run_dir, rank=rank, clock=clock)
        self._groups = CollectiveHooks(self, clock=clock, is_polled=is_polled)
        self._thread.start()
        # also where a process was forked or spawned by multiprocessing, which runs nothing of atexit
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def __enter__(self) -> Watching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_passed_by(self) -> int:
        """Calls that were not recorded: on a GPU (with `gpu_calls` some of them), or a receive from any rank."""
        return self._groups.num_passed_by

    @property
    def num_bursts(self) -> int:
        """Bursts that other hosts have answered: 0 at the lowest rank of a host if none of `probe_wires` gets there."""
        return self._wires.num_bursts

    def pause(self) -> None:
        """Record no calls until `resume`; they are numbered on, so that ranks need not do so at the same time.

        With `gpu_calls` no GPU is asked anything meanwhile either, as the capture of a CUDA graph requires.
        """
        self._groups.pause()

    def resume(self) -> None:
        self._groups.resume()

    def step(self, *, loss: float | None = None) -> None:
        """Say that a step of training has ended, so that losses that are no number or part are found too.

        Args:
            loss: This rank's loss in it, as a plain number.
        """
        now_s = self._clock()
        span = Span(
            rank=self._rank, kind="step", step=self._num_steps, started_s=self._step_began_s, done_s=now_s,
            loss=None if loss is None else float(loss),
        )  # fmt: skip
        self._num_steps += 1
        self._step_began_s = now_s
        self._put([to_line(span)])

    def close(self) -> None:
        """Record no more, write what there is and say goodbye. A second call does nothing."""
        if self._is_over.is_set():
            return
        self._groups.close()
        self._is_over.set()
        self._thread.join(_CLOSE_S)
        self._wires.close()
        if self._thread.is_alive():  # a disk that does not answer may not keep the job from ending
            self.lost = self.lost or f"the disk has not answered for {_CLOSE_S:g} s"
            return
        self._turn()
        error, fault = getattr(sys, "last_value", None), ""
        # where a call failed, the fault is others'
        if error is not None and not any(str(error) in failed or failed in str(error) for failed in self._errors):
            fault = fault_text(error)[:_MOST_ERROR]
        # whose call has failed was left by somebody: no goodbye, so that the call stands as one that never ended
        self._turn(to_line(Beat(rank=self._rank, at_s=self._clock(), is_last=not self._errors, error=fault)))
        self._file.close()
        self._at_exit.cancel()

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        self._names[number] = name
        self._write_communicator(name, ranks)

    def posted(self, call: GroupCall) -> None:
        """Write down a call before it is made, and what has ended since the last one: one write for both."""
        self._open[call] = None
        self._trained.note_call(call.posted_s)
        self._wires.note_call(is_open=True)
        self._put([*self._lines_of_ended(), *self._lines(call)])

    def ended(self, call: GroupCall) -> None:
        """Take note of a call's end, which is written soon; that it failed at once, since the process may end by it."""
        self._open.pop(call, None)
        self._trained.note_end(self._clock() if call.done_s is None else call.done_s)
        if not self._open:
            self._wires.note_call(is_open=False)
        self._ended.append(call)
        if call.error:
            beat = Beat(rank=self._rank, at_s=self._clock(), error=f"a call failed: {call.error}"[:_MOST_ERROR])
            self._put([*self._lines_of_ended(), to_line(beat)])

    def _go_on(self) -> None:
        beat_s = -BEAT_S
        while not self._is_over.wait(WRITE_S):
            now_s = self._clock()
            is_due = now_s - beat_s >= BEAT_S - WRITE_S / 2
            if (sampled := self._trained.sample(now_s)) is not None:
                self._turn(to_line(sampled))
            lines: list[str] = []
            if is_due:
                beat_s = now_s
                is_waiting = any(now_s - call.posted_s >= LONG_S for call in list(self._open))
                lines += [*map(to_line, self._others.sample()), *self._wires.lines(is_waiting=is_waiting)]
                lines.append(to_line(Beat(rank=self._rank, at_s=now_s)))
            self._turn(*lines)

    def _turn(self, *lines: str) -> None:
        """Write down what has ended since the last turn, and more."""
        self._put([*self._lines_of_ended(), *lines])

    def _lines_of_ended(self) -> list[str]:
        lines: list[str] = []
        with contextlib.suppress(IndexError):  # two threads may take them out
            while True:
                call = self._ended.popleft()
                if call.error:
                    self._errors.append(call.error)
                lines += self._lines(call)
        return lines

    def _put(self, lines: Sequence[str]) -> None:
        with self._lock:
            if self.lost or not lines:
                return
            try:
                if self._file.write_all(lines):
                    # the older file, which holds the communicators, may soon be gone
                    self._file.write_all(self._communicators.values())
            except (OSError, ValueError) as error:  # a broken disk or a closed file ends the recording, not the job
                self.lost = str(error)

    def _lines(self, call: GroupCall) -> Iterator[str]:
        """Yield a call's records. Made by hand: `to_line` takes several times as long, and the job waits meanwhile."""
        name, kind = self._names[call.group], call.kind
        if call.peer is not None:
            # the communicator of messages one way between two ranks: each pair counts its own
            kind, ends = "message", (self._rank, call.peer) if kind == "send" else (call.peer, self._rank)
            name = f"{name} {ends[0]}->{ends[1]}" + (f" tag {call.tag}" if call.tag else "")
            if name not in self._communicators:
                self._write_communicator(name, ends)
        failed = bool(call.error)
        end = "" if call.done_s is None or failed else f',"done_s":{call.done_s:.6f}'
        begin = "" if call.started_s is None else f',"started_s":{call.started_s:.6f}'
        begin += f',"site":{json.dumps(call.site)}' if call.site else ""
        begin += ',"is_async":true' if call.is_async else ""
        quoted = json.dumps(name)
        dtype = f',"dtype":"{call.dtype}"' if call.dtype else ""
        yield (
            f'{{"record":"operation","communicator":{quoted},"rank":{self._rank},"sequence":{call.sequence},'
            f'"kind":"{kind}"{dtype},"count":{call.count},"posted_s":{call.posted_s:.6f}{begin}{end}}}'
        )
        if call.peer is not None:
            direction = "sent" if call.kind == "send" else "received"
            error = f',"error":{json.dumps(call.error[:400])}' if failed else ""
            yield (
                f'{{"record":"transfer","communicator":{quoted},"rank":{self._rank},"peer":{call.peer},'
                f'"direction":"{direction}","operation":{call.sequence},"num_bytes":{call.num_bytes},'
                f'"posted_s":{call.posted_s:.6f}{end}{error}}}'
            )

    def _write_communicator(self, name: str, ranks: tuple[int, ...]) -> None:
        places = [self._places[rank] for rank in ranks]
        hosts, clocks = tuple(place.host for place in places), tuple(place.clock for place in places)
        line = to_line(Communicator(communicator=name, ranks=ranks, hosts=hosts, clocks=clocks))
        self._communicators[name] = line
        self._put([line])


def watch(
    folder: str | Path = "runs/watch", *, most_bytes: int = MOST_FILE_BYTES, gpu_calls: bool = False,
    probe_wires: bool = False,
) -> Watching:  # fmt: skip
    """Record all that this job's ranks ask of torch.distributed from here on: DDP, FSDP2, collectives, messages.

    Call it once on every rank, right after `init_process_group`: ranks tell each other their hosts in it, and calls are
    numbered from it on. Groups over gloo are recorded; calls on a GPU pass by and are counted, or with `gpu_calls` are
    recorded too. On a GPU that was tried with one rank over nccl (docs/benchmarks.md), where it costs host time.

    Args:
        folder: Where this rank's `records-rank-N.jsonl` goes, on a disk of this host that answers quickly: each call is
            written there before it is made. A file of an earlier job is written over.
        most_bytes: How long this rank's files may become together; older records go first.
        gpu_calls: Record calls on GPUs too, but those that are gathered into one and those that a CUDA graph captures;
            the same on all ranks; choose the GPU by `torch.cuda.set_device` before. Ends are known to about 5 ms.
        probe_wires: Send 128 KiB to one other host at a time while no call is open, and time it, so that wires which
            the job leaves idle are known too; the same on all ranks. It takes a hundredth of a host's time at most,
            and a TCP port of the kernel's choice, which takes bytes from the job's hosts only and throws them away.

    Returns:
        A handle: `close` it, use it in a `with`, or let it end with the process.

    Raises:
        OSError: The folder cannot be written to, or there is no port for probes.
        RuntimeError: A rank did not come within the process group's timeout.
        TransportError: This process is being watched already, or this torch lacks what it takes.
        ValueError: There is no process group over gloo, nor with `gpu_calls` one over nccl.

    Reference: the operation layer of C4's recording (arXiv 2406.04594), outside of the communication library.
    """
    rank = own_rank(gpu_calls=gpu_calls)
    run_dir = Path(folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    file = record_writer(run_dir, rank=rank, most_bytes=most_bytes)
    write_process(run_dir, rank=rank)
    door = open_probe_port() if probe_wires else None
    try:
        port = 0 if door is None else door.getsockname()[1]
        own = RankPlace(host=host_name(), clock=clock_name(), addresses=outer_addresses(), port=port)
        words = all_gather_text(own.to_text())
    except BaseException:
        if door is not None:
            door.close()
        raise
    return Watching(
        file, run_dir, rank=rank, places=[RankPlace.from_text(word) for word in words], store=store_port(), door=door,
        is_polled=calls_on_gpus if gpu_calls else never_polled,
    )  # fmt: skip
