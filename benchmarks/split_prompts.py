"""Loss and bytes of SFPrompt on a small decoder, against split training of all layers.

    python benchmarks/split_prompts.py     # prints the table, and writes results/split_prompts.jsonl

A byte-level decoder (4 layers, width 64, untied head) learns the standard library's text. A client then has 64 texts of
64 bytes of it with the letters rotated by 13, and trains on them for 4 epochs. Layers 1 and 2 are the server's; what
crosses both borders is coded by default. Bytes are payloads, those of scoring included. Phase 1 trains prompt and tail
with the body left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from activation_loss import RoundTrip
from torch import Tensor

from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import SoftPrompt, el2n_scores, hardest, split_round_bytes
from thinwire.workloads.language import Sampler, open_corpus, validation_batches
from thinwire.workloads.language.transformer import (
    TransformerConfig,
    TransformerStage,
    build_transformer,
    next_token_loss,
)

RESULTS = Path(__file__).parent / "results" / "split_prompts.jsonl"
PROMPT, SEQ, BATCH, TEXTS, EPOCHS, SEEDS, BASE_STEPS, LR, SHARE = 5, 64, 8, 64, 4, 3, 120, 3e-3, 0.5
CONFIG = TransformerConfig(vocab_size=257, dim=64, layers=4, heads=4, max_seq_len=SEQ + PROMPT, tied_head=False)
CODE = ActivationCode()


class Split:
    """A cut decoder with a prompt; trained parts are chosen by `tuned`."""

    def __init__(self, base: Any, *, seed: int, is_full: bool) -> None:
        self.model, self.prompt = copy.deepcopy(base), SoftPrompt(PROMPT, CONFIG.dim, seed=seed)
        head, body, tail = (range(1), range(1, 3), range(3, 4))
        self.head = TransformerStage(self.model, head, has_embedding=False, has_head=False)
        self.body = TransformerStage(self.model, body, has_embedding=False, has_head=False)
        self.tail = TransformerStage(self.model, tail, has_embedding=False, has_head=True)
        if is_full:
            self.tuned = list(self.model.parameters())
        else:
            self.model.requires_grad_(False)
            self.tuned = [*self.tail.requires_grad_(True).parameters(), *self.prompt.parameters()]

    def logits(self, tokens: Tensor, *, has_body: bool = True) -> Tensor:
        """Return logits of the tokens behind the prompt."""
        prompt = self.prompt.vectors.expand(len(tokens), -1, -1)
        hidden = self.head(torch.cat([prompt, self.model.embedding(tokens)], 1))
        if has_body:
            hidden = RoundTrip.apply(self.body(RoundTrip.apply(hidden, CODE)), CODE)
        found: Tensor = self.tail(hidden)[:, PROMPT:]
        return found

    def train(self, texts: Tensor, *, seed: int, has_body: bool = True) -> None:
        """Train for the epochs on texts (samples, seq + 1)."""
        optimizer = torch.optim.AdamW(self.tuned, lr=LR)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(texts), generator=generator).split(BATCH):
                tokens = texts[rows]
                next_token_loss(self.logits(tokens[:, :-1], has_body=has_body), tokens[:, 1:], z_loss=0)[0].backward()
                optimizer.step()
                optimizer.zero_grad()

    @torch.no_grad()
    def scores(self, texts: Tensor, *, has_body: bool = True) -> Tensor:
        """Return the error of each text."""
        return el2n_scores(self.logits(texts[:, :-1], has_body=has_body), texts[:, 1:])


def run(base: Any, texts: Tensor, held_out: list[tuple[Tensor, Tensor]], *, seed: int) -> None:
    """Train in each way, and write a line for each."""
    there_and_back = 2 * TEXTS * CODE.payload_bytes((SEQ + PROMPT) * CONFIG.dim)

    def note(way: str, split: Split, *, kept: int, more_bytes: int = 0, has_body: bool = True) -> None:
        one_pass = split_round_bytes(samples=kept, positions=SEQ + PROMPT, width=CONFIG.dim, code=CODE)
        with torch.no_grad():
            losses = [
                float(next_token_loss(split.logits(tokens, has_body=has_body), targets, z_loss=0)[1])
                for tokens, targets in held_out
            ]
        line = {"way": way, "seed": seed, "bytes": EPOCHS * one_pass + more_bytes, "loss": statistics.fmean(losses)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    half = int(SHARE * TEXTS)
    note("untrained", Split(base, seed=seed, is_full=False), kept=0)
    for way, is_full in (("all layers, all texts", True), ("prompt and tail, all texts", False)):
        split = Split(base, seed=seed, is_full=is_full)
        split.train(texts, seed=seed)
        note(way, split, kept=TEXTS)
    for way in ("scored by the whole model", "scored without body", "chosen at random"):
        split = Split(base, seed=seed, is_full=False)
        scores = torch.rand(TEXTS) if "random" in way else split.scores(texts, has_body="whole" in way)
        split.train(texts[hardest(scores, SHARE)], seed=seed)
        note(f"prompt and tail, half {way}", split, kept=half, more_bytes=there_and_back if "whole" in way else 0)
    split = Split(base, seed=seed, is_full=False)
    split.train(texts, seed=seed, has_body=False)
    note("phase 1 alone, tested with body", split, kept=0)
    note("phase 1 alone, tested without body", split, kept=0, has_body=False)
    split.train(texts[hardest(split.scores(texts), SHARE)], seed=seed)
    note("phase 1, then half scored by the whole model", split, kept=half, more_bytes=there_and_back)


def main() -> None:
    """Train the base, run all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/thinwire").expanduser())
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus("stdlib", cache=options.cache, vocab_size=257, tokenizer="bytes", max_bytes=1 << 22)
    turned = torch.arange(257)
    for first in (65, 97):
        turned[first : first + 26] = first + (torch.arange(26) + 13) % 26
    base: Any = build_transformer(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(base.parameters(), lr=LR)
    batches = Sampler(corpus.train, replica=0, num_replicas=1, batch_size=BATCH, seq_len=SEQ, seed=0)
    for _, batch in zip(range(BASE_STEPS), batches, strict=False):
        base.loss(*batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = [
        (turned[tokens], turned[targets])
        for tokens, targets in validation_batches(corpus.held_out, batch_size=BATCH, seq_len=SEQ, max_batches=12)
    ]
    RESULTS.unlink(missing_ok=True)
    for seed in range(SEEDS):
        own = Sampler(corpus.train, replica=0, num_replicas=1, batch_size=TEXTS, seq_len=SEQ, seed=100 + seed)
        tokens, targets = next(iter(own))
        torch.manual_seed(seed)
        run(base, turned[torch.cat([tokens, targets[:, -1:]], 1)], held_out, seed=seed)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for way in dict.fromkeys(line["way"] for line in lines):
        losses = [line["loss"] for line in lines if line["way"] == way]
        num_bytes = next(line["bytes"] for line in lines if line["way"] == way)
        each = " ".join(f"{one:.3f}" for one in losses)
        print(f"{way:52} {num_bytes / 1e6:6.2f} MB  {statistics.fmean(losses):.3f} nats  ({each})")


if __name__ == "__main__":
    main()
