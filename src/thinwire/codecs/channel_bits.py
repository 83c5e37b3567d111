"""Integers of 1 to 8 bits, a width for each channel; the sender learns the widths (AMAQ).

A channel is a place of the last dimension. Payload of `rows` times `channels` elements, little endian:

| part | bytes |
| --- | --- |
| channels | 4 |
| widths, 4 bits a channel | ceil(channels / 2) |
| scales, bfloat16 | 2 channels |
| for each width, lowest first: its channels one after the other, `rows` integers each | ceil(count rows width / 8) |

A payload stands by itself. AMAQ's table could be left out while it does not change, and a receiver would then remember
it; but a message that is sent again after a restart would not be understood, and the table takes a quarter of what the
scales take.

An integer k of b bits is the value (k - 2**(b-1) + 0.5) * scale, so that all 2**b levels serve. The scale is the
largest magnitude of the channel over 2**(b-1) - 0.5, rounded to bfloat16; for one bit twice the mean magnitude. Values
that were decoded encode to the same bytes again.

Reference:
    AMAQ, arXiv 2510.05468: bits = least + (most - least) * sigmoid(alpha Q), rounded straight-through; the loss gets
    beta * mean(sigmoid(alpha Q)**2). Ours: alpha, the first Q, and the gradient of the task, see `AdaptiveBits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.codecs.bit_packing import pack, packed_bytes, unpack
from thinwire.codecs.block_codec import check_payload, flatten
from thinwire.errors import NonFiniteError, PayloadError, refusal

NAME = "channel-bits"
_LEAST, _MOST = 1, 8
_HEAD_BYTES, _WIDTH_BITS = 4, 4
# below it a channel is zero, so that the reciprocal of a scale is finite
_SMALLEST_PEAK = 2.0**-100
# sigmoid(2.2) = 0.9: training starts near the most bits
_FIRST_SCORE = 2.2


def channel_payload_bytes(widths: Tensor, *, rows: int) -> int:
    """Return the exact size of a payload.

    Args:
        widths: (channels,) integers, bits of each channel.
        rows: Elements of each channel, above 0.

    Example:
        >>> channel_payload_bytes(torch.tensor([3, 8, 3]), rows=5)
        21
    """
    channels, counts = len(widths), torch.bincount(widths.long(), minlength=_MOST + 1).tolist()
    groups = sum(packed_bytes(count * rows, width=width) for width, count in enumerate(counts))
    return _HEAD_BYTES + packed_bytes(channels, width=_WIDTH_BITS) + 2 * channels + groups


class AdaptiveBits(nn.Module):
    """Learned widths of the channels that a stage sends; part of the model before the border.

    Its output is what the receiver decodes. Gradients pass to its input unchanged. With each bit the error of a
    rounded value halves, so the task's gradient for a channel's bits is -ln 2 times the sum of gradient times error.
    The scores Q want a learning rate of their own, and `regulariser` in the loss, or nothing pays for bits.

    Args:
        channels: Width of what is sent.
        least: Fewest bits of a channel.
        most: Most bits.
        alpha: Steepness; the learning rate of the scores is inverse to it.

    Raises:
        ValueError: There is no channel, or 1 <= least <= most <= 8 does not hold.

    Example:
        >>> bits = AdaptiveBits(4, least=2, most=6)
        >>> bits(torch.ones(3, 4)).shape, bits.widths().tolist()
        (torch.Size([3, 4]), [6, 6, 6, 6])
    """

    def __init__(self, channels: int, *, least: int = 2, most: int = 8, alpha: float = 1.0) -> None:
        super().__init__()
        if channels < 1 or not _LEAST <= least <= most <= _MOST:
            raise refusal(
                "the bits of channels are out of their range", got=f"{least} to {most} bits, {channels} channels",
                allowed=f"{_LEAST} <= least <= most <= {_MOST}, 1 channel or more", remedy="least=2, most=8",
            )  # fmt: skip
        if not 0 < alpha < math.inf:
            raise refusal("the steepness of bits is a number above 0", got=f"alpha={alpha}", allowed="above 0, finite",
                          remedy="alpha=1.0")  # fmt: skip
        self.least, self.most, self.alpha = least, most, alpha
        self.scores = nn.Parameter(torch.full((channels,), _FIRST_SCORE / alpha))

    def bits(self) -> Tensor:
        """Return the bits of each channel, (channels,), fractions included, with a gradient."""
        return self.least + (self.most - self.least) * torch.sigmoid(self.alpha * self.scores)

    def widths(self) -> Tensor:
        """Return the bits of each channel as they are sent, (channels,) int64.

        Raises:
            NonFiniteError: A score is NaN.
        """
        return _whole(self.bits().detach())

    def regulariser(self) -> Tensor:
        """Return mean(sigmoid(alpha Q)**2), a scalar: times beta it is the price of bits."""
        return torch.sigmoid(self.alpha * self.scores).square().mean()

    def forward(self, values: Tensor) -> Tensor:
        """Return values, (..., channels), as the receiver gets them; same shape and dtype."""
        found: Tensor = _Rounded.apply(values, self.bits())  # type: ignore[no-untyped-call]
        return found


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: Tensor) -> Tensor:
        widths = _whole(bits)
        numbers, scales = _integers(_rows(values), widths)
        out = _values(numbers, scales, widths).view(values.shape).to(values.dtype)
        ctx.save_for_backward(out - values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (error,) = ctx.saved_tensors
        return gradient, _rows(gradient * error).sum(0).mul(-math.log(2))


@dataclass(frozen=True, kw_only=True)
class ChannelBits:
    """The codec. Without `bits` it encodes each channel in 8 bits; any widths are decoded.

    Attributes:
        bits: Widths of what is sent.
    """

    bits: AdaptiveBits | None = None
    name: str = NAME
    has_fixed_size: bool = False

    def payload_bytes(self, numel: int) -> int:
        """Return the most bytes of so many elements, whatever their shape: all in one row, in 8 bits."""
        return _HEAD_BYTES + 3 * numel + packed_bytes(numel, width=_WIDTH_BITS) if numel else 0

    def encode(self, tensor: Tensor) -> Tensor:
        """Encode a floating tensor, (..., channels).

        Returns:
            uint8, one dimension; nothing for no element.

        Raises:
            ValueError: It has other channels than `bits`.
        """
        rows = _rows(tensor)
        channels = rows.shape[1]
        widths = rows.new_full((channels,), _MOST, dtype=torch.int64) if self.bits is None else self.bits.widths()
        if len(widths) != channels:
            raise refusal("values have other channels than the learned bits", got=channels, allowed=len(widths),
                          remedy=f"AdaptiveBits({channels})")  # fmt: skip
        if not rows.numel():
            return torch.empty(0, dtype=torch.uint8, device=tensor.device)
        numbers, scales = _integers(rows, widths.to(rows.device))
        head = torch.tensor(list(channels.to_bytes(_HEAD_BYTES, "little")), dtype=torch.uint8, device=rows.device)
        table = pack(widths.to(rows.device)[None], width=_WIDTH_BITS)[0]
        groups = [pack(numbers[:, widths == width].T.reshape(1, -1), width=width)[0] for width in _present(widths)]
        return torch.cat([head, table, scales.to(torch.bfloat16).view(torch.uint8), *groups])

    def decode(self, payload: Tensor, *, numel: int) -> Tensor:
        """Decode to float32, (numel,), on the payload's device.

        Args:
            payload: uint8, one dimension; zeros may follow it, as in a buffer of `payload_bytes` that was not filled.
            numel: Elements.

        Raises:
            PayloadError: It is no payload of so many elements.
            NonFiniteError: A scale is not finite, or a value of the largest integers is not.
        """
        most = self.payload_bytes(numel)
        check_payload(payload, name=NAME, numel=numel, expected=most, has_fixed_size=False)
        if not numel:
            return torch.empty(0, device=payload.device)
        channels = int.from_bytes(bytes(payload[:_HEAD_BYTES].tolist()), "little")
        begin = _HEAD_BYTES + packed_bytes(channels, width=_WIDTH_BITS)
        if not 1 <= channels <= numel or numel % channels or len(payload) < begin:
            raise PayloadError(f"{NAME}: {len(payload)} bytes with {channels} channels do not hold {numel} elements")
        rows, table = numel // channels, payload[_HEAD_BYTES:begin][None]
        widths = unpack(table, count=channels, width=_WIDTH_BITS, name=NAME)[0].long()
        if not bool(((widths >= _LEAST) & (widths <= _MOST)).all()):
            raise PayloadError(f"{NAME}: a channel has {widths.min()} or {widths.max()} bits, not {_LEAST} to {_MOST}")
        size = channel_payload_bytes(widths, rows=rows)
        if len(payload) < size or bool(payload[size:].any()):
            raise PayloadError(f"{NAME}: these widths take {size} bytes, got {len(payload)}, or zeros do not follow")
        scales = payload[begin : begin + 2 * channels].clone().view(torch.bfloat16).float()
        if not bool((scales * _largest(widths)).isfinite().all()):
            raise NonFiniteError(f"{NAME}: a channel held NaN, infinity or a magnitude near float32's largest")
        if bool((scales < 0).any()):
            raise PayloadError(f"{NAME}: the scale of a channel is negative, which is never sent")
        numbers, begin = torch.empty(rows, channels, device=payload.device), begin + 2 * channels
        for width in _present(widths):
            own = widths == width
            count = int(own.sum())
            end = begin + packed_bytes(count * rows, width=width)
            found = unpack(payload[begin:end][None], count=count * rows, width=width, name=NAME)
            numbers[:, own], begin = found.view(count, rows).T.float(), end
        return _values(numbers, scales, widths).view(-1)


def _whole(bits: Tensor) -> Tensor:
    if bool(bits.isnan().any()):
        raise NonFiniteError("the learned bits of a channel are NaN; lower the learning rate of the scores")
    return bits.round().long()


def _rows(values: Tensor) -> Tensor:
    """Return values as float32 (rows, channels)."""
    flat = flatten(values)
    return flat.float().view(-1, max(1, values.shape[-1] if values.dim() else 1))


def _present(widths: Tensor) -> list[int]:
    return sorted(set(widths.tolist()))


def _integers(rows: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers (rows, channels) from 0, and the scales (channels,), float32, rounded as they are sent."""
    half = torch.pow(2.0, widths.to(rows.dtype) - 1)
    size = rows.abs()
    spread = torch.where(widths == 1, 2 * size.mean(0), size.amax(0) / (half - 0.5)) if rows.numel() else half * 0
    scales = spread.masked_fill(spread < _SMALLEST_PEAK, 0.0).to(torch.bfloat16).float()
    inverse = (1 / scales).masked_fill(scales == 0, 0.0)
    numbers = (rows * inverse).floor().add_(half).clamp_(min=0).minimum(2 * half - 1)
    return numbers.to(torch.uint8), scales


def _values(numbers: Tensor, scales: Tensor, widths: Tensor) -> Tensor:
    """Return the values of integers, float32 (rows, channels)."""
    return (numbers.float() - _largest(widths)) * scales


def _largest(widths: Tensor) -> Tensor:
    """Return the largest magnitude of a value of each width, in scales."""
    return torch.pow(2.0, widths.to(torch.float32) - 1) - 0.5
