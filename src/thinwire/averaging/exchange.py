"""Averaging over point-to-point messages: all-gather with local sums, the two-phase exchange, and gossip.

An exchange is a generator: it starts its sends and receives, yields what it has to wait for, and continues when all
of it is done. The caller drives it (from a thread of its own, or from the training loop) and sets the deadline.

Every replica decodes the same payloads in the same order and sums them in float32, its own among them, so all
replicas compute the same bits (arXiv 2501.18512, section 2.4: unreduced 4-bit payloads, sums in float32). Errors name
the sender.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch

from thinwire.averaging.aggregation_rules import Aggregate
from thinwire.averaging.message_pattern import AllGatherMessages, MessagePattern, RoundTraffic, TwoPhaseMessages
from thinwire.averaging.mixing import MixingGraph, mixing_row
from thinwire.averaging.round_context import Average, RoundContext, RoundNote, Steps, Wait
from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec, NeedsLayout
from thinwire.codecs.error_feedback import SenderMemory
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.shared_random import derive_seed
from thinwire.tagged_state import adopt, load, reset, save
from thinwire.transport.base import Pending

Shapes = Sequence[torch.Size]
# A step after every warm-up: codecs that change with the step have reached their last one.
LATE_STEP = 2**31
# A payload of so many bits a value is a cast.
_CAST_BITS = 16


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
        starts = [start for start, _ in self.codecs]
        if not starts or starts[0] != 1 or sorted(set(starts)) != starts:
            raise ValueError(f"the codes' first steps must ascend from 1, got {starts}")
        if len({codec.wire_id for _, codec in self.codecs}) > 1:
            raise ValueError("a ramp is made of one kind of code, only its numbers change")

    def at(self, step: int) -> Codec:
        return [codec for start, codec in self.codecs if start <= max(step, 1)][-1]


def codec_at(code: Codec | Ramp, step: int) -> Codec:
    """Return the code that holds at a step."""
    return code.at(step) if isinstance(code, Ramp) else code


def most_bytes(code: Codec | Ramp, numel: int) -> int:
    """Return the most payload bytes that `numel` elements take, at any step."""
    codecs = [codec for _, codec in code.codecs] if isinstance(code, Ramp) else [code]
    # a ramp may grow as well as shrink its payloads, so room is made for the largest
    return max(codec.payload_bytes(numel) for codec in codecs)


class EncodeStage:
    """Encodes the payloads of one stage.

    Args:
        code: The code.
        memory: Applied before the code; None for none.
        numel: Elements of the vectors that it remembers.

    Attributes:
        state: What the memory remembers, a dataclass with tagged fields; None for nothing.
    """

    def __init__(self, code: Codec | Ramp, memory: SenderMemory | None = None, *, numel: int = 0) -> None:
        self._code = code
        self._memory = memory
        self.state: Any = None if memory is None else memory.init(numel)

    def codec(self, step: int) -> Codec:
        return self._code.at(step) if isinstance(self._code, Ramp) else self._code

    def encode(self, x: torch.Tensor, codec: Codec, *, seed: int) -> torch.Tensor:
        """Encode a vector with the remembered residual added; remember the new residual."""
        if self._memory is None:
            return codec.encode(x, seed=seed)
        # error feedback: what earlier rounds dropped is added before this one is coded (arXiv 1901.09847)
        payload = codec.encode(self._memory.before(self.state, x), seed=seed)
        self._note(codec, [(payload, x.numel())])
        return payload

    def encode_shards(
        self, x: torch.Tensor, bounds: Mapping[int, tuple[int, int]], codec: Codec, *, seed: int
    ) -> dict[int, torch.Tensor]:
        """Encode each owner's part of a vector, this replica's own among them; the memory covers the whole vector.

        Args:
            x: Floating, `(numel,)`.
            bounds: First element and end of each owner's part.
            codec: The code that holds.
            seed: Selects the random stream.
        """
        # the residual is added before the cut: it belongs to elements, whoever owns their shard
        wanted = x if self._memory is None else self._memory.before(self.state, x)
        # a random stream for each shard: stochastic rounding draws by the place in the encoded part
        coded = {
            owner: codec.encode(wanted[start:stop], seed=derive_seed(seed, "shard", owner))
            for owner, (start, stop) in bounds.items()
        }
        self._note(codec, [(coded[owner], stop - start) for owner, (start, stop) in bounds.items()])
        return coded

    def _note(self, codec: Codec, payloads: Sequence[tuple[torch.Tensor, int]]) -> None:
        if self._memory is None:
            return
        try:
            parts = [codec.decode(payload, numel=numel) for payload, numel in payloads]
        except NonFiniteError:
            return  # the run ends where it is decoded to be used, with this replica's name
        # the residual is what the receivers did not get, so it is measured against their decoding, not against x
        self._memory.after(self.state, torch.cat(parts))

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """Return what is applied, from the mean of what all sent."""
        return mean if self._memory is None else self._memory.received(self.state, mean)


Stages = Mapping[str, Any]
"""What an exchange keeps of a fragment between rounds, by name; each has a `state`."""

_MEMORIES = {
    "out": "what was not sent yet", "mean": "what the owner of a part remembers of its means",
    "factors": "what was not sent yet",
}  # fmt: skip


class BoundExchange:
    """An exchange on one replica: its rounds, and the state of its stages by fragment.

    Args:
        spec: The exchange.
        stages: By fragment; what they remember is the state.

    Attributes:
        has_memory: Whether it keeps state from one round to the next.
    """

    def __init__(self, spec: Any, stages: Sequence[Stages]) -> None:
        self._spec = spec
        self._stages = stages
        self.has_memory = any(stage.state is not None for one in stages for stage in one.values())

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        """Return the generator that averages `tensor` over the peers.

        Args:
            tensor: Floating, `(numel,)`, the same size on all members.
            context: Who takes part, and what the messages are.

        Raises:
            NonFiniteError: A replica sent NaN or infinity, and it must not or the codec cannot carry it.
        """
        steps: Steps = self._spec.round(self._stages[context.fragment], tensor, context)
        return steps

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return the payload bytes that one replica sends for a tensor of `numel` elements, at most."""
        num_bytes: int = self._spec.sent_bytes(numel, num_replicas=num_replicas)
        return num_bytes

    def shared_hash(self, fragment: int) -> int:
        """Return a checksum of the state of a fragment that must be the same on all members, 0 for none."""
        found = 0
        if self.has_memory:
            for stage in self._stages[fragment].values():
                shared = getattr(stage.state, "shared", ())
                # chained; sent with the reference hash, so that members whose state diverged find out
                for tensor in (shared,) if isinstance(shared, torch.Tensor) else shared:
                    found = zlib.crc32(tensor.cpu().numpy().tobytes(), found)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            str(fragment): {name: save(stage.state) for name, stage in stages.items() if stage.state is not None}
            for fragment, stages in enumerate(self._stages)
            if self.has_memory
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It does not fit.
        """
        found, own = (
            ", ".join(sorted(f"{key}/{name}" for key, stages in one.items() for name in stages)) or "nothing"
            for one in (state, self.state_dict())
        )
        if found != own:
            raise CheckpointError(
                f"the checkpoint remembers {found} of its exchanges, this run {own}; resume with its method"
            )
        for fragment, stages in state.items():
            for name, saved in stages.items():
                load(self._stages[int(fragment)][name].state, saved)

    def adopt(self, state: Mapping[str, Any], *, is_own: bool) -> tuple[str, ...]:
        """Adopt the state that is valid under another set of replicas, and reset the rest.

        What a replica remembers of its own sending stays with it. What receivers hold too must be the same on all, also
        on those that are new, and an owner's part is another one where the number of replicas is another.

        Args:
            state: What `state_dict` returned under the other set.
            is_own: Whether this replica returned it.

        Returns:
            What was reset, a line each.

        Raises:
            CheckpointError: It does not fit.
        """
        lines = []
        for fragment, stages in enumerate(self._stages):
            for name, stage in stages.items():
                saved = state.get(str(fragment), {}).get(name)
                is_reset = saved is not None
                if stage.state is not None and (name == "factors" or (name == "out" and saved is not None)):
                    is_reset = bool(adopt(stage.state, saved or {}, is_own=is_own))
                elif stage.state is not None:
                    is_reset = True
                    reset(stage.state)
                if is_reset:  # also where it is of another exchange, under which nothing is kept
                    lines.append(f"fragment {fragment}: {_MEMORIES[name]}")
        return tuple(lines)


class Exchange(Protocol):
    """An averaging scheme as a value; `bind` creates its state on one replica."""

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        """Return the exchange for one replica.

        Args:
            shapes: The shapes of the tensors that each fragment's vector is made of.
            replica: This replica's number.
            num_replicas: How many take part.

        Raises:
            ValueError: The parts do not go together.
        """

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int: ...


@runtime_checkable
class DescribesTraffic(Protocol):
    """An exchange that states what its rounds send, so that they can be simulated and planned."""

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        """Return what one round sends, once every warm-up has ended.

        Args:
            shapes: Shapes of the tensors that the vector is made of; some codes depend on them.
            num_members: Number of replicas in the round.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Each member sends its whole payload to every other one and sums what it receives, in float32.

    Each value is coded once. A replica sends `(M - 1)` payloads, which is the least for 2 replicas and grows with M.

    Args:
        codec: The code, or codes that change with the step.
        memory: What the sender remembers of what its code dropped; None for nothing.
        keeps_parts: Whether the result holds each member's own part beside the mean.
        aggregate: What stands in for the mean; None for the mean.
    """

    codec: Codec | Ramp
    memory: SenderMemory | None = None
    keeps_parts: bool = False
    aggregate: Aggregate | None = None

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        if self.aggregate is not None:
            self.aggregate.check(num_replicas)
        stages = [
            {"out": EncodeStage(code_for(self.codec, tensors), self.memory, numel=numel_of(tensors))}
            for tensors in shapes
        ]
        return BoundExchange(self, stages)

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        return self.round({"out": EncodeStage(self.codec)}, tensor, context)

    def round(self, stages: Stages, tensor: torch.Tensor, context: RoundContext) -> Steps:
        stage: EncodeStage = stages["out"]
        numel, device, peers, transport = tensor.numel(), tensor.device, context.peers, context.transport
        senders = peers.senders
        # the codec of the launch step, which is the same on all members, whenever each of them decodes
        codec = stage.codec(context.step)
        expected = context.receiving(codec, numel=numel)
        sources = [peer for peer in senders if peer != peers.me]
        # posted before the (slow) encoding, so that messages of faster peers are accepted meanwhile
        receives = tuple(transport.receive(source=peer, envelope=expected) for peer in sources)
        sends: tuple[Pending, ...] = ()
        kept: dict[int, torch.Tensor] = {}
        if peers.me in senders:
            own = stage.encode(tensor, codec, seed=context.seed)
            # one copy to the host serves all sends; this replica sums its own decoded payload, not the exact tensor, so
            # that all members compute the same bits
            envelope, on_host, kept = context.sending(own, codec=codec, numel=numel), own.cpu(), {peers.me: own}
            for peer in peers.others:
                sends += (transport.send(on_host, to=peer, envelope=envelope),)
        del tensor  # while the round is in flight, only its payload takes memory
        received = yield Wait(receives=receives, sends=sends)
        by_replica = dict(zip(sources, received, strict=True))
        payloads = {peer: message.payload for peer, message in by_replica.items()} | kept
        what, parts = context.describe(), {}
        if self.keeps_parts or self.aggregate is not None:
            # all parts in memory at once; the plain mean decodes one at a time
            parts = {
                peer: decode(codec, payloads[peer].to(device), numel=numel, peer=peer, what=what) for peer in senders
            }
        if self.aggregate is None:
            mean = mean_of(codec, payloads, peers=peers, numel=numel, device=device, what=what)
        else:
            mean = self.aggregate(torch.stack([parts[peer] for peer in senders]))
        if context.must_be_finite:
            check_finite(mean, codec, payloads, what=what)
        # the engine compares them: members with different global values must not average (see `check_hashes`)
        hashes = {peer: RoundNote.of(message).reference_hash for peer, message in by_replica.items()}
        hashes[peers.me] = context.reference_hash
        return Average(mean=stage.received(mean), reference_hashes=hashes, parts=parts if self.keeps_parts else {})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        return (num_replicas - 1) * most_bytes(self.codec, numel)

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        return late_traffic(self, shapes, AllGatherMessages(), num_members=num_members)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhase:
    """Each replica owns a shard: it sums the others' payloads of it, codes the mean again and sends it to all.

    A replica sends at most `2 (M - 1) / M` payloads, however many replicas there are, and each value is coded twice.
    The owner, too, uses the decoded mean instead of its exact one, so that all replicas hold the same bits.
    Shards are whole codec blocks, so a shard's payload is the same bytes as that part of the whole payload.

    Args:
        codec: The code, or codes that change with the step.
        memory: What a sender remembers of what the first coding dropped; None for nothing.
        owner_memory: What a shard's owner remembers of what the second one dropped.

    Raises:
        ValueError: The codec is sparse.
    """

    codec: Codec | Ramp
    memory: SenderMemory | None = None
    owner_memory: SenderMemory | None = None

    def __post_init__(self) -> None:
        codec = codec_at(self.codec, 1)
        if codec.is_sparse:
            raise ValueError(
                f"{codec.name} payloads cannot be averaged on the way, because replicas keep different entries and the "
                f"mean would be cut again; use AllGather as the exchange"
            )

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        stages = []
        for tensors in shapes:
            numel = numel_of(tensors)
            block = codec_at(self.codec, 1).block
            start, stop = shard_bounds(numel, num_shards=num_replicas, block=block)[replica]
            # the sender's residual covers the whole vector, the owner's only its own shard
            out = EncodeStage(self.codec, self.memory, numel=numel)
            stages.append({"out": out, "mean": EncodeStage(self.codec, self.owner_memory, numel=stop - start)})
        return BoundExchange(self, stages)

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        return self.round({name: EncodeStage(self.codec) for name in ("out", "mean")}, tensor, context)

    def round(self, stages: Stages, tensor: torch.Tensor, context: RoundContext) -> Steps:
        out: EncodeStage = stages["out"]
        back: EncodeStage = stages["mean"]
        flat, device, peers, transport = tensor.reshape(-1), tensor.device, context.peers, context.transport
        codec, what, me = out.codec(context.step), context.describe(), context.peers.me
        if peers.absent:
            raise ValueError("TwoPhase() needs every member in every round, because each owns a shard; use AllGather()")
        context = replace(context, spread_s=context.spread_s / 2)  # the second phase takes as long again
        shards = shard_bounds(flat.numel(), num_shards=len(peers.members), block=codec.block)
        bounds = dict(zip(peers.members, shards, strict=True))
        sizes = {owner: stop - start for owner, (start, stop) in bounds.items()}
        # phase 1: each member sends every owner its part of that shard (reduce-scatter)
        expected = context.receiving(codec, numel=sizes[me])
        receives = tuple(transport.receive(source=peer, envelope=expected) for peer in peers.others)
        coded = out.encode_shards(flat, bounds, codec, seed=context.seed)
        sends: tuple[Pending, ...] = ()
        for owner in peers.others:
            envelope = context.sending(coded[owner], codec=codec, numel=sizes[owner])
            sends += (transport.send(coded[owner].cpu(), to=owner, envelope=envelope),)
        own = coded[me]
        del tensor, flat, coded  # while the round is in flight, only its payload takes memory
        received = yield Wait(receives=receives, sends=sends)
        hashes = {
            peer: RoundNote.of(message).reference_hash for peer, message in zip(peers.others, received, strict=True)
        }
        payloads = {peer: message.payload for peer, message in zip(peers.others, received, strict=True)} | {me: own}
        shard = mean_of(codec, payloads, peers=peers, numel=sizes[me], device=device, what=what)
        if context.must_be_finite:
            check_finite(shard, codec, payloads, what=what)

        # a fresh stream: the mean must not be rounded with the draws that rounded the parts
        own = back.encode(shard, codec, seed=derive_seed(context.seed, "mean"))
        # phase 2: each owner sends the coded mean of its shard to all (all-gather)
        receives = tuple(
            transport.receive(source=p, envelope=context.receiving(codec, numel=sizes[p], phase=1))
            for p in peers.others
        )
        envelope, on_host, sends = context.sending(own, codec=codec, numel=sizes[me], phase=1), own.cpu(), ()
        for peer in peers.others:
            sends += (transport.send(on_host, to=peer, envelope=envelope),)
        received = yield Wait(receives=receives, sends=sends)
        parts = {peer: message.payload for peer, message in zip(peers.others, received, strict=True)} | {me: own}
        # the own shard is decoded too: the exact mean would give this replica other bits than its peers
        whole = torch.empty(sum(sizes.values()), dtype=torch.float32, device=device)
        for owner, (start, stop) in bounds.items():
            whole[start:stop] = decode(codec, parts[owner].to(device), numel=sizes[owner], peer=owner, what=what)
        return Average(mean=out.received(whole), reference_hashes=hashes | {me: context.reference_hash})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        if num_replicas == 1:
            return 0
        bounds = shard_bounds(numel, num_shards=num_replicas, block=codec_at(self.codec, 1).block)
        sizes = [most_bytes(self.codec, stop - start) for start, stop in bounds]
        return max(sum(sizes) - own + (num_replicas - 1) * own for own in sizes)

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        # encode the parts, decode M shards of 1/M, encode 1/M, decode the whole mean
        passes = (3 + 1 / num_members) / 2
        traffic = late_traffic(self, shapes, TwoPhaseMessages(), num_members=num_members, passes=passes)
        return replace(traffic, num_messages=2 * (num_members - 1))


def cheapest(codec: Codec, *, num_replicas: int) -> AllGather | TwoPhase:
    """Choose between the two exchanges by their cost.

    All-gather sends `(M - 1)` payloads, two-phase `2 (M - 1) / M`. Two-phase codes each value a second time and waits
    for two messages in a row. For a code of few bits that is worth it for more than 4 replicas, where it more than
    halves the bytes. A cast to 16 bits or more takes no time and loses next to nothing the second time, so there it is
    worth it as soon as it saves bytes, for more than 2. A sparse codec cannot be coded twice.

    Example:
        >>> from thinwire.codecs import e3m0, float16
        >>> [type(cheapest(codec, num_replicas=4)).__name__ for codec in (e3m0(), float16())]
        ['AllGather', 'TwoPhase']
    """
    # bytes a replica in units of its payload, all-gather against two-phase: M = 2: 1 / 1, M = 4: 3 / 1.5, M = 5: 4 /
    # 1.6
    limit = 2 if codec.bits_per_element >= _CAST_BITS else 4
    return AllGather(codec=codec) if num_replicas <= limit or codec.is_sparse else TwoPhase(codec=codec)


def exchange_by_name(name: str, codec: Codec) -> Callable[[int], AllGather | TwoPhase]:
    """Return the exchange of a name, as a function of the number of replicas.

    Args:
        name: `"all-gather"`, `"two-phase"`, or `"auto"` for the cheaper one.
        codec: Of the payloads.

    Raises:
        ValueError: There is no such exchange, or it does not go with the codec.
    """
    choices: dict[str, Callable[[int], AllGather | TwoPhase]] = {
        "auto": lambda num_replicas: cheapest(codec, num_replicas=num_replicas),
        "all-gather": lambda num_replicas: AllGather(codec=codec),
        "two-phase": lambda num_replicas: TwoPhase(codec=codec),
    }
    if name not in choices:
        raise ValueError(f"exchange must be one of {', '.join(choices)}, got {name!r}")
    return choices[name]


def shard_bounds(numel: int, *, num_shards: int, block: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into contiguous shards of whole blocks, as even as the blocks allow; late ones may be empty.

    Example:
        >>> shard_bounds(130, num_shards=2, block=64)
        [(0, 128), (128, 130)]
    """
    # whole blocks, so that a shard's payload is a slice of the whole payload
    num_blocks = -(-numel // block)
    cuts = [min(numel, -(-num_blocks * shard // num_shards) * block) for shard in range(num_shards + 1)]
    return list(pairwise(cuts))


def numel_of(shapes: Shapes) -> int:
    """Return how many elements tensors of these shapes have together."""
    return sum(shape.numel() for shape in shapes)


def late_traffic(
    exchange: Any, shapes: Shapes, pattern: MessagePattern, *, num_members: int, passes: float | None = None
) -> RoundTraffic:
    """Return what a round of an exchange sends once every warm-up has ended, in M - 1 messages of each.

    Args:
        exchange: Its `codec` may change with the step.
        shapes: Shapes of the tensors that the vector is made of.
        pattern: Its messages.
        num_members: M, the number of replicas in the round.
        passes: How often each element is coded; by default encoded once and decoded M times. A code with 2 bytes an
            element or more is a cast, which counts as none.
    """
    late, numel = replace(exchange, codec=laid_out(codec_at(exchange.codec, LATE_STEP), shapes)), numel_of(shapes)
    is_cast = exchange.sent_bytes(numel, num_replicas=2) >= 2 * numel
    passes = (1 + num_members) / 2 if passes is None else passes
    return RoundTraffic(
        pattern=pattern, sent_bytes=late.sent_bytes(numel, num_replicas=num_members), num_messages=num_members - 1,
        coding_passes=0.0 if is_cast else passes,
    )  # fmt: skip


def code_for(code: Codec | Ramp, shapes: Shapes) -> Codec | Ramp:
    """Tell a code that depends on the tensors' shapes what they are."""
    if isinstance(code, Ramp):
        return Ramp(codecs=tuple((start, laid_out(codec, shapes)) for start, codec in code.codecs))
    return laid_out(code, shapes)


def laid_out(codec: Codec, shapes: Shapes) -> Codec:
    """Return the codec for vectors that are made of tensors of these shapes."""
    return codec.laid_out(shapes) if isinstance(codec, NeedsLayout) else codec


@dataclass(frozen=True, slots=True, kw_only=True)
class NoExchange:
    """Send nothing. For the local steps of a method that does the inner step itself; its result is no mean."""

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        return BoundExchange(self, [{} for _ in shapes])

    def round(self, stages: Stages, tensor: torch.Tensor, context: RoundContext) -> Steps:
        yield from ()  # a generator like the others, that waits for nothing
        return Average(mean=tensor, reference_hashes={context.peers.me: context.reference_hash})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        return 0

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        return RoundTraffic(pattern=None, sent_bytes=0, num_messages=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip:
    """Each replica sends its whole payload to its neighbours, and weights what it receives in float32.

    The mean is `sum_j w_ij x_j` over a replica i and its neighbours j, in ascending order of j, and differs from
    replica to replica. The result holds the neighbours' parts (not one's own) and all weights. A replica sends one
    payload for each neighbour, however many replicas there are.

    Args:
        codec: The code.
        graph: An undirected graph over all replicas; the same as the topology's.
        num_replicas: How many there are; `bind` sets it.
    """

    codec: Codec
    graph: MixingGraph
    num_replicas: int = field(default=0, repr=False)

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        stages = [{"out": EncodeStage(code_for(self.codec, tensors))} for tensors in shapes]
        return BoundExchange(replace(self, num_replicas=num_replicas), stages)

    def round(self, stages: Stages, tensor: torch.Tensor, context: RoundContext) -> Steps:
        me, members = context.peers.me, context.peers.members
        row = mixing_row(self.graph, round_id=context.round_id, me=me, alive=range(self.num_replicas))
        # both are functions of the round's id alone, so neighbours agree without a message
        assert tuple(row) == members, "the topology and the exchange must follow the same graph"
        # unweighted: the payloads are those of an all-gather among the neighbours
        gather = AllGather(codec=self.codec, keeps_parts=True)
        average = yield from gather.round(stages, tensor, context)
        # the gather's mean weights all alike; the weighted one is summed again, in ascending order of the members
        mean = torch.zeros_like(average.mean)
        for member in members:
            mean.add_(average.parts[member], alpha=row[member])
        # DIMAT matches units with the neighbours' models one by one; its own it has (arXiv 2404.08079)
        parts = {member: part for member, part in average.parts.items() if member != me}
        return replace(average, mean=mean, parts=parts, weights=row)

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`; of the replicas, those that take part in the round count: the members."""
        return AllGather(codec=self.codec).sent_bytes(numel, num_replicas=num_replicas)

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        return late_traffic(self, shapes, AllGatherMessages(), num_members=num_members)


def mean_of(
    codec: Codec, payloads: Mapping[int, torch.Tensor], *, peers: Peers, numel: int, device: torch.device, what: str
) -> torch.Tensor:
    """Decode the payloads of all members and return their mean: float32, `(numel,)`; absent members count as zero.

    Raises:
        NonFiniteError: A payload held NaN or infinity; names its sender.
        PayloadError: A payload is broken.
    """
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for peer in peers.senders:  # one order everywhere: float addition is not associative
        total += decode(codec, payloads[peer].to(device), numel=numel, peer=peer, what=what)
    return total.div_(len(peers.members))  # absent members count as zero


def decode(codec: Codec, payload: torch.Tensor, *, numel: int, peer: int, what: str) -> torch.Tensor:
    """Decode one member's payload.

    Raises:
        NonFiniteError: It held NaN or infinity; names its sender.
        PayloadError: It is broken.
    """
    try:
        return codec.decode(payload, numel=numel)
    except NonFiniteError as failure:
        raise NonFiniteError(_diverged(peer, what=what)) from failure


def check_finite(mean: torch.Tensor, codec: Codec, payloads: Mapping[int, torch.Tensor], *, what: str) -> None:
    """Refuse a mean that is not finite.

    Raises:
        NonFiniteError: Names the member whose payload was not, or reports that the sum overflowed.
    """
    # the sum is finite only if every element is; decoding again to find the culprit happens once, in a run that ends
    if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
        return
    for peer, payload in payloads.items():
        if not bool(torch.isfinite(codec.decode(payload, numel=mean.numel())).all()):
            raise NonFiniteError(_diverged(peer, what=what))
    raise NonFiniteError(f"{what}: the sum of the replicas' payloads overflows float32; lower the learning rate")


def refuse_non_finite(vector: torch.Tensor, *, peer: int, what: str) -> None:
    """Refuse what a member's payload decodes to where it is not finite.

    Raises:
        NonFiniteError: Names the member.
    """
    if not bool(torch.isfinite(vector.sum())) and not bool(torch.isfinite(vector).all()):
        raise NonFiniteError(_diverged(peer, what=what))


def _diverged(peer: int, *, what: str) -> str:
    return (
        f"{what}: replica {peer} sent NaN or infinity; its model has diverged: look at its loss, lower its learning "
        f"rate or clip its gradients, and resume from a checkpoint before that"
    )
