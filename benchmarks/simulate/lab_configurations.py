"""What `lab_check.py` runs and simulates: every method, 2 to 4 hosts, 1 to 100 Mbit/s, hosts and wires alike or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is run and simulated.

    Attributes:
        method: Its name.
        rates: Each host's access, as the lab reads it: `"10mbit"`, or down and up, `"50mbit/10mbit"`.
        sleep_s: Seconds that a step sleeps, on each host or on all.
        steps: Inner steps.
        warm_steps: The first of them, which are not looked at.
        arguments: Of the method.
        latency_s: Between any two hosts, one way.
        links: Pairs that have a wire of their own, both ways: two hosts, its rate, its latency.
        width: Of the model.
        inner: The inner optimizer.
        calm_steps: Inner steps on wires without a limit.
    """

    method: str
    rates: tuple[str, ...]
    sleep_s: float | tuple[float, ...]
    steps: int
    warm_steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    latency_s: float = 0.0
    links: tuple[tuple[int, int, str, float], ...] = ()
    width: int = 256
    inner: str = "sgd"
    calm_steps: int = 0

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.rates)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, as a stored line holds it: one of another configuration is none of this name."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def settings(self, *, steps: int) -> dict[str, Any]:
        """Return what a worker is told."""
        sleep_s = [self.sleep_s] * self.num_hosts if isinstance(self.sleep_s, float) else list(self.sleep_s)
        return {
            "method": self.method, "arguments": dict(self.arguments), "inner": self.inner, "width": self.width,
            "sleep_s": sleep_s, "steps": steps,
        }  # fmt: skip


