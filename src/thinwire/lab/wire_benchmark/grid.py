"""Grid of the wire benchmark's runs, and the number of steps of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.lab.settings import Access, LabSettings, Link
from thinwire.lab.wire_benchmark.contenders import Contender, contender

# What a step of `nano` with the default batch takes on one core, to the nearest power of two: only for budgets.
_STEP_S = 0.25
_FEWEST_STEPS = 2
_WIDE_STEPS = 2
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "e3m0": 4.125 / 8}
# By this much rank 4 shrinks what `nano` sends (a fortieth of a block, vectors whole): only for budgets.
_POWERSGD_FACTOR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWire:
    """Network between the hosts of a run.

    Attributes:
        rate_bits_per_s: Each host's access, both ways; None is no limit.
        latency_s: One-way time between hosts.
        jitter_s: How far it varies.
        loss: Probability that a packet is lost.
    """

    rate_bits_per_s: float | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def settings(self, num_hosts: int) -> LabSettings:
        """Return the lab with this wire."""
        access = Access(up_bits_per_s=self.rate_bits_per_s, down_bits_per_s=self.rate_bits_per_s)
        return LabSettings.alike(num_hosts, access, link=self._link)

    @property
    def is_delayed(self) -> bool:
        """Whether packets need time or get lost."""
        return self._link.is_delayed

    @property
    def _link(self) -> Link:
        return Link(latency_s=self.latency_s, jitter_s=self.jitter_s, loss=self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One run: a contender on a wire.

    Attributes:
        contender: Its name.
        num_hosts: One replica each.
        wire: What joins them.
        repeat: Counts the repeats from 0.
        sync_interval: H.
        overlap_steps: tau.
        wide_steps: First steps, on a wire without limits.
        warmup_steps: Steps that are not measured, those among them: on the thin wire there is one exchange of
            everything before the measured ones, so that TCP knows the wire.
        measured_steps: Steps that are measured.
        pace: Whether the sender spreads each transfer over its overlap.
    """

    contender: str
    num_hosts: int
    wire: BenchWire
    repeat: int
    sync_interval: int
    overlap_steps: int
    wide_steps: int
    warmup_steps: int
    measured_steps: int
    pace: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GridCell:
        """Read what `to_json` wrote."""
        return cls(**{**values, "wire": BenchWire(**values["wire"])})


def cells(
    *,
    contenders: Sequence[str],
    num_hosts: Sequence[int],
    wires: Sequence[BenchWire],
    repeats: Iterable[int],
    sync_interval: int = 30,
    overlap_steps: int = 6,
    intervals: int = 2,
    budget_s: float = 120.0,
    num_parameters: int = 3_050_000,
) -> Iterator[GridCell]:
    """Yield the runs, a contender's wires one after the other, so that ratios compare what ran at the same time.

    A contender that exchanges every step runs so many of them as fit the budget, because a step of it can take minutes;
    the others run whole intervals.

    Args:
        contenders: Names.
        num_hosts: Numbers of hosts.
        wires: Each contender's wires; the one without a limit is what ratios refer to.
        repeats: Numbers of the repeats.
        sync_interval: H.
        overlap_steps: tau.
        intervals: Intervals that are measured.
        budget_s: About how long a contender that exchanges every step may take, in seconds.
        num_parameters: Of the model; for the budget.
    """
    for repeat in repeats:
        for hosts in num_hosts:
            for name in contenders:
                for wire in wires:
                    chosen = contender(name)
                    # local methods exchange nothing in the first interval, and everything once in the second
                    warmup, measured = 2 * sync_interval, intervals * sync_interval
                    if exchanges_every_step(chosen):
                        warmup = _WIDE_STEPS + 1
                        step_s = _STEP_S + _transfer_s(chosen, wire, num_hosts=hosts, num_parameters=num_parameters)
                        measured = max(_FEWEST_STEPS, min(measured, int(budget_s / step_s)))
                    yield GridCell(
                        contender=name, num_hosts=hosts, wire=wire, repeat=repeat, sync_interval=sync_interval,
                        overlap_steps=overlap_steps, wide_steps=_WIDE_STEPS, warmup_steps=warmup,
                        measured_steps=measured,
                    )  # fmt: skip


def check_numbers(
    *, num_hosts: Sequence[int], repeats: int, sync_interval: int, overlap_steps: int, intervals: int
) -> None:
    """Refuse numbers that no run can have.

    Raises:
        ValueError: One is too small, or tau is not below H; names it.
    """
    least = [("the number of hosts", hosts, 2) for hosts in num_hosts]
    least += [("the number of repeats", repeats, 1), ("H (sync interval)", sync_interval, 1)]
    least += [("the number of intervals", intervals, 1), ("tau (overlap steps)", overlap_steps, 0)]
    for what, value, lowest in least:
        if value < lowest:
            raise ValueError(f"{what} must be at least {lowest}, got {value}")
    if overlap_steps >= sync_interval:
        raise ValueError(
            f"tau (overlap steps) must be below H = {sync_interval}, since a round ends before the next begins, "
            f"got {overlap_steps}"
        )


def paced(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the contenders that can spread what they send over an overlap.

    Raises:
        ValueError: None can.
    """
    able = tuple(name for name in names if contender(name).has_overlap and not contender(name).is_reference)
    if not able:
        raise ValueError(
            f"--pace spreads what is sent over an overlap, and {', '.join(names)} "
            f"{'has' if len(names) == 1 else 'have'} none of ours; leave it out"
        )
    return able


def exchanges_every_step(chosen: Contender) -> bool:
    """Return whether a contender exchanges at every step."""
    return chosen.kind in ("every-step", "ddp")


def deadline_s(cell: GridCell, *, num_parameters: int = 3_050_000) -> float:
    """Return how long a run may take before something must have gone wrong: ten times what it should."""
    chosen = contender(cell.contender)
    transfer_s = _transfer_s(chosen, cell.wire, num_hosts=cell.num_hosts, num_parameters=num_parameters)
    steps = cell.warmup_steps + cell.measured_steps
    rounds = cell.measured_steps if exchanges_every_step(chosen) else steps / cell.sync_interval + 1
    return 120 + 10 * (steps * _STEP_S * cell.num_hosts + (rounds + 1) * transfer_s)


def _transfer_s(chosen: Contender, wire: BenchWire, *, num_hosts: int, num_parameters: int) -> float:
    if wire.rate_bits_per_s is None:
        return 0.0
    copies = 2 * (num_hosts - 1) / num_hosts if exchanges_every_step(chosen) else num_hosts - 1
    payload_bytes = num_parameters * _BYTES[chosen.codec]
    if chosen.powersgd_rank:
        payload_bytes /= _POWERSGD_FACTOR
    return copies * payload_bytes * 8 / wire.rate_bits_per_s
