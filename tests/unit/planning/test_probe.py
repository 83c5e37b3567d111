"""The probe of wires: what it says of wires whose speed is known, and what it does with what a peer says."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

import thinwire
from thinwire.errors import PayloadError
from thinwire.planning import probe
from thinwire.planning.cluster import Machine
from thinwire.planning.probe import ProbeBudget, WireMeasurements, probe_wires
from thinwire.transport.loopback import LoopbackTransport, single

QUICK = ProbeBudget(seconds=0.2, most_bytes=2**16)


def probed(count: int) -> list[WireMeasurements]:
    def replica_main(transport: LoopbackTransport) -> WireMeasurements:
        return probe_wires(transport, budget=QUICK, deadline_s=10)

    return list(thinwire.run_replicas(count, replica_main))


def test_every_pair_is_measured_both_ways_and_all_replicas_know_the_same() -> None:
    found = probed(3)
    assert found[0] == found[1] == found[2]
    pairs = {(a, b) for a in range(3) for b in range(3) if a != b}
    assert set(found[0].fits) == set(found[0].latencies_s) == set(found[0].together_bits_per_s) == pairs
    assert all(fit.bandwidth_bits_per_s > 0 for fit in found[0].fits.values())


def test_a_cluster_file_has_each_wire_and_what_each_access_can_do_together() -> None:
    (found, _) = probed(2)
    cluster = found.cluster([Machine(name="a", flops_per_s=1e12), Machine(name="b")])
    assert cluster.wire("a", "b").bandwidth_bits_per_s == found.fits[0, 1].bandwidth_bits_per_s
    assert cluster.machines[0].flops_per_s == 1e12
    up = cluster.machines[0].up_bits_per_s
    assert up is not None and up >= found.fits[0, 1].bandwidth_bits_per_s and up >= found.up_bits_per_s[0]
    assert type(cluster).from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_a_wire_of_known_speed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by what each message would take on a wire of 8 Mbit/s and 10 ms."""
    clock = {"now_s": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now_s"])
    send = probe._PeerChannel.send

    def slow(line: Any, payload: torch.Tensor, *, to: int) -> None:
        clock["now_s"] += 0.010 + 8 * payload.numel() / 8e6
        send(line, payload, to=to)

    monkeypatch.setattr(probe._PeerChannel, "send", slow)
    monkeypatch.setattr(probe, "_together", lambda line, sizes: {str(1 - line.transport.replica): 0.5})
    (found, _) = probed(2)
    for pair in ((0, 1), (1, 0)):
        assert found.fits[pair].bandwidth_bits_per_s == pytest.approx(8e6, rel=0.01)
        assert found.latencies_s[pair] == pytest.approx(0.010, rel=0.01)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "replica 0 did not report its wire to 1"),
        ({"latency_s": 1, "transfers": 3}, "did not report its wire"),
        ({"latency_s": 1, "transfers": [[1, 2, 3]]}, r"reported a transfer as \[1, 2, 3\]"),
        ({"latency_s": 1, "transfers": [[1, -2]]}, "a measurement as -2, which is no number above 0"),
        ({"latency_s": None, "transfers": [[1, 1]]}, "a measurement as None"),
        ({"latency_s": float("inf"), "transfers": [[1, 1]]}, "a measurement as inf"),
        ({"latency_s": True, "transfers": [[1, 1]]}, "a measurement as True"),
    ],
)
def test_what_a_peer_says_is_checked(said: dict[str, Any], why: str) -> None:
    with pytest.raises(PayloadError, match=why):
        probe._checked(said, (0, 1))


def test_a_peer_that_wants_to_send_too_much_is_refused() -> None:
    def replica_main(transport: LoopbackTransport) -> None:
        line = probe._PeerChannel(transport, number=0, deadline_s=5)
        if transport.replica == 0:
            line.send(probe._encode_size(2**40), to=1)
            return
        with pytest.raises(PayloadError, match=r"replica 0 .* 1099511627776 bytes, more than 65536"):
            probe._follow(line, 0, QUICK)

    thinwire.run_replicas(2, replica_main)


def test_a_probe_of_one_replica_says_where_to_start_it() -> None:
    with pytest.raises(ValueError, match="at least 2 replicas, got 1; start it on the hosts by torchrun"):
        probe_wires(single())


@pytest.mark.parametrize(("arguments", "said"), [({"seconds": 0}, "above 0 s"), ({"most_bytes": 9}, "got 9")])
def test_a_budget_that_measures_nothing_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ProbeBudget(**arguments)


def test_a_pair_has_less_of_the_budget_where_there_are_more() -> None:
    assert ProbeBudget(seconds=60).transfer_s(2) == 2.0 > ProbeBudget(seconds=60).transfer_s(16) > 0
