"""Cut off, stop or kill one of three replicas on the authenticated wire, and time its transfers until they fail.

sudo python benchmarks/elastic_engine/wire_faults.py cut|stop|kill REPEATS RESULTS.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from torchft_job import note, spread, wait_until

from thinwire.lab import Lab, rank_environment
from thinwire.transport.secret import make_secret

REPLICAS, LOST = 3, 2
SCRIPT = Path(__file__).parent / "wire_replica.py"
AFTER_S = 3.0


def run(fault: str) -> dict[str, Any]:
    with Lab(hosts=REPLICAS) as lab:
        secret = lab.folder / "job.secret"
        make_secret(secret)
        logs = _start(lab, secret)

        def swaps(replica: int, peer: int) -> list[dict[str, Any]]:
            lines = logs[replica].read_text().splitlines(keepends=True)
            return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["peer"] == peer]

        if not wait_until(lambda: all(len(swaps(n, LOST)) > 30 for n in (0, 1)), deadline_s=60):
            raise RuntimeError(f"the replicas did not meet; see {lab.folder}")
        began_s = time.monotonic()
        {"cut": lab.cut, "stop": lab.stop_host, "kill": lab.kill_host}[fault](LOST)
        wait_until(lambda: all(swaps(n, LOST)[-1]["error"] for n in (0, 1)), deadline_s=100)
        time.sleep(AFTER_S)
        failed = [swaps(n, LOST)[-1] for n in (0, 1)]
        others = swaps(0, 1)
        times_s = [event["at_s"] for event in others if event["at_s"] > began_s]
        return {
            "what": "wire_faults",
            "fault": fault,
            "noticed_s": max(e["at_s"] for e in failed) - began_s if all(e["error"] for e in failed) else None,
            "errors": sorted({event["error"] for event in failed}),
            "swaps_of_the_others": len(times_s),
            "longest_pause_of_the_others_s": max(b - a for a, b in zip([began_s, *times_s], times_s, strict=False)),
            "others_failed": bool(others[-1]["error"]),
        }


def _start(lab: Lab, secret: Path) -> list[Path]:
    logs = [lab.folder / f"replica-{number}.out" for number in range(REPLICAS)]
    for number, log in enumerate(logs):
        with log.open("wb") as out:
            words = [sys.executable, str(SCRIPT), str(secret)]
            environment = {**rank_environment(number, REPLICAS), "OMP_NUM_THREADS": "1"}
            lab.start(words, host=number, environment=environment, stdout=out)
    return logs


def main(fault: str, repeats: int, results: Path) -> None:
    rows = []
    for _ in range(repeats):
        rows.append(run(fault))
        note(results, rows[-1])
    print(f"{fault}: transfers of the lost one fail after {spread([row['noticed_s'] for row in rows])} s")
    print(f"{fault}: longest pause of the others {max(row['longest_pause_of_the_others_s'] for row in rows):.2f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
