"""Options of Streaming DiLoCo from other papers, against their equations in one process."""

from __future__ import annotations

import copy

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import Replica, adamw, assert_all_same, mean_of, train
from tests.reference.small_models import build
from thinwire.codecs import block_2bit, float32, sign
from thinwire.elastic.elastic_method import elastic
from thinwire.methods import iso_loco, muloco, pier, streaming_diloco
from thinwire.sync.fragments import Pattern, find_blocks
from thinwire.sync.outer_optimizer import Nesterov, Restarted

LR, MU = 0.7, 0.9


def nesterov(replica, mean, *, lr=LR, mu=MU):
    for name, delta in mean.items():
        momentum = replica.momentum[name].mul_(mu).add_(delta)
        replica.phi[name] = replica.phi[name].add(delta.clone().add_(momentum, alpha=mu), alpha=-lr)


def radial_mean(differences, *, embeddings):
    """Mean length times direction of the mean of unit vectors, for tensors with a direction (arXiv 2604.21428)."""
    found = {}
    for name in differences[0]:
        parts = [difference[name].double() for difference in differences]
        plain = sum(parts) / len(parts)
        if plain.dim() < 2 or name in embeddings:
            found[name] = plain.float()
            continue
        direction = sum(part / part.norm() for part in parts)
        found[name] = (direction / direction.norm() * (sum(part.norm() for part in parts) / len(parts))).float()
    return found


def matrices(tensors):
    return [tensor for tensor in tensors if tensor.dim() >= 2]


def loop(replicas, count, interval, *, join=mean_of, restart_every=None, kind="transformer"):
    everyone = [Replica(kind, number) for number in range(replicas)]
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        mean = join([replica.difference() for replica in everyone])
        for replica in everyone:
            if restart_every and (step // interval - 1) % restart_every == 0:
                for momentum in replica.momentum.values():
                    momentum.zero_()
            nesterov(replica, mean)
            replica.start_again()
    return [replica.result() for replica in everyone]


def at_once(**options):
    return streaming_diloco(
        sync_interval=4, overlap_steps=0, codec=float32(), num_fragments=1, outer_lr=LR, outer_momentum=MU, **options
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_norm_preserving_mean_is_its_equation(replicas):
    model = build("transformer")
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    assert embeddings
    found = train(at_once(preserve_norm=True), kind="transformer", replicas=replicas, count=14)
    expected = loop(replicas, 14, 4, join=lambda parts: radial_mean(parts, embeddings=embeddings))
    plain = train(at_once(), kind="transformer", replicas=replicas, count=14)
    for one, other in zip(found, expected, strict=True):
        # a bias of attention keys has no gradient but rounding errors, which AdamW makes as large as any other
        for tensor, naive in zip(matrices(one[1]), matrices(other[1]), strict=True):
            torch.testing.assert_close(tensor, naive, rtol=1e-4, atol=1e-5)
    far = max(float((a - b).abs().max()) for a, b in zip(matrices(found[0][1]), matrices(plain[0][1]), strict=True))
    assert (far > 1e-3) == (replicas > 1), "one replica has nothing to preserve"


@pytest.mark.parametrize("every", [1, 3])
def test_a_restarted_momentum_is_its_equation_bit_for_bit(every):
    found = train(at_once(restart_every=every), kind="transformer", count=30)
    assert_all_same(found, loop(2, 30, 4, restart_every=every))
    plain = train(at_once(), kind="transformer", count=30)
    assert not same(found[0][1], plain[0][1])


def test_the_papers_normalised_momentum_is_nesterov_with_a_smaller_rate():
    nu, beta, generator = 0.9, 0.7, torch.Generator().manual_seed(0)
    value, momentum = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    other, own = value.clone(), momentum.clone()
    step = Restarted(optimizer=Nesterov(lr=nu * (1 - beta), momentum=beta), every=3, sync_interval=10)
    for number in range(1, 9):
        delta = torch.randn(5, generator=generator, dtype=torch.float64)
        before = torch.zeros_like(own) if number % 3 == 1 else own
        own = beta * before + (1 - beta) * delta
        other -= nu * ((1 + beta) * own - beta * before)
        step.at_step(10 * number + 5).step(value, delta.clone(), momentum)
    torch.testing.assert_close(value, other)


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
    with pytest.raises(ValueError, match="preserve_norm takes no error_feedback"):
        streaming_diloco(error_feedback=1.0, preserve_norm=True)


CANDIDATES = {
    "muloco": lambda: muloco(sync_interval=5, overlap_steps=2, num_fragments=None),
    "residuals": lambda: iso_loco(sync_interval=5, codec=sign(), error_feedback=0.9, exchange="two-phase"),
    # saved in the middle of the lazy start
    "pier": lambda: pier(sync_interval=5, lazy_steps=15, total_steps=23, overlap_steps=2),
    "norm": lambda: streaming_diloco(sync_interval=5, overlap_steps=2, layers_per_fragment=1, preserve_norm=True),
    "restart": lambda: streaming_diloco(sync_interval=5, overlap_steps=2, layers_per_fragment=1, restart_every=2),
    "iso": lambda: iso_loco(sync_interval=5, overlap_steps=2, restart_every=2, preserve_norm=True),
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


class NoSession:
    def active(self):
        return (0,)


@pytest.mark.parametrize("name", ["norm", "restart"])
def test_elastic_runs_keep_the_candidate(name):
    method = elastic(CANDIDATES[name](), session=NoSession())
    assert method.exchanges(2)[0].preserve_norm == (name == "norm")
    assert isinstance(method.update(2).optimizer, Restarted) == (name == "restart")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"restart_every": 0}, "restart_every"), ({"preserve_norm": True, "exchange": "two-phase"}, "all-gather")],
)
def test_bad_arguments_are_refused_at_once(arguments, words):
    with pytest.raises(ValueError, match=words):
        streaming_diloco(**arguments)
