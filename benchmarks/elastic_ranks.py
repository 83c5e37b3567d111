"""What it costs to hold an elastic replica on several ranks: a step, and bringing the model to one rank and back.

    python benchmarks/elastic_ranks.py --model 35m --ranks 1 2

For each number of ranks, processes of this machine hold one replica (FSDP2 over gloo, one thread each) and train on the
same batches. Printed as one JSON object a number: the median seconds of a step, of a gather and of a scatter of all
parameters, and each rank's peak resident memory in bytes, the leading one first, with the global parameters and a
momentum whole in the leading one as an elastic run has them. With one rank everything goes the same way, through a
group of one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, MOVES, ROWS, SEQ_LEN, VOCAB = 5, 3, 4, 64, 2048


def seconds(what: Callable[[], Any], *, times: int) -> float:
    """Return the median time of some calls."""
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began_s)
    return round(statistics.median(taken), 4)


def peak_bytes() -> int:
    """Return this process's peak resident memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def lead(rank0: Any, config: Any) -> dict[str, float]:
    """Train and move the model as the leading rank."""
    import torch

    from thinwire.elastic.elastic_method import ShardedReplicaPseudoGradient

    model, inner = rank0.assemble(config, vocab_size=VOCAB)
    parameters = ShardedReplicaPseudoGradient(pieces=rank0).cut(model)
    momenta = [torch.zeros_like(value).add_(1) for value in parameters.values]
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1))

    def step() -> None:
        rank0.backward(tokens[:, :-1], tokens[:, 1:], factor=1.0)
        rank0.clip()
        inner.step()
        inner.zero_grad(set_to_none=True)

    step()  # FSDP2 makes its buffers in the first
    fragments = range(parameters.num_fragments)
    return {
        "parameters": sum(momentum.numel() for momentum in momenta),
        "step_s": seconds(step, times=STEPS),
        "gather_s": seconds(lambda: [parameters.read(fragment).sum() for fragment in fragments], times=MOVES),
        "scatter_s": seconds(lambda: [parameters.blend_into_locals(f, blend=0.0) for f in fragments], times=MOVES),
    }


def live(rank: int, num_ranks: int, folder: str, model: str, results: Any) -> None:
    """Be one rank of the replica."""
    import torch

    from thinwire.training.config import TrainConfig, resolve
    from thinwire.training.elastic.replica_ranks import Rank0Driver, follow
    from thinwire.transport.replica_group import ReplicaGroup

    torch.set_num_threads(1)
    given = TrainConfig.of(elastic=True, model=model, batch_size=ROWS, seq_len=SEQ_LEN, out=Path(folder))
    config = resolve(given, world_size=None, cores=1, home=Path(folder))
    group = ReplicaGroup(rank=rank, size=num_ranks, meeting=Path(folder) / "meeting")
    found: dict[str, float] = {}
    if group.leads:
        rank0 = Rank0Driver(group)
        found = lead(rank0, config)
        rank0.dismiss()
    else:
        follow(group)
    results.put((rank, found, peak_bytes()))


def main() -> None:
    """Measure each number of ranks and print a JSON object for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="35m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    spawning = multiprocessing.get_context("spawn")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results: Any = spawning.Queue()
            ranks = [
                spawning.Process(target=live, args=(rank, num_ranks, folder, options.model, results))
                for rank in range(num_ranks)
            ]
            for one in ranks:
                one.start()
            told = sorted((results.get(timeout=300) for _ in ranks), key=lambda one: one[0])
            for one in ranks:
                one.join(60)
        print(json.dumps({"ranks": num_ranks, **told[0][1], "peak_bytes": [one[2] for one in told]}), flush=True)


if __name__ == "__main__":
    main()
