"""Two processes that share the GPU train over a link of 1 Gbit/s and of 100 Mbit/s: the share of their own speed.

Where the machine can shape traffic (`thinwire lab`), each process is a host of its own. Elsewhere the transport itself
lets each message leave at the link's rate; `shaped_by` says which it was. Replica 0 trains, and is measured; the other
does the same rounds on a hundredth of the tokens, so that the GPU belongs to one of them.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from records import Part, finish, part_from_command_line

import thinwire
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.transport.base import Envelope, Pending
from thinwire.transport.streams import ROUNDS
from thinwire.units import parse_rate
from thinwire.workloads.language import build_model

RATES = ("none", "1gbit", "100mbit")
_LEAST_S = 25.0  # a run with its start


class Limited:
    """A transport whose messages leave one after the other, at a rate.

    Args:
        inner: Sends them.
        rate: Bits a second.
    """

    def __init__(self, inner: Any, *, rate: float) -> None:
        self.inner = inner
        self._rate = rate
        self._waiting: queue.Queue[Leaving] = queue.Queue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        if envelope.stream is not ROUNDS:
            return self.inner.send(payload, to=to, envelope=envelope)  # type: ignore[no-any-return]
        leaving = Leaving(payload, to, envelope)
        self._waiting.put(leaving)
        return leaving

    def _send_all(self) -> None:
        free_s = 0.0
        while True:
            leaving = self._waiting.get()
            free_s = max(free_s, time.monotonic()) + 8 * leaving.payload.numel() / self._rate
            time.sleep(max(0.0, free_s - time.monotonic()))
            leaving.pending = self.inner.send(leaving.payload, to=leaving.to, envelope=leaving.envelope)
            leaving.has_left.set()


class Leaving:
    """A message that waits for its turn on the link, then for its transport."""

    def __init__(self, payload: torch.Tensor, to: int, envelope: Envelope) -> None:
        self.payload, self.to, self.envelope = payload, to, envelope
        self.has_left = threading.Event()
        self.pending: Pending | None = None

    def done(self) -> bool:
        return self.pending is not None and self.pending.done()

    def wait(self, *, deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        if not self.has_left.wait(timeout=deadline_s) or self.pending is None:
            raise TimeoutError(f"a message did not leave within {deadline_s:.3g} s")
        self.pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))


def replica(settings: dict[str, Any]) -> None:
    """Train, and print the time of the steps after the warm-up as JSON."""
    device = torch.device(settings["device"])
    transport: Any = thinwire.connect()
    number = transport.replica
    if settings["rate"] != "none" and settings["shaped_by"] == "transport":
        transport = Limited(transport, rate=float(parse_rate(settings["rate"])))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build_model(settings["model"], seed=0, max_seq_len=settings["seq_len"], device=device)
    wanted = TrainConfig.of(model=settings["model"], batch_size=settings["batch"], seq_len=settings["seq_len"])
    inner = make_inner_optimizer(resolve(wanted, world_size=1, cores=1, home=Path.home()), model)
    method = thinwire.methods.iso_loco(sync_interval=settings["interval"], overlap_steps=settings["overlap"])
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    generator = torch.Generator().manual_seed(number)
    # the other replica does the same rounds on few tokens, so that the GPU belongs to this one
    shape = (settings["batch"], settings["seq_len"]) if number == 0 else (1, 32)
    batches = [torch.randint(model.vocab_size, shape, generator=generator).to(device) for _ in range(4)]

    def steps(count: int) -> float:
        began_s = time.perf_counter()
        for step in range(count):
            tokens = batches[step % 4]
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model.loss(tokens, tokens)[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    # the first window of each fragment is a whole interval: the first round is launched at its end
    optimizer.begin_at(settings["interval"] - 1)
    steps(settings["warm_up"])
    stalled_s = optimizer.statistics.stalled_s
    seconds = steps(settings["steps"])
    found = {
        "replica": number, "train_s": seconds, "steps": settings["steps"], "tokens": shape[0] * shape[1],
        "stalled_s": optimizer.statistics.stalled_s - stalled_s, "rounds": optimizer.statistics.rounds_applied,
    }  # fmt: skip
    optimizer.close()
    transport.close()
    if number == 0:
        print("RESULT " + json.dumps(found), flush=True)


def run(rate: str, part: Part) -> dict[str, Any]:
    """Run both processes at a rate."""
    settings: dict[str, Any] = {"rate": rate, "device": part.device.type, "shaped_by": "lab"}
    settings |= (
        {"model": "tiny", "batch": 2, "seq_len": 32, "interval": 6, "overlap": 2, "warm_up": 6, "steps": 6}
        if part.is_tiny
        # an interval sends 75 MB: 6 s of 100 Mbit/s
        else {"model": "150m", "batch": 8, "seq_len": 1024, "interval": 200, "overlap": 38, "warm_up": 20, "steps": 200}
    )
    if not part.is_tiny and can_shape():
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "thinwire.cli.main", "lab", "--hosts", "2", "--out", str(Path(folder, "lab"))]
            limit = [] if rate == "none" else ["--rate", rate]
            whole = [
                sys.executable,
                *command,
                *limit,
                "--",
                sys.executable,
                __file__,
                "--replica",
                json.dumps(settings),
            ]
            output = subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True, timeout=90).stdout
    else:
        settings["shaped_by"] = "transport"
        output = two_processes(settings)
    line = next(text for text in output.splitlines() if text.startswith("RESULT "))
    return {**settings, **json.loads(line.removeprefix("RESULT "))}


def two_processes(settings: dict[str, Any]) -> str:
    """Start both replicas with torchrun's variables; return what replica 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, __file__, "--replica", json.dumps(settings)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"replicas ended with {[process.returncode for process in processes]}")
    return outputs[0]


@functools.cache
def can_shape() -> bool:
    """Return whether `thinwire lab` can shape traffic here."""
    command = [sys.executable, "-m", "thinwire.cli.main", "lab", "doctor"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    print(found.stdout[-600:], found.stderr[-300:])
    return found.returncode == 0


def main() -> None:
    if sys.argv[1:2] == ["--replica"]:
        replica(json.loads(sys.argv[2]))
        return
    part = part_from_command_line("wire", __doc__ or "")
    for rate in ("none", "1gbit") if part.is_tiny else RATES:
        part.measure(f"150m {rate}", lambda rate=rate: run(rate, part), needs_s=1.0 if part.is_tiny else _LEAST_S)  # type: ignore[misc]
    finish(part)


if __name__ == "__main__":
    main()
