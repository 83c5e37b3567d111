"""Whether a GPU computes what a CPU does: bytes of codes, integer products, every method, kill and resume.

Codecs and integer products must agree bit for bit. Methods train ten steps with two replicas on both; their inner steps
round differently on each, and a lossy code can turn a difference of the last bit into one of a step of the code. So the
parameters may differ by `METHOD_TOLERANCE` of the way that they moved. Two replicas of one run must agree bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from records import Part, finish, part_from_command_line

import thinwire
from tests.reference.every_method import ARGUMENTS, inner_of, one_step
from tests.reference.small_models import build
from thinwire.codecs import NAMES, Codec, by_name, chunked_top_k, dct_top_k, random_k, sign, top_k
from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.channel_bits import AdaptiveBits
from thinwire.codecs.delta_memory import DeltaMemory
from thinwire.errors import NonFiniteError
from thinwire.methods import RECIPES, recipe
from thinwire.transport.loopback import LoopbackTransport

ISO = importlib.import_module("thinwire.methods.iso_loco")  # the package has a function of that name
METHOD_TOLERANCE = 0.02
STEPS = 10
SIZES = (0, 1, 63, 64, 65, 257, 4099, 1_000_003)
VARIANTS: tuple[Codec, ...] = (
    top_k(density=0.3, values="bfloat16"), chunked_top_k(k=5, chunk=37, values="float32"),
    random_k(density=0.8, values="bfloat16", scale=True), sign(block=64), dct_top_k(k=3, chunk=6, values="bfloat16"),
)  # fmt: skip


def sample(numel: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values of many magnitudes, with zeros, the smallest numbers and ties among them."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * torch.exp(4 * torch.randn(numel, generator=generator))
    x[::7] = 0.0
    x[3::11] = 1.5 * 2.0 ** (numel % 5)
    x[5::13] = 1e-41
    x[6::17] = 1e-30
    return x.clamp(-6e4, 6e4).to(dtype)


def codec_agrees(codec: Codec, part: Part) -> dict[str, Any]:
    """Compare payloads and decoded bits at awkward sizes and dtypes."""
    checked = 0
    for numel in SIZES[:-1] if part.is_tiny else SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x = sample(numel, dtype=dtype)
            there, here = codec.encode(x.to(part.device), seed=7), codec.encode(x, seed=7)
            if not torch.equal(there.cpu(), here):
                count = int((there.cpu() != here).sum()) if there.shape == here.shape else -1
                raise AssertionError(f"{numel} elements of {dtype}: {count} of {here.numel()} bytes differ")
            back, expected = codec.decode(there, numel=numel), codec.decode(here, numel=numel)
            if not torch.equal(back.cpu().view(torch.int32), expected.view(torch.int32)):
                raise AssertionError(f"{numel} elements of {dtype}: decoded bits differ")
            checked += 1
    return {"codec": repr(codec), "cases": checked}


def activation_codes_agree(part: Part) -> dict[str, Any]:
    """Compare payloads and decoded values of codes of activations, learned widths and a delta memory among them."""
    bits = AdaptiveBits(96, least=1, most=8)
    with torch.no_grad():
        bits.scores.copy_(torch.linspace(-3, 3, 96))
    codes = [ActivationCode.parse(f"{name}/block-int4") for name in ("float32", "bfloat16", "block-int8", "block-int4")]
    codes.append(ActivationCode("channel-bits", "block-int8", bits=bits))
    generator, checked = torch.Generator().manual_seed(3), 0
    for code, dtype in itertools.product(codes, (torch.float32, torch.bfloat16)):
        values = torch.randn(3, 41, 96, generator=generator).to(dtype)
        for is_forward in (True, False):
            payloads = [code.encode(one, is_forward=is_forward, source="") for one in (values, values.to(part.device))]
            back = [torch.empty_like(values), torch.empty_like(values, device=part.device)]
            for payload, out in zip(payloads, back, strict=True):
                code.decode(payload, out, is_forward=is_forward, source="")
            if not (torch.equal(payloads[0], payloads[1].cpu()) and torch.equal(back[0], back[1].cpu())):
                raise AssertionError(f"{code.name}, {dtype}, forward {is_forward}: other bytes or values on the device")
            checked += 1
    ends = [DeltaMemory(by_name("block-int4"), samples=4, most_bytes=1 << 20) for _ in range(3)]
    for visit in range(3):
        values = torch.randn(2, 5, 96, generator=generator) + visit
        here = ends[0].encode(values, [3, 1], source="")
        there = ends[1].encode(values.to(part.device), [3, 1], source="")
        out = torch.empty_like(values, device=part.device)
        ends[2].decode(there, out, [3, 1], source="")
        if not torch.equal(here, there.cpu()) or not all(
            torch.equal(ends[0].state_dict()["last"], one.state_dict()["last"]) for one in ends[1:]
        ):
            raise AssertionError(f"the copies of a delta memory differ after visit {visit}")
    return {"cases": checked + 3}


def refuses_non_finite(part: Part) -> dict[str, Any]:
    """Check that what a code cannot carry is refused on the device as on a CPU."""
    found: dict[str, str] = {}
    for name in NAMES:
        codec = by_name(name)
        for value in (float("nan"), float("inf"), -float("inf"), 3e38):
            x = torch.ones(300)
            x[200] = value
            answers = []
            for device in (torch.device("cpu"), part.device):
                try:
                    answers.append(codec.decode(codec.encode(x.to(device), seed=1), numel=300).cpu())
                except NonFiniteError as refused:
                    answers.append(str(refused))
            same = (
                torch.allclose(answers[0], answers[1], rtol=0, atol=0, equal_nan=True)  # NaN has many bit patterns
                if all(isinstance(one, torch.Tensor) for one in answers)
                else answers[0] == answers[1]
            )
            if not same:
                found[f"{name} {value}"] = " / ".join("decoded" if isinstance(a, torch.Tensor) else a for a in answers)
    if found:
        raise AssertionError(f"answers differ: {found}")
    return {"codecs": len(NAMES)}


def products_agree(part: Part) -> dict[str, Any]:
    """Compare IsoLoCo's flat spectrum on both devices, and its products by integers with those in float64."""
    shapes = ((5, 3), (64, 64), (200, 96)) if part.is_tiny else ((5, 3), (64, 64), (896, 3584), (2048, 2048))
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        matrix = torch.randn(shape, generator=generator) * 1e-3
        here, there = ISO.flatten_spectrum(matrix), ISO.flatten_spectrum(matrix.to(part.device))
        if not torch.equal(here, there.cpu()):
            raise AssertionError(f"flat spectrum of {shape}: {int((here != there.cpu()).sum())} elements differ")
        # 2^20 units of the grid at most: float64 adds their products exactly
        left = torch.randint(-(2**20), 2**20, shape, generator=generator).to(torch.float64) * 2.0**-24
        by_integers = ISO.product_of_integers(left.to(part.device), left.T.to(part.device))
        if not torch.equal(left @ left.T, by_integers.cpu()):
            raise AssertionError(f"product by integers of {shape} is off")
    return {"shapes": [list(shape) for shape in shapes]}


