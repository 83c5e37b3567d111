"""Replicas of several ranks, in real processes: shards at one rank and back, and the same training as with one rank."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from torch import nn

import thinwire
from thinwire.elastic.elastic_method import elastic
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.elastic.replica_state import global_tensors, load_global_tensors
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.elastic.replica_ranks import Rank0Driver, follow, whole_model
from thinwire.workloads.language.workload import make_model

pytestmark = pytest.mark.multiprocess

ROOT = str(Path(__file__).resolve().parents[2])
SHAPES = [(1,), (2, 3), (7, 5), (3,), (4, 1, 2), (1009,), (6, 0)]


class Awkward(nn.Module):
    """Rows that three ranks cannot share out evenly, or have fewer of than there are ranks; some that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"t{index}", nn.Parameter(torch.randn(shape), requires_grad=index != 2))
        self.narrow = nn.Parameter(torch.randn(5, 2).bfloat16())


def move_shards(folder: str, num_ranks: int) -> list[Any]:
    from thinwire.transport.replica_group import ReplicaGroup, ShardedParameters
    from thinwire.transport.shards import local_shard

    group = ReplicaGroup(rank=int(os.environ["RANK"]), size=num_ranks, meeting=Path(folder) / "meeting")
    group.use("cpu")
    torch.manual_seed(3)
    model = Awkward()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    group.shard(model, blocks=[])
    shards = ShardedParameters(group, model)
    for word in (b"", b"x" * 1016, b"y" * 99_999):
        assert (group.send_order(word) or word if group.leads else group.receive_order()) == word
    names = [*reversed(shards.names)]  # any choice, in any order
    wanted = torch.cat([whole[name].reshape(-1).float() for name in names])
    found = [shards.gather(names)]
    shards.keep()
    for factor, blend in ((3, 0.0), (1, 0.25)):
        shards.scatter(names, wanted * factor if group.leads else None, blend=blend)
        found.append(shards.gather(names))
    shards.restore()
    found.append(shards.gather(names))
    mine = [local_shard(parameter).numel() for parameter in model.parameters()]
    group.close()
    return [mine, *(same(*pair) for pair in zip(found, expected(whole, names, wanted), strict=True) if group.leads)]


def expected(whole: dict[str, torch.Tensor], names: list[str], wanted: torch.Tensor) -> list[torch.Tensor]:
    is_narrow = torch.cat([torch.full((whole[n].numel(),), whole[n].dtype == torch.bfloat16) for n in names])

    def held(values: torch.Tensor) -> torch.Tensor:
        return torch.where(is_narrow, values.bfloat16().float(), values)

    tripled = held(wanted * 3)
    return [wanted, tripled, held(torch.lerp(tripled, wanted, 0.75)), wanted]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours, theirs)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_of_any_size_come_whole_to_the_leading_rank_and_back_bit_for_bit(num_ranks: int, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "num_ranks": num_ranks}
    found = values(run(move_shards, num_ranks=num_ranks, arguments=arguments, environment={"PYTHONPATH": ROOT}))
    assert found[0][1:] == [True] * 4
    held = [mine for mine, *_ in found]
    assert 0 in held[-1], "a rank without a row of some tensor is what this is about"
    assert [sum(sizes) for sizes in zip(*held, strict=True)] == [p.numel() for p in Awkward().parameters()]


class FolderSeat:
    """A session of replicas that never come or go: each lays its part into a folder, and takes everybody's."""

    def __init__(self, folder: Path, *, replica: int, num_replicas: int, late: int) -> None:
        self._folder, self._replica, self._all, self._late = folder, replica, tuple(range(num_replicas)), late

    def active(self) -> tuple[int, ...]:
        return self._all

    def known_step(self) -> int:
        return 0

    def is_decided(self, round_id: int) -> bool:
        return False

    def propose(self, part: torch.Tensor, *, round_id: int, launch_step: int, **rest: Any) -> Any:
        # the last replica's part of one round counts for nothing, so that it moves along with the others
        members = self._all[:-1] if round_id == self._late else self._all
        path = self._folder / f"{round_id}-{self._replica}"
        path.with_suffix(".new").write_bytes(part.numpy().tobytes())
        path.with_suffix(".new").rename(path)
        paths = {member: self._folder / f"{round_id}-{member}" for member in members}
        return Laid(paths, step=launch_step)

    def confirm(self, round_id: int, sound: Any) -> None:
        assert set(sound) <= set(self._all)


