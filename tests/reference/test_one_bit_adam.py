"""1-bit Adam against plain loops over dictionaries, bit for bit, and against what it must coincide with."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.averaging.exchange import cheapest, shard_bounds
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import Peers
from thinwire.codecs import by_name, float32, sign
from thinwire.errors import NonFiniteError
from thinwire.methods import all_reduce, one_bit_adam
from thinwire.sync.adam_momentum_view import equaliser
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.recording import RecordingTransport

WARM = 4
STEPS = 11
KINDS = ("transformer", "conv", "lstm", "unused", "linear")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05)


def groups(model):
    tensors = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": tensors[:1], "lr": 0.03, "weight_decay": 0.0}, {"params": tensors[1:], "betas": (0.7, 0.9)}],
        lr=1e-2,
    )


def train(method, *, kind="transformer", replicas=2, count=STEPS, inner=adamw, dtype=None):
    def replica_main(transport):
        model = build(kind).to(dtype or torch.float32)
        optimizer = wrap(model, transport, method, inner(model))
        steps(model, optimizer, count, replica=transport.replica)
        return values(model)

    return thinwire.run_replicas(replicas, replica_main)


def squeeze(vector, *, scale):
    """Code by signs, as the paper writes it."""
    if not vector.numel():
        return vector
    wide = vector.double()
    size = wide.square().mean().sqrt() if scale == "l2" else wide.abs().mean()
    return torch.where(vector < 0, -size.float(), size.float())


class Plain:
    """The paper's loop over dictionaries of tensors; the two errors are lists, one a replica."""

    def __init__(self, kind, *, replicas, inner, code):
        self.models = [build(kind) for _ in range(replicas)]
        self.inners = [inner(model) for model in self.models]
        probe = build(kind)
        names = wrap(probe, None, all_reduce(), inner(probe)).fragments[0]
        self.parameters = [[dict(m.named_parameters())[name] for name in names] for m in self.models]
        self.code = code
        numel = sum(p.numel() for p in self.parameters[0])
        self.bounds = shard_bounds(numel, num_shards=replicas, block=8)
        self.worker_errors = [torch.zeros(numel) for _ in self.models]
        self.owner_errors = [torch.zeros(stop - start) for start, stop in self.bounds]
        self.factors = None

    def run(self, count):
        for step in range(1, count + 1):
            for replica, model in enumerate(self.models):
                loss_of(model, step=step, replica=replica).backward()
            with torch.no_grad():
                self.warm() if step <= WARM else self.cold(step)
            for inner in self.inners:
                inner.zero_grad()

    def warm(self):
        for same_parameter in zip(*self.parameters, strict=True):
            if all(p.grad is None for p in same_parameter):
                continue
            total = torch.zeros_like(same_parameter[0])
            for p in same_parameter:
                total += torch.zeros_like(p) if p.grad is None else p.grad
            for p in same_parameter:
                p.grad = total / len(self.models)
        for inner in self.inners:
            inner.step()

    def cold(self, step):
        if self.factors is None:
            states = [self.inners[0].state.get(p) for p in self.parameters[0]]
            self.factors = [equaliser(s["exp_avg"]) if s else 1.0 for s in states]
        mean = self.mean([self.momenta(replica) for replica in range(len(self.models))])
        for parameters, inner in zip(self.parameters, self.inners, strict=True):
            start = 0
            for p, factor in zip(parameters, self.factors, strict=True):
                part = mean[start : start + p.numel()].view_as(p)
                start += p.numel()
                group, state = options(inner, p), inner.state.get(p)
                if not state:
                    continue
                state["exp_avg"].copy_(torch.where(state["exp_avg_sq"] == 0, 0, part / factor))
                beta1, beta2 = group["betas"]
                if isinstance(inner, torch.optim.AdamW):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                denominator = state["exp_avg_sq"].sqrt() / (1 - beta2**WARM) ** 0.5 + group["eps"]
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))

    def momenta(self, replica):
        found = []
        inner = self.inners[replica]
        for p, factor in zip(self.parameters[replica], self.factors, strict=True):
            state, group = inner.state.get(p), options(inner, p)
            if not state:
                found.append(torch.zeros(p.numel()))
                continue
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            if not isinstance(inner, torch.optim.AdamW):
                gradient = gradient + group["weight_decay"] * p
            momentum = state["exp_avg"].lerp(gradient, 1 - group["betas"][0])
            found.append((torch.where(state["exp_avg_sq"] == 0, 0, momentum) * factor).flatten())
        return torch.cat(found)

    def mean(self, vectors):
        replicas = len(vectors)
        wanted = [vector + error for vector, error in zip(vectors, self.worker_errors, strict=True)]
        whole = torch.empty_like(wanted[0])
        for owner, (start, stop) in enumerate(self.bounds):
            total = torch.zeros(stop - start)
            for replica in range(replicas):
                sent = self.code(wanted[replica][start:stop])
                self.worker_errors[replica][start:stop] = wanted[replica][start:stop] - sent
                total += sent
            shard = total / replicas + self.owner_errors[owner]
            whole[start:stop] = self.code(shard)
            self.owner_errors[owner] = shard - whole[start:stop]
        return whole


