"""Warning before training: a method's codec costs more time than it saves on this link."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.averaging.cost import measure_exchange, most_members, sent_bytes_of
from thinwire.averaging.exchange import AllGather, Exchange, Gossip, Shapes, cheapest, numel_of
from thinwire.codecs import float32
from thinwire.codecs.error_feedback import Shift
from thinwire.errors import PayloadError
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.schedule import Schedule
from thinwire.transport.base import Envelope, Transport, all_gather_json
from thinwire.transport.streams import SETUP

# Bytes of the probes: few first, so that a slow link is not busy for long; more if that took too little time to be
# distinguished from latency.
_PROBE_BYTES = (2**14, 2**17)
_LONG_ENOUGH_S = 0.1
# Lower bound of a probe's time, for a clock that does not advance between two readings.
_SHORTEST_S = 1e-9
# Codecs are timed among at most so many replicas: a replica's computation does not shrink with their number.
_MOST_REPLICAS = 8
# Losses a step below this are not reported.
_LEAST_LOSS_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCost:
    """Cost and saving of a codec in one round of one fragment, against float32 payloads.

    Attributes:
        extra_s: Additional seconds of computation on a replica; may be negative.
        saved_bytes: Payload bytes that it sends less, at least; negative if it sends more.
        channels: The channels whose rounds use this codec.
    """

    extra_s: float
    saved_bytes: int
    channels: tuple[int, ...] = (0,)

    def lost_s(self, *, rate_bits_per_s: float) -> float:
        """Return the seconds that a round takes longer than with float32 payloads; negative if the codec pays.

        Example:
            >>> CodeCost(extra_s=0.020, saved_bytes=1_000).lost_s(rate_bits_per_s=1e6)
            0.012
        """
        return self.extra_s - 8 * self.saved_bytes / rate_bits_per_s

    def complaint(self, *, rate_bits_per_s: float, steps_between: float = 1.0) -> str:
        """Return the warning if the codec does not pay on a link of this rate, else an empty text."""
        if self.lost_s(rate_bits_per_s=rate_bits_per_s) / steps_between < _LEAST_LOSS_S:
            return ""
        sending_s = 8 * abs(self.saved_bytes) / rate_bits_per_s
        saves = "saves" if self.saved_bytes >= 0 else "among so many replicas adds"
        more = "more" if self.extra_s >= 0 else "less"
        return (
            f"coding costs {abs(self.extra_s) * 1e3:.1f} ms a round {more} than float32 payloads would, and {saves} "
            f"{sending_s * 1e3:.1f} ms of sending at the {rate_bits_per_s / 1e6:,.0f} Mbit/s measured between the "
            f"replicas; on this wire a denser code is faster (--codec float32 or bfloat16; where the method takes no "
            f"codec, another method)"
        )


def complain(
    optimizer: DistributedOptimizer, *, num_steps: int, number: int, deadline_s: float, device: torch.device
) -> str:
    """Measure the link and the codes; return the warning about a codec that costs more time than it saves, or "".

    Four notes are sent, numbered from `number` on, which no other caller uses. All replicas must call this together.
    """
    method, num_replicas = optimizer.method, optimizer.transport.num_replicas
    fragments = range(optimizer.num_fragments)
    counts = count_rounds(method.schedule, num_fragments=optimizer.num_fragments, num_steps=num_steps)
    largest: list[Shapes] = []
    rounds: list[float] = []  # so many of the largest fragment are worth all of a channel
    for channel in range(len(method.exchanges(num_replicas))):
        shapes = [optimizer.shapes(fragment=fragment, channel=channel) for fragment in fragments]
        sizes = [numel_of(tensors) for tensors in shapes]
        elements = sum(size * counts[channel, fragment] for fragment, size in enumerate(sizes))
        rounds.append(elements / max(*sizes, 1))
        # what this run never sends is not worth a look, such as what comes after a warm-up that the run ends in
        largest.append(shapes[sizes.index(max(sizes))] if rounds[channel] else ())
    costs = measure_codes(method, largest, num_replicas=num_replicas, device=device)
    if not costs:
        return ""
    rate = measure_rate(optimizer.transport, number=number, deadline_s=deadline_s)
    intervals = [num_steps / sum(rounds[channel] for channel in cost.channels) for cost in costs]
    worst = max(range(len(costs)), key=lambda n: costs[n].lost_s(rate_bits_per_s=rate) / intervals[n])
    return costs[worst].complaint(rate_bits_per_s=rate, steps_between=intervals[worst])


def count_rounds(schedule: Schedule, *, num_fragments: int, num_steps: int) -> Counter[tuple[int, int]]:
    """Count a run's rounds by channel and fragment.

    Example:
        >>> from thinwire.sync.schedule import WarmUp
        >>> sorted(count_rounds(WarmUp(warmup_steps=100), num_fragments=1, num_steps=500).items())
        [((0, 0), 100), ((1, 0), 400)]
    """
    return Counter(
        (round.channel, round.fragment)
        for step in range(1, num_steps + 1)
        for round in schedule.launches(step, num_fragments=num_fragments)
    )


def measure_codes(
    method: Method, shapes: Sequence[Shapes], *, num_replicas: int, device: torch.device
) -> list[CodeCost]:
    """Time every codec of a method against float32 payloads, each with the tensors that its channels send.

    Bytes are those of a round among `num_replicas`. Times are those among at most 8, if the method takes so few.

    Returns:
        The cost of each codec; channels that send float32 or nothing have none.

    Raises:
        ValueError: The method does not fit so many replicas.

    Example:
        >>> from thinwire.methods import one_bit_adam
        >>> shapes = [[torch.Size([1000])]] * 2
        >>> [c.channels for c in measure_codes(one_bit_adam(), shapes, num_replicas=2, device=torch.device("cpu"))]
        [(1,)]
    """
    num_measured = _measured(method, num_replicas=num_replicas)
    members, few = (most_members(method.topology, num_replicas=n) for n in (num_replicas, num_measured))
    costs = []
    for channels, exchange, sent in _alike(method.exchanges(num_replicas), shapes):
        if not _is_coded(exchange, sent):
            continue
        plain_bytes = sent_bytes_of(_plain(exchange, num_members=members), sent, num_members=members)
        own = method.exchanges(num_measured)[channels[0]]
        coded_s, plain_s = (
            measure_exchange(
                one, sent, num_replicas=num_measured, device=device, topology=method.topology
            ).computing_s
            for one in (own, _plain(own, num_members=few))
        )  # fmt: skip
        saved_bytes = plain_bytes - sent_bytes_of(exchange, sent, num_members=members)
        costs.append(CodeCost(extra_s=coded_s - plain_s, saved_bytes=saved_bytes, channels=channels))
    return costs


def _measured(method: Method, *, num_replicas: int) -> int:
    """Return among how many replicas the method is timed: few, or all if it does not take so few."""
    if num_replicas <= _MOST_REPLICAS:
        return num_replicas
    try:
        most_members(method.topology, num_replicas=_MOST_REPLICAS)
        for exchange in method.exchanges(_MOST_REPLICAS):
            exchange.bind([()], replica=0, num_replicas=_MOST_REPLICAS)
    except ValueError:  # that of a method which cannot run at all is raised again with the real number
        return num_replicas
    return _MOST_REPLICAS


def _alike(exchanges: Sequence[Exchange], shapes: Sequence[Shapes]) -> list[tuple[tuple[int, ...], Exchange, Shapes]]:
    """Group channels that send the same tensors in the same way."""
    found: list[tuple[tuple[int, ...], Exchange, Shapes]] = []
    for channel, (exchange, sent) in enumerate(zip(exchanges, shapes, strict=True)):
        for place, (channels, other, theirs) in enumerate(found):
            if (exchange, tuple(sent)) == (other, tuple(theirs)):
                found[place] = ((*channels, channel), other, theirs)
                break
        else:
            found.append(((channel,), exchange, sent))
    return found


def _is_coded(exchange: Exchange, shapes: Shapes) -> bool:
    """Return whether payloads are smaller than in float32; between two replicas nothing else makes a difference."""
    plain = sent_bytes_of(_plain(exchange, num_members=2), shapes, num_members=2)
    return 0 < sent_bytes_of(exchange, shapes, num_members=2) < plain


def _plain(exchange: Exchange, *, num_members: int) -> Exchange:
    """Return the exchange that does the same with float32 payloads: the cheapest if it only takes a mean.

    A rule, a graph's weights and what receivers remember of each sender need everyone's own vector.
    """
    if isinstance(exchange, Gossip):
        return replace(exchange, codec=float32())
    if isinstance(exchange, AllGather):
        is_more = exchange.aggregate is not None or exchange.keeps_parts or isinstance(exchange.memory, Shift)
        return replace(exchange, codec=float32()) if is_more else cheapest(float32(), num_replicas=num_members)
    return cheapest(float32(), num_replicas=num_members)


def measure_rate(transport: Transport, *, number: int, deadline_s: float) -> float:
    """Send to the next replica while the one before sends to this one, all at once, and return the slowest rate.

    Args:
        transport: Joins at least two replicas.
        number: First of four note numbers that no other caller uses.
        deadline_s: Seconds to wait for the others.

    Returns:
        Bits per second, the same on all replicas; latency counts as time.

    Raises:
        PayloadError: A replica sent no time.
        TransportError: A replica was lost or late.
    """
    me, count = transport.replica, transport.num_replicas
    rate = 0.0
    for place, num_bytes in enumerate(_PROBE_BYTES):
        all_gather_json({}, transport=transport, number=number + 2 * place, deadline_s=deadline_s)
        envelope = Envelope(stream=SETUP, key=(number + place,), payload_bytes=num_bytes)
        began_s = time.perf_counter()
        receiving = transport.receive(source=(me - 1) % count, envelope=envelope)
        sending = transport.send(torch.zeros(num_bytes, dtype=torch.uint8), to=(me + 1) % count, envelope=envelope)
        receiving.wait(deadline_s=deadline_s)
        sending.wait(deadline_s=deadline_s)
        taken = {"taken_s": max(time.perf_counter() - began_s, _SHORTEST_S)}
        notes = all_gather_json(taken, transport=transport, number=number + 2 * place + 1, deadline_s=deadline_s)
        slowest_s = max(_taken_s(note, replica=replica) for replica, note in enumerate(notes))
        rate = 8 * num_bytes / slowest_s
        if slowest_s > _LONG_ENOUGH_S:
            break
    return rate


def _taken_s(note: Mapping[str, Any], *, replica: int) -> float:
    taken_s = note.get("taken_s")
    # NaN is not above 0 either; a whole number may be too large for a float
    if isinstance(taken_s, bool) or not isinstance(taken_s, int | float) or not 0 < taken_s <= sys.float_info.max:
        raise PayloadError(
            f"replica {replica} says that its probe of the wire took {str(taken_s)[:40]!r}, which is no number of "
            f"seconds above 0; run the same thinwire on all hosts"
        )
    return float(taken_s)
