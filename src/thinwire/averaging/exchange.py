"""Averaging over point-to-point messages: all-gather with local sums, and the two-phase exchange.

An exchange is a generator: it starts its sends and receives, yields what it has to wait for, and goes on when all of it
is done. Who drives it (a thread of its own, or the training loop) and how long it may wait is not its business.

Every replica decodes the same payloads in the same order and sums them in float32, its own among them, so all replicas
compute the same bits (arXiv 2501.18512, section 2.4: unreduced 4-bit payloads, sums in float32).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec
from thinwire.errors import NonFiniteError
from thinwire.shared_random import derive_seed
from thinwire.transport.base import Envelope, Kind, Pending, Received, Transport


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
    """

    mean: torch.Tensor
    reference_hashes: dict[int, int]


Steps = Generator[Wait, Sequence[Received], Average]


class Exchange(Protocol):
    """How a tensor becomes its mean over the peers."""

    @property
    def codec(self) -> Codec:
        """The code of the payloads."""
        ...

    def steps(
        self, tensor: torch.Tensor, *, peers: Peers, transport: Transport, round_id: int, fragment: int = 0,
        kind: Kind = Kind.ROUND, reference_hash: int = 0, seed: int = 0, must_be_finite: bool = False,
        spread_s: float = 0.0,
    ) -> Steps:  # fmt: skip
        """Return the generator that averages `tensor` over `peers`.

        Args:
            tensor: Floating, `(numel,)`, the same size on all members.
            peers: Who takes part.
            transport: Carries the messages.
            round_id: The round's number, the same on all members.
            fragment: The fragment's number.
            kind: What the messages belong to.
            reference_hash: Hash of the value that the tensor refers to, told to the peers.
            seed: Selects the random stream of a stochastic codec; must differ between replicas and rounds.
            must_be_finite: Whether NaN or infinity in a payload is an error that names its sender.
            spread_s: Seconds over which this replica may spread what it sends.

        Raises:
            NonFiniteError: A replica sent NaN or infinity, and it must not or the codec cannot carry it.
        """
        ...

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return the payload bytes that one replica sends for a tensor of `numel` elements, at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Everyone sends its whole payload to everyone and sums what comes, in float32.

    Each value is coded once. A replica sends `(M - 1)` payloads, which is the least for 2 replicas and grows with M.
    """

    codec: Codec

    def steps(
        self, tensor: torch.Tensor, *, peers: Peers, transport: Transport, round_id: int, fragment: int = 0,
        kind: Kind = Kind.ROUND, reference_hash: int = 0, seed: int = 0, must_be_finite: bool = False,
        spread_s: float = 0.0,
    ) -> Steps:  # fmt: skip
        """See `Exchange.steps`."""
        numel, device = tensor.numel(), tensor.device
        own = self.codec.encode(tensor, seed=seed)
        del tensor  # while the round is in flight, only its payload takes memory
        envelope = Envelope(
            kind=kind, round_id=round_id, fragment=fragment, codec_id=self.codec.wire_id, numel=numel,
            payload_bytes=own.numel(), reference_hash=reference_hash, spread_s=spread_s,
        )  # fmt: skip
        receives = tuple(transport.receive(source=peer, envelope=envelope) for peer in peers.others)
        on_host = own.cpu()
        sends = tuple(transport.send(on_host, to=peer, envelope=envelope) for peer in peers.others)
        received = yield Wait(receives=receives, sends=sends)
        by_replica = dict(zip(peers.others, received, strict=True))
        payloads = {peer: message.payload for peer, message in by_replica.items()} | {peers.me: own}
        mean = _mean(self.codec, payloads, peers=peers, numel=numel, device=device, what=envelope.describe())
        if must_be_finite:
            _check_finite(mean, self.codec, payloads, what=envelope.describe())
        hashes = {peer: message.reference_hash for peer, message in by_replica.items()}
        return Average(mean=mean, reference_hashes=hashes | {peers.me: reference_hash})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `Exchange.sent_bytes`."""
        return (num_replicas - 1) * self.codec.payload_bytes(numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhase:
    """Each replica owns a shard: it sums the others' payloads of it, codes the mean again and sends it to all.

    A replica sends at most `2 (M - 1) / M` payloads, however many replicas there are, and each value is coded twice.
    The owner too goes on with the decoded mean, not with its exact one, so that all replicas hold the same bits.
    Shards are whole codec blocks, so a shard's payload is the same bytes as that part of the whole payload.
    """

    codec: Codec

    def steps(
        self, tensor: torch.Tensor, *, peers: Peers, transport: Transport, round_id: int, fragment: int = 0,
        kind: Kind = Kind.ROUND, reference_hash: int = 0, seed: int = 0, must_be_finite: bool = False,
        spread_s: float = 0.0,
    ) -> Steps:  # fmt: skip
        """See `Exchange.steps`."""
        flat, numel, device = tensor.reshape(-1), tensor.numel(), tensor.device
        shards = shard_bounds(numel, num_shards=len(peers.members), block=self.codec.block)
        bounds = dict(zip(peers.members, shards, strict=True))
        blank = Envelope(
            kind=kind, round_id=round_id, fragment=fragment, codec_id=self.codec.wire_id,
            reference_hash=reference_hash, spread_s=spread_s / 2,  # the second phase takes as long again
        )  # fmt: skip

        def envelope(owner: int, phase: int) -> Envelope:
            size = bounds[owner][1] - bounds[owner][0]
            return replace(blank, phase=phase, numel=size, payload_bytes=self.codec.payload_bytes(size))

        mine = envelope(peers.me, 0)
        receives = tuple(transport.receive(source=peer, envelope=mine) for peer in peers.others)
        sends = []
        for owner in peers.others:
            part = self.codec.encode(flat[slice(*bounds[owner])], seed=derive_seed(seed, "shard", owner)).cpu()
            sends.append(transport.send(part, to=owner, envelope=envelope(owner, 0)))
        own = self.codec.encode(flat[slice(*bounds[peers.me])], seed=derive_seed(seed, "shard", peers.me))
        del tensor, flat  # while the round is in flight, only its payload takes memory
        received = yield Wait(receives=receives, sends=tuple(sends))
        hashes = {peer: message.reference_hash for peer, message in zip(peers.others, received, strict=True)}
        payloads = {peer: message.payload for peer, message in zip(peers.others, received, strict=True)}
        payloads[peers.me] = own
        what = mine.describe()
        shard = _mean(self.codec, payloads, peers=peers, numel=mine.numel, device=device, what=what)
        if must_be_finite:
            _check_finite(shard, self.codec, payloads, what=what)

        # a fresh stream: the mean must not be rounded with the draws that rounded the parts
        coded = self.codec.encode(shard, seed=derive_seed(seed, "mean"))
        receives = tuple(transport.receive(source=peer, envelope=envelope(peer, 1)) for peer in peers.others)
        on_host = coded.cpu()
        sends = [transport.send(on_host, to=peer, envelope=envelope(peers.me, 1)) for peer in peers.others]
        received = yield Wait(receives=receives, sends=tuple(sends))
        parts = {peer: message.payload for peer, message in zip(peers.others, received, strict=True)} | {
            peers.me: coded
        }
        mean = _assemble(self.codec, parts, bounds, device=device, what=what)
        return Average(mean=mean, reference_hashes=hashes | {peers.me: reference_hash})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `Exchange.sent_bytes`."""
        if num_replicas == 1:
            return 0
        bounds = shard_bounds(numel, num_shards=num_replicas, block=self.codec.block)
        sizes = [self.codec.payload_bytes(stop - start) for start, stop in bounds]
        return max(sum(sizes) - own + (num_replicas - 1) * own for own in sizes)


def cheapest(codec: Codec, *, num_replicas: int) -> AllGather | TwoPhase:
    """Choose between the two exchanges by their cost.

    All-gather sends `(M - 1)` payloads, two-phase `2 (M - 1) / M`. Two-phase codes each value a second time and waits
    for two messages in a row; that is worth it once it halves the bytes at least, which is for more than 4 replicas. A
    lossless codec loses nothing by the second coding, so there it is worth it as soon as it saves bytes.

    Example:
        >>> from thinwire.codecs import e3m0
        >>> type(cheapest(e3m0(), num_replicas=2)).__name__, type(cheapest(e3m0(), num_replicas=8)).__name__
        ('AllGather', 'TwoPhase')
    """
    limit = 2 if codec.is_lossless_for_float32 else 4
    return AllGather(codec=codec) if num_replicas <= limit else TwoPhase(codec=codec)


def shard_bounds(numel: int, *, num_shards: int, block: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into contiguous shards of whole blocks, as even as the blocks allow; late ones may be empty.

    Example:
        >>> shard_bounds(130, num_shards=2, block=64)
        [(0, 128), (128, 130)]
    """
    num_blocks = -(-numel // block)
    cuts = [min(numel, -(-num_blocks * shard // num_shards) * block) for shard in range(num_shards + 1)]
    return list(pairwise(cuts))


def _mean(
    codec: Codec, payloads: dict[int, torch.Tensor], *, peers: Peers, numel: int, device: torch.device, what: str
) -> torch.Tensor:
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for peer in peers.members:  # one order everywhere: float addition is not associative
        total += _decode(codec, payloads[peer].to(device), numel=numel, peer=peer, what=what)
    return total.div_(len(peers.members))


def _assemble(
    codec: Codec, parts: dict[int, torch.Tensor], bounds: dict[int, tuple[int, int]], *, device: torch.device, what: str
) -> torch.Tensor:
    whole = torch.empty(max(stop for _, stop in bounds.values()), dtype=torch.float32, device=device)
    for owner, (start, stop) in bounds.items():
        whole[start:stop] = _decode(codec, parts[owner].to(device), numel=stop - start, peer=owner, what=what)
    return whole


def _check_finite(mean: torch.Tensor, codec: Codec, payloads: dict[int, torch.Tensor], *, what: str) -> None:
    # the sum is finite only if every element is; decoding again to find the culprit happens once, in a run that ends
    if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
        return
    for peer, payload in payloads.items():
        if not bool(torch.isfinite(codec.decode(payload, numel=mean.numel())).all()):
            raise NonFiniteError(_diverged(peer, what=what))
    raise NonFiniteError(f"{what}: the sum of the replicas' payloads overflows float32; lower the learning rate")


def _diverged(peer: int, *, what: str) -> str:
    return (
        f"{what}: replica {peer} sent NaN or infinity; its model has diverged: look at its loss, lower its learning "
        f"rate or clip its gradients, and resume from a checkpoint before that"
    )


def _decode(codec: Codec, payload: torch.Tensor, *, numel: int, peer: int, what: str) -> torch.Tensor:
    try:
        return codec.decode(payload, numel=numel)
    except NonFiniteError as failure:
        raise NonFiniteError(_diverged(peer, what=what)) from failure
