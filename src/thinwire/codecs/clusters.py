"""Values of a sparse payload as two centroids a layer and one bit a value (FedZip, arXiv 2102.01593).

The kept values of a layer, and its zeros, are clustered by k-means with three centroids: the start is `linspace(min,
max, 3)`, four Lloyd steps follow. The cluster that holds zero is not sent, as the paper's middle one: its members stay
with the sender, where error feedback adds them to the next round. Of the other two each value sends one bit.

Payload: the set of indices as in `thinwire.codecs.sparse_payload`; the two centroids of each layer that has elements,
the lower first, as bfloat16; one bit for each index. A layer with NaN, infinity or a magnitude of 2**127 or more has
infinite centroids, and receivers refuse it.

Changed from the authors' code: it estimates sizes and sends nothing; two of its three estimates cannot be decoded, and
its Huffman code of three symbols ends at a factor of 32. Here positions are coded, so that the factor grows with 1 /
density: 1 bit and an index a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.codecs import bit_packing
from thinwire.codecs.base import ordered_sum
from thinwire.codecs.block_codec import check_payload
from thinwire.codecs.sparse_payload import decode_indices, encode_indices, max_index_bytes, num_indices
from thinwire.errors import NonFiniteError, PayloadError

_CENTROID_BYTES = 4
_LLOYD_STEPS = 4
_LIMIT = 2.0**127


def most_bytes(sizes: Sequence[int], *, count: int) -> int:
    """Return the most bytes that `count` or fewer values of layers of these sizes take.

    Example:
        >>> most_bytes([1000, 0, 10], count=11)
        29
    """
    return max_index_bytes(count, numel=sum(sizes)) + _tail_bytes(sizes, count) if sum(sizes) else 0


def _tail_bytes(sizes: Sequence[int], count: int) -> int:
    layers = sum(size > 0 for size in sizes)
    return _CENTROID_BYTES * layers + bit_packing.packed_bytes(count, width=1) if count else 0


def three_means(values: torch.Tensor, *, num_zeros: int) -> torch.Tensor:
    """Cluster values, and zeros that are only counted.

    Args:
        values: float64, `(count,)`, finite, at least one.
        num_zeros: Zeros beside them, at least 1.

    Returns:
        float64, `(3,)`, ascending: the centroids after four Lloyd steps; one without members stays where it was.

    Example:
        >>> three_means(torch.tensor([-2.0, 3.0, 5.0], dtype=torch.float64), num_zeros=7).tolist()
        [-2.0, 0.0, 4.0]
    """
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    centroids = [low, low + (high - low) / 2, high]
    for _ in range(_LLOYD_STEPS):
        labels, zero = cluster_of(values, centroids), int(cluster_of(values.new_zeros(1), centroids))
        for place in range(3):
            inside = labels == place
            count = int(inside.sum()) + num_zeros * (place == zero)
            if count:
                # the sum is in one order on every device, or centroids would differ in their last bit
                centroids[place] = float(ordered_sum(torch.where(inside, values, 0.0).view(1, -1))) / count
    return torch.tensor(centroids, dtype=torch.float64)


def cluster_of(values: torch.Tensor, centroids: Sequence[float]) -> torch.Tensor:
    """Return the number of the nearest of three ascending centroids, int64; of two as near the lower one."""
    low, middle, high = centroids
    upper: torch.Tensor = values > middle / 2 + high / 2
    return (values > low / 2 + middle / 2).to(torch.int64) + upper.to(torch.int64)


def encode(flat: torch.Tensor, layers: Sequence[torch.Tensor], *, sizes: Sequence[int]) -> torch.Tensor:
    """Encode the chosen elements of each layer.

    Args:
        flat: float32, `(numel,)`: the layers one after the other.
        layers: For each layer the chosen places in it, int64, ascending.
        sizes: Elements of each layer.

    Returns:
        uint8, on the same device.
    """
    kept, bits, means = [], [], []
    for part, chosen in zip(torch.split(flat, list(sizes)), layers, strict=True):
        if part.numel() == 0:
            continue
        places, is_upper, pair = _coded_layer(part, chosen)
        kept.append(places.add(part.storage_offset() - flat.storage_offset()))
        bits.append(is_upper)
        means.append(pair)
    indices = torch.cat(kept)
    head = torch.from_numpy(encode_indices(indices.cpu().numpy(), numel=flat.numel())).to(flat.device)
    if indices.numel() == 0:
        return head
    table = torch.stack(means).to(torch.bfloat16).view(torch.uint8).reshape(-1).to(flat.device)
    return torch.cat((head, table, bit_packing.pack_bits(torch.cat(bits).view(1, -1)).view(-1)))


def _coded_layer(part: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the places that are sent, which of them are of the upper cluster, and the two centroids."""
    values = part[chosen].to(torch.float64)
    if values.numel() == 0:
        return chosen, chosen.to(torch.uint8), torch.zeros(2, dtype=torch.float64)
    if not bool((values.abs() < _LIMIT).all()):
        return chosen[:1], chosen[:1].to(torch.uint8) * 0, torch.full((2,), torch.inf, dtype=torch.float64)
    # one zero at least: else the only value of a layer would be its own zero cluster
    centroids = three_means(values, num_zeros=max(1, part.numel() - values.numel()))
    labels = cluster_of(values, centroids.tolist())
    zero = int(cluster_of(values.new_zeros(1), centroids.tolist()))
    lower, upper = (place for place in range(3) if place != zero)
    sent = labels != zero
    return chosen[sent], (labels[sent] == upper).to(torch.uint8), centroids[[lower, upper]]


def decode(payload: torch.Tensor, *, sizes: Sequence[int], count: int, name: str) -> torch.Tensor:
    """Decode to the whole vector, zeros where nothing was sent.

    Args:
        payload: What arrived.
        sizes: Elements of each layer.
        count: The most values that may be sent.
        name: The codec's name, for messages.

    Returns:
        float32, `(sum of sizes,)`, finite.

    Raises:
        PayloadError: The payload is none of such layers.
        NonFiniteError: A layer held NaN, infinity or a magnitude of 2**127 or more.
    """
    numel = sum(sizes)
    check_payload(payload, name=name, numel=numel, expected=most_bytes(sizes, count=count), has_fixed_size=False)
    whole = torch.zeros(numel, dtype=torch.float32, device=payload.device)
    if numel == 0:
        return whole
    data = payload.cpu().contiguous().numpy()
    found = num_indices(data, numel=numel, name=name)
    size = _tail_bytes(sizes, found)
    indices = decode_indices(data[: max(0, len(data) - size)], numel=numel, name=name)
    if found == 0:
        return whole
    tail = payload[payload.numel() - size :].clone()
    is_upper = bit_packing.unpack_bits(tail[size - bit_packing.packed_bytes(found, width=1) :].view(1, -1), count=found,
                                       name=name).view(-1)  # fmt: skip
    filled = [length for length in sizes if length]
    table = tail[: _CENTROID_BYTES * len(filled)].clone().view(torch.bfloat16).to(torch.float32).view(-1, 2)
    if bool((table == torch.inf).any()):
        raise NonFiniteError(f"{name}: the tensor held NaN, infinity or a magnitude of 2**127 or more")
    if not bool((table.abs() <= _LIMIT).all()):
        raise PayloadError(f"{name}: a centroid is NaN, -infinity or above 2**127: never sent")
    places = torch.from_numpy(indices).to(payload.device)
    ends = torch.tensor(filled, device=payload.device).cumsum(0)
    whole[places] = table[torch.searchsorted(ends, places, right=True), is_upper.to(torch.int64)]
    return whole
