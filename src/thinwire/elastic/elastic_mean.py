"""Averaging in elastic runs: every surviving replica applies the mean of the same parts, whichever peers were lost.

`membership` decides which parts count; this module defines what a part is and the mean of the decided parts. Every
replica decodes the same payloads in the same order, so all compute the same bits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from thinwire.averaging.aggregation_rules import mean_by_tensor
from thinwire.averaging.exchange import (
    AllGather,
    BoundExchange,
    Exchange,
    NormPreservingAllGather,
    Shapes,
    TwoPhase,
    laid_out,
)
from thinwire.averaging.payloads import EncodeStage, ExchangeState, Ramp, decode, refuse_non_finite
from thinwire.averaging.quorum import PART_HEADER_BYTES, PartHeader, read_part_header, with_part_header
from thinwire.averaging.reductions import norms
from thinwire.averaging.round_context import Average, Progress, RoundContext, Steps, Wait
from thinwire.codecs.base import Codec
from thinwire.elastic.protocol import PartFault
from thinwire.errors import NonFiniteError, PayloadError
from thinwire.transport.base import Pending

# A part this many times as long as the median one, of its number of steps, is shortened to that.
MOST_LENGTH = 3.0
# Parts with a magnitude from here on count as infinite: sums over replicas and blocks of a codec would overflow.
_MOST_MAGNITUDE = 1e30


class DecidedParts(Protocol):
    """The parts that a round decided on, the same at every replica that applies it."""

    @property
    def parts(self) -> Mapping[int, torch.Tensor]:
        """By replica in ascending order: uint8, one-dimensional, CPU."""
        ...

    @property
    def step(self) -> int:
        """The furthest step that any replica is known to have reached."""
        ...

    @property
    def closed_step(self) -> int:
        """A step up to which all rounds are decided."""
        ...

    @property
    def refused(self) -> Mapping[int, tuple[PartFault, str]]:
        """By replica, what is wrong with the part that it delivered to this one, and the error's text."""
        ...


class ProposedPart(Pending, Protocol):
    """A part that was offered; the decision is there once its `wait` has returned."""

    @property
    def agreed(self) -> DecidedParts | None:
        """The decided parts, None until `wait` has returned."""
        ...


