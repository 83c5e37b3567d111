"""`thinwire probe` on wires that the lab shapes: what it finds is what was set."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from tests.lab.machine import skip_where_labs_are_impossible
from thinwire.lab import Lab, Link
from thinwire.planning.cluster import Cluster, load_cluster
from thinwire.transport.secret import make_secret

# Other work on the machine delays transfers, so that a wire looks slower, and a fitted line also steeper or flatter.
MOST_PROBES = 5
PAIRS = tuple(itertools.permutations(("host-0", "host-1")))


def within_bounds(cluster: Cluster) -> set[tuple[str, str, str]]:
    """Return which of the wires' numbers are those that were set."""
    found = set()
    for pair in PAIRS:
        wire = cluster.wire(*pair)
        # each host sends at 20 and receives at 8 Mbit/s at most; frames and headers take some of that
        if 4e6 < wire.bandwidth_bits_per_s < 8.4e6:
            found.add((*pair, "rate"))
        if wire.latency_s < 0.1:
            found.add((*pair, "latency"))
    return found


@pytest.mark.timeout(1500)
def test_a_probe_with_a_secret_finds_the_rates_and_latencies_of_uneven_wires(tmp_path: Path) -> None:
    """Each number must come out right in one of a few probes: a probe that measures something else never gets there."""
    skip_where_labs_are_impossible()
    make_secret(tmp_path / "job.secret")
    words = [
        sys.executable, "-m", "thinwire.cli.main", "probe", "--budget", "6s", "--step-time", "0.1s", "--threads", "1",
        "--batch-size", "1", "--seq-len", "16", "--out", str(tmp_path / "cluster.json"), "--json",
        "--secret", str(tmp_path / "job.secret"),
    ]  # fmt: skip
    clusters: list[Cluster] = []
    with Lab(hosts=2, rate="20mbit/8mbit", link=Link(latency_s=0.02)) as lab:
        while len(clusters) < MOST_PROBES:
            results = lab.run(words, deadline_s=280, environment={"OMP_NUM_THREADS": "1"})
            assert all(result.exit_code == 0 for result in results), results[0].stderr
            clusters.append(cluster := load_cluster(tmp_path / "cluster.json"))
            assert [machine.name for machine in cluster.machines] == ["host-0", "host-1"]
            # nothing that delays a word makes it come sooner
            assert min(cluster.wire(*pair).latency_s for pair in PAIRS) > 0.018
            if len(set().union(*map(within_bounds, clusters))) == 4:
                break
    assert len(set().union(*map(within_bounds, clusters))) == 4, [cluster.wires for cluster in clusters]
    machine = cluster.machines[0]
    assert machine.step_s is not None and machine.flops_per_s is not None and machine.encode_bytes_per_s is not None
    assert machine.float64_flops_per_s is not None
    assert results[0].stdout.strip().startswith('{"format": "thinwire-cluster"') and not results[1].stdout.strip()
