"""Averaging in elastic runs: every surviving replica applies the mean of the same parts, whichever peers were lost.

`membership` decides which parts count; this module defines what a part is and the mean of the decided parts. Every
replica decodes the same payloads in the same order, so all compute the same bits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.averaging.aggregation_rules import WeightedMean
from thinwire.averaging.exchange import (
    AllGather,
    BoundExchange,
    EncodeStage,
    Exchange,
    Ramp,
    Shapes,
    TwoPhase,
    decode,
    laid_out,
)
from thinwire.averaging.quorum import PART_HEADER_BYTES, PartHeader, read_part_header, with_part_header
from thinwire.averaging.reductions import norms
from thinwire.averaging.round_context import Average, Progress, RoundContext, Steps, Wait
from thinwire.codecs.base import Codec
from thinwire.elastic.protocol import PartFault
from thinwire.elastic.round_driver import ReplicaRounds
from thinwire.errors import NonFiniteError, PayloadError

# A part this many times as long as the median of the others, for its number of steps, is shortened to that.
MOST_LENGTH = 3.0
# A part this many times as long as the median of the others is left out: what diverged or is broken pulls the mean for
# good, however it is shortened. A replica with fresh moments, or between two others with them, stays below 8.
_BAD_LENGTH = 10.0
# Claimed tokens a step, in medians of the others': more is a broken counter, not a larger batch.
_MOST_TOKENS = 1000.0
# Long parts in a row that a finding names.
_LONG_ROUNDS = 4
# Rounds without a long part of a replica after which its next ones are a new episode.
_EPISODE_ROUNDS = 32
# Parts with a magnitude from here on count as infinite: sums over replicas and blocks of a codec would overflow.
_MOST_MAGNITUDE = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticMean:
    """Every replica offers its part; the mean is taken of the decided ones, the same for all.

    Parts of replicas that trained equally count the same, bit for bit as in `AllGather`; else each counts by the tokens
    behind it, times its tokens a step. A replica does not offer a part that is not finite. Another one's part that is
    not finite, cannot be read, or is far longer than the others counts nothing and is reported. A part much longer than
    the median of the others is shortened to `most_length` times that.

    Args:
        codec: The code of a part.
        session: This replica's rounds, None for a description.
        most_length: Longest part, in median lengths.
        find: Called with a text where parts of a replica are shortened in several rounds in a row.

    Raises:
        ValueError: `most_length` is below 1.
    """

    codec: Codec
    session: ReplicaRounds | None = field(default=None, compare=False, repr=False)
    most_length: float = MOST_LENGTH
    find: Callable[[str], None] = field(default=lambda text: None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the range."""
        if not self.most_length >= 1:
            raise ValueError(f"most_length must be at least 1, got {self.most_length}; infinity shortens nothing")

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        return _BoundElasticMean(self, shapes)

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        return (num_replicas - 1) * (PART_HEADER_BYTES + self.codec.payload_bytes(numel))


def elastic_mean(exchange: Exchange, *, session: ReplicaRounds | None, find: Callable[[str], None]) -> ElasticMean:
    """Return the elastic variant of a method's own exchange; without a session it is a description.

    Raises:
        ValueError: It remembers what it sent, combines parts otherwise than by their mean, or is no all-gather.
    """
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
    return ElasticMean(codec=codec, session=session, find=find)


