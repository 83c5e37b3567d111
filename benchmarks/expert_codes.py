"""Loss of a mixture of experts whose tokens are coded on their way to experts and back, against none.

    python benchmarks/expert_codes.py            # into benchmarks/results/expert_codes.jsonl
    python benchmarks/expert_codes.py --report   # the stored results

`moe-nano` trains on the standard library's text in one process that codes every row in all four crossings, as if no
token's expert were ever on its own rank. On N ranks about 1/N of the rows stay uncoded. A stored run is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from activation_loss import RoundTrip

from thinwire import experts
from thinwire.codec_specs import activation_bytes, activation_codecs
from thinwire.codecs.activation_code import ActivationCode
from thinwire.experts import ExpertRanks
from thinwire.training.summary import describe_machine
from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import Sampler, build_transformer, open_corpus, preset, validation_batches

RESULTS = Path(__file__).parent / "results" / "expert_codes.jsonl"
MODEL, SEQ_LEN, WINDOWS, EVAL_BATCHES, VOCABULARY, LR = "moe-nano", 64, 8, 20, 2048, 3e-3
CODES = ("none", "block-int4/block-int4", "block-int8/block-int4", "block-int8/block-int8")
# others with fewer numbers: means of clusters (LSH-MoE); a quarter of the width, with as many parameters (BigMac)
CLUSTERS = {
    "clusters of 1 hash": experts.clusters(hashes=1), "clusters of 2 hashes": experts.clusters(hashes=2),
    "clusters of 2 hashes, compensated": experts.clusters(hashes=2, compensate=True),
}  # fmt: skip
LOW_RANK = {"low rank 48": 48}
OTHERS = (*CLUSTERS, *LOW_RANK)


@dataclass(frozen=True)
class AllCoded:
    """Dispatch policy that codes all rows and keeps them where they are."""

    code: ActivationCode

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], experts: ExpertRanks) -> torch.Tensor:
        there = torch.cat([RoundTrip.apply(part, self.code) for part in torch.split(rows, list(counts))])
        made = experts.compute(there, counts)
        return torch.cat([RoundTrip.apply(part, self.code) for part in torch.split(made, list(counts))])


class Counted:
    """Dispatch policy that keeps rows where they are, and counts them."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], experts: ExpertRanks) -> torch.Tensor:
        self.rows += len(rows)
        return experts.compute(rows, counts)


def train(name: str, *, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train once and return the held-out loss in nats a token."""
    torch.set_num_threads(1)
    corpus = open_corpus("stdlib", cache=cache, vocab_size=VOCABULARY, tokenizer="bpe")
    shape = preset(MODEL, vocab_size=VOCABULARY)
    if name in LOW_RANK:
        shape = replace(shape, expert_dim=LOW_RANK[name], mlp_dim=shape.mlp_dim * shape.dim // LOW_RANK[name])
    model: Any = build_transformer(shape, seed=seed)
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: lr_factor(step, steps=steps))
    uncoded = [block.experts.dispatch for block in model.blocks]
    counted = Counted()
    if name in CLUSTERS:
        for block in model.blocks:
            block.experts.dispatch = replace(CLUSTERS[name], dispatch=counted)
    elif name in CODES[1:]:
        for block in model.blocks:
            block.experts.dispatch = AllCoded(ActivationCode.parse(name))
    batches = Sampler(corpus.train, replica=0, num_replicas=1, batch_size=WINDOWS, seq_len=SEQ_LEN, seed=seed)
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        model.loss(tokens, targets)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
        scheduler.step()
    for block, dispatch in zip(model.blocks, uncoded, strict=True):  # a finished model runs on one rank
        block.experts.dispatch = dispatch
    held_out = validation_batches(corpus.held_out, batch_size=8, seq_len=SEQ_LEN, max_batches=EVAL_BATCHES)
    with torch.no_grad():
        loss = statistics.fmean(float(model.loss(*batch)[1]) for batch in held_out)
    # each layer sends a row for each of two experts of a token
    sent = counted.rows / (steps * len(model.blocks) * 2 * WINDOWS * SEQ_LEN)
    rate = sent if name in CLUSTERS else LOW_RANK[name] / shape.dim if name in LOW_RANK else None
    found = {"model": MODEL, "code": name, "seed": seed, "steps": steps, "val_loss": loss}
    return found if rate is None else {**found, "rate": rate}


def bits(name: str) -> float:
    """Return the bits of a number on its way, the mean of both directions."""
    codes = ("bfloat16", "bfloat16") if name == "none" else activation_codecs(name)
    return statistics.fmean(8 * activation_bytes(code, 2**20) / 2**20 for code in codes)


def read(results: Path) -> list[dict[str, Any]]:
    """Return the stored runs."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(lines: list[dict[str, Any]]) -> None:
    """Print the bytes of each code as a share of 16 bits, and its loss beside that of no code with the same seed."""
    plain = {(one["seed"], one["steps"]): one["val_loss"] for one in lines if one["code"] == "none"}
    for name in (*CODES, *OTHERS):
        pairs = [(one["val_loss"], plain[one["seed"], one["steps"]]) for one in lines if one["code"] == name]
        if pairs:
            excess = [loss / base - 1 for loss, base in pairs]
            losses = " ".join(f"{loss:.4f}" for loss, _ in pairs)
            rate = statistics.fmean(one.get("rate") or bits(name) / 16 for one in lines if one["code"] == name)
            print(f"{name:34} {rate:.3f}  {losses}  mean {statistics.fmean(excess):+.2%}, largest {max(excess):+.2%}")


def main() -> None:
    """Run what is not stored, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/thinwire").expanduser())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    stored = {(one["code"], one["seed"], one["steps"]) for one in read(options.results)}
    order = [(name, seed) for seed in range(options.seeds) for name in (*CODES, *OTHERS)]
    for name, seed in () if options.report else order:
        if (name, seed, options.steps) not in stored:
            line = train(name, seed=seed, steps=options.steps, cache=options.cache)
            line |= {"machine": describe_machine(torch.device("cpu"))}
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    report(read(options.results))


if __name__ == "__main__":
    main()
