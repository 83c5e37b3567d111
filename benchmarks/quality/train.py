"""One run of the quality ladder: all replicas in one process, so that losses do not depend on the machine's speed.

`python benchmarks/quality/train.py SETTINGS` prints one JSON line: the settings, the losses and the counted bytes. With
`--minutes` a run that needs longer saves its state, prints nothing and ends; the same call goes on with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rungs import RUNGS, SYNC_INTERVAL, Rung
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import thinwire
from thinwire.codecs import by_name
from thinwire.methods import recipe
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport
from thinwire.workloads.language import Sampler, open_corpus, validation_batches
from thinwire.workloads.language.transformer import TransformerConfig, build_transformer

CACHE = Path.home() / ".cache" / "thinwire"
_FLOOR = 0.1  # share of the peak learning rate at the end


@dataclass(kw_only=True)
class Run:
    """What the replicas of a run share.

    Attributes:
        folder: Keeps states; None where none are kept.
        ends_s: Time of `time.monotonic` after which the next saved state is the last.
        stops: Whether the run stops after a step, decided by the replica that is there first.
    """

    settings: dict[str, Any]
    rung: Rung
    corpus: Any
    device: torch.device
    folder: Path | None
    ends_s: float
    stops: dict[int, bool] = field(default_factory=dict)

    def should_stop(self, step: int) -> bool:
        return self.stops.setdefault(step, time.monotonic() > self.ends_s)

    def saved_step(self) -> int:
        """Return the last step whose state all replicas have saved, 0 for none."""
        if self.folder is None or not self.folder.exists():
            return 0
        steps = [int(path.stem.partition("-")[0]) for path in self.folder.glob("*.pt")]
        return max((step for step in steps if steps.count(step) == self.settings["replicas"]), default=0)


class LastValues:
    """The last global values of a run, one every `SYNC_INTERVAL` steps: their mean costs no bytes."""

    def __init__(self, optimizer: thinwire.DistributedOptimizer, model: Any, *, most: int) -> None:
        self.values: list[torch.Tensor] = []
        self._optimizer, self._model, self._most = optimizer, model, most

    def take(self, step: int) -> None:
        if self._most and step % SYNC_INTERVAL == 0:
            with self._optimizer.global_parameters(may_lag=True):
                self.values.append(parameters_to_vector(self._model.parameters()).detach())
            del self.values[: -self._most]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def train(
    settings: dict[str, Any], *, minutes: float | None, cache: Path = CACHE, rung: Rung | None = None,
    device: torch.device | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Train; return the run's line, or None where the minutes were too few and the state is kept.

    Args:
        settings: What identifies the run.
        minutes: After which the run is stopped.
        cache: Folder of texts and states.
        rung: In place of the named one: on other text, say.
        device: By default a GPU where there is one.
    """
    torch.set_num_threads(1)
    rung = RUNGS[settings["rung"]] if rung is None else rung
    corpus = open_corpus(rung.data, cache=cache, tokenizer=rung.tokenizer, vocab_size=rung.vocab_size)
    if settings["steps"] * settings["windows"] > (len(corpus.train) - 1) // rung.seq_len:
        raise ValueError(
            f"the run needs {settings['steps'] * settings['windows']} windows, and {rung.data} has "
            f"{(len(corpus.train) - 1) // rung.seq_len}; allowed one epoch; try more text"
        )
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(
        settings=settings, rung=rung, corpus=corpus, device=device,
        folder=cache / "quality" / key if minutes is not None and rung.save_every else None,
        ends_s=time.monotonic() + 60 * (minutes or math.inf),
    )  # fmt: skip
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    found = thinwire.run_replicas(settings["replicas"], lambda transport: train_replica(transport, run))[0]
    if found is None:
        return None
    return {
        **settings, **found, "sent_bytes": found["sent_bytes"], "wall_s": round(time.monotonic() - began_s, 1),
        "cpu_s": round(time.process_time() - began_cpu_s, 1), "torch": torch.__version__, "machine": machine(),
    }  # fmt: skip


