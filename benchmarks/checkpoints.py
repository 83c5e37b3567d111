"""What a checkpoint of an elastic run costs training: the time that `save` holds the loop, and what its thread takes.

`python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json` trains a model on the CPU, and every few
steps saves a state of the parameters and one momentum each. Steps that begin while a checkpoint is written are compared
with the quiet ones between. Without `--json` the numbers are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from thinwire.elastic.global_state import GlobalState
from thinwire.training.checkpoints.checkpoint_files import CheckpointFiles
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.workloads.language import build_model


class Timed:
    """Notes when each state was written."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._write = files.write
        self.spans: list[tuple[float, float]] = []

    def __call__(self, *state: Any) -> None:
        began_s = time.perf_counter()
        self._write(*state)
        self.spans.append((began_s, time.perf_counter()))


def train(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    model: Any = build_model(options.model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # in host memory beside the model, as an outer optimizer keeps them
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    momenta = {f"momentum.{name}": torch.zeros_like(value) for name, value in values.items()}
    checkpoints = GlobalCheckpoints(folder, on_warning=print)
    timed = Timed(checkpoints._files)
    checkpoints._files.write = timed  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(1)
    steps: list[tuple[float, float]] = []
    held_s: list[float] = []
    for step in range(1, options.warm_up + options.saves * options.every + 1):
        began_s = time.perf_counter()
        tokens = torch.randint(0, model.vocab_size, (1, options.tokens + 1), generator=generator)
        model.loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > options.warm_up:
            steps.append((began_s, time.perf_counter()))
        if step >= options.warm_up and (step - options.warm_up) % options.every == 0 and len(held_s) < options.saves:
            state = GlobalState(step=step, parameters=values, outer=momenta, note={"tokens": step * options.tokens})
            began_s = time.perf_counter()
            checkpoints.save(state)
            held_s.append(time.perf_counter() - began_s)
    assert checkpoints.wait()
    return {"steps": steps, "held_s": held_s, "written": timed.spans, "num_bytes": state.num_bytes}


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    spans = found["written"]
    quiet_s, busy_s = [], []
    for begin, end in found["steps"]:
        shared_s = sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)
        (busy_s if shared_s > 0.9 * (end - begin) else quiet_s if shared_s == 0 else []).append(end - begin)
    if not quiet_s or not busy_s:
        raise SystemExit(f"{len(quiet_s)} quiet and {len(busy_s)} busy steps say nothing; save more, or less often")
    written_s = [last - first for first, last in spans]
    return {
        "state_bytes": found["num_bytes"],
        "quiet_steps": len(quiet_s),
        "quiet_step_s": statistics.median(quiet_s),
        "quiet_step_least_s": min(quiet_s),
        "quiet_step_most_s": max(quiet_s),
        "busy_steps": len(busy_s),
        "busy_step_s": statistics.median(busy_s),
        "busy_step_least_s": min(busy_s),
        "busy_step_most_s": max(busy_s),
        "held_first_s": found["held_s"][0],
        "held_later_s": statistics.median(found["held_s"][1:]),
        "held_later_most_s": max(found["held_s"][1:]),
        "written_s": statistics.median(written_s),
        "written_least_s": min(written_s),
        "written_most_s": max(written_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="150m")
    parser.add_argument("--tokens", type=int, default=64, help="of one step")
    parser.add_argument("--every", type=int, default=12, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        row = summarise(train(options, folder))
    for name, value in row.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    if options.json:
        machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "folder")}
        options.json.write_text(json.dumps({"settings": settings, "machine": machine, **row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
