"""What a round of an exchange costs a replica is measured in part, counted whole, and over whoever takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.averaging.cost import measure_exchange
from thinwire.averaging.delivery import Average, Delivery, Steps, Wait
from thinwire.averaging.exchange import AllGather
from thinwire.averaging.topology import Peers
from thinwire.codecs import bfloat16

SHAPES = [torch.Size([48, 20]), torch.Size([48])]


class Deaf(AllGather):
    """Replica 0 sends nothing, and the others wait for it."""

    def bind(self, shapes: Any, *, replica: int, num_replicas: int) -> Any:
        return self

    def steps(self, tensor: torch.Tensor, delivery: Delivery) -> Steps:
        peers: Peers = delivery.peers
        expected = delivery.receiving(bfloat16(), numel=tensor.numel())
        awaited = (0, 3) if peers.me else ()
        receives = tuple(delivery.transport.receive(source=peer, envelope=expected) for peer in awaited)
        yield Wait(receives=receives, sends=())
        return Average(mean=tensor, reference_hashes={})


def test_an_exchange_that_does_not_end_is_named_with_who_waits_for_what_and_what_to_do() -> None:
    with pytest.raises(ValueError) as refusal:
        measure_exchange(Deaf(codec=bfloat16()), SHAPES, num_replicas=4)
    said = str(refusal.value)
    assert said.startswith(
        "3 of 4 replicas wait for 6 messages that nobody sends, replica 1 for round 0 (fragment 0) from replica 0,"
    )
    assert "Deaf(codec=" in said and "let its steps() send every message that they receive" in said
