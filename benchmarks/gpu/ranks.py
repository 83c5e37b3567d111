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

_EXPERTS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from thinwire import experts
from thinwire.codecs.activation_code import ActivationCode
device, rank = torch.device(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (2,))
tokens = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1)).to(device)
worst = {}
for name, code in (("uncoded", None), ("block-int4", ActivationCode("block-int4", "block-int4"))):
    outputs, grads = {}, {}
    for kind in ("alone", "shared"):
        torch.manual_seed(0)
        layer = experts.ExpertLayer(64, 96, 8, 2)
        model = torch.nn.Sequential(layer).to(device)
        if kind == "shared":
            experts.parallelize(model, mesh, dispatch=experts.tokens(code=code))
        own = (tokens[rank] if kind == "shared" else tokens.flatten(0, 1)).clone().requires_grad_()
        found = model(own)
        found.square().mean().backward()
        up = layer.up.grad.to_local() if kind == "shared" else layer.up.grad[4 * rank : 4 * rank + 4]
        rows = slice(None) if kind == "shared" else slice(300 * rank, 300 * rank + 300)
        outputs[kind], grads[kind] = found[rows].detach(), up
    off = lambda a, b: float((a - b).norm() / b.norm())
    worst[name] = max(off(outputs["shared"], outputs["alone"]), off(grads["shared"], grads["alone"]))
if rank == 0:
    print("OFF", worst["uncoded"], worst["block-int4"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""
TOLERANCE = 1e-3  # of the loss, relative: float32 sums in another order, ten steps of Adam
# Ten steps of linear-nano turn a change of its weights by 1e-7 into one of its losses by 2e-3, also on a CPU.
LINEAR_TOLERANCE = 1e-2
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "sharded": ("--dp-shard", "2"),
    "tensors": ("--tp", "2"),
    "sequences": ("--cp", "2", "--stream-backward", "4"),
    "pipeline": ("--pp", "2", "--micro-batch", "2", "--activation-code", "float32/float32"),
    "pipeline over the wire": ("--pp", "2", "--micro-batch", "2", "--activation-code", "float32/float32"),
    "pipeline in 8 and 4 bits": ("--pp", "2", "--micro-batch", "2", "--activation-code", "block-int8/block-int4"),
}


def run_ranks(ranks: int, command: list[str], said: Path, *, numbered: bool = False) -> str:
    """Run a command as each rank, on a host of its own for nccl; return what rank 0 said."""
    port, processes = free_port(), []
    files = [said.with_name(f"{said.name}-{rank}.txt") for rank in range(ranks)]
    for rank, file in enumerate(files):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
        }  # fmt: skip
        whole = [*command, *([str(rank)] if numbered else [])]
        with file.open("w") as into:
            processes.append(subprocess.Popen(whole, env=environment, stdout=into, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=70) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}: {[file.read_text()[-900:] for file in files]}")
    return files[0].read_text()


def experts_agree(part: Part, folder: Path) -> dict[str, Any]:
    """Share a layer's experts over two ranks, and compare output and gradients with the layer in one process."""
    device = part.device.type
    said = run_ranks(2, [sys.executable, "-c", _EXPERTS, device], folder / "experts", numbered=True)
    exact, coded = map(float, said.split("OFF ")[1].split()[:2])
    if exact > 1e-5:
        raise AssertionError(f"a shared layer of experts is off by {exact:.1e}; allowed 1e-5")
    return {"off": exact, "off_in_4_bits": coded}


def trained(layout: str, part: Part, folder: Path, *, model: str = "nano", device: str = "") -> dict[str, Any]:
    """Train in a layout; return the losses of the run."""
    device = device or part.device.type
    run, ranks = folder / f"{model}-{device}-{layout.replace(' ', '-')}", 1 if layout == "one rank" else 2
    command = [
        sys.executable, "-m", "thinwire.cli.main", "train", "--replicas", "1",
        "--model", "tiny" if part.is_tiny and model == "nano" else model,
        "--data", str(Path(thinwire.__file__).parent / "codecs"),
        "--tokenizer", "bytes", "--steps", "10", "--batch-size", "4", "--seq-len", "32" if part.is_tiny else "256",
        "--device", device, "--cache-dir", str(folder), "--no-samples", "--threads", "1",
        "--eval-every", "0", "--log-every", "1", "--out", str(run), *LAYOUTS[layout],
    ]  # fmt: skip
    if layout == "pipeline over the wire":
        secret = folder / "secret"
        if not secret.exists():
            make = [sys.executable, "-m", "thinwire.cli.main", "secret", str(secret)]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=60)
        command += ["--secret", str(secret)]
    run_ranks(ranks, command, folder / run.name)
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


def linear_agrees(part: Part, folder: Path) -> dict[str, Any]:
    """Train a decoder with linear attention on the device and on the CPU, and compare the losses."""
    here, there = (
        trained("one rank", part, folder, model="linear-nano", device=device)["losses"]
        for device in ("cpu", part.device.type)
    )
    off = max(abs(a - b) / b for a, b in zip(there, here, strict=True))
    if off > LINEAR_TOLERANCE:
        raise AssertionError(f"losses are {off:.1e} off those of a CPU: {there}, {here}")
    return {"off": off}


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
        if not part.is_tiny:
            part.measure("linear", lambda: linear_agrees(part, Path(folder)), needs_s=15.0)
        part.measure("experts", lambda: experts_agree(part, Path(folder)), needs_s=1.0 if part.is_tiny else 15.0)
    finish(part)


if __name__ == "__main__":
    main()
