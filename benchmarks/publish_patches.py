"""Bytes of a version of published weights, at learning rates of reinforcement learning and of pre-training.

    python benchmarks/publish_patches.py     # prints the table, and writes results/publish_patches.jsonl

The `nano` preset learns the standard library's bytes with AdamW at a rate of 1e-3. From there it goes on at each rate,
and every step is a version: bfloat16 weights, of which all codes but E3M0 keep every bit. Mean of the steps but the
first, whose momentum is of the old rate too. The last row is DiLoCo's outer steps on one replica: 30 inner steps at a
rate of 1e-3, then Nesterov's step at 0.7.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.codecs.e3m0 import e3m0
from thinwire.publish.patch import Words, decode_fragment, encode_fragment
from thinwire.publish.weights import fragments_of, specs_of
from thinwire.workloads.language.presets import preset
from thinwire.workloads.language.transformer import build_transformer, next_token_loss

RESULTS = Path(__file__).parent / "results" / "publish_patches.jsonl"
RATES = (1e-6, 3e-6, 3e-5, 1e-4, 1e-3)
SEQ, BATCH = 128, 8


class Trainer:
    """A small decoder on text, whose rate can be set."""

    def __init__(self, *, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.model = build_transformer(preset("nano"), seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(1)

    def outer_step(self, outer: torch.optim.Optimizer, whole: list[torch.Tensor], *, inner_steps: int) -> None:
        """Train for some steps, and apply their difference to the global parameters."""
        for _ in range(inner_steps):
            self.step()
        with torch.no_grad():
            for mine, shared in zip(self.model.parameters(), whole, strict=True):
                shared.grad = shared - mine
            outer.step()
            for mine, shared in zip(self.model.parameters(), whole, strict=True):
                mine.copy_(shared)

    def step(self) -> float:
        starts = torch.randint(0, len(self.data) - SEQ - 1, (BATCH,), generator=self.generator)
        rows = torch.stack([self.data[start : start + SEQ + 1] for start in starts])
        loss = next_token_loss(self.model(rows[:, :-1]), rows[:, 1:], z_loss=0)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def words(self) -> list[Words]:
        """Return the fragments that a publisher would send."""
        tensors = dict(self.model.state_dict())
        return list(fragments_of(tensors, specs_of(tensors, is_exact=False)))


def sizes(old: list[Words], new: list[Words]) -> dict[str, float]:
    """Return bytes by code, and the seconds of encoding and decoding; every payload is decoded and compared."""
    joined, before = np.concatenate(new), np.concatenate(old)
    began_s = time.perf_counter()
    payloads = [encode_fragment(words, old=base)[0] for words, base in zip(new, old, strict=True)]
    encoded_s = time.perf_counter()
    for payload, words, base in zip(payloads, new, old, strict=True):
        assert np.array_equal(decode_fragment(payload, count=len(words), old=base), words)
    decoded_s = time.perf_counter()
    changed = int((joined != before).sum())
    return {
        "changed": changed / len(joined), "patch": sum(map(len, payloads)),
        "xor_zlib": len(zlib.compress((joined ^ before).tobytes(), 1)), "raw_indices": 6 * changed,
        "e3m0": e3m0().payload_bytes(len(joined)), "anchor": sum(len(encode_fragment(w, old=None)[0]) for w in new),
        "dense": 2 * len(joined), "encode_s": encoded_s - began_s, "decode_s": decoded_s - encoded_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="at a rate of 1e-3, before")
    parser.add_argument("--versions", type=int, default=3, help="that are measured at each rate")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    trainer = Trainer(threads=options.threads)
    for _ in range(options.steps):
        loss = trainer.step()
    print(f"loss {loss:.3f} after {options.steps} steps")
    start = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
    rows = []
    for name in (*RATES, "DiLoCo"):
        trainer.model.load_state_dict(start[0])
        trainer.optimizer.load_state_dict(copy.deepcopy(start[1]))
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-3 if name == "DiLoCo" else name
        whole = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True)

        def advance(name: object = name, outer: Any = outer, whole: Any = whole) -> None:
            if name == "DiLoCo":
                trainer.outer_step(outer, whole, inner_steps=30)
            else:
                trainer.step()

        advance()
        old, found = trainer.words(), []
        for _ in range(options.versions):
            advance()
            new = trainer.words()
            found.append(sizes(old, new))
            old = new
        row: dict[str, Any] = {"lr": name, **{key: float(np.mean([one[key] for one in found])) for key in found[0]}}
        rows.append(row)
        ratios = ", ".join(
            f"{key} {row['dense'] / row[key]:.1f}x" for key in ("patch", "xor_zlib", "raw_indices", "e3m0", "anchor")
        )
        print(f"lr {name}: {row['changed']:.2%} changed, {row['patch'] / 1e3:.1f} kB; {ratios}; "
              f"{row['encode_s']:.3f} s to encode, {row['decode_s']:.3f} s to decode")  # fmt: skip
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
