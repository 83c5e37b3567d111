"""Any torch job over several hosts under `thinwire.watch`: wires that make its collectives hang or slow are named."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.diagnosis.diagnose import diagnose
from thinwire.diagnosis.findings import Finding
from thinwire.diagnosis.reading import Records
from thinwire.diagnosis.sources import read_files
from thinwire.lab import Lab
from thinwire.lab.rendezvous import rendezvous

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).parent / "watched_script.py"
SOON_S = 60.0
USUAL_STEPS = 40


def records_of(folder: Path) -> Records:
    return read_files([folder]) if len(list(folder.glob("records-rank-*.jsonl"))) == 3 else Records()


def wait_for(folder: Path, is_there: Callable[[Records], bool]) -> Records:
    until_s = time.monotonic() + SOON_S
    while not is_there(records := records_of(folder)):
        assert time.monotonic() < until_s, diagnose(records)
        time.sleep(0.5)
    return records


def has_settled(records: Records) -> bool:
    done = sum(one.done_s is not None for one in records.operations)
    return done >= 3 * USUAL_STEPS and len(records.probes) >= 12


def findings_in(folder: Path, wanted: Callable[[Finding], bool]) -> Finding:
    records = wait_for(folder, lambda records: any(map(wanted, diagnose(records))))
    return next(filter(wanted, diagnose(records)))


@pytest.mark.parametrize(
    ("fault", "kind", "names"),
    [
        ("cut", "communication hang", {"link 1 <-> 2"}),
        # which of these it is, is told by bursts that busy cores may delay; elsewhere nothing is slow
        ("slow sender", "communication slow", {"sender rank 1", "host host-1", "link 1 -> 0"}),
    ],
)
def test_wires_of_a_torch_job_are_named(fault: str, kind: str, names: set[str], tmp_path: Path) -> None:
    with Lab(hosts=3, rate="50mbit") as lab:
        for host in range(3):
            environment = {**rendezvous(host, 3), "OMP_NUM_THREADS": "1"}
            lab.start([sys.executable, str(SCRIPT), str(tmp_path), "60000"], host=host, environment=environment)
        records = wait_for(tmp_path, has_settled)
        assert {(one.rank, one.peer) for one in records.flows} == {(a, b) for a in range(3) for b in range(3) if a != b}
        if fault == "cut":
            lab.cut(1, 2)
        else:
            lab.set_rate(1, "50mbit/5mbit")
        found = findings_in(tmp_path, lambda one: one.kind == kind and one.places[0].kind != "communicator")
    assert names & {str(place).split(" (")[0] for place in found.places}, found
