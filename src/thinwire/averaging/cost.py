"""What an exchange costs a replica in computing: measured here, without a wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.averaging.delivery import Delivery, Steps, Wait
from thinwire.averaging.exchange import Exchange, Shapes
from thinwire.averaging.topology import Peers
from thinwire.transport.base import Received
from thinwire.transport.loopback import LoopbackWorld

# Enough to drown what a call costs; longer tensors cost in proportion.
_MOST_ELEMENTS = 2**21
_WARM_ROUNDS, _TIMED_ROUNDS = 1, 3
# Past every warm-up: codes that change with the step have come to their last.
_LATE_STEP = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """What one round costs one replica.

    Attributes:
        computing_s: Seconds to encode, pack, check, decode and sum, the fastest of several rounds.
        sent_bytes: Payload bytes it sends, at most.
    """

    computing_s: float
    sent_bytes: int


def measure_exchange(
    exchange: Exchange, shapes: Shapes, *, num_replicas: int, device: torch.device | str = "cpu"
) -> ExchangeCost:
    """Run rounds of all replicas in this thread, one after the other, and time them.

    Args:
        exchange: What to measure.
        shapes: Of the tensors that the vector is made of; where they are long, the first ones alone are measured.
        num_replicas: How many take part.
        device: Where the vector is.

    Returns:
        The cost for all shapes.

    Raises:
        ValueError: The exchange does not fit so many replicas, or does not end.

    Example:
        >>> from thinwire.averaging.exchange import AllGather
        >>> from thinwire.codecs import e3m0
        >>> measure_exchange(AllGather(codec=e3m0()), [torch.Size([64, 10])], num_replicas=2).sent_bytes
        330
    """
    numel = sum(shape.numel() for shape in shapes)
    sent_bytes = exchange.sent_bytes(numel, num_replicas=num_replicas)
    measured = _first_of(shapes)
    world = LoopbackWorld(num_replicas)
    bound = [exchange.bind([measured], replica=r, num_replicas=num_replicas) for r in range(num_replicas)]
    size = sum(shape.numel() for shape in measured)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(size, generator=generator).to(device) for _ in range(num_replicas)]
    found_s = []
    for number in range(_WARM_ROUNDS + _TIMED_ROUNDS):
        rounds = [
            one.steps(vector.clone(), Delivery(
                peers=Peers(me=me, members=tuple(range(num_replicas))), transport=world.transports[me],
                round_id=number, step=_LATE_STEP + number,
            ))
            for me, (one, vector) in enumerate(zip(bound, vectors, strict=True))
        ]  # fmt: skip
        began_s = time.perf_counter()
        _drive(rounds, exchange=exchange)
        found_s.append(time.perf_counter() - began_s)
    seconds = min(found_s[_WARM_ROUNDS:]) / num_replicas
    return ExchangeCost(computing_s=seconds * numel / max(size, 1), sent_bytes=sent_bytes)


def _first_of(shapes: Shapes) -> list[torch.Size]:
    chosen: list[torch.Size] = []
    room = _MOST_ELEMENTS
    for shape in shapes:
        if shape.numel() > room and shape.numel() > 0:
            rows = max(1, room * shape[0] // shape.numel())
            return [*chosen, torch.Size([rows, *shape[1:]])]
        chosen.append(shape)
        room -= shape.numel()
    return chosen


def _drive(rounds: Sequence[Steps], *, exchange: Exchange) -> None:
    """Let each go on as far as it can, in turn, until all are done."""
    waits: dict[int, Wait] = {}
    for number, steps in enumerate(rounds):
        _go_on(number, steps, None, waits)
    while waits:
        ready = [number for number, wait in waits.items() if all(pending.done() for pending in wait.receives)]
        if not ready:
            raise ValueError(_stuck(waits, exchange=exchange, num_replicas=len(rounds)))
        for number in ready:
            received = [pending.wait(deadline_s=0.0) for pending in waits.pop(number).receives]
            _go_on(number, rounds[number], [message for message in received if message is not None], waits)


def _stuck(waits: dict[int, Wait], *, exchange: Exchange, num_replicas: int) -> str:
    missing = {number: [p for p in wait.receives if not p.done()] for number, wait in sorted(waits.items())}
    first, *_ = missing
    return (
        f"{len(missing)} of {num_replicas} replicas wait for {sum(map(len, missing.values()))} messages that nobody "
        f"sends, replica {first} for {missing[first][0]}, so that a round of {exchange} does not end; let its steps() "
        f"send every message that they receive, under the same envelope"
    )


def _go_on(number: int, steps: Steps, received: Sequence[Received] | None, waits: dict[int, Wait]) -> None:
    try:
        waits[number] = next(steps) if received is None else steps.send(received)
    except StopIteration:
        return
