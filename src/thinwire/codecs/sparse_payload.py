"""The payload of a codec that sends some elements: which they are, and then their values.

Wire format: the set of indices as `thinwire.codecs.indices` says, then the values in ascending order of their indices
as one row of `thinwire.codecs.values`. A tensor without elements is a payload without bytes.
"""

from __future__ import annotations

import torch

from thinwire.codecs.block_codec import check_size_at_most, num_rows
from thinwire.codecs.indices import (
    decode_indices,
    encode_indices,
    expected_bits_per_index,
    max_index_bytes,
    num_indices,
)
from thinwire.codecs.values import bits_per_value, decode_values, encode_values, value_bytes


def max_bytes(numel: int, *, count: int, values: str) -> int:
    """Return the most bytes that `count` or fewer of `numel` elements take; 0 for a tensor without elements.

    Raises:
        ValueError: `numel` is negative.
    """
    if num_rows(numel, block=1) == 0:
        return 0
    return max_index_bytes(count, numel=numel) + value_bytes(count, values=values)


def expected_bits_per_element(density: float, *, values: str) -> float:
    """Return the bits an element costs in long tensors when the sent ones are at random positions.

    Example:
        >>> round(expected_bits_per_element(0.01, values="float16"), 3)
        0.241
    """
    return density * (expected_bits_per_index(density) + bits_per_value(values))


def encode_chosen(flat: torch.Tensor, chosen: torch.Tensor, *, values: str) -> torch.Tensor:
    """Encode the chosen elements.

    Args:
        flat: float32, `(numel,)`.
        chosen: int64, `(count,)`, strictly ascending, on the same device.
        values: The format of the values.

    Returns:
        uint8, on the same device.
    """
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    indices = torch.from_numpy(encode_indices(chosen.cpu().numpy(), numel=flat.numel())).to(flat.device)
    if chosen.numel() == 0:
        return indices
    return torch.cat((indices, encode_values(flat[chosen].view(1, -1), values=values).view(-1)))


def decode_chosen(payload: torch.Tensor, *, numel: int, count: int, values: str, name: str) -> torch.Tensor:
    """Decode to the whole tensor, zeros where nothing was sent.

    Args:
        payload: What arrived.
        numel: Elements of the tensor.
        count: The most elements that may be sent.
        values: The format of the values.
        name: The codec's name, for messages.

    Returns:
        float32, `(numel,)`, finite.

    Raises:
        PayloadError: The payload is none of `numel` elements.
        NonFiniteError: The sender's tensor held NaN, infinity, or more than the format can carry.
    """
    check_size_at_most(payload, name=name, numel=numel, limit=max_bytes(numel, count=count, values=values))
    whole = torch.zeros(numel, dtype=torch.float32, device=payload.device)
    if numel == 0:
        return whole
    data = payload.cpu().contiguous().numpy()
    # of too short a payload, only the index part is looked at, which then says that it is too short
    size = value_bytes(num_indices(data, numel=numel, name=name), values=values)
    indices = decode_indices(data[: max(0, len(data) - size)], numel=numel, name=name)
    if len(indices):
        row = payload[payload.numel() - size :].view(1, -1)
        found = decode_values(row, count=len(indices), values=values, name=name)
        whole[torch.from_numpy(indices).to(payload.device)] = found.view(-1)
    return whole
