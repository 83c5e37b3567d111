"""The training loop on a replica that catches up: what all do after one step, it does too, and it counts tokens."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import thinwire
from tests.reference.late_replicas import release, wait_where_held
from tests.reference.loops import wrap
from thinwire.codecs import float32
from thinwire.methods import decoupled_diloco
from thinwire.training.config import TrainConfig
from thinwire.training.loop import Training

HOLDS = [(2, 4, 11)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 5)

    def loss(self, tokens, targets):
        loss = nn.functional.cross_entropy(self.embed(tokens).flatten(0, 1), targets.flatten())
        return loss, loss


class Batches:
    """Sequences, one more on each replica; a held one waits for its batch."""

    def __init__(self, transport):
        self.transport = transport
        self.taken = 0

    def __next__(self):
        self.taken += 1
        wait_where_held(self.transport, HOLDS, before=self.taken)
        tokens = torch.arange(4 * (self.transport.replica + 1)).view(-1, 4) % 5
        return tokens, tokens

    def state_dict(self):
        return {}


class Meter:
    latest_loss = 1.0

    def __init__(self, told):
        self.told = told

    def train_step(self, loss, *, samples):
        self.told.append(("tokens", samples))

    def interval_loss(self):
        return 1.0

    def write_step(self, step, **readings):
        self.told.append(("report", step))

    def write_eval(self, step, **values):
        self.told.append(("eval", step))

    def state_dict(self, *, stalled_s):
        return {}


def train(transport):
    torch.manual_seed(0)
    model, told, saved = Model(), [], []
    method = decoupled_diloco(sync_interval=4, overlap_steps=1, codec=float32(), most_behind=8)
    optimizer = wrap(model, transport, method, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches, meter = Batches(transport), Meter(told)

    class Checkpoints:
        def save(self, state, *, step, drift_steps):
            saved.append((step, drift_steps))
            release(transport, HOLDS, after=step - 1, lets=False)

    config = TrainConfig.of(
        steps=20, log_every=2, eval_every=9, checkpoint_every=12, eval_batches=1, warmup_steps=0, clip_norm=1.0,
        final_exchange=True,
    )  # fmt: skip
    held_out = [(torch.zeros(1, 4, dtype=torch.int64),) * 2] * 3
    training = Training(
        config=config, model=model, optimizer=optimizer, batches=batches, held_out=lambda count: held_out, meter=meter,
        device=torch.device("cpu"), checkpoints=Checkpoints(),
    )  # fmt: skip
    training.run()
    with optimizer.global_parameters():
        values = model.embed.weight.detach().clone()
    return SimpleNamespace(told=told, saved=saved, own=batches.taken, values=values, optimizer=optimizer)


def test_a_late_replica_saves_and_evaluates_where_the_others_do_and_ends_where_they_end():
    found = thinwire.run_replicas(3, train)
    for one in found:
        assert torch.equal(one.values, found[0].values)
        assert one.optimizer.steps_done == 20
        assert [step for step, _ in one.saved] == [12, 20]
        assert [step for kind, step in one.told if kind == "eval"] == [9, 18]
        reports = [step for kind, step in one.told if kind == "report"]
        assert reports == sorted(set(reports)) and reports[-1] == 20
    assert [step for kind, step in found[0].told if kind == "report"] == list(range(2, 21, 2))
    assert found[0].own == found[1].own == 20 and found[2].own < 16
    assert found[2].optimizer.statistics.steps_passed == 20 - found[2].own
    # drift: the intervals that a replica may be behind, and two
    assert found[0].saved[0][1] == 10 * 4


def test_the_loop_tells_how_many_tokens_a_step_had():
    for replica, one in enumerate(thinwire.run_replicas(3, train)):
        assert one.optimizer._engine.state.work.state_dict()["done"] == [4 * (replica + 1) * one.own, one.own]
