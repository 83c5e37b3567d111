"""Replicas of two ranks on one GPU by `thinwire train`: sharded, along sequences, along layers, as a pipeline.

nccl refuses two ranks on one GPU of one host. Each rank gets a host name of its own here (`NCCL_HOSTID`), so nccl talks
over sockets, as between two sites. It is slow and no speed is taken from it; losses must be those of one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from records import Part, finish, part_from_command_line
from watch import free_port

import thinwire

TOLERANCE = 1e-3  # of the loss, relative: float32 sums in another order, ten steps of Adam
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "sharded": ("--dp-shard", "2"),
    "tensors": ("--tp", "2"),
    "sequences": ("--cp", "2", "--stream-backward", "4"),
    "pipeline": ("--pp", "2", "--micro-batch", "2", "--activation-code", "float32/float32"),
    "pipeline over the wire": ("--pp", "2", "--micro-batch", "2", "--activation-code", "float32/float32"),
    "pipeline in 8 and 4 bits": ("--pp", "2", "--micro-batch", "2", "--activation-code", "block-int8/block-int4"),
}


def trained(layout: str, part: Part, folder: Path) -> dict[str, Any]:
    """Train in a layout; return the losses of the run and what its ranks said of themselves."""
    run, ranks = folder / layout.replace(" ", "-"), 1 if layout == "one rank" else 2
    command = [
        sys.executable, "-m", "thinwire.cli.main", "train", "--replicas", "1",
        "--model", "tiny" if part.is_tiny else "nano", "--data", str(Path(thinwire.__file__).parent / "codecs"),
        "--tokenizer", "bytes", "--steps", "10", "--batch-size", "4", "--seq-len", "32" if part.is_tiny else "256",
        "--device", part.device.type, "--cache-dir", str(folder), "--no-samples", "--threads", "1",
        "--eval-every", "0", "--log-every", "1", "--out", str(run), *LAYOUTS[layout],
    ]  # fmt: skip
    if layout == "pipeline over the wire":
        secret = folder / "secret"
        if not secret.exists():
            make = [sys.executable, "-m", "thinwire.cli.main", "secret", str(secret)]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=60)
        command += ["--secret", str(secret)]
    port, processes = free_port(), []
    for rank in range(ranks):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
        }  # fmt: skip
        said = (folder / f"{run.name}-{rank}.txt").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=70) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        said_last = [(folder / f"{run.name}-{rank}.txt").read_text()[-900:] for rank in range(ranks)]
        raise RuntimeError(f"ranks ended with {codes}: {said_last}")
    lines = [json.loads(text) for file in sorted(run.glob("**/*.jsonl")) for text in file.read_text().splitlines()]
    losses = {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line and "step" in line}
    if not losses:
        raise RuntimeError(f"no loss under {[str(one) for one in run.rglob('*')][:30]}")
    return {"losses": [losses[step] for step in sorted(losses)]}


def compared(layout: str, wanted: list[float], part: Part, folder: Path) -> dict[str, Any]:
    """Train in a layout, and compare its losses with one rank's."""
    found = trained(layout, part, folder)["losses"]
    off = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
    if off > (0.05 if "bits" in layout else TOLERANCE):
        raise AssertionError(f"losses are {off:.1e} off those of one rank: {found}, {wanted}")
    return {"off": off, "steps": len(found)}


def main() -> None:
    part = part_from_command_line("ranks", __doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        alone = part.measure("one rank", lambda: trained("one rank", part, Path(folder)))
        if alone is not None and "losses" in alone:
            for layout in list(LAYOUTS)[1 : 2 if part.is_tiny else None]:
                part.measure(
                    layout,
                    lambda x=layout: compared(x, alone["losses"], part, Path(folder)),  # type: ignore[misc]
                    needs_s=1.0 if part.is_tiny else 15.0,
                )
    finish(part)


if __name__ == "__main__":
    main()
