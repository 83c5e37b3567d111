"""Wire tests of an active test: schedules of pairs, and timed transfers over ZeroMQ or sockets of a rank."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import PayloadError, TransportError
from thinwire.monitor.active_test.evaluation import FlowTest, PairTest, rate_of
from thinwire.transport.base import Envelope, Pending, Transport
from thinwire.transport.streams import Stream, register

Cell = tuple[int, int]
# What a silent peer never took stays in flight, so a plan's messages stand apart from those of 255 plans before it.
ACTIVE_TEST = register(
    Stream(name="active-test", number=16, keys=("message", "plan", "repeat"), in_flight=(64, 256, 4))
)
_MOST_CHARACTERS = 300
# Also an upper bound on whole numbers, which Python cannot turn into a float above 1e308.
_MOST_SECONDS = 1e9


def rounds_of(ranks: Sequence[int]) -> list[list[Cell]]:
    """Return rounds of disjoint pairs that cover all pairs: a round-robin tournament by the circle method.

    Example:
        >>> rounds_of([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in met if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def cells_of(plan: Mapping[str, Any], *, world_size: int, parts: int = 2) -> Iterator[tuple[int, ...]]:
    """Return the rows of a plan: (source, destination), or with bytes; a PayloadError if they are not this job's."""
    rows = plan.get("rows")
    if not isinstance(rows, list):
        raise PayloadError("rank 0 left a plan without rows; run the same thinwire on all hosts")
    for row in rows:
        is_row = isinstance(row, list) and len(row) == parts and all(type(value) is int for value in row)
        if not is_row or not all(0 <= rank < world_size for rank in row[:2]) or row[0] == row[1]:
            raise PayloadError(f"rank 0 left a plan with {row!r:.60}; run the same thinwire on all hosts")
        if parts > 2 and not 0 < row[2] <= MOST_BYTES:
            raise PayloadError(f"rank 0 left a plan with {row[2]} bytes, which is not 1 to {MOST_BYTES}")
        yield tuple(row)


def seconds_of(plan: Mapping[str, Any], name: str, *, most: float = 3600.0) -> float:
    """Return a number of seconds of a plan or note; a PayloadError if it is none."""
    value = plan.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise PayloadError(f"{name} is {value!r:.60}, which is no number of 0 to {most:g}")
    return float(value)


def pair_note(found: PairTest) -> dict[str, Any]:
    """Write what a pair measured."""
    return {
        "rate": found.rate_bits_per_s, "overhead_s": found.overhead_s, "latency_s": found.latency_s,
        "fault": found.fault, "detail": found.detail[:_MOST_CHARACTERS],
    }  # fmt: skip


def detail_of(note: Mapping[str, Any]) -> str:
    """Return what a rank says of a fault, cut to what is shown, without what a terminal would follow."""
    detail = str(note.get("detail"))[:_MOST_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in detail)


def read_pair(note: Mapping[str, Any]) -> PairTest:
    """Read what a pair measured; what makes no sense is a fault of the pair."""
    try:
        rate = seconds_of(note, "rate", most=1e15)
        times = {name: seconds_of(note, name) for name in ("overhead_s", "latency_s")}
    except PayloadError as error:
        return PairTest(fault="dead", detail=str(error))
    fault = note.get("fault")
    fault = fault if fault in ("dead", "corrupt") else "" if rate > 0 else "dead"
    return PairTest(rate_bits_per_s=rate, fault=fault, detail=detail_of(note), **times)


def read_flow(num_bytes: int, seconds: object) -> FlowTest | None:
    """Read how long one of many transfers took, or None where it did not end."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < _MOST_SECONDS:
        return None
    return FlowTest(num_bytes=num_bytes, seconds=float(seconds))


# Deadline of the first messages, before times are known: a lost packet can be sent again a few times.
FIRST_DEADLINE_S = 5.0
MOST_BYTES = 1 << 26
# TCP restarts with small windows after each pause: full rate comes so many round trips later.
ROUND_TRIPS = 15.0
_LATER = 10.0
_PINGS, _REPEATS, _SMALLEST_BYTES, _GROWTH = 5, 3, 1 << 14, 4
_PRIME = 65_521
_MOST_TERM, _POLL_S = 251, 5e-4
Promise = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Measurements of the sender of a pair."""

    latency_s: float  # half of the shortest round trip
    transfers: tuple[tuple[int, float], ...]  # bytes and seconds

    @property
    def rate(self) -> tuple[float, float]:
        """Bits a second, and the seconds that a message takes however short it is."""
        return rate_of(self.transfers)


def pattern(num_bytes: int, *, seed: int) -> torch.Tensor:
    """Return bytes that only this seed has, uint8, `(num_bytes,)`; they repeat after a prime number of bytes."""
    block = torch.randint(256, (_PRIME,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return block.repeat(-(-num_bytes // _PRIME))[:num_bytes].contiguous()


class PairChannel:
    """Messages of two replicas in an order that both know; the deadline grows with the measured times.

    `promise` is called before each wait with its deadline in seconds.
    """

    def __init__(self, transport: Transport, peer: int, *, plan: int, promise: Promise) -> None:
        self.deadline_s = FIRST_DEADLINE_S
        self._transport, self._peer, self._plan, self._promise = transport, peer, plan, promise
        self._out, self._into = itertools.count(), itertools.count()

    def send(self, payload: torch.Tensor) -> None:
        """Send, and wait until the message has arrived whole."""
        envelope = Envelope(stream=ACTIVE_TEST, key=(next(self._out), self._plan), payload_bytes=payload.numel())
        self._wait(self._transport.send(payload, to=self._peer, envelope=envelope))

    def expect(self) -> Pending:
        """Make room for the next message, of at most `MOST_BYTES`."""
        key = (next(self._into), self._plan)
        envelope = Envelope(stream=ACTIVE_TEST, key=key, payload_bytes=MOST_BYTES, takes_less=True)
        return self._transport.receive(source=self._peer, envelope=envelope)

    def receive(self, pending: Pending | None = None) -> torch.Tensor:
        """Wait for the next message."""
        received = self._wait(self.expect() if pending is None else pending)
        assert isinstance(received, torch.Tensor)
        return received

    def _wait(self, pending: Pending) -> torch.Tensor | None:
        self._promise(self.deadline_s)
        received = pending.wait(deadline_s=self.deadline_s)
        return None if received is None else received.payload


def lead(line: PairChannel, *, seconds: float, seed: int) -> PairTimes:
    """Time words and blocks of growing size to a peer that calls `follow`, the longest for about so many seconds.

    Over long ways it takes longer: some round trips.

    Raises:
        TransportError: The peer was lost, late, or says that it got other bytes.
    """
    pings, transfers = [_timed(line, 1, seed=0) for _ in range(_PINGS)], []
    seconds = max(seconds, ROUND_TRIPS * min(pings))
    size, before_s = _SMALLEST_BYTES, 0.0
    while True:
        taken_s = _timed(line, size, seed=seed + size)
        line.deadline_s = FIRST_DEADLINE_S + _LATER * _GROWTH * taken_s
        # a time that hardly grows with the size is none of the wire yet
        if (taken_s >= 0.4 * seconds and taken_s > 1.2 * before_s) or _GROWTH * size > MOST_BYTES:
            break
        size, before_s = size * _GROWTH, taken_s
    rate, _ = rate_of([(size, taken_s)])
    size = max(_SMALLEST_BYTES, min(MOST_BYTES, int(rate * seconds / 8)))
    for _ in range(_REPEATS):
        transfers += [(part, _timed(line, part, seed=seed + part)) for part in (size // 4, size)]
    line.receive()
    line.send(torch.zeros(0, dtype=torch.uint8))
    return PairTimes(latency_s=min(pings) / 2, transfers=tuple(transfers))


def follow(line: PairChannel, *, seed: int) -> None:
    """Answer a peer that calls `lead`.

    Raises:
        PayloadError: Other bytes came than were sent.
        TransportError: The peer was lost or late.
    """
    while True:
        pending = line.expect()
        line.send(torch.ones(1, dtype=torch.uint8))  # it is waiting now
        began_s = time.perf_counter()
        payload = line.receive(pending)
        line.deadline_s = FIRST_DEADLINE_S + _LATER * _GROWTH * (time.perf_counter() - began_s)
        num_bytes = payload.numel()
        if num_bytes == 0:
            return
        is_whole = torch.equal(payload, pattern(num_bytes, seed=0 if num_bytes == 1 else seed + num_bytes))
        line.send(torch.full((1,), is_whole, dtype=torch.uint8))
        if not is_whole:
            raise PayloadError(f"{num_bytes} bytes arrived, and are not those that were sent")


def _timed(line: PairChannel, num_bytes: int, *, seed: int) -> float:
    payload = pattern(num_bytes, seed=seed)
    line.receive()
    began_s = time.perf_counter()
    line.send(payload)
    taken_s = time.perf_counter() - began_s
    if not bool(line.receive().all()):
        raise PayloadError(f"{num_bytes} bytes arrived at the peer, and are not those that were sent")
    return taken_s


def together(
    transport: Transport, flows: Mapping[tuple[int, int], int], *, plan: int, limit_s: float, promise: Promise
) -> dict[int, FlowTest]:
    """Send and receive all flows, bytes by (source, destination), at once; all replicas must call this together.

    Returns:
        What this replica sent within `limit_s`, by destination.
    """
    me, given = transport.replica, list(flows)

    def envelope(num_bytes: int, step: int) -> Envelope:
        return Envelope(stream=ACTIVE_TEST, key=(step, plan), payload_bytes=num_bytes)

    out, into = [cell for cell in given if cell[0] == me], [cell for cell in given if cell[1] == me]
    receives = [transport.receive(source=cell[0], envelope=envelope(flows[cell], 1)) for cell in into]
    ready = {cell: transport.receive(source=cell[1], envelope=envelope(1, 0)) for cell in out}
    blocks = {cell: torch.zeros(flows[cell], dtype=torch.uint8) for cell in out}
    for cell in into:  # room is made: the sender's clock may begin
        transport.send(torch.ones(1, dtype=torch.uint8), to=cell[0], envelope=envelope(1, 0))
    promise(limit_s)
    end_s = time.perf_counter() + limit_s
    sends: dict[tuple[int, int], tuple[float, Pending]] = {}
    done: dict[int, FlowTest] = {}
    while len(done) < len(out) and time.perf_counter() < end_s:
        for cell in [cell for cell, word in ready.items() if word.done()]:
            ready.pop(cell)
            began_s = time.perf_counter()
            sends[cell] = began_s, transport.send(blocks[cell], to=cell[1], envelope=envelope(flows[cell], 1))
        for cell, (began_s, pending) in list(sends.items()):
            if pending.done():
                sends.pop(cell)
                done[cell[1]] = FlowTest(num_bytes=flows[cell], seconds=time.perf_counter() - began_s)
        time.sleep(_POLL_S)
    for pending in receives:
        with contextlib.suppress(TransportError):  # late arrivals are reported by their senders
            pending.wait(deadline_s=max(0.0, end_s - time.perf_counter()))
    return done


def terms(rank: int, numel: int) -> torch.Tensor:
    """Return what a rank brings to an all-reduce, float32, `(numel,)`: whole numbers whose sums are exact."""
    return ((torch.arange(numel) + 13 * rank) % _MOST_TERM).to(torch.float32)


def ring_all_reduce(
    transport: Transport, order: Sequence[int], numel: int, *, plan: int, repeat: int, limit_s: float, promise: Promise
) -> tuple[float, int | None]:
    """Sum a vector of all ranks around a ring; all ranks of the order must call this together.

    `numel` is a multiple of the number of ranks; a plan has at most 4 repeats; `limit_s` is the deadline of each step.

    Returns:
        Seconds, and the first step in which the wrong sum came from the neighbour before; None where all was right.

    Raises:
        TransportError: A neighbour was lost or late.
    """
    size, place = len(order), order.index(transport.replica)
    before, behind = order[place - 1], order[(place + 1) % size]
    parts = list(terms(transport.replica, numel).chunk(size))
    arrived: list[torch.Tensor] = []
    began_s = time.perf_counter()
    for step in range(2 * (size - 1)):
        out, into = (place - step) % size, (place - step - 1) % size
        payload = parts[out].contiguous().view(torch.uint8)
        envelope = Envelope(stream=ACTIVE_TEST, key=(step, plan, repeat), payload_bytes=payload.numel())
        promise(limit_s)
        pending = transport.receive(source=before, envelope=envelope)
        send = transport.send(payload, to=behind, envelope=envelope)
        received = pending.wait(deadline_s=limit_s)
        assert received is not None
        arrived.append(received.payload.view(torch.float32))
        parts[into] = parts[into] + arrived[-1] if step < size - 1 else arrived[-1]
        send.wait(deadline_s=limit_s)
    seconds = time.perf_counter() - began_s
    sums = [terms(rank, numel).chunk(size) for rank in order]
    for step, found in enumerate(arrived):
        into = (place - step - 1) % size
        ranks = range(into, into + (step + 1 if step < size - 1 else size))
        exact = torch.stack([sums[rank % size][into] for rank in ranks]).sum(dim=0)
        if not torch.equal(found, exact):
            return seconds, step
    return seconds, None


def find_ring(ranks: Sequence[int], alive: Callable[[int, int], bool]) -> tuple[int, ...] | None:
    """Return the first order of ranks in which all neighbours reach each other, or None where there is none.

    Example:
        >>> find_ring([0, 1, 2, 3], lambda one, other: {one, other} != {0, 1})
        (0, 2, 1, 3)
    """
    tries = 0

    def extend(order: tuple[int, ...]) -> tuple[int, ...] | None:
        nonlocal tries
        tries += 1
        if len(order) == len(ranks):
            return order if alive(order[-1], order[0]) else None
        for rank in ranks:
            if rank not in order and alive(order[-1], rank) and tries < 10_000:
                found = extend((*order, rank))
                if found is not None:
                    return found
        return None

    return extend((ranks[0],)) if len(ranks) > 1 else None


def loopback_times(pair: tuple[Transport, Transport], *, seconds: float, promise: Promise) -> PairTimes:
    """Time blocks between two transports of this process; a TransportError if one breaks."""
    one = PairChannel(pair[0], 1, plan=0, promise=promise)
    other = PairChannel(pair[1], 0, plan=0, promise=lambda seconds: None)
    with ThreadPoolExecutor(max_workers=1) as threads:
        answers = threads.submit(follow, other, seed=0)
        found = lead(one, seconds=seconds, seed=0)
        answers.result()
    return found
