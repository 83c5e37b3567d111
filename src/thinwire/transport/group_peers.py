"""Batches of tensors between the ranks of a process group, such as those that share sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.transport.shards import named_failures

Wait = Callable[[], None]


class GroupPeers:
    """Peers over a process group of torch.

    Args:
        group: Of the ranks that share sequences.

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
