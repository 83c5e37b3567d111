"""Makes folders of runs as `thinwire train` leaves them. The numbers are invented, and only look real."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PARAMETERS = 3_050_000
TOKENS_A_STEP = 1024


def write_run(
    path: Path,
    *,
    replicas: int = 2,
    steps: int = 300,
    log_every: int = 10,
    step_s: float = 0.4,
    interval: int = 30,
    method: str = "streaming-diloco",
    payload_bytes: int = 412_000,
    final_loss: float = 4.2,
    is_finished: bool = True,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """Write a run whose replicas send one payload to every other replica at the middle of each interval's thirds."""
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "run": {"replicas": replicas, "steps": steps, "seed": 0},
        "model": {"name": "nano", "compile": False},
        "data": {"source": "stdlib"},
        "sync": {
            "method": method, "sync_interval": interval, "overlap_steps": "3", "codec": "e3m0", "final_exchange": True,
        },
        "optimizer": {"lr": 3e-3},
        "output": {"out": str(path)},
        "thinwire_version": "0.1.0",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings | (config or {})))
    sent = 0
    for replica in range(replicas):
        sent = _write_replica(path, replica, replicas, steps, log_every, step_s, interval, payload_bytes, final_loss)
    if is_finished:
        allreduce_bytes = 2 * (replicas - 1) / replicas * 4 * PARAMETERS * steps
        values = {
            "method": method, "replicas": replicas, "steps": steps, "tokens": steps * TOKENS_A_STEP * replicas,
            "val_loss": final_loss, "wall_s": steps * step_s, "tokens_per_s": TOKENS_A_STEP * replicas / step_s,
            "payload_bytes": sent * 0.999, "wire_bytes_sent": sent, "wire_bytes_received": sent,
            "peak_bits_per_s": 3.3e6, "compute_utilisation": 0.987, "global_parameters_sha256": "ab" * 32,
            "model": "nano", "parameters": PARAMETERS, "allreduce_bytes": allreduce_bytes,
            "times_fewer_bytes": allreduce_bytes / sent if sent else None, "seed": 0,
            "machine": {"cpu": "a made-up processor", "cores": 2},
        }  # fmt: skip
        (path / "summary.json").write_text(json.dumps(values | (summary or {})))
    return path


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    """One line of metrics."""
    line = {"kind": "step", "step": step, "time_s": 0.4 * step, "loss": 5.0, "tokens": TOKENS_A_STEP * step}
    line |= {"tokens_per_s": 2560.0, "compute_fraction": 0.98, "sent_bytes": 1000 * step, "received_bytes": 900 * step}
    return line | {"sent_bits_per_s": 2e4, "peak_bits_per_s": 1.25e6, "rounds_in_flight": 1} | changes


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines as a run does."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _write_replica(
    path: Path, replica: int, replicas: int, steps: int, log_every: int, step_s: float, interval: int,
    payload_bytes: int, final_loss: float,
) -> int:  # fmt: skip
    noise = random.Random(replica)
    transfers, lines, sent = [], [], 0
    for step in range(1, steps + 1):
        time_s = step * step_s * (1 + 0.01 * replica)
        if replicas > 1 and step % max(1, interval // 3) == interval // 6:
            for peer in (other for other in range(replicas) if other != replica):
                sent += payload_bytes + 64
                took_s = noise.uniform(0.6, 1.1)
                for direction, late_s in (("sent", 0.0), ("received", 0.05)):
                    transfers.append(
                        {
                            "direction": direction,
                            "peer": peer,
                            "kind": "round",
                            "round_id": step,
                            "fragment": 0,
                            "phase": 0,
                            "payload_bytes": payload_bytes,
                            "wire_bytes": payload_bytes + 64,
                            "started_s": time_s + late_s,
                            "finished_s": time_s + late_s + took_s,
                            "error": "",
                        }
                    )
        if step % log_every == 0:
            loss = final_loss + 4.6 * math.exp(-6 * step / steps) + noise.gauss(0, 0.06)
            rate = 8 * sent / time_s
            lines.append(
                step_line(
                    step,
                    time_s=time_s,
                    loss=loss,
                    compute_fraction=noise.uniform(0.95, 1),
                    sent_bytes=sent,
                    received_bytes=sent,
                    sent_bits_per_s=rate,
                    peak_bits_per_s=3.3e6 if sent else 0.0,
                )
            )
        if replica == 0 and step % max(1, math.ceil(steps / 6)) == 0:
            loss = final_loss + 4.6 * (math.exp(-6 * step / steps) - math.exp(-6))
            tokens = step * TOKENS_A_STEP
            lines.append({"kind": "eval", "step": step, "time_s": time_s, "tokens": tokens, "val_loss": loss})
    append(path / f"metrics-replica-{replica}.jsonl", *lines)
    append(path / f"transfers-replica-{replica}.jsonl", *transfers)
    return sent
