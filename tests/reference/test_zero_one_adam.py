"""0/1 Adam against a plain loop over dictionaries, bit for bit, and against what it must coincide with."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from tests.reference.test_one_bit_adam import Plain, adamw, options, squeeze
from thinwire.codecs import float32
from thinwire.methods import all_reduce, one_bit_adam, zero_one_adam
from thinwire.sync.adam_momentum_view import equaliser
from thinwire.sync.schedule import DoublingIntervals
from thinwire.transport.recording import RecordingTransport

SHORT = {"variance_steps": 11, "variance_updates": 2, "local_doubling_steps": 3, "max_local_steps": 4}
STEPS = 24  # the last step has an exchange
KINDS = ("transformer", "conv", "unused", "linear")


def plainly_adam(model):
    """Return an inner optimizer whose own steps use the same kernels as the formulas."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, foreach=False)


def train(method, *, kind="transformer", replicas=2, count=STEPS, inner=plainly_adam, dtype=None):
    def replica_main(transport):
        model = build(kind).to(dtype or torch.float32)
        optimizer = wrap(model, transport, method, inner(model))
        steps(model, optimizer, count, replica=transport.replica)
        local = values(model)
        with optimizer.global_parameters():
            return local, values(model)

    return thinwire.run_replicas(replicas, replica_main)


class PlainZeroOne(Plain):
    """The two phases as the file of the method writes them; dictionaries by parameter, errors by replica."""

    def __init__(self, kind, *, replicas, inner, code):
        super().__init__(kind, replicas=replicas, inner=inner, code=code)
        self.schedule = DoublingIntervals(**SHORT)
        self.updates = 0
        self.factors = [0.0 for _ in self.parameters[0]]
        self.sums = [{} for _ in self.models]
        self.last = None

    def run(self, count):
        for step in range(1, count + 1):
            for replica, model in enumerate(self.models):
                loss_of(model, step=step, replica=replica).backward()
            with torch.no_grad():
                [self.dense, self.coded, self.exchanged, self.local][self.schedule.channel(step)](step)
            for inner in self.inners:
                inner.zero_grad()

    def dense(self, step):
        self.updates += 1
        for same_parameter in zip(*self.parameters, strict=True):
            if all(p.grad is None for p in same_parameter):
                continue
            total = torch.zeros_like(same_parameter[0])
            for p in same_parameter:
                total += torch.zeros_like(p) if p.grad is None else p.grad
            for p, inner in zip(same_parameter, self.inners, strict=True):
                state = inner.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                gradient = total / len(self.models)
                beta2 = options(inner, p)["betas"][1]
                state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                self.descend(p, inner, gradient, step)

    def coded(self, step):
        self.find_factors()
        vectors = [
            self.flat(replica, lambda p, state, group: torch.zeros_like(p) if p.grad is None else p.grad)
            for replica in range(len(self.models))
        ]
        mean = self.mean(vectors)
        for parameters, inner in zip(self.parameters, self.inners, strict=True):
            for p, part in self.parts(parameters, mean, inner):
                self.descend(p, inner, part, step)

    def local(self, step):
        self.begin()
        for parameters, inner, sums in zip(self.parameters, self.inners, self.sums, strict=True):
            for p in parameters:
                if state := inner.state.get(p):
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    self.descend(p, inner, torch.where(state["v"] == 0, 0, gradient), step)
                    group = options(inner, p)
                    sums[p] = sums.get(p, torch.zeros_like(p))
                    sums[p].add_(state["m"], alpha=group["lr"] / (1 - group["betas"][0] ** step))
        self.num_local += 1

    def exchanged(self, step):
        self.begin()
        self.find_factors()
        vectors = []
        for replica in range(len(self.models)):

            def total(p, state, group, replica=replica):
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                momentum = state["m"].lerp(gradient, 1 - group["betas"][0])
                own = momentum * (group["lr"] / (1 - group["betas"][0] ** step))
                return own + self.sums[replica].get(p, 0)

            vectors.append(self.flat(replica, total))
        mean = self.mean(vectors)
        self.num_local += 1
        for replica, (parameters, inner) in enumerate(zip(self.parameters, self.inners, strict=True)):
            bases = dict(zip(parameters, self.last[replica], strict=True))
            for p, part in self.parts(parameters, mean, inner):
                state, group = inner.state[p], options(inner, p)
                rates, share = 0.0, 1.0
                for _ in range(self.num_local):
                    rates += group["lr"]
                    share *= 1 - group["lr"] * group["weight_decay"]
                state["m"].copy_(part * ((1 - group["betas"][0] ** step) / rates))
                bases[p].mul_(share).addcdiv_(part, self.denominator(state, group), value=-1)
                p.copy_(bases[p])
        self.sums = [{} for _ in self.models]
        self.num_local = 0

    def begin(self):
        if self.last is None:
            self.last = [[p.detach().clone() for p in parameters] for parameters in self.parameters]
            self.num_local = 0
            # what the errors are of changes, so they start anew
            self.worker_errors = [torch.zeros_like(error) for error in self.worker_errors]
            self.owner_errors = [torch.zeros_like(error) for error in self.owner_errors]

    def find_factors(self):
        states = [self.inners[0].state.get(p) for p in self.parameters[0]]
        self.factors = [
            f or (equaliser(s["v"].sqrt()) if s else 0.0) for f, s in zip(self.factors, states, strict=True)
        ]

    def flat(self, replica, function):
        found = []
        inner = self.inners[replica]
        for p, factor in zip(self.parameters[replica], self.factors, strict=True):
            state = inner.state.get(p)
            if not state:
                found.append(torch.zeros(p.numel()))
            else:
                found.append(
                    (torch.where(state["v"] == 0, 0, function(p, state, options(inner, p))) * factor).flatten()
                )
        return torch.cat(found)

    def parts(self, parameters, mean, inner):
        start = 0
        for p, factor in zip(parameters, self.factors, strict=True):
            part = mean[start : start + p.numel()].view_as(p)
            start += p.numel()
            if state := inner.state.get(p):
                yield p, torch.where(state["v"] == 0, 0, part / factor)

    def denominator(self, state, group):
        return state["v"].sqrt() / (1 - group["betas"][1] ** self.updates) ** 0.5 + group["eps"]

    def descend(self, p, inner, gradient, step):
        state, group = inner.state[p], options(inner, p)
        state["m"].lerp_(gradient, 1 - group["betas"][0])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        value = -group["lr"] / (1 - group["betas"][0] ** step)
        p.addcdiv_(state["m"], self.denominator(state, group), value=value)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_loop_of_its_file_bit_for_bit(kind, replicas):
    for count in (STEPS, STEPS - 1):  # after an exchange, and amid local steps
        plain = PlainZeroOne(kind, replicas=replicas, inner=adamw, code=lambda x: squeeze(x, scale="l2"))
        plain.run(count)
        results = train(zero_one_adam(**SHORT), kind=kind, replicas=replicas, count=count)
        for replica, (local, shared) in enumerate(results):
            assert same(local, values(plain.models[replica]))
            assert same(shared, results[0][1])
            assert same(local, shared) == (count == STEPS)


