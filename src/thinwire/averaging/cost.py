"""Cost of an exchange for one replica: computing time, measured without a network, and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.averaging.exchange import LATE_STEP, DescribesTraffic, Exchange, Shapes, numel_of
from thinwire.averaging.round_context import RoundContext, Steps, Wait
from thinwire.averaging.topology import AllReplicas, Topology
from thinwire.transport.base import Received
from thinwire.transport.loopback import LoopbackWorld

# Elements of a vector that are measured, few at first. Larger sizes are extrapolated from the last
# two, since the overhead of a call does not depend on the size.
_PARTS = (2**12, 2**15, 2**18, 2**21)
# The last: takes as long, and mostly by its elements.
_LONG_ENOUGH_S = 0.1
_LONGER_THAN_BEFORE = 2.0
# Everyone's messages to everyone are in memory at once.
_MOST_ELEMENTS_IN_FLIGHT = 2**25
_WARM_ROUNDS, _TIMED_ROUNDS = 1, 3
_EVERYONE = AllReplicas()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Cost of one round for one replica.

    Attributes:
        computing_s: Seconds to encode, pack, check, decode and sum, the fastest of several rounds.
        sent_bytes: Payload bytes it sends, at most.
    """

    computing_s: float
    sent_bytes: int


def measure_exchange(
    exchange: Exchange, shapes: Shapes, *, num_replicas: int, device: torch.device | str = "cpu",
    topology: Topology = _EVERYONE, clock: Callable[[], float] = time.perf_counter,
) -> ExchangeCost:  # fmt: skip
    """Run rounds of all replicas in this thread, one after the other, and time them.

    Args:
        exchange: What to measure.
        shapes: Of the tensors that the vector is made of; where they are long, the first ones alone are measured.
        num_replicas: How many there are.
        device: Where the vector is.
        topology: Who takes part in a round; no replica is absent.
        clock: Seconds that only grow.

    Returns:
        The cost for all shapes.

    Raises:
        ValueError: The exchange or the topology does not fit so many replicas, or the exchange does not end.

    Example:
        >>> from thinwire.averaging.exchange import AllGather
        >>> from thinwire.codecs import e3m0
        >>> measure_exchange(AllGather(codec=e3m0()), [torch.Size([64, 10])], num_replicas=2).sent_bytes
        330
    """
    members, numel = most_members(topology, num_replicas=num_replicas), numel_of(shapes)
    most = max(1, _MOST_ELEMENTS_IN_FLIGHT // num_replicas**2)
    before, before_s, size, round_s = 0, 0.0, 0, 0.0
    for room in [part for part in _PARTS if part <= most] or [most]:
        part = _first_of(shapes, room=room)
        before, before_s, size = size, round_s, numel_of(part)
        round_s = _time_rounds(
            exchange, part, num_replicas=num_replicas, device=device, topology=topology, clock=clock
        )  # fmt: skip
        if size == numel or (before and round_s > max(_LONG_ENOUGH_S, _LONGER_THAN_BEFORE * before_s)):
            break
    rest_s = max(0.0, round_s - before_s) / max(size - before, 1) * (numel - size)
    return ExchangeCost(
        computing_s=(round_s + rest_s) / num_replicas,
        sent_bytes=sent_bytes_of(exchange, shapes, num_members=members),
    )


def _time_rounds(
    exchange: Exchange, shapes: Shapes, *, num_replicas: int, device: torch.device | str, topology: Topology,
    clock: Callable[[], float],
) -> float:  # fmt: skip
    """Return the seconds that a round takes all replicas, one after the other."""
    world = LoopbackWorld(num_replicas)
    bound = [exchange.bind([shapes], replica=r, num_replicas=num_replicas) for r in range(num_replicas)]
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(numel_of(shapes), generator=generator).to(device) for _ in range(num_replicas)]
    found_s = []
    for number in range(_WARM_ROUNDS + _TIMED_ROUNDS):
        rounds = []
        for me, (one, vector) in enumerate(zip(bound, vectors, strict=True)):
            peers = replace(topology.peers(round_id=number, me=me, alive=range(num_replicas)), absent=())
            context = RoundContext(
                peers=peers, transport=world.transports[me], round_id=number, step=LATE_STEP + number
            )  # fmt: skip
            rounds.append(one.steps(vector.clone(), context))
        _finish_work_on(device)
        began_s = clock()
        _drive(rounds, exchange=exchange)
        _finish_work_on(device)
        found_s.append(clock() - began_s)
    return min(found_s[_WARM_ROUNDS:])


