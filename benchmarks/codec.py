"""How long codecs take to encode and decode, against a float32 copy of the same tensor.

    python benchmarks/codec.py --json benchmarks/results/codec.json

Each repeat runs every operation once, so that a busy moment of the machine falls on all of them alike. `clone` copies
into new memory, `copy` into memory that is already there; a codec's results are in new memory, as in training.

Wall time is what training waits for; CPU time, summed over the threads, says what the work costs also on a machine that
other programs use at the same time. On a GPU CPU time is only that of launching.

    python benchmarks/codec.py --share --json benchmarks/results/codec_share.json

tells what share of an interval's inner steps E3M0 and IsoLoCo's flat spectrum take: `nano` (8 windows of 128 tokens,
one thread) trains a few steps, codes its pseudo-gradient once and decodes it twice (two replicas), and flattens that
of each hidden matrix, in turn; CPU times are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import NAMES, by_name

Operation = Callable[[], Any]
Key = tuple[str, str]


def main() -> None:
    options = parse_options()
    if options.share:
        report = share(options.repeats)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        return
    results = []
    for device, threads in [("cpu", threads) for threads in options.threads] + [
        ("cuda", 1)
    ] * torch.cuda.is_available():
        torch.set_num_threads(threads)
        for numel in options.sizes:
            place = f"{device}, {threads} thread{'s' * (threads > 1)}" if device == "cpu" else device
            print(f"\n{numel:,} elements, {place}, {options.repeats} repeats")
            seconds = measure(operations(numel, device=device, names=options.codecs), options.repeats, device=device)
            rows = summarise(seconds, numel=numel, device=device, threads=threads)
            print_table(rows)
            results += rows
            if options.json is not None:  # after each table: a run that is stopped keeps what it has measured
                report = {"benchmark": "codec", "machine": machine(), "repeats": options.repeats, "results": results}
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[3_300_000, 35_000_000], help="elements of the tensors")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each operation")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of CPU threads to try")
    parser.add_argument("--codecs", nargs="+", default=list(NAMES), help="names of the codecs", metavar="NAME")
    parser.add_argument("--share", action="store_true", help="measure E3M0's share of the inner steps instead")
    parser.add_argument("--json", type=Path, default=None, help="file to store the results in")
    return parser.parse_args()


def operations(numel: int, *, device: str, names: list[str]) -> dict[Key, Operation]:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(numel, generator=generator).to(device)
    target = torch.empty_like(tensor)
    result: dict[Key, Operation] = {
        ("float32 tensor", "clone"): tensor.clone,
        ("float32 tensor", "copy"): lambda: target.copy_(tensor),
    }
    for name in names:
        codec = by_name(name)
        payload = codec.encode(tensor)
        result[(name, "encode")] = lambda codec=codec: codec.encode(tensor)  # type: ignore[misc]
        result[(name, "decode")] = lambda codec=codec, payload=payload: codec.decode(payload, numel=numel)  # type: ignore[misc]
    return result


def measure(todo: dict[Key, Operation], repeats: int, *, device: str) -> dict[Key, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each repeat."""
    seconds: dict[Key, list[tuple[float, float]]] = {key: [] for key in todo}
    for repeat in range(repeats + 2):  # the first two warm caches, allocators and compilers, and do not count
        for key, operation in todo.items():
            wait_for(device)
            cpu, wall = time.process_time(), time.perf_counter()
            operation()
            wait_for(device)
            if repeat >= 2:
                seconds[key].append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def share(repeats: int) -> dict[str, Any]:
    from thinwire.methods.iso_loco import flatten_spectrum
    from thinwire.workloads.language import build_model

    torch.set_num_threads(1)
    model, codec = build_model("nano", seed=0), by_name("e3m0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, model.vocab_size, (8, 129), generator=torch.Generator().manual_seed(0))
    delta = torch.randn(sum(p.numel() for p in model.parameters()))
    hidden = [torch.randn_like(p) for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]

    def inner_step() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    def code() -> None:
        payload = codec.encode(delta)
        for _ in range(2):
            codec.decode(payload, numel=delta.numel())

    def flatten() -> None:
        for matrix in hidden:
            flatten_spectrum(matrix)

    todo: dict[Key, Operation] = {
        ("nano", "inner step"): inner_step,
        ("e3m0", "encode + 2 decode"): code,
        ("iso-loco", "flat spectrum"): flatten,
    }
    seconds = measure(todo, repeats, device="cpu")
    steps = [cpu for _, cpu in seconds.pop(("nano", "inner step"))]
    print(
        f"{delta.numel():,} elements; CPU seconds of an inner step, median of {repeats}: {statistics.median(steps):.4f}"
    )
    medians, shares = {"inner step": statistics.median(steps)}, {}
    for key, times in seconds.items():
        name = " ".join(key)
        medians[name] = statistics.median(cpu for _, cpu in times)
        ratios = [cpu / step for (_, cpu), step in zip(times, steps, strict=True)]
        shares[name] = {
            interval: [100 * value / interval for value in (statistics.median(ratios), min(ratios), max(ratios))]
            for interval in (10, 30, 100)
        }
        for interval, (median, least, most) in shares[name].items():
            print(f"{name}, {medians[name]:.4f} s, H {interval}: {median:.2f} % ({least:.2f} to {most:.2f})")
    return {"benchmark": "codec share", "machine": machine(), "cpu_s": medians, "percent_of_interval": shares}


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summarise(
    seconds: dict[Key, list[tuple[float, float]]], *, numel: int, device: str, threads: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (codec, operation), times in seconds.items():
        wall, cpu = zip(*times, strict=True)
        row: dict[str, Any] = {
            "device": device,
            "threads": threads,
            "elements": numel,
            "codec": codec,
            "operation": operation,
        }
        row |= {"median_s": statistics.median(wall), "min_s": min(wall), "max_s": max(wall)}
        row |= {"cpu_median_s": statistics.median(cpu), "cpu_min_s": min(cpu), "cpu_max_s": max(cpu)}
        rows.append(row)
    for row in rows:
        row["times_clone"] = row["median_s"] / rows[0]["median_s"]
        row["cpu_times_clone"] = row["cpu_median_s"] / rows[0]["cpu_median_s"]
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'':26}{'wall ms':>8}{'min':>9}{'max':>9}{'x clone':>9}{'CPU ms':>11}{'min':>9}{'max':>9}{'x clone':>9}")
    for row in rows:
        print(f"{row['codec']:17}{row['operation']:8}", end="")
        for kind in ("", "cpu_"):
            milliseconds = [1e3 * row[f"{kind}{part}_s"] for part in ("median", "min", "max")]
            print("".join(f"{value:9.2f}" for value in milliseconds), end="")
            print(f"{row[f'{kind}times_clone']:9.2f}  ", end="")
        print()


def machine() -> dict[str, Any]:
    description: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),  # another program's work is in the numbers when this is above the threads
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
    return description


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


if __name__ == "__main__":
    main()
