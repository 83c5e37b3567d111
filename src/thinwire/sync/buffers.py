"""A model's buffers, which rounds leave alone: their mean on request, and a warning where training changes them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from thinwire.averaging.exchange import TwoPhase
from thinwire.averaging.round_context import RoundContext, RoundNote
from thinwire.averaging.topology import Peers
from thinwire.codecs import float32
from thinwire.sync.fragments import plain_name
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.base import Envelope, Transport
from thinwire.transport.shards import flatten, local_shard, unflatten_into
from thinwire.transport.streams import BUFFERS

# BatchNorm's statistics, by class or by the names that its relatives use, are documented to be local.
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's floating buffers that are part of its state; others are caches."""
    saved = model.state_dict(keep_vars=True)
    return [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]


def average_tensors(tensors: Sequence[torch.Tensor], *, transport: Transport, number: int, deadline_s: float) -> None:
    """Replace tensors by their mean over the replicas, and wait for it.

    Args:
        tensors: Floating, of any shapes, the same on all replicas.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call.
        deadline_s: Seconds until a peer counts as hung.

    Raises:
        TransportError: A replica did not take part.
    """
    me = transport.replica
    context = RoundContext(
        peers=Peers(me=me, members=tuple(range(transport.num_replicas))), transport=transport, round_id=number,
        stream=BUFFERS,
    )  # fmt: skip
    steps = TwoPhase(codec=float32()).steps(flatten(tensors), context)
    round = Round(id=number, fragment=0, launch_step=0, apply_step=0)
    flight = launch(steps, round=round, deadline_s=deadline_s, in_background=transport.runs_in_background)
    unflatten_into(flight.result().mean, tensors)


# Numbers that one replica hands to the others at once.
_MOST_NUMBERS = 64


def gather_numbers(own: Sequence[int], *, transport: Transport, number: int, deadline_s: float) -> list[list[int]]:
    """Return a few whole numbers of each replica; all replicas call it together.

    Args:
        own: This replica's, below 2^63; the first 64 count.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call.
        deadline_s: Seconds until a peer counts as hung.

    Raises:
        TransportError: A replica did not take part.
    """
    numbers = [-1] * _MOST_NUMBERS
    numbers[: len(own)] = list(own)[:_MOST_NUMBERS]
    payload = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    envelope = Envelope(
        stream=BUFFERS, key=(number,), numel=_MOST_NUMBERS, payload_bytes=payload.numel(), note=RoundNote().pack()
    )
    others = [peer for peer in range(transport.num_replicas) if peer != transport.replica]
    receives = {peer: transport.receive(source=peer, envelope=envelope) for peer in others}
    sends = [transport.send(payload, to=peer, envelope=envelope) for peer in others]
    found = [numbers] * transport.num_replicas
    for peer, pending in receives.items():
        received = pending.wait(deadline_s=deadline_s)
        assert received is not None, "a receive ends with a message"
        found[peer] = received.payload.view(torch.int64).tolist()
    for sent in sends:
        sent.wait(deadline_s=deadline_s)
    return [[one for one in numbers if one >= 0] for numbers in found]


class LocalBuffers:
    """Checksums of the buffers that training should not change, to warn when it does.

    Args:
        model: The replica's model.
        remedy: What the warning tells the user to do.
    """

    def __init__(self, model: nn.Module, *, remedy: str) -> None:
        self._model, self._remedy = model, remedy
        self._first = self._checksums()

    def check(self) -> None:
        """Warn, once, about the buffers that have changed; BatchNorm's statistics are left out."""
        now = self._checksums() if self._first else {}
        changed = [name for name, found in self._first.items() if now.get(name, found) != found]
        if changed:
            self._first = {}
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warnings.warn(
                f"training changes the buffer {changed[0]}{more}, and buffers are not exchanged, so replicas part in "
                f"it; {self._remedy}",
                stacklevel=4,  # the loop that called `step`, through torch's wrapper of it
            )

    def _checksums(self) -> dict[str, int]:
        saved = self._model.state_dict(keep_vars=True)
        found = {}
        for name, buffer in self._model.named_buffers():
            is_watched = name in saved and name.rpartition(".")[2] not in _STATISTICS
            if is_watched and (buffer.is_floating_point() or buffer.is_complex()):
                raw = local_shard(buffer).cpu().contiguous().reshape(-1)
                found[plain_name(name)] = zlib.crc32(raw.view(torch.uint8).numpy().data) if raw.numel() else 0
        return found
