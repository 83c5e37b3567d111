"""Gossip averaging: each replica gets its own mean over its neighbours in a graph, weighted by its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from thinwire.averaging.exchange import (
    LATE_STEP,
    AllGather,
    BoundExchange,
    Shapes,
    code_for,
    coding_passes,
    laid_out,
    numel_of,
)
from thinwire.averaging.message_pattern import AllGatherMessages, RoundTraffic
from thinwire.averaging.mixing import MixingGraph, mixing_row
from thinwire.averaging.payloads import EncodeStage, ExchangeState, codec_at
from thinwire.averaging.round_context import RoundContext, Steps
from thinwire.codecs.base import Codec


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
        return ExchangeState(replace(self, num_replicas=num_replicas), stages)

    def round(self, stages: Mapping[str, EncodeStage], tensor: torch.Tensor, context: RoundContext) -> Steps:
        me, members = context.peers.me, context.peers.members
        row = mixing_row(self.graph, round_id=context.round_id, me=me, alive=range(self.num_replicas))
        # both are functions of the round's id alone, so neighbours agree without a message
        assert tuple(row) == members, "the topology and the exchange must follow the same graph"
        # unweighted: the payloads are those of an all-gather among the neighbours
        gather = AllGather(codec=self.codec, keeps_parts=True)
        average = yield from gather.through(stages["out"], tensor, context)
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
        late = replace(self, codec=laid_out(codec_at(self.codec, LATE_STEP), shapes))
        return RoundTraffic(
            pattern=AllGatherMessages(),
            sent_bytes=late.sent_bytes(numel_of(shapes), num_replicas=num_members),
            num_messages=num_members - 1,
            coding_passes=coding_passes(self, shapes, passes=(1 + num_members) / 2),
        )
