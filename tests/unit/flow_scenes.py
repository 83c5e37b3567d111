"""Records of a job of three hosts whose messages nobody records: calls, what kernels know of its wires, and bursts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Communicator, Flow, Operation, Probe, Record

HOSTS = ("a", "b", "c")
EVERY_S, LOOK_S, STEPS, BROKEN = 0.2, 0.5, 100, 60
BROKEN_S = BROKEN * EVERY_S
SIZE, SMALL = 1_000_000, 300
# what a step of a ring sends, and how long that takes while all is well
HEAVY: dict[Cell, int] = {(0, 1): SIZE, (1, 2): SIZE, (2, 0): SIZE}
BUSY_S = 0.05


def pairs(ranks: int) -> list[Cell]:
    return [(source, destination) for source in range(ranks) for destination in range(ranks) if source != destination]


def communicator(hosts: tuple[str, ...]) -> Record:
    return Communicator(communicator="job", ranks=tuple(range(len(hosts))), hosts=hosts)


def operations(
    took: Callable[[int], float], *, ranks: int = 3, steps: int = STEPS, kind: str = "all_reduce"
) -> list[Record]:
    """Return collectives that all ranks come to at once, one a step."""
    return [
        Operation(
            communicator="job", rank=rank, sequence=step, kind=kind, dtype="float32", count=SIZE,
            posted_s=step * EVERY_S, done_s=step * EVERY_S + took(step),
        )
        for step in range(steps)
        for rank in range(ranks)
    ]  # fmt: skip


def flows(
    times: Mapping[Cell, float], *, heavy: Mapping[Cell, int] | None = None, ranks: int = 3, steps: int = STEPS,
    held: Mapping[Cell, float] | None = None, common: float = 1.0, healed: int = 1 << 30,
) -> list[Record]:  # fmt: skip
    """Return looks at all connections; between two steps bytes take so many times as long on some."""
    found: list[Record] = []
    carried = HEAVY if heavy is None else heavy
    for cell in pairs(ranks):
        num_bytes, busy_s, held_s = 0, 0.0, 0.0
        step_s, size = (BUSY_S, carried[cell]) if cell in carried else (0.01, SMALL)
        for step in range(steps):
            longer = common * times.get(cell, 1.0) if BROKEN <= step < healed else 1.0
            num_bytes, busy_s = num_bytes + size, busy_s + longer * step_s
            more_s = (held or {}).get(cell, 0.0) if step >= BROKEN else 0.0
            busy_s, held_s = busy_s + more_s, held_s + more_s
            if step % 3 == 2:
                found.append(Flow(
                    rank=cell[0], peer=cell[1], at_s=(step + 0.99) * EVERY_S, num_bytes=num_bytes, busy_s=busy_s,
                    held_s=held_s,
                ))  # fmt: skip
    return found


def judged(*parts: list[Record], hosts: tuple[str, ...] = HOSTS) -> list[Finding]:
    return diagnose(from_records([communicator(hosts), *(record for part in parts for record in part)]))


def slow_from(step: int, times: float) -> Callable[[int], float]:
    return lambda number: BUSY_S * (times if number >= step else 1.0)


EVERYONE: dict[Cell, int] = dict.fromkeys(pairs(3), SIZE)


def probes(slow: Collection[Cell], *, met: bool = False) -> list[Record]:
    """Return bursts over all wires that a ring does not use; some wires are slow, some bursts meet others' bytes."""
    found: list[Record] = []
    for cell in pairs(3):
        for step in range(0, STEPS, 4):
            longer = 6.0 if cell in slow and step >= BROKEN else 1.0
            if met and step % 12 == 0:
                longer *= 5.0
            if cell not in HEAVY:
                found.append(Probe(
                    rank=cell[0], peer=cell[1], at_s=(step + 0.3) * EVERY_S, num_bytes=131_072, took_s=0.01 * longer
                ))  # fmt: skip
    return found