class _BoundElasticMean(BoundExchange):
    """See `ElasticMean`; nothing is remembered."""

    _spec: ElasticMean

    def __init__(self, spec: ElasticMean, shapes: Sequence[Shapes]) -> None:
        super().__init__(spec, [{"out": EncodeStage(laid_out(spec.codec, tensors))} for tensors in shapes])
        self._own_bad, self._others_bad, self._long = _BadParts(), _BadParts(), _BadParts()
        self._num_rounds = 0
        self._named_long: dict[int, int] = {}  # by replica with a finding: the latest round of a long part

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
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
        session.confirm(context.round_id, weights)
        me = context.peers.me
        context.hear(Progress(step=found.step, closed_step=min(found.closed_step, found.step)), me in found.parts)
        return Average(
            mean=mean, reference_hashes={me: context.reference_hash}, members=tuple(found.parts), weights=weights,
            is_counted=me in found.parts,
        )  # fmt: skip

    def _mean(
        self, parts: Mapping[int, torch.Tensor], codec: Codec, *, numel: int, device: torch.device,
        context: RoundContext,
    ) -> tuple[torch.Tensor, dict[int, float]]:  # fmt: skip
        what = context.describe()
        decoded, offers = {}, {}
        for member, raw in parts.items():
            # every replica reads the same bytes, so all leave out the same parts, and none fails by another's
            try:
                offers[member], coded = read_part_header(raw, step=None, what=f"{what} from replica {member}")
                decoded[member] = decode(codec, coded.to(device), numel=numel, peer=member, what=what)
                if not _is_finite(decoded[member]):
                    is_huge = bool(torch.isfinite(decoded.pop(member)).all())
                    why = f"a value of {_MOST_MAGNITUDE:g} or more" if is_huge else ""
                    self._reject(member, "non_finite", why, context=context)
            except NonFiniteError:
                self._reject(member, "non_finite", context=context)
            except PayloadError as error:
                self._reject(member, "malformed", str(error), context=context)
        self._leave_out_and_shorten(decoded, offers, context=context)
        weights = {member: offers[member].weight for member in decoded}
        if not decoded:  # no part is usable: nothing moves
            return torch.zeros(numel, dtype=torch.float32, device=device), {}
        if len(set(weights.values())) == 1:
            total = torch.zeros(numel, dtype=torch.float32, device=device)
            for vector in decoded.values():  # in the order in which AllGather sums
                total += vector
            return total.div_(len(decoded)), weights
        return WeightedMean(weights=tuple(weights.values()))(torch.stack(list(decoded.values()))), weights

    def _reject(self, member: int, fault: PartFault, why: str = "", *, context: RoundContext) -> None:
        """Report a part that counts nothing."""
        assert self._spec.session is not None, "bound without a session"
        bad_parts, since = self._others_bad.note(member, context, is_good=False)
        self._spec.session.reject(
            member, round_id=context.round_id, bad_parts=bad_parts, since=since, fault=fault, why=why
        )

    def _leave_out_and_shorten(
        self, decoded: dict[int, torch.Tensor], offers: Mapping[int, PartHeader], *, context: RoundContext
    ) -> None:
        """Leave out parts that no sound replica sends, and those that count nothing; shorten much longer ones."""
        # no claim, however high, makes a part as long as one likes
        steps = {member: min(offers[member].num_steps, max(1, context.step)) for member in decoded}
        counted = {member: vector for member, vector in decoded.items() if offers[member].weight > 0}
        lengths = dict(zip(counted, norms(torch.stack([*counted.values()])), strict=True)) if len(counted) > 1 else {}
        claims = {member: offers[member].num_tokens / offers[member].num_steps for member in counted}
        for member in list(decoded):
            fault, why = self._outlier(member, lengths, claims, steps) if member in lengths else (None, "")
            if fault is not None:
                self._reject(member, fault, why, context=context)
            else:
                self._others_bad.note(member, context, is_good=True)
            if fault is not None or member not in counted:
                del decoded[member]
        left = {member: length for member, length in lengths.items() if member in decoded}
        self._num_rounds += 1
        for member, length in left.items():
            usual = _usual_length(member, left, steps)
            limit = math.inf if usual is None else self._spec.most_length * usual
            is_long = 0 < limit < length
            if is_long:
                decoded[member] = decoded[member] * (limit / length)
            rounds, _ = self._long.note(member, context, is_good=not is_long)
            # one finding an episode, from one replica; a few in a row are usual after a start with fresh moments
            if is_long and self._num_rounds - self._named_long.get(member, self._num_rounds) >= _EPISODE_ROUNDS:
                del self._named_long[member]
            is_new = rounds == _LONG_ROUNDS and member not in self._named_long
            if is_new or (is_long and member in self._named_long):
                self._named_long[member] = self._num_rounds
            if is_new and context.peers.me == min(one for one in left if one != member):
                most = self._spec.most_length
                self._spec.find(
                    f"{context.describe()}: the part of replica {member} was {length / limit * most:.1f} times as long "
                    f"as the median one, and the {rounds}th long one in a row; they are shortened to {most:g} times"
                )

    def _outlier(
        self, member: int, lengths: Mapping[int, float], claims: Mapping[int, float], steps: Mapping[int, int]
    ) -> tuple[PartFault | None, str]:
        """Return why a part is one that no sound replica sends; None for the fault of a sound one."""
        # others that did far fewer steps do not show how long a part of this many may be
        near = {one: length for one, length in lengths.items() if one == member or 4 * steps[one] >= steps[member]}
        are_two = len(lengths) == 2
        whose = "that of the other one" if are_two else "the median of the others"
        # of two the longer one is left out: a part that is too short for its steps costs a round, and no parameters
        usual = _usual_length(member, near, steps, least=1 if are_two else 2)
        if usual and lengths[member] > max(_BAD_LENGTH, self._spec.most_length) * usual:
            return "too_long", f"{lengths[member] / usual:.3g} times as long as {whose}"
        others = [claim for one, claim in claims.items() if one != member]
        if claims[member] > _MOST_TOKENS * statistics.median_high(others):
            return "too_heavy", f"{claims[member]:.3g} tokens a step, where others have {max(others):.3g} at most"
        return None, ""


def _usual_length(
    member: int, lengths: Mapping[int, float], steps: Mapping[int, int], *, least: int = 2
) -> float | None:
    """Return the median length of the other parts, or of their steps times this one's number of steps.

    A replica does not move the measure of its own part. None where there are fewer others than `least`.
    """
    others = [one for one in lengths if one != member]
    if len(others) < least:
        return None
    a_step = statistics.median_high([lengths[one] / max(1, steps[one]) for one in others])
    # a replica that did more steps may have moved further
    return max(statistics.median_high([lengths[one] for one in others]), a_step * steps[member])


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
