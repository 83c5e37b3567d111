"""Context of one round (identity, peers, transport), and the messages that its exchange waits for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec
from thinwire.transport.base import Envelope, Pending, Received, Transport
from thinwire.transport.streams import ROUNDS, Stream

_NOTE = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNote:
    """Hashes in a message of a round, which the engine compares over all replicas, and no transport.

    Attributes:
        reference_hash: Hash of the global value that the payload refers to, 0 for none.
        data_hash: Hash of the data that the sender trains on, 0 for none.
    """

    reference_hash: int = 0
    data_hash: int = 0

    def pack(self) -> bytes:
        return _NOTE.pack(self.reference_hash, self.data_hash)

    @classmethod
    def of(cls, message: Received | Envelope) -> RoundNote:
        reference_hash, data_hash = _NOTE.unpack(message.note)
        return cls(reference_hash=reference_hash, data_hash=data_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of the replica that closes the rounds, when it sent a mean.

    Attributes:
        step: The step that it had reached.
        closed_step: All rounds that were launched up to this step were closed.
    """

    step: int = 0
    closed_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """Identity, peers and transport of one round.

    Attributes:
        peers: Who takes part.
        transport: Carries the messages.
        round_id: The round's number, the same on all members.
        fragment: The fragment's number.
        stream: What the messages belong to.
        step: The step that the round was launched at; codes may change with it.
        reference_hash: Hash of the value that the tensor refers to, sent to the peers.
        seed: Selects the random stream of a stochastic codec; must differ between replicas and rounds.
        must_be_finite: Whether NaN or infinity in a payload is an error that names its sender.
        spread_s: Seconds over which this replica may spread what it sends.
        first_phase: Number of the first message: an exchange that consists of two others numbers their messages apart.
        num_tokens: What this replica has trained on since the last of the fragment's rounds that counted it.
        num_steps: In how many inner steps.
        is_closed: Whether the others have closed the round already, so that this replica asks for the result only.
        reached: Returns the current step of this replica.
        hear: Called with the progress of the closing replica, and whether it counted this replica's part.
    """

    peers: Peers
    transport: Transport
    round_id: int
    fragment: int = 0
    stream: Stream = ROUNDS
    step: int = 0
    reference_hash: int = 0
    seed: int = 0
    must_be_finite: bool = False
    spread_s: float = 0.0
    first_phase: int = 0
    num_tokens: int = 1
    num_steps: int = 1
    is_closed: bool = False
    reached: Callable[[], int] = lambda: 0
    hear: Callable[[Progress, bool], None] = lambda progress, is_counted: None

    def sending(self, payload: torch.Tensor, *, codec: Codec, numel: int, phase: int = 0) -> Envelope:
        """Return the envelope of a payload that this replica sends."""
        return Envelope(
            stream=self.stream, key=(self.round_id, self.fragment, self.first_phase + phase), codec_id=codec.wire_id,
            numel=numel, payload_bytes=payload.numel(), spread_s=self.spread_s,
            note=_NOTE.pack(self.reference_hash, 0),
        )  # fmt: skip

    def receiving(self, codec: Codec, *, numel: int, phase: int = 0) -> Envelope:
        """Return the envelope under which this replica receives `numel` elements."""
        return Envelope(
            stream=self.stream, key=(self.round_id, self.fragment, self.first_phase + phase), codec_id=codec.wire_id,
            numel=numel, payload_bytes=codec.payload_bytes(numel), spread_s=self.spread_s,
            note=_NOTE.pack(self.reference_hash, 0),
            takes_less=not codec.has_fixed_size,  # then payload_bytes is an upper bound, not the exact size
        )  # fmt: skip

    def describe(self) -> str:
        """Name the round in an error's text."""
        return Envelope(stream=self.stream, key=(self.round_id, self.fragment)).describe()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Transfers that an exchange waits for before it continues: receives, then sends.

    Where some of a set are enough, they are `watched`, and the exchange itself checks which of them are done.

    Attributes:
        receives: All of them, and what they received is handed back in their order.
        sends: All of them.
        watched: What not all of must be done, by replica.
        least: How many of these must be.
        grace_steps: For how many of this replica's steps since the launch it waits for the rest too; no longer, in any
            case, than until the result is needed.
    """

    receives: tuple[Pending, ...] = ()
    sends: tuple[Pending, ...] = ()
    watched: Mapping[int, Pending] = field(default_factory=dict)
    least: int = 0
    grace_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """The result of an exchange.

    Attributes:
        mean: float32, `(numel,)`: the mean over the members, the same bits on all of them.
        reference_hashes: The reference hash that each member sent, by replica.
        parts: What each member sent, decoded, by replica, where the exchange keeps it.
        weights: What each member counts in the mean, by replica, where the exchange weighs them and this replica knows.
        members: Who is in the mean, where not all need be; empty where all are.
        is_counted: Whether this replica's own part is in the mean.
        after: Transfers that remain for members that come later; the driver of the exchange completes them.
    """

    mean: torch.Tensor
    reference_hashes: Mapping[int, int]
    parts: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    is_counted: bool = True
    after: Mapping[int, Pending] = field(default_factory=dict)


Steps = Generator[Wait, Sequence[Received], Average]