def configurations() -> dict[str, Configuration]:
    """Return all, by name: every method, 2 to 4 hosts, 1 to 100 Mbit/s, wires and hosts alike and not."""
    every_step = {"sleep_s": 0.05, "steps": 60, "warm_steps": 5, "calm_steps": 40}
    # codes take the cores' time, and hosts that share them must not wait for each other
    longer = {"sleep_s": 0.15, "steps": 45, "warm_steps": 5, "calm_steps": 35}
    alone = {"sleep_s": 0.05, "steps": 80, "warm_steps": 20, "calm_steps": 60}
    tens = {"sync_interval": 10}
    return {
        # everything, at every step
        "all-reduce, 2 at 100": Configuration(method="all-reduce", rates=("100mbit",) * 2, **every_step),
        "all-reduce, 3 up slower than down": Configuration(
            method="all-reduce", rates=("100mbit/40mbit",) * 3, **every_step, arguments={"codec": "bfloat16"}
        ),
        "robust, 4 at 50": Configuration(method="robust", rates=("50mbit",) * 4, **every_step, width=128),
        # the whole model, now and then
        "local-sgd, 2 at 20": Configuration(method="local-sgd", rates=("20mbit",) * 2, **alone, arguments=tens),
        "diloco, 2 at 10": Configuration(method="diloco", rates=("10mbit",) * 2, **alone, arguments=tens),
        "diloco, 3 at 50, 20 ms": Configuration(
            method="diloco", rates=("50mbit",) * 3, **alone, arguments=tens, latency_s=0.02
        ),
        "diloco, 4 at 5 to 40": Configuration(
            method="diloco", rates=("40mbit", "20mbit", "10mbit/5mbit", "40mbit"), sleep_s=0.1, steps=160,
            warm_steps=40, calm_steps=100, arguments={"sync_interval": 20}, width=128,
        ),
        "slowmo, 3 up slower than down": Configuration(
            method="slowmo", rates=("50mbit/10mbit",) * 3, **alone, arguments=tens, width=192
        ),
        "muloco, 3 at 5": Configuration(method="muloco", rates=("5mbit",) * 3, **alone, arguments=tens),
        "sparse-loco, 2 at 1": Configuration(
            method="sparse-loco", rates=("1mbit",) * 2, **alone, arguments=tens, width=384
        ),
        "noloco, 4 at 10 to 20": Configuration(
            method="noloco", rates=("20mbit", "10mbit", "20mbit", "15mbit"), sleep_s=0.05, steps=90, warm_steps=20,
            calm_steps=60, arguments=tens,
        ),
        "dimat, 4 in a ring at 20": Configuration(method="dimat", rates=("20mbit",) * 4, **alone, arguments=tens),
        # on the wire for an interval
        "eager, 2 at 5": Configuration(
            method="eager", rates=("5mbit",) * 2, sleep_s=0.05, steps=100, warm_steps=20, calm_steps=60,
            arguments=tens | {"codec": "bfloat16"},
        ),
        "co2, 3 at 10 and 5": Configuration(
            method="co2", rates=("10mbit", "5mbit", "10mbit"), sleep_s=0.05, steps=100, warm_steps=20, calm_steps=60,
            arguments=tens, width=128,
        ),
        # in fragments, while steps go on
        "streaming-diloco, 2 at 1": Configuration(
            method="streaming-diloco", rates=("1mbit",) * 2, sleep_s=0.1, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2},
        ),
        "streaming-diloco, 2 at 2, no overlap": Configuration(
            method="streaming-diloco", rates=("2mbit",) * 2, **alone,
            arguments={"sync_interval": 10, "overlap_steps": 0, "layers_per_fragment": 1},
        ),
        "streaming-diloco, 3, one slower": Configuration(
            method="streaming-diloco", rates=("10mbit", "4mbit", "10mbit/4mbit"), sleep_s=(0.06, 0.06, 0.09), steps=100,
            warm_steps=20, calm_steps=60, arguments={"sync_interval": 10, "overlap_steps": 1, "layers_per_fragment": 2},
        ),
        "streaming-diloco, 4 at 5": Configuration(
            method="streaming-diloco", rates=("5mbit",) * 4, sleep_s=0.08, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 5},
        ),
        "streaming-diloco, 4 in two phases, 10 ms": Configuration(
            method="streaming-diloco", rates=("10mbit",) * 4, sleep_s=0.06, steps=120, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 1, "exchange": "two-phase", "codec": "block-int8"},
            latency_s=0.01,
        ),
        "streaming-diloco, 4 at two sites": Configuration(
            method="streaming-diloco", rates=("50mbit",) * 4, sleep_s=0.06, steps=120, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2, "layers_per_fragment": 2},
            links=tuple((one, other, "3mbit", 0.015) for one in (0, 1) for other in (2, 3)),
        ),
        "streaming-diloco, 2 at 100, bfloat16": Configuration(
            method="streaming-diloco", rates=("100mbit",) * 2, **alone, width=512,
            arguments={"sync_interval": 5, "overlap_steps": 1, "codec": "bfloat16"},
        ),
        "iso-loco, 2 at 2": Configuration(
            method="iso-loco", rates=("2mbit",) * 2, sleep_s=0.1, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2},
        ),
        "streaming-sparse-loco, 2 at 2": Configuration(
            method="streaming-sparse-loco", rates=("2mbit",) * 2, sleep_s=0.1, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2},
        ),
        "decoupled-diloco, 3 at 3": Configuration(
            method="decoupled-diloco", rates=("3mbit",) * 3, sleep_s=0.06, steps=120, warm_steps=24, calm_steps=72,
            arguments={"sync_interval": 12, "overlap_steps": 2},
        ),
        "decoupled-diloco, 4 at 5, one slower": Configuration(
            method="decoupled-diloco", rates=("20mbit", "5mbit", "5mbit", "5mbit"), sleep_s=(0.06, 0.06, 0.06, 0.08),
            steps=120, warm_steps=24, calm_steps=72, arguments={"sync_interval": 12, "overlap_steps": 3},
        ),
        # compressed gradients, at every step
        "power-sgd, 2 at 2": Configuration(method="power-sgd", rates=("2mbit",) * 2, **longer),
        "dgc, 4 at 2": Configuration(method="dgc", rates=("2mbit",) * 4, **longer, arguments={"density": 0.01}),
        "demo, 2 at 2, 20 ms": Configuration(method="demo", rates=("2mbit",) * 2, **longer, latency_s=0.02),
        "ef21, 3 at 2 to 10": Configuration(
            method="ef21", rates=("10mbit", "10mbit/2mbit", "5mbit"), **longer, width=384
        ),
        "one-bit-adam, 2 at 2": Configuration(
            method="one-bit-adam", rates=("2mbit",) * 2, **longer, arguments={"warmup_steps": 4}, inner="adamw"
        ),
        "one-bit-lamb, 3 at 3": Configuration(
            method="one-bit-lamb", rates=("3mbit",) * 3, sleep_s=0.15, steps=45, warm_steps=11, calm_steps=40,
            arguments={"warmup_steps": 10}, inner="adamw", width=192,
        ),
        "zero-one-adam, 2 at 5": Configuration(
            method="zero-one-adam", rates=("5mbit",) * 2, sleep_s=0.08, steps=84, warm_steps=20, calm_steps=84,
            arguments={"variance_steps": 20, "variance_updates": 2, "local_doubling_steps": 16, "max_local_steps": 4},
            inner="adamw",
        ),
        "masha1, 2 at 5": Configuration(
            method="masha1", rates=("5mbit",) * 2, sleep_s=0.1, steps=80, warm_steps=5, calm_steps=40, width=128,
        ),
        "masha2, 3 at 20, one slower": Configuration(
            method="masha2", rates=("20mbit",) * 3, sleep_s=(0.08, 0.08, 0.12), steps=60, warm_steps=5, calm_steps=40,
            width=128,
        ),
    }  # fmt: skip
