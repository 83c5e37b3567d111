"""Grid and runner of the wire benchmark: a contender on a lab's hosts, its numbers and the kernel's."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import WorkerFailed, excluded, refusal
from thinwire.lab import HostProcess, Lab
from thinwire.lab.counters import Sample, at, between, peak_rate, sent_by
from thinwire.lab.settings import Access, LabSettings, Link
from thinwire.wire_benchmark.contenders import Contender, contender

# What a step of `nano` with the default batch takes on one core, to the nearest power of two: only for budgets.
_STEP_S = 0.25
_FEWEST_STEPS = 2
_WIDE_STEPS = 2
_NUM_PARAMETERS = 3_050_000  # of the benchmark's model, for estimates of time
# Bytes a value, as the codecs state them; here too, since a command line is checked before torch is imported.
CODEC_BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "e3m0": 4.125 / 8, "block-2bit": 2.0625 / 8, "chunked-top-k-2bit": 0.234375 / 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWire:
    """Network between the hosts of a run.

    Attributes:
        rate_bits_per_s: Each host's access, both ways; None is no limit.
        loss: Probability that a packet is lost.
    """

    rate_bits_per_s: float | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def settings(self, num_hosts: int) -> LabSettings:
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
        wide_steps: First steps, on a wire without limits.
        warmup_steps: Steps that are not measured, those among them: on the thin wire there is one exchange of
            everything before the measured ones, so that TCP knows the wire.
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
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GridCell:
        return cls(**{**values, "wire": BenchWire(**values["wire"])})


def cells(
    *, contenders: Sequence[str], num_hosts: Sequence[int], wires: Sequence[BenchWire], repeats: Iterable[int],
    sync_interval: int = 30, overlap_steps: int = 6, intervals: int = 2, budget_s: float = 120.0,
) -> Iterator[GridCell]:  # fmt: skip
    """Yield the runs, a contender's wires one after the other, so that ratios compare what ran at the same time.

    A contender that exchanges every step runs so many of them as fit the budget, because a step of it can take minutes;
    the others run whole intervals.
    """
    for repeat in repeats:
        for hosts in num_hosts:
            for name in contenders:
                for wire in wires:
                    chosen = contender(name)
                    # local methods exchange nothing in the first interval, and everything once in the second
                    warmup, measured = 2 * sync_interval, intervals * sync_interval
                    if chosen.kind == "every-step":
                        warmup = _WIDE_STEPS + 1
                        step_s = _STEP_S + _transfer_s(chosen, wire, num_hosts=hosts)
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
            raise refusal(f"{what} is too small", got=value, allowed=f"{lowest} or more", remedy=f"{max(1, lowest)}")
    if overlap_steps >= sync_interval:
        raise refusal(
            f"tau (overlap steps) is not below H, which is {sync_interval}", got=overlap_steps,
            allowed=f"0 to {sync_interval - 1}", remedy=f"--overlap-steps {min(1, sync_interval - 1)}",
        )  # fmt: skip


def paced(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the contenders that can spread what they send over an overlap.

    Raises:
        ValueError: None can.
    """
    able = tuple(name for name in names if contender(name).has_overlap and not contender(name).is_reference)
    if not able:
        why = "nothing overlaps there, or it is no method of thinwire"
        raise excluded("--pace", ", ".join(names), why=why, remedy="to leave it out")
    return able


def deadline_s(cell: GridCell) -> float:
    """Return how long a run may take before something must have gone wrong: ten times what it should."""
    chosen = contender(cell.contender)
    transfer_s = _transfer_s(chosen, cell.wire, num_hosts=cell.num_hosts)
    steps = cell.warmup_steps + cell.measured_steps
    rounds = cell.measured_steps if chosen.kind == "every-step" else steps / cell.sync_interval + 1
    return 120 + 10 * (steps * _STEP_S * cell.num_hosts + (rounds + 1) * transfer_s)


def _transfer_s(chosen: Contender, wire: BenchWire, *, num_hosts: int) -> float:
    if wire.rate_bits_per_s is None:
        return 0.0
    copies = 2 * (num_hosts - 1) / num_hosts if chosen.kind == "every-step" else num_hosts - 1
    payload_bytes = _NUM_PARAMETERS * CODEC_BYTES[chosen.codec] * chosen.payload_share
    return copies * payload_bytes * 8 / wire.rate_bits_per_s


_START_S = 180.0
_BEAT_S = 0.02
_LAST_CHARACTERS = 2_000


