"""Pier against its equations in one process: lazy start, momentum warm-up, scheduled outer step."""

from __future__ import annotations

import pytest

import thinwire
from tests.reference.loops import same, values, wrap
from tests.reference.plain_replicas import Replica, adamw, assert_all_same, mean_of, train
from tests.reference.small_models import build, loss_of
from thinwire.codecs import float32
from thinwire.elastic.elastic_method import elastic
from thinwire.methods import all_reduce, pier, streaming_diloco
from thinwire.methods.pier import ScheduledNesterov
from thinwire.transport.recording import RecordingTransport

INTERVAL, LAZY, TOTAL = 4, 8, 40


def reference_pier(*, replicas, count, warms, schedule=None):  # noqa: C901
    everyone = [Replica("transformer", number) for number in range(replicas)]
    for step in range(1, count + 1):
        for replica in everyone:
            loss_of(replica.model, step=step, replica=replica.number).backward()
        if step <= LAZY:
            mean = mean_of([{name: p.grad for name, p in replica.theta.items()} for replica in everyone])
            for replica in everyone:
                for name, p in replica.theta.items():
                    p.grad.copy_(mean[name])
        for replica in everyone:
            replica.inner.step()
            replica.inner.zero_grad()
        if step % INTERVAL:
            continue
        differences = [replica.difference() for replica in everyone]
        mean = differences[0] if step <= LAZY else mean_of(differences)
        for replica in everyone:
            for name, delta in mean.items():
                momentum = replica.momentum[name]
                if step <= LAZY:
                    if warms:
                        momentum.mul_(0.9).add_(delta)
                    replica.phi[name] = replica.theta[name].detach().clone()
                    continue
                lr, mu = schedule(step) if schedule else (0.7, 0.9)
                momentum.mul_(mu).add_(delta)
                replica.phi[name] = replica.phi[name].add(delta.clone().add_(momentum, alpha=mu), alpha=-lr)
            replica.start_again()
    return [replica.result() for replica in everyone]


def papers_schedule(step):
    since = (step - LAZY) / TOTAL
    mu = 0.99 if since <= 0.05 else 0.95 if since <= 0.1 else 0.9
    return (1.1 * since / 0.1 if since < 0.1 else 1.1 if step <= 0.8 * TOTAL else 0.9), mu


def at_once(**options):
    return pier(sync_interval=INTERVAL, lazy_steps=LAZY, overlap_steps=0, codec=float32(), num_fragments=1, **options)


@pytest.mark.parametrize("replicas", [1, 3])
def test_pier_is_its_equations_bit_for_bit(replicas):
    found = train(at_once(total_steps=TOTAL), kind="transformer", replicas=replicas, count=TOTAL - 1)
    expected = reference_pier(replicas=replicas, count=TOTAL - 1, warms=True, schedule=papers_schedule)
    assert_all_same(found, expected)


def test_a_lazy_start_alone_keeps_rate_and_momentum():
    found = train(at_once(outer_lr=0.7, warms_momentum=False), kind="transformer", count=18)
    assert_all_same(found, reference_pier(replicas=2, count=18, warms=False))


def test_without_lazy_steps_it_is_streaming_diloco():
    options = {"sync_interval": 5, "overlap_steps": 2, "layers_per_fragment": 1}
    assert_all_same(
        train(pier(**options), kind="transformer", count=17),
        train(streaming_diloco(**options), kind="transformer", count=17),
    )


def test_a_lazy_start_to_the_end_is_all_reduce():
    found = train(pier(sync_interval=5, lazy_steps=20), kind="transformer", count=20)
    assert_all_same(found, train(all_reduce(), kind="transformer", count=20))


def test_the_lazy_start_sends_the_bytes_of_gradients_and_then_of_pseudo_gradients():
    def bytes_of(method, count):
        def replica_main(loopback):
            transport, model = RecordingTransport(loopback), build("transformer")
            optimizer = wrap(model, transport, method, adamw(model))
            for step in range(1, count + 1):
                loss_of(model, step=step, replica=transport.replica).backward()
                optimizer.average_gradients()
                optimizer.step()
                optimizer.zero_grad()
            return transport.log.totals("sent").payload_bytes, values(model)

        return thinwire.run_replicas(2, replica_main)

    lazy = {"sync_interval": INTERVAL, "overlap_steps": 1, "layers_per_fragment": 1}
    whole, _ = bytes_of(pier(lazy_steps=LAZY, **lazy), LAZY + 14)
    gradients, _ = bytes_of(all_reduce(), LAZY)
    pseudo, _ = bytes_of(streaming_diloco(**lazy), 14)
    start, _ = bytes_of(all_reduce(), 0)
    assert whole[0] - start[0] == gradients[0] + pseudo[0] - 2 * start[0]
    once = train(pier(lazy_steps=LAZY, **lazy), kind="transformer", count=LAZY + 14)
    assert same(whole[1], once[0][0]), "gradients averaged before clipping are averaged once"


def test_what_does_not_go_with_a_lazy_start_is_refused_by_name():
    class Session:
        def active(self):
            return (0,)

    with pytest.raises(ValueError, match="pier exchanges more than plain pseudo-gradients"):
        elastic(pier(lazy_steps=30), session=Session())
    model = build("linear")
    optimizer = wrap(model, None, pier(lazy_steps=30))
    with pytest.raises(ValueError, match="without closure"):
        optimizer.step(lambda: loss_of(model, step=1, replica=0))
    optimizer.abandon()
    with pytest.raises(ValueError, match="multiple of sync_interval"):
        pier(lazy_steps=31)
    with pytest.raises(ValueError, match="total_steps must be above"):
        ScheduledNesterov(lazy_steps=30, total_steps=30)
