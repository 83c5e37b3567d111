"""`thinwire probe` on wires that the lab shapes: what it finds is what was set."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab.machine import skip_where_labs_are_impossible
from thinwire.lab import Lab, Link
from thinwire.planning.cluster import load_cluster
from thinwire.transport.secret import make_secret


def test_a_probe_with_a_secret_finds_the_rates_and_latencies_of_uneven_wires(tmp_path: Path) -> None:
    """Times here are not judged tightly: other work on the machine may hold a transfer up, but never speed one up."""
    skip_where_labs_are_impossible()
    make_secret(tmp_path / "job.secret")
    words = [
        sys.executable, "-m", "thinwire.cli.main", "probe", "--budget", "6s", "--step-time", "0.1s", "--threads", "1",
        "--batch-size", "1", "--seq-len", "16", "--out", str(tmp_path / "cluster.json"), "--json",
        "--secret", str(tmp_path / "job.secret"),
    ]  # fmt: skip
    with Lab(hosts=2, rate="20mbit/8mbit", link=Link(latency_s=0.02)) as lab:
        results = lab.run(words, deadline_s=300, environment={"OMP_NUM_THREADS": "1"})
    assert all(result.exit_code == 0 for result in results), results[0].stderr
    cluster = load_cluster(tmp_path / "cluster.json")
    assert [machine.name for machine in cluster.machines] == ["host-0", "host-1"]
    for source, destination in (("host-0", "host-1"), ("host-1", "host-0")):
        wire = cluster.wire(source, destination)
        # each host sends at 20 and receives at 8 Mbit/s at most; frames and headers take some of that
        assert 4e6 < wire.bandwidth_bits_per_s < 8.4e6
        assert 0.018 < wire.latency_s < 0.1
    machine = cluster.machines[0]
    assert machine.step_s is not None and machine.flops_per_s is not None and machine.encode_bytes_per_s is not None
    assert results[0].stdout.strip().startswith('{"format": "thinwire-cluster"') and not results[1].stdout.strip()
