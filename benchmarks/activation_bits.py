"""Bytes and loss of codes for activations of a model with outlier channels: fixed bits against learned ones (AMAQ).

    python benchmarks/activation_bits.py            # into benchmarks/results/activation_bits.jsonl
    python benchmarks/activation_bits.py --report   # the stored results

A byte-level decoder of 4 layers and width 64 trains on the standard library's text, with a border behind each of the
first three layers. At a border three of the 64 channels are 30 times as large as the model has them: a diagonal matrix
before the code and its inverse behind it, so that without a code nothing changes. Gradients cross in block-int8.
`rotated` codes the Hadamard transform of each row, `anchored` the difference from the embedding of the row's own token.
A run that is stored is left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import stored_runs
import torch
from activation_loss import RoundTrip

from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.channel_bits import AdaptiveBits, channel_payload_bytes
from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import Sampler, open_corpus, validation_batches
from thinwire.workloads.language.transformer import (
    TransformerConfig,
    TransformerStage,
    build_transformer,
    next_token_loss,
)

CONFIG = TransformerConfig(vocab_size=257, dim=64, layers=4, heads=4, max_seq_len=64)
WINDOWS, LR, SCORE_LR, OUTLIERS, FACTOR = 4, 3e-3, 5e-2, (5, 23, 40), 30.0
NAMES = (
    "none", "fixed 8", "fixed 6", "learned 0.01", "fixed 4", "learned 0.1", "fixed 5", "learned 0.03", "fixed 3",
    "rotated block-int4", "block-int4",
    "fixed 2", "anchored block-int4",
)  # fmt: skip


class Border(torch.nn.Module):
    """What a value goes through on its way to the next stage; counts the bytes of activations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        last, self.bits = name.split(" ")[-1], None
        if "learned" in name:
            self.bits = AdaptiveBits(CONFIG.dim, least=2, most=8)
        elif "fixed" in name:
            self.bits = AdaptiveBits(CONFIG.dim, least=int(last), most=int(last)).requires_grad_(False)
        # learned bits have rounded the activations before the code: tests hold that the receiver gets the same
        self.code = ActivationCode("float32" if self.bits or name == "none" else last,
                                   "float32" if name == "none" else "block-int8")  # fmt: skip
        scale = torch.ones(CONFIG.dim)
        scale[list(OUTLIERS)] = FACTOR
        self.matrix, self.inverse = torch.diag(scale), torch.diag(1 / scale)
        if "rotated" in name:
            turn = torch.ones(1, 1)
            while len(turn) < CONFIG.dim:
                turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)]) / 2**0.5
            self.matrix, self.inverse = self.matrix @ turn, turn.T @ self.inverse
        self.is_anchored, self.sent, self.numel = "anchored" in name, 0, 0

    def forward(self, values: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Return what the next stage computes with."""
        known = anchor.detach() if self.is_anchored else torch.zeros(())
        coded = (values - known) @ self.matrix
        size = self.code.payload_bytes(values.numel())
        if self.bits is not None:
            coded = self.bits(coded)
            size = channel_payload_bytes(self.bits.widths(), rows=values.numel() // CONFIG.dim)
        if self.training:
            self.sent, self.numel = self.sent + size, self.numel + values.numel()
        found: torch.Tensor = RoundTrip.apply(coded, self.code)
        return found @ self.inverse + known


def train(*, code: str, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train once; return the held-out loss in nats a byte and the bits of an activation, tables and scales included."""
    corpus = open_corpus("stdlib", cache=cache, vocab_size=CONFIG.vocab_size, tokenizer="bytes", max_bytes=1 << 22)
    model: Any = build_transformer(CONFIG, seed=seed)
    last = CONFIG.layers - 1
    stages = [
        TransformerStage(model, range(one, one + 1), has_embedding=one == 0, has_head=one == last)
        for one in range(CONFIG.layers)
    ]
    borders = torch.nn.ModuleList(Border(code) for _ in range(last))
    price = float(code.split(" ")[-1]) if "learned" in code else 0.0
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: lr_factor(step, steps=steps))
    scores = torch.optim.Adam([one.bits.scores for one in borders] if price else [torch.zeros(1)], lr=SCORE_LR)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        stages[-1].tied_weight = model.embedding.weight
        values, anchor = tokens, model.embedding.weight[tokens]
        for number, stage in enumerate(stages):
            values = stage(values)
            if number < last:
                values = borders[number](values, anchor)
        return values

    batches = Sampler(
        corpus.train, replica=0, num_replicas=1, batch_size=WINDOWS, seq_len=CONFIG.max_seq_len, seed=seed
    )
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        loss = next_token_loss(logits(tokens), targets, z_loss=CONFIG.z_loss)[0]
        (loss + price * sum(one.bits.regulariser() for one in borders) / last if price else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (inner, scores):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    borders.eval()
    held_out = validation_batches(corpus.held_out, batch_size=16, seq_len=CONFIG.max_seq_len, max_batches=8)
    with torch.no_grad():
        losses = [float(next_token_loss(logits(tokens), targets, z_loss=0)[1]) for tokens, targets in held_out]
    widths = [one.bits.widths().float().mean().item() for one in borders] if price else []
    outliers = [one.bits.widths()[list(OUTLIERS)].float().mean().item() for one in borders] if price else []
    return {
        "val_loss": statistics.fmean(losses),
        "bits": 8 * sum(one.sent for one in borders) / sum(one.numel for one in borders),
        "last_widths": widths, "last_widths_of_outliers": outliers,
    }  # fmt: skip


def report(lines: list[dict[str, Any]]) -> None:
    """Print bits and loss of each code, and the difference from no code with the same seed."""
    plain = {(one["seed"], one["steps"]): one["val_loss"] for one in lines if one["code"] == "none"}
    for name in NAMES:
        own = [one for one in lines if one["code"] == name]
        if own:
            excess = [one["val_loss"] - plain[one["seed"], one["steps"]] for one in own]
            bits = statistics.fmean(one["bits"] for one in own)
            each = " ".join(f"{one:+.4f}" for one in excess)
            print(f"{name:20} {bits:6.2f} bits  {statistics.fmean(excess):+.4f} nats  ({each})")


def main() -> None:
    """Run what is not stored, and print the table."""
    given = stored_runs.options(steps=150, codes={"nargs": "*", "choices": NAMES, "default": NAMES})
    runs = [{"code": code, "seed": seed, "steps": given.steps} for code in given.codes for seed in range(given.seeds)]
    report(stored_runs.complete(given, runs, train))


if __name__ == "__main__":
    main()
