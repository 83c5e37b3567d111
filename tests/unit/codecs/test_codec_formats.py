"""The wire formats byte by byte, against slow implementations in plain Python, and the bounds they promise."""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any

import pytest
import torch

from thinwire.codecs import bfloat16, block_int4, block_int8, by_name, e3m0, float16, float32
from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import Fused
from thinwire.codecs.e3m0 import _nearest, _values
from thinwire.errors import NonFiniteError, PayloadError

BLOCK = 64
ROW_BYTES = 33


def wide(numel: int, *, seed: int, spread: float = 6.0) -> torch.Tensor:
    """Return normal numbers times log-normal ones: elements of a block differ by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator)
    return normal * torch.exp(spread * torch.randn(numel, generator=generator))


def round_trip(codec: Codec, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, seed=seed), numel=tensor.numel())


# ---------------------------------------------------------------- E3M0, nearest


def slow_e3m0_block(block: list[float]) -> bytes:
    """Encode 64 float32 as the format says, with math.frexp and comparisons only."""
    normal = [0.0 if abs(value) < 2.0**-126 else value for value in block]
    peak = max(abs(value) for value in normal)
    if peak == 0:
        return bytes(ROW_BYTES)
    fraction, exponent = math.frexp(peak)  # peak = fraction * 2**exponent, fraction in [1/2, 1)
    rounded = exponent if fraction >= 0.75 else exponent - 1
    exponent_byte = max(rounded + 127, 8)
    if exponent_byte >= 255:
        return bytes([255]) + bytes(32)
    scale = 2.0 ** (exponent_byte - 127)
    values = [0.0] + [scale * 2.0 ** (code - 7) for code in range(1, 8)]
    codes = []
    for value in normal:
        distances = [abs(abs(value) - candidate) for candidate in values]
        code = max(c for c in range(8) if distances[c] == min(distances))  # ties away from zero
        codes.append(code + 8 if value < 0 and code else code)
    return bytes([exponent_byte]) + bytes(codes[j] + 16 * codes[j + 32] for j in range(32))


def slow_e3m0(tensor: torch.Tensor) -> bytes:
    values = [struct.unpack("<f", struct.pack("<f", value))[0] for value in tensor.tolist()]
    values += [0.0] * (-len(values) % BLOCK)
    return b"".join(slow_e3m0_block(values[start : start + BLOCK]) for start in range(0, len(values), BLOCK))


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1009, 4096])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_e3m0_gives_the_bytes_of_the_slow_implementation(numel: int, spread: float) -> None:
    tensor = wide(numel, seed=numel, spread=spread)
    if spread == 30.0:  # far beyond what a block spans, but finite
        tensor = tensor.nan_to_num(posinf=1e38, neginf=-1e38).clamp(-2e38, 2e38)
    assert bytes(e3m0().encode(tensor).tolist()) == slow_e3m0(tensor)


def test_e3m0_gives_the_bytes_of_the_slow_implementation_near_every_boundary() -> None:
    boundaries = [sign * 2.0**-k * f for k in range(-1, 12) for f in (0.75, 1.0, 1.5) for sign in (1, -1)]
    exact = torch.tensor([value for value in boundaries if abs(value) <= 1.0])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    tensor = torch.cat([exact, torch.nextafter(exact, up), torch.nextafter(exact, down)])
    for first in range(0, tensor.numel(), 32):
        block = torch.cat([torch.ones(1), tensor[first : first + 32]])
        assert bytes(e3m0().encode(block).tolist()) == slow_e3m0(block)


def test_e3m0_gives_the_bytes_of_the_slow_implementation_at_both_ends_of_float32() -> None:
    small = torch.tensor([2.0**-149, 2.0**-127, 1.4 * 2.0**-126, 2.0**-126, 2.0**-120, 2.0**-119, 0.0])
    for peak in (2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 2.0**-125, 2.0**-120, 2.0**-119, 2.0**-118, 1e-30):
        block = torch.cat([torch.tensor([-peak]), small.clamp(max=peak)])
        assert bytes(e3m0().encode(block).tolist()) == slow_e3m0(block)
    huge = torch.tensor([2.0**127, -1.4 * 2.0**127, 2.0**121, 1.0])
    assert bytes(e3m0().encode(huge).tolist()) == slow_e3m0(huge)
    assert round_trip(e3m0(), huge).tolist() == [2.0**127, -(2.0**127), 2.0**121, 0.0]


def test_e3m0_decodes_all_fifteen_values() -> None:
    codes = list(range(16))
    row = bytes([127 + 3, *(codes[j] if j < 16 else 0 for j in range(32))])
    values = e3m0().decode(torch.frombuffer(bytearray(row), dtype=torch.uint8), numel=64)
    positive = [0.0] + [8.0 * 2.0 ** (code - 7) for code in range(1, 8)]
    assert values[:16].tolist() == positive + [-value for value in positive]
    assert values[16:].count_nonzero() == 0


def test_e3m0_encodes_each_of_its_fifteen_values_to_its_code() -> None:
    values = torch.zeros(64)
    values[:8] = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)])
    values[8:16] = -values[:8]
    payload = e3m0().encode(values)
    assert payload[0] == 127
    assert (payload[1:17] & 15).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]
    assert (payload[1:] >> 4).count_nonzero() == 0


def test_e3m0_never_sends_a_negative_zero() -> None:
    tensor = torch.full((64,), -1e-9)
    tensor[0], tensor[1] = 1.0, -0.0
    payload = e3m0().encode(tensor)
    assert payload.tolist() == [127, 7, *([0] * 31)]
    assert not torch.signbit(round_trip(e3m0(), tensor)[1:]).any()


def test_e3m0_reads_a_foreign_negative_zero_as_zero() -> None:
    row = torch.zeros(33, dtype=torch.uint8)
    row[0], row[1] = 127, 0x88
    values = e3m0().decode(row, numel=64)
    assert values.count_nonzero() == 0
    assert not torch.signbit(values).any()


def test_the_low_half_of_byte_j_is_element_j_and_the_high_half_element_j_plus_32() -> None:
    tensor = torch.zeros(64)
    tensor[5], tensor[37] = 1.0, -0.5
    assert e3m0().encode(tensor)[1 + 5] == 7 | (8 | 6) << 4


@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_e3m0_keeps_the_error_that_its_docstring_states(spread: float) -> None:
    x = wide(64 * 500, seed=3, spread=spread).double()
    y = round_trip(e3m0(), x.float()).double()
    scale = y.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape(-1)
    error, x = (y - x.float()).abs(), x.float().double().abs()
    is_large = x >= 0.75 * scale / 64
    assert (error[is_large] <= x[is_large] / 3).all()
    assert (error[~is_large] <= scale[~is_large] / 128).all()
    assert error[is_large].div(x[is_large]).max() > 0.33, "the bound is meant to be tight"


def test_e3m0_counts_subnormal_numbers_as_zero() -> None:
    assert e3m0().encode(torch.full((64,), 1.9 * 2.0**-127)).count_nonzero() == 0
    assert e3m0("stochastic").encode(torch.full((64,), 1.9 * 2.0**-127), seed=1).count_nonzero() == 0


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_value_that_e3m0_decodes_is_zero_or_a_normal_number(rounding: str) -> None:
    codec = e3m0(rounding)  # type: ignore[arg-type]
    for power in range(-149, -110):
        values = round_trip(codec, 2.0**power * torch.linspace(-1, 1, 64)).abs()
        assert values[values > 0].numel() == 0 or values[values > 0].min() >= 2.0**-126


def test_e3m0_commutes_with_multiplication_by_powers_of_two() -> None:
    x = wide(1000, seed=5, spread=2.0)
    reference = round_trip(e3m0(), x)
    for power in (-60, -7, 1, 40):
        assert torch.equal(round_trip(e3m0(), x * 2.0**power), reference * 2.0**power)


@pytest.mark.parametrize("exponent", range(1, 8))
def test_e3m0_refuses_an_exponent_that_is_never_sent(exponent: int) -> None:
    payload = e3m0().encode(torch.ones(128))
    payload[33] = exponent
    with pytest.raises(PayloadError, match="never sent"):
        e3m0().decode(payload, numel=128)


def test_e3m0_refuses_an_unknown_rounding() -> None:
    with pytest.raises(ValueError, match=r"'nearest' or 'stochastic', got 'up'"):
        e3m0("up")  # type: ignore[arg-type]


def test_a_tensor_longer_than_a_chunk_gives_the_bytes_of_its_parts() -> None:
    x = wide(2**18 + 64 * 3 + 5, seed=1)
    for codec in (e3m0(), block_int4(), block_int8()):
        cut = 2**18 - 256 * 3
        parts = torch.cat([codec.encode(x[:cut]), codec.encode(x[cut:])])
        assert torch.equal(codec.encode(x), parts)
        assert torch.equal(round_trip(codec, x)[cut:], round_trip(codec, x[cut:]))


# ---------------------------------------------------------------- block integers


def as_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def as_bfloat16_bits(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return int(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def slow_block_int(tensor: torch.Tensor, *, bits: int) -> bytes:
    """Encode as the format says; a product or quotient of two float32 in double precision rounds as float32 would."""
    block, largest = (256, 127) if bits == 8 else (64, 7)
    values = tensor.tolist() + [0.0] * (-tensor.numel() % block)
    payload = b""
    for start in range(0, len(values), block):
        part = values[start : start + block]
        peak = max(abs(value) for value in part)
        scale = as_float32(peak * as_float32(1 / largest)) if peak >= 2.0**-100 else 0.0
        if bits == 4:
            stored = as_bfloat16_bits(scale)
            scale = struct.unpack("<f", struct.pack("<I", stored << 16))[0]
            payload += struct.pack("<H", stored)
        else:
            payload += struct.pack("<f", scale)
        inverse = as_float32(1 / scale) if scale else 0.0
        integers = [round(as_float32(value * inverse)) for value in part]
        if bits == 8:
            payload += struct.pack("256b", *integers)
        else:
            payload += bytes((integers[j] & 15) | (integers[j + 32] & 15) << 4 for j in range(32))
    return payload


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [0, 1, 64, 257, 2053])
def test_block_integers_give_the_bytes_of_the_slow_implementation(bits: int, numel: int) -> None:
    for spread in (0.0, 4.0):
        tensor = wide(numel, seed=numel + 1, spread=spread)
        codec = block_int8() if bits == 8 else block_int4()
        assert bytes(codec.encode(tensor).tolist()) == slow_block_int(tensor, bits=bits)


@pytest.mark.parametrize(("codec", "largest"), [(block_int8(), 127), (block_int4(), 7)])
def test_block_integers_are_off_by_half_a_step_at_most(codec: Codec, largest: int) -> None:
    for seed in range(20):
        x = wide(codec.block, seed=seed, spread=0.3 * seed)
        y = round_trip(codec, x)
        # the scale of int4 is rounded to 8 bits of mantissa
        step = x.abs().max() / largest * (1 + 2**-8)
        assert (x - y).abs().max() <= step / 2 * (1 + 1e-6)


@pytest.mark.parametrize(("codec", "largest"), [(block_int8(), 127), (block_int4(), 7)])
def test_block_integers_carry_every_integer_of_their_range(codec: Codec, largest: int) -> None:
    x = torch.arange(-largest, largest + 1, dtype=torch.float32) * 0.5
    torch.testing.assert_close(round_trip(codec, x), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [block_int8(), block_int4()], ids=lambda codec: codec.name)
def test_block_integers_handle_both_ends_of_float32(codec: Codec) -> None:
    assert round_trip(codec, torch.tensor([2.0**-101, -(2.0**-149)])).count_nonzero() == 0
    just_enough = torch.tensor([2.0**-100, 2.0**-149])
    torch.testing.assert_close(round_trip(codec, just_enough), torch.tensor([2.0**-100, 0.0]), rtol=0.005, atol=0)
    largest = torch.nextafter(torch.tensor(2.0**127), torch.tensor(0.0))
    assert round_trip(codec, torch.stack([largest, -largest])).isfinite().all()
    with pytest.raises(NonFiniteError, match=r"2\*\*127"):
        round_trip(codec, torch.tensor([2.0**127]))


@pytest.mark.parametrize("scale", [-1.0, math.nan, 3e38])
def test_block_int8_refuses_a_scale_that_is_never_sent(scale: float) -> None:
    payload = block_int8().encode(torch.ones(256))
    payload[:4] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(PayloadError, match="never sent"):
        block_int8().decode(payload, numel=256)


def test_block_int_refuses_other_numbers_of_bits() -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 3"):
        type(block_int8())(bits=3)


# ------------------------------------------------------------------------ dense


def test_dense_payloads_are_little_endian() -> None:
    assert bytes(float32().encode(torch.tensor([1.5])).tolist()) == struct.pack("<f", 1.5)
    assert bytes(float16().encode(torch.tensor([1.5])).tolist()) == struct.pack("<e", 1.5)
    assert bytes(bfloat16().encode(torch.tensor([1.5])).tolist()) == struct.pack("<f", 1.5)[2:]


@pytest.mark.parametrize("codec", [float32(), bfloat16(), float16()], ids=lambda codec: codec.name)
def test_dense_codecs_carry_nan_and_infinity(codec: Codec) -> None:
    values = round_trip(codec, torch.tensor([math.nan, math.inf, -math.inf, -0.0]))
    assert values[0].isnan()
    assert values[1:3].tolist() == [math.inf, -math.inf]
    assert torch.signbit(values[3])


def test_a_dense_payload_shares_no_memory_with_the_tensor_or_the_result() -> None:
    tensor = torch.ones(10)
    payload = float32().encode(tensor)
    result = float32().decode(payload, numel=10)
    tensor.fill_(2)
    result.fill_(3)
    assert float32().decode(payload, numel=10).tolist() == [1.0] * 10


@pytest.mark.parametrize("codec", [float32(), float16()], ids=lambda codec: codec.name)
def test_a_dense_payload_may_start_at_any_byte_of_a_message(codec: Codec) -> None:
    tensor = torch.arange(5, dtype=torch.float32)
    message = torch.cat([torch.zeros(1, dtype=torch.uint8), codec.encode(tensor)])
    assert torch.equal(codec.decode(message[1:], numel=5), tensor)


def test_float16_overflows_to_infinity_and_bfloat16_does_not() -> None:
    assert round_trip(float16(), torch.tensor([65519.0, 65520.0])).tolist() == [65504.0, math.inf]
    assert round_trip(bfloat16(), torch.tensor([2.0**100])).tolist() == [2.0**100]


# ------------------------------------------------------------- names and fusion


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown codec; got 'e3mo'; allowed float32, .*; try e3m0"):
        by_name("e3mo")
    with pytest.raises(ValueError, match=r"unknown codec; got '\?'; allowed float32"):
        by_name("?")


def test_names_take_underscores_and_capitals() -> None:
    assert by_name("Block_Int4") == block_int4()


@pytest.mark.slow
def test_the_traced_functions_give_the_bytes_of_the_plain_ones() -> None:
    # aot_eager traces and rewrites as for a GPU (writes to arguments become new values), but generates no code
    x = wide(64 * 7, seed=1).view(-1, 64)
    payload = e3m0().encode(x).view(-1, 33)
    for function, first, like in ((_nearest, x, payload), (_values, payload, x)):
        plain, traced = torch.empty_like(like), torch.empty_like(like)
        function(first, plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # which is how a fall-back would show
            Fused(function, backend="aot_eager", device_types=("cpu",))(first, traced)
        assert torch.equal(plain, traced)


def test_without_a_working_compiler_the_plain_function_answers_after_one_warning() -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no compiler here")

    double = Fused(lambda x: x * 2, backend=broken, device_types=("cpu",))
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_nothing_is_compiled_for_the_cpu() -> None:
    def never(*_: object) -> object:
        raise AssertionError("compiled")

    assert Fused(lambda x: x + 1, backend=never)(torch.zeros(1)).item() == 1


def test_a_failure_of_the_function_itself_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        Fused(torch.add, backend="eager", device_types=("cpu",))(torch.ones(2), torch.ones(3))


def test_a_kernel_of_our_own_is_taken_and_where_there_is_no_triton_the_compiler() -> None:
    def kernel() -> Any:
        return lambda x: x * 3

    def no_triton() -> Any:
        raise ImportError("no module named triton")

    assert Fused(lambda x: x * 2, device_types=("cpu",), kernel=kernel)(torch.ones(1)).item() == 3
    assert Fused(lambda x: x * 2, backend="eager", device_types=("cpu",), kernel=no_triton)(torch.ones(1)).item() == 2
