"""A killed replica is noticed at once, also while a worker that it forked lives on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Processes, announce

import thinwire
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess
_LONG_S = 60.0


def train(end: str, secret: str | None) -> str:
    """Train until replica 1 kills itself; its worker waits for the file `end`, as another does for a slow disk."""
    transport = thinwire.connect(deadline_s=600, secret=None if secret is None else Path(secret))
    model = torch.nn.Linear(4, 1)
    optimizer = thinwire.DistributedOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), transport=transport, minimum_deadline_s=600,
        method=thinwire.methods.diloco(sync_interval=2),
    )  # fmt: skip
    for step in range(8):
        if step == 3 and os.fork() == 0:
            until_s = time.monotonic() + _LONG_S
            while not Path(end).exists() and time.monotonic() < until_s:
                time.sleep(0.02)
            os._exit(0)
        if step == 5 and transport.replica == 1:
            announce("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(8, 4)).square().mean().backward()
        try:
            optimizer.step()
        except thinwire.ThinwireError as error:
            return f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    return "no error"


@pytest.mark.parametrize("has_secret", [False, True])
def test_a_killed_replica_is_noticed_while_a_worker_that_it_forked_lives_on(tmp_path, has_secret):
    end, secret = tmp_path / "end", tmp_path / "job.secret"
    make_secret(secret)
    arguments = {"end": str(end), "secret": str(secret) if has_secret else None}
    try:
        with Processes(train, num_ranks=2, arguments=arguments) as processes:
            (outcome,) = processes.join(ranks=[0], deadline_s=_LONG_S)
            assert not end.exists()
    finally:
        end.touch()
    assert outcome.value.startswith("PeerLost: replica 1"), outcome
    assert "silent" not in outcome.value  # its end was seen, and not only its silence
