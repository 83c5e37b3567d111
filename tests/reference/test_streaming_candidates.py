"""Options of Streaming DiLoCo from other papers, against their equations in one process."""

from __future__ import annotations

import copy

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import Replica, adamw, assert_all_same, train
from tests.reference.small_models import build
from thinwire.codecs import block_2bit, float32, sign
from thinwire.methods import iso_loco, muloco, streaming_diloco
from thinwire.sync.fragments import Pattern, find_blocks

LR, MU = 0.7, 0.9


def nesterov(replica, mean, *, lr=LR, mu=MU):
    for name, delta in mean.items():
        momentum = replica.momentum[name].mul_(mu).add_(delta)
        replica.phi[name] = replica.phi[name].add(delta.clone().add_(momentum, alpha=mu), alpha=-lr)


def at_once(**options):
    return streaming_diloco(
        sync_interval=4, overlap_steps=0, codec=float32(), num_fragments=1, outer_lr=LR, outer_momentum=MU, **options
    )


def with_residuals(codec, *, replicas, count, interval, num_fragments, decay=1.0):
    """Error feedback, one residual a fragment and replica; fragments take turns and none overlaps."""
    everyone = [Replica("transformer", number) for number in range(replicas)]
    fragments = Pattern(num_fragments=num_fragments).partition(find_blocks(everyone[0].model))
    residuals = {}
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        for p, names in enumerate(fragments):
            since = step - p * interval // num_fragments
            if since < interval or since % interval:
                continue
            sent = []
            for replica in everyone:
                delta = torch.cat([(replica.phi[n] - replica.theta[n].detach()).reshape(-1) for n in names])
                total = delta + decay * residuals.get((p, replica.number), 0)
                sent.append(codec.decode(codec.encode(total), numel=total.numel()))
                residuals[p, replica.number] = total - sent[-1]
            mean = torch.zeros_like(sent[0])
            for part in sent:
                mean += part
            parts = (mean / replicas).split([everyone[0].phi[n].numel() for n in names])
            for replica in everyone:
                nesterov(replica, {n: part.view(replica.phi[n].shape) for n, part in zip(names, parts, strict=True)})
                with torch.no_grad():
                    for name in names:
                        replica.theta[name].copy_(replica.phi[name])
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_muloco_with_fragments_is_its_equations_bit_for_bit(num_fragments):
    method = muloco(sync_interval=6, num_fragments=num_fragments, outer_lr=LR, outer_momentum=MU)
    found = train(method, kind="transformer", replicas=3, count=26)
    assert_all_same(found, with_residuals(block_2bit(), replicas=3, count=26, interval=6, num_fragments=num_fragments))


@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_error_feedback_of_streaming_diloco_is_its_equations_bit_for_bit(decay):
    method = streaming_diloco(
        sync_interval=6, overlap_steps=0, num_fragments=3, codec=sign(), error_feedback=decay, outer_lr=LR,
        outer_momentum=MU,
    )  # fmt: skip
    found = train(method, kind="transformer", replicas=3, count=24)
    expected = with_residuals(sign(), replicas=3, count=24, interval=6, num_fragments=3, decay=decay)
    assert_all_same(found, expected)


def test_error_feedback_of_a_lossless_code_keeps_nothing():
    plain, other = (at_once(error_feedback=share) for share in (None, 1.0))
    assert plain.describe(num_replicas=3) == other.describe(num_replicas=3)
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 1.5"):
        streaming_diloco(error_feedback=1.5)


CANDIDATES = {
    "muloco": lambda: muloco(sync_interval=5, overlap_steps=2, num_fragments=None),
    "residuals": lambda: iso_loco(sync_interval=5, codec=sign(), error_feedback=0.9, exchange="two-phase"),
}


def in_two_parts(method, *, stop, count=23):
    def replica_main(transport):
        model = build("transformer")
        optimizer = wrap(model, transport, method(), adamw(model))
        steps(model, optimizer, stop or count, replica=transport.replica)
        if stop:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = build("transformer", seed=5)
            optimizer = wrap(model, transport, method(), adamw(model))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            steps(model, optimizer, count - stop, replica=transport.replica, start=stop)
        with optimizer.global_parameters():
            return values(model)

    return thinwire.run_replicas(3, replica_main)


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_resume_bit_for_bit_and_replicas_agree(name):
    whole, resumed = in_two_parts(CANDIDATES[name], stop=0), in_two_parts(CANDIDATES[name], stop=12)
    for one, other in zip(whole, resumed, strict=True):
        assert same(one, other)
        assert same(one, whole[0])
