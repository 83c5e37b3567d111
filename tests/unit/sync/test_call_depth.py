"""The number of Python frames between a call of `step()` and a message on its way."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.sync.method import Method
from thinwire.transport.base import Envelope, Pending, Transport
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

# From `step` to the innermost transport's `send`, both counted; torch's own wrapper around `step` is not ours.
MOST_FRAMES = 8


class Depths:
    """A transport that notes how deep below `step` its sends of rounds are called."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.found: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        if envelope.stream is ROUNDS and envelope.address.phase == 0:  # later phases are sent while waiting
            frame: FrameType | None = sys._getframe()
            names: list[str] = []
            while frame is not None and (not names or names[-1] != "step"):
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            self.found.append(names)
        return self.inner.send(payload, to=to, envelope=envelope)


@pytest.mark.parametrize(
    "method",
    [
        thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1, num_fragments=2),  # e3m0
        thinwire.methods.diloco(sync_interval=2),
        thinwire.methods.all_reduce(),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_a_step_reaches_the_wire_within_eight_frames(method: Method, num_replicas: int) -> None:
    def replica(transport: Transport) -> list[list[str]]:
        depths = Depths(transport)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, transport=RecordingTransport(depths)
        )
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = list(depths.found)
        optimizer.close()
        return found

    for found in thinwire.run_replicas(num_replicas, replica):
        below_step = [names for names in found if names[-1] == "step"]
        assert below_step
        assert all(len(names) <= MOST_FRAMES for names in below_step), below_step[0]
