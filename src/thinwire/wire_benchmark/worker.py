"""Worker of the wire benchmark: one loop for every contender on one host, and its file of numbers.

The file holds one JSON object. Spans begin and end with all replicas together, but for the end of the measured steps,
which is each replica's own.

| field | meaning |
| --- | --- |
| `contender`, `rank`, `world_size` | who this was |
| `model`, `num_parameters`, `batch_size`, `seq_len`, `seed`, `threads`, `codec` | what ran |
| `num_fragments`, `sync_interval`, `overlap_steps` | as they were in effect; 1, 1 and 0 for exchanges at every step |
| `steps`, `warmup_steps` | all inner steps, and the first of them that were not measured |
| `tokens`, `step_s`, `wall_s` | tokens of this rank, seconds of each step, seconds of all: of the measured steps |
| `started_unix_s`, `ended_unix_s` | begin and end of the measured steps, seconds since 1970 |
| `stalled_s` | of `wall_s`: waiting for the wire; null for references |
| `messages_*`, `payload_bytes_*`, `wire_bytes_*` | `sent` and `received` in the measured steps; null likewise |
| `close_s`, `close_started_unix_s`, `close_ended_unix_s` | the final exchange, after all have ended their steps |
| `close_messages_*`, `close_payload_bytes_*`, `close_wire_bytes_*` | since the last measured step |
| `gate_unix_s`, `gate_payload_bytes_sent` | when the wire was changed, and the payload sent from then to the end |
| `initial_sha256`, `data_sha256`, `global_sha256` | of the first parameters, of all batches, of the last parameters |
| `val_loss`, `eval_batches` | nats a token, of the global parameters after the final exchange; null but on rank 0 |
| `machine`, `thinwire_version` | where |
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import DeadlineExceeded, DesyncError
from thinwire.events import Direction, Totals, Transfer, TransferLog
from thinwire.files import write_whole
from thinwire.training.summary import describe_machine, parameters_sha256
from thinwire.transport.base import all_gather_json
from thinwire.transport.connect import connect
from thinwire.transport.recording import RecordingTransport
from thinwire.version import __version__
from thinwire.wire_benchmark.contenders import Trainer, TrainerSettings, contender
from thinwire.workloads.language import PRESETS, Corpus, Sampler, build_model, open_corpus, validation_batches
from thinwire.workloads.language.presets import preset


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """One moment."""

    monotonic_s: float  # on a clock that only grows
    unix_s: float  # since 1970, to be matched with counters that were sampled elsewhere
    sent: Totals | None  # messages of rounds sent by thinwire so far; None where another program sends them
    received: Totals | None  # likewise
    stalled_s: float | None  # seconds that the training thread has waited for the wire, None if not counted


class ByteMeter:
    """Takes readings; counts the messages of rounds and leaves out those by which the replicas meet.

    Args:
        log: Of the transport that the rounds use.
        counts_bytes: Whether thinwire sends what the contender sends.
    """

    def __init__(self, log: TransferLog, *, counts_bytes: bool) -> None:
        self._counts_bytes = counts_bytes
        self._totals: dict[Direction, Totals] = {"sent": Totals(), "received": Totals()}
        log.add_sink(self._add)

    def read(self, *, stalled_s: Callable[[], float | None]) -> MeterReading:
        sent, received = (self._totals["sent"], self._totals["received"]) if self._counts_bytes else (None, None)
        return MeterReading(
            monotonic_s=time.perf_counter(), unix_s=time.time(), sent=sent, received=received, stalled_s=stalled_s()
        )

    def _add(self, transfer: Transfer) -> None:
        # called under the log's lock, so no sum is lost
        if transfer.kind == "round" and not transfer.error:
            self._totals[transfer.direction] = self._totals[transfer.direction].plus(transfer)


def span(began: MeterReading, ended: MeterReading, *, step_s: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the numbers of the measured steps: see `thinwire.wire_benchmark.worker` for the fields."""
    known = began.stalled_s is not None and ended.stalled_s is not None
    return {
        "tokens": tokens, "step_s": [round(seconds, 6) for seconds in step_s],
        "wall_s": ended.monotonic_s - began.monotonic_s,
        "stalled_s": (ended.stalled_s or 0.0) - (began.stalled_s or 0.0) if known else None,
        "started_unix_s": began.unix_s, "ended_unix_s": ended.unix_s, **_bytes(began, ended),
    }  # fmt: skip


def closing(ended: MeterReading, closing: MeterReading, closed: MeterReading) -> dict[str, Any]:
    """Return the numbers of the final flush; its bytes include what was in flight when the steps ended."""
    return {
        "close_s": closed.monotonic_s - closing.monotonic_s,
        "close_started_unix_s": closing.unix_s,
        "close_ended_unix_s": closed.unix_s,
        **{f"close_{name}": value for name, value in _bytes(ended, closed).items()},
    }


