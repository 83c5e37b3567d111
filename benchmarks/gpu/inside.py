"""Inside a replica on a GPU: FSDP2, text generation, `bench profile`, and the site planner's step time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import Part, finish, part_from_command_line
from step import Echo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire.site.cost_model import Layout, StepCost, decoder_shape
from thinwire.site.device_grid import Degrees
from thinwire.site.search import starts
from thinwire.site.site_file import Site, SiteNode
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.step_profile import profile_step
from thinwire.workloads.language import build_model
from thinwire.workloads.language.presets import PRESETS

COMMAND = [sys.executable, "-m", "thinwire.cli.main"]


def sharded(part: Part) -> dict[str, Any]:
    """Train under FSDP2 of one rank and without it: the global parameters must have the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if part.device.type == "cuda" else "gloo"
        if part.device.type == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh(part.device.type, (1,))
            plain, under_fsdp = trained(part, mesh=None), trained(part, mesh=mesh)
        finally:
            dist.destroy_process_group()
    off = max(float((a - b).abs().max()) for a, b in zip(plain, under_fsdp, strict=True))
    if off > 1e-6:
        raise AssertionError(f"parameters under FSDP2 are off by {off:.2e}; allowed 1e-6")
    return {"largest_difference": off}


def trained(part: Part, *, mesh: Any) -> list[torch.Tensor]:
    model = build_model("tiny" if part.is_tiny else "nano", seed=0, max_seq_len=32, device=part.device)
    if mesh is not None:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    method = thinwire.methods.diloco(sync_interval=3)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=Echo())
    generator = torch.Generator().manual_seed(0)
    for _ in range(7):
        tokens = torch.randint(257, (2, 32), generator=generator).to(part.device)
        # called as a module, so that FSDP2's hooks run
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close(final_exchange=True)
    with optimizer.global_parameters():
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return [p.detach().float().cpu().clone() for p in whole]


def generated(part: Part) -> dict[str, Any]:
    """Train a little, and let both devices go on with a text, the likeliest token each time."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            *COMMAND, "train", "--replicas", "1", "--model", "tiny" if part.is_tiny else "nano",
            "--data", str(Path(thinwire.__file__).parent / "codecs"), "--tokenizer", "bytes", "--steps", "20",
            "--batch-size", "4", "--seq-len", "64", "--device", part.device.type, "--cache-dir", folder,
            "--no-samples", "--threads", "1", "--eval-every", "0", "--out", str(run),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        texts = []
        for device in (part.device.type, "cpu"):
            command = [*COMMAND, "generate", str(run), "--prompt", "def ", "--max-tokens", "32", "--temperature", "0"]
            found = subprocess.run([*command, "--device", device], check=True, capture_output=True, timeout=60)
            texts.append(found.stdout.decode(errors="replace"))
    return {"same_text": texts[0] == texts[1], "characters": len(texts[0])}


def profiled(name: str, part: Part) -> dict[str, Any]:
    """Profile a step as `thinwire bench profile` does."""
    batch, seq_len = (2, 32) if part.is_tiny else (8, 1024)
    wanted = TrainConfig.of(
        model=name, batch_size=batch, seq_len=seq_len, device=part.device.type, threads=1, method="iso-loco"
    )
    config = resolve(wanted, world_size=1, cores=1, home=Path.home())
    return profile_step(config, steps=3).to_json()


def planned(small: str, large: str, part: Part) -> dict[str, Any]:
    """Predict a larger model's step from the speed of a smaller one, and measure it."""
    profiles = {name: profiled(name, part) for name in (small, large)}
    batch, seq_len = (2, 32) if part.is_tiny else (8, 1024)

    def step_s(name: str, flops_per_s: float) -> float:
        shape = PRESETS[name]
        node = SiteNode(
            name="box", devices=1, memory_bytes=1e12, flops_per_s=flops_per_s, bandwidth_bits_per_s=1e12, latency_s=0.0
        )
        model = decoder_shape(
            layers=shape.layers, width=shape.dim, heads=shape.heads, vocab_size=shape.vocab_size, seq_len=seq_len,
            is_head_tied=True,
        )  # fmt: skip
        layout = Layout(degrees=Degrees(), global_batch=batch, micro_batch=batch)
        return float(
            StepCost(model=model, layout=layout, placement=starts(Site(nodes=(node,)), layout.degrees)[0]).step_s
        )

    def passes_s(name: str) -> float:
        return float(profiles[name]["forward_s"] + profiles[name]["backward_s"])

    speed = 1e12 * step_s(small, 1e12) / passes_s(small)
    predicted = step_s(large, speed)
    return {
        "from": small, "to": large, "flops_per_s": speed, "predicted_s": predicted, "measured_s": passes_s(large),
        "error": predicted / passes_s(large) - 1, "profiles": profiles,
    }  # fmt: skip


def main() -> None:
    part = part_from_command_line("inside", __doc__ or "")
    part.measure("fsdp2", lambda: sharded(part))
    part.measure("generate", lambda: generated(part))
    if part.is_tiny:
        part.measure("profile", lambda: profiled("tiny", part))
    else:
        part.measure("planned step", lambda: planned("150m", "400m", part), needs_s=15.0)
    finish(part)


if __name__ == "__main__":
    main()