def train(
    name: str, device: torch.device, *, stop: int | None = None, states: Path | None = None
) -> list[dict[str, Any]]:
    """Train two replicas ten steps; with `stop`, keep the states there and go on in new objects from the files."""

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build("transformer", seed=seed)
        for block in model.blocks:  # type: ignore[union-attr]
            # Keys' biases have no influence, so their gradients are noise, of which Adam and signs make full steps.
            block.attention.in_proj_bias.requires_grad_(False)  # type: ignore[union-attr]
        model.to(device)
        model.register_forward_pre_hook(lambda module, inputs: tuple(x.to(device) for x in inputs))
        model.register_forward_hook(lambda module, inputs, output: output.cpu())
        return model, inner_of(name, model)

    def replica_main(transport: LoopbackTransport) -> dict[str, Any]:
        method = recipe(name)(**ARGUMENTS.get(name, {}))
        model, inner = made(0)
        start = [p.detach().cpu().clone() for p in model.parameters()]
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        for step in range(1, STEPS + 1):
            one_step(optimizer, model, data=step % 3, replica=transport.replica)
            if step == stop and states is not None:
                file = states / f"{name}-{transport.replica}.pt"
                torch.save(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), file)
                saved = torch.load(file, weights_only=True)
                model, inner = made(5)
                model.load_state_dict(saved["model"])
                optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return {"start": start, "end": [p.detach().cpu().clone() for p in model.parameters()]}

    return list(thinwire.run_replicas(2, replica_main))


