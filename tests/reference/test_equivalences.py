"""Every method against a single-process reference, and against each other where they must coincide."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.small_models import build, loss_of
from thinwire.codecs import bfloat16, block_int8, e3m0, float32
from thinwire.methods import all_reduce, diloco, local_sgd, streaming_diloco
from thinwire.sync.fragments import find_blocks
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import PlainSGD

KINDS = ("transformer", "untied", "conv", "lstm", "unused", "linear")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(method: Method, *, kind="transformer", replicas=2, steps=23, inner=adamw, dtype=None, final=False):
    """Train in the loopback world; return per replica (local parameters, global parameters)."""

    def replica_main(transport):
        model = build(kind)
        if dtype is not None:
            model.to(dtype)
        optimizer = thinwire.DistributedOptimizer(model, inner(model), method=method, transport=transport)
        for step in range(1, steps + 1):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        if final:
            optimizer.close(final_exchange=True)
        local = {name: p.detach().clone() for name, p in model.named_parameters()}
        with optimizer.global_parameters():
            return local, {name: p.detach().clone() for name, p in model.named_parameters()}

    return thinwire.run_replicas(replicas, replica_main)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_with_one_fragment_and_no_overlap_is_diloco_bit_for_bit(kind):
    streaming = streaming_diloco(sync_interval=5, overlap_steps=0, blend=0, codec=float32(), num_fragments=1)
    for one, other in zip(train(streaming, kind=kind), train(diloco(sync_interval=5), kind=kind), strict=True):
        assert_same(one[0], other[0])
        assert_same(one[1], other[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_all_replicas_hold_the_same_global_bits(kind, replicas):
    method = streaming_diloco(sync_interval=7, overlap_steps=3, codec=e3m0(), layers_per_fragment=2)
    results = train(method, kind=kind, replicas=replicas)
    for _, other in results[1:]:
        assert_same(results[0][1], other)


@pytest.mark.parametrize("kind", ["transformer", "lstm", "linear", "unused"])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_all_reduce_equals_one_process_with_the_mean_gradient(kind, replicas):
    # SGD inside: AdamW would blow the rounding of gradients that are zero in exact arithmetic up to whole steps
    results = train(all_reduce(), kind=kind, replicas=replicas, steps=6, inner=sgd)
    model = build(kind)
    optimizer = sgd(model)
    for step in range(1, 7):
        (sum(loss_of(model, step=step, replica=r) for r in range(replicas)) / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    for local, _ in results:
        for name, parameter in model.named_parameters():
            # sums of float32 gradients in another order
            torch.testing.assert_close(local[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 3])
def test_diloco_with_interval_1_and_sgd_inside_and_outside_is_the_mean_gradient(replicas):
    def inner(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    method = diloco(sync_interval=1, outer_optimizer=PlainSGD(lr=1.0))
    for one, other in zip(
        train(method, inner=inner, replicas=replicas), train(all_reduce(), inner=inner, replicas=replicas), strict=True
    ):
        for name in one[0]:
            torch.testing.assert_close(one[0][name], other[0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_diloco_with_a_plain_outer_step_is_federated_averaging(replicas):
    interval, rounds = 4, 3
    results = train(
        diloco(sync_interval=interval, outer_optimizer=PlainSGD(lr=1.0)), replicas=replicas, steps=12, inner=sgd
    )
    models = [build("transformer") for _ in range(replicas)]
    optimizers = [sgd(model) for model in models]
    for step in range(1, interval * rounds + 1):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, step=step, replica=replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % interval == 0:
            mean_into_all(models)
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(results[0][1][name], parameter.detach(), rtol=1e-4, atol=1e-6)


def mean_into_all(models):
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.double() for p in parameters]).mean(0)
            for parameter in parameters:
                parameter.copy_(mean)


def test_local_sgd_is_diloco_with_a_plain_outer_step():
    one = train(local_sgd(sync_interval=5), replicas=3)
    other = train(diloco(sync_interval=5, outer_optimizer=PlainSGD(lr=1.0)), replicas=3)
    for (a, b), (c, d) in zip(one, other, strict=True):
        assert_same(a, c)
        assert_same(b, d)


def reference_streaming(  # noqa: C901
    *, kind, replicas, steps, interval, taus, alpha, lr, mu, fragments, codec, inner=adamw
):
    """Algorithm 2 of arXiv 2501.18512 with plain dictionaries, torch's own SGD outside, and no wire."""
    models = [build(kind) for _ in range(replicas)]
    optimizers = [inner(model) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    globals_ = [{n: p.detach().float().clone() for n, p in params.items()} for params in named]
    outers = []
    for m in range(replicas):
        for value in globals_[m].values():
            value.requires_grad_(True)
        outers.append(
            [torch.optim.SGD([globals_[m][n] for n in names], lr=lr, momentum=mu, nesterov=True) for names in fragments]
        )
    sent = {}
    for t in range(1, steps + 1):
        for m in range(replicas):
            loss_of(models[m], step=t, replica=m).backward()
            optimizers[m].step()
            optimizers[m].zero_grad()
        for p, names in enumerate(fragments):
            offset = p * interval // len(fragments)
            since = t - offset
            if since >= interval and since % interval == 0:
                sent[p, t] = [
                    torch.cat([(globals_[m][n] - named[m][n]).detach().reshape(-1) for n in names])
                    for m in range(replicas)
                ]
            for m in range(replicas):
                launched = t - taus[m]
                if launched - offset < interval or (launched - offset) % interval:
                    continue
                mean = torch.zeros(sent[p, launched][0].numel())
                for delta in sent[p, launched]:
                    mean += codec.decode(codec.encode(delta), numel=delta.numel())
                mean /= replicas
                start = 0
                for n in names:
                    value = globals_[m][n]
                    value.grad = mean[start : start + value.numel()].view(value.shape).clone()
                    start += value.numel()
                outers[m][p].step()
                with torch.no_grad():
                    for n in names:
                        named[m][n].lerp_(globals_[m][n], 1 - alpha) if alpha else named[m][n].copy_(globals_[m][n])
    return [
        ({n: p.detach() for n, p in named[m].items()}, {n: g.detach() for n, g in globals_[m].items()})
        for m in range(replicas)
    ]


@pytest.mark.parametrize(
    ("replicas", "interval", "taus", "alpha"),
    [
        (2, 6, (0, 0), 0.0),
        (2, 6, (1, 1), 0.5),
        (2, 6, (5, 5), 0.25),  # several fragments in flight
        (3, 7, (0, 3, 6), 0.5),  # a different tau on each replica
        (1, 4, (2,), 0.5),
    ],
)
@pytest.mark.parametrize("codec", [float32(), e3m0(), bfloat16(), block_int8()], ids=lambda c: c.name)
def test_streaming_equals_the_papers_algorithm_in_one_process_bit_for_bit(replicas, interval, taus, alpha, codec):
    method = streaming_diloco(
        sync_interval=interval, overlap_steps=taus, blend=alpha, codec=codec, layers_per_fragment=2,
        outer_lr=0.7, outer_momentum=0.9, exchange="all-gather",
    )  # fmt: skip
    fragments = method.view.fragments.partition(find_blocks(build("transformer")))
    assert len(fragments) == 4
    expected = reference_streaming(
        kind="transformer", replicas=replicas, steps=29, interval=interval, taus=taus, alpha=alpha, lr=0.7, mu=0.9,
        fragments=fragments, codec=codec,
    )  # fmt: skip
    for one, other in zip(train(method, replicas=replicas, steps=29), expected, strict=True):
        assert_same(one[0], other[0])
        assert_same(one[1], other[1])


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_all_gather_and_two_phase_agree_with_a_lossless_code(replicas):
    def method(exchange):
        return streaming_diloco(sync_interval=5, overlap_steps=2, codec=float32(), exchange=exchange)

    gathered, reduced = (train(method(e), replicas=replicas, inner=sgd) for e in ("all-gather", "two-phase"))
    for one, other in zip(gathered, reduced, strict=True):
        assert_same(one[1], other[1])


def test_bfloat16_parameters_are_held_globally_in_float32():
    method = diloco(sync_interval=3, outer_lr=0.01)

    def replica_main(transport):
        model = build("transformer").to(torch.bfloat16)
        optimizer = thinwire.DistributedOptimizer(model, sgd(model), method=method, transport=transport)
        for step in range(1, 10):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = optimizer.state_dict()["sync"]["global"]
        assert all(value.dtype == torch.float32 for value in values.values())
        assert any((value != value.bfloat16().float()).any() for value in values.values()), (
            "small steps must not vanish"
        )
        return values

    one, other = thinwire.run_replicas(2, replica_main)
    assert_same(one, other)


def test_a_final_exchange_takes_the_last_steps_into_the_global_parameters():
    method = diloco(sync_interval=100, outer_optimizer=PlainSGD(lr=1.0))
    before = dict(copy.deepcopy(build("transformer")).named_parameters())
    without = train(method, steps=5)[0][1]
    assert_same(without, {name: p.detach() for name, p in before.items()})
    results = train(method, steps=5, final=True)
    assert_same(results[0][1], results[1][1])
    assert any(not torch.equal(results[0][1][name], without[name]) for name in without)
    assert_same(results[0][0], results[0][1])


def test_a_final_exchange_moves_nothing_where_nothing_has_happened_since_the_last_round():
    method = diloco(sync_interval=5, outer_lr=0.7, outer_momentum=0.9)
    flushed, merged = (train(method, steps=15, final=final) for final in (False, True))
    assert_same(flushed[0][1], merged[0][1])


def test_the_last_replica_alone_trains_as_the_plain_inner_optimizer_between_rounds():
    results = train(streaming_diloco(sync_interval=50), replicas=1, steps=10)
    model = build("transformer")
    optimizer = adamw(model)
    for step in range(1, 11):
        loss_of(model, step=step, replica=0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(results[0][0], {name: p.detach() for name, p in model.named_parameters()})
