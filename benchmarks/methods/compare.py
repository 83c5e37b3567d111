"""All methods on the same data and steps: accuracy or loss against bytes.

    python benchmarks/methods/compare.py digits --jobs 2      # a convnet on digits, 4 replicas, 300 steps
    python benchmarks/methods/compare.py language --jobs 2    # nano on stdlib text, 2 replicas, 200 steps
    python benchmarks/methods/report.py                       # the tables of what is stored

Every run appends one JSON line to the results, and is left out when its line is there already. All replicas of a run
live in one process, so losses and bytes do not depend on the machine's speed; bytes are counted by the transport.
Learning rates are one a kind of inner optimizer, and were not tuned for single methods. To try an entry:

    python benchmarks/methods/compare.py digits --name dimat --seeds 0 --steps 20 --results tried.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import images
import torch
from torch import nn
from torch.nn import functional

import thinwire
from thinwire.codecs import by_name
from thinwire.methods import recipe
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport
from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import build_model

RESULTS = Path(__file__).parent.parent / "results" / "methods.jsonl"
CACHE = Path.home() / ".cache" / "thinwire"
SEEDS = (0, 1, 2)
TASKS = {"digits": {"replicas": 4, "steps": 300}, "language": {"replicas": 2, "steps": 200}}
INNER: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9),
    "plain-sgd": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr),
    "muon": lambda m, lr: make_inner_optimizer(TrainConfig.of(inner_optimizer="muon", lr=lr), m),
}
# plain-sgd is for methods that carry momentum themselves; where nobody does, steps are ten times as long
LR = {"digits": {"adamw": 3e-3, "sgd": 0.05, "plain-sgd": 0.05, "no-momentum": 0.5, "sign": 1e-3}}
LR["language"] = {"muon": 3e-3, "adamw": 3e-3, "sgd": 0.02, "plain-sgd": 0.02, "no-momentum": 0.2, "sign": 1e-3}


def entries(task: str, *, steps: int | None = None) -> dict[str, dict[str, Any]]:
    """Return what runs: the method, its arguments and its inner optimizer, by the name in the table."""
    steps = steps or TASKS[task]["steps"]
    interval = {"sync_interval": 10}
    muon = {"muloco, Muon": {"method": "muloco", "arguments": interval, "inner": "muon"}}
    return {
        "all-reduce, AdamW": {"method": "all-reduce"},
        "all-reduce, SGD with momentum": {"method": "all-reduce", "inner": "sgd"},
        "local-sgd": {"method": "local-sgd", "arguments": interval},
        "diloco": {"method": "diloco", "arguments": interval},
        "streaming-diloco": {"method": "streaming-diloco", "arguments": interval | {"overlap_steps": 3}},
        "iso-loco": {"method": "iso-loco", "arguments": interval | {"overlap_steps": 3}},
        "decoupled-diloco": {"method": "decoupled-diloco", "arguments": interval | {"overlap_steps": 3}},
        "eager": {"method": "eager", "arguments": interval},
        **(muon if task == "language" else {}),
        "sparse-loco": {"method": "sparse-loco", "arguments": interval},
        "streaming-sparse-loco": {"method": "streaming-sparse-loco", "arguments": interval | {"overlap_steps": 3}},
        "slowmo": {"method": "slowmo", "arguments": interval},
        "co2": {"method": "co2", "arguments": interval},
        "noloco": {"method": "noloco", "arguments": interval},
        "power-sgd": {"method": "power-sgd"},
        "dgc": {"method": "dgc", "arguments": {"density": 0.001, "warmup_steps": steps // 5}, "inner": "plain-sgd"},
        "demo": {"method": "demo", "inner": "plain-sgd", "lr": "sign"},
        "ef21": {"method": "ef21", "codec": "top-k"},
        "one-bit-adam": {"method": "one-bit-adam", "arguments": {"warmup_steps": round(0.15 * steps)}},
        "zero-one-adam": {"method": "zero-one-adam"},
        "one-bit-lamb": {"method": "one-bit-lamb", "arguments": {"warmup_steps": round(0.15 * steps)}},
        "robust, flag": {"method": "robust"},
        "masha1": {"method": "masha1", "inner": "plain-sgd", "lr": "no-momentum"},
        "masha2": {"method": "masha2", "inner": "plain-sgd", "lr": "no-momentum"},
        # matched by the activations of images of its own; a transformer has no units that could be matched
        "dimat": {"method": "dimat", "arguments": interval, **({"matching_images": 256} if task == "digits" else {})},
    }


def plan(task: str, *, seeds: Sequence[int] = SEEDS, steps: int | None = None) -> list[dict[str, Any]]:
    """Return the runs, a seed of all before the next seed."""
    shape = TASKS[task] | ({"steps": steps} if steps else {})
    return [
        {"task": task, "name": name, "seed": seed, **shape, "inner": "adamw", **entry}
        for seed in seeds
        for name, entry in entries(task, steps=steps).items()
    ]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train all replicas of one run and return its line."""
    torch.set_num_threads(1)
    task: Callable[..., Any] = {"digits": digits, "language": language}[settings["task"]]
    began_s = time.monotonic()
    found = thinwire.run_replicas(settings["replicas"], lambda transport: train_replica(transport, settings, task))
    return {**settings, **found[0], "wall_s": round(time.monotonic() - began_s, 1), "torch": torch.__version__}