class Laid:
    """Parts that lie in a folder, or will."""

    def __init__(self, paths: dict[int, Path], *, step: int) -> None:
        self._paths, self.step, self.closed_step = paths, step, 0
        self.refused: dict[int, tuple[str, str]] = {}
        self.agreed: Laid | None = None

    @property
    def parts(self) -> dict[int, torch.Tensor]:
        raw = {member: bytearray(path.read_bytes()) for member, path in self._paths.items()}
        return {member: torch.frombuffer(held, dtype=torch.uint8) for member, held in raw.items()}

    def done(self) -> bool:
        return all(path.exists() for path in self._paths.values())

    def wait(self, *, deadline_s: float) -> Laid:
        until_s = time.monotonic() + deadline_s
        while not self.done():
            assert time.monotonic() < until_s, f"none of {self._paths}"
            time.sleep(0.005)
        self.agreed = self
        return self


class SeatTransport:
    """Says which replica this is; the parts go through the folder."""

    runs_in_background = True
    num_replicas = 1

    def __init__(self, replica: int) -> None:
        self.replica = replica


STEPS, INTERVAL, ROWS = 13, 3, 5
LATE_ROUND = 2


def config_of(folder: str) -> TrainConfig:
    given = TrainConfig.of(
        elastic=True, replicas=2, model="nano", seq_len=8, batch_size=ROWS, inner_optimizer="plain-sgd",
        steps=STEPS, clip_norm=0.5, out=Path(folder), lr=0.01,
    )  # fmt: skip
    return resolve(given, world_size=None, cores=1, home=Path(folder))


def batch_of(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 30, (ROWS, 9), generator=torch.Generator().manual_seed(100 * replica + step))
    return tokens[:, :-1], tokens[:, 1:]


def assembled(
    config: TrainConfig, *, replica: int, rank0: Rank0Driver | None, folder: Path
) -> tuple[nn.Module, thinwire.DistributedOptimizer]:
    seat: Any = FolderSeat(folder, replica=replica, num_replicas=2, late=LATE_ROUND)
    if rank0 is None:
        model = make_model(config, vocab_size=30, device="cpu")
        inner = make_inner_optimizer(config, model)
    else:
        model, inner = rank0.assemble(config, sizes={"vocab_size": 30})
    method = thinwire.methods.streaming_diloco(
        sync_interval=INTERVAL, overlap_steps=1, num_fragments=2, codec=thinwire.codecs.float32()
    )
    transport: Any = SeatTransport(replica)
    optimizer = thinwire.DistributedOptimizer(
        model, inner, method=elastic(method, session=seat, pieces=rank0), transport=transport,
        catch_up=ElasticDriver(seat.known_step, grace_steps=STEPS),
    )  # fmt: skip
    return model, optimizer


def train(config: TrainConfig, *, replica: int, rank0: Rank0Driver | None, folder: Path) -> dict[str, Any]:
    """Take a state in, train, evaluate, and write the last state down."""
    model, optimizer = assembled(config, replica=replica, rank0=rank0, folder=folder)
    start = torch.load(folder / "start.pt", weights_only=True)
    load_global_tensors(optimizer.engine, model, start["parameters"], start["outer"])
    parameters, outer = global_tensors(optimizer.engine, model)
    is_given_on = hash_of(parameters, outer) == hash_of(start["parameters"], start["outer"])
    losses = [one_step(step, model, optimizer, config, replica=replica, rank0=rank0) for step in range(1, STEPS + 1)]
    optimizer.close()
    before = optimizer.engine.view.parameters.read(0)
    with optimizer.global_parameters():
        held_out = held_out_loss(model, rank0)
    assert torch.equal(before, optimizer.engine.view.parameters.read(0)), "the local parameters are back"
    parameters, outer = global_tensors(optimizer.engine, model)
    if rank0 is not None:
        whole = whole_model(config, sizes={"vocab_size": 30}, parameters=parameters, sharded=model)
        assert held_out_loss(whole, None) == pytest.approx(held_out, rel=1e-5)
    torch.save({"parameters": parameters, "outer": outer}, folder / f"end-{replica}.pt")
    return {
        "is_given_on": is_given_on, "losses": losses, "held_out": held_out, "hash": hash_of(parameters, outer),
        "missed": optimizer.statistics.rounds_missed,
    }  # fmt: skip


