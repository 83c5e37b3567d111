"""Replica group: the ranks of one replica on one host; rank 0 sends orders, and gathers and scatters shards.

The group is made by a file that only this host's user can read, and its sockets listen on the loopback interface, so no
other process can join. The group has no time-outs: a rank that dies closes its connections, and rank 0 watches how long
the others take. Decision 7 gives the reason why an elastic replica exchanges whole fragments at rank 0, while a static
one exchanges a shard at each rank (`connect(ranks_per_replica=...)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import warn_untested
from thinwire.transport.addresses import interface_of
from thinwire.transport.connect import end_default_group, gloo_on, keep_nccl_on_loopback, make_default_group
from thinwire.transport.shards import drop_gathered, flatten, local_shard, unflatten_into

# First message of an order, with its length in the first eight bytes; longer orders continue in a second message.
_ORDER_BYTES = 1024
_LENGTH_BYTES = 8
_MOST_ORDER_BYTES = 1 << 24
# A replica may be paused for long.
_EVER = timedelta(days=7)
_LEADER = 0


class ReplicaGroup:
    """One rank's end of a replica's own process group, which becomes torch's default group.

    Args:
        rank: This rank; 0 leads.
        meeting: A file that does not exist yet, in a folder that only this user can enter; the same for all ranks.
    """

    def __init__(self, *, rank: int, size: int, meeting: Path, gpu: int = 0) -> None:
        self.rank, self.size, self._gpu = rank, size, gpu
        self.device = torch.device("cpu")
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        keep_nccl_on_loopback()
        with gloo_on(interface_of("127.0.0.1")):
            make_default_group(store, rank=rank, world_size=size, timeout=_EVER)

    def use(self, kind: str) -> None:
        """Compute on the CPU, or on this rank's GPU; tensors there travel over nccl.

        Raises:
            ValueError: This host has no such GPU.
        """
        self.device = torch.device("cpu")
        if kind == "cuda":
            seen = torch.cuda.device_count()
            if self._gpu >= seen:
                raise ValueError(
                    f"rank {self.rank} of this replica takes GPU {self._gpu} of this host, and torch sees {seen}; give "
                    f"fewer replicas, or fewer ranks a replica"
                )
            if self.size > 1:
                warn_untested("gpu ranks")
            self.device = torch.device("cuda", self._gpu)
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize()  # without a context, the mesh would choose a GPU by itself
        from torch.distributed.device_mesh import init_device_mesh  # takes a second to import, as FSDP below

        self._mesh = init_device_mesh(kind, (self.size,))

    @property
    def leads(self) -> bool:
        return self.rank == _LEADER

    def close(self) -> None:
        """Leave; the others' next message fails."""
        end_default_group()

    def send_order(self, order: bytes) -> None:
        """Send an order to the others; each must call `receive_order`.

        Raises:
            ValueError: It is longer than 16 MiB.
        """
        if len(order) > _MOST_ORDER_BYTES:
            raise ValueError(f"an order must have at most {_MOST_ORDER_BYTES} bytes, got {len(order)}")
        room = _ORDER_BYTES - _LENGTH_BYTES
        head = len(order).to_bytes(_LENGTH_BYTES, "little") + order[:room].ljust(room, b"\0")
        dist.broadcast(torch.frombuffer(bytearray(head), dtype=torch.uint8), src=_LEADER)
        if len(order) > room:
            dist.broadcast(torch.frombuffer(bytearray(order[room:]), dtype=torch.uint8), src=_LEADER)

    def receive_order(self) -> bytes:
        """Wait for the next order, however long that takes.

        Raises:
            RuntimeError: Rank 0 is gone.
        """
        head = torch.empty(_ORDER_BYTES, dtype=torch.uint8)
        dist.broadcast(head, src=_LEADER)
        raw = head.numpy().tobytes()
        length, found = int.from_bytes(raw[:_LENGTH_BYTES], "little"), raw[_LENGTH_BYTES:]
        if length > len(found):
            rest = torch.empty(length - len(found), dtype=torch.uint8)
            dist.broadcast(rest, src=_LEADER)
            found += rest.numpy().tobytes()
        return found[:length]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with rank 0's, in place; same shape and dtype on all ranks."""
        dist.broadcast(tensor, src=_LEADER)
        return tensor

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank; each rank passes equally many."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return [part.tolist() for part in found]

    def gather(self, own: torch.Tensor, *, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Bring every rank's vector to rank 0, bit for bit.

        Args:
            own: `(sizes[rank],)`, on the group's device; may be empty.
            sizes: Elements of each rank's.

        Returns:
            The vectors by rank at rank 0, nothing at the others.
        """
        if not self.leads:
            if own.numel():
                dist.send(own, dst=_LEADER)
            return []
        parts = [own, *(own.new_empty(size) for size in sizes[1:])]
        for source, part in enumerate(parts):
            if source != _LEADER and part.numel():
                dist.recv(part, src=source)
        return parts

    def scatter(self, parts: Sequence[torch.Tensor], *, own: torch.Tensor) -> torch.Tensor:
        """Bring a vector of rank 0's to each rank, bit for bit; see `gather`.

        Args:
            parts: At rank 0: the vectors by rank. Elsewhere nothing.
            own: Where another rank's vector goes, of its size.

        Returns:
            This rank's vector.
        """
        if not self.leads:
            if own.numel():
                dist.recv(own, src=_LEADER)
            return own
        for target, part in enumerate(parts):
            if target != _LEADER and part.numel():
                dist.send(part, dst=target)
        return parts[_LEADER]

    def shard(self, model: nn.Module, *, blocks: Sequence[nn.Module]) -> None:
        """Leave each rank its shard of a model's parameters (FSDP2), which all ranks hold whole and alike before.

        Args:
            model: On this rank's device.
            blocks: Modules whose parameters are brought together and let go for themselves.

        Raises:
            ValueError: A parameter cannot be sharded.
        """
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)


class ShardedParameters:
    """Shards of a rank, and collective operations on the shards of its replica.

    Every method is called by all ranks of the replica, in the same order and with the same names. Values travel as
    float32, which holds every number of the narrower dtypes.

    Args:
        model: Sharded by `group.shard`: along the first dimension, in the order of the ranks; a shard may be empty.

    Attributes:
        names: Of all parameters, as `model.named_parameters()` gives them.
    """

    def __init__(self, group: ReplicaGroup, model: nn.Module) -> None:
        self._group = group
        self._model = model
        self._tensors = dict(model.named_parameters())
        self.names = tuple(self._tensors)
        sizes = group.all_gather([local_shard(tensor).numel() for tensor in self._tensors.values()])
        self._sizes = {name: [of_rank[index] for of_rank in sizes] for index, name in enumerate(self.names)}
        self._kept: list[torch.Tensor] = []

    def gather(self, names: Sequence[str]) -> torch.Tensor:
        """Bring tensors to rank 0, bit for bit.

        Returns:
            The whole tensors, one behind the other: float32, `(numel,)`, on the group's device; elsewhere nothing.
        """
        own = flatten([local_shard(self._tensors[name]) for name in names], device=self._group.device)
        sizes = [sum(self._sizes[name][rank] for name in names) for rank in range(self._group.size)]
        by_rank = self._group.gather(own, sizes=sizes)
        starts = [0] * len(by_rank)
        pieces = []
        for name in names if by_rank else ():
            for rank, size in enumerate(self._sizes[name]):
                pieces.append(by_rank[rank][starts[rank] : starts[rank] + size])
                starts[rank] += size
        return torch.cat(pieces) if pieces else own.new_empty(0)

    def scatter(self, names: Sequence[str], values: torch.Tensor | None, *, blend: float = 0.0) -> None:
        """Set all ranks' shards to `blend * their own + (1 - blend) * values`.

        Args:
            names: Of the tensors.
            values: At rank 0 as `gather` returns them, on any device; elsewhere None.
            blend: Weight of what is there.
        """
        own = [local_shard(self._tensors[name]) for name in names]
        parts = []
        if values is not None:  # cut whole tensors, one behind the other, into what each rank holds of them
            sizes = [size for name in names for size in self._sizes[name]]
            pieces = torch.split(values.to(self._group.device), sizes)
            parts = [torch.cat(pieces[rank :: self._group.size]) for rank in range(self._group.size)]
        room = torch.empty(sum(t.numel() for t in own), dtype=torch.float32, device=self._group.device)
        target = self._group.scatter(parts, own=room)
        if blend > 0:
            target = torch.lerp(flatten(own, device=self._group.device), target, 1 - blend)
        with torch.no_grad():
            unflatten_into(target, own)

    def keep(self) -> None:
        """Copy the shards aside."""
        drop_gathered(self._model)
        self._kept = [local_shard(tensor).clone() for tensor in self._tensors.values()]

    def restore(self) -> None:
        """Put back what `keep` copied, bit for bit."""
        drop_gathered(self._model)
        with torch.no_grad():
            for tensor, kept in zip(self._tensors.values(), self._kept, strict=True):
                local_shard(tensor).copy_(kept)
        self._kept = []
