"""Streamed backward against checkpointing: CPU time, and the longest sequence in limited memory.

`python benchmarks/streamed_backward.py` trains one decoder by both in turn (median of 5 CPU times, one thread), then
each in a process of its own whose address space may grow by a given number of MiB: the sequence grows by a fifth until
an allocation fails.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer

KINDS = ("checkpoint", "streamed")


def make(kind: str, arguments: argparse.Namespace, *, seq_len: int) -> Any:
    shape = TransformerConfig(
        vocab_size=arguments.vocab_size, dim=arguments.dim, layers=arguments.layers, heads=4, max_seq_len=seq_len
    )
    model = build_transformer(shape, seed=1)
    model.recompute = kind == "checkpoint"
    return thinwire.streamed(model, chunks=arguments.chunks) if kind == "streamed" else model


def pass_s(model: Any, *, seq_len: int) -> float:
    tokens = torch.randint(0, model.vocab_size, (1, seq_len))
    began_s = time.process_time()
    model.loss(tokens, tokens)[0].backward()
    took_s = time.process_time() - began_s
    model.zero_grad()
    return took_s


def longest(kind: str, arguments: argparse.Namespace) -> int:
    """Return the longest sequence that fits; the limit holds from here on."""
    model = make(kind, arguments, seq_len=arguments.most)
    pass_s(model, seq_len=64)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + arguments.limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    length, found = arguments.least, 0
    while length <= arguments.most:
        try:
            pass_s(model, seq_len=length)
        except (MemoryError, RuntimeError) as error:
            if "alloc" not in str(error):
                raise
            break
        found, length = length, length * 6 // 5
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("dim", 192), ("layers", 6), ("vocab-size", 2048), ("chunks", 8), ("seq-len", 1024),
                        ("limit-mib", 128), ("least", 512), ("most", 40_000)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--longest", choices=KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.longest:
        print(json.dumps(longest(arguments.longest, arguments)))
        return
    models = {kind: make(kind, arguments, seq_len=arguments.seq_len) for kind in KINDS}
    times = [[pass_s(models[kind], seq_len=arguments.seq_len) for kind in KINDS] for _ in range(6)][1:]
    again_s, streamed_s = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"CPU time, median of 5: {again_s:.3f} s checkpointing, {streamed_s:.3f} s streamed: {streamed_s / again_s:.2f}"
    )
    found = [
        int(subprocess.run([sys.executable, *sys.argv, "--longest", kind], capture_output=True, text=True, check=True)
            .stdout) for kind in KINDS
    ]  # fmt: skip
    print(f"longest in {arguments.limit_mib} MiB: {found[0]} tokens checkpointing, {found[1]} streamed: "
          f"{found[1] / max(1, found[0]):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
