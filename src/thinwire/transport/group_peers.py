"""Batches of tensors between the ranks of a process group, such as those that share sequences or experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import refusal
from thinwire.transport.shards import named_failures

Wait = Callable[[], None]


class RankPeers(Protocol):
    """Ranks that exchange tensors; those between two of them arrive in the order in which they were sent.

    Attributes:
        rank: Of this process among them.
        size: How many they are.
    """

    rank: int
    size: int

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[Wait, Wait]:
        """Start to send contiguous tensors to ranks, and to fill others with what ranks send.

        Returns:
            Functions that wait until all has arrived, and until all has been sent.
        """


_HASH_BYTES = 32


def check_agreement(peers: RankPeers, description: str, *, what: str, remedy: str) -> None:
    """Compare what each rank was asked for with what the others were.

    Raises:
        ValueError: It differs; names the first rank of which it does.
    """
    own = torch.zeros(256, dtype=torch.uint8)
    # a hash of it all: sites of many ranks are longer than what is shown
    text = hashlib.sha256(description.encode()).digest() + description.encode()[: 256 - _HASH_BYTES]
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    found = {rank: torch.zeros_like(own) for rank in others}
    received, sent = peers.exchange([(rank, own) for rank in others], list(found.items()))
    received()
    sent()
    for rank, theirs in found.items():
        if not torch.equal(own, theirs):
            said = bytes(theirs[_HASH_BYTES:].tolist()).rstrip(b"\0").decode("ascii", "replace")
            raise refusal(
                f"ranks {peers.rank} and {rank} do not share {what} alike", got=f"{description!r} and {said!r}",
                allowed="the same on all ranks", remedy=remedy,
            )  # fmt: skip


def peers_of(group: Any) -> RankPeers:
    """Return the ranks of a one-dimensional `DeviceMesh` or a process group; `RankPeers` are returned as they are."""
    if hasattr(group, "exchange"):
        found: RankPeers = group
        return found
    return GroupPeers(group.get_group() if hasattr(group, "get_group") else group)


class GroupPeers:
    """Peers over a process group of torch.

    Args:
        group: Of the ranks.

    Attributes:
        rank: Of this process in the group.
        size: Ranks of the group.
        sent_bytes: Bytes of tensors sent so far, by receiving rank.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = dict.fromkeys(range(self.size), 0)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[Wait, Wait]:
        """Start to send contiguous tensors to ranks, and to fill others with what ranks send.

        Returns:
            Functions that wait until all has arrived, and until all has been sent.

        Raises:
            TransportError: A rank is gone or hangs; the functions raise it too.
        """
        for target, tensor in sends:
            self.sent_bytes[target] += tensor.nbytes
        started = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in messages if tensor.numel()
        ]  # fmt: skip
        if not started:
            return _nothing, _nothing
        with named_failures():
            works = dist.batch_isend_irecv(started)
        # nccl's batch has one work for all
        num_received = sum(tensor.numel() > 0 for _, tensor in receives) if len(works) == len(started) else len(works)
        # the tensors live until their works have ended
        return _waiting(works[:num_received], receives), _waiting(works[num_received:], sends)


def _nothing() -> None:
    return None


def _waiting(works: Sequence[Any], held: Sequence[Any]) -> Wait:
    def wait() -> None:
        with named_failures():
            for work in works:
                work.wait()
        _ = held

    return wait
