"""How long tests took: read from a junit file, printed with the slowest first, and stored for the next run.

    python -m tests.durations build/tests.xml                          # the slowest 50
    python -m tests.durations build/tests.xml --store                  # into tests/durations.txt

A stored line holds seconds and a unit of `dealing`: a file that starts processes, or a single test that computes. Units
below a second are left out. A name that no longer exists does no harm.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
STORED = Path(__file__).with_suffix(".txt")
_LEAST_S = 1.0


def measured(junit: Path) -> dict[str, float]:
    """Return seconds by node id, from what `pytest --junitxml` wrote."""
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in cases
    }


def stored(path: Path = STORED) -> dict[str, float]:
    """Return seconds by unit."""
    pairs = (line.split(" ", 1) for line in path.read_text().splitlines())
    return {unit: float(seconds) for seconds, unit in pairs}


def store(seconds: Mapping[str, float], *, unit_of: Callable[[str], str], path: Path = STORED) -> None:
    """Write the durations of units that take long, the longest first; what was not run keeps its own."""
    by_unit: Counter[str] = Counter()
    for nodeid, taken_s in seconds.items():
        by_unit[unit_of(nodeid)] += taken_s  # type: ignore[assignment]  # a Counter may count seconds
    for unit, taken_s in stored(path).items() if path.exists() else ():
        if unit not in by_unit and (ROOT / unit.split("::", 1)[0]).exists():
            by_unit[unit] = taken_s  # type: ignore[assignment]
    lines = [f"{taken_s:.0f} {unit}\n" for unit, taken_s in by_unit.most_common() if taken_s >= _LEAST_S]
    path.write_text("".join(lines))


def report(seconds: Mapping[str, float], *, num_tests: int = 50) -> str:
    """Return the slowest tests, then the seconds of each folder, as lines of text."""
    folders: Counter[str] = Counter()
    for nodeid, taken_s in seconds.items():
        folders["/".join(nodeid.split("/")[1:2])] += taken_s  # type: ignore[assignment]
    slowest = sorted(seconds.items(), key=lambda pair: -pair[1])[:num_tests]
    lines = [f"{taken_s:7.1f} s  {nodeid}" for nodeid, taken_s in slowest]
    lines += ["", *(f"{taken_s:7.0f} s  tests/{folder}" for folder, taken_s in folders.most_common())]
    return "\n".join(lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Durations of the tests of one run.")
    parser.add_argument("junit", type=Path)
    parser.add_argument("--store", action="store_true", help=f"write {STORED.name}")
    given = parser.parse_args()
    seconds = measured(given.junit)
    if given.store:
        from tests.dealing import unit_of

        store(seconds, unit_of=unit_of)
        return
    print(report(seconds))


if __name__ == "__main__":
    _main()
