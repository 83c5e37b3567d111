"""Experts trained apart against one dense model and against DiLoCo, on four domains of text at equal compute.

    python benchmarks/expert_sets.py --work DIR     # into benchmarks/results/expert_sets.jsonl
    python benchmarks/expert_sets.py --report       # the stored results

The text is local: Python's standard library, English prose of Debian's documentation, JSON and C files, and two domains
that no model is trained on, Perl and HTML. All models are decoders of 0.13 M parameters, and all arms see the same
number of tokens: the dense model trains for --steps steps on all domains; experts start from a seed model of a quarter
of the steps and share the rest. Every trained model is kept in DIR, so a run that was stopped goes on. Each arm has the
best of two learning rates, by its loss on the four domains.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import thinwire
from thinwire.ensembles import divide_budget
from thinwire.ensembles.ensemble import Ensemble
from thinwire.training.summary import describe_machine
from thinwire.wire_benchmark.worker import lr_factor
from thinwire.workloads.language import BpeTokenizer, Sampler, TransformerConfig, build_transformer
from thinwire.workloads.sampler import windows

RESULTS = Path(__file__).parent / "results" / "expert_sets.jsonl"
DOMAINS, UNSEEN = ("python", "prose", "json", "c"), ("perl", "html")
STEPS, BATCH, SEQ_LEN, VOCABULARY, SYNC_INTERVAL = 600, 8, 128, 512, 15
LRS = (6e-3, 3e-3)
TRAIN_BYTES, OTHER_BYTES, DOCUMENT_BYTES = 600_000, 30_000, 8_000
SHAPE = TransformerConfig(vocab_size=VOCABULARY, dim=64, layers=2, heads=2, max_seq_len=SEQ_LEN)


def files(domain: str) -> Iterable[Path]:
    """Return the files of a domain on this machine."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    share = Path("/usr/share")
    skipped = ("site-packages", "test", "tests", "lib2to3", "pydoc_data")
    if domain == "python":
        return (path for path in library.rglob("*.py") if not any(part in skipped for part in path.parts))
    if domain == "json":
        return (path for root in (library, packages, share) for path in root.rglob("*.json"))
    found = {
        "prose": ("doc", ("*.txt", "README*", "NEWS*", "FAQ*", "copyright")),
        "c": ("../include", ("*.h",)), "perl": ("perl", ("*.pm", "*.pl")), "html": ("doc", ("*.html",)),
    }[domain]  # fmt: skip
    return (path for pattern in found[1] for path in (share / found[0]).rglob(pattern))


def texts(domain: str) -> Iterator[str]:
    """Yield the beginnings of a domain's files, each once, in the order of their hashes."""
    seen: dict[str, str] = {}
    for path in files(domain):
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = data[:DOCUMENT_BYTES].decode()
        except (OSError, UnicodeDecodeError, EOFError, gzip.BadGzipFile):
            continue
        if len(text) >= 500:
            seen[hashlib.sha256(text[-400:].encode()).hexdigest()] = text
    yield from (seen[key] for key in sorted(seen))


def prepare(work: Path) -> dict[str, dict[str, list[str]]]:
    """Return the documents of each domain for training, development and test."""
    path = work / "texts.json"
    if not path.exists():
        found: dict[str, dict[str, list[str]]] = {}
        for domain in (*DOMAINS, *UNSEEN):
            limits = {"test": OTHER_BYTES, "development": OTHER_BYTES}
            limits |= {"train": TRAIN_BYTES} if domain in DOMAINS else {}
            parts: dict[str, list[str]] = {name: [] for name in limits}
            for text in texts(domain):
                name = next((name for name, left in limits.items() if left > 0), None)
                if name is None:
                    break
                parts[name].append(text[: limits[name]])
                limits[name] -= len(parts[name][-1])
            found[domain] = parts
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


