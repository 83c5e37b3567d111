"""What recording costs: steps with and without it, in turns within one run of two replicas.

    python benchmarks/diagnosis/recording_cost.py --method diloco
    python benchmarks/diagnosis/recording_cost.py --method all-reduce     # messages in every step: the dearest

Blocks of steps with the recorder and without it alternate; of each pair of neighbouring blocks the ratio of the times
is taken, and of all pairs the median with its quartiles, in both replicas: once of the clock, and once of the processor
time of the whole process, the recorder's thread included, which other load on the machine disturbs less.
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
import tracemalloc
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "recording_cost.json"


class Gate:
    """Hands events to the recorder of the present block, if there is one."""

    def __init__(self) -> None:
        self.recorder: Any = None

    def __call__(self, event: Any) -> None:
        if self.recorder is not None:
            self.recorder.add(event)


def train(options: argparse.Namespace) -> None:
    """Be one replica, and print what was measured."""
    import torch

    import thinwire
    from thinwire.training.models import build_model
    from thinwire.training.recorder import Recorder

    torch.set_num_threads(1)
    transport = thinwire.connect()
    model = build_model("nano", vocab_size=256, max_seq_len=options.seq_len, seed=0, device="cpu")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    method = thinwire.methods.all_reduce() if options.method == "all-reduce" else thinwire.methods.diloco(
        sync_interval=options.sync_interval, codec=thinwire.codecs.by_name("e3m0")
    )  # fmt: skip
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    gate, folder = Gate(), Path(options.folder)
    transport.log.add_sink(gate)
    transport.log.add_post_sink(gate)
    optimizer.engine.on_round = gate
    tokens = torch.randint(0, 256, (options.batch_size, options.seq_len + 1))
    blocks: list[tuple[float, float]] = []
    num_bytes, num_records = 0, 0
    for block in range(options.blocks + 1):
        # the order changes from pair to pair, so that a machine that slows down does not speak for one of them
        is_on = (block + block // 2) % 2 == 1
        gate.recorder = Recorder(folder, rank=transport.replica) if is_on else None
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for step in range(options.steps):
            loss, nll = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            if gate.recorder is not None:
                done_s = time.monotonic()
                gate.recorder.add_step(step, started_s=done_s - 0.01, done_s=done_s, loss=float(nll))
        took_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        if gate.recorder is not None:
            gate.recorder.close()
            text = (folder / f"records-rank-{transport.replica}.jsonl").read_text()
            num_bytes, num_records = num_bytes + len(text), num_records + text.count("\n")
        if block:  # the first warms up
            blocks.append(took_s)
    # blocks 1, 2, 3, 4 are off or on as their number says
    flags = [(block + block // 2) % 2 == 1 for block in range(1, options.blocks + 1)]
    ratios: dict[str, list[float]] = {}
    for place, name in enumerate(("clock", "processor")):
        took = [block[place] for block in blocks]
        pairs = zip(took[::2], took[1::2], flags[::2], strict=False)
        ratios[name] = [first / second if is_on else second / first for first, second, is_on in pairs]
    steps_on = options.steps * sum(flags)
    told = {"ratios": ratios, "step_s": statistics.median(block[0] for block in blocks) / options.steps, "bytes_a_step": num_bytes / steps_on,
            "records_a_step": num_records / steps_on, "memory_bytes": _memory(folder)}  # fmt: skip
    (folder / f"result-{transport.replica}.json").write_text(json.dumps(told))
    optimizer.close()
    transport.close()


def _memory(folder: Path) -> int:
    """Return the bytes that a recorder holds when as much as it takes waits for its thread."""
    from thinwire.events import Posted
    from thinwire.training.recorder import MOST_EVENTS, Recorder

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    recorder = Recorder(folder, rank=99)
    recorder.close()  # its thread would take them out
    for number in range(2 * MOST_EVENTS):
        recorder.add(Posted(direction="sent", peer=1, kind="round", round_id=number, fragment=0, phase=0,
                            num_bytes=1 << 20, posted_s=time.monotonic()))  # fmt: skip
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held


def main() -> None:
    """Start both replicas, and write and print what they measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--method", choices=("diloco", "all-reduce"), default="diloco")
    parser.add_argument("--sync-interval", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--folder", default="", help="set for the replicas")
    options = parser.parse_args()
    if options.folder:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen(words, env={**shared, "RANK": str(rank)}) for rank in range(2)]
        if any(rank.wait() for rank in ranks):
            sys.exit("a replica failed")
        told = [json.loads((Path(folder) / f"result-{rank}.json").read_text()) for rank in range(2)]
    result: dict[str, Any] = {}
    found = [one.pop("ratios") for one in told]
    for name in found[0]:
        ratios = sorted(ratio for one in found for ratio in one[name])
        quarter = len(ratios) // 4
        result[f"{name}_ratio"] = round(statistics.median(ratios), 4)
        result[f"{name}_quartiles"] = [round(ratios[quarter], 4), round(ratios[-quarter - 1], 4)]
        result["pairs"] = len(ratios)
    result |= {name: round(value, 4) for name, value in told[0].items()}
    result["load"] = [round(one, 2) for one in os.getloadavg()]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, options.method: result}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
