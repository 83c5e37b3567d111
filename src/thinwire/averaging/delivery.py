"""What the messages of one round share but for their content, and what an exchange waits for."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec
from thinwire.transport.base import Envelope, Kind, Pending, Received, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Everything about a round's messages but their content.

    Attributes:
        peers: Who takes part.
        transport: Carries the messages.
        round_id: The round's number, the same on all members.
        fragment: The fragment's number.
        kind: What the messages belong to.
        step: The step that the round was launched at; codes may change with it.
        reference_hash: Hash of the value that the tensor refers to, told to the peers.
        seed: Selects the random stream of a stochastic codec; must differ between replicas and rounds.
        must_be_finite: Whether NaN or infinity in a payload is an error that names its sender.
        spread_s: Seconds over which this replica may spread what it sends.
        first_phase: Number of the first message: an exchange that is made of two others tells their messages apart.
    """

    peers: Peers
    transport: Transport
    round_id: int
    fragment: int = 0
    kind: Kind = Kind.ROUND
    step: int = 0
    reference_hash: int = 0
    seed: int = 0
    must_be_finite: bool = False
    spread_s: float = 0.0
    first_phase: int = 0

    def sending(self, payload: torch.Tensor, *, codec: Codec, numel: int, phase: int = 0) -> Envelope:
        """Return the envelope of a payload that this replica sends."""
        return self._envelope(codec, numel=numel, phase=phase, payload_bytes=payload.numel(), takes_less=False)

    def receiving(self, codec: Codec, *, numel: int, phase: int = 0) -> Envelope:
        """Return the envelope under which this replica receives `numel` elements."""
        most = codec.payload_bytes(numel)
        takes_less = not codec.has_fixed_size
        return self._envelope(codec, numel=numel, phase=phase, payload_bytes=most, takes_less=takes_less)

    def describe(self) -> str:
        """Name the round in an error's text."""
        return Envelope(kind=self.kind, round_id=self.round_id, fragment=self.fragment).describe()

    def _envelope(self, codec: Codec, *, numel: int, phase: int, payload_bytes: int, takes_less: bool) -> Envelope:
        return Envelope(
            kind=self.kind, round_id=self.round_id, fragment=self.fragment, phase=self.first_phase + phase,
            codec_id=codec.wire_id,
            numel=numel, payload_bytes=payload_bytes, reference_hash=self.reference_hash, takes_less=takes_less,
            spread_s=self.spread_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What an exchange must see done before it goes on: receives, then sends."""

    receives: tuple[Pending, ...]
    sends: tuple[Pending, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """The result of an exchange.

    Attributes:
        mean: float32, `(numel,)`: the mean over the members, the same bits on all of them.
        reference_hashes: What each member said its reference was, by replica.
        parts: What each member sent, decoded, by replica, where the exchange keeps it.
        weights: What each member counts in the mean, by replica, where the exchange weighs them.
    """

    mean: torch.Tensor
    reference_hashes: Mapping[int, int]
    parts: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)


Steps = Generator[Wait, Sequence[Received], Average]