def method_of(settings: dict[str, Any], *, replica: int) -> thinwire.Method:
    """Return the method of one replica; what JSON cannot say is made here."""
    arguments = dict(settings.get("arguments", {}))
    if "codec" in settings:
        arguments["codec"] = by_name(settings["codec"])
    if "matching_images" in settings:
        own = slice(replica, None, settings["replicas"])
        found = images.load_digits().train_images[own][: settings["matching_images"]]
        arguments["batches"] = found.split(64)
    return recipe(settings["method"])(**arguments)


def train_replica(loopback: LoopbackTransport, settings: dict[str, Any], task: Callable[..., Any]) -> dict[str, Any]:
    """Train one replica; return what the global parameters reach, and the bytes it sent."""
    transport = RecordingTransport(loopback)
    model, batches, loss_of, measure = task(settings, replica=transport.replica)
    rate = settings.get("lr", settings["inner"])  # a number, or a key of the untuned rates
    lr = rate if isinstance(rate, float) else LR[settings["task"]][rate]
    inner = INNER[settings["inner"]](model, lr)
    method = method_of(settings, replica=transport.replica)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport, seed=settings["seed"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps=settings["steps"]))
    before = sent_early = transport.log.totals("sent").payload_bytes
    late = 2 * settings["steps"] // 3  # from here on no warm-up is left
    for step, batch in zip(range(settings["steps"]), batches, strict=False):
        sent_early = transport.log.totals("sent").payload_bytes if step <= late else sent_early
        one_step(optimizer, model, lambda batch=batch: loss_of(batch))
        optimizer.zero_grad()
        scheduler.step()
    sent = transport.log.totals("sent").payload_bytes - before
    optimizer.close(final_exchange=True)
    optimizer.average_buffers()
    numel = sum(parameter.numel() for parameter in model.parameters())
    with optimizer.global_parameters():
        reached = measure()
    late_bits = 8 * (sent - sent_early + before) / numel / (settings["steps"] - late)
    return {
        "numel": numel, "sent_bytes": sent, "bits": 8 * sent / numel / settings["steps"], "late_bits": late_bits,
        **reached,
    }  # fmt: skip


def one_step(optimizer: thinwire.DistributedOptimizer, model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """Do a step, as `thinwire train` does it: a gradient is clipped where it is the mean, or else where it is made."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        optimizer.average_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return found

    if optimizer.needs_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


Task = tuple[Any, Iterator[Any], Callable[[Any], Any], Callable[[], Any]]


def digits(settings: dict[str, Any], *, replica: int) -> Task:
    """Return model, batches, loss and measure of the digits: 16 images a replica and step."""
    found, model = images.load_digits(), images.convnet(width=settings.get("width", 64), seed=settings["seed"])
    own = slice(replica, None, settings["replicas"])
    batches = images.batches(
        found.train_images[own], found.train_labels[own], batch_size=16, seed=1000 * settings["seed"] + replica
    )
    test = found.test_images, found.test_labels

    def measure() -> dict[str, float]:
        return {"accuracy": images.accuracy(model, *test), "val_loss": images.loss(model, *test)}

    return model, batches, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]), measure


def language(settings: dict[str, Any], *, replica: int) -> Task:
    """Return model, batches, loss and measure of nano: 4 windows of 128 tokens a replica and step."""
    from thinwire.workloads.language import Sampler, open_corpus, validation_batches

    corpus = open_corpus("stdlib", cache=CACHE, vocab_size=2048)
    model: Any = build_model("nano", vocab_size=None, seed=settings["seed"])
    replicas, seed = settings["replicas"], settings["seed"]
    batches = Sampler(corpus.train, replica=replica, num_replicas=replicas, batch_size=4, seq_len=128, seed=seed)
    held_out = list(validation_batches(corpus.held_out, batch_size=8, seq_len=128, max_batches=40))

    def measure() -> dict[str, float]:
        with torch.no_grad():
            return {"val_loss": statistics.fmean(float(model.loss(*batch)[1]) for batch in held_out)}

    return model, batches, lambda batch: model.loss(*batch)[0], measure


def run_plan(wanted: Sequence[dict[str, Any]], *, jobs: int, results: Path) -> None:
    """Run what is not stored yet, each run in a process of its own."""
    done = [(line["task"], line["name"], line["seed"], line["steps"]) for line in read(results)]
    waiting = [s for s in wanted if (s["task"], s["name"], s["seed"], s["steps"]) not in done]

    def one(settings: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "one", "--settings", json.dumps(settings)]
        output = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout
        if not output.strip():
            print(f"{settings['name']}, seed {settings['seed']} failed", file=sys.stderr, flush=True)
            return
        with results.open("a") as file:
            file.write(output.splitlines()[-1] + "\n")
        print(output.splitlines()[-1], flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, waiting))


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=[*TASKS, "one"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, help="fewer than the task's, to try an entry; with --results elsewhere")
    parser.add_argument("--name", action="append", help="entries to run; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--settings", type=json.loads)
    options = parser.parse_args()
    if options.plan == "one":
        print(json.dumps(run(options.settings)))
    else:
        wanted = plan(options.plan, seeds=options.seeds, steps=options.steps)
        chosen = [settings for settings in wanted if not options.name or settings["name"] in options.name]
        run_plan(chosen, jobs=options.jobs, results=options.results)


if __name__ == "__main__":
    main()
