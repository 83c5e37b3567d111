"""Loss of fine-tuning with differences between visits of samples (AQ-SGD) as the code of borders.

    python benchmarks/activation_delta.py            # into benchmarks/results/activation_delta.jsonl
    python benchmarks/activation_delta.py --report   # the stored results

A byte-level decoder (width 64, 4 layers, a border after every layer) trains 10 epochs on 128 fixed windows of the
standard library. Borders code activations and gradients in one process, as real ones do. A stored run is left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import stored_runs
import torch

from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.delta_memory import DeltaMemory
from thinwire.workloads.language import open_corpus
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import TransformerStage, build_transformer, next_token_loss

SAMPLES, EPOCHS, ROWS, SEQ_LEN, WIDTH, LAYERS = 128, 10, 8, 64, 64, 4
DIRECT, DELTA = (ActivationCode("block-int4", "block-int8", memory=memory, samples=samples)
                 for memory, samples in ((None, 0), ("delta", SAMPLES)))  # fmt: skip
RUNS = {"none": None, "int4 direct": DIRECT, "int4 delta": DELTA}


class Border(torch.autograd.Function):
    """What a coded border does to activations and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, ends: tuple[DeltaMemory, DeltaMemory] | None, numbers: list[int]
    ) -> torch.Tensor:
        out = torch.empty_like(values)
        if ends is None:
            DIRECT.decode(DIRECT.encode(values, is_forward=True, source=""), out, is_forward=True, source="")
        else:
            ends[1].decode(ends[0].encode(values, numbers, source=""), out, numbers, source="")
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        out = torch.empty_like(grad)
        DIRECT.decode(DIRECT.encode(grad, is_forward=False, source=""), out, is_forward=False, source="")
        return out, None, None


def train(*, code: str, seed: int, cache: Path) -> dict[str, Any]:
    """Train once; return the mean training loss of the last epoch, in nats a byte."""
    corpus: Any = open_corpus("stdlib", cache=cache, tokenizer="bytes")
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(corpus.train) - SEQ_LEN - 1, (SAMPLES,), generator=generator).tolist()
    windows = torch.stack([torch.tensor(corpus.train[one : one + SEQ_LEN + 1].tolist()) for one in begins])
    shape = TransformerConfig(
        vocab_size=corpus.tokenizer.vocab_size, dim=WIDTH, layers=LAYERS, heads=4, max_seq_len=SEQ_LEN
    )
    model: Any = build_transformer(shape, seed=seed)
    chunks = [TransformerStage(model, range(place, place + 1), has_embedding=not place, has_head=place == LAYERS - 1)
              for place in range(LAYERS)]  # fmt: skip
    chunks[-1].tied_weight = model.embedding.weight
    used = RUNS[code]
    ends = [(DELTA.make_memory(), DELTA.make_memory()) if used is DELTA else None for _ in chunks[1:]]
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    for _ in range(EPOCHS):
        losses = []
        for numbers in torch.randperm(SAMPLES, generator=generator).view(-1, ROWS).tolist():
            values = windows[numbers, :-1]
            for place, chunk in enumerate(chunks):
                if place and used is not None:
                    values = Border.apply(values, ends[place - 1], numbers)
                values = chunk(values)
            loss = next_token_loss(values, windows[numbers, 1:], z_loss=model.config.z_loss)
            loss[0].backward()
            losses.append(float(loss[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            inner.zero_grad()
    return {"loss": statistics.fmean(losses)}


def main() -> None:
    """Run what is not stored, and print the table."""
    given = stored_runs.options()
    runs = [{"code": code, "seed": seed} for seed in range(given.seeds) for code in RUNS]
    lines = stored_runs.complete(given, runs, train)
    plain = {one["seed"]: one["loss"] for one in lines if one["code"] == "none"}
    for name in RUNS:
        own = [(one["loss"], one["loss"] - plain[one["seed"]]) for one in lines if one["code"] == name]
        if own:
            losses = " ".join(f"{loss:.4f}" for loss, _ in own)
            means = [statistics.fmean(column) for column in zip(*own, strict=True)]
            print(f"{name:12} {losses}  mean {means[0]:.4f}, over none {means[1]:+.4f}")


if __name__ == "__main__":
    main()
