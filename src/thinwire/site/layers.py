"""Layer programme: for each layer the option that makes the whole fastest within a memory limit.

After Galvatron (arXiv 2504.21411): a dynamic programme over the layers. It keeps every pair of memory and time that no
other one beats, in place of a table of memory in steps, so its result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Times that differ by a smaller share differ by rounding.
_ROUNDING = 1e-12


class LayerOption(NamedTuple):
    """Cost of one way to run a layer."""

    num_bytes: float  # memory that it takes beside the other layers'
    seconds: float  # time that it adds to a pass


class _State(NamedTuple):
    """Layers so far: their memory and time, the option of the last one and the state before it."""

    num_bytes: float
    seconds: float
    choice: int = -1
    before: _State | None = None


def cheapest_options(options: Sequence[Sequence[LayerOption]], *, most_bytes: float) -> tuple[int, ...] | None:
    """Return the number of each layer's option, so that all together are fastest and fit; None where nothing fits.

    Args:
        options: Of each layer, in any order.
        most_bytes: Limit of the memory of all layers together.

    Example:
        >>> plain, recomputed = LayerOption(8, 1.0), LayerOption(2, 1.5)
        >>> sorted(cheapest_options([(plain, recomputed)] * 3, most_bytes=18))
        [0, 0, 1]
    """
    # what the layers that follow need at least
    rest = sum(min(option.num_bytes for option in own) for own in options)
    front = [_State(0.0, 0.0)]
    for own in options:
        rest -= min(option.num_bytes for option in own)
        longer = [
            _State(state.num_bytes + option.num_bytes, state.seconds + option.seconds, number, state)
            for state in front for number, option in enumerate(own)
            if state.num_bytes + option.num_bytes + rest <= most_bytes
        ]  # fmt: skip
        front = _unbeaten(longer)
    if not front:
        return None
    state: _State | None = min(front, key=lambda one: one.seconds)
    found: list[int] = []
    while state is not None and state.before is not None:
        found.append(state.choice)
        state = state.before
    return tuple(reversed(found))


def _unbeaten(states: list[_State]) -> list[_State]:
    states.sort(key=lambda state: (state.num_bytes, state.seconds))
    front: list[_State] = []
    for state in states:
        if not front or state.seconds < front[-1].seconds * (1 - _ROUNDING):
            front.append(state)
    return front
