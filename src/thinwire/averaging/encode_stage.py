"""Encode stage: one coding step of an exchange, with the sender's memory of what the code dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.error_feedback import BoundSenderMemory
from thinwire.errors import NonFiniteError
from thinwire.shared_random import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A codec that changes with the step, such as the warm-up of a density.

    Args:
        codecs: The first step of each code, ascending from 1, and the code. All have the same `wire_id`.

    Raises:
        ValueError: The steps do not ascend from 1, or the codes are of several kinds.
    """

    codecs: tuple[tuple[int, Codec], ...]

    def __post_init__(self) -> None:
        """Check the steps."""
        starts = [start for start, _ in self.codecs]
        if not starts or starts[0] != 1 or sorted(set(starts)) != starts:
            raise ValueError(f"the codes' first steps must ascend from 1, got {starts}")
        if len({codec.wire_id for _, codec in self.codecs}) > 1:
            raise ValueError("a ramp is made of one kind of code, only its numbers change")

    def at(self, step: int) -> Codec:
        """Return the code at a step."""
        return [codec for start, codec in self.codecs if start <= max(step, 1)][-1]


def codec_at(code: Codec | Ramp, step: int) -> Codec:
    """Return the code that holds at a step."""
    return code.at(step) if isinstance(code, Ramp) else code


def most_bytes(code: Codec | Ramp, numel: int) -> int:
    """Return the most payload bytes that `numel` elements take, at any step."""
    codecs = [codec for _, codec in code.codecs] if isinstance(code, Ramp) else [code]
    return max(codec.payload_bytes(numel) for codec in codecs)


class EncodeStage:
    """Encodes the payloads of one stage.

    Args:
        code: The code.
        memory: Applied before the code; None for none.
    """

    def __init__(self, code: Codec | Ramp, memory: BoundSenderMemory | None = None) -> None:
        self._code = code
        self._memory = memory

    @property
    def has_memory(self) -> bool:
        """Whether anything is remembered."""
        return self._memory is not None

    def codec(self, step: int) -> Codec:
        """Return the code at a step."""
        return codec_at(self._code, step)

    def encode(self, x: torch.Tensor, *, step: int, seed: int) -> torch.Tensor:
        """Encode a vector with the remembered residual added; remember the new residual."""
        codec = self.codec(step)
        if self._memory is None:
            return codec.encode(x, seed=seed)
        payload = codec.encode(self._memory.before(x), seed=seed)
        self._note(codec, [(payload, x.numel())])
        return payload

    @property
    def shared(self) -> torch.Tensor | None:
        """The remembered vector that must be the same on all members, `(numel,)`; None for none."""
        return None if self._memory is None else self._memory.shared

    def _note(self, codec: Codec, payloads: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Pass what the receivers decode to the memory."""
        assert self._memory is not None
        try:
            parts = [codec.decode(payload, numel=numel) for payload, numel in payloads]
        except NonFiniteError:
            return  # the run ends where it is decoded to be used, with this replica's name
        # the residual is what the receivers did not get, so it is measured against their decoding, not against x
        self._memory.after(torch.cat(parts))

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """Return what is applied, from the mean of what all sent."""
        return mean if self._memory is None else self._memory.received(mean)

    def forget(self) -> None:
        """Reset the memory."""
        if self._memory is not None:
            self._memory.forget()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what is remembered."""
        return {} if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if self._memory is not None:
            self._memory.load_state_dict(state)


class ShardedEncodeStage(EncodeStage):
    """A stage that encodes a vector in parts, one for each owner; the memory covers the whole vector."""

    def encode_shards(
        self, x: torch.Tensor, bounds: Mapping[int, tuple[int, int]], *, step: int, seed: int
    ) -> dict[int, torch.Tensor]:
        """Encode each owner's part of a vector, this replica's own among them.

        Args:
            x: Floating, `(numel,)`.
            bounds: First element and end of each owner's part.
            step: Tells which code holds.
            seed: Selects the random stream.
        """
        codec = self.codec(step)
        wanted = x if self._memory is None else self._memory.before(x)
        # a random stream for each shard: stochastic rounding draws by the place in the encoded part
        coded = {
            owner: codec.encode(wanted[start:stop], seed=derive_seed(seed, "shard", owner))
            for owner, (start, stop) in bounds.items()
        }
        if self._memory is not None:
            self._note(codec, [(coded[owner], stop - start) for owner, (start, stop) in bounds.items()])
        return coded