def sent_bytes_of(exchange: Exchange, shapes: Shapes, *, num_members: int) -> int:
    """Return the payload bytes that one replica sends in a round, at most, after all warm-ups.

    `Exchange.sent_bytes` knows the number of elements only; this also uses the shapes, on which some codecs depend.

    Args:
        exchange: What sends.
        shapes: Of the tensors that the vector is made of.
        num_members: How many take part in the round.

    Example:
        >>> from thinwire.averaging.exchange import AllGather
        >>> from thinwire.codecs import dct_top_k
        >>> matrix, exchange = torch.Size([64, 64]), AllGather(codec=dct_top_k(k=32))
        >>> sent_bytes_of(exchange, [matrix], num_members=2), exchange.sent_bytes(matrix.numel(), num_replicas=2)
        (113, 5696)
    """
    if isinstance(exchange, DescribesTraffic):
        return exchange.traffic(shapes, num_members=num_members).sent_bytes
    return exchange.sent_bytes(numel_of(shapes), num_replicas=num_members)


def most_members(topology: Topology, *, num_replicas: int) -> int:
    """Return how many replicas a round has, in the largest group of its first one.

    Args:
        topology: Chooses the groups.
        num_replicas: How many there are.

    Raises:
        ValueError: The topology does not fit so many replicas.

    Example:
        >>> from thinwire.averaging.mixing import RandomPairs
        >>> [most_members(RandomPairs(seed=1), num_replicas=n) for n in (2, 5, 8)]
        [2, 3, 2]
    """
    everyone = range(num_replicas)
    return max(len(topology.peers(round_id=0, me=me, alive=everyone).members) for me in everyone)


def _first_of(shapes: Shapes, *, room: int) -> list[torch.Size]:
    chosen: list[torch.Size] = []
    for shape in shapes:
        if shape.numel() > room:
            return [*chosen, torch.Size(_part(shape, room=room))] if room else chosen
        chosen.append(shape)
        room -= shape.numel()
    return chosen


def _part(shape: Sequence[int], *, room: int) -> tuple[int, ...]:
    """Return the shape of a tensor's first rows, or of a part of its first row where that is long itself."""
    row = torch.Size(shape[1:])
    return (room // row.numel(), *row) if row.numel() <= room else (1, *_part(row, room=room))


def _finish_work_on(device: torch.device | str) -> None:
    # kernels on a GPU run asynchronously
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _drive(rounds: Sequence[Steps], *, exchange: Exchange) -> None:
    """Let each go on as far as it can, in turn, until all are done."""
    waits: dict[int, Wait] = {}
    for number, steps in enumerate(rounds):
        _go_on(number, steps, None, waits)
    while waits:
        ready = [number for number, wait in waits.items() if all(pending.done() for pending in wait.receives)]
        if not ready:
            missing = {number: [p for p in wait.receives if not p.done()] for number, wait in sorted(waits.items())}
            first, *_ = missing
            raise ValueError(
                f"{len(missing)} of {len(rounds)} replicas wait for {sum(map(len, missing.values()))} messages that "
                f"nobody sends, replica {first} for {missing[first][0]}, so that a round of {exchange} does not end; "
                f"let its steps() send every message that they receive, under the same envelope"
            )
        for number in ready:
            received = [pending.wait(deadline_s=0.0) for pending in waits.pop(number).receives]
            _go_on(number, rounds[number], [message for message in received if message is not None], waits)


def _go_on(number: int, steps: Steps, received: Sequence[Received] | None, waits: dict[int, Wait]) -> None:
    try:
        waits[number] = next(steps) if received is None else steps.send(received)
    except StopIteration:
        return
