"""Laws of stated traffic: an exchange sends the messages and bytes that it states, no more and no fewer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire
from thinwire.averaging.exchange import AllGather, DescribesTraffic, Exchange, NoExchange, TwoPhase
from thinwire.averaging.message_pattern import RingMessages, RoundTraffic, sent_payloads
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import e3m0, float32
from thinwire.methods.masha import Star
from thinwire.methods.power_sgd import LowRank
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

SHAPES = [torch.Size([16, 60]), torch.Size([60])]  # 1020 elements, which no number of replicas here divides evenly
EXCHANGES: dict[str, Exchange] = {
    "all-gather": AllGather(codec=e3m0()), "two-phase": TwoPhase(codec=e3m0()), "dense": TwoPhase(codec=float32()),
    "star": Star(codec=e3m0(), server_codec=float32(), server=1), "low-rank": LowRank(rank=2), "nothing": NoExchange(),
}  # fmt: skip


def sent_messages(exchange: Exchange, *, num_replicas: int) -> list[list[tuple[int, int]]]:
    """Run one round, and return each replica's messages: the receiver and the payload's bytes."""

    def replica_main(loopback: LoopbackTransport) -> list[tuple[int, int]]:
        transport, me = RecordingTransport(loopback), loopback.replica
        peers = AllReplicas().peers(round_id=0, me=me, alive=range(num_replicas))
        vector = torch.arange(1020, dtype=torch.float32) + me
        bound = exchange.bind([SHAPES], replica=me, num_replicas=num_replicas)
        steps = bound.steps(vector, RoundContext(peers=peers, transport=transport, round_id=0, step=1))
        received = None
        while True:
            try:
                wait = next(steps) if received is None else steps.send(received)
            except StopIteration:
                break
            received = [pending.wait(deadline_s=60.0) for pending in wait.receives]
        return [(record.peer, record.payload_bytes) for record in transport.log if record.direction == "sent"]

    return thinwire.run_replicas(num_replicas, replica_main)


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_sends_the_messages_and_bytes_that_it_states(name: str, num_replicas: int) -> None:
    exchange = EXCHANGES[name]
    assert isinstance(exchange, DescribesTraffic)
    stated: RoundTraffic = exchange.traffic(SHAPES, num_members=num_replicas)
    found = sent_messages(exchange, num_replicas=num_replicas)
    assert max(sum(size for _, size in messages) for messages in found) == stated.sent_bytes
    assert max(map(len, found)) == stated.num_messages
    if stated.pattern is None:
        return
    pairs = Counter((me, to) for me, messages in enumerate(found) for to, _ in messages)
    everyone = range(num_replicas)
    stages = stated.pattern.stages(senders=everyone, members=everyone)
    expected = Counter(pair for stage in stages for pair in stage.messages())
    if name == "low-rank" and num_replicas > 2:  # each factor crosses in two stages, which the pattern counts once
        expected = Counter({pair: 2 * count for pair, count in expected.items()})
    assert pairs == expected


@pytest.mark.parametrize("num_members", [2, 3, 8])
def test_a_ring_sends_what_two_phases_send_in_more_messages(num_members: int) -> None:
    assert sent_payloads(RingMessages(), num_members=num_members) == pytest.approx(2 * (num_members - 1) / num_members)
    everyone = range(num_members)
    (stage,) = RingMessages().stages(senders=everyone, members=everyone)
    assert len(list(stage.messages())) == 2 * (num_members - 1) * num_members
