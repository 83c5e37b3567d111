"""Probe of the wires between replicas: each pair alone in both directions, then all at once."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.errors import PayloadError
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.transport.base import Envelope, Transport, all_gather_json
from thinwire.transport.streams import SETUP


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTransfer:
    """One timed transfer: its payload, and seconds until the receiver's acknowledgement."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFit:
    """Bandwidth and overhead of a wire: `seconds = overhead_s + 8 num_bytes / bandwidth_bits_per_s`."""

    bandwidth_bits_per_s: float  # the median of what any two transfers of unlike sizes say
    low_bits_per_s: float  # lower end of its 95 % interval
    high_bits_per_s: float  # upper end; infinite where the transfers are too short to bound it
    overhead_s: float  # what an empty transfer takes, there and back


def fit_wire(transfers: Sequence[TimedTransfer]) -> WireFit:
    """Fit a channel through sizes and times by the median of pairwise slopes (Theil and Sen).

    A transfer that something else disturbed counts as one of many, however late it came. The interval follows from the
    ranks of the slopes (Sen 1968, with the variance of Kendall's statistic where sizes repeat).

    Args:
        transfers: At least three, of at least two sizes.

    Raises:
        ValueError: They are fewer, or larger ones took no longer than smaller ones.

    Example:
        >>> fit_wire([TimedTransfer(num_bytes=n, seconds=0.01 + 8 * n / 5e6) for n in (0, 10_000, 100_000)])
        WireFit(bandwidth_bits_per_s=5000000.0, low_bits_per_s=5000000.0, high_bits_per_s=5000000.0, overhead_s=0.01)
    """
    sizes = [transfer.num_bytes for transfer in transfers]
    if len(transfers) < 3 or len(set(sizes)) < 2:
        raise ValueError(
            f"a wire is fitted through at least 3 transfers of at least 2 sizes, got {len(transfers)} of "
            f"{len(set(sizes))}"
        )
    slopes = sorted(
        (one.seconds - other.seconds) / (one.num_bytes - other.num_bytes)
        for place, one in enumerate(transfers)
        for other in transfers[:place]
        if one.num_bytes != other.num_bytes
    )
    middle = statistics.median(slopes)
    if middle <= 0:
        raise ValueError(f"transfers of {max(sizes)} bytes took no longer than those of {min(sizes)}; time larger ones")
    fastest, slowest = _interval(slopes, sizes)
    overhead_s = statistics.median(transfer.seconds - middle * transfer.num_bytes for transfer in transfers)
    return WireFit(
        bandwidth_bits_per_s=_rate(middle), low_bits_per_s=_rate(slowest), high_bits_per_s=_rate(fastest),
        overhead_s=_rounded(max(0.0, overhead_s)),
    )  # fmt: skip