def run_cell(cell: GridCell, *, cache_dir: Path, timeout_s: float | None = None) -> dict[str, Any]:
    """Run one contender on one wire.

    The hosts meet without limits; then the wire becomes thin, the warm-up goes on, and the measured steps begin.

    Returns:
        The cell, each host's numbers, and the kernel's.

    Raises:
        LabError: This machine cannot make the lab.
        WorkerFailed: A host's process ended; names it and its last output.
        TimeoutError: The run took too long.
    """
    limit_s = deadline_s(cell) if timeout_s is None else timeout_s
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as name:
        folder = Path(name)
        with Lab.of(BenchWire().settings(cell.num_hosts), folder=folder / "lab", can_delay=cell.wire.is_delayed) as lab:
            gate = folder / "gate"
            with (folder / "output").open("wb") as output:
                command = _command(cell, folder=folder, gate=gate, cache_dir=cache_dir, timeout_s=limit_s)
                processes = lab.start_all(command, stdout=output, stderr=output)
                ready = [gate.with_name(f"{gate.name}.{process.host}") for process in processes]
                _wait_until(
                    lambda: all(path.exists() for path in ready), processes, output=folder / "output",
                    limit_s=_START_S, what="the hosts were not ready",
                )  # fmt: skip
                lab.shape(cell.wire.settings(cell.num_hosts))
                gate.write_text("")
                _wait_until(
                    lambda: all(process.exit_code is not None for process in processes), processes,
                    output=folder / "output", limit_s=limit_s, what="the run has not ended",
                )  # fmt: skip
            hosts = [json.loads((folder / f"host-{host}.json").read_text()) for host in range(cell.num_hosts)]
            return {"cell": cell.to_json(), "hosts": hosts, "kernel": kernel_numbers(lab.samples(), hosts)}


def kernel_numbers(samples: Sequence[Sample], hosts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the kernel counted for each host: in the measured steps, and to the end of its process.

    A message counts as sent when the kernel has taken it; its last bytes leave later. So bytes are held against
    payloads from the gate, where nothing is on its way, to the very end, where all has left.
    """
    found = []
    for rank, host in enumerate(hosts):
        gate_s, began_s, ended_s = host["gate_unix_s"], host["started_unix_s"], host["ended_unix_s"]
        steps = between(samples, start_s=began_s, end_s=ended_s)
        found.append(
            {
                "sent_bytes": steps[-1].sent_bytes[rank] - steps[0].sent_bytes[rank],
                "sent_bytes_since_gate": samples[-1].sent_bytes[rank] - at(samples, time_s=gate_s).sent_bytes[rank],
                "peak_sent_bits_per_s": peak_rate(sent_by(steps, host=rank)),
            }
        )
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return a run's few numbers for the table.

    Rates and bytes are the mean over hosts, the peak the highest; what only thinwire counts is None for references.
    """
    hosts, kernel = result["hosts"], result["kernel"]
    wall_s = max(host["wall_s"] for host in hosts)
    tokens = sum(host["tokens"] for host in hosts)
    stalls = [host["stalled_s"] for host in hosts]
    payload = [host["gate_payload_bytes_sent"] for host in hosts]
    sent = sum(numbers["sent_bytes_since_gate"] for numbers in kernel)
    cell = result["cell"]
    return {
        **{name: cell[name] for name in ("repeat", "pace", "measured_steps")}, "contender": hosts[0]["contender"],
        "num_hosts": len(hosts), "wire": BenchWire(**cell["wire"]), "tokens_per_s": tokens / wall_s, "wall_s": wall_s,
        "sent_bytes_per_step": statistics.fmean(n["sent_bytes"] for n in kernel) / cell["measured_steps"],
        "peak_bits_per_s": max(numbers["peak_sent_bits_per_s"] for numbers in kernel),
        "stalled_s": None if None in stalls else statistics.fmean(stalls),
        "bytes_over_payload": sent / sum(payload) if all(payload) else None,
        "val_loss": hosts[0]["val_loss"],
    }  # fmt: skip


def _command(cell: GridCell, *, folder: Path, gate: Path, cache_dir: Path, timeout_s: float) -> list[str]:
    options = {
        "contender": cell.contender, "steps": cell.warmup_steps + cell.measured_steps,
        "warmup-steps": cell.warmup_steps, "sync-interval": cell.sync_interval, "overlap-steps": cell.overlap_steps,
        "result": folder / "host-{rank}.json", "gate": gate, "gate-step": cell.wide_steps, "cache-dir": cache_dir,
        "timeout-s": timeout_s,
    }  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    pace = ["--pace"] if cell.pace else []
    return [sys.executable, *contender(cell.contender).program, "bench-host", *arguments, *pace]


def _wait_until(
    is_so: Callable[[], bool], processes: Sequence[HostProcess], *, output: Path, limit_s: float, what: str
) -> None:
    """Wait for the hosts, none of which may fail meanwhile."""
    end_s = time.monotonic() + limit_s
    while True:
        is_over = is_so()
        for process in processes:
            if process.exit_code:
                raise WorkerFailed(f"host {process.host} ended with exit code {process.exit_code}: {_tail(output)}")
        if is_over:
            return
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} within {limit_s:.0f} s: {_tail(output)}")
        time.sleep(_BEAT_S)


def _tail(output: Path) -> str:
    return " ".join(output.read_text(errors="replace")[-_LAST_CHARACTERS:].split())
