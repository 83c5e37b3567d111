"""Real processes, one of which is slow: the others do not wait for it, and its work is counted all the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values

import thinwire
from tests.reference.small_models import build, loss_of
from thinwire.averaging.quorum import PART_HEADER_BYTES
from thinwire.methods import decoupled_diloco

pytestmark = pytest.mark.multiprocess
# the sources of this checkout, whichever one is installed
ROOT = f"{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'src'}"


def train_beside_a_slow_one(until: int, fast_s: float, slow_s: float, sleeps: list[list[float]]) -> dict[str, Any]:
    """Train to a step; replica 2 takes `slow_s` a step, and once in a while another number of seconds."""
    transport = thinwire.connect(deadline_s=600)
    torch.set_num_threads(1)
    model = build("transformer")
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    method = decoupled_diloco(sync_interval=12, overlap_steps=4, grace_steps=3, num_fragments=3)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    optimizer.next_stop = until
    is_slow, extra = transport.replica == 2, {int(step): seconds for step, seconds in sleeps}
    stalls, own, begun_s = [], 0, time.monotonic()
    while optimizer.steps_done < until:
        own += 1
        time.sleep(extra.pop(own, slow_s) if is_slow else fast_s)
        loss_of(model, step=own, replica=transport.replica).backward()
        before_s = optimizer.statistics.stalled_s
        optimizer.step()
        optimizer.zero_grad()
        stalls.append(optimizer.statistics.stalled_s - before_s)
    trained_s = time.monotonic() - begun_s
    optimizer.close(final_exchange=True)
    statistics = optimizer.statistics
    small = [
        t for t in transport.log if t.direction == "sent" and t.kind == "round" and t.payload_bytes == PART_HEADER_BYTES
    ]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith(("thinwire-", "round-"))]
    errors = [t.error for t in transport.log if t.error]
    with optimizer.global_parameters():
        digest = float(sum(p.double().sum() for p in model.parameters()))
    transport.close()
    return {
        "stall_s": max(stalls), "own": own, "missed": statistics.rounds_missed, "applied": statistics.rounds_applied,
        "passed": statistics.steps_passed, "digest": digest, "asked": len(small), "trained_s": trained_s,
        "threads": threads, "errors": errors,
    }  # fmt: skip


def train_all(**arguments: Any) -> list[dict[str, Any]]:
    environment = {"PYTHONPATH": ROOT}
    found = values(run(train_beside_a_slow_one, num_ranks=3, arguments=arguments, environment=environment))
    assert len({one["digest"] for one in found}) == 1
    for one in found:
        assert one["own"] + one["passed"] == arguments["until"]
        assert not one["errors"] and not one["threads"], "nothing is left on the wire"
        assert one["asked"] <= one["missed"] < one["applied"]
    return found


def test_replicas_do_not_wait_for_a_slow_one_whose_parts_count_all_the_same() -> None:
    slow_s, until = 0.35, 132
    found = train_all(until=until, fast_s=0.08, slow_s=slow_s, sleeps=[])
    for fast in found[:2]:
        # a replica that waited for the slow one would take as long as that one for all the steps
        assert fast["trained_s"] < until * slow_s
        assert fast["own"] > until / 2
    slow = found[2]
    assert slow["own"] < until * 3 / 4, "it does some of the steps"
    assert slow["applied"] - slow["missed"] - 3 >= 3, "it is in some of the means before the final ones"


def test_a_replica_that_sleeps_once_is_in_time_again() -> None:
    # longer than two intervals of the others, shorter than the four that they let it fall behind
    slept_s = 2.0
    found = train_all(until=96, fast_s=0.06, slow_s=0.06, sleeps=[[10, slept_s]])
    assert all(fast["stall_s"] < slept_s for fast in found[:2])
    sleeper = found[2]
    assert sleeper["passed"] >= 10 and sleeper["missed"] >= 2
    assert sleeper["applied"] - sleeper["missed"] - 3 >= 4, "it is in some of the means before the final ones"
