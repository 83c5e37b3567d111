"""Robust rules under attack: a convnet on digits, 15 workers of which 3 are bad.

    python benchmarks/methods/attacks.py            # every rule under every attack, 3 seeds; some minutes a seed
    python benchmarks/methods/attacks.py --report   # the table of what is stored

All workers hold the same parameters, so one model computes the gradients of the 12 honest ones, one batch of 16 images
each and step; the 3 bad vectors come from `tests.attacks.attack`, which knows the honest ones.
The rule joins all 15 and SGD with momentum steps with the result. Rates were not tuned for rules or attacks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import images
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from thinwire.methods import robust
from thinwire.shared_random import derive_seed

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.attacks import ATTACKS, attack

RESULTS = Path(__file__).parents[1] / "results" / "attacks.jsonl"
WORKERS, BAD, STEPS, BATCH, LR, MOMENTUM = 15, 3, 150, 16, 0.05, 0.9
RULES = ("mean", "flag", "median", "trimmed-mean", "krum", "multi-krum")
SEEDS = (0, 1, 2)
NONE = "none"


def train(rule: str, name: str, *, seed: int) -> dict[str, Any]:
    """Train once; return accuracy and loss on the test images."""
    found, model = images.load_digits(), images.convnet(seed=seed)
    honest = WORKERS if name == NONE else WORKERS - BAD
    sources = [
        images.batches(
            found.train_images[worker::WORKERS], found.train_labels[worker::WORKERS], batch_size=BATCH,
            seed=derive_seed(seed, "worker", worker),
        )
        for worker in range(honest)
    ]  # fmt: skip
    aggregate: Any = robust(rule=rule, num_bad=BAD).exchanges(WORKERS)[0].aggregate  # type: ignore[arg-type, attr-defined]
    aggregate.check(WORKERS)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    for step in range(STEPS):
        gradients = []
        for source in sources:
            inputs, labels = next(source)
            functional.cross_entropy(model(inputs), labels).backward()
            gradients.append(parameters_to_vector([p.grad for p in parameters if p.grad is not None]))
            optimizer.zero_grad()
        stack = torch.stack(gradients)
        if name != NONE:
            lies = attack(name, stack, num_bad=BAD, seed=derive_seed(seed, "attack", step))  # type: ignore[arg-type]
            stack = torch.cat((stack, lies))
        joined = aggregate(stack)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        vector_to_parameters(joined, [p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    test = found.test_images, found.test_labels
    return {"rule": rule, "attack": name, "seed": seed, "accuracy": images.accuracy(model, *test),
            "val_loss": images.loss(model, *test), "workers": WORKERS, "bad": BAD, "steps": STEPS}  # fmt: skip


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Print accuracies in percent: medians over the seeds, with the least."""
    attacks = (NONE, *ATTACKS)
    print("| rule | " + " | ".join(attacks) + " |\n" + "| --- " * (len(attacks) + 1) + "|")
    for rule in RULES:
        cells = []
        for name in attacks:
            found = [100 * line["accuracy"] for line in lines if (line["rule"], line["attack"]) == (rule, name)]
            cells.append(f"{statistics.median(found):.1f} ({min(found):.1f})" if found else "")
        print("| " + " | ".join([rule, *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(line["rule"], line["attack"], line["seed"]) for line in lines}
    torch.set_num_threads(1)
    for seed in SEEDS:
        for rule in RULES:
            for name in (NONE, *ATTACKS):
                if options.report or (rule, name, seed) in done:
                    continue
                lines.append(train(rule, name, seed=seed))
                with options.results.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    report(lines)


if __name__ == "__main__":
    main()
