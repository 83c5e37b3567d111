"""Streaming SparseLoCo against a plain loop in one process, and against the methods that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import adamw, train
from tests.reference.small_models import build, loss_of
from thinwire.codecs import chunked_top_k
from thinwire.methods import sparse_loco, streaming_diloco, streaming_sparse_loco
from thinwire.sync.fragments import find_blocks
from thinwire.sync.method import Method
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

SMALL: dict[str, Any] = {"k": 4, "chunk": 32, "layers_per_fragment": 2}
Vectors = list[torch.Tensor]


def median_low_clip(sent: Vectors) -> Vectors:
    """Shorten each vector to the (lower) median of all lengths, in float64."""
    lengths = [float(q.double().norm()) for q in sent]
    limit = sorted(lengths)[(len(lengths) - 1) // 2]
    factors = [min(1.0, limit / length) if length else 1.0 for length in lengths]
    return [q.double() * factor for q, factor in zip(sent, factors, strict=True)]


def plain_loop(  # noqa: C901
    *, replicas: int, count: int, interval: int, taus: tuple[int, ...], alpha: float, decay: float, lr: float,
    clips: bool,
) -> list[tuple[Vectors, Vectors]]:  # fmt: skip
    """Return local and global parameters of each replica, from the algorithm in plain lists; means in float64."""
    code = chunked_top_k(k=4, chunk=32, values="codebook2")
    models = [build("transformer") for _ in range(replicas)]
    inners = [adamw(model) for model in models]
    names_of = streaming_sparse_loco(**SMALL).view.fragments.partition(find_blocks(models[0]))  # type: ignore[attr-defined]
    local = [[[dict(model.named_parameters())[n] for n in names] for names in names_of] for model in models]

    def read(m: int, p: int) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in local[m][p]])

    # what each replica holds for itself: its global value and its residual, by fragment
    theta = [[read(m, p) for p in range(len(names_of))] for m in range(replicas)]
    residual = [[torch.zeros_like(value) for value in theta[m]] for m in range(replicas)]
    sent: dict[tuple[int, int], Vectors] = {}
    for t in range(1, count + 1):
        for m in range(replicas):
            loss_of(models[m], step=t, replica=m).backward()
            inners[m].step()
            inners[m].zero_grad()
        for p in range(len(names_of)):
            offset = p * interval // len(names_of)
            if t - offset >= interval and (t - offset) % interval == 0:
                sent[p, t] = []
                for m in range(replicas):
                    wanted = residual[m][p] * decay + (theta[m][p] - read(m, p))
                    sent[p, t].append(code.decode(code.encode(wanted), numel=wanted.numel()))
                    residual[m][p] = wanted - sent[p, t][-1]
            for m in range(replicas):
                if (p, t - taus[m]) not in sent:
                    continue
                parts = sent[p, t - taus[m]]
                parts = median_low_clip(parts) if clips else [q.double() for q in parts]
                theta[m][p] = theta[m][p] - lr * (sum(parts[1:], parts[0]) / replicas).float()
                mixed = torch.lerp(read(m, p), theta[m][p], 1 - alpha) if alpha else theta[m][p].clone()
                torch.nn.utils.vector_to_parameters(mixed, local[m][p])
    found = []
    for m, model in enumerate(models):
        trained = values(model)
        for p in range(len(names_of)):
            torch.nn.utils.vector_to_parameters(theta[m][p].clone(), local[m][p])
        found.append((trained, values(model)))
    return found


@pytest.mark.parametrize(
    ("replicas", "interval", "taus", "alpha", "clips"),
    [
        (2, 6, (0, 0), 0.0, True),
        (2, 6, (5, 5), 0.5, True),  # several fragments in flight
        (3, 7, (3, 3, 3), 0.25, True),
        (3, 7, (0, 3, 6), 0.5, False),  # an overlap of its own on each replica
        (1, 4, (2,), 0.5, True),
    ],
)
def test_it_is_the_plain_loop(replicas: int, interval: int, taus: tuple[int, ...], alpha: float, clips: bool) -> None:
    numbers = {"decay": 0.9, "clips": clips}
    method = streaming_sparse_loco(
        sync_interval=interval, overlap_steps=taus, blend=alpha, outer_lr=0.5, **numbers, **SMALL
    )
    expected = plain_loop(
        replicas=replicas, count=29, interval=interval, taus=taus, alpha=alpha, decay=0.9, lr=0.5, clips=clips
    )
    for found, wanted in zip(train(method, kind="transformer", replicas=replicas, count=29), expected, strict=True):
        for one, other in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_with_one_fragment_and_no_overlap_it_is_sparse_loco_bit_for_bit() -> None:
    numbers: dict[str, Any] = {"sync_interval": 5, "k": 4, "chunk": 32, "decay": 0.9, "outer_lr": 0.7}
    one = train(streaming_sparse_loco(overlap_steps=0, blend=0.0, num_fragments=1, **numbers), kind="transformer")
    other = train(sparse_loco(**numbers), kind="transformer")
    for mine, theirs in zip(one, other, strict=True):
        assert same(mine[0], theirs[0]) and same(mine[1], theirs[1])


def test_each_fragment_has_a_residual_of_its_own_in_the_state() -> None:
    def replica_main(transport: LoopbackTransport) -> dict[str, Any]:
        model = build("transformer")
        method = streaming_sparse_loco(sync_interval=6, overlap_steps=2, **SMALL)
        optimizer = wrap(model, transport, method, adamw(model))
        steps(model, optimizer, 9, replica=transport.replica)  # fragments 0 to 2 of 4 have been launched
        residuals = optimizer.state_dict()["sync"]["exchanges"]["0"]
        found = {fragment: stages["out"]["residual"].clone() for fragment, stages in residuals.items()}
        optimizer.close(final_exchange=True)
        return found

    one, other = thinwire.run_replicas(2, replica_main)
    assert [bool(one[fragment].any()) for fragment in sorted(one)] == [True, True, True, False]
    assert not torch.equal(one["0"], other["0"]), "a residual belongs to its own replica"


def test_it_sends_less_than_a_fifteenth_of_the_bytes_of_e3m0_and_as_many_at_the_end() -> None:
    def sent_by(method: Method) -> tuple[int, int]:
        def replica_main(loopback: LoopbackTransport) -> tuple[int, int]:
            model, transport = torch.nn.Linear(128, 100), RecordingTransport(loopback)
            optimizer = wrap(model, transport, method)
            began = transport.log.totals("sent").payload_bytes  # the first values of all parameters
            for step in range(12):
                model.weight.grad = torch.full_like(model.weight, 0.1 * step + loopback.replica)
                optimizer.step()
            before = transport.log.totals("sent").payload_bytes
            optimizer.close(final_exchange=True)
            return before - began, transport.log.totals("sent").payload_bytes - before

        return tuple(thinwire.run_replicas(2, replica_main)[0])

    sparse, dense = sent_by(streaming_sparse_loco(sync_interval=3)), sent_by(streaming_diloco(sync_interval=3))
    assert 0 < 15 * sparse[0] < dense[0]
    assert sparse[1] == dense[1], "the final exchange is dense"


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_final_exchange_is_dense_and_all_end_with_the_same_bits(replicas: int) -> None:
    method = streaming_sparse_loco(sync_interval=6, overlap_steps=3, blend=0.5, **SMALL)
    found = train(method, kind="transformer", replicas=replicas, count=17, final=True)
    assert all(same(found[0][1], other[1]) for other in found)
    assert all(same(local, reached) for local, reached in found), "nothing of the last interval is left behind"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"overlap_steps": 30}, r"overlap_steps must be below sync_interval \(30\), got 30"),
        ({"overlap_steps": (1, 30)}, r"overlap_steps must be below sync_interval \(30\), got 30"),
        ({"blend": 1.0}, r"blend must be in \[0, 1\), got 1.0"),
        ({"k": 5000}, r"k must be 1 to chunk \(4096\), got 5000"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"outer_lr": 0.0}, r"the outer lr must be in \(0, 10\], got 0.0"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        streaming_sparse_loco(**wrong)
