"""What a look of a run's own judge costs where the files of records are long.

    python benchmarks/diagnosis/live_cost.py --ranks 3 --rounds 3000

The records of a rehearsed job are written as its ranks would; then the judge looks until it has read all, and a few
times more. Told are the bytes, the CPU seconds of a look when all that is kept is there, and the longest look.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from thinwire.monitor.live_diagnosis import LiveDiagnosis, Members
from thinwire.monitor.remediation import Action, Policy, Steering
from thinwire.runlog.records import Communicator, header_line, to_line

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.synthetic_jobs import Scene, synthesize


class Nobody:
    def members(self) -> Members | None:
        return None

    def act(self, action: Action) -> str:
        raise AssertionError(action)


def write(folder: Path, *, ranks: int, rounds: int) -> int:
    texts: dict[int, list[str]] = {rank: [header_line()] for rank in range(ranks)}
    for record in synthesize(Scene(hosts=("a",) * ranks, rounds=rounds)):
        owners = range(ranks) if isinstance(record, Communicator) else (record.rank,)
        for rank in owners:
            texts[rank].append(to_line(record))
    for rank, lines in texts.items():
        (folder / f"records-rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--looks", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        # what lies in the folder already is of an earlier part of the run, and not judged
        judge = LiveDiagnosis(Path(name), say=print, steering=Steering(Policy()), hands=Nobody())
        num_bytes = write(Path(name), ranks=options.ranks, rounds=options.rounds)
        took = []
        for _ in range(options.looks):
            began_s = time.thread_time()
            judge.look()
            took.append(time.thread_time() - began_s)
    told = {
        "ranks": options.ranks, "rounds": options.rounds, "bytes": num_bytes, "longest_look_s": round(max(took), 3),
        "later_look_s": round(sorted(took[-5:])[2], 3), "findings": len(judge.news),
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
