"""The `Method` value: when to exchange, with whom, what, in which code, and how the result is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.averaging.exchange import Exchange
from thinwire.averaging.topology import Topology
from thinwire.sync.schedule import Schedule
from thinwire.sync.updates import Update
from thinwire.sync.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Five parts; a paper is one file that chooses them.

    Attributes:
        name: As the command line takes it, such as `"streaming-diloco"`.
        schedule: When.
        topology: With whom.
        view: What.
        exchange: In which code and along which messages; a function of the number of replicas, since the cheapest
            exchange depends on it. Where rounds have channels, one exchange a channel.
        update: How the result is applied; a function of the number of replicas, since good outer learning rates do.
        last_exchange: How the final exchange travels, where it must not be as the first channel does: a code that sends
            a small part at a time would leave most of the last steps' work behind.
        has_common_value: Whether all replicas hold the same global value; where they do not, only the final exchange
            makes one model of theirs.
        drift_intervals: How many sync intervals one replica may be ahead of another.
    """

    name: str
    schedule: Schedule
    topology: Topology
    view: View
    exchange: Callable[[int], Exchange | tuple[Exchange, ...]]
    update: Callable[[int], Update]
    last_exchange: Callable[[int], Exchange] | None = None
    has_common_value: bool = True
    drift_intervals: int = 2

    def exchanges(self, num_replicas: int) -> tuple[Exchange, ...]:
        """Return one exchange a channel."""
        found = self.exchange(num_replicas)
        return found if isinstance(found, tuple) else (found,)

    def describe(self, *, num_replicas: int) -> str:
        """Return the parts in one line, the same on all replicas that run the same method."""
        parts = [self.schedule, self.topology, self.view, *self.exchanges(num_replicas), self.update(num_replicas)]
        return f"{self.name}: " + " | ".join(repr(part) for part in parts)
