"""NoLoCo, CO2 and SlowMo against their papers' loops in one process, and against each other where they must coincide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.averaging.delivery import Average
from thinwire.averaging.mixing import RandomPairs
from thinwire.codecs import block_int8, e3m0, float32
from thinwire.methods import all_reduce, co2, diloco, noloco, slowmo
from thinwire.methods.noloco import largest_pull
from thinwire.sync.blocks import find_blocks
from thinwire.sync.consensus import ConsensusStep, SlowWeightsAndPseudoGradient
from thinwire.sync.fragments import Pattern
from thinwire.sync.outer import HeavyBall, StaleHeavyBall
from thinwire.sync.schedule import Round
from thinwire.transport.base import Kind
from thinwire.transport.recording import RecordingTransport

KINDS = ("transformer", "conv", "unused", "linear")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(method, *, kind="transformer", replicas=2, count=23, final=False, dtype=None):
    """Train in the loopback world; return per replica (local parameters, global parameters)."""

    def replica_main(transport):
        model = build(kind).to(dtype)
        optimizer = wrap(model, transport, method, adamw(model))
        steps(model, optimizer, count, replica=transport.replica)
        if final:
            optimizer.close(final_exchange=True)
        local = values(model)
        with optimizer.global_parameters():
            return local, values(model)

    return thinwire.run_replicas(replicas, replica_main)


class Replica:
    """A model with its inner optimizer, one step at a time, and what a paper's loop keeps beside it."""

    def __init__(self, kind, number):
        self.model, self.number = build(kind), number
        by_name = dict(self.model.named_parameters())
        # in the order in which they are sent: it decides which values share a code's block
        names = Pattern(num_fragments=1).partition(find_blocks(self.model))[0]
        self.theta = {name: by_name[name] for name in names}
        self.phi = {name: p.detach().clone() for name, p in self.theta.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self.inner = adamw(self.model)

    def inner_step(self, step):
        loss_of(self.model, step=step, replica=self.number).backward()
        self.inner.step()
        self.inner.zero_grad()

    def difference(self):
        return {name: self.phi[name] - p.detach() for name, p in self.theta.items()}

    @torch.no_grad()
    def start_again(self, blend=0.0):
        for name, p in self.theta.items():
            p.lerp_(self.phi[name], 1 - blend) if blend else p.copy_(self.phi[name])

    def result(self):
        trained = [p.detach() for p in self.model.parameters()]
        return trained, [self.phi.get(name, p.detach()) for name, p in self.model.named_parameters()]


def mean_of(vectors, codec=None):
    """Mean in the order given, each vector coded as a whole, as a list of parameters in one order."""
    names = list(vectors[0])
    flat = [torch.cat([vector[name].reshape(-1) for name in names]) for vector in vectors]
    total = torch.zeros_like(flat[0])
    for vector in flat:
        total += vector if codec is None else codec.decode(codec.encode(vector), numel=vector.numel())
    total /= len(vectors)
    sizes = [vectors[0][name].numel() for name in names]
    return {n: part.view(vectors[0][n].shape) for n, part in zip(names, total.split(sizes), strict=True)}


def assert_all_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert same(one[0], other[0]), "local parameters"
        assert same(one[1], other[1]), "global parameters"


# NoLoCo


def reference_noloco(*, kind, replicas, count, interval, tau, blend, beta, alpha, gamma, size, seed, codec):
    """Equation 2 of arXiv 2506.10911 with plain dictionaries."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    sent = {}
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval == 0:
            sent[step] = [replica.difference() for replica in everyone]
        if (launched := step - tau) not in sent:
            continue
        groups = RandomPairs(seed=seed, group_size=size).groups(
            round_id=launched // interval - 1, alive=range(replicas)
        )
        before = [replica.phi for replica in everyone]
        for members in groups:
            mean_delta = mean_of([sent[launched][m] for m in members], codec)
            mean_phi = mean_of([before[m] for m in members])
            for replica in (everyone[m] for m in members):
                phi = {}
                for name, own in replica.phi.items():
                    step_of = (mean_delta[name] * beta).add_(own - mean_phi[name], alpha=gamma)
                    replica.momentum[name].mul_(alpha).add_(step_of)
                    phi[name] = own - replica.momentum[name]
                replica.phi = phi
                replica.start_again(blend)
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(
    ("replicas", "interval", "tau", "blend", "size"),
    [(2, 5, 0, 0.0, 2), (4, 5, 2, 0.5, 2), (5, 4, 3, 0.25, 2), (3, 1, 0, 0.0, 2), (1, 4, 1, 0.5, 2), (6, 5, 4, 0.0, 4)],
)
def test_noloco_is_the_papers_equation_bit_for_bit(replicas, interval, tau, blend, size):
    # groups above two would take the exchange that codes the mean again
    codec = block_int8() if size == 2 and replicas > 3 else float32()
    numbers = {"beta": 0.7, "alpha": 0.5, "gamma": 0.6}
    method = noloco(
        sync_interval=interval, overlap_steps=tau, blend=blend, codec=codec, outer_lr=0.7, outer_momentum=0.5,
        pull=0.6, group_size=size, pairing_seed=3,
    )  # fmt: skip
    expected = reference_noloco(
        kind="transformer", replicas=replicas, count=22, interval=interval, tau=tau, blend=blend, size=size, seed=3,
        codec=codec, **numbers,
    )  # fmt: skip
    results = train(method, replicas=replicas, count=22)
    assert_all_same(results, expected)
    if replicas > 3:
        assert not same(results[0][1], results[-1][1]), "replicas keep values of their own"


@pytest.mark.parametrize("kind", KINDS)
def test_noloco_in_one_group_of_all_is_diloco_with_a_heavy_ball_bit_for_bit(kind):
    # powers of two, so that folding the rate into the momentum rounds nothing
    paired = noloco(sync_interval=4, outer_lr=0.5, outer_momentum=0.5, pull=0.5, group_size=2)
    plain = diloco(sync_interval=4, outer_optimizer=HeavyBall(lr=0.5, momentum=0.5))
    assert_all_same(train(paired, kind=kind), train(plain, kind=kind))


@pytest.mark.parametrize("replicas", [3, 5])
def test_noloco_in_one_group_of_any_size_is_diloco_with_a_heavy_ball(replicas):
    paired = noloco(sync_interval=1, outer_lr=0.7, outer_momentum=0.3, group_size=replicas)
    plain = diloco(sync_interval=1, outer_optimizer=HeavyBall(lr=0.7, momentum=0.3))
    results = train(paired, kind="linear", replicas=replicas, count=9)
    for one, other in zip(results, train(plain, kind="linear", replicas=replicas, count=9), strict=True):
        for a, b in zip(one[1], other[1], strict=True):
            # a mean of three equal numbers, and a folded rate, are off by a last bit
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert all(same(one[1], results[0][1]) for one in results)


@pytest.mark.parametrize("replicas", [2, 5, 8])
def test_the_mean_of_noloco_replicas_follows_heavy_ball_on_the_mean_pseudo_gradient(replicas):
    generator = torch.Generator().manual_seed(0)
    update = ConsensusStep(lr=0.7, momentum=0.5, pull=0.9)
    models = [torch.nn.Linear(7, 11).double() for _ in range(replicas)]
    views = [SlowWeightsAndPseudoGradient().bind(model) for model in models]
    for view in views:  # the parts themselves count in float32; the equation is tested in float64
        view.parameters.values = [torch.randn(88, dtype=torch.float64, generator=generator)]
    bound = [update.bind(view) for view in views]
    phi = torch.stack([view.parameters.values[0] for view in views]).mean(0)
    momentum = torch.zeros_like(phi)
    for k in range(12):
        deltas = torch.randn(replicas, 88, dtype=torch.float64, generator=generator)
        slow = torch.stack([view.parameters.values[0] for view in views])
        for members in RandomPairs(seed=1).groups(round_id=k, alive=range(replicas)):
            for m in members:
                for channel, vectors in enumerate((slow, deltas)):
                    average = Average(mean=vectors[list(members)].mean(0), reference_hashes={})
                    bound[m].apply(Round(id=0, fragment=0, channel=channel, launch_step=1, apply_step=1), average)
        momentum = 0.5 * momentum - 0.7 * deltas.mean(0)
        phi = phi + momentum
        mean = torch.stack([view.parameters.values[0] for view in views]).mean(0)
        torch.testing.assert_close(mean, phi, rtol=1e-12, atol=1e-12)


def spread_after(rounds, *, gamma, alpha, replicas=64, group_size=2, columns=100):
    """Spread of `replicas` values after so many outer steps without pseudo-gradients, from a spread of 1."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(replicas, columns, dtype=torch.float64, generator=generator)
    delta = torch.zeros_like(phi)
    for _ in range(rounds):
        order = torch.randperm(replicas, generator=generator)
        grouped = phi[order].view(-1, group_size, columns)
        mean = torch.empty_like(phi)
        mean[order] = grouped.mean(1, keepdim=True).expand_as(grouped).reshape(replicas, columns)
        delta = alpha * delta - gamma * (phi - mean)
        phi = phi + delta
    return float(phi.std(0).square().mean().sqrt())


@pytest.mark.parametrize(
    ("alpha", "group_size"), [(0.0, 2), (0.5, 2), (0.9, 2), (0.5, 4), (0.7, 4), (0.5, 64)], ids=str
)
def test_noloco_replicas_come_together_below_the_limit_and_drift_apart_above(alpha, group_size):
    limit = largest_pull(momentum=alpha, group_size=group_size)
    assert spread_after(1500, gamma=0.95 * limit, alpha=alpha, group_size=group_size) < 0.1
    assert spread_after(1500, gamma=1.05 * limit, alpha=alpha, group_size=group_size) > 10


def test_pairs_at_momentum_one_half_contract_at_a_pull_of_1_45_and_grow_at_1_55():
    assert spread_after(400, gamma=1.45, alpha=0.5) < 0.5
    assert spread_after(400, gamma=1.55, alpha=0.5) > 2
    assert spread_after(400, gamma=0.7, alpha=0.9) > 1e6, "DiLoCo's usual momentum, in pairs"


@pytest.mark.parametrize(
    ("alpha", "pairs", "fours"),
    [(0, 2, 2), (0.3, 1.82, 2.14), (0.5, 1.5, 2), (0.7, 1.02, 1.57), (0.8, 0.72, 1.2), (0.9, 0.38, 0.69),
     (0.95, 0.195, 0.37)],
)  # fmt: skip
def test_the_largest_pull_is_the_known_one_for_groups_of_two_and_four(alpha, pairs, fours):
    assert largest_pull(momentum=alpha, group_size=2) == pytest.approx(pairs, abs=5e-3)
    assert largest_pull(momentum=alpha, group_size=2) == pytest.approx(2 * (1 - alpha**2), rel=1e-12)
    assert largest_pull(momentum=alpha, group_size=4) == pytest.approx(fours, abs=8e-3)


def largest_eigenvalue(*, gamma, alpha, share):
    """Of the recursion of the three moments in `largest_pull`."""
    d = torch.tensor([gamma**2 * share, -2 * alpha * gamma * share, alpha**2], dtype=torch.float64)
    cross = torch.tensor([-gamma * share, alpha, 0], dtype=torch.float64)
    first = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    return float(torch.linalg.eigvals(torch.stack([first + 2 * cross + d, cross + d, d])).abs().max())


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("group_size", [2, 3, 4, 10, 1000])
def test_the_largest_pull_is_where_the_recursion_of_the_moments_stops_shrinking(alpha, group_size):
    limit = largest_pull(momentum=alpha, group_size=group_size)
    for gamma in (0.01, 0.3 * limit, 0.7 * limit, 0.999 * limit):
        assert largest_eigenvalue(gamma=gamma, alpha=alpha, share=1 - 1 / group_size) < 1
    assert largest_eigenvalue(gamma=1.001 * limit, alpha=alpha, share=1 - 1 / group_size) > 1


@pytest.mark.parametrize("group_size", [2, 3, 5])
@pytest.mark.parametrize("replicas", range(2, 24))
def test_uneven_groups_of_few_replicas_bear_no_less_than_even_ones_of_many(group_size, replicas):
    groups = RandomPairs(seed=0, group_size=group_size).groups(round_id=0, alive=range(replicas))
    share = sum(len(group) - 1 for group in groups) / (replicas - 1)
    assert share >= 1 - 1 / group_size
    limit = largest_pull(momentum=0.8, group_size=group_size)
    assert largest_eigenvalue(gamma=0.999 * limit, alpha=0.8, share=share) < 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: noloco(outer_momentum=0.9), r"below 0.38 with outer_momentum 0.9 and groups of 2, got 0.7"),
        (lambda: noloco(pull=1.5), "below 1.5 with outer_momentum 0.5"),
        (lambda: noloco(pull=2.0, group_size=4), "and groups of 4, got 2.0"),
        (lambda: noloco(pull=0.0), "the pull must be positive, got 0.0"),
        (lambda: noloco(group_size=1), "group_size must be at least 2"),
        (lambda: noloco(overlap_steps=50), "below sync_interval"),
        (lambda: noloco(outer_momentum=1.0), "outer momentum"),
        (lambda: noloco(outer_lr=0.0), "outer lr"),
        (lambda: noloco(blend=1.0), "blend"),
        (lambda: co2(outer_clip=0.0), "outer clip must be positive, got 0.0"),
        (lambda: co2(outer_momentum=1.0), "outer momentum"),
        (lambda: co2(sync_interval=0), "sync_interval"),
        (lambda: slowmo(outer_lr=0.0), "outer lr"),
    ],
)
def test_what_cannot_work_is_refused_with_its_value_and_the_limit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_four_in_a_group_bear_a_pull_that_two_do_not():
    assert noloco(pull=1.9, group_size=4).update(8).pull == 1.9
    with pytest.raises(ValueError, match="pull"):
        noloco(pull=1.9, group_size=2)


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [20, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noloco_ends_with_one_model_the_mean_of_the_local_ones(replicas, count, dtype):
    method = noloco(sync_interval=5, overlap_steps=2)
    merged = train(method, kind="linear", replicas=replicas, count=count, final=True, dtype=dtype)
    for local, everywhere in merged:
        assert same(everywhere, merged[0][1])
        assert same(local, everywhere)
    plain = {"kind": "linear", "replicas": replicas, "count": count, "dtype": dtype}
    trained, merged = (train(noloco(sync_interval=5), final=final, **plain) for final in (False, True))
    for number, everywhere in enumerate(merged[0][1]):
        mean = torch.stack([local[number].float() for local, _ in trained]).mean(0)
        # without overlap, nothing but the final exchange happens at the end
        torch.testing.assert_close(everywhere.float(), mean.to(dtype).float(), rtol=1e-6, atol=1e-6)


def test_noloco_sends_to_its_partner_alone_until_the_last_word():
    method = noloco(sync_interval=4, pairing_seed=5)
    groups = RandomPairs(seed=5)

    def replica_main(loopback):
        transport = RecordingTransport(loopback)
        model = build("linear")
        optimizer = wrap(model, transport, method, adamw(model))
        steps(model, optimizer, 12, replica=transport.replica)
        sent = [t for t in transport.log if t.direction == "sent" and t.kind == Kind.ROUND.label]
        for transfer in sent:
            partners = groups.peers(round_id=transfer.round_id // 2, me=transport.replica, alive=range(6)).others
            assert transfer.peer in partners
        return len(sent), sum(t.payload_bytes for t in sent)

    numel = sum(p.numel() for p in build("linear").parameters())
    # three outer steps with two vectors each; the slow weights of the fourth are on their way from step 13 on
    assert set(thinwire.run_replicas(6, replica_main)) == {(6, 6 * 4 * numel)}


def test_slow_weights_are_on_the_wire_while_the_inner_steps_run():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, noloco(sync_interval=5), adamw(model))
        seen = []
        for step in range(1, 12):
            steps(model, optimizer, 1, replica=transport.replica, start=step - 1)
            seen.append([round.channel for round in optimizer.rounds_in_flight])
        return seen

    for seen in thinwire.run_replicas(4, replica_main):
        assert seen == [[0], [0], [0], [0], [], [0], [0], [0], [0], [], [0]]


# CO2 and SlowMo


def reference_co2(*, kind, replicas, count, interval, alpha, beta, phi, has_gap, codec):
    """Algorithm 1 of arXiv 2401.16265 with plain dictionaries, and with both of its anchors."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    anchor = before = everyone[0].phi
    momentum, sent = everyone[0].momentum, None
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        arrived, sent = sent, [replica.difference() for replica in everyone]
        if arrived is not None:
            delta = mean_of(arrived, codec)
            moved, measured = (math.sqrt(sum(float(v.double().square().sum()) for v in d.values())) for d in (
                {n: anchor[n].double() - before[n].double() for n in anchor}, delta
            ))  # fmt: skip
            gap = 1 + round(1024 * moved / measured) / 1024 if has_gap else 1.0
            before, anchor = anchor, dict(anchor)
            for name in anchor:
                momentum[name].mul_(beta).add_(delta[name] / gap)
                momentum[name] = momentum[name].clamp(-phi, phi)
                anchor[name] = anchor[name].add(momentum[name], alpha=-alpha)
        for replica in everyone:
            replica.phi = anchor
            replica.start_again()
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(
    ("replicas", "interval", "count", "has_gap", "phi"),
    [
        (2, 5, 23, True, 1.0),
        (3, 4, 24, True, 0.01),
        (2, 1, 9, True, 1.0),
        (1, 4, 18, True, 1.0),
        (2, 5, 23, False, 0.02),
    ],
)
def test_co2_is_the_papers_algorithm_bit_for_bit(replicas, interval, count, has_gap, phi):
    codec = float32() if replicas == 3 else e3m0()
    method = co2(
        sync_interval=interval, codec=codec, outer_lr=0.9, outer_momentum=0.4, outer_clip=phi, has_gap_penalty=has_gap
    )
    expected = reference_co2(
        kind="transformer", replicas=replicas, count=count, interval=interval, alpha=0.9, beta=0.4, phi=phi,
        has_gap=has_gap, codec=codec,
    )  # fmt: skip
    results = train(method, replicas=replicas, count=count)
    assert_all_same(results, expected)
    assert all(same(one[1], results[0][1]) for one in results)


def reference_slowmo(*, kind, replicas, count, interval, alpha, beta):
    """Algorithm 1 of arXiv 1910.00643 with exact averages, and a constant inner rate that cancels."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    anchor, momentum = everyone[0].phi, everyone[0].momentum
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        delta = mean_of([replica.difference() for replica in everyone])
        for name in anchor:
            momentum[name].mul_(beta).add_(delta[name])
        anchor = {name: value.add(momentum[name], alpha=-alpha) for name, value in anchor.items()}
        for replica in everyone:
            replica.phi = anchor
            replica.start_again()
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(("kind", "replicas"), [("transformer", 2), ("conv", 3), ("unused", 5), ("linear", 1)])
def test_co2_without_delay_is_slowmo_bit_for_bit(kind, replicas):
    numbers = {"sync_interval": 4, "outer_lr": 0.9, "outer_momentum": 0.6}
    without_delay = train(co2(**numbers, outer_clip=None, is_delayed=False), kind=kind, replicas=replicas)
    assert_all_same(without_delay, train(slowmo(**numbers), kind=kind, replicas=replicas))
    expected = reference_slowmo(kind=kind, replicas=replicas, count=23, interval=4, alpha=0.9, beta=0.6)
    assert_all_same(without_delay, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_co2_run_that_ends_between_two_rounds_keeps_its_last_steps(dtype):
    method = co2(sync_interval=5)
    trained = train(method, replicas=3, count=13, dtype=dtype)
    merged = train(method, replicas=3, count=13, final=True, dtype=dtype)
    at_launch = train(method, replicas=3, count=10, final=True, dtype=dtype)
    for number, everywhere in enumerate(merged[0][1]):
        work = torch.stack([(local[number].float() - start[number].float()) for local, start in trained]).mean(0)
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(
            everywhere.float(), at_launch[0][1][number].float() + work, rtol=tolerance, atol=tolerance
        )
    for local, everywhere in merged:
        assert same(local, merged[0][0])
        assert same(everywhere, merged[0][1])


def distance_of(rounds, *, share, alpha, beta):
    """Distance from the minimum of a quadratic, whose inner steps go `share` of the way, after CO2's outer steps."""
    value, before, momentum = torch.ones(1), torch.ones(1), torch.zeros(1)
    outer = StaleHeavyBall(lr=alpha, momentum=beta, has_gap_penalty=False, clip=None)
    for _ in range(rounds):
        delta, before = share * before, value.clone()
        outer.step(value, delta, momentum)
    return float(value.abs())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.8])
