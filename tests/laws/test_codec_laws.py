"""Every codec through the same promises."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every_case import over
from thinwire.codecs import (
    E3M0,
    NAMES,
    Block2Bit,
    BlockInt,
    ChunkedTopK,
    Codec,
    DctTopK,
    Dense,
    RandomK,
    Sign,
    TopK,
    by_name,
    chunked_top_k,
    dct_top_k,
    random_k,
    sign,
    threshold,
    top_k,
)
from thinwire.errors import NonFiniteError, PayloadError

NAMED = [by_name(name) for name in NAMES]
# other arguments, where those change the format or what is sent
VARIANTS: list[Codec] = [
    top_k(density=0.2, values="float32"),
    top_k(density=0.3, values="bfloat16"),
    top_k(density=1.0),
    top_k(density=0.3, selection="sampled"),
    top_k(density=0.3, values="clusters"),
    chunked_top_k(k=5, chunk=37, values="float32"),
    chunked_top_k(k=3, chunk=8, values="codebook2"),
    chunked_top_k(k=1, chunk=1),
    random_k(density=0.3, values="float32"),
    random_k(density=0.8, values="bfloat16", scale=True),
    threshold(value=1.0, values="bfloat16"),
    sign(block=64),
    sign("mean", block=8),
    dct_top_k(k=3, chunk=6, values="bfloat16"),
]
CODECS = NAMED + VARIANTS
LOSSY = [codec for codec in CODECS if not isinstance(codec, Dense)]
# an element's code depends on its block alone, and draws nothing
BY_BLOCK = [
    codec
    for codec in CODECS
    if isinstance(codec, Dense | BlockInt | E3M0 | ChunkedTopK | DctTopK) or getattr(codec, "elements_per_scale", None)
]
REPEATABLE_BY_BLOCK = [codec for codec in BY_BLOCK if codec.name != "e3m0-stochastic"]
# decoded once, they are what they decode to. Others draw anew, or move their bins, thresholds and transforms' rounding
SETTLED = [
    codec
    for codec in CODECS
    if isinstance(codec, Dense | BlockInt | E3M0 | TopK | ChunkedTopK | Sign)
    and getattr(codec, "selection", "exact") == "exact"
    and getattr(codec, "values", "") not in ("codebook2", "clusters")
]
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

every_codec = over(CODECS)
every_lossy_codec = over(LOSSY)
every_bounded_codec = over(by_name(name) for name in WORST_ERROR)
every_codec_by_block = over(BY_BLOCK)


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


def assert_size(codec: Codec, payload: torch.Tensor, numel: int) -> None:
    limit = codec.payload_bytes(numel)
    assert payload.numel() == limit if codec.has_fixed_size else payload.numel() <= limit


def blocks(codec: Codec, flat: torch.Tensor) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(-flat.numel() % codec.block)]).view(-1, codec.block)


def test_names_and_wire_numbers_are_distinct() -> None:
    assert [codec.name for codec in NAMED] == list(NAMES)
    by_format = {re.sub("-(stochastic|sampled|mean)$", "", codec.name): codec.wire_id for codec in CODECS}
    assert len(set(by_format.values())) == len(by_format)
    assert all(1 <= codec.wire_id <= 255 for codec in CODECS)
    # what an older version wrote must be read: these numbers never change
    assert by_format == {
        "float32": 1, "bfloat16": 2, "float16": 3, "block-int8": 4, "block-int4": 5, "e3m0": 6, "top-k": 10,
        "chunked-top-k": 11, "random-k": 12, "threshold": 13, "sign": 14, "dct-top-k": 15, "chunked-top-k-2bit": 16,
        "block-2bit": 17,
    }  # fmt: skip


@every_codec
def test_it_is_a_frozen_value(codec: Codec) -> None:
    assert isinstance(codec, Codec)
    again = replace(codec)  # type: ignore[type-var]
    assert codec == again
    assert hash(codec) == hash(again)
    assert codec == by_name(codec.name) or codec in VARIANTS
    with pytest.raises(FrozenInstanceError):
        setattr(codec, fields(codec)[0].name, None)  # type: ignore[arg-type]
    assert not hasattr(codec, "__dict__"), "a base class without slots lets a frozen value take other attributes"


@every_codec
def test_the_payload_has_the_size_that_was_said_whatever_the_tensor(codec: Codec) -> None:
    for dtype, numel in itertools.product(FLOATS, AWKWARD_SIZES):
        tensor = torch.randn(numel, dtype=torch.float64).to(dtype)
        payload = codec.encode(tensor)
        assert payload.dtype == torch.uint8
        assert payload.dim() == 1
        assert_size(codec, payload, numel)
        values = codec.decode(payload, numel=numel)
        assert values.dtype == torch.float32
        assert values.shape == (numel,)
        assert torch.equal(codec.encode(tensor.to(torch.float32)), payload) or dtype == torch.float64


@every_codec
def test_nothing_costs_no_bytes_and_long_tensors_cost_the_stated_bits(codec: Codec) -> None:
    assert codec.payload_bytes(0) == 0
    assert codec.encode(torch.empty(0)).shape == (0,)
    assert codec.decode(torch.empty(0, dtype=torch.uint8), numel=0).shape == (0,)
    numel = max(1000 * codec.block, 200_000 // codec.block * codec.block)
    payload = codec.encode(5 + torch.rand(numel, generator=torch.Generator().manual_seed(0)))
    assert_size(codec, payload, numel)
    bits = 8 * payload.numel() / numel
    if codec in BY_BLOCK:
        assert bits == codec.bits_per_element
    else:
        assert bits == pytest.approx(codec.bits_per_element, rel=0.02)


@every_codec
def test_a_negative_size_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="numel must be at least 0, got -1"):
        codec.payload_bytes(-1)


@every_bounded_codec
@given(tensor=tensors())
@settings(max_examples=40, deadline=None)
def test_the_error_stays_within_its_bound(codec: Codec, tensor: torch.Tensor) -> None:
    error = blocks(codec, round_trip(codec, tensor) - tensor).abs()
    bound = WORST_ERROR[codec.name] * blocks(codec, tensor).abs().amax(dim=1, keepdim=True)
    # float16's numbers lie 2**-24 apart near zero
    assert (error <= bound + (2.0**-25 if codec.name == "float16" else 0.0)).all()


@over(SETTLED)
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
    if isinstance(codec, Sign):  # of one bit, zero is positive whatever its sign
        tensor = torch.where(tensor == 0, 1.0, tensor)
    assert torch.equal(round_trip(codec, -tensor, seed=3), -round_trip(codec, tensor, seed=3))


@over(REPEATABLE_BY_BLOCK)
@given(tensor=tensors(), cuts=st.lists(st.integers(0, 10), max_size=3))
@settings(max_examples=40, deadline=None)
def test_payloads_of_parts_concatenate_to_the_payload_of_the_whole(
    codec: Codec, tensor: torch.Tensor, cuts: list[int]
) -> None:
    bounds = sorted(min(tensor.numel(), cut * codec.block) for cut in cuts)
    parts = torch.tensor_split(tensor, bounds)
    assert torch.equal(torch.cat([codec.encode(part) for part in parts]), codec.encode(tensor))


@every_codec_by_block
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
def test_layout_and_rank_do_not_matter(codec: Codec) -> None:
    for dtype in FLOATS:
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
def test_a_tensor_that_is_not_floating_is_refused(codec: Codec) -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"got {dtype}"):
            codec.encode(torch.ones(3, dtype=dtype))


@every_codec
def test_a_payload_of_the_wrong_size_is_refused(codec: Codec) -> None:
    for change in (-1, 1):
        limit = codec.payload_bytes(100)
        if codec.has_fixed_size:
            with pytest.raises(PayloadError, match=rf"{codec.name}: 100 elements take {limit} bytes"):
                codec.decode(torch.zeros(limit + change, dtype=torch.uint8), numel=100)
            continue
        with pytest.raises(PayloadError, match=rf"{codec.name}: 100 elements take {limit} bytes at most"):
            codec.decode(torch.zeros(limit + 1, dtype=torch.uint8), numel=100)
        payload = codec.encode(torch.randn(100))
        changed = payload[:-1] if change < 0 else torch.cat([payload, payload.new_zeros(1)])
        with pytest.raises(PayloadError, match=rf"{codec.name}: "):
            codec.decode(changed, numel=100)


@every_codec
def test_a_payload_that_is_no_bytes_is_refused(codec: Codec) -> None:
    payload = codec.encode(torch.ones(100))
    for wrong in (payload.view(torch.int8), payload.view(1, -1)):
        with pytest.raises(PayloadError, match="a payload is uint8 of one dimension"):
            codec.decode(wrong, numel=100)


@every_lossy_codec
def test_what_cannot_be_carried_is_said_at_decode_by_every_receiver(codec: Codec) -> None:
    for bad, place in itertools.product((math.nan, -math.nan, math.inf, -math.inf, 3.3e38), (0, 31, 63, 64, 299)):
        tensor = torch.randn(300)
        tensor[place] = bad
        payload = codec.encode(tensor, seed=6)
        if bad == 3.3e38 and not isinstance(codec, BlockInt | E3M0):  # a float of which most formats carry
            try:
                assert codec.decode(payload, numel=300).isfinite().all()
            except NonFiniteError:
                assert isinstance(codec, RandomK | DctTopK | Block2Bit) or re.search("codebook2|clusters", repr(codec))
            continue
        with pytest.raises(NonFiniteError, match=f"{codec.name}: (a block|the tensor) held NaN, infinity"):
            codec.decode(payload, numel=300)


@every_lossy_codec
@given(data=st.binary(min_size=600, max_size=600), numel=st.integers(1, 500), length=st.integers(0, 600))
@settings(max_examples=60, deadline=None)
def test_any_bytes_decode_to_finite_numbers_or_an_error(codec: Codec, data: bytes, numel: int, length: int) -> None:
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if codec.payload_bytes(numel) > 600:
        numel = 1
    decodes_or_refuses(codec, payload[: codec.payload_bytes(numel) if codec.has_fixed_size else length], numel=numel)


@every_lossy_codec
@given(tensor=tensors(max_size=200), changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_damaged_payload_decodes_to_finite_numbers_or_an_error(
    codec: Codec, tensor: torch.Tensor, changes: list[tuple[int, int]]
) -> None:
    payload = codec.encode(tensor)
    for place, byte in changes:
        if payload.numel():
            payload[place % payload.numel()] = byte
    decodes_or_refuses(codec, payload, numel=tensor.numel())
    if not codec.has_fixed_size:
        decodes_or_refuses(codec, payload[: len(changes) * payload.numel() // 4], numel=tensor.numel())


def decodes_or_refuses(codec: Codec, payload: torch.Tensor, *, numel: int) -> None:
    try:
        values = codec.decode(payload, numel=numel)
    except (NonFiniteError, PayloadError):
        return
    assert values.shape == (numel,)
    assert values.isfinite().all()