class Texts:
    """Tokens of every part of every domain."""

    def __init__(self, work: Path) -> None:
        self.documents = prepare(work)
        every = [text for domain in DOMAINS for text in self.documents[domain]["train"]]
        path = work / "tokenizer.json"
        if not path.exists():
            path.write_text(BpeTokenizer.train(every, vocab_size=VOCABULARY).to_json())
        import tokenizers

        self.tokenizer = BpeTokenizer(tokenizers.Tokenizer.from_file(str(path)))
        self.parts = {domain: self.documents[domain] for domain in self.documents}

    def tokens(self, documents: list[str]) -> np.ndarray[Any, Any]:
        end = np.array([self.tokenizer.end_of_text], dtype=np.int64)
        encoded = self.tokenizer.encode(documents)
        return np.concatenate([end, *(piece for one in encoded for piece in (one.astype(np.int64), end))])

    def train(self, name: str) -> np.ndarray[Any, Any]:
        """Return training tokens: of a domain, of all domains, or of a random quarter of all documents."""
        if name in DOMAINS:
            return self.tokens(self.parts[name]["train"])
        every = [text for domain in DOMAINS for text in self.parts[domain]["train"]]
        every.sort(key=lambda text: hashlib.sha256(b"order" + text.encode()).digest())
        return self.tokens(every if name == "all" else every[int(name[-1]) :: len(DOMAINS)])


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def steps_of(model: Any, optimizer: Any, batches: Sampler, *, steps: int, lr: float) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step, steps=steps)
        inputs, targets = next(batches)
        model.loss(inputs, targets)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Runs:
    """Trained models of one seed and learning rate, each made once and kept."""

    def __init__(self, work: Path, texts: Texts, *, seed: int, lr: float, steps: int) -> None:
        self.folder = work / f"seed{seed}-lr{lr:g}-steps{steps}"
        self.steps, self.each = steps, 3 * steps // (4 * len(DOMAINS))
        self.seed_steps = steps - len(DOMAINS) * self.each
        self.folder.mkdir(parents=True, exist_ok=True)
        self.texts, self.seed, self.lr = texts, seed, lr

    def model(self, name: str, *, data: str, steps: int, start: str | None = None) -> Any:
        """Return a model of `steps` steps on some data, from the seed's weights or those of another model."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            began_s = time.process_time()
            weights = None if start is None else safetensors.torch.load_file(self.folder / f"{start}.safetensors")
            model = build_transformer(SHAPE, seed=self.seed, weights=weights)
            batches = Sampler(self.texts.train(data), replica=0, num_replicas=1, batch_size=BATCH, seq_len=SEQ_LEN,
                              seed=self.seed)  # fmt: skip
            steps_of(model, optimizer_of(model, self.lr), batches, steps=steps, lr=self.lr)
            self._keep(model, path)
            print(f"{path}: {steps} steps, {time.process_time() - began_s:.0f} CPU seconds", flush=True)
        return build_transformer(SHAPE, weights=safetensors.torch.load_file(path)).eval().requires_grad_(False)

    def diloco(self) -> tuple[Any, int]:
        """Return the model of four replicas that share all data, and the bytes that each sent."""
        path, count = self.folder / "diloco.safetensors", self.folder / "diloco.json"
        if not path.exists():
            tokens, num = self.texts.train("all"), len(DOMAINS)

            def replica(transport: Any) -> int:
                torch.set_num_threads(1)
                recorded = thinwire.RecordingTransport(transport)
                model = build_transformer(SHAPE, seed=self.seed)
                inner = optimizer_of(model, self.lr)
                batches = Sampler(tokens, replica=transport.replica, num_replicas=num, batch_size=BATCH,
                                  seq_len=SEQ_LEN, seed=self.seed)  # fmt: skip
                method = thinwire.methods.diloco(sync_interval=SYNC_INTERVAL)
                with thinwire.DistributedOptimizer(model, inner, method=method, transport=recorded) as optimizer:
                    steps_of(model, optimizer, batches, steps=self.steps // num, lr=self.lr)
                    optimizer.close(final_exchange=True)
                    with optimizer.global_parameters():
                        if transport.replica == 0:
                            self._keep(model, path)
                return recorded.log.totals("sent").wire_bytes

            sent = thinwire.run_replicas(num, replica)
            count.write_text(json.dumps(max(sent)))
            print(f"{path}: {num} x {self.steps // num} steps, {max(sent)} bytes", flush=True)
        model = build_transformer(SHAPE, weights=safetensors.torch.load_file(path)).eval().requires_grad_(False)
        return model, json.loads(count.read_text())

    def _keep(self, model: Any, path: Path) -> None:
        partial = path.with_suffix(".partial")
        safetensors.torch.save_file({name: one.detach().clone() for name, one in model.state_dict().items()}, partial)
        partial.replace(path)

    def losses(self, model: Any) -> dict[str, float]:
        """Return the loss of a model on the test text of every domain, in nats a token."""
        return {domain: held_out(model, self.texts.tokens(parts["test"])) for domain, parts in self.texts.parts.items()}


def held_out(model: Any, tokens: np.ndarray[Any, Any]) -> float:
    """Return the mean loss over all whole windows."""
    count = (len(tokens) - 1) // SEQ_LEN
    losses = []
    for begin in range(0, count, 16):
        inputs, targets = windows(tokens, np.arange(begin, min(count, begin + 16)), seq_len=SEQ_LEN)
        with torch.no_grad():
            losses += [float(model.loss(inputs, targets)[1])] * len(inputs)
    return sum(losses) / len(losses)


def rows(runs: Runs) -> Iterator[dict[str, Any]]:
    """Train every model of a seed and learning rate that is not there, and yield the losses of each arm."""

    def row(arm: str, model: Any, sent: int = 0) -> dict[str, Any]:
        return {"arm": arm, "seed": runs.seed, "lr": runs.lr, "steps": runs.steps, "loss": runs.losses(model),
                "wire_bytes_sent": sent, "machine": describe_machine("cpu")}  # fmt: skip

    def ensemble(models: dict[str, Any], prior: list[float] | None = None, **how: bool) -> Ensemble:
        return Ensemble(models, prior=prior or [1 / len(models)] * len(models), **how)

    yield row("dense", runs.model("dense", data="all", steps=runs.steps))
    seed = runs.model("seed", data="all", steps=runs.seed_steps)
    yield row("seed alone", seed)
    plain = {"steps": runs.each, "start": "seed"}
    experts = {domain: runs.model(f"expert-{domain}", data=domain, **plain) for domain in DOMAINS}
    yield row("experts", ensemble(experts))
    yield row("experts, average", ensemble(experts, has_posterior=False))
    yield row("experts, updating", ensemble(experts, is_updating=True))
    weights = [dict(model.named_parameters()) for model in experts.values()]
    mean = {name: torch.stack([one[name] for one in weights]).mean(0) for name in weights[0]}
    yield row("experts, merged", build_transformer(SHAPE, weights=mean).eval())
    randoms = {f"{n}": runs.model(f"random-{n}", data=f"random-{n}", **plain) for n in range(len(DOMAINS))}
    yield row("random splits", ensemble(randoms))
    shares = hdee(runs, seed)
    uneven = {name: runs.model(f"hdee-{name}", data=name, steps=n, start="seed") for name, n in shares.items()}
    yield row("heterogeneous", ensemble(uneven)) | {"expert_steps": shares}
    yield row("diloco", *runs.diloco())


def hdee(runs: Runs, seed: Any) -> dict[str, int]:
    """Return the steps of each expert: more where the seed model's loss on development text is higher."""
    parts = runs.texts.parts
    difficulty = {
        domain: held_out(seed, runs.texts.tokens(parts[domain]["development"]))
        for domain in DOMAINS
    }  # fmt: skip
    size, step = SHAPE.num_parameters, BATCH * SEQ_LEN
    flops = 6.0 * size * step * runs.each * len(DOMAINS)
    shares = divide_budget(flops, difficulty, tokens_per_step=step, parameters=size)
    return {domain: one.steps for domain, one in shares.items()}


