"""The ranks that hold one replica together, on one host: orders of the one that leads, shards gathered and dealt out.

The group is made by a file that only this host's user can read, and its sockets listen on the loopback interface, so
that nobody else takes part. Nobody waits for a rank here by a clock of the group's own: a rank that dies closes its
connections, and whoever leads watches how long the others take.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.transport.addresses import interface_of
from thinwire.transport.connect import gloo_on, keep_nccl_on_loopback
from thinwire.untested import warn_untested

# An order fits into this, or says how much more there is; the first eight bytes are its length.
_ORDER_BYTES = 1024
_LENGTH_BYTES = 8
_MOST_ORDER_BYTES = 1 << 24
# A replica may rest for as long as its people like.
_EVER = timedelta(days=7)
_LEADER = 0


class InnerGroup:
    """One rank's end of a replica's own process group, which becomes torch's default group.

    Args:
        rank: This rank; 0 leads.
        size: Ranks of the replica.
        meeting: A file that does not exist yet, in a folder of this user's alone; the same for all ranks.
        gpu: Which of this host's GPUs is this rank's, if it comes to use one.

    Attributes:
        device: Where this rank computes; see `use`.
    """

    def __init__(self, *, rank: int, size: int, meeting: Path, gpu: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._gpu = gpu
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        both = torch.cuda.is_available() and dist.is_nccl_available()
        keep_nccl_on_loopback()
        with gloo_on(interface_of("127.0.0.1")):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if both else "gloo", store=store, rank=rank, world_size=size, timeout=_EVER
            )

    def use(self, kind: str) -> None:
        """Compute on the CPU, or on this rank's GPU; tensors there travel over nccl.

        Args:
            kind: cpu or cuda.

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
            torch.cuda.synchronize()  # the mesh looks for a context, and else chooses a GPU by itself
        self._mesh = init_device_mesh(kind, (self.size,))

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that the others follow."""
        return self.rank == _LEADER

    def close(self) -> None:
        """Leave; the others' next message fails."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def tell(self, order: bytes) -> None:
        """Give the others an order; each must `hear` it.

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

    def hear(self) -> bytes:
        """Wait for the next order, however long that takes.

        Raises:
            RuntimeError: The rank that leads is gone.
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

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with the leading rank's, in place; same shape and dtype on all ranks."""
        dist.broadcast(tensor, src=_LEADER)
        return tensor

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor over the ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank; as many on each."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return [part.tolist() for part in found]

    def gather(self, own: torch.Tensor, *, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Bring every rank's vector to the one that leads, bit for bit.

        Args:
            own: `(sizes[rank],)`, on the group's device; may be empty.
            sizes: Elements of each rank's.

        Returns:
            The vectors by rank at the rank that leads, nothing at the others.
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

    def deal(self, parts: Sequence[torch.Tensor], *, own: torch.Tensor) -> torch.Tensor:
        """Bring a vector of the leading rank's to each rank, bit for bit; see `gather`.

        Args:
            parts: At the rank that leads: the vectors by rank. Elsewhere nothing.
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
        for block in blocks:
            fully_shard(block, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
