"""EF21 and MASHA over real processes and sockets: the same bits as in one process, and absent replicas send nothing."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values

import thinwire
from tests.reference.convex_problems import LeastSquares, Saddle
from thinwire.codecs import float32, random_k, top_k
from thinwire.methods import ef21, masha1, masha2
from thinwire.sync.method import Method

pytestmark = pytest.mark.multiprocess
# the tests' own folder, and whatever the caller has already: a source tree other than the installed one, say
PATHS = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
STEPS = 12
TOP, RANDOM = top_k(density=0.3), random_k(density=0.3, scale=True)


def method_of(name: str) -> Method:
    return {
        "ef21": lambda: ef21(codec=TOP),
        "ef21 whole": lambda: ef21(codec=float32()),
        "masha whole": lambda: masha2(codec=float32(), refresh_probability=0.4),
        "masha2 all": lambda: masha2(codec=TOP, refresh_probability=0.4),
        "ef21 in part": lambda: ef21(codec=TOP, participation=0.5, momentum=0.5, seed=1),
        "masha1": lambda: masha1(codec=RANDOM, ascent=("high",), refresh_probability=0.3),
        "masha2": lambda: masha2(codec=TOP, server_codec=TOP, ascent=("high",), refresh_probability=0.3),
    }[name]()


def train(transport: Any, *, name: str) -> str:
    torch.set_num_threads(1)
    replicas = transport.num_replicas
    problem = Saddle.random(replicas=replicas) if "masha" in name else LeastSquares.random(replicas=replicas)
    model = problem.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(name), transport=transport)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = problem.loss_of(model, transport.replica)
        loss.backward()
        return loss

    for _ in range(STEPS):
        if "masha" in name:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    optimizer.close(final_exchange=True)
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def train_in_a_process(names: list[str]) -> list[dict[str, Any]]:
    transport = thinwire.connect(deadline_s=600)
    results = []
    for name in names:
        before = len(list(transport.log))
        digest = train(transport, name=name)
        sent = [t for t in list(transport.log)[before:] if t.direction == "sent" and t.kind == "round"]
        results.append({"digest": digest, "messages": len(sent)})
    transport.close()
    return results


NAMES = ["ef21", "ef21 in part", "masha1", "masha2"]


@pytest.mark.parametrize("replicas", [3])
def test_real_processes_compute_the_same_bits_as_the_loopback_world_and_absent_ones_send_nothing(replicas):
    by_rank = values(
        run(
            train_in_a_process, num_ranks=replicas, arguments={"names": NAMES}, environment={"PYTHONPATH": PATHS},
        )
    )  # fmt: skip
    for number, name in enumerate(NAMES):
        digests = [results[number]["digest"] for results in by_rank]
        expected = thinwire.run_replicas(replicas, lambda transport, name=name: train(transport, name=name))
        assert digests == expected, name
        assert len(set(digests)) == 1, name
    topology = method_of("ef21 in part").topology
    senders = [topology.peers(round_id=2 * step, me=0, alive=range(replicas)).senders for step in range(STEPS)]
    for replica in range(replicas):
        present = sum(replica in members for members in senders)
        assert 0 < present < STEPS
        # two channels, to each of the others
        assert by_rank[replica][NAMES.index("ef21 in part")]["messages"] == 2 * present * (replicas - 1)


def train_network(transport: Any, *, name: str, mesh: Any = None) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    if mesh is not None:  # one row in the last layer: the second rank's shard of it is empty
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(name), transport=transport)
    for step in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + transport.replica))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        if "masha" in name:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    found = {}
    for key, parameter in model.named_parameters():
        value = parameter.detach()
        found[key] = (value if mesh is None else value.full_tensor()).flatten().tolist()
    return found


def train_shards(names: list[str]) -> list[dict[str, list[float]]]:
    from torch.distributed.device_mesh import init_device_mesh

    transport = thinwire.connect(ranks_per_replica=2, deadline_s=600)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found = [train_network(transport, name=name, mesh=mesh["shard"]) for name in names]
    transport.close()
    return found


def test_shards_even_empty_ones_compute_what_an_unsharded_replica_does():
    names = ["ef21 whole", "masha whole", "ef21", "masha2 all"]
    by_rank = values(run(train_shards, num_ranks=4, arguments={"names": names}, environment={"PYTHONPATH": PATHS}))
    for number, name in enumerate(names):
        for results in by_rank[1:]:
            assert results[number] == by_rank[0][number], name
        if "whole" in name:  # a compressed shard sends its own largest elements, which are others than the whole's
            expected = thinwire.run_replicas(2, lambda transport, name=name: train_network(transport, name=name))[0]
            for key, value in expected.items():
                ours = torch.tensor(by_rank[0][number][key])
                # FSDP adds the gradients of its shards in another order than one process
                torch.testing.assert_close(ours, torch.tensor(value), rtol=1e-4, atol=1e-6)
