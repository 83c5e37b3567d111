"""Judge the long lab runs again, with the rules as they are now, from the records that the runs left.

python benchmarks/diagnosis/long_replay.py --every 2 FOLDER...

Each FOLDER is one that `long_matrix.py --out` kept. Records come in the order in which they were written, a quarter of
a second after the time that they tell of; faults stand in the seconds in which they stood. The results are printed
and written beside those that were told live.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from long_faults import Part, place_name
from long_matrix import RESULTS, Look, Verdict
from long_report import report

from thinwire.monitor.detect.live import LiveDetector, News
from thinwire.monitor.live_diagnosis import LOOK_S
from thinwire.runlog.records import Arrival, Beat, Communicator, Record
from thinwire.runlog.tailer import RecordTailer

REPLAYED = RESULTS.with_name("diagnosis_long_replayed.jsonl")
LATE_S = 0.25


def stamped(path: Path) -> Iterator[tuple[float, Record]]:
    """Yield a file's records, and about when each was written."""
    at_s = 0.0
    for record in RecordTailer(path, most_bytes=1 << 30).new_records():
        at_s = max(at_s, _told_s(record))
        yield at_s + LATE_S, record


def _told_s(record: Record) -> float:
    if isinstance(record, Communicator):
        return 0.0
    if isinstance(record, Beat | Arrival):
        return record.at_s
    times = [getattr(record, name, None) for name in ("posted_s", "started_s", "done_s")]
    return max((time_s for time_s in times if time_s is not None), default=0.0)


class Replay:
    """A job that went on, as a judge would see it."""

    def __init__(self, folder: Path, *, every_s: float) -> None:
        self._every_s = every_s
        files = [stamped(path) for path in sorted(folder.glob("host-*/records-rank-*.jsonl"))]
        self._records = list(heapq.merge(*files, key=lambda pair: pair[0]))
        self._place = 0
        self.look = Look(LiveDetector())
        self.now_s = next((at_s for at_s, _ in self._records if at_s > 1), 0.0)

    def step(self) -> list[News]:
        """Go on to the next look, and look."""
        self.now_s += self._every_s
        fresh = []
        while self._place < len(self._records) and self._records[self._place][0] <= self.now_s:
            fresh.append(self._records[self._place][1])
            self._place += 1
        return self.look(fresh)

    def names(self, until_s: float) -> list[str]:
        """Go on to a moment; return what was new."""
        found = []
        while self.now_s + self._every_s <= until_s:
            found += [f"{news.finding.kind}: {' or '.join(map(place_name, news.finding.places))}"
                      for news in self.step() if news.state == "new"]  # fmt: skip
        return found


def play(folder: Path, every_s: float) -> list[dict[str, Any]]:
    """Judge one job again."""
    lines = [json.loads(text) for text in (folder / "told.jsonl").read_text().splitlines()]
    replay, found = Replay(folder, every_s=every_s), []
    for number, line in enumerate(lines):
        if line["parts"]:
            _scenario(replay, line, every_s)
        following = lines[number + 1]["struck_at_s"] if number + 1 < len(lines) else replay.now_s + line["clean_s"]
        line["rules"] = "replayed"
        line["false_alarms"] = replay.names(following)
        line["look_s"] = round(replay.look.cost_s / max(1, replay.look.count), 3)
        line["failed_looks"] = replay.look.judge.num_failed
        found.append(line)
    return found


def _scenario(replay: Replay, line: dict[str, Any], every_s: float) -> None:
    parts = [Part(**{name: part[name] for name in ("fault", "victim", "other", "severity")}) for part in line["parts"]]
    told = replay.look.judge.open_findings()
    verdict, begun = Verdict(parts=parts, stale={news.case for news in told}), replay.look.rounds
    while replay.now_s + every_s <= line["healed_at_s"]:
        replay.step()
        told = replay.look.judge.open_findings()
        verdict.see(replay.now_s - line["struck_at_s"], replay.look.rounds - begun, told)
    line |= {"parts": verdict.lines(told), "cases": [*verdict.cases.values()], "stale": len(verdict.stale),
             "after": [], "beside": verdict.beside()}  # fmt: skip
    healed_s, until_s = line["healed_at_s"], line["healed_at_s"] + (line["over_s"] or 15.0)
    line["over_s"] = None
    while replay.now_s + every_s <= until_s:
        line["after"] += replay.names(replay.now_s + every_s)
        if line["over_s"] is None and not replay.look.judge.open_findings():
            line["over_s"] = round(replay.now_s - healed_s, 2)


def main() -> None:
    """Judge all jobs, and write and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--every", type=float, default=LOOK_S, help="seconds between two looks")
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        lines = [line for own in pool.map(partial(play, every_s=options.every), options.folders) for line in own]
    REPLAYED.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(report(lines))


if __name__ == "__main__":
    main()
