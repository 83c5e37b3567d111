"""Code of what crosses between two stages of a model: one codec for activations, one for their gradients.

Default: `block-int8` forward, `block-int4` backward. At equal bytes the forward pass needs the bits more. A payload has
a size that is known before, or with `channel-bits` a bound. So a receiver allocates it before it arrives, and nothing
that the sender says decides how much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from thinwire.codec_specs import activation_codec, activation_codecs, delta_memory_bytes
from thinwire.codecs import Codec, by_name
from thinwire.codecs.channel_bits import NAME as CHANNEL_BITS
from thinwire.codecs.channel_bits import AdaptiveBits, ChannelBits
from thinwire.codecs.delta_memory import DeltaMemory, check_memory
from thinwire.errors import NonFiniteError, PayloadError, refusal


@dataclass(frozen=True)
class ActivationCode:
    """Codecs of both directions; a frozen value, the same at both ends of a border.

    Args:
        forward: Name of the codec of activations; `channel-bits` too, which the command line does not take.
        backward: Name of the codec of gradients of activations.
        bits: With `channel-bits`, the widths of what this end sends, learned before the border; 8 bits without.
        memory: "delta" codes an activation's difference to the last visit of its sample (AQ-SGD), for fine-tuning on a
            small set: both ends keep copies. Only a `CodedStage` runs it, whose `samples` names the samples.
        samples: With a memory, samples of the data set, numbered from 0.
        most_memory_bytes: Largest memory of the copies on each side of a border.

    Raises:
        ValueError: A name is unknown, the codec is too coarse or drops elements, `bits` has no `channel-bits`, or
            `memory` has no samples or a codec whose size changes.

    Example:
        >>> code = ActivationCode()
        >>> code.name, code.payload_bytes(1000), code.payload_bytes(1000, is_forward=False)
        ('block-int8/block-int4', 1040, 544)
    """

    forward: str = "block-int8"
    backward: str = "block-int4"
    bits: AdaptiveBits | None = field(default=None, compare=False, repr=False)
    memory: str | None = None
    samples: int = 0
    most_memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        """Check the names, and write them as `thinwire.codecs.NAMES` has them."""
        if self.forward != CHANNEL_BITS:
            object.__setattr__(self, "forward", activation_codec(self.forward, direction="forward"))
            if self.bits is not None:
                raise refusal("learned bits need the codec that sends them", got=self.forward, allowed=CHANNEL_BITS,
                              remedy=f'forward="{CHANNEL_BITS}"')  # fmt: skip
        object.__setattr__(self, "backward", activation_codec(self.backward, direction="backward"))
        is_memory = self.memory == "delta" and 0 < self.samples < 1 << 31 and self.forward != CHANNEL_BITS
        if not is_memory and (self.memory, self.samples) != (None, 0):
            raise refusal("a memory needs its kind, its samples and a forward codec of fixed size",
                          got=f"{self.memory!r}, {self.samples} samples, {self.forward}", allowed="memory='delta'",
                          remedy="memory='delta', samples=128, forward='block-int4'")  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> ActivationCode:
        """Return the code that a text such as `block-int8/block-int4` names."""
        return cls(*activation_codecs(text))

    @property
    def name(self) -> str:
        """Both codecs, as `parse` takes them, and the memory."""
        memory = f" with {self.memory} memory of {self.samples} samples" if self.memory else ""
        return f"{self.forward}/{self.backward}{memory}"

    def memory_bytes(self, numel: int) -> int:
        """Return the bytes of the copies on each side of a border, for so many elements a sample, or refuse them.

        Example:
            >>> ActivationCode("block-int4", memory="delta", samples=128).memory_bytes(64 * 256)
            4194304
        """
        return check_memory(delta_memory_bytes(self.samples, numel), self.most_memory_bytes)

    def make_memory(self) -> DeltaMemory | None:
        """Return an empty memory for one border, or None for a code without."""
        if self.memory is None:
            return None
        return DeltaMemory(by_name(self.forward), samples=self.samples, most_bytes=self.most_memory_bytes)

    def payload_bytes(self, numel: int, *, is_forward: bool = True) -> int:
        """Return the size of the payload of so many elements: exact, or the most it can be."""
        return self._codec(is_forward).payload_bytes(numel)

    def has_fixed_size(self, *, is_forward: bool = True) -> bool:
        """Return whether every payload of so many elements has `payload_bytes` bytes."""
        return not (self.memory and is_forward) and self._codecs[is_forward].has_fixed_size

    def encode(self, values: torch.Tensor, *, is_forward: bool, source: str) -> torch.Tensor:
        """Encode activations or their gradients, of any shape and layout.

        Args:
            values: float32, bfloat16, float16 or float64.
            is_forward: Whether they are activations.
            source: Sender and place, for errors, such as `stage 1, micro-batch 3`.

        Returns:
            uint8, (payload_bytes,) or fewer where the size is not fixed, on the values' device; never shares memory
            with them.

        Raises:
            NonFiniteError: There is NaN or infinity among them.
        """
        # the sender looks, since 16 and 32 bits would carry it on into every later stage
        if not torch.isfinite(values).all():
            kind = "activations" if is_forward else "gradients of activations"
            raise NonFiniteError(f"{source}: {kind} hold NaN or infinity; lower the learning rate, or look at the data")
        return self._codec(is_forward).encode(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, is_forward: bool, source: str) -> None:
        """Fill a tensor with the values of a payload.

        Args:
            payload: uint8, one dimension.
            out: Its shape and dtype are known to both ends.
            is_forward: Whether these are activations.
            source: Sender and place, for errors.

        Raises:
            PayloadError: The payload is too short, too long or no code of this codec.
            NonFiniteError: The codec found NaN, infinity or a magnitude that it cannot carry.
        """
        try:
            values = self._codec(is_forward).decode(payload, numel=out.numel())
        except (PayloadError, NonFiniteError) as error:
            raise type(error)(f"{source}: {error}") from None
        with torch.no_grad():
            out.copy_(values.view(out.shape))

    def _codec(self, is_forward: bool) -> Codec | ChannelBits:
        if self.memory and is_forward:
            raise refusal("only a CodedStage has the memory that this code needs", got=self.name,
                          allowed="a code without memory", remedy="memory=None")  # fmt: skip
        return self._codecs[is_forward]

    @cached_property
    def _codecs(self) -> dict[bool, Codec | ChannelBits]:
        forward = ChannelBits(bits=self.bits) if self.forward == CHANNEL_BITS else by_name(self.forward)
        return {True: forward, False: by_name(self.backward)}
