"""What thinwire adds to a step on one GPU: the wrapped step, rounds in flight, a round, memory, and copies.

The other replica is an echo: it sends back what it gets, after the time that the bytes take on a link of 1 Gbit/s, and
computes nothing. So the GPU does the work of one replica of two, and all of it is measured.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import Part, finish, part_from_command_line, spread

import thinwire
from thinwire.training.build import estimate_memory, make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.transport.base import Envelope, Received
from thinwire.workloads.language import build_model

ISO = importlib.import_module("thinwire.methods.iso_loco")  # the package has a function of that name
RATE_BITS_PER_S = 1e9
SYNC_INTERVAL, OVERLAP_STEPS = 30, 8


class Echo:
    """Transport of replica 0 of two, whose peer returns every message.

    Args:
        rate: Bits a second of the link, both ways at once.
    """

    replica, num_replicas, runs_in_background = 0, 2, True

    def __init__(self, *, rate: float = RATE_BITS_PER_S) -> None:
        self._rate = rate
        self._sent: dict[tuple[int, ...], tuple[float, Received]] = {}
        self._free_s = 0.0
        self._lock = threading.Lock()

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Sent:
        with self._lock:
            # one message after the other
            self._free_s = max(self._free_s, time.monotonic()) + 8 * payload.numel() / self._rate
            received = Received(payload=payload, note=envelope.note)
            self._sent[_key(envelope)] = (self._free_s, received)
            return Sent(self._free_s)

    def receive(self, *, source: int, envelope: Envelope) -> Returning:
        return Returning(self._sent, _key(envelope))

    def close(self) -> None:
        """Nothing is held."""


class Sent:
    """A message on its way there."""

    def __init__(self, due_s: float) -> None:
        self._due_s = due_s

    def done(self) -> bool:
        return time.monotonic() >= self._due_s

    def wait(self, *, deadline_s: float) -> None:
        _wait_for(self.done)


class Returning:
    """A message on its way back."""

    def __init__(self, sent: dict[tuple[int, ...], tuple[float, Received]], key: tuple[int, ...]) -> None:
        self._sent, self._key = sent, key

    def done(self) -> bool:
        due = self._sent.get(self._key)
        return due is not None and time.monotonic() >= due[0]

    def wait(self, *, deadline_s: float) -> Received:
        _wait_for(self.done)
        return self._sent.pop(self._key)[1]


def _wait_for(is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_done():
        if time.monotonic() > until_s:
            raise TimeoutError("no echo within 20 s")
        time.sleep(0.001)


def _key(envelope: Envelope) -> tuple[int, ...]:
    return envelope.address


class Clock:
    """Times of steps on the device: events on a GPU, so that the host may run ahead as in training."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self._is_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def wrapped(name: str, part: Part) -> dict[str, Any]:
    """Measure plain steps and wrapped steps in turns, for two intervals."""
    interval, overlap, turns = (6, 2, 2) if part.is_tiny else (SYNC_INTERVAL, OVERLAP_STEPS, 2)
    batch, seq_len = (2, 32) if part.is_tiny else ((8, 1024) if name == "150m" else (4, 1024))
    torch.manual_seed(0)
    wanted = TrainConfig.of(
        model=name, batch_size=batch, seq_len=seq_len, device=part.device.type, autocast="bf16", method="iso-loco",
        threads=1,
    )  # fmt: skip
    wanted = resolve(wanted, world_size=1, cores=1, home=Path.home())
    model = build_model(name, seed=0, max_seq_len=seq_len, device=part.device)
    inner = make_inner_optimizer(wanted, model)
    tokens = torch.randint(model.vocab_size, (batch, seq_len), device=part.device)
    method = thinwire.methods.iso_loco(sync_interval=interval, overlap_steps=overlap)

    def gradients() -> None:
        with torch.autocast(part.device.type, dtype=torch.bfloat16):
            loss = model.loss(tokens, tokens)[0]
        loss.backward()

    def plain(count: int) -> list[float]:
        clock = Clock(part.device)
        for _ in range(count):
            clock.mark()
            gradients()
            inner.step()
            inner.zero_grad()
        clock.mark()
        return clock.seconds()

    plain(3)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=Echo())
    with part.peak_bytes():
        pass
    kinds: dict[str, list[float]] = {"plain": [], "between": [], "in_flight": [], "round": []}
    whole: list[float] = []
    for _ in range(turns):
        # the first ones decode what is in flight
        kinds["plain"] += plain(overlap + interval // 2)[overlap:]
        clock, labels = Clock(part.device), []
        for _ in range(interval):
            before = optimizer.statistics.rounds_launched + optimizer.statistics.rounds_applied
            is_travelling = bool(optimizer.rounds_in_flight)
            clock.mark()
            gradients()
            optimizer.step()
            optimizer.zero_grad()
            is_round = before != optimizer.statistics.rounds_launched + optimizer.statistics.rounds_applied
            labels.append("round" if is_round else "in_flight" if is_travelling else "between")
        clock.mark()
        seconds = clock.seconds()
        whole += seconds
        for label, one in zip(labels, seconds, strict=True):
            kinds[label].append(one)
    peak = torch.cuda.max_memory_allocated() if part.device.type == "cuda" else 0
    found = optimizer.statistics
    plain_s = statistics.median(kinds["plain"])
    estimate = estimate_memory(wanted, model, method)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": tokens.numel(), "rounds": turns,
        "steps_s": {kind: spread(values) for kind, values in kinds.items() if values},
        "between_overhead": _over(kinds["between"], plain_s), "in_flight_overhead": _over(kinds["in_flight"], plain_s),
        "whole_overhead": statistics.fmean(whole) / plain_s - 1,
        "launching_s_a_round": found.launching_s / max(1, found.rounds_launched),
        "applying_s_a_round": found.applying_s / max(1, found.rounds_applied),
        "stalled_s_a_round": found.stalled_s / max(1, found.rounds_applied),
        "rounds_launched": found.rounds_launched, "fragments": optimizer.num_fragments,
        "elements_a_fragment": [optimizer.engine.view.parameters.numel(f) for f in range(optimizer.num_fragments)],
        "peak_bytes": peak, "planned_bytes": estimate.states + estimate.activations,
        "host_copies_bytes": estimate.host_copies,
    }  # fmt: skip
    optimizer.close()
    return result


