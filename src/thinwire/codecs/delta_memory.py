"""Differences to the last visit of each sample, of which both ends of a border keep a copy (AQ-SGD).

Payload of a micro-batch, little endian:

| part | bytes |
| --- | --- |
| for each sample its number and its visits before, 4 bytes each | 8 rows |
| values of samples on their first visit, as the stage holds them | their bytes |
| the codec's payload of (values - last), of all other samples one after the other | `payload_bytes` |

Both ends add the decoded difference to their copy and round to float16, on the CPU, so their copies stay equal bit by
bit. The receiver computes all sizes from its own shapes and counters, never from what arrives.

Reference:
    AQ-SGD, arXiv 2206.01299. Gradients are coded directly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codec_specs import delta_memory_bytes
from thinwire.codecs.base import Codec
from thinwire.errors import NonFiniteError, PayloadError, refusal

_HEAD_BYTES = 8
_log = logging.getLogger(__name__)


class DeltaMemory:
    """One end's copies of the last values of every sample, for one border and direction.

    Args:
        codec: Of differences; its payloads have a fixed size.
        samples: Samples of the data set; their numbers are below it.
        most_bytes: Largest memory of the copies.
    """

    def __init__(self, codec: Codec, *, samples: int, most_bytes: int) -> None:
        self._codec, self._most_bytes = codec, most_bytes
        self._visits = torch.zeros(samples, dtype=torch.int32)
        self._last = torch.empty(samples, 0, dtype=torch.float16)

    @property
    def visits(self) -> list[int]:
        """Visits of each sample, which both ends of a border count."""
        found: list[int] = self._visits.tolist()
        return found

    def payload_bytes(self, values: Tensor) -> int:
        """Return the most bytes of a payload of such values, (rows, ...)."""
        numel = values.numel() // max(1, len(values))
        return len(values) * (_HEAD_BYTES + max(numel * values.element_size(), self._codec.payload_bytes(numel)))

    def encode(self, values: Tensor, numbers: Sequence[int], *, source: str) -> Tensor:
        """Encode a micro-batch, and keep what the receiver decodes.

        Args:
            values: (rows, ...), finite.
            numbers: Of the samples in the rows.
            source: Sender and place, for errors.

        Returns:
            uint8, one dimension, on the values' device.

        Raises:
            ValueError: There are other rows than numbers, or the copies take more memory than allowed.
            NonFiniteError: A magnitude does not fit float16.
        """
        rows = self._rows(values.detach().cpu(), numbers)
        own = torch.tensor(numbers)
        visits = self._visits[own]
        is_first, head = visits == 0, torch.stack([own.int(), visits], dim=1)
        payload = self._codec.encode((rows[~is_first].float() - self._last[own[~is_first]].float()).flatten())
        self._keep(own, visits, self._decoded(own, is_first, rows[is_first], payload), source=source)
        parts = [head.flatten().view(torch.uint8), rows[is_first].contiguous().flatten().view(torch.uint8), payload]
        return torch.cat(parts).to(values.device)

    def decode(self, payload: Tensor, out: Tensor, numbers: Sequence[int], *, source: str) -> int:
        """Fill a tensor with the values of a micro-batch, and keep them.

        Args:
            payload: uint8, one dimension; zeros may follow it, as in a buffer that was not filled.
            out: (rows, ...).
            numbers: Of the samples in the rows, as this end knows them.
            source: Sender and place, for errors.

        Returns:
            Bytes of the payload, without what follows.

        Raises:
            ValueError: There are other rows than numbers, or the copies take more memory than allowed.
            PayloadError: It has other samples or visits than this end, or another size.
            NonFiniteError: A value is not finite, or does not fit float16.
        """
        shaped = self._rows(out.detach().cpu(), numbers)
        own, found, begin = torch.tensor(numbers), payload.cpu(), _HEAD_BYTES * len(numbers)
        if len(found) < begin:
            raise PayloadError(f"{source}: {len(found)} bytes do not hold the numbers of {len(numbers)} samples")
        sent, visits = found[:begin].clone().view(torch.int32).view(-1, 2).unbind(1)
        is_first, kept = visits == 0, self._visits[own]
        is_other = (sent != own) | ~is_first & (visits != kept)
        if is_other.any():
            row = int(is_other.nonzero()[0])
            raise PayloadError(
                f"{source}: the sender has sample {int(sent[row])} after {int(visits[row])} visits, this end sample "
                f"{numbers[row]} after {int(kept[row])}; name the same samples on all ranks, or drop the copies of all "
                f"by load_state_dict(None) of their stages"
            )
        middle = begin + shaped[is_first].nbytes
        size = middle + self._codec.payload_bytes(shaped[~is_first].numel())
        if len(found) < size or found[size:].any():
            raise PayloadError(f"{source}: the samples take {size} bytes, got {len(found)}, or zeros do not follow")
        for number in own[is_first & (kept > 0)].tolist():
            _log.warning("%s: sample %d came uncoded again, since the sender has no copy of it", source, number)
        first = found[begin:middle].clone().view(shaped.dtype).view(-1, shaped.shape[1])
        values = self._decoded(own, is_first, first, found[middle:size])
        self._keep(own, visits, values, source=source)
        values = values.to(shaped.dtype)
        values[is_first] = first  # float64 too
        with torch.no_grad():
            out.copy_(values.view(out.shape))
        return size

    def state_dict(self) -> dict[str, Tensor]:
        """Return counters and copies; they are not cloned."""
        return {"visits": self._visits, "last": self._last}

    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Take counters and copies, or drop all.

        Raises:
            ValueError: They are of another number of samples, or take more memory than allowed.
        """
        if state is None:
            self._visits, self._last = torch.zeros_like(self._visits), self._last[:, :0].clone()
            return
        visits, last = state["visits"], state["last"]
        if visits.shape != self._visits.shape or last.shape[:1] != visits.shape or bool((visits < 0).any()):
            raise refusal("a delta memory of other samples was saved", got=tuple(visits.shape),
                          allowed=tuple(self._visits.shape), remedy="load_state_dict(None)")  # fmt: skip
        check_memory(delta_memory_bytes(1, last.numel()), self._most_bytes)
        self._visits, self._last = visits.int().clone(), last.half().clone()

    def _rows(self, values: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return values as (rows, numel of a sample), with room for the copies."""
        samples = len(self._visits)
        if values.dim() < 2 or len(values) != len(numbers):
            raise refusal("a micro-batch has other rows than samples were named for it", got=tuple(values.shape),
                          allowed=f"{len(numbers)} rows", remedy="stage.samples with all rows")  # fmt: skip
        rows = values.reshape(len(numbers), -1)
        if self._last.shape[1] != rows.shape[1]:
            if self._visits.any():
                raise refusal("a delta memory holds samples of one shape", got=rows.shape[1],
                              allowed=self._last.shape[1], remedy="sequences of one length")  # fmt: skip
            check_memory(delta_memory_bytes(samples, rows.shape[1]), self._most_bytes)
            self._last = torch.zeros(samples, rows.shape[1], dtype=torch.float16)
        return rows

    def _decoded(self, own: Tensor, is_first: Tensor, first: Tensor, payload: Tensor) -> Tensor:
        """Return what the receiver gets, (rows, numel of a sample), float32."""
        values = self._last[own].float()
        values[is_first] = first.float()
        others = values[~is_first]
        values[~is_first] = others + self._codec.decode(payload, numel=others.numel()).view(others.shape)
        return values

    def _keep(self, own: Tensor, visits: Tensor, values: Tensor, *, source: str) -> None:
        rounded = values.half()
        if not rounded.isfinite().all():
            raise NonFiniteError(f"{source}: activations hold NaN, infinity or a magnitude above 65504, which the "
                                 f"float16 of a delta memory does not hold; try memory=None")  # fmt: skip
        self._last[own], self._visits[own] = rounded, visits + 1


def check_memory(num_bytes: int, most_bytes: int) -> int:
    """Return the bytes of the copies at one end of a border, or refuse them."""
    if num_bytes > most_bytes:
        raise refusal("a delta memory takes too many bytes on each side of a border", got=num_bytes, allowed=most_bytes,
                      remedy=f"fewer samples, or most_memory_bytes={num_bytes}")  # fmt: skip
    return num_bytes