def test_a_delay_of_one_round_bears_progress_up_to_one_minus_the_momentum(beta):
    assert distance_of(4000, share=0.97 * (1 - beta), alpha=1.0, beta=beta) < 0.1
    assert distance_of(4000, share=1.03 * (1 - beta), alpha=1.0, beta=beta) > 10


def test_the_gap_penalty_tames_the_delay():
    for has_penalty, is_near in ((True, True), (False, False)):
        generator = torch.Generator().manual_seed(0)
        value = torch.randn(101, generator=generator)
        before, momentum = value.clone(), torch.zeros(101)
        outer = StaleHeavyBall(lr=1.0, momentum=0.5, has_gap_penalty=has_penalty, clip=None)
        for _ in range(200):
            delta, before = 0.7 * before, value.clone()
            outer.step(value, delta, momentum)
        assert (float(value.abs().max()) < 0.01) == is_near


def test_a_gap_counts_the_rounds_worth_of_movement_between_two_anchors():
    outer = StaleHeavyBall(lr=0.5, momentum=0.9)
    delta = torch.tensor([3.0, 4.0])
    assert outer.gap(delta, torch.zeros(2)) == 1
    assert outer.gap(delta, torch.tensor([0.0, 10.0])) == 2
    assert outer.gap(torch.zeros(2), torch.ones(2)) == 1
    assert outer.gap(torch.zeros(0), torch.zeros(0)) == 1, "an empty shard"
    # a last bit more or less in the vectors does not change it
    assert outer.gap(delta * (1 + 2**-22), torch.tensor([0.1, 7.0])) == outer.gap(delta, torch.tensor([0.1, 7.0]))


def test_clipping_cuts_the_momentum_itself():
    value, momentum = torch.zeros(3), torch.zeros(3)
    StaleHeavyBall(lr=2.0, momentum=0.5, clip=0.25).step(value, torch.tensor([1.0, -1.0, 0.125]), momentum)
    assert momentum.tolist() == [0.25, -0.25, 0.125]
    assert value.tolist() == [-0.5, 0.5, -0.25]


def test_parts_of_one_method_are_refused_in_another():
    with pytest.raises(ValueError, match="SlowWeightsAndPseudoGradient"):
        wrap(build("linear"), None, replace(diloco(), update=noloco().update))
    with pytest.raises(ValueError, match="use PseudoGradient"):
        wrap(build("linear"), None, replace(all_reduce(), update=co2().update))
