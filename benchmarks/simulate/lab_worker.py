"""One host's part in `lab_check.py`: the real optimizer on real wires, with steps that sleep instead of computing.

    python lab_worker.py SETTINGS      # a JSON object; the last line that it writes is one too

A sleep takes the same time whatever else runs, so two cores serve four hosts. Gradients are made once; what is sent
does not depend on their values, but for the codes whose payload is as long as what they choose.

| field of SETTINGS | meaning |
| --- | --- |
| `method`, `arguments` | its name, and its arguments, codecs by name |
| `inner` | `adamw` for methods that look into it, `sgd` for the others |
| `width` | of the model |
| `sleep_s` | seconds that a step sleeps, one number a host |
| `steps` | inner steps |
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.codecs import by_name
from thinwire.methods import recipe
from thinwire.transport.base import all_gather_json

DEADLINE_S = 120.0
# Arguments that are codecs, by their names.
CODECS = ("codec", "server_codec")


class Block(nn.Module):
    """What fragments are made of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Model(nn.Module):
    """Six blocks, and a rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 64)


def method_of(name: str, arguments: Mapping[str, Any]) -> thinwire.Method:
    """Return a method; codecs are given by name."""
    return recipe(name)(**{key: by_name(value) if key in CODECS else value for key, value in arguments.items()})


def inner_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer: no time is spent on one that a method does not look into."""
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def whole_intervals(num_steps: int, *, interval: int, warm_steps: int) -> tuple[int, int]:
    """Return the steps after which the measured part begins and ends: whole intervals, behind the warm-up.

    Example:
        >>> whole_intervals(64, interval=10, warm_steps=15)
        (20, 60)
    """
    first = -(-warm_steps // interval) * interval
    last = first + (num_steps - first) // interval * interval
    if last <= first:
        raise ValueError(f"{num_steps} steps hold no whole interval of {interval} behind the first {warm_steps}")
    return first, last


def summary(
    ends_s: Sequence[float], stalls_s: Sequence[float], *, first: int, last: int, interval: int
) -> dict[str, float]:
    """Return seconds a step of a replica, over whole intervals.

    Args:
        ends_s: When each step was done, from the start of the first one.
        stalls_s: What each step waited for the wire.
        first: The step after which the measured part begins.
        last: The step after which it ends.
        interval: Steps of a method's interval.

    Returns:
        `step_s` and `stall_s`, means; and medians of the intervals, which a short disturbance does not move: of the
        first, and of what was no wait, `compute_s`.
    """
    at = [0.0, *ends_s]
    cuts = range(first, last, interval)
    waited = [sum(stalls_s[cut : cut + interval]) for cut in cuts]
    computed = [at[cut + interval] - at[cut] - wait_s for cut, wait_s in zip(cuts, waited, strict=True)]
    return {
        "step_s": (at[last] - at[first]) / (last - first),
        "median_step_s": statistics.median(at[cut + interval] - at[cut] for cut in cuts) / interval,
        "stall_s": sum(stalls_s[first:last]) / (last - first),
        "compute_s": statistics.median(computed) / interval,
    }


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the steps and return the times of this host."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transport = thinwire.connect(deadline_s=DEADLINE_S)
    model = Model(settings["width"])
    optimizer = thinwire.DistributedOptimizer(
        model, inner_of(settings["inner"], model), method=method_of(settings["method"], settings["arguments"]),
        transport=transport, minimum_deadline_s=DEADLINE_S,
    )  # fmt: skip
    all_gather_json({}, transport=transport, number=0, deadline_s=DEADLINE_S)
    sent_before = transport.log.totals("sent").wire_bytes
    ends_s, stalls_s = step_times(optimizer, model, steps=settings["steps"], sleep_s=settings["sleep_s"])
    sent = transport.log.totals("sent").wire_bytes - sent_before
    optimizer.close()
    all_gather_json({}, transport=transport, number=1, deadline_s=DEADLINE_S)
    transport.close()
    return {
        "ends_s": ends_s, "stalls_s": stalls_s, "sent_bytes": sent, "num_fragments": optimizer.num_fragments,
        "steps_passed": optimizer.statistics.steps_passed,
    }  # fmt: skip


def step_times(
    optimizer: thinwire.DistributedOptimizer, model: nn.Module, *, steps: int, sleep_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Do the steps; return when each was done, and what each waited for the wire."""
    own_sleep_s = sleep_s[optimizer.transport.replica]
    draw = torch.Generator().manual_seed(1 + optimizer.transport.replica)
    gradients = [torch.randn(parameter.shape, generator=draw) for parameter in model.parameters()]

    def closure() -> torch.Tensor:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        return torch.zeros(())

    is_driven = optimizer.needs_closure
    ends_s: list[float] = []
    stalls_s: list[float] = []
    began_s, before_s = time.perf_counter(), 0.0
    while optimizer.steps_done < steps:
        time.sleep(own_sleep_s)
        if is_driven:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        # one that has caught up with others has passed over steps, which took it no time
        num_done = optimizer.steps_done - len(ends_s)
        stalls_s += [optimizer.statistics.stalled_s - before_s, *[0.0] * (num_done - 1)]
        ends_s += [time.perf_counter() - began_s] * num_done
        before_s = optimizer.statistics.stalled_s
    return ends_s, stalls_s


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