def test_the_schedule_is_that_of_the_counters_in_the_public_code():
    """Step by step, with counters, as the authors write it."""
    for updates, doubling, limit in [(16, 100, 16), (2, 3, 4), (1, 1, 5), (3, 7, 1)]:
        schedule = DoublingIntervals(
            variance_steps=150, variance_updates=updates, local_doubling_steps=doubling, max_local_steps=limit
        )
        interval, counter, local_interval, local_counter = 1, 0, 1, 0
        for step in range(1, 400):
            if step <= 150:
                is_dense = step % interval == 0
                assert schedule.channel(step) == (0 if is_dense else 1)
                counter += is_dense
                if counter == updates:
                    counter, interval = 0, interval * 2
                continue
            assert schedule.channel(step) == (2 if step % local_interval == 0 else 3)
            local_counter += 1
            if local_counter == doubling:
                local_counter, local_interval = 0, min(limit, local_interval * 2)


@pytest.mark.parametrize("kind", ["transformer", "unused"])
def test_while_every_exchange_is_dense_it_is_all_reduced_adam_bit_for_bit(kind):
    method = zero_one_adam(variance_steps=100, variance_updates=100)
    for (one, _), (other, _) in zip(train(method, kind=kind), train(all_reduce(), kind=kind), strict=True):
        assert same(one, other)


@pytest.mark.parametrize("kind", ["linear", "lstm"])  # no gradients that are zero but for rounding
def test_without_local_steps_and_without_loss_it_is_adam_with_a_frozen_variance(kind):
    method = zero_one_adam(variance_steps=5, variance_updates=100, max_local_steps=1, codec=float32())
    frozen = one_bit_adam(warmup_steps=5, codec=float32())
    for (one, _), (other, _) in zip(train(method, kind=kind), train(frozen, kind=kind), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", ["adam", "bfloat16"])
def test_replicas_share_the_same_bits_with_other_inner_optimizers_and_precisions(inner):
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.05)

    kwargs = {"inner": adam} if inner == "adam" else {"dtype": torch.bfloat16}
    results = train(zero_one_adam(**SHORT), replicas=3, count=STEPS - 1, **kwargs)
    assert all(same(shared, results[0][1]) for _, shared in results)
    assert all(bool(torch.isfinite(p).all()) for p in results[0][1])


def test_a_learning_rate_of_zero_changes_nothing_and_divides_nothing():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, zero_one_adam(**SHORT), torch.optim.AdamW(model.parameters(), lr=0.01))
        steps(model, optimizer, 14, replica=transport.replica)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        steps(model, optimizer, 20, replica=transport.replica, start=14)
        return values(model)

    for found in thinwire.run_replicas(2, replica_main):
        assert all(bool(torch.isfinite(p).all()) for p in found)


def test_local_steps_send_nothing_and_each_exchange_what_the_formula_says():
    def replica_main(transport):
        recording = RecordingTransport(transport)
        model = build("linear")
        optimizer = wrap(model, recording, zero_one_adam(**SHORT), adamw(model))
        sent = []
        for step in range(1, STEPS + 1):
            before = recording.log.totals("sent").payload_bytes
            steps(model, optimizer, 1, replica=transport.replica, start=step - 1)
            sent.append(recording.log.totals("sent").payload_bytes - before)
        return sent

    schedule = DoublingIntervals(**SHORT)
    per_channel = {0: 4 * (8 + 2), 1: 4 + 1, 2: 4 + 1, 3: 0}  # 8 elements, 2 flags; one scale and one byte of signs
    for sent in thinwire.run_replicas(2, replica_main):
        assert sent == [per_channel[schedule.channel(step)] for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["variance_steps", "variance_updates", "local_doubling_steps", "max_local_steps"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        zero_one_adam(**{name: 0})