def train_replica(loopback: LoopbackTransport, run: Run) -> dict[str, Any] | None:
    """Train one replica; return the losses of the global parameters, and the bytes that it sent."""
    settings, rung = run.settings, run.rung
    steps, seed = settings["steps"], settings["seed"]
    transport = RecordingTransport(loopback)
    shape = TransformerConfig(
        vocab_size=run.corpus.tokenizer.vocab_size, dim=rung.dim, layers=rung.layers, heads=rung.heads,
        max_seq_len=rung.seq_len,
    )  # fmt: skip
    model = build_transformer(shape, seed=seed).to(run.device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if abs(numel / rung.num_parameters - 1) > 0.02:
        raise ValueError(f"rung {rung.name} states {rung.num_parameters} parameters, and its model has {numel}")
    inner_options = {"inner_optimizer": settings["inner"], "lr": settings["lr"]}
    inner_options |= {"weight_decay": rung.weight_decay, "beta2": rung.beta2}
    inner = make_inner_optimizer(TrainConfig.of(**inner_options), model)
    options = dict(settings["options"])
    if "codec" in options:
        options["codec"] = by_name(options["codec"])
    optimizer = thinwire.DistributedOptimizer(
        model, inner, method=recipe(settings["method"])(**options), transport=transport, seed=seed
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps=steps, rung=rung))
    batches = Sampler(
        run.corpus.train, replica=transport.replica, num_replicas=transport.num_replicas,
        batch_size=settings["windows"] // transport.num_replicas, seq_len=rung.seq_len, seed=seed,
    )  # fmt: skip
    last_values = LastValues(optimizer, model, most=settings.get("mean_of", 0))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches, "last": last_values}
    first, curve, sent_before = _resume(parts, run, replica=transport.replica)
    sent_at_start = transport.log.totals("sent").payload_bytes
    for step in range(first + 1, steps + 1):
        tokens, targets = next(batches)
        with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=run.device.type == "cuda"):
            loss = model.loss(tokens.to(run.device), targets.to(run.device))[0]
        loss.backward()
        optimizer.average_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if transport.replica == 0 and step % max(1, steps // 10) == 0 and step < steps:
            curve.append([step, evaluate(model, optimizer, run=run, share=0.25)])
        last_values.take(step)
        if run.folder is not None and step % rung.save_every == 0 and step < steps:
            sent = sent_before + transport.log.totals("sent").payload_bytes - sent_at_start
            _save(parts, run, replica=transport.replica, step=step, curve=curve, sent=sent)
            if run.should_stop(step):
                return None
    sent = sent_before + transport.log.totals("sent").payload_bytes - sent_at_start
    optimizer.close(final_exchange=True)
    if transport.replica:
        return {}
    curve.append([steps, evaluate(model, optimizer, run=run)])
    loss = curve[-1][1]
    if last_values.values:
        vector_to_parameters(torch.stack(last_values.values).mean(dim=0), model.parameters())
        loss = mean_loss(model, run=run)
    return {
        "num_parameters": numel, "tokens": steps * settings["windows"] * rung.seq_len, "curve": curve,
        "loss": loss, "sent_bytes": sent, "beta2": rung.beta2, "weight_decay": rung.weight_decay,
    }  # fmt: skip


def evaluate(model: Any, optimizer: thinwire.DistributedOptimizer, *, run: Run, share: float = 1.0) -> float:
    """Return the mean loss of the global parameters on held-out windows, or a share of them, in nats a token."""
    with optimizer.global_parameters(may_lag=True):
        return mean_loss(model, run=run, share=share)


@torch.no_grad()
def mean_loss(model: Any, *, run: Run, share: float = 1.0) -> float:
    """Return the mean loss of a model on held-out windows, or a share of them, in nats a token."""
    batches = validation_batches(
        run.corpus.held_out, batch_size=64, seq_len=run.rung.seq_len,
        max_batches=max(1, round(share * run.rung.eval_windows / 64)),
    )  # fmt: skip
    return statistics.fmean(
        float(model.loss(tokens.to(run.device), targets.to(run.device))[1]) for tokens, targets in batches
    )


def lr_factor(step: int, *, steps: int, rung: Rung) -> float:
    """Return the share of the peak learning rate after a step: a warm-up, then a cosine."""
    warmup = rung.warmup_share * steps
    if step + 1 <= warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def machine() -> str:
    """Return the processor or the accelerator, and how many cores there are."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def _save(parts: dict[str, Any], run: Run, *, replica: int, step: int, curve: list[Any], sent: int) -> None:
    assert run.folder is not None
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / f"{step}-{replica}.pt"
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "step": step, "curve": curve, "sent": sent}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    for older in run.folder.glob(f"*-{replica}.pt"):  # the one before stays until all replicas have this one
        if int(older.stem.partition("-")[0]) < step - run.rung.save_every:
            older.unlink()


def _resume(parts: dict[str, Any], run: Run, *, replica: int) -> tuple[int, list[Any], int]:
    step = run.saved_step()
    if not step:
        return 0, [], 0
    assert run.folder is not None
    state = torch.load(run.folder / f"{step}-{replica}.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return step, state["curve"], state["sent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    found = train(options.settings, minutes=options.minutes)
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
