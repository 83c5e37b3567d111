"""Loss at equal tokens: Streaming DiLoCo against averaging gradients at every step.

`python benchmarks/loss.py matrix` trains `nano` on the standard library's text, with 2 and 4 replicas, H 10/30/100,
E3M0 and dense payloads, three seeds; `long` follows the gap over 3,000 steps; `outer-lr` compares outer learning rates.
Every run appends one JSON line to the results, and is left out when its line is there already. Without a plan, the
tables of the stored results are printed.

All replicas of a run live in one process (the loopback transport), so losses do not depend on the machine's speed. The
baseline is one process with the whole batch, which tests show to be the same as an all-reduce over replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "loss.jsonl"
SEQ_LEN = 128
EVAL_BATCHES = 40
# what a run uses where its settings say nothing
DEFAULTS = {"lr": 3e-3, "windows_per_step": 8, "tokenizer": "bpe"}
CHANGES = (*DEFAULTS, "sync_interval", "overlap_steps", "codec", "outer_lr", "outer_momentum", "blend", "steps")


def plans() -> dict[str, list[dict[str, Any]]]:
    baseline = {"method": "all-reduce", "replicas": 1}
    streaming = {"method": "streaming-diloco", "overlap_steps": 3}
    matrix = []
    # what matters most comes first, so that a run that is stopped has told most
    for intervals, seeds in (((30, 10, 100), (0,)), ((30,), (1, 2)), ((10, 100), (1, 2))):
        for seed in seeds:
            matrix += [{**baseline, "seed": seed, "steps": 400}] if 30 in intervals else []
            for interval in intervals:
                for replicas in (2, 4):
                    for codec in ("e3m0", "float32"):
                        run = {"replicas": replicas, "sync_interval": interval, "codec": codec, "seed": seed}
                        matrix.append({**streaming, **run, "steps": 400})
    long = [{**baseline, "seed": 0, "steps": 3000, "eval_every": 150}]
    for codec in ("e3m0", "float32"):
        run = {"replicas": 2, "sync_interval": 30, "codec": codec, "seed": 0, "steps": 3000, "eval_every": 150}
        long.append({**streaming, **run})
    outer = []
    for replicas in (2, 4):
        for outer_lr in (0.4, 0.8, 1.0):
            run = {"replicas": replicas, "sync_interval": 30, "codec": "e3m0", "seed": 0, "steps": 400}
            outer.append({**streaming, **run, "outer_lr": outer_lr})
    return {"matrix": matrix, "long": long, "outer-lr": outer, "cause": causes(baseline, streaming)}


def causes(baseline: dict[str, Any], streaming: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that change one thing at a time."""
    length = {"seed": 0, "steps": 1000, "eval_every": 250}
    usual = {**streaming, "replicas": 2, "sync_interval": 30, "codec": "e3m0", **length}
    at_once = {"replicas": 2, "sync_interval": 30, **length}
    low, text = {"lr": 1e-3}, {"tokenizer": "bytes"}
    large = {"windows_per_step": 32, "steps": 600, "eval_every": 150}
    return [
        {**baseline, **length},
        usual,
        {"method": "local-sgd", **at_once},
        {**baseline, **length, **low},
        {**usual, **low},
        {"method": "diloco", **at_once},
        {**usual, "outer_lr": 0.7, "outer_momentum": 0.5},
        {**baseline, **length, **text},
        {**usual, **text, "overlap_steps": 2, "outer_lr": 0.7},
        {**baseline, **length, **large},
        {**usual, **large},
        # the batch of one of two replicas alone, and the outer optimizer alone
        {**baseline, **length, "windows_per_step": 4},
        {**baseline, **length, **large, "windows_per_step": 16},
        {"method": "diloco", "replicas": 1, "sync_interval": 30, **length},
        {**baseline, **length, "lr": 3e-4},
        {**usual, "lr": 3e-4},
        {**baseline, **low, "seed": 0, "steps": 3000, "eval_every": 150},
        {**usual, **low, "steps": 3000, "eval_every": 150},
    ]


def train(settings: dict[str, Any], *, cache: Path) -> dict[str, Any]:
    import torch

    import thinwire
    from thinwire.codecs import by_name
    from thinwire.methods import recipe
    from thinwire.workloads.language import open_corpus

    torch.set_num_threads(1)
    corpus = open_corpus("stdlib", cache=cache, vocab_size=2048, tokenizer=value(settings, "tokenizer"))
    method_options = ("sync_interval", "overlap_steps", "outer_lr", "outer_momentum", "blend")
    options = {k: v for k, v in settings.items() if k in method_options}
    if "codec" in settings:
        options["codec"] = by_name(settings["codec"])
    method = recipe(settings["method"])(**options)
    began = time.monotonic()
    result = thinwire.run_replicas(
        settings["replicas"], lambda transport: train_replica(transport, settings, method=method, corpus=corpus)
    )[0]
    tokens = settings["steps"] * value(settings, "windows_per_step") * SEQ_LEN
    return {**settings, **result, "tokens": tokens, "wall_s": time.monotonic() - began}


