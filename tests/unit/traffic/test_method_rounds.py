"""Rounds of a method as flows: the messages that its exchange states, stage by stage."""

from __future__ import annotations

import pytest

from thinwire.averaging.message_pattern import AllGatherMessages, StarMessages, TwoPhaseMessages
from thinwire.simulate import ExchangeModel
from thinwire.sync.schedule import Staggered
from thinwire.traffic import Fabric, plan_traffic
from thinwire.traffic.method_rounds import flows_of_rounds, round_seconds, rounds_of_method

FABRIC = Fabric(
    spines=3, uplink_bits_per_s=8e6, port_bits_per_s=1e9, hosts={name: (place,) for place, name in enumerate("abc")}
)
SCHEDULE = Staggered(sync_interval=6, overlap_steps=1)
PAYLOADS = [[3_000_000.0], [600_000.0]]


@pytest.mark.parametrize(
    ("pattern", "num_stages", "num_messages", "seconds"),
    [
        # an uplink carries 1 MB a second; each host has three, for two peers
        (AllGatherMessages(), 1, 6, 3.0),
        (TwoPhaseMessages(), 2, 12 / 3, 2 * 1.0),
        (StarMessages(), 2, 4, 2 * 3.0),
    ],
)  # fmt: skip
def test_stages_carry_the_bytes_that_the_exchange_states(
    pattern: object, num_stages: int, num_messages: float, seconds: float
) -> None:
    exchange = ExchangeModel(pattern=pattern)  # type: ignore[arg-type]
    rounds = rounds_of_method(SCHEDULE, PAYLOADS, exchange, fabric=FABRIC, num_replicas=3)
    by_fragment = {one.fragments: one for one in rounds}
    assert sorted(by_fragment) == [(0,), (1,)] and all(6 < one.step <= 12 for one in rounds)
    assert {one.num_steps for one in rounds} == {1} and {len(one.stages) for one in rounds} == {num_stages}
    for fragment, (payload,) in enumerate(PAYLOADS):
        assert by_fragment[fragment,].num_bytes == pytest.approx(num_messages * payload)
    flows = flows_of_rounds(rounds)
    assert sum(flow.num_bytes for flow in flows) == sum(one.num_bytes for one in rounds)
    plan = plan_traffic(FABRIC, flows, method="colour")
    assert round_seconds(plan, by_fragment[0,]) == pytest.approx(seconds, rel=0.01)


def test_replicas_without_a_host_are_refused() -> None:
    for count in (1, 4):
        with pytest.raises(ValueError, match="and 3 hosts"):
            rounds_of_method(SCHEDULE, PAYLOADS, ExchangeModel(), fabric=FABRIC, num_replicas=count)
