"""Any torch job over several hosts under `thinwire.watch`: wires that make its collectives hang or slow are named."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.lab import Lab, rank_environment
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records
from thinwire.runlog.run_folder import read_files

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).parent / "watched_script.py"
SOON_S = 600.0
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


def start(lab: Lab, folder: Path, *, has_ipv4: bool) -> None:
    """Start the job on all hosts, which a lab gives addresses of IPv4; without those over IPv6 alone."""
    for host in range(3):
        environment = {**rank_environment(host, 3), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(SCRIPT), str(folder), "60000"]
        if not has_ipv4:
            environment["MASTER_ADDR"] = "fd00::1"
            move = (
                "echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6",
                f"ip -6 address add fd00::{host + 1}/64 dev eth0 nodad",
                "ip -4 address flush dev eth0",
            )
            words = ["sh", "-ec", "; ".join((*move, 'exec "$@"')), "sh", *words]
        lab.start(words, host=host, environment=environment)


@pytest.mark.parametrize(
    ("fault", "has_ipv4", "kind", "names"),
    [
        # the first report may hold the evidence of one way alone
        ("cut", True, "communication hang", {"link 1 <-> 2", "link 1 -> 2", "link 2 -> 1"}),
        # which of these it is, is told by bursts that busy cores may delay; elsewhere nothing is slow
        ("slow sender", False, "communication slow", {"sender rank 1", "host host-1", "link 1 -> 0"}),
    ],
)
def test_wires_of_a_torch_job_are_named(
    fault: str, has_ipv4: bool, kind: str, names: set[str], tmp_path: Path
) -> None:  # fmt: skip
    with Lab(hosts=3, rate="50mbit") as lab:
        start(lab, tmp_path, has_ipv4=has_ipv4)
        records = wait_for(tmp_path, has_settled)
        assert {(one.rank, one.peer) for one in records.flows} == {(a, b) for a in range(3) for b in range(3) if a != b}
        if fault == "cut":
            lab.cut(1, 2)
        else:
            lab.set_rate(1, "50mbit/5mbit")
        found = findings_in(tmp_path, lambda one: one.kind == kind and one.places[0].kind != "communicator")
    assert names & {str(place).split(" (")[0] for place in found.places}, found
