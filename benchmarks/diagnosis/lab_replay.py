"""Judge the lab's runs again, with the rules as they are now, from the records that the runs left.

python benchmarks/diagnosis/lab_replay.py FOLDER

FOLDER is what `lab_matrix.py --out` kept. Of each run's records, what was posted and done by a moment is read at every
half second, as if the run went on. The records themselves are those of the real run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lab_matrix import LOOK_S, RESULTS, SETTLE_S, WATCH_S, Scenario, judged
from lab_report import report

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records, from_records
from thinwire.runlog.records import Record
from thinwire.runlog.run_folder import read_files

REPLAYED = RESULTS.with_name("diagnosis_lab_replayed.jsonl")


def until(records: Records, at_s: float) -> Records:
    """Return what was on disk at a moment, but for what was not written yet."""
    found: list[Record] = [*records.communicators.values()]
    for one in (*records.operations, *records.transfers):
        if one.posted_s <= at_s:
            found.append(one if one.done_s is None or one.done_s <= at_s else replace(one, done_s=None))
    found += [span for span in records.spans if span.done_s <= at_s]
    found += [beat for beat in records.beats if beat.at_s <= at_s]
    return from_records(found)


def play(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Judge one run again."""
    one = Scenario(**{field.name: line[field.name] for field in fields(Scenario)})
    records = read_files(sorted(path for path in folder.glob("host-*") if path.is_dir()))
    struck_s, last_s = line["struck_at_s"], max(beat.at_s for beat in records.beats)
    told: dict[bool, list[tuple[float, list[Finding]]]] = {False: [], True: []}
    after_s = -SETTLE_S
    while after_s < WATCH_S and struck_s + after_s < last_s + LOOK_S:
        found = diagnose(until(records, struck_s + after_s))
        told[after_s >= 0].append((after_s, found))
        after_s += LOOK_S
    kept = {name: line[name] for name in ("rounds_before", "rounds_after", "struck_at_s")}
    return {**{field.name: line[field.name] for field in fields(Scenario)}, **judged(one, told[False], told[True]),
            **kept}  # fmt: skip


def main() -> None:
    """Judge all runs, and write and print what came of it."""
    folder = Path(sys.argv[1])
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()]
    lines = [play(line, path) for line in lines if (path := folder / f"run-{line['seed']}").exists()]
    REPLAYED.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(report(lines))


if __name__ == "__main__":
    main()