def options(inner, parameter):
    return next(g for g in inner.param_groups if any(p is parameter for p in g["params"]))


@pytest.mark.parametrize("scale", ["l2", "mean"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_papers_loop_bit_for_bit(kind, replicas, scale):
    plain = Plain(kind, replicas=replicas, inner=adamw, code=lambda x: squeeze(x, scale=scale))
    plain.run(STEPS)
    results = train(one_bit_adam(warmup_steps=WARM, codec=sign(scale)), kind=kind, replicas=replicas)
    for found in results:
        assert same(found, values(plain.models[0]))


@pytest.mark.parametrize("inner", [adam, groups])
def test_options_of_groups_and_decay_in_the_gradient_are_adams(inner):
    plain = Plain("linear", replicas=2, inner=inner, code=lambda x: squeeze(x, scale="l2"))
    plain.run(STEPS)
    for found in train(one_bit_adam(warmup_steps=WARM), kind="linear", inner=inner):
        for one, other in zip(found, values(plain.models[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("inner", [adam, adamw])
def test_without_loss_it_is_all_reduced_adam_with_a_frozen_variance_bit_for_bit(replicas, inner):
    plain = Plain("transformer", replicas=replicas, inner=inner, code=lambda x: x)
    plain.run(STEPS)
    for found in train(one_bit_adam(warmup_steps=WARM, codec=float32()), replicas=replicas, inner=inner):
        if inner is adamw:
            assert same(found, values(plain.models[0]))
        for one, other in zip(found, values(plain.models[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_up_is_all_reduce_with_adam_bit_for_bit(kind):
    one = train(one_bit_adam(warmup_steps=STEPS), kind=kind, replicas=3)
    other = train(all_reduce(), kind=kind, replicas=3)
    for found, expected in zip(one, other, strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["transformer", "unused"])
def test_replicas_hold_the_same_bits_in_other_precisions(dtype, kind):
    results = train(one_bit_adam(warmup_steps=WARM), kind=kind, replicas=3, dtype=dtype)
    assert all(same(found, results[0]) for found in results)
    assert all(bool(torch.isfinite(p).all()) for p in results[0])


def test_what_was_received_and_the_errors_add_up_to_all_that_came_in():
    """Sums telescope over both codings: nothing is lost, only late."""
    spec = one_bit_adam(warmup_steps=1).exchanges(3)[1]
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(1009, generator=generator) for _ in range(3)] for _ in range(20)]

    def replica_main(transport):
        me = transport.replica
        exchange = spec.bind([[torch.Size([1009])]], replica=me, num_replicas=3)
        received = torch.zeros(1009, dtype=torch.float64)
        for number, vectors in enumerate(inputs):
            context = RoundContext(peers=Peers(me=me, members=(0, 1, 2)), transport=transport, round_id=number)
            round = Round(id=number, fragment=0, launch_step=1, apply_step=1)
            flight = launch(
                exchange.steps(vectors[me].clone(), context), round=round, deadline_s=5, in_background=False
            )
            received += flight.result().mean
        kept = exchange.state_dict()["0"]
        return received, kept["out"]["residual"].double(), kept["mean"]["residual"].double()

    results = thinwire.run_replicas(3, replica_main)
    came_in = sum(torch.stack(vectors).double().mean(0) for vectors in inputs)
    left = sum(out for _, out, _ in results) / 3 + torch.cat([mean for _, _, mean in results])
    for received, _, _ in results:
        torch.testing.assert_close(received + left, came_in, rtol=0, atol=1e-4)
    assert float(left.norm()) < float(came_in.norm()) < float(left.norm()) * 100


class Wide(torch.nn.Module):
    """An embedding of which only the first rows ever have a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(10, 5)
        self.out = torch.nn.Linear(5, 3)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_elements_that_never_had_a_gradient_stay_and_nothing_piles_up():
    def replica_main(transport):
        model = Wide()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        optimizer = wrap(model, transport, one_bit_adam(warmup_steps=3), inner)
        before = model.embed.weight[6:].detach().clone()
        for step in range(30):
            generator = torch.Generator().manual_seed(10 * step + transport.replica)
            tokens = torch.randint(0, 6, (4, 8), generator=generator)
            if step > 20:  # too late: the variance of these rows is frozen at 0
                tokens[0, 0] = 9
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model), torch.equal(model.embed.weight[6:], before), inner.state[model.embed.weight]["exp_avg"]

    for found, has_stayed, momentum in thinwire.run_replicas(2, replica_main):
        assert has_stayed
        assert not momentum[6:].any() and momentum[:6].all()
        assert all(float(p.abs().max()) < 10 for p in found)


def test_a_scheduler_of_the_learning_rate_holds_after_the_warm_up():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, one_bit_adam(warmup_steps=3), torch.optim.AdamW(model.parameters(), lr=0.01))
        steps(model, optimizer, 5, replica=transport.replica)
        before = values(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        steps(model, optimizer, 3, replica=transport.replica, start=5)
        return same(values(model), before)

    assert thinwire.run_replicas(2, replica_main) == [True, True]


def test_a_closure_and_clipping_before_the_step_work():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, one_bit_adam(warmup_steps=3), adamw(model))
        for step in range(1, 9):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step=step, replica=transport.replica)
                loss.backward()
                optimizer.average_gradients()  # does nothing: the step exchanges
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            assert optimizer.step(closure) > 0
        return values(model), optimizer.statistics.rounds_applied

    (one, rounds), (other, _) = thinwire.run_replicas(2, replica_main)
    assert same(one, other) and rounds == 8


def test_fifteen_percent_of_warm_up_send_at_most_a_fifth_of_dense_float32():
    """As the paper counts against float16: 1 / (0.15 + 0.85 / 16) = 4.9; here dense is float32."""
    count, warm = 40, 6

    def sent(method):
        def replica_main(transport):
            recording = RecordingTransport(transport)
            model = build("transformer")
            optimizer = wrap(model, recording, method, adamw(model))
            before = recording.log.totals("sent").payload_bytes
            steps(model, optimizer, count, replica=transport.replica)
            return recording.log.totals("sent").payload_bytes - before

        return max(thinwire.run_replicas(2, replica_main))

    model = build("transformer")
    numel, num_tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    dense, coded = sent(all_reduce()), sent(one_bit_adam(warmup_steps=warm))
    assert dense == count * 4 * (numel + num_tensors)
    shards = [stop - start for start, stop in shard_bounds(numel, num_shards=2, block=8)]
    per_step = sum(4 + math.ceil(shard / 8) for shard in shards)
    assert coded == warm * 4 * (numel + num_tensors) + (count - warm) * per_step
    assert dense / coded > 5.3  # 1 / (0.15 + 0.85 / 32) = 5.66, less the flags and scales of a small model


def test_not_a_number_names_the_replica_that_sent_it():
    def replica_main(transport):
        model = build("transformer")
        optimizer = wrap(model, transport, one_bit_adam(warmup_steps=2), adamw(model))
        steps(model, optimizer, 4, replica=transport.replica)
        loss_of(model, step=5, replica=transport.replica).backward()
        if transport.replica == 1:
            model.embed.weight.grad.fill_(torch.nan)
            model.blocks[0].norm.weight.grad.fill_(torch.nan)
        optimizer.step()

    with pytest.raises(NonFiniteError, match="replica 1 sent NaN or infinity"):
        thinwire.run_replicas(2, replica_main)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "inner optimizer is SGD; give torch.optim.AdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True divides by a maximum"),
        (lambda p: torch.optim.Adam(p, maximize=True), "leave maximize out"),
    ],
)
def test_another_inner_optimizer_is_refused_with_what_to_do(make, words):
    model = build("linear")
    with pytest.raises(ValueError, match=words):
        wrap(model, None, one_bit_adam(warmup_steps=3), make(model.parameters()))


def test_a_warm_up_below_one_step_and_a_sparse_code_are_refused():
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, got 0"):
        one_bit_adam(warmup_steps=0)
    with pytest.raises(ValueError, match="use AllGather"):
        one_bit_adam(codec=by_name("top-k"))


def test_dense_gradients_take_the_cheapest_exchange():
    for replicas in (2, 8):
        assert one_bit_adam().exchanges(replicas)[0] == cheapest(float32(), num_replicas=replicas)