def _over(seconds: list[float], plain_s: float) -> float | None:
    return statistics.median(seconds) / plain_s - 1 if seconds else None


def copies(part: Part) -> dict[str, Any]:
    """Time copies between host and device, from pageable and pinned memory, and the checksum of a fragment."""
    numel = 10_000 if part.is_tiny else 50_000_000
    pageable, there = torch.randn(numel), torch.empty(numel, device=part.device)
    found: dict[str, Any] = {"bytes": 4 * numel}
    hosts = {"pageable": pageable}
    if part.device.type == "cuda":
        hosts["pinned"] = pageable.pin_memory()
    for name, host in hosts.items():
        for way, work in (("to_device", lambda: there.copy_(host)), ("to_host", lambda: host.copy_(there))):  # noqa: B023
            found[f"{name}_{way}_gb_per_s"] = 4e-9 * numel / part.timed(work)["median"]
    for shape in ((64, 64),) if part.is_tiny else ((2048, 2048), (2048, 8192)):
        matrix = torch.randn(shape, device=part.device) * 1e-3
        found[f"flat_spectrum_{shape[0]}x{shape[1]}_s"] = part.timed(lambda: ISO.flatten_spectrum(matrix))["median"]  # noqa: B023
    data = pageable.numpy().data.cast("B")
    found["crc32_gb_per_s"] = 4e-9 * numel / part.timed(lambda: zlib.crc32(data), repeats=3, warm_ups=1)["median"]
    return found


def main() -> None:
    part = part_from_command_line("step", __doc__ or "")
    part.measure("copies", lambda: copies(part))
    for name in ("tiny",) if part.is_tiny else ("150m", "1b"):
        part.measure(f"wrapped {name}", lambda name=name: wrapped(name, part), needs_s=15.0)  # type: ignore[misc]
    finish(part)


if __name__ == "__main__":
    main()
