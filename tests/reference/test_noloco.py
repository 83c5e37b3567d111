"""NoLoCo against its paper's equation in one process, its limits, and what it is in special cases."""

from __future__ import annotations

import copy

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import Replica, adamw, assert_all_same, mean_of, train
from tests.reference.small_models import build
from thinwire.averaging.mixing import RandomPairs
from thinwire.averaging.round_context import Average
from thinwire.codecs import block_int8, float32
from thinwire.methods import co2, diloco, noloco, slowmo
from thinwire.methods.noloco import ConsensusStep, SlowWeightsAndPseudoGradient, largest_pull
from thinwire.sync.outer_optimizer import HeavyBall
from thinwire.sync.schedule import Round
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

KINDS = ("conv", "unused", "linear")


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
        drawn = RandomPairs(seed=seed, group_size=size)
        before = [replica.phi for replica in everyone]
        for members in drawn.groups(round_id=launched // interval - 1, alive=range(replicas)):
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
        kind="conv", replicas=replicas, count=17, interval=interval, tau=tau, blend=blend, size=size, seed=3,
        codec=codec, **numbers,
    )  # fmt: skip
    results = train(method, replicas=replicas, count=17)
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
    models = [torch.nn.Linear(7, 11) for _ in range(replicas)]
    views = [SlowWeightsAndPseudoGradient().bind(model) for model in models]
    for view in views:  # the parts themselves count in float32; the equation is tested in float64
        view.parameters.values = [torch.randn(88, dtype=torch.float64, generator=generator)]
    states = [update.init(view) for view in views]
    phi = torch.stack([view.parameters.values[0] for view in views]).mean(0)
    momentum = torch.zeros_like(phi)
    for k in range(12):
        deltas = torch.randn(replicas, 88, dtype=torch.float64, generator=generator)
        slow = torch.stack([view.parameters.values[0] for view in views])
        for members in RandomPairs(seed=1).groups(round_id=k, alive=range(replicas)):
            for m in members:
                for channel, vectors in enumerate((slow, deltas)):
                    average = Average(mean=vectors[list(members)].mean(0), reference_hashes={})
                    round = Round(id=0, fragment=0, channel=channel, launch_step=1, apply_step=1)
                    update.apply(states[m], round, average)
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
        if phi.abs().max() > 1e12:
            break
    return float(phi.std(0).square().mean().sqrt())


@pytest.mark.parametrize(
    ("alpha", "group_size"), [(0.0, 2), (0.5, 2), (0.9, 2), (0.5, 4), (0.7, 4), (0.5, 64)], ids=str
)
def test_noloco_replicas_come_together_below_the_limit_and_drift_apart_above(alpha, group_size):
    limit = largest_pull(momentum=alpha, group_size=group_size)
    assert spread_after(1500, gamma=0.9 * limit, alpha=alpha, group_size=group_size) < 0.1
    assert spread_after(1500, gamma=1.2 * limit, alpha=alpha, group_size=group_size) > 10


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
        sent = [t for t in transport.log if t.direction == "sent" and t.kind == ROUNDS.name]
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


@pytest.mark.parametrize("stop", range(1, 11))
def test_noloco_resumes_in_any_phase_with_the_same_bits(stop):
    method = noloco(sync_interval=5, overlap_steps=2, pairing_seed=2)

    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, method, adamw(model))
        steps(model, optimizer, stop, replica=transport.replica)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        steps(model, optimizer, 17 - stop, replica=transport.replica, start=stop)
        unbroken = values(model)
        model = build("linear", seed=9)
        optimizer = wrap(model, transport, method, adamw(model))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        steps(model, optimizer, 17 - stop, replica=transport.replica, start=stop)
        return same(values(model), unbroken)

    assert all(thinwire.run_replicas(5, replica_main))
