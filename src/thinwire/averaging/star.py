"""Star exchange: all replicas send to a server, which codes the mean and sends it back."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.averaging.exchange import LATE_STEP, BoundExchange, Shapes, code_for, coding_passes, laid_out, numel_of
from thinwire.averaging.message_pattern import RoundTraffic, StarMessages
from thinwire.averaging.payloads import (
    EncodeStage,
    ExchangeState,
    Ramp,
    check_finite,
    codec_at,
    decode,
    mean_of,
    most_bytes,
)
from thinwire.averaging.round_context import Average, RoundContext, Steps, Wait
from thinwire.codecs.base import Codec
from thinwire.codecs.error_feedback import SenderMemory, Shift
from thinwire.shared_random import derive_seed
from thinwire.transport.base import Received


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """One of the replicas is the server: it sums what the others send, codes the mean again and sends it to all.

    Each value is coded twice, in codes that may differ; what the second coding drops, the server can remember. The
    server, too, uses the decoded mean, so that all replicas hold the same bits. A member sends one payload, the
    server M - 1. A sparse code of the mean is fine here, because there is one mean and one coder of it.

    Args:
        codec: The code towards the server, or codes that change with the step.
        server_codec: The code of the mean.
        memory: What a member remembers of what the first coding dropped; None for nothing.
        server_memory: What the server remembers of what the second one dropped.
        server: The replica that is the server.

    Raises:
        ValueError: The memory is one whose receivers must get the mean as it is.
    """

    codec: Codec | Ramp
    server_codec: Codec | Ramp
    memory: SenderMemory | None = None
    server_memory: SenderMemory | None = None
    server: int = 0

    def __post_init__(self) -> None:
        """Refuse a memory whose state the receivers mirror."""
        if isinstance(self.memory, Shift):
            raise ValueError(
                "Shift() is remembered by the receivers too, and a mean that is coded again would part them; use "
                "AllGather() with Shift(), or ErrorFeedback() here"
            )

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        """See `Exchange.bind`."""
        if not 0 <= self.server < num_replicas:
            raise ValueError(f"server must be one of the {num_replicas} replicas, got {self.server}")
        stages = []
        for tensors in shapes:
            numel = numel_of(tensors)
            out = self.memory.bind(numel) if self.memory else None
            is_server = replica == self.server
            # the server alone codes the mean, so it alone has a residual of it
            back = self.server_memory.bind(numel) if self.server_memory and is_server else None
            stages.append(
                {
                    "out": EncodeStage(code_for(self.codec, tensors), out),
                    "mean": EncodeStage(code_for(self.server_codec, tensors), back),
                }
            )
        return _BoundStar(self, stages)

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        """See `BoundExchange.steps`; without memory."""
        return self.through(EncodeStage(self.codec), EncodeStage(self.server_codec), tensor, context)

    def through(self, out: EncodeStage, back: EncodeStage, tensor: torch.Tensor, context: RoundContext) -> Steps:
        """Return the generator of a round whose payloads pass the stage `out`, and their mean the stage `back`."""
        numel, device, peers = tensor.numel(), tensor.device, context.peers
        codec, mean_codec = out.codec(context.step), back.codec(context.step)
        own = None
        if peers.me in peers.senders:
            # absent members (partial participation) send nothing, but receive the mean
            own = out.encode(tensor, step=context.step, seed=context.seed)
        del tensor  # while the round is in flight, only its payload takes memory
        # members see each other only through the server, which compares the hashes of all
        hashes = {peers.me: context.reference_hash}
        if peers.me == self.server:
            payloads = {} if own is None else {peers.me: own}
            coded = yield from self._serve(payloads, hashes, codec, back, numel=numel, device=device, context=context)
        else:
            sends = () if own is None else (
                context.transport.send(
                    own.cpu(), to=self.server, envelope=context.sending(own, codec=codec, numel=numel)
                ),
            )  # fmt: skip
            expected = context.receiving(mean_codec, numel=numel, phase=1)
            receives = (context.transport.receive(source=self.server, envelope=expected),)
            received = yield Wait(receives=receives, sends=sends)
            coded = received[0].payload.to(device)
            hashes[self.server] = received[0].reference_hash
        what = context.describe()
        mean = decode(mean_codec, coded, numel=numel, peer=self.server, what=what)
        if context.must_be_finite:
            check_finite(mean, mean_codec, {self.server: coded}, what=what)
        return Average(mean=out.received(mean), reference_hashes=hashes)

    def _serve(
        self, payloads: dict[int, torch.Tensor], hashes: dict[int, int], codec: Codec, back: EncodeStage, *, numel: int,
        device: torch.device, context: RoundContext,
    ) -> Generator[Wait, Sequence[Received], torch.Tensor]:  # fmt: skip
        """Gather the members' payloads and hashes, send the coded mean to all, and return it."""
        peers, transport, what = context.peers, context.transport, context.describe()
        sources = [peer for peer in peers.senders if peer != peers.me]
        expected = context.receiving(codec, numel=numel)
        receives = tuple(transport.receive(source=peer, envelope=expected) for peer in sources)
        received = yield Wait(receives=receives, sends=())
        payloads |= {peer: message.payload for peer, message in zip(sources, received, strict=True)}
        hashes |= {peer: message.reference_hash for peer, message in zip(sources, received, strict=True)}
        mean = mean_of(codec, payloads, peers=peers, numel=numel, device=device, what=what)
        if context.must_be_finite:
            check_finite(mean, codec, payloads, what=what)
        # a fresh stream: the mean must not be coded with the draws that coded the parts
        coded = back.encode(mean, step=context.step, seed=derive_seed(context.seed, "mean"))
        envelope = context.sending(coded, codec=back.codec(context.step), numel=numel, phase=1)
        on_host = coded.cpu()
        yield Wait(receives=(), sends=tuple(transport.send(on_host, to=p, envelope=envelope) for p in peers.others))
        return coded

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`: the server's or a member's, whichever is more."""
        if num_replicas == 1:
            return 0
        return max(most_bytes(self.codec, numel), (num_replicas - 1) * most_bytes(self.server_codec, numel))

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        """See `DescribesTraffic.traffic`."""
        codec = laid_out(codec_at(self.codec, LATE_STEP), shapes)
        late = replace(self, codec=codec, server_codec=laid_out(codec_at(self.server_codec, LATE_STEP), shapes))
        return RoundTraffic(
            pattern=StarMessages(server=self.server),
            sent_bytes=late.sent_bytes(numel_of(shapes), num_replicas=num_members),
            num_messages=num_members - 1,
            coding_passes=coding_passes(self, shapes, passes=(1 + num_members) / 2),
        )


class _BoundStar(ExchangeState):
    _spec: Star

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        stages: Mapping[str, EncodeStage] = self._stages[context.fragment]
        return self._spec.through(stages["out"], stages["mean"], tensor, context)