def train_replica(transport: Any, settings: dict[str, Any], *, method: Any, corpus: Any) -> dict[str, Any]:
    import torch

    import thinwire
    from thinwire.wire_benchmark.worker import lr_factor
    from thinwire.workloads.language import Sampler, build_model

    steps, seed = settings["steps"], settings["seed"]
    vocab_size = 257 if value(settings, "tokenizer") == "bytes" else None
    model = build_model("nano", vocab_size=vocab_size, seed=seed)
    inner = torch.optim.AdamW(model.parameters(), lr=value(settings, "lr"), betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport, seed=seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps=steps))
    batch_size = value(settings, "windows_per_step") // transport.num_replicas
    batches = Sampler(
        corpus.train, replica=transport.replica, num_replicas=transport.num_replicas, batch_size=batch_size,
        seq_len=SEQ_LEN, seed=seed,
    )  # fmt: skip
    curve = []
    for step, (tokens, targets) in zip(range(1, steps + 1), batches, strict=False):
        model.loss(tokens, targets)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if transport.replica == 0 and step % settings.get("eval_every", steps) == 0 and step < steps:
            curve.append([step, evaluate(model, optimizer, corpus=corpus)])
    optimizer.close(final_exchange=True)
    if transport.replica:
        return {}
    curve.append([steps, evaluate(model, optimizer, corpus=corpus)])
    return {"curve": curve, "val_loss": curve[-1][1], "num_fragments": optimizer.num_fragments}


def evaluate(model: Any, optimizer: Any, *, corpus: Any) -> float:
    import torch

    from thinwire.workloads.language import validation_batches

    held_out = validation_batches(corpus.held_out, batch_size=8, seq_len=SEQ_LEN, max_batches=EVAL_BATCHES)
    with optimizer.global_parameters(), torch.no_grad():
        return statistics.fmean(float(model.loss(*batch)[1]) for batch in held_out)


def run_plan(name: str, *, jobs: int, cache: Path, results: Path) -> None:
    done = [key(line) for line in read(results)]
    waiting = [settings for settings in plans()[name] if key(settings) not in done]

    def one(settings: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "one", "--settings", json.dumps(settings), "--cache", str(cache)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        with results.open("a") as file:
            file.write(output.splitlines()[-1] + "\n")
        print(output.splitlines()[-1], flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, waiting))


def value(line: dict[str, Any], field: str) -> Any:
    return line.get(field, DEFAULTS.get(field))


def shared(line: dict[str, Any]) -> str:
    """Return what a run and its baseline have in common."""
    return json.dumps([line["seed"], line["steps"], *(value(line, field) for field in DEFAULTS)])


def key(line: dict[str, Any]) -> str:
    method = ("method", "replicas", "sync_interval", "overlap_steps", "codec", "outer_lr", "outer_momentum", "blend")
    return json.dumps([value(line, field) for field in (*method, "seed", "steps", *DEFAULTS)])


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(results: Path) -> None:
    lines = read(results)
    base = {shared(x): x for x in lines if x["method"] == "all-reduce"}
    head = ("method", "replicas", "H", "codec", "outer lr", "momentum", "inner lr", "windows", "tokens", "steps")
    head = (*head, "seeds", "val loss, median", "gap to all-reduce, median (spread)")
    print("| " + " | ".join(head) + " |\n" + "|" + " --- |" * len(head))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for x in lines:
        if x["method"] != "all-reduce" and shared(x) in base:
            outer = ("", "") if x["method"] == "local-sgd" else (x.get("outer_lr", 0.6), x.get("outer_momentum", 0.9))
            numbers = (value(x, "lr"), value(x, "windows_per_step"), value(x, "tokenizer"), x["steps"])
            one = (x["method"], x["replicas"], x["sync_interval"], x.get("codec", "float32"), *outer, *numbers)
            groups.setdefault(one, []).append(x)
    for group, runs in sorted(groups.items(), key=str):
        gaps = [100 * (x["val_loss"] / base[shared(x)]["val_loss"] - 1) for x in runs]
        loss = statistics.median(x["val_loss"] for x in runs)
        cells = " | ".join(str(part) for part in group)
        gap = f"{statistics.median(gaps):+.2f} % ({min(gaps):+.2f} to {max(gaps):+.2f})"
        print(f"| {cells} | {len(runs)} | {loss:.4f} | {gap} |")
    for x in base.values():
        print(f"\nall-reduce: {value(x, 'windows_per_step')} windows, inner lr {value(x, 'lr')}, "
              f"{value(x, 'tokenizer')}, {x['steps']} steps, seed {x['seed']}: {x['val_loss']:.4f}")  # fmt: skip
    for x in lines:
        if len(x["curve"]) > 1 and shared(x) in base and x["method"] != "all-reduce":
            baseline = dict(map(tuple, base[shared(x)]["curve"]))
            gaps = ", ".join(f"{s}: {100 * (v / baseline[s] - 1):+.2f} %" for s, v in x["curve"] if s in baseline)
            settings = {k: v for k, v in x.items() if k in CHANGES}
            print(f"\ncurve, {x['method']}, {x['replicas']} replicas, {settings}, gap by step: {gaps}")
    print(f"\nmachine: {platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="report", choices=[*plans(), "one", "report"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "thinwire")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--settings", type=json.loads)
    options = parser.parse_args()
    if options.plan == "one":
        print(json.dumps(train(options.settings, cache=options.cache)))
    elif options.plan == "report":
        report(options.results)
    else:
        run_plan(options.plan, jobs=options.jobs, cache=options.cache, results=options.results)


if __name__ == "__main__":
    main()
