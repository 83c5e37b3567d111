"""Message headers of quorum and elastic rounds, validated on arrival.

The header of a part is three numbers of 8 bytes: 1 for an offer and 0 for a member that only asks for the result, the
tokens and the inner steps since the last of the fragment's rounds that counted it. The header of a mean is two numbers,
the step that it had reached and the last step up to which all rounds were closed, and a bit for each replica, the least
significant first, filled up to whole 8 bytes: who is in the mean. All little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.averaging.aggregation_rules import token_weight
from thinwire.averaging.round_context import Progress
from thinwire.errors import PayloadError

_PART_HEADER = struct.Struct("<QQQ")
_MEAN_HEADER = struct.Struct("<QQ")
PART_HEADER_BYTES = _PART_HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """Header of a member's part.

    Attributes:
        num_tokens: Tokens since the last of the fragment's rounds that counted it.
        num_steps: Inner steps since then.
        has_part: Whether a part follows; else the member asks for the result of a closed round.
    """

    num_tokens: int = 0
    num_steps: int = 0
    has_part: bool = False

    @property
    def weight(self) -> float:
        """The weight of the part in the mean: see `token_weight`."""
        return token_weight(num_tokens=self.num_tokens, num_steps=self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanHeader:
    """Header of the server's mean.

    Attributes:
        members: Who is in it, in ascending order.
        progress: The server's progress when it sent this.
    """

    members: tuple[int, ...]
    progress: Progress


def mean_header_bytes(num_replicas: int) -> int:
    """Return the bytes of a mean's header.

    Example:
        >>> mean_header_bytes(64), mean_header_bytes(65)
        (24, 32)
    """
    return _MEAN_HEADER.size + 8 * (-(-num_replicas // 64))


def with_part_header(offer: PartHeader, part: torch.Tensor | None) -> torch.Tensor:
    """Prepend the header to a coded part.

    Args:
        offer: The header.
        part: uint8, one-dimensional, CPU; None where it has none.

    Returns:
        uint8, one-dimensional, CPU.
    """
    word = _bytes(_PART_HEADER.pack(offer.has_part, offer.num_tokens, offer.num_steps))
    return word if part is None else torch.cat([word, part])


def read_part_header(payload: torch.Tensor, *, step: int | None, what: str) -> tuple[PartHeader, torch.Tensor]:
    """Split a message into the header and the coded part.

    Args:
        payload: uint8, one-dimensional, CPU: what a member sent.
        step: The step that the round was launched at, where no replica has done more steps than these; None where a
            replica may train on while it stays at a step.
        what: Names round and sender.

    Raises:
        PayloadError: It is too short, or its numbers cannot be.
    """
    if payload.numel() < PART_HEADER_BYTES:
        raise PayloadError(f"{what}: {payload.numel()} bytes, fewer than an offer's {PART_HEADER_BYTES}")
    kind, num_tokens, num_steps = _PART_HEADER.unpack(bytes(payload[:PART_HEADER_BYTES].numpy()))
    if kind not in (0, 1):
        raise PayloadError(f"{what}: an offer begins with 0 or 1, got {kind}")
    is_too_many = step is not None and num_steps > step
    if not num_steps <= num_tokens or (num_tokens and not num_steps) or is_too_many:
        when = "" if step is None else f", {step} steps after the start"
        raise PayloadError(
            f"{what}: it offers {num_tokens} tokens of {num_steps} steps{when}; the replicas run different set-ups, or "
            f"the sender lies"
        )
    if not kind and (num_tokens or payload.numel() > PART_HEADER_BYTES):
        raise PayloadError(f"{what}: it has no part, but offers {num_tokens} tokens and {payload.numel()} bytes")
    offer = PartHeader(num_tokens=num_tokens, num_steps=num_steps, has_part=bool(kind))
    return offer, payload[PART_HEADER_BYTES:].clone()  # codecs want their bytes at the start of a storage


def with_mean_header(verdict: MeanHeader, mean: torch.Tensor, *, num_replicas: int) -> torch.Tensor:
    """Prepend the header to a coded mean: uint8, one-dimensional, CPU."""
    mask = sum(1 << member for member in verdict.members)
    size = mean_header_bytes(num_replicas) - _MEAN_HEADER.size
    numbers = _MEAN_HEADER.pack(verdict.progress.step, verdict.progress.closed_step)
    return torch.cat([_bytes(numbers + mask.to_bytes(size, "little")), mean])


def read_mean_header(
    payload: torch.Tensor, *, num_replicas: int, server: int, least: int, step: int, what: str
) -> tuple[MeanHeader, torch.Tensor]:
    """Split a message into the header and the coded mean.

    Args:
        payload: uint8, one-dimensional, CPU: what the server sent.
        num_replicas: How many replicas there are.
        server: Which one the server is; it is in every mean.
        least: How many must be in a mean.
        step: The step that the round was launched at; the server has come as far.
        what: Names the round and the server.

    Raises:
        PayloadError: It is too short, or its values are impossible.
    """
    size = mean_header_bytes(num_replicas)
    if payload.numel() < size:
        raise PayloadError(f"{what}: {payload.numel()} bytes, fewer than a verdict's {size}")
    word = bytes(payload[:size].numpy())
    reached, closed = _MEAN_HEADER.unpack(word[: _MEAN_HEADER.size])
    mask = int.from_bytes(word[_MEAN_HEADER.size :], "little")
    members = tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    if reached < step or closed > reached:
        raise PayloadError(
            f"{what}: the server says that it was at step {reached} with all rounds up to step {closed} closed, for a "
            f"round of step {step}; that cannot be"
        )
    if server not in members or len(members) < least or members[-1] >= num_replicas:
        raise PayloadError(
            f"{what}: a mean is said to be of the replicas {_named(members)}; it must hold the server, replica "
            f"{server}, and at least {least} of {num_replicas}"
        )
    return MeanHeader(members=members, progress=Progress(step=reached, closed_step=closed)), payload[size:].clone()


def _named(members: Sequence[int]) -> str:
    return ", ".join(map(str, members)) or "none"


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
