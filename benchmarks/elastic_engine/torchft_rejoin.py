"""Kill a replica of torchft's, start it again, and time it until its first commit, with a state to fetch.

sudo python benchmarks/elastic_engine/torchft_rejoin.py RATE STATE_BYTES LIMIT_S REPEATS RESULTS.jsonl

LIMIT_S is every time-out of the replicas; torchft's default is 60.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from torchft_job import Job, note, spread, wait_until

from thinwire.lab import Lab
from thinwire.units import parse_rate

REPLICAS, LOST = 3, 2
DEADLINE_S = 300.0


def run(rate: str, state_bytes: int, limit_s: int) -> dict[str, Any]:
    with Lab(hosts=REPLICAS + 1, rate=rate) as lab:
        job = Job(lab, num_replicas=REPLICAS, state_bytes=state_bytes)
        job.start_lighthouse()
        # who comes after the first step has to fetch the state: so all are there before it
        job.go.unlink()
        job.limit_s = limit_s
        for replica in range(REPLICAS):
            job.start(replica)
        wait_until(lambda: all(len(job.events(replica)) == 2 for replica in range(REPLICAS)), deadline_s=60)
        time.sleep(1)
        job.go.touch()
        started = lambda: job.has_committed(range(REPLICAS), steps=10, since_s=0, participants=REPLICAS)  # noqa: E731
        if not wait_until(started, deadline_s=DEADLINE_S):
            raise RuntimeError(f"the job did not start; see {lab.folder}")
        killed_s = time.monotonic()
        lab.kill_host(LOST)
        wait_until(lambda: job.has_committed([0, 1], steps=5, since_s=killed_s, participants=2), deadline_s=60)
        before = lab.counters()[LOST].received_bytes
        began_s = time.monotonic()
        process = job.start(LOST)
        back = lambda: job.has_committed(range(REPLICAS), steps=1, since_s=began_s, participants=REPLICAS)  # noqa: E731
        is_back = wait_until(lambda: back() or process.exit_code is not None, deadline_s=DEADLINE_S) and back()
        at_s = {event["event"]: event["at_s"] - began_s for event in reversed(job.events(LOST))}
        said = job.events(LOST)
        steps = [event for event in job.events(0) if event["event"] == "step" and event["at_s"] > began_s]
        return {
            "what": "torchft_rejoin",
            "rate": rate,
            "state_bytes": state_bytes,
            "limit_s": limit_s,
            "transfer_alone_s": state_bytes * 8 / parse_rate(rate),
            "first_commit_s": job.commits(LOST)[0]["at_s"] - began_s if is_back else None,
            "imported_s": at_s.get("imported"),
            "loaded_s": at_s.get("loaded"),
            "longest_step_of_others_s": max((event["took_s"] for event in steps), default=None),
            "steps_discarded": sum(not event["ok"] for event in steps),
            "commits_of_others": sum(event["ok"] for event in steps),
            "received_bytes": lab.counters()[LOST].received_bytes - before,
            "errors": sorted({event["error"].partition(", details")[0] for event in said if event.get("error")}),
        }


def main(rate: str, state_bytes: int, limit_s: int, repeats: int, results: Path) -> None:
    rows = []
    for _ in range(repeats):
        rows.append(run(rate, state_bytes, limit_s))
        note(results, rows[-1])
    print(
        f"{state_bytes:,} bytes at {rate}: first commit after {spread([row['first_commit_s'] for row in rows])} s; "
        f"the transfer alone takes {rows[0]['transfer_alone_s']:.1f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
