"""Numbers for experiment trackers."""

from __future__ import annotations

import torch

import thinwire
from thinwire.transport.recording import RecordingTransport


def test_the_numbers_are_those_of_the_log_and_the_engine() -> None:
    def train(transport: thinwire.LoopbackTransport) -> tuple[dict[str, float], int]:
        recorded = RecordingTransport(transport)
        model = torch.nn.Linear(3, 2)
        method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=recorded)
        for _ in range(5):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        found = thinwire.metrics(optimizer)
        optimizer.close(final_exchange=True)
        return found, recorded.log.totals("sent").wire_bytes

    for found, sent in thinwire.run_replicas(2, train):
        assert found["step"] == 5 and 0 < found["sent_bytes"] < sent
        assert found["rounds_launched"] - found["rounds_applied"] == found["rounds_in_flight"] > 0
        assert found["missing_steps"] > 0 and all(isinstance(value, int | float) for value in found.values())


def test_a_transport_that_does_not_count_gives_no_bytes() -> None:
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with thinwire.DistributedOptimizer(model, inner, method="streaming-diloco") as optimizer:
        assert "sent_bytes" not in thinwire.metrics(optimizer)
