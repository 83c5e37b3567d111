"""Loss with coded borders between the stages of a model, against none.

    python benchmarks/activation_loss.py            # into benchmarks/results/activation_loss.jsonl
    python benchmarks/activation_loss.py --model 35m --steps 60 --seeds 1  # its width and layers, nano's vocabulary
    python benchmarks/activation_loss.py --report   # the stored results

A model trains on the standard library's text in one process: every border codes activations, their gradients and the
tied head's copy as a pipeline over real borders does, which tests show to give the same gradients. A run that is stored
is left out.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import stored_runs
import torch

from thinwire.codecs.activation_code import ActivationCode
from thinwire.site.pipeline import chunk_layers
from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import Sampler, build_model, open_corpus, validation_batches
from thinwire.workloads.language.transformer import TransformerStage, next_token_loss

SEQ_LEN, WINDOWS, EVAL_BATCHES, VOCABULARY = 64, 4, 20, 2048
LR = {"nano": 3e-3, "35m": 1e-3}
# Code and stages: two sites, and a border after every layer.
RUNS: tuple[tuple[str, int], ...] = (
    ("none", 1), ("block-int8/block-int4", 2), ("block-int8/block-int4", 6), ("block-int4/block-int4", 2),
)  # fmt: skip


class RoundTrip(torch.autograd.Function):
    """What a coded border does to activations and their gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, code: ActivationCode) -> torch.Tensor:
        ctx.code = code
        return decoded(code, values, is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return decoded(ctx.code, grad, is_forward=False), None


def decoded(code: ActivationCode, values: torch.Tensor, *, is_forward: bool) -> torch.Tensor:
    """Return what the other end of a border gets."""
    out = torch.empty_like(values)
    code.decode(code.encode(values, is_forward=is_forward, source=""), out, is_forward=is_forward, source="")
    return out


def train(*, model: str, code: str, stages: int, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train once and return the held-out loss in nats a token."""
    corpus = open_corpus("stdlib", cache=cache, vocab_size=VOCABULARY, tokenizer="bpe")
    whole: Any = build_model(model, seed=seed, vocab_size=VOCABULARY)
    used = None if code == "none" else ActivationCode.parse(code)
    sizes = chunk_layers(whole.config.layers, stages)
    firsts = [sum(sizes[:number]) for number in range(stages)]
    chunks = [
        TransformerStage(whole, range(first, first + size), has_embedding=first == 0, has_head=number == stages - 1)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    ]
    inner = torch.optim.AdamW(whole.parameters(), lr=LR[model], betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: lr_factor(step, steps=steps))
    batches = Sampler(corpus.train, replica=0, num_replicas=1, batch_size=WINDOWS, seq_len=SEQ_LEN, seed=seed)
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        weight, values = whole.embedding.weight, tokens
        chunks[-1].tied_weight = weight if used is None else RoundTrip.apply(weight, used)
        for number, chunk in enumerate(chunks):
            values = chunk(values if number == 0 or used is None else RoundTrip.apply(values, used))
        next_token_loss(values, targets, z_loss=whole.config.z_loss)[0].backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
        scheduler.step()
    held_out = validation_batches(corpus.held_out, batch_size=8, seq_len=SEQ_LEN, max_batches=EVAL_BATCHES)
    with torch.no_grad():
        loss = statistics.fmean(float(whole.loss(*batch)[1]) for batch in held_out)
    return {"val_loss": loss}


def report(lines: list[dict[str, Any]]) -> None:
    """Print the loss of each code beside that of no code with the same seed and steps."""
    plain = {(one["model"], one["seed"], one["steps"]): one["val_loss"] for one in lines if one["code"] == "none"}
    for size, (name, stages) in itertools.product(LR, RUNS):
        own = [one for one in lines if (one["model"], one["code"], one["stages"]) == (size, name, stages)]
        pairs = [(one["val_loss"], plain[size, one["seed"], one["steps"]]) for one in own]
        if pairs:
            excess = [loss / base - 1 for loss, base in pairs]
            losses = " ".join(f"{loss:.4f}" for loss, _ in pairs)
            mean, largest = statistics.fmean(excess), max(excess)
            print(f"{size:4} {name:24} {stages} stages  {losses}  mean {mean:+.2%}, largest {largest:+.2%}")


def main() -> None:
    """Run what is not stored, and print the table."""
    given = stored_runs.options(steps=150, model={"choices": LR, "default": "nano"})
    # the last code is beside the question: it comes after the seeds of all others
    order = [(seed, *one) for group in (RUNS[:3], RUNS[3:]) for seed in range(given.seeds) for one in group]
    runs = [
        {"model": given.model, "code": code, "stages": stages, "seed": seed, "steps": given.steps}
        for seed, code, stages in order
    ]
    report(stored_runs.complete(given, runs, train))


if __name__ == "__main__":
    main()
