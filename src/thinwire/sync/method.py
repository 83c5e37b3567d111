"""The `Method` value: when to exchange, with whom, what, in which code, how the result is applied; methods by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.averaging.exchange import Exchange
from thinwire.averaging.topology import AllReplicas, Topology
from thinwire.errors import unknown_method
from thinwire.sync.schedule import Schedule
from thinwire.sync.updates import Update
from thinwire.sync.views import View

# In sync intervals, where every round waits for all its replicas: the one that is under way, and the one before it.
LEAST_DRIFT = 2
_EVERYONE = AllReplicas()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Five parts; a paper is one file that chooses them.

    Attributes:
        name: As the command line takes it, such as `"streaming-diloco"`.
        schedule: When.
        view: What.
        exchange: In which code and along which messages; a function of the number of replicas, since the cheapest
            exchange depends on it. Where rounds have channels, one exchange a channel.
        update: How the result is applied; a function of the number of replicas, since good outer learning rates do.
        topology: With whom; with all by default.
        last_exchange: How the final exchange travels, where it must not be as the first channel does: a code that sends
            a small part at a time would leave most of the last steps' work behind.
        has_common_value: Whether all replicas hold the same global value; where they do not, only the final exchange
            makes one model of theirs.
        drift_intervals: How many sync intervals one replica may be ahead of another.
    """

    name: str
    schedule: Schedule
    view: View
    exchange: Callable[[int], Exchange | tuple[Exchange, ...]]
    update: Callable[[int], Update]
    topology: Topology = _EVERYONE
    last_exchange: Callable[[int], Exchange] | None = None
    has_common_value: bool = True
    drift_intervals: int = LEAST_DRIFT

    @property
    def has_late_replicas(self) -> bool:
        """Whether rounds close without some of their replicas, which pass over steps to catch up."""
        return self.drift_intervals > LEAST_DRIFT

    def exchanges(self, num_replicas: int) -> tuple[Exchange, ...]:
        """Return one exchange a channel."""
        found = self.exchange(num_replicas)
        return found if isinstance(found, tuple) else (found,)

    def describe(self, *, num_replicas: int) -> str:
        """Return the parts in one line, the same on all replicas that run the same method."""
        parts = [self.schedule, self.topology, self.view, *self.exchanges(num_replicas), self.update(num_replicas)]
        return f"{self.name}: " + " | ".join(repr(part) for part in parts)


RECIPES: dict[str, Callable[..., Method]] = {}
"""Functions that return a method, by the method's name; `thinwire.methods` registers them."""


def method_key(name: str) -> str:
    """Return a method's name as it is registered: `_` and `-` are the same, and so are upper and lower case."""
    return name.replace("_", "-").lower()


def recipe(name: str) -> Callable[..., Method]:
    """Return the function that makes a method, by the method's name; `_` and `-` are the same.

    Raises:
        ValueError: No method has this name, or it was removed; names the nearest ones.

    Example:
        >>> import thinwire.methods
        >>> recipe("streaming_diloco").__name__
        'streaming_diloco'
    """
    key = method_key(name)
    if key not in RECIPES:
        raise unknown_method(name, RECIPES)
    return RECIPES[key]


def method_of(method: object) -> Method:
    """Return a method, or the one that a name stands for, with its defaults.

    Raises:
        TypeError: It is neither; says what to pass.
        ValueError: No method has this name; names the nearest ones.
    """
    if isinstance(method, str):
        return recipe(method)()
    if isinstance(method, Method):
        return method
    name = getattr(method, "__name__", "streaming_diloco") if callable(method) else "streaming_diloco"
    raise TypeError(
        f"method is no Method; got {method!r}; allowed a Method or the name of one; try "
        f"thinwire.methods.{name}() or '{method_key(name)}'"
    )
