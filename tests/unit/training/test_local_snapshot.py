"""A replica's own state on its disk: what was written is read again, or nothing is."""

from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire.elastic.global_state import tensors_sha256
from thinwire.elastic.replica_state import global_tensors, inner_tensors, load_inner_tensors
from thinwire.errors import CheckpointError
from thinwire.runlog.run_identity import new_identity
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.elastic.local_snapshot import LocalSnapshot, newest_snapshot, snapshot_path
from thinwire.transport.loopback import single

RUN = new_identity(config_digest=32 * "0")
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


class Replica:
    """One that trains alone."""

    def __init__(self, inner: str = "adamw") -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1, num_fragments=2)
        self.optimizer = DistributedOptimizer(
            self.model, OPTIMIZERS[inner](self.model.parameters()), method=method, transport=single()
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        parameters, outer = global_tensors(self.optimizer.engine, self.model)
        return parameters | outer | inner_tensors(self.optimizer.inner, self.model)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def keep(path: Path, replica: Replica, *, step: int = 20, warnings: list[str] | None = None) -> LocalSnapshot:
    kept = LocalSnapshot(path, run=RUN, warn=[].append if warnings is None else warnings.append, now=Clock())
    assert kept.offer(step, era=3, every=4, model=replica.model, optimizer=replica.optimizer)
    kept.close()
    return kept


def test_what_an_optimizer_remembers_is_taken_over_bit_for_bit() -> None:
    for name in OPTIMIZERS:
        one, other = Replica(name), Replica(name)
        one.train(5)
        other.model.load_state_dict(one.model.state_dict())
        load_inner_tensors(other.optimizer.inner, other.model, inner_tensors(one.optimizer.inner, one.model))
        for replica in (one, other):
            loss = replica.model(torch.ones(1, 3)).square().sum()
            loss.backward()
            replica.optimizer.inner.step()
        for found, expected in zip(other.model.parameters(), one.model.parameters(), strict=True):
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", ["nobody|exp_avg", "0.weight", "0.weight|exp_avg"])
def test_what_is_of_another_model_is_refused_as_a_whole(name: str) -> None:
    replica = Replica()
    replica.train(2)
    before = inner_tensors(replica.optimizer.inner, replica.model)
    tensors = {"0.bias|exp_avg": torch.ones(5), name: torch.ones(1, 9)}
    with pytest.raises(CheckpointError, match="begin without it"):
        load_inner_tensors(replica.optimizer.inner, replica.model, tensors)
    after = inner_tensors(replica.optimizer.inner, replica.model)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_state_is_read_as_it_was_written_and_gone_on_from(tmp_path: Path) -> None:
    one, other = Replica(), Replica()
    one.train(9)
    kept = keep(tmp_path / "kept" / "a.state", one, step=9)
    held = kept.read()
    assert held is not None and (held.step, held.era) == (9, 3)
    held.take_in(model=other.model, optimizer=other.optimizer)
    found, expected = other.tensors(), one.tensors()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    kept.discard()
    kept.discard()
    assert kept.read() is None


def test_what_is_damaged_or_of_another_job_is_not_read(tmp_path: Path) -> None:
    path, replica = tmp_path / "a.state", Replica()
    replica.train(2)
    keep(path, replica)
    assert LocalSnapshot(path, run=new_identity(config_digest=RUN.config_digest), warn=print).read() is None
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole[:-9] + b"\x01" + whole[-8:], b"x" * 99):
        path.write_bytes(damaged)
        assert LocalSnapshot(path, run=RUN, warn=print).read() is None
    path.write_bytes(whole)
    assert LocalSnapshot(path, run=RUN, warn=print).read() is not None


def test_a_host_goes_on_from_the_newest_state_that_its_replicas_keep(tmp_path: Path) -> None:
    replica = Replica()
    replica.train(9)
    accounts = {16: {"data": {"counted": 30}, "tokens": 64}, 20: {}, 24: None, 12: {"data": {"counted": 99}}}
    for index, (step, account) in enumerate(accounts.items()):
        run = new_identity(config_digest=RUN.config_digest) if step == 12 else RUN
        kept = LocalSnapshot(
            snapshot_path(tmp_path, index),
            run=run,
            warn=print,
            now=Clock(),
            account=lambda step, account=account: account,
        )
        assert kept.offer(step, era=1, every=4, model=replica.model, optimizer=replica.optimizer)
        kept.close()
    assert not snapshot_path(tmp_path, 2).exists(), "without the account of the data the state before stays"
    found = newest_snapshot(tmp_path, run=RUN.next_incarnation())
    assert found.state is not None and (found.state.step, found.age) == (16, 0), (
        "another run's or one without account is none"
    )
    assert found.state.note == {"data": {"counted": 30}, "tokens": 64, "era": 1}
    parameters, outer = global_tensors(replica.optimizer.engine, replica.model)
    assert found.state.outer.keys() == outer.keys(), "the inner optimizer's moments are the replica's own"
    assert all(found.state.parameters[name].equal(parameters[name]) for name in parameters)
    resumed = LocalSnapshot(snapshot_path(tmp_path, 0), run=RUN.next_incarnation(), warn=print)
    assert resumed.read() is None, "of another incarnation"
    held = resumed.read_resumed(step=16, sha256=tensors_sha256(found.state))
    assert held is not None and held.has_inner, "but the run goes on from these very bits"
    assert resumed.read_resumed(step=16, sha256=64 * "0") is None
    assert newest_snapshot(tmp_path, run=new_identity(config_digest=RUN.config_digest)).state is None


def test_copies_and_writes_take_their_share_of_the_time_and_no_more(tmp_path: Path) -> None:
    clock, replica = Clock(), Replica()
    kept = LocalSnapshot(tmp_path / "a.state", run=RUN, warn=print, now=clock)

    def offer(step: int) -> bool:
        found = kept.offer(step, era=0, every=4, model=replica.model, optimizer=replica.optimizer)
        kept.close()
        return found

    assert offer(1) and not offer(4), "not before the interval is over"
    assert not offer(5), "nor before the time of a copy is a small share of that since"
    clock.now_s += 10.0
    assert offer(5)
    held = kept.read()
    assert held is not None and held.step == 5


def test_where_nothing_can_be_written_it_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file is in the way")
    warnings: list[str] = []
    kept = keep(tmp_path / "kept" / "a.state", Replica(), warnings=warnings)
    assert len(warnings) == 1 and "cannot be kept" in warnings[0]
    replica = Replica()
    assert not kept.offer(400, era=0, every=4, model=replica.model, optimizer=replica.optimizer)
