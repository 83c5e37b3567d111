"""FedZip's values: centroids against numpy, bytes at three densities, layers, and messages that are no such payload."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from thinwire.codecs import clusters, top_k
from thinwire.errors import NonFiniteError, PayloadError


def reference_centroids(values: np.ndarray) -> np.ndarray:
    """Three means in float64 as the paper's code has them: linspace start, four Lloyd steps, all distances."""
    centroids = np.linspace(values.min(), values.max(), 3)
    for _ in range(4):
        labels = np.abs(values[:, None] - centroids[None]).argmin(axis=1)
        for place in range(3):
            if (labels == place).any():
                centroids[place] = values[labels == place].mean()
    return centroids


@pytest.mark.parametrize("kind", ["normal", "one-sided", "heavy", "two values", "one value"])
def test_centroids_are_those_of_k_means_in_float64_over_the_pruned_layer(kind: str) -> None:
    rng = np.random.default_rng(7)
    layer = {
        "normal": rng.normal(size=10_007), "one-sided": np.abs(rng.normal(size=997)),
        "heavy": rng.standard_cauchy(1009),
        "two values": np.repeat([0.0, 3.0, -1.0], 31), "one value": np.array([0.0] * 7 + [-2.0]),
    }[kind].astype(np.float32)  # fmt: skip
    kept = np.sort(np.argsort(-np.abs(layer), kind="stable")[: math.ceil(0.2 * layer.size)])
    pruned = np.zeros(layer.size)
    pruned[kept] = layer[kept]
    values = pruned[pruned != 0]
    found = clusters.three_means(torch.from_numpy(values), num_zeros=int((pruned == 0).sum()))
    expected = reference_centroids(pruned)
    assert np.allclose(found.numpy(), expected, rtol=1e-12, atol=1e-14)
    decoded = top_k(density=0.2, values="clusters").decode(
        top_k(density=0.2, values="clusters").encode(torch.from_numpy(layer)), numel=layer.size
    )
    sent = set(decoded.unique().tolist()) - {0.0}
    zero = int(np.abs(expected).argmin())
    assert sent <= {float(torch.tensor(one).bfloat16()) for place, one in enumerate(expected) if place != zero}
    assert sent


@pytest.mark.parametrize(("density", "least"), [(0.2, 26.0), (0.01, 340.0), (0.001, 2500.0)])
def test_real_bytes_are_this_many_times_fewer_than_float32(density: float, least: float) -> None:
    layer = torch.randn(2_000_003, generator=torch.Generator().manual_seed(1))
    codec = top_k(density=density, values="clusters")
    payload = codec.encode(layer)
    decoded = codec.decode(payload, numel=layer.numel())
    assert 4 * layer.numel() / payload.numel() >= least
    assert int((decoded != 0).sum()) == math.ceil(density * layer.numel())  # of a normal layer no value is near zero
    assert 0.8 * float(layer @ decoded) <= float(decoded @ decoded) <= 1.01 * float(layer @ decoded)


def test_layers_are_selected_and_clustered_apart_and_empty_ones_cost_nothing() -> None:
    shapes = [torch.Size([40, 50]), torch.Size([0, 3]), torch.Size([10]), torch.Size([])]
    generator = torch.Generator().manual_seed(3)
    parts = [
        torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, (1, 1, 1e-3, 7), strict=True)
    ]
    codec = top_k(density=0.05, values="clusters").laid_out(shapes)
    whole = torch.cat([part.reshape(-1) for part in parts])
    payload = codec.encode(whole)
    decoded = codec.decode(payload, numel=2011)
    assert payload.numel() <= codec.payload_bytes(2011)
    own = top_k(density=0.05, values="clusters")
    for part, found in zip(parts, torch.split(decoded, [2000, 0, 10, 1]), strict=True):
        assert torch.equal(own.decode(own.encode(part), numel=part.numel()), found)
    assert codec.encode(torch.zeros(2011)).tolist() == [0] * 5
    with pytest.raises(ValueError, match="the layout has 2011 elements, got 2010"):
        codec.encode(whole[:2010])


def test_what_is_no_such_payload_is_refused() -> None:
    codec = top_k(density=0.2, values="clusters")
    layer = torch.randn(257, generator=torch.Generator().manual_seed(5))
    good = codec.encode(layer)
    for cut in range(good.numel()):
        with pytest.raises(PayloadError):
            codec.decode(good[:cut], numel=257)
    tail = 4 + -(-int(good[0]) // 8)
    for centroid, kind in ((math.nan, PayloadError), (-math.inf, PayloadError), (math.inf, NonFiniteError)):
        bad = good.clone()
        start = good.numel() - tail
        bad[start : start + 2] = torch.tensor([centroid], dtype=torch.bfloat16).view(torch.uint8)
        with pytest.raises(kind):
            codec.decode(bad, numel=257)
    claims = good.clone()
    claims[:5] = 255  # 2**40 - 1 values
    with pytest.raises(PayloadError, match="1099511627775 indices of 257 elements"):
        codec.decode(claims, numel=257)


def test_error_feedback_sends_in_the_end_what_one_round_drops() -> None:
    codec, total = top_k(density=0.1, values="clusters"), torch.zeros(500)
    wanted = torch.randn(500, generator=torch.Generator().manual_seed(2))
    residual = torch.zeros(500)
    for _ in range(60):
        sent = codec.decode(codec.encode(wanted + residual), numel=500)
        residual = wanted + residual - sent
        total += sent
    assert float((total / 60 - wanted).norm() / wanted.norm()) < 0.2
