"""Replica of several ranks: rank 0 drives, the others execute its commands on their shards (FSDP2).

Rank 0 alone exchanges with other replicas. It starts the other ranks as processes; all of them end together.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.adaptive_timeout import AdaptiveTimeout, Deadlines
from thinwire.shared_random import derive_seed
from thinwire.sync.fragments import find_blocks
from thinwire.training.build import check_device, make_inner_optimizer
from thinwire.training.config import TrainConfig, from_json, to_json
from thinwire.training.loop import Passes, autocast
from thinwire.transport.replica_group import ShardedParameters

if TYPE_CHECKING:
    from thinwire.transport.replica_group import ReplicaGroup  # imports FSDP, which takes a second


class ModelShard:
    """Model whose parameters are sharded over the ranks (FSDP2), with the collective operations on it.

    Every method is called by all ranks of the replica, in the same order. `model` is this rank's part, of DTensors; the
    timer of its passes includes waits for other ranks' shards.
    """

    def __init__(self, group: ReplicaGroup, config: TrainConfig, *, sizes: Mapping[str, int]) -> None:
        self._group = group
        self._config = config
        group.use(config.model.device)
        torch.manual_seed(config.run.seed)
        # every rank makes the same weights from the seed, and keeps its shard of them
        self.model = config.workload.make_model(config, sizes, group.device)
        group.shard(self.model, blocks=block_modules(self.model))
        self.inner = make_inner_optimizer(config, self.model)
        self.parameters = ShardedParameters(group, self.model)
        self._loss = config.workload.loss(config, self.model)
        self.passes = Passes(group.device)
        if group.rank:  # ranks see other rows, and drop out other numbers
            torch.manual_seed(derive_seed(config.run.seed, "rank", group.rank))

    def backward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put the mean gradient over the replica's whole batch into each rank's shards.

        Inputs and targets, (batch, seq) int64, are the whole batch, the same on all ranks, no fewer rows than ranks.
        Returns loss and what is shown of the whole batch, the same on all ranks; see `Loss`.
        """
        self.model.train()
        rows, share = own_rows(inputs.shape[0], rank=self._group.rank, size=self._group.size)
        with self.passes.forward(), autocast(self._config, self._group.device):
            loss, shown = self._loss(inputs[rows], targets[rows])
        # FSDP2 averages the ranks' gradients alike, so each weighs its own by its rows
        with self.passes.backward():
            (loss * (share * self._group.size)).backward()  # type: ignore[no-untyped-call]
        summed = self._group.all_reduce(torch.cat([loss.detach()[None] * share, shown.detach() * share]))
        return summed[0], summed[1:]

    def held_out(self, inputs: Tensor, targets: Tensor) -> Tensor:
        rows, share = own_rows(inputs.shape[0], rank=self._group.rank, size=self._group.size)
        self.model.eval()
        with torch.no_grad(), autocast(self._config, self._group.device):
            shown = self._loss(inputs[rows], targets[rows])[1]
        return self._group.all_reduce(shown.detach() * share)

    def step(self, factor: float, *, base_lrs: Sequence[float]) -> None:
        for group, base_lr in zip(self.inner.param_groups, base_lrs, strict=True):
            group["lr"] = base_lr * factor
        self.clip()
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def clip(self) -> None:
        if self._config.optimizer.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.clip_norm)