class ElasticSession(Protocol):
    """A replica's session in an elastic run: who takes part, and which parts each round decides on."""

    def active(self) -> tuple[int, ...]:
        """Return the replicas that take part, this one among them."""
        ...

    def known_step(self) -> int:
        """Return the furthest step at which any replica has launched a round."""
        ...

    def is_decided(self, round_id: int) -> bool:
        """Return whether a round was decided without this replica."""
        ...

    def propose(
        self, part: torch.Tensor | None, *, round_id: int, launch_step: int, reference_hash: int, most_bytes: int,
        bad_parts: int = 0,
    ) -> ProposedPart:  # fmt: skip
        """Offer a part, None for none, and take part in what is agreed on.

        Args:
            part: uint8, one-dimensional, CPU.
            round_id: The round.
            launch_step: The step that it is launched at.
            reference_hash: Of the global value that the part refers to.
            most_bytes: Size of a part, at most.
            bad_parts: Where none is offered because it holds NaN or infinity: how many of these there were in a row,
                this one among them; else 0.
        """
        ...

    def reject(
        self, member: int, *, round_id: int, bad_parts: int, since: int, fault: PartFault, why: str = ""
    ) -> None:
        """Report that a part could not be used, and was left out of the mean.

        Args:
            member: Whose part.
            round_id: The round.
            bad_parts: How many of its parts in a row were bad, this one among them.
            since: The round of the first of them.
            fault: What is wrong with this one.
            why: The error's text.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticMean:
    """Every replica offers its part; the mean is taken of the decided ones, the same for all.

    Parts of replicas that trained equally count the same, bit for bit as in `AllGather`; else each counts by the tokens
    behind it, times its tokens a step. A replica does not offer a part that is not finite. Another one's part that is
    not finite, or cannot be read, counts nothing and is reported. A part much longer than the median part is shortened
    to `most_length` times that.

    Args:
        codec: The code of a part.
        session: This replica's session, None for a description.
        preserve_norm: Whether the mean keeps the length of a single part, tensor by tensor (see `WeightedMean`).
        most_length: Longest part, in median lengths.
        find: Called with a text for each part that was shortened.
        directions: For each fragment and tensor, whether it has a direction; set by the engine.

    Raises:
        ValueError: `most_length` is below 1.
    """

    codec: Codec
    session: ElasticSession | None = field(default=None, compare=False, repr=False)
    preserve_norm: bool = False
    most_length: float = MOST_LENGTH
    find: Callable[[str], None] = field(default=lambda text: None, compare=False, repr=False)
    directions: tuple[tuple[bool, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the range."""
        if not self.most_length >= 1:
            raise ValueError(f"most_length must be at least 1, got {self.most_length}; infinity shortens nothing")

    def with_directions(self, directions: Sequence[Sequence[bool]]) -> ElasticMean:
        """Return the exchange for fragments of tensors with and without a direction of their own."""
        return replace(self, directions=tuple(map(tuple, directions)))

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        """See `Exchange.bind`."""
        return _BoundElasticMean(self, shapes)

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`."""
        return (num_replicas - 1) * (PART_HEADER_BYTES + self.codec.payload_bytes(numel))


def elastic_mean(
    exchange: Exchange, *, session: ElasticSession, preserve_norm: bool, find: Callable[[str], None]
) -> ElasticMean:
    """Return the elastic variant of an exchange.

    Args:
        exchange: The method's own.
        session: This replica's session.
        preserve_norm: See `ElasticMean`.
        find: See `ElasticMean`.

    Raises:
        ValueError: It remembers what it sent, combines parts otherwise than by their mean, or is no all-gather.
    """
    if isinstance(exchange, NormPreservingAllGather):
        return ElasticMean(codec=exchange.codec, session=session, preserve_norm=True, find=find)
    is_plain = isinstance(exchange, AllGather | TwoPhase) and exchange.memory is None
    is_mean = getattr(exchange, "aggregate", None) is None and getattr(exchange, "owner_memory", None) is None
    codec = getattr(exchange, "codec", None)
    keeps_parts = getattr(exchange, "keeps_parts", False)
    if not (is_plain and is_mean) or codec is None or isinstance(codec, Ramp) or keeps_parts:
        raise ValueError(
            f"{exchange!r} depends on who sent what before, or on each replica's own part, so replicas cannot come and "
            f"go; for elastic runs take iso-loco, streaming-diloco, diloco, local-sgd or slowmo, with a codec without "
            f"memory"
        )
    return ElasticMean(codec=codec, session=session, preserve_norm=preserve_norm, find=find)


class _BoundElasticMean(ExchangeState):
    """See `ElasticMean`; nothing is remembered."""

    _spec: ElasticMean

    def __init__(self, spec: ElasticMean, shapes: Sequence[Shapes]) -> None:
        super().__init__(spec, [{"out": EncodeStage(laid_out(spec.codec, tensors))} for tensors in shapes])
        self._sizes = [[shape.numel() for shape in tensors] for tensors in shapes]
        self._own_bad, self._others_bad = _BadParts(), _BadParts()

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        """See `BoundExchange.steps`."""
        session, codec = self._spec.session, self._stages[context.fragment]["out"].codec(context.step)
        assert session is not None, "bound without a session"
        numel, device, part, bad_parts = tensor.numel(), tensor.device, None, 0
        if not session.is_decided(context.round_id):
            bad_parts, _ = self._own_bad.note(context.peers.me, context, is_good=_is_finite(tensor))
        if not session.is_decided(context.round_id) and not bad_parts:
            offer = PartHeader(num_tokens=context.num_tokens, num_steps=context.num_steps, has_part=True)
            part = with_part_header(offer, codec.encode(tensor, seed=context.seed).cpu())
        del tensor  # while the round is in flight, only its payload takes memory
        proposed = session.propose(
            part, round_id=context.round_id, launch_step=context.step, reference_hash=context.reference_hash,
            most_bytes=PART_HEADER_BYTES + codec.payload_bytes(numel), bad_parts=bad_parts,
        )  # fmt: skip
        del part
        yield Wait(receives=(proposed,))
        found = proposed.agreed
        assert found is not None
        for member, (fault, why) in found.refused.items():
            self._reject(member, fault, why, context=context)
        mean, weights = self._mean(found.parts, codec, numel=numel, device=device, context=context)
        me = context.peers.me
        context.hear(Progress(step=found.step, closed_step=min(found.closed_step, found.step)), me in found.parts)
        return Average(
            mean=mean, reference_hashes={me: context.reference_hash}, members=tuple(found.parts), weights=weights,
            is_counted=me in found.parts,
        )  # fmt: skip

    def _mean(
        self,
        parts: Mapping[int, torch.Tensor],
        codec: Codec,
        *,
        numel: int,
        device: torch.device,
        context: RoundContext,
    ) -> tuple[torch.Tensor, dict[int, float]]:
        what = context.describe()
        decoded, weights, steps = {}, {}, {}
        for member, raw in parts.items():
            # every replica reads the same bytes, so all leave out the same parts, and none fails by another's
            try:
                offer, coded = read_part_header(raw, step=None, what=f"{what} from replica {member}")
                vector = decode(codec, coded.to(device), numel=numel, peer=member, what=what)
                refuse_non_finite(vector, peer=member, what=what)
            except NonFiniteError:
                self._reject(member, "non_finite", context=context)
                continue
            except PayloadError as error:
                self._reject(member, "malformed", str(error), context=context)
                continue
            self._others_bad.note(member, context, is_good=True)
            if offer.weight > 0:
                # no claim, however high, makes a part as long as one likes
                decoded[member], weights[member] = vector, offer.weight
                steps[member] = min(offer.num_steps, max(1, context.step))
        if not decoded:  # no part is usable: nothing moves
            return torch.zeros(numel, dtype=torch.float32, device=device), {}
        self._shorten(decoded, steps, what=what)
        if len(set(weights.values())) == 1 and not self._spec.preserve_norm:
            total = torch.zeros(numel, dtype=torch.float32, device=device)
            for vector in decoded.values():  # in the order in which AllGather sums
                total += vector
            return total.div_(len(decoded)), weights
        spec, sizes = self._spec, self._sizes[context.fragment]
        keeps_norm = spec.directions[context.fragment] if spec.preserve_norm and spec.directions else ()
        stack = torch.stack(list(decoded.values()))
        return mean_by_tensor(stack, weights=list(weights.values()), sizes=sizes, keeps_norm=keeps_norm), weights

    def _reject(self, member: int, fault: PartFault, why: str = "", *, context: RoundContext) -> None:
        """Report a part that counts nothing."""
        assert self._spec.session is not None, "bound without a session"
        bad_parts, since = self._others_bad.note(member, context, is_good=False)
        self._spec.session.reject(
            member, round_id=context.round_id, bad_parts=bad_parts, since=since, fault=fault, why=why
        )

    def _shorten(self, decoded: dict[int, torch.Tensor], steps: Mapping[int, int], *, what: str) -> None:
        """Shorten parts that are much longer than the median one; more steps may make a longer part."""
        if len(decoded) < 3:  # of two, the outlier cannot be identified
            return
        lengths = dict(zip(decoded, norms(torch.stack(list(decoded.values()))), strict=True))
        a_step = statistics.median_low([length / max(1, steps[member]) for member, length in lengths.items()])
        usual = statistics.median_low(lengths.values())
        for member, length in lengths.items():
            # a replica that did more steps may have moved further
            limit = self._spec.most_length * max(usual, a_step * steps[member])
            if 0 < limit < length < math.inf:
                decoded[member] = decoded[member] * (limit / length)
                self._spec.find(
                    f"{what}: the part of replica {member} was {length / limit * self._spec.most_length:.1f} times as "
                    f"long as the median one and was shortened to {self._spec.most_length:g} times"
                )


class _BadParts:
    """Counts of each replica's bad parts since its last good part of the same fragment.

    Fragments count apart, so that good parts of one do not hide that another one stays bad.
    """

    def __init__(self) -> None:
        # by replica and fragment: how many, and the first round
        self._found: dict[int, dict[int, tuple[int, int]]] = {}

    def note(self, replica: int, context: RoundContext, *, is_good: bool) -> tuple[int, int]:
        """Take in a part; return how many bad ones there are of all fragments, and the round of the first."""
        found = self._found.setdefault(replica, {})
        if is_good:
            found.pop(context.fragment, None)
            if not found:
                del self._found[replica]
            return 0, context.round_id
        count, first = found.get(context.fragment, (0, context.round_id))
        found[context.fragment] = count + 1, first
        return sum(count for count, _ in found.values()), min(first for _, first in found.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds no NaN, no infinity, and nothing that sums of it would make infinite."""
    if not tensor.numel():
        return True
    lowest, highest = torch.aminmax(tensor)  # of NaN, both are NaN
    return bool((lowest > -_MOST_MAGNITUDE) & (highest < _MOST_MAGNITUDE))
