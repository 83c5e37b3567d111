"""What a replica writes of each round that it has applied."""

import json
from pathlib import Path

import torch
from torch import nn

import thinwire
from thinwire.training.elastic.replica import RoundLog
from thinwire.transport.loopback import run_replicas


def test_each_round_is_written_with_what_the_replica_holds_then(tmp_path: Path) -> None:
    def train(transport: thinwire.transport.base.Transport) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method=thinwire.methods.diloco(sync_interval=2),
            transport=transport,
        )  # fmt: skip
        log = RoundLog(tmp_path, replica=transport.replica, engine=optimizer.engine)
        for step in range(6):
            inputs = torch.full((1, 3), float(step + transport.replica))
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        log.close()
        optimizer.close()

    run_replicas(2, train)
    found = [
        [json.loads(line) for line in (tmp_path / f"rounds-replica-{replica}.jsonl").read_text().splitlines()]
        for replica in range(2)
    ]
    assert [line["round"] for line in found[0]] == [0, 1, 2]
    assert [line["launch_step"] for line in found[0]] == [2, 4, 6]
    assert all(line["is_counted"] for line in found[0])
    assert [line["crc"] for line in found[0]] == [line["crc"] for line in found[1]]
    assert len({line["crc"] for line in found[0]}) == 3
