from __future__ import annotations

import pytest

from benchmarks.traffic.c4_figures import after_failure, balanced_rounds
from thinwire.traffic import Fabric, FabricFlow, plan_traffic
from thinwire.transport.wire.path_balance import BalanceRules, PathBalancer


def test_shares_stay_while_the_gain_is_below_ten_per_cent() -> None:
    balancer = PathBalancer(4)
    for _ in range(20):
        balancer.observe([10.0, 10.0, 10.0, 9.2])  # even rates would be 6 % sooner
    assert balancer.shares == [0.25] * 4 and balancer.num_moves == 0


def test_one_slow_round_moves_nothing_and_a_lasting_one_does() -> None:
    balancer = PathBalancer(2)
    for rates in ([10.0, 10.0], [10.0, 8.0], [10.0, 10.0], [10.0, 10.0]):
        balancer.observe(rates)
    assert balancer.num_moves == 0
    for _ in range(10):
        balancer.observe([10.0, 5.0])
    assert 1 <= balancer.num_moves <= 2
    assert balancer.shares == pytest.approx([2 / 3, 1 / 3], rel=0.1)


def test_a_failed_path_gives_its_share_to_the_others_at_once_and_they_keep_their_proportions() -> None:
    balancer = PathBalancer(3)
    for _ in range(10):
        balancer.observe([4.0, 2.0, 2.0])
    balancer.observe([4.0, 0.0, 2.0])
    assert balancer.shares[1] == 0
    assert balancer.shares[0] / balancer.shares[2] == pytest.approx(2.0, rel=0.1)
    assert sum(balancer.shares) == pytest.approx(1.0)


def test_a_path_that_looks_useless_keeps_a_share_to_be_measured() -> None:
    balancer = PathBalancer(2, rules=BalanceRules(num_in_row=1))
    balancer.observe([1e9, 1.0])
    assert balancer.shares[1] == pytest.approx(1e-3, rel=0.01)


def test_a_failure_moves_only_the_pieces_on_the_failed_cable() -> None:
    hosts = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}
    fabric = Fabric(spines=4, uplink_bits_per_s=1e9, port_bits_per_s=1e9, hosts=hosts)
    flows = [FabricFlow(source=a, destination=b, num_bytes=10**6, connections=4) for a, b in ("ac", "bd", "da")]
    plan = plan_traffic(fabric, flows, method="c4p")
    after = after_failure(plan, ["leaf-0/spine-2"])
    for before_row, after_row in zip(plan.pieces, after.pieces, strict=True):
        for before, now in zip(before_row, after_row, strict=True):
            assert now == before if before.spine != 2 else now.spine != 2
    rounds = balanced_rounds(after, num_rounds=12)
    assert max(rounds[-1].values()) <= max(rounds[0].values())