def own_rows(num_rows: int, *, rank: int, size: int) -> tuple[slice, float]:
    """Return which rows of a batch are a rank's, and what share of all of them.

    A rank without rows takes the first one with weight 0: a model cannot run on an empty batch.

    Example:
        >>> [own_rows(5, rank=rank, size=2) for rank in range(2)]
        [(slice(0, 3, None), 0.6), (slice(3, 5, None), 0.4)]
        >>> own_rows(1, rank=1, size=2)
        (slice(0, 1, None), 0.0)
    """
    few, more = divmod(num_rows, size)
    start = rank * few + min(rank, more)
    count = few + (rank < more)
    return (slice(start, start + count), count / num_rows) if count else (slice(0, 1), 0.0)


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model repeats, as `find_blocks` finds them; none of a model of one part."""
    found = []
    for names in find_blocks(model).blocks:
        paths = [name.split(".")[:-1] for name in names]
        shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        if shared:
            found.append(model.get_submodule(".".join(shared)))
    return found


def follow(group: ReplicaGroup) -> None:
    """Execute the commands of rank 0 until it ends the group."""
    shard: ModelShard | None = None
    base_lrs: list[float] = []
    while (order := json.loads(group.receive_order()))["do"] != "end":
        if order["do"] == "assemble":
            del shard
            shard = ModelShard(group, from_json(order["config"]), sizes=order["sizes"])
            base_lrs = [param_group["lr"] for param_group in shard.inner.param_groups]
        else:
            assert shard is not None, "there is a model before it is worked on"
            _execute(order, shard, group=group, base_lrs=base_lrs)


def _execute(order: dict[str, Any], shard: ModelShard, *, group: ReplicaGroup, base_lrs: Sequence[float]) -> None:
    names = [shard.parameters.names[index] for index in order.get("which", ())]
    match order["do"]:
        case "step":
            shard.backward(*receive_batch(order, group=group))
            shard.step(order["factor"], base_lrs=base_lrs)
        case "held_out":
            shard.held_out(*receive_batch(order, group=group))
        case "gather":
            shard.parameters.gather(names)
        case "scatter":
            shard.parameters.scatter(names, None, blend=order["blend"])
        case "keep":
            shard.parameters.keep()
        case "restore":
            shard.parameters.restore()


def receive_batch(order: dict[str, Any], *, group: ReplicaGroup) -> Sequence[Tensor]:
    """Receive the batch of a command: inputs and targets, (batch, seq) int64 each."""
    return group.broadcast(torch.empty((2, *order["shape"]), dtype=torch.int64, device=group.device)).unbind()


# Models are made, and weights read, in different times on ranks that share a disk.
_ASSEMBLY_S = 900.0


class Rank0Driver:
    """Drives a replica's ranks from rank 0; reaches all shards of the parameters (see `ReplicaShards`)."""

    def __init__(self, group: ReplicaGroup, *, processes: RankProcesses | None = None) -> None:
        self._group = group
        self._processes = processes
        self._shard: ModelShard | None = None
        self._indices: dict[str, int] = {}
        self._deadlines = Deadlines()

    @property
    def problem(self) -> str:
        """Why the replica leaves, once a rank is lost; else empty."""
        return "" if self._processes is None else self._processes.problem

    @property
    def num_ranks(self) -> int:
        return self._group.size

    @property
    def device(self) -> torch.device:
        return self._group.device

    def assemble(self, config: TrainConfig, *, sizes: Mapping[str, int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build the sharded model on every rank; return this rank's part and its inner optimizer."""
        self._shard = None
        with self._during("making the model", limit_s=_ASSEMBLY_S):
            self._send("assemble", config=to_json(config), sizes=dict(sizes))
            self._shard = ModelShard(self._group, config, sizes=sizes)
        self._indices = {name: index for index, name in enumerate(self._shard.parameters.names)}
        return self._shard.model, self._shard.inner

    @property
    def timing(self) -> Passes:
        return self._made.passes

    def backward(self, inputs: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        """Begin a step on all ranks with the whole batch; `clip` must follow, and the inner optimizer's step."""
        with self._during("a step"):
            self._send("step", shape=list(inputs.shape), factor=factor)
            return self._made.backward(*self._group.broadcast(torch.stack([inputs, targets])))

    def clip(self) -> None:
        with self._during("the norm of the gradient"):
            self._made.clip()

    def held_out(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._during("an evaluation"):
            self._send("held_out", shape=list(inputs.shape))
            return self._made.held_out(*self._group.broadcast(torch.stack([inputs, targets])))

    def gather(self, names: Sequence[str]) -> Tensor:
        with self._during("shards"):
            self._send("gather", which=self._which(names))
            return self._made.parameters.gather(names)

    def scatter(self, names: Sequence[str], values: Tensor, *, blend: float = 0.0) -> None:
        with self._during("taking over shards"):
            self._send("scatter", which=self._which(names), blend=blend)
            self._made.parameters.scatter(names, values, blend=blend)

    def keep(self) -> None:
        self._send("keep")
        self._made.parameters.keep()

    def restore(self) -> None:
        self._send("restore")
        self._made.parameters.restore()

    def dismiss(self) -> None:
        self._send("end")

    @property
    def _made(self) -> ModelShard:
        assert self._shard is not None, "assemble() comes first"
        return self._shard

    def _which(self, names: Sequence[str]) -> list[int]:
        return [self._indices[name] for name in names]

    def _send(self, what: str, **more: Any) -> None:
        self._group.send_order(json.dumps({"do": what, **more}, separators=(",", ":")).encode())

    @contextlib.contextmanager
    def _during(self, what: str, *, limit_s: float | None = None) -> Iterator[None]:
        began_s = time.monotonic()
        if self._processes is not None:
            self._processes.expect(what, self._deadlines.deadline_s(steps=1) if limit_s is None else limit_s)
        try:
            yield
        except RuntimeError:
            if self._processes is not None:
                self._processes.wait_for_report()
            raise
        finally:
            if self._processes is not None:
                self._processes.expect_nothing()
        if limit_s is None:
            self._deadlines.observe_step(time.monotonic() - began_s)


def check_ranks(config: TrainConfig, *, num_ranks: int, num_replicas: int = 1) -> None:
    """Check that this host can run so many replicas of so many ranks each."""
    if num_ranks < 1:
        raise ValueError(f"--ranks-per-replica must be at least 1, got {num_ranks}")
    if num_ranks == 1:
        return
    if config.model.device == "cuda":
        check_device(config.model.device)
        wanted, seen = num_ranks * num_replicas, torch.cuda.device_count()
        if wanted > seen:
            raise ValueError(
                f"--ranks-per-replica {num_ranks} for {num_replicas} replicas of this host needs {wanted} GPUs, one a "
                f"rank, and torch sees {seen}; give fewer of either"
            )
    if config.data.batch_size is not None and num_ranks > config.data.batch_size:
        raise ValueError(
            f"--ranks-per-replica {num_ranks} is more than the {config.data.batch_size} sequences of a step, and a "
            f"rank takes one at least; give a larger --batch-size, or fewer ranks"
        )
    if config.optimizer.inner_optimizer == "muon":
        raise ValueError(
            "--inner-optimizer muon needs whole matrices, and with --ranks-per-replica above 1 a rank holds a part of "
            "each; use adamw, or 1"
        )
    if config.model.compile:
        raise ValueError("--compile was not tried with --ranks-per-replica above 1; leave one of them out")


def whole_model(
    config: TrainConfig, *, sizes: Mapping[str, int], parameters: dict[str, Tensor], sharded: nn.Module
) -> nn.Module:  # fmt: skip
    """Return a plain model on the CPU with given parameters and a sharded model's buffers."""
    model = config.workload.make_model(config, sizes, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        buffers = dict(sharded.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return model


_POLL_S = 0.1
_JOINING = ("joining its ranks", 300.0)
_END_S = 10.0
_FIND_OUT_S = 1.0
# The main thread meets a lost rank at its next operation of all ranks, and then tells the others why it leaves: it has
# this long, and twice the longest recent time between two such operations. That may have been the fetching of a state;
# a main thread that hangs is ended after a minute at the latest.
_LEAVE_S, _GAPS_TO_LEAVE, _LONGEST_LEAVE_S = 3.0, 2.0, 60.0
# Seconds. The clock of a stopped process goes on, so one poll counts for no longer than this.
_LONGEST_POLL_S = 1.0


class RankProcesses:
    """Processes of a replica's other ranks, watched for exits and hangs.

    Args:
        command: Starts one; rank and rendezvous file are appended.
        num_ranks: Ranks of the replica, this one among them.
        logs: Folder of their logs, `NAME-rank-N.err` each.
        name: Name of the replica's process there.
        report: Called, from a thread, with the reason that a rank is gone or hangs; all ranks have been ended then.
        end: Ends this process, which has not done so by itself soon after: what it waits for may never come.
    """

    def __init__(
        self, command: list[str], *, num_ranks: int, logs: Path, name: str, report: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._report = report
        self._end = end
        self._has_reported = threading.Event()
        self._logs = logs
        self._name = name
        self._is_over = threading.Event()
        self.problem = ""
        self._expected: tuple[str, float] | None = _JOINING
        self._latest: tuple[str, float] | None = None
        self._waited_s = 0.0
        self._gaps = AdaptiveTimeout(window=200)
        self._asked_s: float | None = None
        # readable by this user only, on a local disk
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-ranks-", ignore_cleanup_errors=True)
        self.meeting = Path(self._folder.name) / "meeting"
        logs.mkdir(parents=True, exist_ok=True)
        self._processes = {rank: self._start(command, rank) for rank in range(1, num_ranks)}
        self._thread = threading.Thread(target=self._watch, name="thinwire-ranks", daemon=True)
        self._thread.start()

    def expect(self, what: str, limit_s: float) -> None:
        """Start the time limit of an operation of all ranks."""
        now_s = time.monotonic()
        if self._asked_s is not None:
            self._gaps.observe(now_s - self._asked_s)
        self._asked_s = now_s
        self._expected = what, limit_s

    def expect_nothing(self) -> None:
        self._expected = None

    def wait_for_report(self) -> None:
        """Wait until the reason of a broken connection is known.

        The connections of a rank that dies break before its exit can be observed.
        """
        self._has_reported.wait(_FIND_OUT_S)

    def close(self) -> None:
        """End the other ranks; they hold no state of their own."""
        self._is_over.set()
        self._thread.join()
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + _END_S
        for process in self._processes.values():
            try:
                process.wait(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _start(self, command: list[str], rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("ab") as log:
            arguments = [*command, str(rank), str(self.meeting)]
            return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._name}-rank-{rank}.err"

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(_POLL_S):
            now_s = time.monotonic()
            passed_s, before_s = min(_LONGEST_POLL_S, now_s - before_s), now_s
            if why := self._find_problem(passed_s):
                # end all ranks; the main thread then sees broken connections and has a moment to leave the run
                self.problem = "lost one of its ranks"
                for process in self._processes.values():
                    if process.poll() is None:
                        process.kill()
                self._report(why)
                self._has_reported.set()
                if not self._is_over.wait(min(_LONGEST_LEAVE_S, _LEAVE_S + _GAPS_TO_LEAVE * self._gaps.largest_s)):
                    self._end()
                return

    def _find_problem(self, passed_s: float) -> str:
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                return f"rank {rank} of this replica {how}; see {self._log(rank)}"
        expected = self._expected
        # compared by identity: each call of `expect` makes a new tuple
        self._waited_s = self._waited_s + passed_s if expected is self._latest else 0.0
        self._latest = expected
        if expected is None or self._waited_s <= expected[1]:
            return ""
        what, limit_s = expected
        return f"a rank of this replica hangs: {what} took longer than {limit_s:.3g} s; see {self._log(1).parent}"


@contextlib.contextmanager
def start_ranks(
    run_dir: Path, *, module: str, leader: int, index: int, num_ranks: int, report: Callable[[str], None],
    end: Callable[[], None],
) -> Iterator[Rank0Driver]:  # fmt: skip
    """Start a replica's other ranks, at least one, and drive them inside the block; they end with `leader`."""
    command = [sys.executable, "-m", *module.split(), str(run_dir.resolve()), str(leader), str(index), str(num_ranks)]
    processes = RankProcesses(
        command, num_ranks=num_ranks, logs=run_dir / "logs", name=f"replica-process-{index}", report=report, end=end
    )
    try:
        group = join_ranks(processes.meeting, index=index, rank=0, num_ranks=num_ranks)
        processes.expect_nothing()
        yield Rank0Driver(group, processes=processes)
    finally:
        processes.close()


def join_ranks(meeting: Path, *, index: int, rank: int, num_ranks: int) -> ReplicaGroup:
    """Join the ranks of a replica of this host; its rank r takes the host's GPU `index * num_ranks + r`."""
    from thinwire.transport.replica_group import ReplicaGroup

    return ReplicaGroup(rank=rank, size=num_ranks, meeting=meeting, gpu=index * num_ranks + rank)
