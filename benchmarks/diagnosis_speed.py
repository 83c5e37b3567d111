"""How long a judge of very many ranks takes at a look, and how much memory: the target is 3,072 ranks in less than 1 s.

    python benchmarks/diagnosis_speed.py
    python benchmarks/diagnosis_speed.py --ranks 512 --rounds 40

Each rank sends to the next one and to the same place on the next host of eight ranks; all clocks are one, as with PTP.
A window is what came since the last look, here one round of all ranks. It is fed to the judge that judges every run,
and judged with all rules; told are the seconds of processor time of each look, when the slow host was told, and how
long all records take from nothing, as `thinwire diagnose` does with files.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from thinwire.monitor.detect.change_points import CUSUM
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.findings import report
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

RESULTS = Path(__file__).parent / "results" / "diagnosis_speed.json"
RANKS_OF_HOST = 8
SLOW_FROM = 50


def rounds_of(ranks: int, rounds: int, *, slow_host: int, seed: int = 0) -> Iterator[list[Record]]:
    """Yield what a job writes, a round at a time; `slow_host` takes four times as long to send from round 50 on."""
    draw = random.Random(seed)
    hosts = tuple(f"host-{rank // RANKS_OF_HOST}" for rank in range(ranks))
    yield [Communicator(communicator="world", ranks=tuple(range(ranks)), hosts=hosts, clocks=("one",) * ranks)]
    for round in range(rounds):
        written: list[Record] = []
        for rank in range(ranks):
            begin = float(round)
            ready = begin + 0.4 + 0.02 * draw.random()
            written += [
                Span(rank=rank, kind="compute", step=round, started_s=begin, done_s=ready),
                Operation(communicator="world", rank=rank, sequence=round, kind="ring", posted_s=ready,
                          done_s=begin + 0.9, round=round),
                Beat(rank=rank, at_s=begin + 0.95),
            ]  # fmt: skip
            for peer in ((rank + 1) % ranks, (rank + RANKS_OF_HOST) % ranks):
                is_far = hosts[rank] != hosts[peer]
                slow = 4.0 if rank // RANKS_OF_HOST == slow_host and is_far and round >= SLOW_FROM else 1.0
                done = begin + 0.45 + slow * 0.05 * draw.uniform(0.9, 1.1)
                for one, other, direction in ((rank, peer, "sent"), (peer, rank, "received")):
                    written.append(TransferEnd(
                        communicator="world", rank=one, peer=other,
                        direction="sent" if direction == "sent" else "received",
                        operation=round, num_bytes=1_000_000, posted_s=begin + 0.45, done_s=done,
                    ))  # fmt: skip
        yield written


def judge_live(parts: list[list[Record]]) -> tuple[list[float], list[str]]:
    """Return the seconds of each look, and what was told after which round."""
    judge, looks_s, told = LiveDetector(), [], []
    for number, part in enumerate(parts):
        begin_s = time.process_time()
        judge.take(part)
        news = judge.look()
        looks_s.append(time.process_time() - begin_s)
        told += [f"after round {number - 1}: {one.state}: {one.finding.kind}: {one.finding.where}" for one in news]
    assert not judge.num_failed, judge.problem
    return looks_s[1:], told


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--rounds-from-nothing", type=int, default=60)
    options = parser.parse_args()
    slow_host = options.ranks // RANKS_OF_HOST // 2
    parts = [*rounds_of(options.ranks, options.rounds, slow_host=slow_host)]
    made_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gc.freeze()  # a real judge has read these from files, and not all at once
    looks_s, told = judge_live(parts)
    live_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    records = from_records(record for part in parts[: options.rounds_from_nothing + 1] for record in part)
    begin_s = time.process_time()
    findings = diagnose(records)
    whole_s = time.process_time() - begin_s
    lines = {
        "ranks": options.ranks, "rounds": options.rounds, "records_a_round": len(parts[-1]),
        "look_s": {
            "well": spread(looks_s[2 * CUSUM.min_history : SLOW_FROM]), "with a slow host": spread(looks_s[SLOW_FROM:]),
            "longest": round(max(looks_s), 3),
        },
        "told": told, "judge_mib": round(live_mib - made_mib),
        "from_nothing": {"rounds": options.rounds_from_nothing, "records": records.num_records,
                         "seconds": round(whole_s, 2), "told": [f"{one.kind}: {one.where}" for one in findings]},
    }  # fmt: skip
    RESULTS.write_text(json.dumps(lines, indent=2) + "\n")
    print(json.dumps(lines, indent=2))
    print(report(findings))


if __name__ == "__main__":
    main()
