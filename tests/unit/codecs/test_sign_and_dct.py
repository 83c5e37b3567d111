"""Signs with their scales, and the largest coefficients of a cosine transform."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from thinwire.codecs import Codec, NeedsLayout, dct, dct_top_k, sign
from thinwire.errors import NonFiniteError, PayloadError


def round_trip(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(tensor), numel=tensor.numel())


# ------------------------------------------------------------------------- sign


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1009, 300_001])
@pytest.mark.parametrize("scale", ["l2", "mean"])
def test_signs_come_back_with_the_scale(numel: int, scale: str) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = x.double().square().mean().sqrt() if scale == "l2" else x.double().abs().mean()
    decoded = round_trip(sign(scale), x)  # type: ignore[arg-type]
    assert torch.equal(decoded, torch.where(x < 0, -1.0, 1.0) * expected.float())


def test_a_sign_payload_is_the_scale_and_bits_the_lowest_first() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, -3.0, 1.0, 1.0, 1.0, -1.0])
    assert bytes(sign("mean").encode(x).tolist()) == struct.pack("<f", 1.0) + bytes([0b00010010, 1])


def test_a_block_has_its_own_scale_and_the_last_one_may_be_short() -> None:
    x = torch.cat([torch.full((16,), 2.0), torch.full((16,), -0.5), torch.full((3,), 7.0)])
    codec = sign("mean", block=16)
    assert torch.equal(round_trip(codec, x), x)
    assert codec.payload_bytes(35) == 3 * 4 + 2 + 2 + 1
    assert codec.bits_per_element == 3.0


def test_the_mean_leaves_the_least_error_of_both_scales() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    errors = {scale: float((round_trip(sign(scale), x) - x).norm() / x.norm()) for scale in ("l2", "mean")}
    assert errors == pytest.approx({"l2": 0.636, "mean": 0.603}, abs=0.005)  # of a normal distribution


def test_one_scale_a_tensor_may_be_cut_for_shards_of_their_own() -> None:
    codec, x = sign(), torch.cat([torch.ones(24), torch.full((24,), 5.0)])
    assert codec.block == 8
    assert torch.equal(torch.cat([round_trip(codec, x[:24]), round_trip(codec, x[24:])]), x)
    assert round_trip(codec, x).unique().numel() == 1


@pytest.mark.parametrize("scale", [-1.0, math.nan, -math.inf])
def test_sign_refuses_a_scale_that_is_never_sent(scale: float) -> None:
    payload = sign().encode(torch.ones(8))
    payload[:4] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(PayloadError, match="negative or NaN: never sent"):
        sign().decode(payload, numel=8)


def test_sign_refuses_bits_beyond_the_tensor() -> None:
    payload = sign().encode(torch.ones(9))
    payload[-1] = 2
    with pytest.raises(PayloadError, match="fills up a byte"):
        sign().decode(payload, numel=9)


def test_sign_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="scale must be 'l2' or 'mean', got 'max'"):
        sign("max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block must be a positive multiple of 8, got 12"):
        sign(block=12)


# -------------------------------------------------------------------------- DCT


def basis(size: int) -> torch.Tensor:
    places = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (places + 0.5) * places.view(-1, 1)) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 64), (64, 64), (48, 5), (3, 1), (2, 1024)])
@pytest.mark.parametrize("power", [-100, 0, 100])
def test_the_transform_is_the_orthonormal_cosine_transform(height: int, width: int, power: int) -> None:
    x = torch.randn(3, height, width) * 2.0**power
    expected = basis(height) @ x.double() @ basis(width).T
    largest = expected.abs().amax()
    assert ((dct.transform(x) - expected).abs() <= 1e-5 * largest).all()
    assert ((dct.inverse(dct.transform(x)) - x).abs() <= 2e-5 * largest).all()


def test_the_order_of_the_transforms_sums_does_not_show() -> None:
    # exact products: one chunk gives the same bits alone as among others, with other blockings and threads
    x, before = torch.randn(300, 64, 64), torch.get_num_threads()
    whole = dct.transform(x)
    try:
        torch.set_num_threads(1)
        for index in (0, 1, 299):
            assert torch.equal(dct.transform(x[index : index + 1])[0], whole[index])
        assert torch.equal(dct.transform(x), whole)
    finally:
        torch.set_num_threads(before)
    integers, _ = dct._integers(x[:1])
    product = integers @ dct._basis(64, 25).T
    reversed_product = integers.flip(2) @ dct._basis(64, 25).T.flip(0)
    assert torch.equal(product, reversed_product)
    assert product.abs().max() < 2.0**53


def test_what_cannot_be_transformed_is_refused_by_the_receiver() -> None:
    codec = dct_top_k()
    with pytest.raises(NonFiniteError):
        round_trip(codec, torch.full((64,), 3e38))  # its first coefficient is eight times that


@pytest.mark.parametrize("shapes", [[(64, 128)], [(96, 64), (64,)], [(3, 5), (0, 4), (), (7,)], [(131, 67), (1009,)]])
def test_all_coefficients_give_the_tensor_back(shapes: list[tuple[int, ...]]) -> None:
    codec = dct_top_k(k=4096, values="float32").laid_out([torch.Size(shape) for shape in shapes])
    x = torch.randn(sum(math.prod(shape) for shape in shapes))
    torch.testing.assert_close(round_trip(codec, x), x, rtol=0, atol=2e-5)


def test_a_chunk_is_a_square_of_its_matrix_and_its_largest_coefficients_are_sent() -> None:
    waves = torch.zeros(4, 6, 64, 64)
    generator = torch.Generator().manual_seed(0)
    for down in range(4):
        for across in range(6):
            for _ in range(3):
                row, column = torch.randint(0, 64, (2,), generator=generator).tolist()
                waves[down, across, row, column] = 1 + torch.rand((), generator=generator)
    matrix = dct.inverse(waves.view(-1, 64, 64)).view(4, 6, 64, 64).permute(0, 2, 1, 3).reshape(256, 384)
    codec = dct_top_k(k=3).laid_out([matrix.shape])
    torch.testing.assert_close(round_trip(codec, matrix).view(256, 384), matrix, rtol=0, atol=1e-4)
    assert codec.payload_bytes(matrix.numel()) == 24 * (-(-3 * 12 // 8) + 1 + 3 * 2)


def test_a_filter_of_four_dimensions_counts_as_a_matrix() -> None:
    x = torch.randn(16 * 8 * 3 * 3)
    filters, matrix = (dct_top_k(k=5).laid_out([torch.Size(s)]) for s in ((16, 8, 3, 3), (16, 72)))
    assert torch.equal(filters.encode(x), matrix.encode(x))


def test_a_dimension_without_a_useful_divisor_gets_a_shorter_last_chunk() -> None:
    prime = dct_top_k().laid_out([torch.Size([1009])])
    assert prime.payload_bytes(1009) == 15 * (32 * 6 // 8 + 1 + 64) + (32 * 6 // 8 + 1 + 64)  # 15 of 64, one of 49
    halves = dct_top_k().laid_out([torch.Size([96])])
    assert halves.payload_bytes(96) == 2 * (32 * 6 // 8 + 1 + 64)  # two of 48, as in DeMo


def test_a_layout_holds_for_its_vector_alone() -> None:
    codec = dct_top_k().laid_out([torch.Size([64, 64])])
    assert isinstance(dct_top_k(), NeedsLayout)
    assert codec.block == 4096
    with pytest.raises(ValueError, match="the layout has 4096 elements, got 100"):
        codec.encode(torch.zeros(100))
    empty = dct_top_k().laid_out([torch.Size([0, 4])])
    assert round_trip(empty, torch.zeros(0)).shape == (0,)
    assert (empty.payload_bytes(0), empty.bits_per_element, empty.block) == (0, 0.0, 1)


def test_dct_top_k_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="chunk must be 2 to 1024, got 1"):
        dct_top_k(chunk=1)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        dct_top_k(k=0)
