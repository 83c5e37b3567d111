"""Before training: whether a method's code costs more time than it saves on this wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.averaging.cost import measure_exchange
from thinwire.averaging.exchange import cheapest
from thinwire.codecs import float32
from thinwire.sync.method import Method
from thinwire.transport.base import Envelope, Kind, Transport
from thinwire.transport.notes import tell_all

# Small first, so that a thin wire is not kept busy for long; more where that was too quick to be told from a latency.
_PROBE_BYTES = (2**14, 2**17)
_LONG_ENOUGH_S = 0.1
# More replicas than this are measured as so many: what a replica computes grows no faster than their number.
_MOST_REPLICAS = 8
# What nobody would notice is not worth a word.
_LEAST_LOSS_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCost:
    """What a method's code costs and saves in one round of one fragment, against float32 payloads.

    Attributes:
        extra_s: Seconds that a replica computes more; may be negative.
        saved_bytes: Payload bytes that it sends less, at least.
    """

    extra_s: float
    saved_bytes: int

    def complaint(self, *, rate_bits_per_s: float, steps_between: float = 1.0) -> str:
        """Return what to tell the user where the code does not pay on a wire of this rate, else an empty text.

        Args:
            rate_bits_per_s: Of the wire.
            steps_between: Inner steps from one round to the next; less than a millisecond a step is not told.

        Example:
            >>> CodeCost(extra_s=0.020, saved_bytes=1_000_000).complaint(rate_bits_per_s=1e6)
            ''
        """
        saved_s = 8 * self.saved_bytes / rate_bits_per_s
        if (self.extra_s - saved_s) / steps_between < _LEAST_LOSS_S:
            return ""
        return (
            f"coding costs {self.extra_s * 1e3:.1f} ms a round more than float32 payloads would, and saves "
            f"{saved_s * 1e3:.1f} ms of sending at the {rate_bits_per_s / 1e6:,.0f} Mbit/s measured between the "
            f"replicas; on this wire a denser code is faster (--codec float32 or bfloat16, where the method takes one)"
        )


def measure_code(method: Method, shapes: Sequence[torch.Size], *, num_replicas: int, device: torch.device) -> CodeCost:
    """Time the method's exchanges and float32 payloads on one fragment.

    Args:
        method: What is to run.
        shapes: Of the fragment's tensors.
        num_replicas: How many take part.
        device: Where the model is.
    """
    replicas = min(num_replicas, _MOST_REPLICAS)
    plain = measure_exchange(cheapest(float32(), num_replicas=replicas), shapes, num_replicas=replicas, device=device)
    exchange = method.exchanges(num_replicas)[0]
    if exchange.sent_bytes(sum(s.numel() for s in shapes), num_replicas=num_replicas) >= plain.sent_bytes:
        return CodeCost(extra_s=0.0, saved_bytes=0)  # nothing is coded
    try:
        coded = measure_exchange(method.exchanges(replicas)[0], shapes, num_replicas=replicas, device=device)
    except ValueError:  # it needs more replicas than are measured
        return CodeCost(extra_s=0.0, saved_bytes=0)
    return CodeCost(extra_s=coded.computing_s - plain.computing_s, saved_bytes=plain.sent_bytes - coded.sent_bytes)


def measure_rate(transport: Transport, *, number: int, deadline_s: float) -> float:
    """Send to the next replica while the one before sends to this one, all at once, and return the slowest rate.

    Args:
        transport: Joins the replicas, at least two.
        number: The first of four numbers of notes that nobody else uses.
        deadline_s: Seconds to wait for the others.

    Returns:
        Bits per second, the same on all replicas; latency counts as time.

    Raises:
        TransportError: A replica was lost or late.
    """
    me, count = transport.replica, transport.num_replicas
    rate = 0.0
    for place, num_bytes in enumerate(_PROBE_BYTES):
        tell_all({}, transport=transport, number=number + 2 * place, deadline_s=deadline_s)
        envelope = Envelope(kind=Kind.SETUP, round_id=number + place, payload_bytes=num_bytes)
        began_s = time.perf_counter()
        receiving = transport.receive(source=(me - 1) % count, envelope=envelope)
        sending = transport.send(torch.zeros(num_bytes, dtype=torch.uint8), to=(me + 1) % count, envelope=envelope)
        receiving.wait(deadline_s=deadline_s)
        sending.wait(deadline_s=deadline_s)
        taken = {"taken_s": time.perf_counter() - began_s}
        notes = tell_all(taken, transport=transport, number=number + 2 * place + 1, deadline_s=deadline_s)
        slowest_s = max(float(note["taken_s"]) for note in notes)
        rate = 8 * num_bytes / slowest_s
        if slowest_s > _LONG_ENOUGH_S:
            break
    return rate
