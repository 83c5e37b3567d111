"""Deep Gradient Compression, DeMo, PowerSGD and SparseLoCo against plain loops and what they must be equal to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.averaging.aggregation_rules import MedianNormClip
from thinwire.codecs import chunked_top_k, dct_top_k, top_k
from thinwire.codecs.error_feedback import ErrorFeedback, MomentumCorrection
from thinwire.methods import all_reduce, demo, dgc, power_sgd, sparse_loco
from thinwire.methods.power_sgd import orthonormal
from thinwire.sync.method import Method
from thinwire.transport.loopback import LoopbackTransport

COUNT = 6


def trained(method: Method, replicas: int, *, lr: float = 0.05, kind: str = "transformer", **inner: Any) -> list[Any]:
    def replica_main(transport: LoopbackTransport) -> list[torch.Tensor]:
        model = build(kind)
        optimizer = wrap(model, transport, method, torch.optim.SGD(model.parameters(), lr=lr, **inner))
        steps(model, optimizer, COUNT, replica=transport.replica)
        optimizer.close()
        return values(model)

    found = list(thinwire.run_replicas(replicas, replica_main))
    assert all(same(found[0], other) for other in found)
    return found[0]


def gradients(model: nn.Module, *, step: int, replica: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, step=step, replica=replica).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def loop(
    replicas: int, *, lr: float, matrices: Callable[[int, torch.Tensor, int], torch.Tensor],
    vectors: Callable[[int, torch.Tensor], torch.Tensor], last: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> list[torch.Tensor]:  # fmt: skip
    """Step one model with the mean of what each replica would send; matrices and the rest apart."""
    model = build("transformer")
    parameters = list(model.parameters())
    big, small = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    for step in range(1, COUNT + 1):
        sums: list[torch.Tensor] = []
        for replica in range(replicas):
            found = dict(zip(parameters, gradients(model, step=step, replica=replica), strict=True))
            sent = [
                matrices(replica, joined([found[p] for p in big]), step),
                vectors(replica, joined([found[p] for p in small])),
            ]
            sums = [a + b for a, b in zip(sums, sent, strict=True)] if sums else [torch.zeros_like(s) + s for s in sent]
        for group, total in zip((big, small), sums, strict=True):
            mean, start = last(total / replicas), 0
            for parameter in group:
                part = mean[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
                parameter.data.add_(part, alpha=-lr)
    return values(model)


def test_dgc_at_density_1_without_masking_is_sgd_with_momentum() -> None:
    for nesterov in (False, True):
        method = dgc(density=1, masks=False, momentum=0.9, nesterov=nesterov, values="float32", selection="exact")
        one = trained(method, 1)
        assert same(one, trained(all_reduce(), 1, momentum=0.9, nesterov=nesterov)) or nesterov
        two = trained(method, 2)
        for a, b in zip(two, trained(all_reduce(), 2, momentum=0.9, nesterov=nesterov), strict=True):
            # the mean of momenta and the momentum of means round differently
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_dgc_at_density_1_with_masking_is_sgd_without_momentum_on_matrices() -> None:
    masked = dgc(density=1, momentum=0.9, values="float32", selection="exact")
    found = trained(masked, 1)
    plain, momentum = trained(all_reduce(), 1), trained(all_reduce(), 1, momentum=0.9)
    model = build("transformer")
    assert any(not torch.equal(a, b) for a, b in zip(plain, momentum, strict=True))
    reference = loop(1, lr=0.05, matrices=lambda r, g, s: g, vectors=_momentum_of_vectors())
    assert same(found, reference) and len(found) == len(list(model.parameters()))


def _momentum_of_vectors(momentum: float = 0.9) -> Callable[[int, torch.Tensor], torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}

    def sent(replica: int, gradient: torch.Tensor) -> torch.Tensor:
        kept[replica] = gradient.clone() if replica not in kept else kept[replica].mul_(momentum).add_(gradient)
        return kept[replica].clone()

    return sent


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_dgc_is_its_paper_s_loop_bit_for_bit(replicas: int) -> None:
    code, clip = top_k(density=0.07), 0.5
    u: dict[int, torch.Tensor] = {}
    v: dict[int, torch.Tensor] = {}

    def matrices(replica: int, gradient: torch.Tensor, step: int) -> torch.Tensor:
        longest = clip / math.sqrt(replicas)
        gradient = gradient * (longest / max(longest, float(gradient.double().norm())))
        u[replica] = u.get(replica, torch.zeros_like(gradient)).mul(0.9) + gradient
        v[replica] = v.get(replica, torch.zeros_like(gradient)) + u[replica]
        sent = code.decode(code.encode(v[replica]), numel=gradient.numel())
        for memory in (u, v):
            memory[replica] = torch.where(sent == 0, memory[replica], torch.zeros(()))
        return sent

    reference = loop(replicas, lr=0.05, matrices=matrices, vectors=_momentum_of_vectors())
    assert same(trained(dgc(density=0.07, selection="exact", clip_norm=clip), replicas), reference)


def test_dgc_and_demo_refuse_an_inner_optimizer_with_momentum() -> None:
    model = build("linear")
    for method in (dgc(), demo()):
        for inner, named in (
            (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "SGD has momentum=0.9"),
            (torch.optim.AdamW(model.parameters()), r"AdamW has betas=\(0.9, 0.999\)"),
        ):
            with pytest.raises(ValueError, match=f"{named}, which would apply it twice; give torch.optim.SGD"):
                wrap(model, None, method, inner)


def test_methods_that_remember_refuse_a_grad_scaler() -> None:
    model = build("linear")
    optimizer = wrap(model, None, dgc())
    loss_of(model, step=1, replica=0).backward()
    optimizer.found_inf = torch.zeros(1)
    with pytest.raises(ValueError, match=r"dgc remembers what it did not send.*train in bfloat16"):
        optimizer.step()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_demo_is_its_loop_bit_for_bit(replicas: int) -> None:
    shapes = [p.shape for p in build("transformer").parameters() if p.dim() >= 2]
    code = dct_top_k(k=3, chunk=8).laid_out(shapes)
    kept: dict[int, torch.Tensor] = {}

    def matrices(replica: int, gradient: torch.Tensor, step: int) -> torch.Tensor:
        kept[replica] = kept.get(replica, torch.zeros_like(gradient)).mul(0.999) + gradient
        sent = code.decode(code.encode(kept[replica]), numel=gradient.numel())
        kept[replica] = kept[replica] - sent
        return sent

    reference = loop(replicas, lr=0.01, matrices=matrices, vectors=lambda r, g: g, last=torch.sign)
    assert same(trained(demo(k=3, chunk=8), replicas, lr=0.01), reference)


def test_power_sgd_of_enough_rank_is_an_all_reduce() -> None:
    exact, found = trained(all_reduce(), 2), trained(power_sgd(rank=64), 2)
    assert same(exact, found)


def test_power_sgd_finds_a_matrix_of_its_rank_in_two_steps() -> None:
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(30, 2, generator=generator), torch.randn(2, 20, generator=generator)

    def replica_main(transport: LoopbackTransport) -> float:
        model = nn.Linear(20, 30, bias=False)
        optimizer = wrap(model, transport, power_sgd(rank=2), torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2):
            model.weight.grad = (1 + transport.replica) * left @ right
            optimizer.step()
        return float((model.weight.grad - 1.5 * left @ right).norm() / (left @ right).norm())

    assert max(thinwire.run_replicas(2, replica_main)) < 1e-5


@pytest.mark.parametrize("replicas", [1, 2])
def test_power_sgd_is_its_paper_s_loop(replicas: int) -> None:
    """One weight matrix, so that the loop is short: E, P and Q as in the paper, in float64."""

    def replica_main(transport: LoopbackTransport) -> torch.Tensor:
        model = nn.Linear(9, 7, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, transport, power_sgd(rank=1), torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(1, 6):
            model.weight.grad = gradient(step, transport.replica).float()
            optimizer.step()
        return model.weight.detach()

    def gradient(step: int, replica: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + replica)
        return torch.randn(7, 9, generator=generator, dtype=torch.float64)

    bound = power_sgd(rank=1).exchanges(replicas)[0].bind([[torch.Size([7, 9])]], replica=0, num_replicas=replicas)
    q = bound.state_dict()["0"]["factors"]["right"]["0"].double()
    residuals, weight = [torch.zeros(7, 9, dtype=torch.float64)] * replicas, torch.zeros(7, 9, dtype=torch.float64)
    for step in range(1, 6):
        wanted = [gradient(step, r) + residuals[r] for r in range(replicas)]
        p = sum(m @ q for m in wanted) / replicas
        p = p / p.norm()
        q = sum(m.T @ p for m in wanted) / replicas
        residuals = [m - p @ q.T for m in wanted]
        weight = weight - 0.1 * p @ q.T
    for found in thinwire.run_replicas(replicas, replica_main):
        torch.testing.assert_close(found.double(), weight, rtol=1e-5, atol=1e-6)


def test_orthonormal_columns_are_so_also_where_they_depend_on_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(11, 4, generator=generator)
    matrix[:, 2] = matrix[:, 0] - 2 * matrix[:, 1]
    found = orthonormal(matrix)
    wanted = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(found.T @ found, wanted, rtol=0, atol=1e-6)
    assert torch.equal(orthonormal(torch.zeros(3, 2)), torch.zeros(3, 2))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("clips", [True, False])
def test_sparse_loco_is_its_loop_bit_for_bit(replicas: int, clips: bool) -> None:
    code, interval, decay = chunked_top_k(k=4, chunk=32, values="codebook2"), 3, 0.95
    found = trained(sparse_loco(sync_interval=interval, k=4, chunk=32, decay=decay, clips=clips), replicas)
    model = build("transformer")
    # chunks run through the vector in the fragment's order, which is not the model's
    (names,) = wrap(model, None, sparse_loco()).fragments
    order = [dict(model.named_parameters())[name] for name in names]

    def now() -> torch.Tensor:
        return joined([parameter.detach() for parameter in order])

    theta = now()
    residuals = [torch.zeros_like(theta) for _ in range(replicas)]
    for begin in range(0, COUNT, interval):
        sent: list[torch.Tensor] = []
        for replica in range(replicas):
            nn.utils.vector_to_parameters(theta.clone(), order)
            steps(model, torch.optim.SGD(model.parameters(), lr=0.05), interval, replica=replica, start=begin)
            wanted = residuals[replica] * decay + (theta - now())
            sent.append(code.decode(code.encode(wanted), numel=theta.numel()))
            residuals[replica] = wanted - sent[-1]
        theta = theta - (MedianNormClip()(torch.stack(sent)) if clips else sum(sent) / replicas)
    nn.utils.vector_to_parameters(theta.clone(), order)
    assert same(found, values(model))


@pytest.mark.parametrize("numel", [0, 1, 65, 1009])
def test_what_was_sent_and_what_is_left_is_what_came_in(numel: int) -> None:
    memory, code = ErrorFeedback(), top_k(density=0.05)
    state = memory.init(numel)
    generator = torch.Generator().manual_seed(1)
    came, went = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(numel, generator=generator)
        sent = code.decode(code.encode(memory.before(state, x)), numel=numel)
        memory.after(state, sent)
        came, went = came + x, went + sent
    left = state.residual.double()
    torch.testing.assert_close(went + left, came, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: dgc(density=0), "density must be in"),
        (lambda: dgc(momentum=1), r"momentum must be in \[0, 1\), got 1"),
        (lambda: dgc(clip_norm=0.0), "clip_norm must be positive"),
        (lambda: dgc(warmup_steps=-1), "warmup_steps must be at least 0, got -1"),
        (lambda: demo(decay=0), r"decay must be in \(0, 1\], got 0"),
        (lambda: power_sgd(rank=0), "rank must be at least 1, got 0"),
        (lambda: MomentumCorrection(momentum=2.0), "momentum must be in"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_sparse_codes_do_not_go_with_the_two_phase_exchange() -> None:
    from thinwire.averaging.exchange import TwoPhase

    with pytest.raises(ValueError, match=r"top-k payloads cannot be averaged on the way.*use AllGather"):
        TwoPhase(codec=top_k())
