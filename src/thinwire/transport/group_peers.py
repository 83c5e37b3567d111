"""Batches of tensors between the ranks of a process group, such as those that share sequences or experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import refusal, warn_untested
from thinwire.events import Direction
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
    found = {rank: torch.zeros_like(own) for rank in range(peers.size) if rank != peers.rank}
    exchange_all(peers, dict.fromkeys(found, own), found)
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


def exchange_all(peers: RankPeers, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
    """Send contiguous tensors by rank, fill others with what ranks send, and wait for both."""
    for wait in peers.exchange(list(outgoing.items()), list(incoming.items())):
        wait()


class GroupPeers:
    """Peers over a process group of torch, also for tensors on devices that its backends do not take.

    These travel as copies: those of a GPU in pinned memory of the host over gloo, those of the host on the GPU over
    nccl.

    Args:
        group: Of the ranks.
        on_message: Called with "sent" or "received", the other rank and the bytes of each tensor.

    Attributes:
        rank: Of this process in the group.
        size: Ranks of the group.
        sent_bytes: Bytes of tensors sent so far, by receiving rank.
    """

    def __init__(self, group: Any, *, on_message: Callable[[Direction, int, int], None] | None = None) -> None:
        self._group, self._on_message = group, on_message
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._backends = str(dist.get_backend_config(group))
        self.sent_bytes = dict.fromkeys(range(self.size), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupPeers:
        """Return itself: a copy of a model has the same ranks."""
        return self

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
            if self._on_message is not None:
                self._on_message("sent", target, tensor.nbytes)
        for source, tensor in receives:
            if self._on_message is not None:
                self._on_message("received", source, tensor.nbytes)
        copies = self._copies(receives, is_sent=False)
        started = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, messages in ((dist.irecv, copies), (dist.isend, self._copies(sends, is_sent=True)))
            for peer, tensor in messages if tensor.numel()
        ]  # fmt: skip
        if not started:
            return _nothing, _nothing
        with named_failures():
            works = dist.batch_isend_irecv(started)
        # nccl's batch has one work for all
        num_received = sum(tensor.numel() > 0 for _, tensor in receives) if len(works) == len(started) else len(works)
        # the tensors live until their works have ended
        filled = [(out, copy) for (_, out), (_, copy) in zip(receives, copies, strict=True) if out is not copy]
        return _waiting(works[:num_received], receives, filled), _waiting(works[num_received:], started, ())

    def _copies(self, messages: Sequence[tuple[int, Tensor]], *, is_sent: bool) -> Sequence[tuple[int, Tensor]]:
        """Return tensors that the group's backend takes in place of the messages' ones, which may be the same."""
        if not messages or (carrier := carrier_of(self._backends, messages[0][1].device)) is None:
            return messages
        if carrier.type == "cpu":
            warn_untested("gpu over gloo")
        is_pinned = carrier.type == "cpu" and messages[0][1].is_cuda
        found = [
            (peer, torch.empty(one.shape, dtype=one.dtype, device=carrier, pin_memory=is_pinned))
            for peer, one in messages
        ]
        if is_sent:
            for (_, copy), (_, tensor) in zip(found, messages, strict=True):
                copy.copy_(tensor, non_blocking=is_pinned)
            if is_pinned:
                torch.cuda.current_stream().synchronize()
        return found


def carrier_of(backends: str, device: torch.device) -> torch.device | None:
    """Return the device on which tensors of a device travel in a group; None where they travel as they are.

    Args:
        backends: Of the group by device, as torch's `get_backend_config` has them.
        device: Of the tensors.
    """
    by_device = dict(pair.split(":") for pair in backends.split(",")) if ":" in backends else {"cpu": backends}
    backend = by_device.get(device.type)
    if backend == "gloo" or (backend is None and "cpu" in by_device):
        return None if device.type == "cpu" else torch.device("cpu")  # gloo takes tensors of the host alone
    if backend is None and device.type == "cpu":
        return torch.device(next(iter(by_device)))
    return None


def _nothing() -> None:
    return None


def _waiting(works: Sequence[Any], held: Sequence[Any], filled: Sequence[tuple[Tensor, Tensor]]) -> Wait:
    """Return a wait for works, after which tensors are filled from others; what is held lives until then."""

    def wait() -> None:
        with named_failures():
            for work in works:
                work.wait()
        for out, copy in filled:
            out.copy_(copy, non_blocking=True)
        _ = held

    return wait
