"""Progress detector: distinguishes hangs from links and ranks that are slow and still move.

A waiting rank cannot distinguish a hang from a tenth of the usual speed. Two counts can: the kernel's bytes of a
connection in the middle of a message, and the steps that a rank records while others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.delay_matrix import WIRE_REMEDY, Cell, DelayMatrix, probe_for
from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.findings import Evidence, Finding, Place, joined, link_names
from thinwire.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressConfig:
    """Constants of the detector of slow progress."""

    min_wait_s: float = 1.0  # wait before anything is late
    unsure: float = 0.7  # confidence from one message or a few steps; remediation does not act on it
    min_ratio: float = 2.0  # of a slow link or rank
    min_bytes_a_second: float = 2048.0  # more than keep-alives and headers
    min_share: float = 1 / 200  # share of the usual rate that is movement
    fresh_s: float = 1.5  # age of a byte count that still shows the present
    stretch_s: float = 1.6  # longest stretch of the present rate
    min_stretch_s: float = 0.4  # shortest stretch of the present rate
    dead_s: float = 3.0  # silence of a connection with keep-alives each second: three are missing
    latest_messages: int = 64  # messages that the usual rate is taken from
    min_steps: int = 8  # steps before the wait
    open_steps: float = 2.0  # longest recent steps after which the open one may never end


PROGRESS = ProgressConfig()


def slow_wires(job: Job, messages: Sequence[Message]) -> Finding | None:
    """Return that messages of an operation are under way and slow; None if one of them does not move."""
    late = _late(job, [m for m in messages if m.is_stuck])
    if not late or any(m.error for m in late) or not {(m.source, m.destination) for m in late} <= set(job.arrivals):
        return None
    usual = _usual_rates(job, {(m.source, m.destination): m.num_bytes for m in late})
    rates = {cell: _rate(job, cell) for cell in usual}
    # a link without a known or with hardly any rate does not move
    times = {
        cell: usual[cell] / rate for cell, rate in rates.items()
        if rate is not None and rate >= max(PROGRESS.min_bytes_a_second, PROGRESS.min_share * usual[cell])
    }  # fmt: skip
    longer = median(list(times.values()))
    if len(times) < len(usual) or any(map(math.isnan, usual.values())) or longer < PROGRESS.min_ratio:
        return None
    cells: dict[Cell, float] = {(m.source, m.destination): 0.0 for m in messages if m.received_done_s is not None}
    explained = DelayMatrix(cells | dict.fromkeys(times, 1.0), job.host_of).explain()
    if explained is None:
        return None
    waited_s, named = max(job.now_s - (m.begin_s or 0.0) for m in late), joined(explained.places)
    came = sum(rate or 0.0 for rate in rates.values()) / len(rates)
    return Finding(
        kind="communication slow", places=explained.places,
        since_s=min(m.begin_s for m in late if m.begin_s is not None),
        since_round=late[0].operation, seen_round=late[0].operation,
        evidence=Evidence(
            "slow_transfer", waited_s=round(waited_s, 3), times_longer=round(longer, 2), bytes_a_second=round(came),
            links=link_names(times),
        ),
        text=f"Messages over {named} have been under way for {waited_s:.1f} s, and {format_bytes(came)} a second come: "
        f"{longer:.1f} times fewer than usual.",
        confidence=(PROGRESS.unsure if len(explained.places) == 1 else 0.5) * job.trust,
        remedy=WIRE_REMEDY,
        probe=probe_for(explained.places),
    )  # fmt: skip


def _late(job: Job, messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.begin_s is not None and job.now_s - m.begin_s >= PROGRESS.min_wait_s]


def _usual_rates(job: Job, sizes: Mapping[Cell, int]) -> dict[Cell, float]:
    """Return the usual bytes a second of messages of such sizes; NaN if unknown."""
    found: dict[Cell, list[float]] = {cell: [] for cell in sizes}
    for m in job.messages:
        own = found.get((m.source, m.destination))
        if own is not None and m.transfer_s and 4 * m.num_bytes >= sizes[m.source, m.destination]:
            own.append(m.num_bytes / m.transfer_s)
    # the first messages count too: a link that has been slow for long is not compared with itself
    most = PROGRESS.latest_messages
    return {cell: max(median(own[:most]), median(own[-most:])) for cell, own in found.items()}


def _rate(job: Job, cell: Cell) -> float | None:
    """Return the present bytes a second from one rank to another; None without a fresh reading."""
    seen = job.arrivals.get(cell, [])
    if not seen or job.now_s - seen[-1][0] > PROGRESS.fresh_s:
        return None
    last_s, last = seen[-1]
    earlier = [(last_s - at_s, last - count) for at_s, count in seen if last_s - at_s <= PROGRESS.stretch_s]
    long_s, came = earlier[0]
    # a new connection counts from 0 again
    if long_s < PROGRESS.min_stretch_s or came < 0:
        return None
    # bytes from before a cut are no progress
    return came / long_s if last > seen[-2][1] else 0.0


def is_dead(job: Job, messages: Sequence[Message]) -> bool:
    """Return whether the links of late messages are dead: no byte arrives, though live ones have keep-alives."""
    cells = {(m.source, m.destination) for m in _late(job, messages)}
    return bool(cells) and cells <= job.signalled and all(_still_s(job, cell) >= PROGRESS.dead_s for cell in cells)


def is_still(job: Job, messages: Sequence[Message]) -> bool:
    """Return whether no byte has arrived for a second over the links of all late messages."""
    late = _late(job, messages)
    return bool(late) and all(_still_s(job, (m.source, m.destination)) >= PROGRESS.min_wait_s for m in late)


def _still_s(job: Job, cell: Cell) -> float:
    """Return the seconds since the last byte from one rank to another; 0 without a fresh reading."""
    seen = job.arrivals.get(cell, [])
    if not seen or job.now_s - seen[-1][0] > PROGRESS.fresh_s:
        return 0.0
    still_s = seen[-1][0]
    for at_s, count in reversed(seen):
        if count != seen[-1][1]:
            break
        still_s = at_s
    return seen[-1][0] - still_s


def slow_ranks(job: Job, ranks: Collection[int], place: Place, *, waited_since_s: float) -> Finding | None:
    """Return that ranks which others wait for compute slowly; None if one of them has ended no step meanwhile."""
    longer, began_s, steps = [], [], []
    for rank in ranks:
        own = [span for span in job.spans if span.rank == rank and span.kind == "compute"]
        fresh = [span for span in own if span.done_s > waited_since_s]
        before = [span.done_s - span.started_s for span in own if span.done_s <= waited_since_s]
        if not fresh or len(before) < PROGRESS.min_steps:
            return None
        took = [span.done_s - span.started_s for span in fresh]
        usual_s = median(before)
        is_moving = job.now_s - fresh[-1].done_s <= PROGRESS.open_steps * max(took)
        if not is_moving or not usual_s > 0 or median(took) < PROGRESS.min_ratio * usual_s:
            return None
        longer.append((median(took) / usual_s, usual_s))
        began_s.append(fresh[0].started_s)
        steps += [span.step for span in fresh]
    times, usual_s = min(longer)
    waited_s = job.now_s - waited_since_s
    return Finding(
        kind="non-communication slow", places=(place,), since_s=min(began_s), since_round=min(steps),
        seen_round=max(steps),
        evidence=Evidence(
            "slow_step", waited_s=round(waited_s, 3), times_longer=round(times, 2), usual_s=round(usual_s, 6),
            now_s=round(usual_s * times, 6), steps=len(steps),
        ),
        text=f"{place.title} has been waited for for {waited_s:.1f} s and works: its steps take {times:.1f} times as "
        "long as they did.",
        confidence=PROGRESS.unsure * job.trust,
        remedy="look for other load, thermal limits, memory that runs full or data that comes late on this host",
    )  # fmt: skip
