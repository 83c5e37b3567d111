"""Loss of a model whose micro-batches skip layers, beside a plain smaller one at the same compute.

    python benchmarks/skip_quality.py            # into benchmarks/results/skip_quality.jsonl
    python benchmarks/skip_quality.py --report   # the stored results

A model of six layers of width 64 trains on the bytes of the standard library's text, a window a micro-batch. `skip`
leaves two of the last five layers out, at random for each micro-batch, and divides the gradient of a layer by the
micro-batches that visited it, as `PathRunner` does. A run that is stored is left out.
"""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path
from typing import Any

import stored_runs
import torch

from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import Sampler, open_corpus, validation_batches
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import TransformerStage, build_transformer, next_token_loss

SEQ_LEN, WINDOWS, LR, EVAL_BATCHES = 128, 8, 3e-3, 10
LAYERS, KEPT = 6, 4
RUNS = ("six layers", "four layers", "skip")


def loss_of(model: Any, layers: tuple[int, ...], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss and nll of a model with some of its layers."""
    part = TransformerStage(model, range(0), has_embedding=True, has_head=True)
    part.blocks = torch.nn.ModuleDict({str(number): model.blocks[number] for number in layers})
    part.tied_weight = model.embedding.weight
    return torch.stack(next_token_loss(part(tokens), targets, z_loss=model.config.z_loss))


def train(*, run: str, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train once and return the held-out loss in nats a token, of the model and of parts of its layers."""
    corpus = open_corpus("stdlib", cache=cache, tokenizer="bytes")
    num_layers = KEPT if run == "four layers" else LAYERS
    shape = TransformerConfig(vocab_size=corpus.tokenizer.vocab_size, dim=64, layers=num_layers, heads=4)
    model: Any = build_transformer(shape, seed=seed)
    whole, chance = tuple(range(num_layers)), random.Random(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: lr_factor(step, steps=steps))
    batches = Sampler(corpus.train, replica=0, num_replicas=1, batch_size=WINDOWS, seq_len=SEQ_LEN, seed=seed)
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        paths = [whole] * WINDOWS
        if run == "skip":
            paths = [(0, *sorted(chance.sample(whole[1:], KEPT - 1))) for _ in range(WINDOWS)]
        for path, row, target in zip(paths, tokens.split(1), targets.split(1), strict=True):
            (loss_of(model, path, row, target)[0] / WINDOWS).backward()
        for number, block in enumerate(model.blocks):
            visits = sum(number in path for path in paths)
            for parameter in block.parameters():
                if parameter.grad is not None and visits:
                    parameter.grad.mul_(WINDOWS / visits)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
        scheduler.step()
    held_out = list(validation_batches(corpus.held_out, batch_size=8, seq_len=SEQ_LEN, max_batches=EVAL_BATCHES))

    def held_out_loss(layers: tuple[int, ...]) -> float:
        with torch.no_grad():
            return statistics.fmean(float(loss_of(model, layers, *batch)[1]) for batch in held_out)

    found = {"val_loss": held_out_loss(whole)}
    for kept in (KEPT, LAYERS // 2) if num_layers == LAYERS else ():
        parts = [(0, *more) for more in itertools.combinations(whole[1:], kept - 1)]
        found[f"val_loss_{kept}_layers"] = statistics.fmean(map(held_out_loss, parts))
    return found


def report(lines: list[dict[str, Any]]) -> None:
    """Print the losses of each run: mean over the seeds, and each."""
    for name in RUNS:
        for key in ("val_loss", f"val_loss_{KEPT}_layers", f"val_loss_{LAYERS // 2}_layers"):
            found = [one[key] for one in lines if one["run"] == name and key in one]
            if found:
                each = " ".join(f"{loss:.4f}" for loss in found)
                print(f"{name:12} {key:18} {statistics.fmean(found):.4f}   {each}")


def main() -> None:
    """Run what is not stored, and print the table."""
    given = stored_runs.options(steps=150)
    runs = [{"run": run, "seed": seed, "steps": given.steps} for seed in range(given.seeds) for run in RUNS]
    report(stored_runs.complete(given, runs, train))


if __name__ == "__main__":
    main()
