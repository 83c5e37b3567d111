"""Each paper's claim against its own kind of baseline, both sides tuned alike, on the digits.

    python benchmarks/methods/claims.py                      # what is not stored yet, one run after the other
    python benchmarks/methods/claims.py --only co2           # one side
    python benchmarks/methods/claims_page.py docs/methods-claims.md    # the page of all claims

A side runs over a grid of learning rates with seed 0, and over its variants where its paper tunes them too. Where the
best rate is at an edge, the grid is widened. Two more seeds run with the best. All replicas live in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compare
import images
import torch

import thinwire
from thinwire.transport.loopback import LoopbackTransport

RESULTS = Path(__file__).parents[1] / "results" / "claims.jsonl"
SEEDS = (0, 1, 2)
_MOST_WIDENINGS = 3
_SHAPE = {"task": "digits", "replicas": 2, "steps": 300, "width": 32}
_WIDE = {"width": 128}  # where biases and norms, which travel whole, weigh less
_EVERY_10 = {"sync_interval": 10}
_ADAM = (1e-3, 3e-3, 9e-3)
_OUTER = ({}, {"outer_momentum": 0.5}, {"outer_lr": 0.3}, {"outer_lr": 0.3, "outer_momentum": 0.5})
_PAIRS = ({}, {"outer_momentum": 0.3}, {"outer_lr": 0.3}, {"outer_lr": 0.3, "outer_momentum": 0.3})
_SGD, _NO_MOMENTUM, _LAMB = (0.025, 0.05, 0.1), (0.25, 0.5, 1.0), (5e-3, 1e-2, 2e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A method or a baseline with what is tuned.

    Attributes:
        settings: Of `compare.run`, without learning rate and seed.
        lrs: Grid of learning rates to begin with.
        variants: Arguments of the method to try at each rate.
    """

    settings: Mapping[str, Any]
    lrs: tuple[float, ...] = _SGD
    variants: tuple[Mapping[str, Any], ...] = field(default=({},))

    def run_of(self, lr: float, variant: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        """Return what identifies a run."""
        arguments = dict(self.settings.get("arguments", {})) | dict(variant)
        return {**_SHAPE, **self.settings, "arguments": arguments, "lr": lr, "seed": seed}

    def grid(self, losses: Mapping[str, float]) -> list[float]:
        """Return the rates to try: widened while the best one is at an edge."""
        grid = sorted(self.lrs)
        for _ in range(_MOST_WIDENINGS):
            found = [losses[key] for key in (key_of(one) for one in self._grid_runs(grid)) if key in losses]
            if len(found) < len(grid) * len(self.variants):
                break
            best = grid[found.index(min(found)) // len(self.variants)]
            factor = grid[1] / grid[0]
            if best == grid[0]:
                grid = [round(grid[0] / factor, 6), *grid]
            elif best == grid[-1]:
                grid = [*grid, round(grid[-1] * factor, 6)]
            else:
                break
        return grid

    def next_runs(self, losses: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the runs to do next."""
        missing = [one for one in self._grid_runs(self.grid(losses)) if key_of(one) not in losses]
        return missing or [one for one in self.winners(losses) if key_of(one) not in losses]

    def winners(self, losses: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the runs of all seeds with the rate and variant of the lowest loss; none before all are known."""
        runs = self._grid_runs(self.grid(losses))
        if any(key_of(one) not in losses for one in runs):
            return []
        best = min(runs, key=lambda one: losses[key_of(one)])
        return [best | {"seed": seed} for seed in SEEDS]

    def _grid_runs(self, grid: Sequence[float]) -> list[dict[str, Any]]:
        return [self.run_of(lr, variant, seed=0) for lr in grid for variant in self.variants]


def _sgd(method: str, inner: str = "sgd", **more: Any) -> dict[str, Any]:
    return {"method": method, "inner": inner, **more}


_TOP = {"codec": "top-k"}
_APART = {"task": "digits, apart", "replicas": 4, "steps": 100, "apart_steps": 100, "arguments": _EVERY_10}
SIDES: Mapping[str, Side] = {
    "SGD with momentum": Side(settings=_sgd("all-reduce")),
    "co2": Side(
        settings=_sgd("co2", arguments=_EVERY_10),
        variants=(
            {}, {"outer_momentum": 0.2}, {"outer_momentum": 0.0}, {"outer_momentum": 0.2, "has_gap_penalty": False},
            {"outer_momentum": 0.2, "sync_interval": 5}, {"outer_momentum": 0.2, "outer_clip": 0.05},
        ),
    ),
    "power-sgd": Side(settings=_sgd("power-sgd")),
    "local-sgd": Side(settings=_sgd("local-sgd", arguments=_EVERY_10)),
    "slowmo": Side(
        settings=_sgd("slowmo", arguments=_EVERY_10), variants=({}, {"outer_momentum": 0.2}, {"outer_momentum": 0.7})
    ),
    "SGD": Side(settings=_sgd("all-reduce", "plain-sgd"), lrs=_NO_MOMENTUM),
    "error feedback (EF14)": Side(
        settings=_sgd("dgc", "plain-sgd", arguments={"density": 0.01, "momentum": 0.0, "selection": "exact"}),
        lrs=_NO_MOMENTUM,
    ),
    "ef21": Side(settings=_sgd("ef21", "plain-sgd", **_TOP), lrs=_NO_MOMENTUM),
    "SGD with momentum, wide": Side(settings=_sgd("all-reduce") | _WIDE),
    "dgc, wide": Side(
        settings=_sgd("dgc", "plain-sgd", arguments={"density": 0.001, "warmup_steps": 60}) | _WIDE
    ),
    "LAMB": Side(settings=_sgd("one-bit-lamb", "adamw", arguments={"warmup_steps": 300}), lrs=_LAMB),
    "one-bit-lamb": Side(settings=_sgd("one-bit-lamb", "adamw", arguments={"warmup_steps": 45}), lrs=_LAMB),
    "plain averages, apart": Side(settings=_sgd("dimat") | _APART),
    "dimat, apart": Side(settings=_sgd("dimat", matching_images=256) | _APART),
    "masha1": Side(settings=_sgd("masha1", "plain-sgd"), lrs=_NO_MOMENTUM),
    "masha2": Side(settings=_sgd("masha2", "plain-sgd"), lrs=_NO_MOMENTUM),
    **{
        name: Side(
            settings={"method": name, "inner": "adamw", "replicas": 4, "arguments": _EVERY_10}, lrs=_ADAM,
            variants=variants,
        )
        for name, variants in (
            ("diloco", _OUTER), ("eager", _OUTER), ("noloco", _PAIRS),
            ("sparse-loco", ({}, {"outer_lr": 0.7}, {"decay": 0.8}, {"k": 128})),
        )
    },
}  # fmt: skip


def key_of(run: Mapping[str, Any]) -> str:
    names = (
        "task",
        "method",
        "inner",
        "arguments",
        "codec",
        "matching_images",
        "replicas",
        "steps",
        "width",
        "lr",
        "seed",
    )
    return json.dumps([run.get(name) for name in names], sort_keys=True)


def run_apart(settings: dict[str, Any]) -> dict[str, Any]:
    """Train replicas that were trained apart first, from initial values of their own; no final exchange joins them.

    Returns:
        The run's line: means over the replicas' own models, after the first merge and at the end.
    """
    torch.set_num_threads(1)
    began_s = time.monotonic()
    found = thinwire.run_replicas(settings["replicas"], lambda transport: _apart(transport, settings))
    means = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
    return {**settings, **means, "wall_s": round(time.monotonic() - began_s, 1), "torch": torch.__version__}


def _apart(transport: LoopbackTransport, settings: dict[str, Any]) -> dict[str, float]:
    rank = transport.replica
    model, batches, loss_of, measure = compare.digits(settings, replica=rank)
    inner = compare.INNER[settings["inner"]](model, settings["lr"])
    method = compare.method_of(settings, replica=rank)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport, seed=settings["seed"])
    alone = images.convnet(width=settings["width"], seed=1000 * settings["seed"] + rank)
    own = images.load_digits()
    mine = slice(rank, None, settings["replicas"])
    images.train(alone, own.train_images[mine], own.train_labels[mine], steps=settings["apart_steps"], batch_size=16)
    model.load_state_dict(alone.state_dict())
    first: dict[str, float] = {}
    for step, batch in zip(range(1, settings["steps"] + 1), batches, strict=False):
        compare.one_step(optimizer, model, lambda batch=batch: loss_of(batch))
        optimizer.zero_grad()
        if step == settings["arguments"]["sync_interval"]:
            first = {f"first_{name}": value for name, value in measure().items()}
    found = measure()
    optimizer.close(final_exchange=False)
    return {**found, **first}


def missing(only: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the next run of each side that is not done."""
    losses = losses_of(lines)
    for name, side in SIDES.items():
        if not only or name in only:
            for one in side.next_runs(losses)[:1]:
                yield name, one


def losses_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {key_of(line): line["val_loss"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=SIDES, help="side to run; all by default")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    ends_s = time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends_s:
        found = next(missing(options.only, compare.read(options.results)), None)
        if found is None:
            print("done")
            return
        name, settings = found
        runs: Callable[..., dict[str, Any]] = run_apart if "apart_steps" in settings else compare.run
        line = runs({**settings, "name": name})
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            name, settings["lr"], settings["arguments"], settings["seed"], line["val_loss"], line["wall_s"], flush=True
        )
    print("not done: call it again")


if __name__ == "__main__":
    main()