def method_agrees(name: str, part: Part) -> dict[str, Any]:
    """Train on both devices; and on the device once more, with a stop, bit for bit."""
    here, there = train(name, torch.device("cpu")), train(name, part.device)
    if not all(map(torch.equal, there[0]["end"], there[1]["end"])):
        raise AssertionError("two replicas on the device end with different bits")
    with tempfile.TemporaryDirectory() as folder:
        again = train(name, part.device, stop=5, states=Path(folder))
    if not all(map(torch.equal, there[0]["end"], again[0]["end"])):
        raise AssertionError("a run that went on from its states ends with other bits")
    moved = norm(here[0]["end"], here[0]["start"])
    off = norm(here[0]["end"], there[0]["end"]) / moved
    if off > METHOD_TOLERANCE:
        raise AssertionError(f"parameters are {off:.2e} of their way from the CPU's; allowed {METHOD_TOLERANCE}")
    return {"off": off, "moved": moved}


def norm(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return float(sum((a.double() - b.double()).square().sum() for a, b in zip(one, other, strict=True)) ** 0.5)


def killed_run_resumes(part: Part) -> dict[str, Any]:
    """Kill `thinwire train` in the middle and let `--resume` go on: the model must have the bits of a whole run."""
    steps, every = (40, 10)
    limit_s = 300 if part.is_tiny else 90  # a busy machine tests the tiny form
    with tempfile.TemporaryDirectory() as folder:
        common = [
            sys.executable, "-m", "thinwire.cli.main", "train", "--replicas", "1", "--method", "iso-loco",
            "--model", "tiny" if part.is_tiny else "nano", "--data", str(Path(thinwire.__file__).parent / "codecs"),
            "--tokenizer", "bytes", "--device", part.device.type, "--steps", str(steps), "--sync-interval", "4",
            "--overlap-steps", "2", "--checkpoint-every", str(every), "--cache-dir", folder, "--no-samples",
            "--threads", "1", "--eval-every", "0", "--batch-size", "4", "--seq-len", "32" if part.is_tiny else "128",
        ]  # fmt: skip
        environment = dict(os.environ)
        if part.device.type == "cuda":
            # sums of a GPU's default kernels depend on the order in which threads come to them
            Path(folder, "sitecustomize.py").write_text(
                "import torch\ntorch.use_deterministic_algorithms(True, warn_only=True)\n"
            )
            environment["PYTHONPATH"] = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        subprocess.run([*common, "--out", str(whole)], check=True, env=environment, timeout=limit_s)
        process = subprocess.Popen([*common, "--out", str(cut)], env=environment)
        until_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until_s:
            if any(int(one.name.partition("-")[2] or 0) for one in cut.glob("**/step-*[0-9]")):
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        was_killed = process.returncode == -signal.SIGKILL
        resume = [sys.executable, "-m", "thinwire.cli.main", "train", "--resume", str(cut)]
        subprocess.run(resume, check=True, env=environment, timeout=limit_s)
        found = [digest(one) for one in (whole, cut)]
    if found[0] != found[1]:
        raise AssertionError(f"the resumed run ends with {found[1]}, the whole one with {found[0]}")
    return {"was_killed": was_killed, "sha256": found[0]}


def digest(run: Path) -> str:
    """Return the hash of the model that a run left."""
    files = sorted(run.glob("**/model.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model under {run}: {[str(one) for one in run.rglob('*')][:20]}")
    return hashlib.sha256(files[-1].read_bytes()).hexdigest()[:16]


def main() -> None:
    part = part_from_command_line("exact", __doc__ or "")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    for codec in (*(by_name(name) for name in NAMES), *VARIANTS):
        key = codec.name if codec in [by_name(name) for name in NAMES] else repr(codec)
        part.measure(f"codec {key}", lambda codec=codec: codec_agrees(codec, part))  # type: ignore[misc]
    part.measure("activation codes", lambda: activation_codes_agree(part))
    part.measure("codecs refuse", lambda: refuses_non_finite(part))
    part.measure("integer products", lambda: products_agree(part))
    for name in ("all-reduce", "iso-loco", "power-sgd") if part.is_tiny else RECIPES:
        part.measure(f"method {name}", lambda name=name: method_agrees(name, part))  # type: ignore[misc]
    part.measure("kill and resume", lambda: killed_run_resumes(part), needs_s=20.0)
    finish(part)


if __name__ == "__main__":
    main()
