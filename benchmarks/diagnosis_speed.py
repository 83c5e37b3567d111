"""How long one window of many ranks takes to analyse, and how much memory: the target is 3,072 ranks in less than 1 s.

    python benchmarks/diagnosis_speed.py
    python benchmarks/diagnosis_speed.py --ranks 512 --rounds 40

Each rank sends to the next one and to the same place on the next host of eight ranks; all clocks are one, as with PTP.
A window is what came since the last one. Told is how long it takes to add its times to the histories of all links, to
judge them, and to diagnose all records from nothing, as `thinwire diagnose` does with files.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from thinwire.diagnosis.changes import Watch
from thinwire.diagnosis.diagnose import diagnose
from thinwire.diagnosis.findings import report
from thinwire.diagnosis.reading import Records
from thinwire.diagnosis.records import Communicator, Operation, Span, TransferEnd
from thinwire.diagnosis.slow import LinkTimes, find_slow_links
from thinwire.diagnosis.timeline import Job

RESULTS = Path(__file__).parent / "results" / "diagnosis_speed.json"
RANKS_OF_HOST = 8
SLOW_FROM = 20


def records_of(ranks: int, rounds: int, *, slow_host: int, seed: int = 0) -> Records:
    """Return records of a job whose host `slow_host` takes four times as long to send from round 20 on."""
    draw, records = random.Random(seed), Records()
    hosts = tuple(f"host-{rank // RANKS_OF_HOST}" for rank in range(ranks))
    records.add(Communicator(communicator="world", ranks=tuple(range(ranks)), hosts=hosts,
                             clocks=("one",) * ranks))  # fmt: skip
    for round in range(rounds):
        for rank in range(ranks):
            begin = float(round)
            ready = begin + 0.4 + 0.02 * draw.random()
            records.add(Span(rank=rank, kind="compute", step=round, started_s=begin, done_s=ready))
            records.add(Operation(communicator="world", rank=rank, sequence=round, kind="ring", posted_s=ready,
                                  done_s=begin + 0.9, round=round))  # fmt: skip
            for peer in ((rank + 1) % ranks, (rank + RANKS_OF_HOST) % ranks):
                is_far = hosts[rank] != hosts[peer]
                slow = 4.0 if rank // RANKS_OF_HOST == slow_host and is_far and round >= SLOW_FROM else 1.0
                done = begin + 0.45 + slow * 0.05 * draw.uniform(0.9, 1.1)
                for one, other, direction in ((rank, peer, "sent"), (peer, rank, "received")):
                    records.add(TransferEnd(
                        communicator="world", rank=one, peer=other,
                        direction="sent" if direction == "sent" else "received",
                        operation=round, num_bytes=1_000_000, posted_s=begin + 0.45, done_s=done,
                    ))  # fmt: skip
    return records


def live_window(ranks: int, window: int, *, slow_host: int, seed: int = 1) -> tuple[float, float, int]:
    """Return seconds to take one window into histories that exist, seconds to judge it, and the number of findings."""
    draw = random.Random(seed)
    job = Job(host_of={rank: f"host-{rank // RANKS_OF_HOST}" for rank in range(ranks)})
    times = LinkTimes()
    cells = [(rank, peer % ranks) for rank in range(ranks) for peer in (rank + 1, rank + RANKS_OF_HOST)]
    for round in range(SLOW_FROM):
        for cell in cells:
            times.watches.setdefault(cell, Watch()).add(round, float(round), 0.05 * draw.uniform(0.9, 1.1))
    fresh = [
        (cell, round, 0.05 * draw.uniform(0.9, 1.1) * (
            4.0 if cell[0] // RANKS_OF_HOST == slow_host and job.host_of[cell[0]] != job.host_of[cell[1]] else 1.0
        ))
        for round in range(SLOW_FROM, SLOW_FROM + window) for cell in cells
    ]  # fmt: skip
    begin_s = time.perf_counter()
    for cell, round, time_s in fresh:
        times.watches[cell].add(round, float(round), time_s)
    taken_s = time.perf_counter()
    found = find_slow_links(job, times)
    return taken_s - begin_s, time.perf_counter() - taken_s, len(found)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=26)
    parser.add_argument("--window", type=int, default=5, help="rounds in a window")
    options = parser.parse_args()
    slow_host = options.ranks // RANKS_OF_HOST // 2
    taken_s, judged_s, count = live_window(options.ranks, options.window, slow_host=slow_host)
    live_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    records = records_of(options.ranks, options.rounds, slow_host=slow_host)
    begin_s = time.perf_counter()
    findings = diagnose(records)
    whole_s = time.perf_counter() - begin_s
    told = {
        "ranks": options.ranks, "window_rounds": options.window, "take_in_s": round(taken_s, 3),
        "judge_s": round(judged_s, 3), "window_s": round(taken_s + judged_s, 3), "window_findings": count,
        "live_peak_mib": round(live_mib), "rounds": options.rounds, "records": records.num_records,
        "from_nothing_s": round(whole_s, 2), "findings": [f"{one.kind}: {one.where}" for one in findings],
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))
    print(report(findings))


if __name__ == "__main__":
    main()
