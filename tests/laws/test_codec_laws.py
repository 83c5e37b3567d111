"""Every codec through the same promises."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import NAMES, Codec, by_name
from thinwire.errors import NonFiniteError, PayloadError

CODECS = [by_name(name) for name in NAMES]
LOSSY = [codec for codec in CODECS if codec.block > 1]
NEAREST = [codec for codec in CODECS if codec.name != "e3m0-stochastic"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AWKWARD_SIZES = (0, 1, 2, 63, 64, 65, 255, 256, 257, 1009)

# Largest error as a share of the block's largest magnitude. E3M0's largest element is off by a third at most, and its
# scale is at most twice that element where it rounds at random.
WORST_ERROR = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "block-int8": 0.5 / 127 * (1 + 1e-6),
    "block-int4": 0.5 / 7 * (1 + 2**-7),
    "e3m0": 1 / 3,
    "e3m0-stochastic": 1.0,
}

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
every_repeatable_codec = pytest.mark.parametrize("codec", NEAREST, ids=lambda codec: codec.name)


@st.composite
def tensors(draw: st.DrawFn, *, max_size: int = 700) -> torch.Tensor:
    """Float32 vectors of any size and spread, with zeros among them."""
    numel = draw(st.one_of(st.sampled_from(AWKWARD_SIZES), st.integers(0, max_size)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, power = draw(st.sampled_from((0.0, 1.0, 8.0))), draw(st.integers(-10, 10))
    tensor = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    keep = torch.rand(numel, generator=generator) < draw(st.sampled_from((0.1, 1.0)))
    return (tensor * keep * 2.0**power).clamp(-6e4, 6e4)


def round_trip(codec: Codec, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, seed=seed), numel=tensor.numel())


def blocks(codec: Codec, flat: torch.Tensor) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(-flat.numel() % codec.block)]).view(-1, codec.block)


def test_names_and_wire_numbers_are_distinct() -> None:
    assert [codec.name for codec in CODECS] == list(NAMES)
    by_format = {codec.name.removesuffix("-stochastic"): codec.wire_id for codec in CODECS}
    assert len(set(by_format.values())) == len(by_format)
    assert all(1 <= codec.wire_id <= 255 for codec in CODECS)
    # what an older version wrote must be read: these numbers never change
    assert by_format == {"float32": 1, "bfloat16": 2, "float16": 3, "block-int8": 4, "block-int4": 5, "e3m0": 6}


@every_codec
def test_it_is_a_frozen_value(codec: Codec) -> None:
    assert isinstance(codec, Codec)
    assert codec == by_name(codec.name)
    assert hash(codec) == hash(by_name(codec.name))
    with pytest.raises(FrozenInstanceError):
        setattr(codec, fields(codec)[0].name, None)  # type: ignore[arg-type]


@every_codec
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", AWKWARD_SIZES)
def test_the_payload_has_the_size_that_was_said_whatever_the_tensor(
    codec: Codec, dtype: torch.dtype, numel: int
) -> None:
    tensor = torch.randn(numel, dtype=torch.float64).to(dtype)
    payload = codec.encode(tensor)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.payload_bytes(numel),)
    values = codec.decode(payload, numel=numel)
    assert values.dtype == torch.float32
    assert values.shape == (numel,)
    assert torch.equal(codec.encode(tensor.to(torch.float32)), payload) or dtype == torch.float64


@every_codec
def test_nothing_costs_no_bytes_and_long_tensors_cost_the_stated_bits(codec: Codec) -> None:
    assert codec.payload_bytes(0) == 0
    numel = 1000 * codec.block
    assert codec.encode(torch.ones(numel)).numel() * 8 / numel == codec.bits_per_element


@every_codec
def test_a_negative_size_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="numel must be at least 0, got -1"):
        codec.payload_bytes(-1)


@every_codec
@given(tensor=tensors())
@settings(max_examples=40, deadline=None)
def test_the_error_stays_within_its_bound(codec: Codec, tensor: torch.Tensor) -> None:
    error = blocks(codec, round_trip(codec, tensor) - tensor).abs()
    bound = WORST_ERROR[codec.name] * blocks(codec, tensor).abs().amax(dim=1, keepdim=True)
    # float16's numbers lie 2**-24 apart near zero
    assert (error <= bound + (2.0**-25 if codec.name == "float16" else 0.0)).all()


@every_codec
@given(tensor=tensors())
@settings(max_examples=40, deadline=None)
def test_encoding_what_was_decoded_changes_nothing(codec: Codec, tensor: torch.Tensor) -> None:
    once = round_trip(codec, tensor, seed=1)
    twice = round_trip(codec, once, seed=2)
    if codec.name == "block-int8":  # its scale is a full float32, and moves by its last bit
        torch.testing.assert_close(twice, once, rtol=3e-7, atol=0)
    else:
        assert torch.equal(twice, once)


@every_codec
@given(tensor=tensors())
@settings(max_examples=25, deadline=None)
def test_the_opposite_tensor_decodes_to_the_opposite(codec: Codec, tensor: torch.Tensor) -> None:
    assert torch.equal(round_trip(codec, -tensor, seed=3), -round_trip(codec, tensor, seed=3))


@every_repeatable_codec
@given(tensor=tensors(), cuts=st.lists(st.integers(0, 10), max_size=3))
@settings(max_examples=40, deadline=None)
def test_payloads_of_parts_concatenate_to_the_payload_of_the_whole(
    codec: Codec, tensor: torch.Tensor, cuts: list[int]
) -> None:
    bounds = sorted(min(tensor.numel(), cut * codec.block) for cut in cuts)
    parts = torch.tensor_split(tensor, bounds)
    assert torch.equal(torch.cat([codec.encode(part) for part in parts]), codec.encode(tensor))


@every_codec
def test_parts_of_a_payload_decode_to_parts_of_the_tensor(codec: Codec) -> None:
    tensor, cut = torch.randn(codec.block * 5 + 1), codec.block * 2
    payload = codec.encode(tensor, seed=4)
    at = codec.payload_bytes(cut)
    parts = [codec.decode(payload[:at], numel=cut), codec.decode(payload[at:], numel=tensor.numel() - cut)]
    assert torch.equal(torch.cat(parts), codec.decode(payload, numel=tensor.numel()))


@every_codec
def test_the_same_tensor_gives_the_same_bytes_again(codec: Codec) -> None:
    tensor = torch.randn(3001)
    assert torch.equal(codec.encode(tensor, seed=9), codec.encode(tensor.clone(), seed=9))


@every_codec
def test_the_number_of_threads_does_not_change_a_byte(codec: Codec) -> None:
    tensor, before = torch.randn(200_003), torch.get_num_threads()
    try:
        payloads = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            payloads.append(codec.encode(tensor, seed=9))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*payloads)


@every_codec
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layout_and_rank_do_not_matter(codec: Codec, dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 14, 11).to(dtype)
    for view in (tensor.permute(2, 0, 1), tensor[:, ::3], tensor[1:, 2:-1, 1:], tensor[0, 0, 0], tensor[:0]):
        assert torch.equal(codec.encode(view, seed=1), codec.encode(view.contiguous().view(-1), seed=1))
    expanded = tensor[:1].expand(7, 14, 11)
    assert torch.equal(codec.encode(expanded), codec.encode(expanded.contiguous()))


@every_codec
def test_a_payload_may_be_a_strided_view(codec: Codec) -> None:
    payload = codec.encode(torch.randn(300))
    spread = torch.stack([payload, payload], dim=1)[:, 0]
    assert torch.equal(codec.decode(spread, numel=300), codec.decode(payload, numel=300))


@every_codec
def test_neither_the_tensor_nor_the_payload_is_written_to(codec: Codec) -> None:
    tensor = torch.randn(300)
    before = tensor.clone()
    payload = codec.encode(tensor)
    bytes_before = payload.clone()
    codec.decode(payload, numel=300)
    assert torch.equal(tensor, before)
    assert torch.equal(payload, bytes_before)


@every_codec
def test_a_parameter_leaves_no_graph(codec: Codec) -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    payload = codec.encode(parameter * 2)
    assert not payload.requires_grad
    assert not codec.decode(payload, numel=100).requires_grad


@every_codec
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    assert round_trip(codec, torch.zeros(300), seed=5).count_nonzero() == 0


@every_codec
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_a_tensor_that_is_not_floating_is_refused(codec: Codec, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"got {dtype}"):
        codec.encode(torch.ones(3, dtype=dtype))


@every_codec
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_the_wrong_size_is_refused(codec: Codec, change: int) -> None:
    payload = torch.zeros(codec.payload_bytes(100) + change, dtype=torch.uint8)
    with pytest.raises(PayloadError, match=rf"{codec.name}: 100 elements take {codec.payload_bytes(100)} bytes"):
        codec.decode(payload, numel=100)


@every_codec
def test_a_payload_that_is_no_bytes_is_refused(codec: Codec) -> None:
    payload = codec.encode(torch.ones(100))
    for wrong in (payload.view(torch.int8), payload.view(1, -1)):
        with pytest.raises(PayloadError, match="a payload is uint8 of one dimension"):
            codec.decode(wrong, numel=100)


@every_lossy_codec
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 3.3e38])
@pytest.mark.parametrize("place", [0, 31, 63, 64, 299])
def test_what_cannot_be_carried_is_said_at_decode_by_every_receiver(codec: Codec, bad: float, place: int) -> None:
    tensor = torch.randn(300)
    tensor[place] = bad
    payload = codec.encode(tensor, seed=6)
    with pytest.raises(NonFiniteError, match=f"{codec.name}: a block held NaN, infinity"):
        codec.decode(payload, numel=300)


@every_lossy_codec
@given(data=st.binary(min_size=600, max_size=600), numel=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_any_bytes_decode_to_finite_numbers_or_an_error(codec: Codec, data: bytes, numel: int) -> None:
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: codec.payload_bytes(numel)]
    if payload.numel() < codec.payload_bytes(numel):
        numel, payload = 1, payload[: codec.payload_bytes(1)]
    try:
        values = codec.decode(payload, numel=numel)
    except (NonFiniteError, PayloadError):
        return
    assert values.isfinite().all()
