"""Cut off, stop or kill one of three replicas of torchft's, and time the other two until their next commit.

sudo python benchmarks/elastic_engine/torchft_faults.py cut|stop|kill REPEATS RESULTS.jsonl [LOST_REPLICA [LIMIT_S]]

LIMIT_S is every time-out of the replicas; torchft's default is 60. Afterwards the cable is mended, or the
process goes on, or starts anew, and the time is taken until all three commit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from torchft_job import Job, note, spread, wait_until

from thinwire.lab import Lab

REPLICAS = 3
DEADLINE_S = 240.0


def run(fault: str, lost: int, limit_s: int) -> dict[str, Any]:
    with Lab(hosts=REPLICAS + 1) as lab:
        job = Job(lab, num_replicas=REPLICAS)
        job.limit_s = limit_s
        job.start_lighthouse()
        for replica in range(REPLICAS):
            job.start(replica)
        started = lambda: job.has_committed(range(REPLICAS), steps=10, since_s=0, participants=3)  # noqa: E731
        if not wait_until(started, deadline_s=120):
            raise RuntimeError(f"the job did not start; see {lab.folder}")
        time.sleep(1)
        began_s = time.monotonic()
        {"cut": lab.cut, "stop": lab.stop_host, "kill": lab.kill_host}[fault](lost)
        others = [replica for replica in range(REPLICAS) if replica != lost]
        wait_until(lambda: job.has_committed(others, steps=1, since_s=began_s, participants=2), deadline_s=DEADLINE_S)
        row = {"fault": fault, "lost": lost, "limit_s": limit_s, **_seen(job, others, began_s)}
        undone_s = time.monotonic()
        if fault == "kill":
            job.start(lost)
        else:
            {"cut": lab.mend, "stop": lab.continue_host}[fault](lost)
        all_back = lambda: job.has_committed(range(REPLICAS), steps=1, since_s=undone_s, participants=3)  # noqa: E731
        back = wait_until(all_back, deadline_s=DEADLINE_S)
        ends = [job.commits(n, since_s=undone_s, participants=3)[0]["at_s"] for n in range(REPLICAS)] if back else []
        row["all_commit_again_s"] = max(ends) - undone_s if back else None
        row["lost_one_said"] = [event["error"] for event in job.events(lost) if event.get("error")]
        return row


def _seen(job: Job, others: list[int], began_s: float) -> dict[str, Any]:
    next_s, discarded, errors = [], 0, []
    for replica in others:
        found = job.commits(replica, since_s=began_s, participants=2)
        next_s.append(found[0]["at_s"] - began_s if found else None)
        failed = [e for e in job.events(replica) if e["event"] == "step" and e["at_s"] > began_s and not e["ok"]]
        discarded = max(discarded, len(failed))
        errors += [event["error"] for event in job.events(replica) if event.get("error")]
    totals = [{e["step"]: e["total"] for e in job.commits(replica)} for replica in others]
    shared = totals[0].keys() & totals[1].keys()
    return {
        "next_commit_s": max(next_s) if None not in next_s else None,
        "steps_discarded": discarded,
        "survivors_agree": all(totals[0][step] == totals[1][step] for step in shared),
        "errors": sorted(set(errors)),
    }


def main(fault: str, repeats: int, results: Path, lost: int, limit_s: int) -> None:
    rows = []
    for _ in range(repeats):
        rows.append(run(fault, lost, limit_s))
        note(results, {"what": "torchft_faults", **rows[-1]})
    print(f"{fault}: next commit of the others after {spread([row['next_commit_s'] for row in rows])} s")
    print(f"{fault}: all commit again after {spread([row['all_commit_again_s'] for row in rows])} s")


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[4:]]
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *(chosen + [2, 60][len(chosen) :]))
