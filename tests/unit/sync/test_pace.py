from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.adaptive_timeout import Deadlines
from thinwire.transport.base import Envelope, Pending
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.streams import ROUNDS


class Noting:
    """A transport that notes over how many seconds each round's message may be spread."""

    def __init__(self, inner: LoopbackTransport) -> None:
        self.inner = inner
        self.spreads_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        if envelope.stream is ROUNDS:
            self.spreads_s.append(envelope.spread_s)
        return self.inner.send(payload, to=to, envelope=envelope)


def spreads(monkeypatch: pytest.MonkeyPatch, *, pace: bool, overlap_steps: int, step_s: float = 0.2) -> list[float]:
    """Train some steps, which are said to take `step_s` each."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def replica(transport: LoopbackTransport) -> list[float]:
        noting, model = Noting(transport), copy.deepcopy(whole)
        method = thinwire.methods.streaming_diloco(
            sync_interval=4,
            overlap_steps=overlap_steps,
            layers_per_fragment=1,
            codec=thinwire.codecs.by_name("float32"),
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=noting, pace=pace)
        monkeypatch.setattr(optimizer._deadlines, "median_step_s", lambda: step_s)
        for _ in range(12):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)
        return noting.spreads_s

    return thinwire.run_replicas(2, replica)[0]


def test_a_paced_round_is_spread_over_three_quarters_of_its_overlap_at_the_median_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = spreads(monkeypatch, pace=True, overlap_steps=2)
    paced = [spread_s for spread_s in found if spread_s > 0]
    assert len(paced) >= 2 and paced == pytest.approx([0.75 * 2 * 0.2] * len(paced))
    assert found[-2:] == [0.0, 0.0], "the last exchange has no steps to be spread over"


@pytest.mark.parametrize(("pace", "overlap_steps"), [(False, 2), (True, 0)])
def test_nothing_is_spread_without_pace_or_without_overlap(
    pace: bool, overlap_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(spreads(monkeypatch, pace=pace, overlap_steps=overlap_steps)) == {0.0}


def test_the_median_of_the_steps_is_0_before_the_first_and_ignores_one_pause() -> None:
    deadlines = Deadlines()
    assert deadlines.median_step_s() == 0
    for seconds in (0.2, 0.2, 30.0):
        deadlines.observe_step(seconds)
    assert deadlines.median_step_s() == 0.2


def test_a_spread_does_not_travel_and_is_not_compared() -> None:
    assert Envelope(stream=ROUNDS, key=(1,), spread_s=3.0) == Envelope(stream=ROUNDS, key=(1,))
