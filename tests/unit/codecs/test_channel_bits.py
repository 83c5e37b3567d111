"""Widths for each channel: the byte law, an independent reference, gradients of the scores, and hostile payloads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire.codecs import channel_bits
from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.channel_bits import AdaptiveBits, ChannelBits, channel_payload_bytes
from thinwire.errors import NonFiniteError, PayloadError

SHAPES = [(1,), (7,), (1, 1), (5, 3), (2, 3, 17), (64, 32), (3, 7, 11)]


def learned(widths: list[int]) -> AdaptiveBits:
    """Return bits whose integers are the given ones."""
    bits = AdaptiveBits(len(widths), least=1, most=8)
    with torch.no_grad():
        share = (torch.tensor(widths, dtype=torch.float64) - 1) / 7
        bits.scores.copy_(torch.logit(share.clamp(1e-6, 1 - 1e-6)))
    assert bits.widths().tolist() == widths
    return bits


def reference(column: Tensor, width: int) -> Tensor:
    """Return a channel as its receiver has it, number by number."""
    half = 2 ** (width - 1)
    spread = 2 * column.abs().mean() if width == 1 else column.abs().max() / (half - 0.5)
    scale = spread.to(torch.bfloat16).float()
    if scale == 0:
        return torch.zeros_like(column)
    numbers = [min(max(math.floor(float(one * (1 / scale))), -half), half - 1) for one in column]
    return torch.tensor([number + 0.5 for number in numbers]) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_payloads_have_the_bytes_of_the_law_and_decode_as_a_loop_over_channels_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    for shape in SHAPES:
        values = torch.randn(shape, generator=generator).to(dtype)
        if values.dim() > 1:
            values = values.transpose(0, 1).contiguous().transpose(0, 1)
            values[..., 0] *= 1000  # an outlier channel
        channels, numel = shape[-1], values.numel()
        widths = [1 + number % 8 for number in range(channels)]
        codec = ChannelBits(bits=learned(widths))
        payload = codec.encode(values)
        rows = numel // channels
        counts = {width: widths.count(width) for width in widths}
        law = 4 + -(-channels // 2) + 2 * channels
        law += sum(-(-count * rows * width // 8) for width, count in counts.items())
        assert payload.shape == (law,) and law <= codec.payload_bytes(numel)
        assert channel_payload_bytes(torch.tensor(widths), rows=rows) == law
        found = ChannelBits().decode(payload, numel=numel).view(shape)
        flat = values.reshape(-1, channels).float()
        expected = torch.stack([reference(flat[:, one], width) for one, width in enumerate(widths)], 1)
        assert torch.equal(found, expected.view(shape)), (shape, dtype)
        assert torch.equal(codec.encode(found), payload)  # what is decoded encodes to the same bytes
    assert len(codec.encode(torch.empty(0, 11))) == codec.payload_bytes(0) == 0
    assert codec.decode(torch.empty(0, dtype=torch.uint8), numel=0).shape == (0,)


@pytest.mark.parametrize("width", range(1, 9))
def test_equal_least_and_most_bits_are_the_fixed_code_bit_for_bit(width: int) -> None:
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(width))
    bits = AdaptiveBits(5, least=width, most=width)
    with torch.no_grad():
        bits.scores.normal_()
    payload = ChannelBits(bits=bits).encode(values)
    assert torch.equal(payload, ChannelBits(bits=learned([width] * 5)).encode(values))
    if width == 8:
        assert torch.equal(payload, ChannelBits().encode(values))
    output = bits(values)
    assert torch.equal(output, ChannelBits().decode(payload, numel=45).view(9, 5))
    output.square().sum().backward()
    assert bits.scores.grad is not None and not bits.scores.grad.any()  # nothing to learn


def test_gradients_of_the_scores_are_those_of_the_regulariser_and_of_errors_that_halve_with_each_bit() -> None:
    bits = AdaptiveBits(6, least=2, most=7, alpha=1.7).double()
    with torch.no_grad():
        bits.scores.copy_(torch.linspace(-2, 2, 6))
    bits.regulariser().backward()
    assert bits.scores.grad is not None
    found, step = bits.scores.grad.clone(), 1e-6
    for number in range(6):
        with torch.no_grad():
            bits.scores[number] += step
            above = bits.regulariser()
            bits.scores[number] -= 2 * step
            below = bits.regulariser()
            bits.scores[number] += step
        torch.testing.assert_close(found[number], (above - below) / (2 * step), rtol=1e-6, atol=1e-12)

    values = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    wanted, bits.scores.grad = torch.randn(3, 4, 6, dtype=torch.float64), None
    output = bits(values)
    (output * wanted).sum().backward()
    assert values.grad is not None and torch.equal(values.grad, wanted)
    # the same loss with each error scaled by 2 to the bits added
    scores = bits.scores.detach().clone().requires_grad_()
    added = 2 + 5 * torch.sigmoid(1.7 * scores)
    smooth = values.detach() + (output - values).detach() * torch.pow(2.0, added.detach() - added)
    (smooth * wanted).sum().backward()
    torch.testing.assert_close(bits.scores.grad, scores.grad)


def test_a_channel_that_matters_more_keeps_more_bits() -> None:
    """Two of six channels carry what is wanted; the price of bits falls on the others."""
    torch.manual_seed(0)
    bits = AdaptiveBits(6, least=1, most=8)
    optimizer = torch.optim.Adam(bits.parameters(), lr=0.1)
    weights = torch.tensor([1.0, 1.0, 0, 0, 0, 0])
    for _ in range(120):
        values = torch.randn(64, 6)
        ((bits(values) - values).square().mean(0) @ weights + 0.3 * bits.regulariser()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = bits.widths().tolist()
    assert min(found[:2]) >= max(found[2:]) + 2, found


def test_hostile_payloads_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10, 5, generator=torch.Generator().manual_seed(1))
    good = ChannelBits(bits=learned([1, 3, 8, 3, 5])).encode(values)
    assert torch.equal(ChannelBits().decode(torch.cat([good, good.new_zeros(9)]), numel=50)[:3],
                       ChannelBits().decode(good, numel=50)[:3])  # fmt: skip

    def changed(place: int, value: int) -> Tensor:
        found = good.clone()
        found[place] = value
        return found

    def no_memory(*_: object, **__: object) -> Tensor:
        raise AssertionError("numbers were unpacked")

    cases = {
        "0 or 8 bits": changed(4, 0x30), "1 or 15 bits": changed(4, 0xF1), "1 or 9 bits": changed(5, 0x39),
        "which is never sent": changed(6, 0x15), "these widths take": changed(4, 0x38),
        "with 0 channels": changed(0, 0), "with 7 channels": changed(0, 7), "with 4278190085 channels": changed(3, 255),
        "zeros do not follow": torch.cat([good, good.new_ones(1)]), f"got {len(good) - 1},": good[:-1],
        "at most, got": torch.zeros(ChannelBits().payload_bytes(50) + 1, dtype=torch.uint8),
        "with 5 channels": good[:5],
        "one dimension": good[None], "with 0 channels do": good[:0],
    }  # fmt: skip
    table = channel_bits.unpack

    def table_alone(packed: Tensor, *, count: int, width: int, name: str) -> Tensor:
        return table(packed, count=count, width=width, name=name) if count <= 50 and width == 4 else no_memory()

    monkeypatch.setattr(channel_bits, "unpack", table_alone)
    monkeypatch.setattr(torch, "empty", no_memory)
    for reason, payload in cases.items():
        with pytest.raises(PayloadError, match=reason):
            ChannelBits().decode(payload, numel=50)
    with pytest.raises(NonFiniteError):
        ChannelBits().decode(changed(8, 0x7F) | changed(7, 0x80), numel=50)
    with pytest.raises(PayloadError, match="scale of a channel is negative"):
        ChannelBits().decode(changed(8, 0xBF), numel=50)


def test_wrong_arguments_are_refused_with_a_remedy_that_works() -> None:
    for arguments in ({"least": 0}, {"most": 9}, {"least": 5, "most": 4}, {"channels": 0}):
        with pytest.raises(ValueError, match=r"bits of channels are out of their range.*try least=2, most=8"):
            AdaptiveBits(**{"channels": 3, **arguments})
    AdaptiveBits(3, least=2, most=8)
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"the steepness of bits is a number above 0.*try alpha=1.0"):
            AdaptiveBits(3, alpha=alpha)


def test_no_value_is_infinite_and_no_width_comes_from_nan() -> None:
    largest = torch.tensor([[torch.finfo(torch.float32).max, 1.0]])
    with pytest.raises(NonFiniteError, match="near float32's largest"):  # its scale is finite, but was rounded up
        ChannelBits().decode(ChannelBits().encode(largest), numel=2)
    near = ChannelBits().decode(ChannelBits().encode(largest * 0.99), numel=2)
    assert near.isfinite().all() and near[0] == pytest.approx(float(largest[0, 0]), rel=0.02)
    bits = AdaptiveBits(2)
    with torch.no_grad():
        bits.scores[1] = math.nan
    for use in (ChannelBits(bits=bits).encode, bits):
        with pytest.raises(NonFiniteError, match="lower the learning rate of the scores"):
            use(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"other channels.*try AdaptiveBits\(4\)"):
        ChannelBits(bits=AdaptiveBits(3)).encode(torch.ones(2, 4))
    ChannelBits(bits=AdaptiveBits(4)).encode(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r'learned bits need the codec.*try forward="channel-bits"'):
        ActivationCode(bits=AdaptiveBits(3))
    code = ActivationCode(forward="channel-bits", bits=AdaptiveBits(3))
    assert code == ActivationCode("channel-bits") and code.name == "channel-bits/block-int4"
    assert not code.has_fixed_size() and code.has_fixed_size(is_forward=False) and ActivationCode().has_fixed_size()
    with pytest.raises(ValueError, match="unknown codec; got 'channel-bits'"):
        ActivationCode(backward="channel-bits")