def one_step(
    step: int, model: Any, optimizer: thinwire.DistributedOptimizer, config: TrainConfig, *, replica: int,
    rank0: Rank0Driver | None,
) -> float:  # fmt: skip
    tokens, targets = batch_of(replica, step)
    optimizer.count_tokens(tokens.numel())
    if rank0 is None:
        loss, nll = model.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
    else:
        _, nll = rank0.backward(tokens, targets, factor=1.0)
        rank0.clip()
    optimizer.step()
    optimizer.zero_grad()
    return float(nll)


def held_out_loss(model: Any, rank0: Rank0Driver | None) -> float:
    tokens, targets = (part[:1] for part in batch_of(7, 0))  # fewer rows than ranks
    with torch.no_grad():
        return float(rank0.held_out(tokens, targets) if rank0 else model.loss(tokens, targets)[1])


def hash_of(*states: dict[str, torch.Tensor]) -> str:
    vectors = [state[name] for state in states for name in sorted(state)]
    return hashlib.sha256(b"".join(vector.numpy().tobytes() for vector in vectors)).hexdigest()


def live(folder: str, ranks: list[int]) -> dict[str, Any]:
    """Be one rank of one of two replicas, of which the first has `ranks[0]`, the other `ranks[1]`."""
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    replica = int(number >= ranks[0])
    rank, size = number - replica * ranks[0], ranks[replica]
    config = config_of(folder)
    if size == 1:
        return train(config, replica=replica, rank0=None, folder=Path(folder))
    from thinwire.transport.replica_group import ReplicaGroup

    group = ReplicaGroup(rank=rank, size=size, meeting=Path(folder) / f"meeting-{replica}")
    if not group.leads:
        follow(group)
        return {}
    rank0 = Rank0Driver(group)
    found = train(config, replica=replica, rank0=rank0, folder=Path(folder))
    rank0.dismiss()
    return found


def trained(folder: Path, ranks: list[int]) -> list[dict[str, Any]]:
    """Let two replicas train from a state that is no beginning, and return what they say, and their last state."""
    folder.mkdir()
    config = config_of(str(folder))
    model, optimizer = assembled(config, replica=0, rank0=None, folder=folder)
    parameters, outer = global_tensors(optimizer.engine, model)
    generator = torch.Generator().manual_seed(5)
    outer = {name: 1e-4 * torch.randn(vector.shape, generator=generator) for name, vector in outer.items()}
    torch.save({"parameters": parameters, "outer": outer}, folder / "start.pt")
    arguments = {"folder": str(folder), "ranks": ranks}
    found = values(run(live, num_ranks=sum(ranks), arguments=arguments, environment={"PYTHONPATH": ROOT}))
    leaders = [found[0], found[ranks[0]]]
    return [{**told, **torch.load(folder / f"end-{i}.pt", weights_only=True)} for i, told in enumerate(leaders)]


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], float]:
    """Return what two replicas of one rank came to, and how far that is from where they began."""
    folder = tmp_path_factory.mktemp("single") / "run"
    found = trained(folder, [1, 1])
    start = torch.load(folder / "start.pt", weights_only=True)
    return found, distance(start["parameters"], found[0]["parameters"])


@pytest.mark.parametrize("ranks", [[2, 2], [3, 1]], ids=str)
def test_replicas_of_several_ranks_train_as_replicas_of_one(
    ranks: list[int], single: tuple[list[dict[str, Any]], float], tmp_path: Path
) -> None:
    (one, moved), many = single, trained(tmp_path / "many", ranks)
    for told in (one, many):
        assert all(replica["is_given_on"] for replica in told), "a state that was taken in is given on bit for bit"
        assert told[0]["hash"] == told[1]["hash"], "replicas hold the same bits, however many ranks they have"
        assert [replica["missed"] for replica in told] == [0, 1], "one part came too late, and its replica moved along"
    # sums over the parts of a batch round otherwise than one sum over all of it
    assert distance(one[0]["parameters"], many[0]["parameters"]) < 1e-4 * moved
    for ours, theirs in zip(one, many, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["held_out"] == pytest.approx(theirs["held_out"], rel=1e-5)
