"""Runner of the wire benchmark: starts a contender on a lab's hosts, and joins its numbers with the kernel's."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import WorkerFailed
from thinwire.lab import HostProcess, Lab
from thinwire.lab.counters import Sample, at, between, peak_rate, sent_by
from thinwire.lab.wire_benchmark.grid import BenchWire, GridCell, deadline_s

_START_S = 180.0
_BEAT_S = 0.02
_LAST_CHARACTERS = 2_000


def run_cell(cell: GridCell, *, cache_dir: Path, timeout_s: float | None = None) -> dict[str, Any]:
    """Run one contender on one wire.

    The hosts meet without limits; then the wire becomes thin, the warm-up goes on, and the measured steps begin.

    Args:
        cell: What runs.
        cache_dir: Keeps the tokenised corpus, which must be there already.
        timeout_s: Seconds for the run; ten times what it should take by default.

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
                _wait_until_ready(processes, gate, output=folder / "output")
                lab.shape(cell.wire.settings(cell.num_hosts))
                gate.write_text("")
                _wait_until_done(processes, output=folder / "output", limit_s=limit_s)
            hosts = [json.loads((folder / f"host-{host}.json").read_text()) for host in range(cell.num_hosts)]
            return {"cell": cell.to_json(), "hosts": hosts, "kernel": kernel_numbers(lab.samples(), hosts)}


def kernel_numbers(samples: Sequence[Sample], hosts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the kernel counted for each host: in the measured steps, and to the end of its process.

    A message counts as sent when the kernel has taken it; its last bytes leave later. So bytes are held against
    payloads from the gate, where nothing is on its way, to the very end, where all has left.

    Args:
        samples: The lab's.
        hosts: The hosts' own numbers, which say when their spans began and ended.
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
    return {
        "contender": hosts[0]["contender"],
        "num_hosts": len(hosts),
        "wire": BenchWire(**result["cell"]["wire"]),
        "repeat": result["cell"]["repeat"],
        "pace": result["cell"]["pace"],
        "measured_steps": result["cell"]["measured_steps"],
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "sent_bytes_per_step": statistics.fmean(n["sent_bytes"] for n in kernel) / result["cell"]["measured_steps"],
        "peak_bits_per_s": max(numbers["peak_sent_bits_per_s"] for numbers in kernel),
        "stalled_s": None if None in stalls else statistics.fmean(stalls),
        "bytes_over_payload": sent / sum(payload) if all(payload) else None,
        "val_loss": hosts[0]["val_loss"],
    }


def _command(cell: GridCell, *, folder: Path, gate: Path, cache_dir: Path, timeout_s: float) -> list[str]:
    options = {
        "contender": cell.contender,
        "steps": cell.warmup_steps + cell.measured_steps,
        "warmup-steps": cell.warmup_steps,
        "sync-interval": cell.sync_interval,
        "overlap-steps": cell.overlap_steps,
        "result": folder / "host-{rank}.json",
        "gate": gate,
        "gate-step": cell.wide_steps,
        "cache-dir": cache_dir,
        "timeout-s": timeout_s,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    pace = ["--pace"] if cell.pace else []
    return [sys.executable, "-m", "thinwire.cli.processes", "bench-host", *arguments, *pace]


def _wait_until_ready(processes: Sequence[HostProcess], gate: Path, *, output: Path) -> None:
    waiting = {process.host: gate.with_name(f"{gate.name}.{process.host}") for process in processes}
    end_s = time.monotonic() + _START_S
    while not all(path.exists() for path in waiting.values()):
        _check(processes, output=output)
        if time.monotonic() > end_s:
            raise TimeoutError(f"the hosts were not ready within {_START_S:g} s: {_tail(output)}")
        time.sleep(_BEAT_S)


def _wait_until_done(processes: Sequence[HostProcess], *, output: Path, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while any(process.exit_code is None for process in processes):
        _check(processes, output=output)
        if time.monotonic() > end_s:
            raise TimeoutError(f"the run has not ended within {limit_s:.0f} s: {_tail(output)}")
        time.sleep(_BEAT_S)
    _check(processes, output=output)


def _check(processes: Sequence[HostProcess], *, output: Path) -> None:
    for process in processes:
        if process.exit_code:
            raise WorkerFailed(f"host {process.host} ended with exit code {process.exit_code}: {_tail(output)}")


def _tail(output: Path) -> str:
    return " ".join(output.read_text(errors="replace")[-_LAST_CHARACTERS:].split())