def _interval(slopes: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    count = len(sizes)
    ties = sum(same * (same - 1) * (2 * same + 5) for same in (sizes.count(size) for size in set(sizes)))
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    reach = statistics.NormalDist().inv_cdf(0.975) * math.sqrt(variance)
    low = max(0, math.floor((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return slopes[low], slopes[high]


def _rate(seconds_a_byte: float) -> float:
    return _rounded(8 / seconds_a_byte) if seconds_a_byte > 0 else math.inf


def _rounded(value: float) -> float:
    # what lies beyond is the clock's, and would only be noise in a file that people read
    return float(f"{value:.6g}")


# Messages are numbered by what they are for: notes of all, then a block for each pair.
_PAIR_NUMBERS = 1 << 10
_SMALLEST_BYTES, _PINGS, _REPEATS = 2**14, 5, 3
_POLL_S = 5e-4
# A pair sends some tens of messages, each with the deadline, while the others wait for one note.
_PATIENCE = 10
# Bounds of a measurement that a peer tells, in seconds or bytes: within them every quotient is a finite number.
_LEAST, _MOST = 1e-12, 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBudget:
    """Limits on the time and bytes of a probe.

    Args:
        seconds: About how long all pairs take, one after the other. What a pair has of it bounds its transfers.
        most_bytes: Size of the largest transfer.

    Raises:
        ValueError: A number is too small.
    """

    seconds: float = 60.0
    most_bytes: int = 2**25

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.seconds > 0:
            raise ValueError(f"a probe's budget must be above 0 s, got {self.seconds}; 60 s is usual")
        if self.most_bytes < 4 * _SMALLEST_BYTES:
            raise ValueError(
                f"the largest transfer must have at least {4 * _SMALLEST_BYTES} bytes, got {self.most_bytes}; smaller "
                f"ones measure a latency, and no bandwidth"
            )

    def transfer_s(self, num_replicas: int) -> float:
        """Return how long the longest transfer of a pair should take."""
        # three sizes (a quarter, a half, all of it), each some times, and what it takes to find them
        return min(2.0, self.seconds / max(1, num_replicas * (num_replicas - 1)) / (2 * _REPEATS))


@dataclass(frozen=True, slots=True, kw_only=True)
class WireMeasurements:
    """Measurements of all wires, the same on all replicas."""

    fits: Mapping[tuple[int, int], WireFit]  # by (source, destination), alone
    latencies_s: Mapping[tuple[int, int], float]  # by the same, one way: half of a round trip, as no clock is shared
    together_bits_per_s: Mapping[tuple[int, int], float]  # by the same, while everyone sends to everyone
    up_bits_per_s: Sequence[float]  # by replica: what it sent to all others while everyone did
    down_bits_per_s: Sequence[float]  # by replica: what it received meanwhile

    def shared(self) -> list[str]:
        """Return a line for each replica whose wires are slower together than each alone: they share one.

        Example:
            >>> fit = WireFit(bandwidth_bits_per_s=9e6, low_bits_per_s=9e6, high_bits_per_s=9e6, overhead_s=0.0)
            >>> pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
            >>> half = WireMeasurements(
            ...     fits=dict.fromkeys(pairs, fit), latencies_s=dict.fromkeys(pairs, 0.0),
            ...     together_bits_per_s=dict.fromkeys(pairs, 4.5e6), up_bits_per_s=[9e6] * 3, down_bits_per_s=[9e6] * 3,
            ... )
            >>> half.shared()[0]
            'replica 0 sends 9.0 Mbit/s to all others together, and could send 18.0 Mbit/s over the wires one by one'
        """
        lines = []
        for replica, (up, down) in enumerate(zip(self.up_bits_per_s, self.down_bits_per_s, strict=True)):
            for does, end, found in (("send", 0, up), ("receive", 1, down)):
                alone = sum(fit.bandwidth_bits_per_s for pair, fit in self.fits.items() if pair[end] == replica)
                if found < 0.8 * alone:
                    whom = "to" if does == "send" else "from"
                    lines.append(
                        f"replica {replica} {does}s {found / 1e6:.1f} Mbit/s {whom} all others together, and could "
                        f"{does} {alone / 1e6:.1f} Mbit/s over the wires one by one"
                    )
        return lines

    def cluster(self, machines: Sequence[Machine]) -> Cluster:
        """Return the cluster of these machines, in the replicas' order, with what was measured."""
        measured = []
        for replica, machine in enumerate(machines):
            # a wire that was quicker alone than all together at another time shows what the access can do
            out = [fit.bandwidth_bits_per_s for pair, fit in self.fits.items() if pair[0] == replica]
            back = [fit.bandwidth_bits_per_s for pair, fit in self.fits.items() if pair[1] == replica]
            up = max(self.up_bits_per_s[replica], *out)
            down = max(self.down_bits_per_s[replica], *back)
            measured.append(replace(machine, up_bits_per_s=up, down_bits_per_s=down))
        wires = [
            Wire(
                source=machines[source].name, destination=machines[destination].name,
                bandwidth_bits_per_s=fit.bandwidth_bits_per_s, latency_s=self.latencies_s[source, destination],
                bandwidth_low_bits_per_s=fit.low_bits_per_s,
                bandwidth_high_bits_per_s=fit.high_bits_per_s if fit.high_bits_per_s < float("inf") else None,
            )
            for (source, destination), fit in self.fits.items()
        ]  # fmt: skip
        return Cluster(machines=tuple(measured), wires=tuple(wires))


def probe_wires(
    transport: Transport, *, budget: ProbeBudget | None = None, deadline_s: float = 60.0, number: int = 0
) -> WireMeasurements:
    """Measure every pair's bandwidth and latency in both directions, one pair after the other, then all at once.

    All replicas must call this together. What counts is what a replica's payloads see: the transport's own headers and
    acknowledgements are in the time.

    Args:
        transport: Joins the replicas, at least two.
        budget: Bounds time and bytes.
        deadline_s: Seconds until a replica that does not answer counts as lost.
        number: The first of the numbers of notes and messages, which no other part uses.

    Returns:
        The same on all replicas.

    Raises:
        TransportError: A replica was lost or late, or sent something else.
        ValueError: There is one replica only.
    """
    if transport.num_replicas < 2:
        raise ValueError("a probe needs at least 2 replicas, got 1; start it on the hosts by torchrun, or in a lab")
    limits = ProbeBudget() if budget is None else budget
    notes = itertools.count(number)
    pairs = list(itertools.permutations(range(transport.num_replicas), 2))
    found = {}
    for place, pair in enumerate(pairs):
        channel = _PeerChannel(transport, number=number + (place + 1) * _PAIR_NUMBERS, deadline_s=deadline_s)
        report: dict[str, Any] = {}
        if transport.replica == pair[0]:
            report = _lead(channel, pair[1], limits)
        elif transport.replica == pair[1]:
            _follow(channel, pair[0], limits)
        # no other replica may send meanwhile, so all wait until the pair has done
        notes_of_all = all_gather_json(
            report, transport=transport, number=next(notes), deadline_s=_PATIENCE * deadline_s
        )
        found[pair] = _checked(notes_of_all[pair[0]], pair)
    fits = {pair: _fit(*found[pair]) for pair in pairs}
    channel = _PeerChannel(transport, number=number + (len(pairs) + 1) * _PAIR_NUMBERS, deadline_s=deadline_s)
    sizes = _sizes_together(fits, limits, num_replicas=transport.num_replicas)
    all_gather_json({}, transport=transport, number=next(notes), deadline_s=deadline_s)
    arrived = _together(channel, sizes)
    reported = all_gather_json(arrived, transport=transport, number=next(notes), deadline_s=deadline_s)
    seconds = {(s, d): _positive(reported[d].get(str(s)), replica=d) for s, d in pairs}
    return _wires(fits, {pair: found[pair][0] for pair in pairs}, sizes, seconds, transport.num_replicas)


class _PeerChannel:
    """Messages with one peer in an order that both know, so that both number them alike."""

    def __init__(self, transport: Transport, *, number: int, deadline_s: float) -> None:
        self.transport = transport
        self.deadline_s = deadline_s
        self._numbers = itertools.count(number)

    def send(self, payload: torch.Tensor, *, to: int) -> None:
        envelope = Envelope(stream=SETUP, key=(next(self._numbers),), payload_bytes=payload.numel())
        self.transport.send(payload, to=to, envelope=envelope).wait(deadline_s=self.deadline_s)

    def receive(self, num_bytes: int, *, source: int) -> torch.Tensor:
        envelope = Envelope(stream=SETUP, key=(next(self._numbers),), payload_bytes=num_bytes)
        received = self.transport.receive(source=source, envelope=envelope).wait(deadline_s=self.deadline_s)
        assert received is not None
        return received.payload


def _lead(channel: _PeerChannel, peer: int, budget: ProbeBudget) -> dict[str, Any]:
    """Time pings and transfers to a peer; return the latency, sizes and seconds."""
    pings = [_timed(channel, peer, 1) for _ in range(_PINGS)]
    longest_s = budget.transfer_s(channel.transport.num_replicas)
    size, transfers = _SMALLEST_BYTES, []
    while True:
        taken_s = _timed(channel, peer, size)
        if taken_s >= longest_s / 3 or 4 * size > budget.most_bytes:
            break
        size *= 4
    for _ in range(_REPEATS):
        for num_bytes in (size // 4, size // 2, size):
            transfers.append((num_bytes, _timed(channel, peer, num_bytes)))
    channel.send(_encode_size(0), to=peer)
    return {"latency_s": statistics.median(pings) / 2, "transfers": transfers}


def _timed(channel: _PeerChannel, peer: int, num_bytes: int) -> float:
    channel.send(_encode_size(num_bytes), to=peer)
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    channel.receive(1, source=peer)  # it is waiting now
    began_s = time.perf_counter()
    channel.send(payload, to=peer)
    channel.receive(1, source=peer)
    return time.perf_counter() - began_s


def _follow(channel: _PeerChannel, peer: int, budget: ProbeBudget) -> None:
    """Answer what a peer's probe sends, until it says that it has done."""
    answer = torch.zeros(1, dtype=torch.uint8)
    while True:
        num_bytes = int.from_bytes(bytes(channel.receive(8, source=peer).numpy()), "little")
        if num_bytes == 0:
            return
        if num_bytes > budget.most_bytes:
            raise PayloadError(
                f"replica {peer} wants to send a probe of {num_bytes} bytes, more than {budget.most_bytes}; run the "
                f"same thinwire with the same options on all hosts"
            )
        channel.send(answer, to=peer)
        channel.receive(num_bytes, source=peer)
        channel.send(answer, to=peer)


def _encode_size(num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(num_bytes.to_bytes(8, "little")), dtype=torch.uint8)


def _sizes_together(
    fits: Mapping[tuple[int, int], WireFit], budget: ProbeBudget, *, num_replicas: int
) -> dict[tuple[int, int], int]:
    """Return what each pair sends while all do: alike long on each wire, were it alone with its share."""
    seconds = 4 * budget.transfer_s(num_replicas)
    share = seconds / 8 / (num_replicas - 1)
    return {
        pair: int(min(max(fit.bandwidth_bits_per_s * share, _SMALLEST_BYTES), budget.most_bytes))
        for pair, fit in fits.items()
    }


def _together(channel: _PeerChannel, sizes: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """Send to and receive from all at once; return the seconds until each source's message was here."""
    transport, me = channel.transport, channel.transport.replica
    others = [replica for replica in range(transport.num_replicas) if replica != me]
    first = next(channel._numbers)
    began_s = time.perf_counter()
    waiting = {
        source: transport.receive(source=source, envelope=_envelope(first, sizes[source, me])) for source in others
    }
    sends = [
        transport.send(torch.zeros(sizes[me, to], dtype=torch.uint8), to=to, envelope=_envelope(first, sizes[me, to]))
        for to in others
    ]
    seconds: dict[str, float] = {}
    # where replicas take turns in one process, the others can only send while this one waits
    looks = transport.runs_in_background
    while looks and waiting and time.perf_counter() - began_s < channel.deadline_s:
        for source in [source for source, pending in waiting.items() if pending.done()]:
            waiting.pop(source).wait(deadline_s=channel.deadline_s)
            seconds[str(source)] = time.perf_counter() - began_s
        time.sleep(_POLL_S)
    for source, pending in waiting.items():  # where all was looked at, it is late: this raises, and names it
        pending.wait(deadline_s=_POLL_S if looks else channel.deadline_s)
        seconds[str(source)] = time.perf_counter() - began_s
    for pending in sends:
        pending.wait(deadline_s=channel.deadline_s)
    return seconds


def _envelope(number: int, num_bytes: int) -> Envelope:
    return Envelope(stream=SETUP, key=(number,), payload_bytes=num_bytes)


def _checked(report: Mapping[str, Any], pair: tuple[int, int]) -> tuple[float, list[TimedTransfer]]:
    """Return what a replica says of its wire: the latency, and transfers."""
    source, destination = pair
    if not isinstance(report.get("transfers"), list):
        raise PayloadError(
            f"replica {source} did not report its wire to {destination}; run the same thinwire on all hosts"
        )
    transfers = [
        TimedTransfer(num_bytes=int(_positive(size, replica=source)), seconds=_positive(taken, replica=source))
        for size, taken in _couples(report["transfers"], replica=source)
    ]
    if not transfers:
        raise PayloadError(
            f"replica {source} reported no transfer of its wire to {destination}; run the same thinwire on all hosts"
        )
    return _positive(report.get("latency_s"), replica=source), transfers


def _couples(entries: Sequence[Any], *, replica: int) -> Iterator[tuple[Any, Any]]:
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise PayloadError(
                f"replica {replica} reported a transfer as {entry!r:.60}; run the same thinwire on all hosts"
            )
        yield entry[0], entry[1]


def _positive(value: object, *, replica: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise PayloadError(
            f"replica {replica} reported a measurement as {value!r:.60}, which is no number above 0 (from {_LEAST:g} "
            f"to {_MOST:g}); run the same thinwire on all hosts"
        )
    return float(value)


def _fit(latency_s: float, transfers: Sequence[TimedTransfer]) -> WireFit:
    try:
        return fit_wire(transfers)
    except ValueError:  # quicker than the clock's noise: what the largest took bounds it from below
        largest = max(transfers, key=lambda transfer: transfer.num_bytes)
        rate = 8 * largest.num_bytes / largest.seconds
        return WireFit(
            bandwidth_bits_per_s=rate, low_bits_per_s=rate, high_bits_per_s=float("inf"), overhead_s=2 * latency_s
        )


def _wires(
    fits: Mapping[tuple[int, int], WireFit], latencies_s: Mapping[tuple[int, int], float],
    sizes: Mapping[tuple[int, int], int], seconds: Mapping[tuple[int, int], float], num_replicas: int,
) -> WireMeasurements:  # fmt: skip
    access = []
    for way in (0, 1):
        for replica in range(num_replicas):
            mine = [pair for pair in sizes if pair[way] == replica]
            access.append(8 * sum(sizes[pair] for pair in mine) / max(seconds[pair] for pair in mine))
    return WireMeasurements(
        fits=fits, latencies_s=latencies_s,
        together_bits_per_s={pair: 8 * size / seconds[pair] for pair, size in sizes.items()},
        up_bits_per_s=access[:num_replicas], down_bits_per_s=access[num_replicas:],
    )  # fmt: skip
