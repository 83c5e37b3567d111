"""The exchange of local steps: sends nothing and returns each replica's own tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.averaging.exchange import Shapes
from thinwire.averaging.message_pattern import RoundTraffic
from thinwire.averaging.round_context import Average, RoundContext, Steps
from thinwire.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class NoExchange:
    """Send nothing. For the local steps of a method that does the inner step itself; its result is no mean."""

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundNoExchange:
        """See `Exchange.bind`."""
        return BoundNoExchange()

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return 0."""
        return 0

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        """See `DescribesTraffic.traffic`."""
        return RoundTraffic(pattern=None, sent_bytes=0, num_messages=0)


class BoundNoExchange:
    """See `NoExchange`."""

    @property
    def has_memory(self) -> bool:
        """Never."""
        return False

    def shared_hash(self, fragment: int) -> int:
        """Nothing is remembered."""
        return 0

    def steps(self, tensor: torch.Tensor, delivery: RoundContext) -> Steps:
        """Return a generator that ends at once."""
        yield from ()
        return Average(mean=tensor, reference_hashes={delivery.peers.me: delivery.reference_hash})

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return 0."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `BoundExchange.load_state_dict`."""
        if state:
            raise CheckpointError("the checkpoint holds state of an exchange that sends nothing")

    def adopt(self, state: Mapping[str, Any], *, is_own: bool) -> tuple[str, ...]:
        """Nothing is remembered."""
        self.load_state_dict(state)
        return ()
