"""Long sequences on one GPU: shared attention over every table against one process, and the streamed backward.

Ranks that share a sequence are threads of this process, since nccl takes one rank a GPU: kernels, tables and merging
are those of a real run, messages are copies. The streamed backward is held against checkpointing and against no
saving at all: gradients, time, peak memory, and the longest sequence in 16 GB.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from records import Part, finish, part_from_command_line
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import thinwire
from tests.sequence_ranks import ThreadPeers, on_ranks, whole_attention
from thinwire.sequences import POLICIES
from thinwire.sequences.block_tables import SequencePlan, sequence_plan
from thinwire.sequences.sharing import SequenceAttention
from thinwire.workloads.language import build_model
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer

BATCH, HEADS, WIDTH = 2, 8, 64
SITES = {2: ((0, 0), (0, 1)), 4: ((0, 0, 0, 0), (0, 0, 1, 1))}
LIMIT_BYTES = 16 * 2**30
CHUNKS = 8
KINDS = ("plain", "checkpoint", "streamed")


def plans(policy: str) -> list[SequencePlan]:
    """Return the plans of a policy at 2 and 4 ranks, one and two sites, with as many and with fewer heads of keys."""
    found = []
    for size, kv_heads in itertools.product(SITES, (HEADS, HEADS // 4)):
        for sites in SITES[size]:
            try:
                found.append(sequence_plan(policy, sites=sites, heads=HEADS, kv_heads=kv_heads))
            except ValueError:  # fewer heads than ranks, or one site alone
                continue
    return found


def gradients_of(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
    query, key, value = (one.detach().clone().requires_grad_() for one in tensors[:3])
    # else the backward passes of all ranks would wait for each other in the device's one thread
    output = attend(query, key, value)
    with torch.autograd.set_multithreading_enabled(False):
        (output * tensors[3]).sum().backward()
    return [output.detach(), *(one.grad for one in (query, key, value))]  # type: ignore[list-item]


def shared(plan: SequencePlan, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Return output and gradients of all positions, each from the rank that has it."""

    def work(peers: ThreadPeers) -> Any:
        attend = SequenceAttention(plan, peers)
        attend.set_documents(documents)
        own = attend.own_positions(tensors[0].shape[2]).to(tensors[0].device)
        return own, gradients_of(attend, [one[:, :, own] for one in tensors])

    found = [torch.zeros_like(one) for one in (tensors[0], *tensors[:3])]
    for own, parts in on_ranks(plan.num_ranks, work)[0]:
        for into, part in zip(found, parts, strict=True):
            into[:, :, own] = part
    return found


def off(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest relative distance of output and gradients."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def tables(policy: str, dtype: torch.dtype, part: Part, *, packed: bool = False) -> dict[str, Any]:
    """Compare shared attention with float64 in one process; bfloat16 may be off as much as torch's own kernel is."""
    worst = own = 0.0
    for plan in plans(policy):
        generator = torch.Generator().manual_seed(plan.num_ranks)
        length = plan.num_parts * (16 if part.is_tiny else 128)
        shapes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, plan.kv_heads, plan.kv_heads, HEADS)]
        tensors = [torch.randn(shape, generator=generator).to(part.device, dtype) for shape in shapes]
        documents = None
        if packed:
            documents = (torch.arange(length) // (length // 3 + 1)).expand(BATCH, -1).to(part.device)
        exact = gradients_of(lambda q, k, v: whole_attention(q, k, v, documents), [one.double() for one in tensors])  # noqa: B023
        worst = max(worst, off(shared(plan, tensors, documents), exact))
        own = max(own, off(gradients_of(lambda q, k, v: whole_attention(q, k, v, documents), tensors), exact))  # noqa: B023
    allowed = 1e-12 if dtype == torch.float64 else 2 * own
    if worst > allowed:
        raise AssertionError(f"{policy} in {dtype} is off by {worst:.2e}; torch's own attention by {own:.2e}")
    return {"plans": len(plans(policy)), "off": worst, "own_off": own}


def attention_times(part: Part) -> dict[str, Any]:
    """Time one long block forward and backward, beside torch's attention of the same inputs."""
    module = importlib.import_module("thinwire.sequences.block_attention")
    length = 256 if part.is_tiny else 16_384
    make = lambda: torch.randn(1, 16, length, 128, device=part.device, dtype=torch.bfloat16)  # noqa: E731
    query, key, value, grad = make(), make(), make(), make()
    mask = module.BlockMask(is_causal=True)

    def ours() -> None:
        output, sums = module.attend(query, key, value, scale=0.1, mask=mask)
        module.attend_backward(grad, query, key, value, output, sums, scale=0.1, mask=mask)

    leaves = [one.clone().requires_grad_() for one in (query, key, value)]

    def torchs() -> None:
        torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.1).backward(grad)

    found: dict[str, Any] = {"length": length, "ours_s": part.timed(ours), "torchs_s": part.timed(torchs)}
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if part.device.type == "cuda":
            with sdpa_kernel(kind):
                found[f"{kind.name.lower()}_s"] = part.timed(torchs)
    return found


def decoder(kind: str, shape: TransformerConfig, part: Part) -> Any:
    model: Any = build_transformer(shape, seed=1).to(part.device)
    model.recompute = kind == "checkpoint"
    return thinwire.streamed(model, chunks=CHUNKS) if kind == "streamed" else model