def _bytes(began: MeterReading, ended: MeterReading) -> dict[str, int | None]:
    fields: dict[str, int | None] = {}
    for direction, first, last in (("sent", began.sent, ended.sent), ("received", began.received, ended.received)):
        for name in ("messages", "payload_bytes", "wire_bytes"):
            known = first is not None and last is not None
            fields[f"{name}_{direction}"] = getattr(last, name) - getattr(first, name) if known else None
    return fields


_PEAK_LR = 3e-3
_CLIP_NORM = 1.0
# Where each host keeps its own.
_LOCAL_NAMES = ("result", "cache_dir", "address", "data", "gate")
_GATE_BEAT_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of one host; the same on all hosts except paths and the address.

    Attributes:
        warmup_steps: The first steps, which are trained and not measured, below `steps`.
        result: The file of numbers.
        address: This host's IPv4 address that the others reach.
        batch_size: Windows a step and replica.
        seq_len: Tokens a window.
        eval_batches: Batches of `batch_size` windows to validate on, at the end.
        threads: Of torch, in this process.
        timeout_s: Seconds that any one wait for a peer may last.
        tokenizer: `"bpe"` or `"bytes"`.
        pace: Whether our methods spread what they send over their overlap.
        gate: Where the wire is changed during the warm-up: a replica makes the file `GATE.RANK`, and waits until `GATE`
            is there.
        gate_step: After how many steps of the warm-up that is, below `warmup_steps`.

    Raises:
        ValueError: A number is out of its range, or there is no such contender.
    """

    contender: str
    steps: int
    sync_interval: int
    overlap_steps: int
    warmup_steps: int
    result: Path
    cache_dir: Path
    address: str
    batch_size: int = 8
    seq_len: int = 128
    seed: int = 0
    eval_batches: int = 20
    threads: int = 1
    timeout_s: float = 600.0
    model: str = "nano"
    data: str = "stdlib"
    tokenizer: str = "bpe"
    pace: bool = False
    gate: Path | None = None
    gate_step: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; what concerns the method alone is checked by the method."""
        contender(self.contender)
        preset(self.model)
        for name in ("steps", "batch_size", "seq_len", "eval_batches", "threads", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps must be in [0, {self.steps}), since they are the first of the {self.steps} steps, "
                f"got {self.warmup_steps}"
            )

    def shared(self) -> dict[str, Any]:
        """Return what must be the same on all hosts."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _LOCAL_NAMES}


def run_worker(options: WorkerOptions) -> dict[str, Any]:
    """Join the others by the environment, train, and write this rank's file of numbers.

    Returns:
        What was written.

    Raises:
        ThinwireError: A replica was lost, the options differ between hosts, or a package is missing.
        ValueError: The environment is incomplete or a number does not fit the contender.
        OSError: The file cannot be written.
    """
    torch.set_num_threads(options.threads)
    corpus = open_corpus(
        options.data, cache=options.cache_dir, tokenizer=options.tokenizer,
        vocab_size=PRESETS[options.model].vocab_size, deadline_s=options.timeout_s,
    )  # fmt: skip
    transport = connect(address=options.address, deadline_s=options.timeout_s)
    run = _Run(options, corpus=corpus, transport=transport)
    try:
        found = run.measure()
    finally:
        run.release()
        transport.close()
    write_whole(options.result, json.dumps(found, indent=2) + "\n")
    return found


def lr_factor(step: int, *, steps: int) -> float:
    """Return the learning rate after `step` steps as a share of its peak: 5 % of warm-up, then a cosine to 5 %.

    Example:
        >>> [round(lr_factor(step, steps=400), 2) for step in (0, 19, 200, 400)]
        [0.05, 0.99, 0.53, 0.05]
    """
    warm_up = min(1.0, (step + 1) / max(20, steps * 0.05))
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


class _Run:
    def __init__(self, options: WorkerOptions, *, corpus: Corpus, transport: RecordingTransport) -> None:
        self._options, self._corpus, self._transport = options, corpus, transport
        self._contender = contender(options.contender)
        self._meter = ByteMeter(transport.log, counts_bytes=not self._contender.is_reference)
        self._note_numbers = itertools.count()
        self._data_digest = hashlib.sha256()
        self._trainer: Trainer | None = None

    def measure(self) -> dict[str, Any]:
        """Train and return the numbers; every span begins and ends with all replicas together."""
        options = self._options
        self._check_same()
        model = build_model(
            options.model, vocab_size=self._corpus.tokenizer.vocab_size, max_seq_len=options.seq_len, seed=options.seed
        )
        initial_sha256 = parameters_sha256(model)
        inner = torch.optim.AdamW(model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
        numbers = TrainerSettings(
            sync_interval=options.sync_interval, overlap_steps=options.overlap_steps, timeout_s=options.timeout_s,
            seed=options.seed, pace=options.pace,
        )  # fmt: skip
        self._trainer = trainer = self._contender.trainer(model, inner, numbers=numbers, transport=self._transport)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: lr_factor(step, steps=options.steps)
        )
        batches = Sampler(
            self._corpus.train, replica=self._transport.replica, num_replicas=self._transport.num_replicas,
            batch_size=options.batch_size, seq_len=options.seq_len, seed=options.seed,
        )  # fmt: skip
        opened = self._read(trainer)
        for step in range(options.warmup_steps):
            if step == options.gate_step:
                self._pass_gate()
                opened = self._read(trainer)
            self._step(model, trainer, scheduler, next(batches))
        self._meet()
        began = self._read(trainer)
        step_s = [
            self._step(model, trainer, scheduler, next(batches)) for _ in range(options.steps - options.warmup_steps)
        ]
        ended = self._read(trainer)
        self._meet()  # or a quick replica's flush would fall into a slow one's measured steps
        flushing = self._read(trainer)
        trainer.close()
        closed = self._read(trainer)
        return {
            **self._facts(model, trainer),
            **span(began, ended, step_s=step_s, tokens=len(step_s) * options.batch_size * options.seq_len),
            **closing(ended, flushing, closed), "initial_sha256": initial_sha256,
            # what was sent from the gate to the end: nothing is on its way at either
            "gate_unix_s": opened.unix_s, "gate_payload_bytes_sent": _bytes(opened, closed)["payload_bytes_sent"],
            "data_sha256": self._data_digest.hexdigest(), **self._evaluate(model, trainer),
        }  # fmt: skip

    def release(self) -> None:
        if self._trainer is not None:
            self._trainer.release()

    def _check_same(self) -> None:
        own = {**self._options.shared(), "corpus": self._corpus.sha256, "thinwire_version": __version__}
        notes = self._all_gather(own)
        for replica, note in enumerate(notes):
            for name, value in notes[0].items():
                if note.get(name) != value:
                    raise DesyncError(
                        f"replica {replica} has {name} {note.get(name)!r}, replica 0 has {value!r}; start all hosts "
                        f"with the same options, corpus and thinwire"
                    )

    def _step(
        self, model: nn.Module, trainer: Trainer, scheduler: torch.optim.lr_scheduler.LRScheduler,
        batch: tuple[Tensor, Tensor],
    ) -> float:  # fmt: skip
        """Do one step and return its seconds."""
        for part in batch:
            self._data_digest.update(part.numpy().tobytes())
        began_s = time.perf_counter()
        trainer.loss(*batch).backward()  # type: ignore[no-untyped-call]
        trainer.average_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        scheduler.step()
        return time.perf_counter() - began_s

    def _evaluate(self, model: nn.Module, trainer: Trainer) -> dict[str, Any]:
        """Hash the global parameters; replica 0 evaluates them once no other replica needs it."""
        options = self._options
        with trainer.global_parameters():
            global_sha256 = parameters_sha256(model)
        hashes = [str(note.get("sha256")) for note in self._all_gather({"sha256": global_sha256})]
        if len(set(hashes)) > 1:
            raise DesyncError(
                f"the replicas ended with different global parameters: {', '.join(sha[:12] for sha in hashes)}; this "
                f"run measures nothing"
            )
        val_loss = None
        if self._transport.replica == 0:
            held_out = validation_batches(
                self._corpus.held_out, batch_size=options.batch_size, seq_len=options.seq_len,
                max_batches=options.eval_batches,
            )  # fmt: skip
            with trainer.global_parameters(), torch.no_grad():
                val_loss = _mean_nll(model, held_out)
        return {"global_sha256": global_sha256, "val_loss": val_loss, "eval_batches": options.eval_batches}

    def _facts(self, model: nn.Module, trainer: Trainer) -> dict[str, Any]:
        given = ("contender", "model", "batch_size", "seq_len", "seed", "threads", "steps", "warmup_steps")
        in_effect = ("num_fragments", "sync_interval", "overlap_steps")
        return {
            **{name: getattr(self._options, name) for name in given},
            **{name: getattr(trainer, name) for name in in_effect},
            "rank": self._transport.replica, "world_size": self._transport.num_replicas,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "codec": self._contender.codec, "machine": describe_machine("cpu"), "thinwire_version": __version__,
        }  # fmt: skip

    def _read(self, trainer: Trainer) -> MeterReading:
        return self._meter.read(stalled_s=trainer.stalled_s)

    def _all_gather(self, note: Mapping[str, Any]) -> list[dict[str, Any]]:
        return all_gather_json(
            note, transport=self._transport, number=next(self._note_numbers), deadline_s=self._options.timeout_s
        )

    def _meet(self) -> None:
        self._all_gather({})

    def _pass_gate(self) -> None:
        gate = self._options.gate
        if gate is None:
            return
        self._meet()
        gate.with_name(f"{gate.name}.{self._transport.replica}").write_text("")
        end_s = time.monotonic() + self._options.timeout_s
        while not gate.exists():
            if time.monotonic() > end_s:
                raise DeadlineExceeded(f"the file {gate} was not made within {self._options.timeout_s:g} s")
            time.sleep(_GATE_BEAT_S)
        self._meet()


def _mean_nll(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    total, count = 0.0, 0
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model.loss  # type: ignore[assignment]
    for tokens, targets in batches:
        # the last batch may be smaller
        total += float(loss(tokens, targets)[1]) * targets.numel()
        count += targets.numel()
    return total / count