def report(found: list[dict[str, Any]]) -> None:
    """Print the median perplexity of each arm over the seeds, at the learning rate that is best on the four domains."""
    print("| arm | lr | seeds | four domains | " + " | ".join((*DOMAINS, *UNSEEN)) + " | sent by a replica |")
    print("|" + " --- |" * (len(DOMAINS) + len(UNSEEN) + 5))
    for arm in dict.fromkeys(row["arm"] for row in found):
        by_lr: dict[float, list[dict[str, Any]]] = {}
        for row in found:
            if row["arm"] == arm:
                by_lr.setdefault(row["lr"], []).append(row)

        def mean(own: list[dict[str, Any]], domains: tuple[str, ...]) -> float:
            return statistics.median(statistics.mean(row["loss"][domain] for domain in domains) for row in own)

        lr = min(by_lr, key=lambda one, by_lr=by_lr, mean=mean: mean(by_lr[one], DOMAINS))
        own = by_lr[lr]
        cells = [f"{math.exp(mean(own, one)):.2f}" for one in (DOMAINS, *((d,) for d in (*DOMAINS, *UNSEEN)))]
        sent = statistics.median(row["wire_bytes_sent"] for row in own)
        print(f"| {arm} | {lr:g} | {len(own)} | " + " | ".join(cells) + f" | {sent / 1e6:.1f} MB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("expert_sets"), help="folder of texts and trained models")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the dense model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--report", action="store_true", help="print the stored results")
    options = parser.parse_args()
    found = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.report:
        report(found)
        return
    torch.set_num_threads(1)
    texts = Texts(options.work)
    for seed in range(options.seeds):
        for lr in LRS:
            done = {row["arm"] for row in found if (row["seed"], row["lr"], row["steps"]) == (seed, lr, options.steps)}
            for row in rows(Runs(options.work, texts, seed=seed, lr=lr, steps=options.steps)):
                if row["arm"] not in done:
                    found.append(row)
                    with options.results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    report(found)


if __name__ == "__main__":
    main()
