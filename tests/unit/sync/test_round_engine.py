"""The engine's seams: observers see every round, and a catch-up policy decides which steps are exchanged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import thinwire
from thinwire.averaging.round_context import Average
from thinwire.events import RoundMark
from thinwire.sync.catch_up import QuorumCatchUp
from thinwire.sync.schedule import Round
from thinwire.transport.base import Transport

INTERVAL = 2


class Log:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, bool]] = []
        self.applied: list[int] = []

    def on_mark(self, mark: RoundMark) -> None:
        self.marks.append((mark.round_id, mark.is_done))

    def on_applied(self, round: Round, average: Average) -> None:
        self.applied.append(round.id)


class EveryOther(QuorumCatchUp):
    """A policy that holds the replica back at odd steps, and passes over the next one at even steps."""

    def steps(self, step: int, *, stop: int | None) -> Iterator[int]:
        if step % 2 == 0:
            yield step
            yield step + 1


def build(transport: Transport | None = None, catch_up: QuorumCatchUp | None = None) -> thinwire.DistributedOptimizer:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return thinwire.DistributedOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), method=thinwire.methods.diloco(sync_interval=INTERVAL),
        transport=transport, catch_up=catch_up,
    )  # fmt: skip


def test_every_observer_sees_each_round_launched_arrived_and_applied_in_order() -> None:
    def replica(transport: Transport) -> list[Log]:
        optimizer, logs = build(transport), [Log(), Log()]
        optimizer.engine.observers.extend(logs)
        for _ in range(3 * INTERVAL):
            optimizer.step()
        optimizer.engine.observers.remove(logs[1])
        for _ in range(INTERVAL):
            optimizer.step()
        optimizer.close()
        return logs

    for first, second in thinwire.run_replicas(2, replica):
        assert first.applied == [0, 1, 2, 3] and second.applied == [0, 1, 2]
        assert first.marks == [(number, is_done) for number in range(4) for is_done in (False, True)]
        assert second.marks == first.marks[:6]


def test_a_policy_holds_a_replica_back_and_lets_it_pass_over_steps() -> None:
    optimizer = build(catch_up=EveryOther())
    optimizer.step()
    assert (optimizer.steps_done, optimizer.statistics.rounds_launched) == (0, 0), "step 1 is held back"
    optimizer.begin_at(1)
    optimizer.step()
    assert optimizer.steps_done == 3 and optimizer.statistics.steps_passed == 1
    assert optimizer.statistics.rounds_applied == 1
    assert optimizer.engine.state.reached_step == 3
