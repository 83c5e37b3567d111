"""How long replicas wait for an outer exchange on links of random latency: NoLoCo's pairs against all-reduces.

`python benchmarks/methods/latency.py` drives thinwire's own exchanges, message by message, on a virtual clock: a
message that leaves at t arrives at t plus a latency drawn for it, and a replica goes on when all it waits for has
arrived. Rates are without limit, so only latencies count. A tree and a ring, which thinwire does not have, are computed
with draws from the same distribution. Latencies are log-normal, as in arXiv 2506.10911.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.averaging.exchange import cheapest
from thinwire.averaging.mixing import RandomPairs
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import AllReplicas, Topology
from thinwire.codecs import float32
from thinwire.transport.base import Envelope, Received

RESULTS = Path(__file__).parents[1] / "results" / "latency.json"
NUMEL = 1024
Draw = Callable[[], float]


class Wire:
    """All messages of one round, with the time at which each arrives."""

    def __init__(self, draw: Draw, *, num_replicas: int) -> None:
        self.draw = draw
        self.clocks_s = [0.0] * num_replicas
        self.mail: dict[tuple[int, int, int], tuple[float, Received]] = {}
        self.num_messages = 0


class End:
    """One replica's end of a `Wire`."""

    runs_in_background = False

    def __init__(self, wire: Wire, replica: int) -> None:
        self.wire, self.replica, self.num_replicas = wire, replica, len(wire.clocks_s)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> None:
        arrives_s = self.wire.clocks_s[self.replica] + self.wire.draw()
        received = Received(payload=payload.clone())
        self.wire.mail[self.replica, to, envelope.address.phase] = (arrives_s, received)
        self.wire.num_messages += 1

    def receive(self, *, source: int, envelope: Envelope) -> tuple[int, int, int]:
        return (source, self.replica, envelope.address.phase)

    def close(self) -> None:
        """Nothing is held."""


def synchronise(topology: Topology, draw: Draw, *, num_replicas: int, round_id: int) -> tuple[list[float], int]:
    """Run one exchange of all replicas; return when each had its mean, and how many messages there were."""
    wire = Wire(draw, num_replicas=num_replicas)
    everyone = range(num_replicas)
    waiting: dict[int, tuple[Any, Any]] = {}
    for replica in everyone:
        peers = topology.peers(round_id=round_id, me=replica, alive=everyone)
        exchange = cheapest(float32(), num_replicas=len(peers.members))
        bound = exchange.bind([[torch.Size([NUMEL])]], replica=replica, num_replicas=num_replicas)
        end: Any = End(wire, replica)
        steps = bound.steps(
            torch.full((NUMEL,), float(replica)), RoundContext(peers=peers, transport=end, round_id=round_id)
        )
        waiting[replica] = (steps, next(steps, None))
    while waiting:
        ready = [r for r, (_, wait) in waiting.items() if wait is None or all(k in wire.mail for k in wait.receives)]
        assert ready, "every replica waits for a message that nobody sends"
        for replica in ready:
            steps, wait = waiting.pop(replica)
            if wait is None:
                continue
            arrived = [wire.mail.pop(key) for key in wait.receives]
            wire.clocks_s[replica] = max([wire.clocks_s[replica], *(time_s for time_s, _ in arrived)])
            try:
                waiting[replica] = (steps, steps.send([message for _, message in arrived]))
            except StopIteration as done:
                members = topology.peers(round_id=round_id, me=replica, alive=everyone).members
                assert torch.allclose(done.value.mean, torch.full((NUMEL,), statistics.fmean(members)))
    return wire.clocks_s, wire.num_messages


def tree_s(draw: Draw, *, num_replicas: int) -> float:
    """Return the time of a binary tree: means go up, and the result comes down to the last leaf."""
    up = [0.0] * num_replicas
    for node in reversed(range(num_replicas)):
        children = [child for child in (2 * node + 1, 2 * node + 2) if child < num_replicas]
        up[node] = max((up[child] + draw() for child in children), default=0.0)
    down = [up[0]] * num_replicas
    for node in range(1, num_replicas):
        down[node] = down[(node - 1) // 2] + draw()
    return max(down)


def ring_s(draw: Draw, *, num_replicas: int) -> float:
    """Return the time of a ring's 2 (M - 1) steps, where each replica waits for its neighbour's last message."""
    times = [0.0] * num_replicas
    for _ in range(2 * (num_replicas - 1)):
        times = [max(times[r], times[r - 1] + draw()) for r in range(num_replicas)]
    return max(times)


def measure(num_replicas: int, *, median_s: float, sigma: float, rounds: int, direct_up_to: int) -> dict[str, Any]:
    """Return seconds a synchronisation, medians over rounds."""
    generator = np.random.default_rng([num_replicas, rounds])

    def draw() -> float:
        return float(median_s * math.exp(sigma * generator.standard_normal()))

    found: dict[str, list[float]] = {"pairs_mean_s": [], "pairs_last_s": [], "tree_s": [], "ring_s": []}
    for number in range(rounds):
        clocks_s, _ = synchronise(RandomPairs(seed=1), draw, num_replicas=num_replicas, round_id=number)
        found["pairs_mean_s"].append(statistics.fmean(clocks_s))
        found["pairs_last_s"].append(max(clocks_s))
        found["tree_s"].append(tree_s(draw, num_replicas=num_replicas))
        found["ring_s"].append(ring_s(draw, num_replicas=num_replicas))
        if num_replicas <= direct_up_to and number < 3:
            clocks_s, _ = synchronise(AllReplicas(), draw, num_replicas=num_replicas, round_id=number)
            found.setdefault("two_phase_s", []).append(max(clocks_s))
    row: dict[str, Any] = {name: round(statistics.median(values), 4) for name, values in found.items()}
    return {"replicas": num_replicas, **row, "tree_over_pairs": round(row["tree_s"] / row["pairs_mean_s"], 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median-ms", type=float, default=50.0, help="median one-way latency")
    parser.add_argument("--sigma", type=float, default=0.5, help="standard deviation of the latency's logarithm")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--direct-up-to", type=int, default=256, help="replicas up to which two-phase runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = []
    for power in range(3, 11):
        rows.append(
            measure(
                2**power, median_s=options.median_ms / 1000, sigma=options.sigma, rounds=options.rounds,
                direct_up_to=options.direct_up_to,
            )
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    about = {"median_ms": options.median_ms, "sigma": options.sigma, "rounds": options.rounds}
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