def one_pass(model: Any, tokens: Tensor, *, autocast: bool) -> None:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model.loss(tokens, tokens)[0]
    loss.backward()


def streamed_gradients(part: Part) -> dict[str, Any]:
    """Compare gradients of the streamed backward with float64's, beside how near the plain model's are."""
    shape = TransformerConfig(vocab_size=2048, dim=192, layers=4, heads=4, max_seq_len=2048)
    tokens = torch.randint(2048, (2, 96 if part.is_tiny else 2048), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(part.device)

    def gradients(kind: str, dtype: torch.dtype, autocast: bool = False) -> list[Tensor]:
        model = decoder(kind, shape, part).to(dtype)
        one_pass(model, tokens, autocast=autocast)
        return [p.grad for p in model.parameters()]

    exact = gradients("plain", torch.float64)
    found: dict[str, Any] = {"float64": off(gradients("streamed", torch.float64), exact)}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        own = off(gradients("plain", torch.float32, autocast), exact)
        found |= {name: off(gradients("streamed", torch.float32, autocast), exact), f"{name}_plain": own}
        if found[name] > 2 * own:
            raise AssertionError(f"streamed gradients in {name} are off by {found[name]:.2e}, plain ones by {own:.2e}")
    if found["float64"] > 1e-12:
        raise AssertionError(f"streamed gradients in float64 are off by {found['float64']:.2e}")
    return found


def streamed_costs(preset: str, length: int, part: Part, *, chunks: int = CHUNKS) -> dict[str, Any]:
    """Measure time and peak memory of a pass, without anything saved, with checkpointing, and streamed."""
    tokens = torch.randint(2048 if part.is_tiny else 32_000, (1, length)).to(part.device)
    found: dict[str, Any] = {"preset": preset, "length": length, "chunks": chunks}
    times: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        model: Any = build_model(preset, seed=1, max_seq_len=length, device=part.device)
        model.recompute = kind == "checkpoint"
        model = thinwire.streamed(model, chunks=chunks) if kind == "streamed" else model

        def once(model: Any = model) -> None:
            one_pass(model, tokens % model.vocab_size, autocast=True)

        once()
        with part.peak_bytes() as peak:
            once()
            found[f"{kind}_peak_bytes"] = peak()
        times[kind] = part.timed(once, repeats=3, warm_ups=0)
        if kind == "streamed":
            found["kernels_s"] = kernel_s(once, part)
        del once
        model = None
    return {**found, "pass_s": times, "time_ratio": times["streamed"]["median"] / times["checkpoint"]["median"]}


def kernel_s(work: Any, part: Part) -> float:
    """Return the seconds that the device computes in some work: where they are fewer than it takes, it waits."""
    if part.device.type == "cpu":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
        work()
        part.wait()
    return float(sum(event.self_device_time_total for event in told.key_averages())) / 1e6


def longest(part: Part) -> dict[str, Any]:
    """Find the longest sequence of 150m that fits 16 GB, in steps of a fifth."""
    found: dict[str, Any] = {"preset": "150m", "limit_bytes": LIMIT_BYTES}
    share = LIMIT_BYTES / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        for kind in KINDS:
            length, found[kind] = {"plain": 8192, "checkpoint": 32_768, "streamed": 98_304}[kind], 0
            while length < 700_000:
                try:
                    model: Any = build_model("150m", seed=1, max_seq_len=length, device=part.device)
                    model.recompute = kind == "checkpoint"
                    model = thinwire.streamed(model, chunks=CHUNKS) if kind == "streamed" else model
                    one_pass(model, torch.randint(32_000, (1, length)).to(part.device), autocast=True)
                except torch.OutOfMemoryError:
                    break
                finally:
                    model = None
                    torch.cuda.empty_cache()
                found[kind], length = length, length * 6 // 5 // 128 * 128
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def main() -> None:
    part = part_from_command_line("sequence", __doc__ or "")
    torch.backends.cuda.matmul.allow_tf32 = False
    for policy in POLICIES[1:]:
        part.measure(f"tables {policy} float64", lambda p=policy: tables(p, torch.float64, part))  # type: ignore[misc]
        part.measure(f"tables {policy} bfloat16", lambda p=policy: tables(p, torch.bfloat16, part))  # type: ignore[misc]
    part.measure("tables documents", lambda: tables("ring", torch.float64, part, packed=True))
    part.measure("streamed gradients", lambda: streamed_gradients(part))
    if part.is_tiny:
        part.measure("streamed nano 128", lambda: streamed_costs("tiny", 128, part))
        part.measure("attention", lambda: attention_times(part))
        finish(part)
    part.measure("attention", lambda: attention_times(part))
    for preset, length, chunks in (("150m", 16_384, 8), ("150m", 65_536, 8), ("150m", 65_536, 4), ("1b", 32_768, 8)):
        name = f"streamed {preset} {length}" + (f" in {chunks}" if chunks != CHUNKS else "")
        part.measure(name, lambda p=preset, n=length, c=chunks: streamed_costs(p, n, part, chunks=c), needs_s=20)  # type: ignore[misc]
    part.measure("longest", lambda: longest(part), needs_s=30)
    finish(part)


if __name__ == "__main__":
    main()
