"""Kill the Lighthouse of two replicas of torchft's, start it again on the same port, and see what they do.

sudo python benchmarks/elastic_engine/torchft_lighthouse.py AWAY_S RETRIES REPEATS RESULTS.jsonl

RETRIES is torchft's `quorum_retries`; its default is 0.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from torchft_job import Job, note, spread, wait_until

from thinwire.lab import Lab

REPLICAS = 2
DEADLINE_S = 200.0


def run(away_s: float, retries: int) -> dict[str, Any]:
    with Lab(hosts=REPLICAS + 1) as lab:
        job = Job(lab, num_replicas=REPLICAS, min_replicas=REPLICAS, TORCHFT_QUORUM_RETRIES=str(retries))
        job.start_lighthouse()
        processes = [job.start(replica) for replica in range(REPLICAS)]
        started = lambda: job.has_committed(range(REPLICAS), steps=10, since_s=0, participants=REPLICAS)  # noqa: E731
        if not wait_until(started, deadline_s=120):
            raise RuntimeError(f"the job did not start; see {lab.folder}")
        began_s = time.monotonic()
        lab.kill_host(job.lighthouse_host)
        time.sleep(away_s)
        back_s = time.monotonic()
        job.start_lighthouse()

        def is_decided() -> bool:
            resumed = job.has_committed(range(REPLICAS), steps=2, since_s=back_s, participants=REPLICAS)
            return resumed or all(process.exit_code is not None for process in processes)

        wait_until(is_decided, deadline_s=DEADLINE_S)
        resumed = [job.commits(n, since_s=back_s, participants=REPLICAS) for n in range(REPLICAS)]
        later = [event for n in range(REPLICAS) for event in job.commits(n, since_s=began_s + 1)]
        raised = [event for n in range(REPLICAS) for event in job.events(n) if event["event"] == "raised"]
        return {
            "what": "torchft_lighthouse",
            "away_s": away_s,
            "quorum_retries": retries,
            "commits_while_away": sum(event["at_s"] < back_s for event in later),
            "resumed_after_s": max(found[0]["at_s"] for found in resumed) - back_s if all(resumed) else None,
            "processes_ended": sum(process.exit_code is not None for process in processes),
            "first_raised_after_s": min((event["at_s"] for event in raised), default=began_s) - began_s,
            "raised": sorted({event["error"].partition(", details")[0] for event in raised}),
        }


def main(away_s: float, retries: int, repeats: int, results: Path) -> None:
    rows = []
    for _ in range(repeats):
        rows.append(run(away_s, retries))
        note(results, rows[-1])
    resumed = spread([row["resumed_after_s"] for row in rows])
    print(f"away for {away_s:g} s, {retries} retries: resumed {resumed} s after it came back")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
