"""The rank of a replica that leads: it alone talks to other replicas, and tells its own ranks what to do."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.sync.deadlines import Deadlines
from thinwire.training.build import check_device, make_model
from thinwire.training.config import TrainConfig, to_json
from thinwire.training.elastic.rank_shard import ModelShard
from thinwire.training.step_timing import Passes

if TYPE_CHECKING:
    from thinwire.transport.replica_group import InnerGroup  # imports FSDP, which takes a second

# Models are made, and weights read, in different times on ranks that share a disk.
_ASSEMBLY_S = 900.0


class Rank0Driver:
    """A replica's ranks, as the one that leads sees them; reaches all shards of the parameters (see `ReplicaShards`).

    Args:
        group: The replica's ranks; this one leads.

    Attributes:
        waits: What the others are waited for just now, and for how many seconds at most; None between two orders.
        problem: Why the replica leaves, once a rank of it is gone.
        find_out: Called where a message between ranks failed: waits a moment until it is known why.
    """

    def __init__(self, group: InnerGroup) -> None:
        self._group = group
        self._shard: ModelShard | None = None
        self._indices: dict[str, int] = {}
        self._deadlines = Deadlines()
        self.waits: tuple[str, float] | None = None
        self.problem = ""
        self.find_out: Callable[[], None] = lambda: None

    @property
    def num_ranks(self) -> int:
        """Ranks of this replica."""
        return self._group.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._group.device

    def assemble(self, config: TrainConfig, *, vocab_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Let every rank make its part of the model anew, and return this rank's, with its inner optimizer."""
        self._shard = None
        with self._during("making the model", limit_s=_ASSEMBLY_S):
            self._send("assemble", config=to_json(config), vocab_size=vocab_size)
            self._shard = ModelShard(self._group, config, vocab_size=vocab_size)
        self._indices = {name: index for index, name in enumerate(self._shard.parameters.names)}
        return self._shard.model, self._shard.inner

    @property
    def passes(self) -> Passes:
        """What times this rank's passes."""
        return self._made.passes

    def backward(self, tokens: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        """Begin a step on all ranks; `clip` must follow, and the inner optimizer's step.

        Args:
            tokens: (batch, seq) int64, the replica's whole batch.
            targets: The token that follows each.
            factor: The step's learning rate as a share of its peak.

        Returns:
            Loss and nll of the whole batch.
        """
        with self._during("a step"):
            self._send("step", shape=list(tokens.shape), factor=factor)
            return self._made.backward(*self._group.spread(torch.stack([tokens, targets])))

    def clip(self) -> None:
        """Shorten the gradient as the other ranks do; see `ModelShard.clip`."""
        with self._during("the norm of the gradient"):
            self._made.clip()

    def held_out(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean nll of a batch that nobody trains on; see `ModelShard.held_out`."""
        with self._during("an evaluation"):
            self._send("held_out", shape=list(tokens.shape))
            return self._made.held_out(*self._group.spread(torch.stack([tokens, targets])))

    def gather(self, names: Sequence[str]) -> Tensor:
        """See `ReplicaShards.gather`."""
        with self._during("shards"):
            self._send("gather", which=self._which(names))
            return self._made.parameters.gather(names)

    def scatter(self, names: Sequence[str], values: Tensor, *, blend: float = 0.0) -> None:
        """See `ReplicaShards.scatter`."""
        with self._during("taking over shards"):
            self._send("scatter", which=self._which(names), blend=blend)
            self._made.parameters.scatter(names, values, blend=blend)

    def keep(self) -> None:
        """See `ReplicaShards.keep`."""
        self._send("keep")
        self._made.parameters.keep()

    def restore(self) -> None:
        """See `ReplicaShards.restore`."""
        self._send("restore")
        self._made.parameters.restore()

    def dismiss(self) -> None:
        """Tell the other ranks that this is the end."""
        self._send("end")

    @property
    def _made(self) -> ModelShard:
        assert self._shard is not None, "assemble() comes first"
        return self._shard

    def _which(self, names: Sequence[str]) -> list[int]:
        return [self._indices[name] for name in names]

    def _send(self, what: str, **more: Any) -> None:
        self._group.tell(json.dumps({"do": what, **more}, separators=(",", ":")).encode())

    @contextlib.contextmanager
    def _during(self, what: str, *, limit_s: float | None = None) -> Iterator[None]:
        began_s = time.monotonic()
        self.waits = what, self._deadlines.deadline_s(steps=1) if limit_s is None else limit_s
        try:
            yield
        except RuntimeError:
            self.find_out()
            raise
        finally:
            self.waits = None
        if limit_s is None:
            self._deadlines.observe_step(time.monotonic() - began_s)


def check_ranks(config: TrainConfig, *, num_ranks: int, num_replicas: int = 1) -> None:
    """Refuse what replicas of so many ranks cannot do on this host.

    Args:
        config: The job's options on this host.
        num_ranks: Ranks of each replica.
        num_replicas: Replicas of this host.

    Raises:
        ValueError: Names the option, the limit and the remedy.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks-per-replica must be at least 1, got {num_ranks}")
    if num_ranks == 1:
        return
    if config.device == "cuda":
        check_device(config.device)
        wanted, seen = num_ranks * num_replicas, torch.cuda.device_count()
        if wanted > seen:
            raise ValueError(
                f"--ranks-per-replica {num_ranks} for {num_replicas} replicas of this host needs {wanted} GPUs, one a "
                f"rank, and torch sees {seen}; give fewer of either"
            )
    if config.batch_size is not None and num_ranks > config.batch_size:
        raise ValueError(
            f"--ranks-per-replica {num_ranks} is more than the {config.batch_size} sequences of a step, and a rank "
            f"takes one at least; give a larger --batch-size, or fewer ranks"
        )
    if config.inner_optimizer == "muon":
        raise ValueError(
            "--inner-optimizer muon needs whole matrices, and with --ranks-per-replica above 1 a rank holds a part of "
            "each; use adamw, or 1"
        )
    if config.compile:
        raise ValueError("--compile was not tried with --ranks-per-replica above 1; leave one of them out")


def whole_model(
    config: TrainConfig, *, vocab_size: int, parameters: dict[str, Tensor], sharded: nn.Module
) -> nn.Module:  # fmt: skip
    """Return a plain model on the CPU with given parameters and a sharded model's buffers.

    Args:
        config: The job's options.
        vocab_size: Tokens of the job's tokenizer.
        parameters: All of them, whole, by name.
        sharded: Holds the buffers, whole.
    """
    model = make_model(config, vocab_size=vocab_size, device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        buffers = dict(sharded.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return model
