"""What recording costs: steps with and without it, in turns within one run of two replicas.

    python benchmarks/diagnosis/recording_cost.py --method diloco
    python benchmarks/diagnosis/recording_cost.py --method all-reduce     # messages in every step: the dearest

Blocks of steps with the recorder and without it alternate; of each pair of neighbouring blocks the ratio of the times
is taken, and of all pairs the median with its quartiles, in both replicas: once of the clock, and once of the processor
time of the whole process, the recorder's thread included. Other load on the machine spreads both. It does not touch
`own_share`: the processor time of the recorder's thread alone, and what the training thread spends on handing events
over (their number, times what one takes), as a share of the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import tracemalloc
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "recording_cost.json"


class Gate:
    """Hands events to the recorder of the present block, if there is one, and counts them."""

    def __init__(self) -> None:
        self.recorder: Any = None
        self.num_events = 0

    def __call__(self, event: Any) -> None:
        if self.recorder is not None:
            self.num_events += 1
            self.recorder.add(event)

    def on_mark(self, mark: Any) -> None:
        """Hand on a launched or arrived round."""
        self(mark)

    def on_applied(self, round: Any, average: Any) -> None:
        """Ignore it: applied rounds are not recorded."""


class Replica:
    """One replica of the run that is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        import thinwire
        from thinwire.workloads.language import build_model

        torch.set_num_threads(1)
        self.options, self.gate, self.folder = options, Gate(), Path(options.folder)
        self.transport = thinwire.connect()
        self.model: Any = build_model("nano", vocab_size=256, max_seq_len=options.seq_len, seed=0, device="cpu")
        codec = thinwire.codecs.by_name("e3m0")
        method = thinwire.methods.diloco(sync_interval=options.sync_interval, codec=codec)
        if options.method == "all-reduce":
            method = thinwire.methods.all_reduce()
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = thinwire.DistributedOptimizer(self.model, inner, method=method, transport=self.transport)
        self.transport.log.add_sink(self.gate)
        self.transport.log.add_post_sink(self.gate)
        self.optimizer.engine.observers.append(self.gate)
        self.tokens = torch.randint(0, 256, (options.batch_size, options.seq_len + 1))
        self.thread_s, self.recorded_s, self.num_bytes, self.num_lines = 0.0, 0.0, 0, 0

    def block(self, *, is_on: bool) -> tuple[float, float]:
        """Do a block of steps; return its seconds by the clock and of the processor."""
        from thinwire.recording.recorder import Recorder

        self.gate.recorder = Recorder(self.folder, rank=self.transport.replica) if is_on else None
        begun = time.perf_counter(), time.process_time()
        for step in range(self.options.steps):
            self.step(step)
        took_s = time.perf_counter() - begun[0], time.process_time() - begun[1]
        if is_on:
            self.end(took_s[1])
        return took_s

    def step(self, step: int) -> None:
        """Do one step as `thinwire train` does."""
        began_s = time.monotonic()
        loss, nll = self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.average_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.gate.recorder is not None:
            self.gate.num_events += 1
            self.gate.recorder.add_step(step, started_s=began_s, done_s=time.monotonic(), loss=float(nll))

    def end(self, processor_s: float) -> None:
        """Close a block's recorder, and note what it used."""
        recorder, self.gate.recorder = self.gate.recorder, None
        clock = time.pthread_getcpuclockid(recorder._thread.ident)
        self.thread_s += time.clock_gettime(clock)
        self.recorded_s += processor_s
        recorder.close()
        text = (self.folder / f"records-rank-{self.transport.replica}.jsonl").read_text()
        self.num_bytes, self.num_lines = self.num_bytes + len(text), self.num_lines + text.count("\n")

    def run(self) -> dict[str, Any]:
        """Do all blocks; return what was measured."""
        self.block(is_on=False)  # warms up
        # the order changes from pair to pair, so that a machine that slows down does not speak for one of them
        flags = [(block + block // 2) % 2 == 1 for block in range(self.options.blocks)]
        blocks = [self.block(is_on=is_on) for is_on in flags]
        ratios = {}
        for place, name in enumerate(("clock", "processor")):
            took = [block[place] for block in blocks]
            pairs = zip(took[::2], took[1::2], flags[::2], strict=True)
            ratios[name] = [first / second if is_on else second / first for first, second, is_on in pairs]
        steps_on = self.options.steps * sum(flags)
        handing_s = self.gate.num_events * _event_s(self.folder)
        return {
            "ratios": ratios, "own_share": (self.thread_s + handing_s) / self.recorded_s,
            "step_s": statistics.median(block[0] for block in blocks) / self.options.steps,
            "bytes_a_step": self.num_bytes / steps_on, "lines_a_step": self.num_lines / steps_on,
            "events_a_step": self.gate.num_events / steps_on, "memory_bytes": _memory(self.folder),
        }  # fmt: skip


def _posted(number: int) -> Any:
    from thinwire.events import Posted

    return Posted(
        direction="sent", peer=1, kind="round", round_id=number, fragment=0, phase=0, num_bytes=1 << 20,
        posted_s=time.monotonic(),
    )  # fmt: skip


def _event_s(folder: Path) -> float:
    """Return the seconds that it takes to make an event and hand it over."""
    from thinwire.recording.recorder import Recorder

    recorder = Recorder(folder, rank=98)
    recorder.close()
    return min(timeit.repeat(lambda: recorder.add(_posted(0)), number=10_000, repeat=5)) / 10_000


def _memory(folder: Path) -> int:
    """Return the bytes that a recorder holds when as many events as it takes wait for its thread."""
    from thinwire.recording.recorder import MOST_EVENTS, Recorder

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    recorder = Recorder(folder, rank=99)
    recorder.close()  # its thread would take them out
    for number in range(2 * MOST_EVENTS):
        recorder.add(_posted(number))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held


def run_both(words: list[str]) -> list[dict[str, Any]]:
    """Start both replicas, and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, *words, "--folder", folder]
        ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
        if [code for rank in ranks if (code := rank.wait())]:
            sys.exit("a replica failed")
        return [json.loads((Path(folder) / f"result-{rank}.json").read_text()) for rank in range(2)]


def summed_up(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return both replicas' measurements as one."""
    result: dict[str, Any] = {}
    found = [one.pop("ratios") for one in told]
    for name in found[0]:
        ratios = sorted(ratio for one in found for ratio in one[name])
        quarter = len(ratios) // 4
        result[f"{name}_ratio"] = round(statistics.median(ratios), 4)
        result[f"{name}_quartiles"] = [round(ratios[quarter], 4), round(ratios[-quarter - 1], 4)]
        result["pairs"] = len(ratios)
    result |= {name: round(statistics.mean(one[name] for one in told), 5) for name in told[0]}
    result["load"] = [round(one, 2) for one in os.getloadavg()]
    return result


def main() -> None:
    """Start both replicas, or be one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--method", choices=("diloco", "all-reduce"), default="diloco")
    parser.add_argument("--sync-interval", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--blocks", type=int, default=40, help="an even number")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--folder", default="", help="set for the replicas")
    options = parser.parse_args()
    if options.folder:
        replica = Replica(options)
        told = json.dumps(replica.run())
        (replica.folder / f"result-{replica.transport.replica}.json").write_text(told)
        replica.optimizer.close()
        replica.transport.close()
        return
    result = summed_up(run_both(sys.argv[1:]))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, options.method: result}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
