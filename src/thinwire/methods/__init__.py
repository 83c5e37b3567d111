"""Methods by name: one file a paper, each a choice of parts."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from thinwire.methods.all_reduce import all_reduce
from thinwire.methods.diloco import diloco
from thinwire.methods.local_sgd import local_sgd
from thinwire.methods.one_bit_adam import one_bit_adam
from thinwire.methods.one_bit_lamb import one_bit_lamb
from thinwire.methods.outer_learning_rate import default_outer_lr
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.methods.zero_one_adam import zero_one_adam
from thinwire.sync.method import Method

RECIPES: dict[str, Callable[..., Method]] = {
    "all-reduce": all_reduce,
    "local-sgd": local_sgd,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "one-bit-adam": one_bit_adam,
    "zero-one-adam": zero_one_adam,
    "one-bit-lamb": one_bit_lamb,
}


def recipe(name: str) -> Callable[..., Method]:
    """Return the function that makes a method, by the method's name; `_` and `-` are the same.

    Raises:
        ValueError: No method has this name; names the nearest ones.

    Example:
        >>> recipe("streaming_diloco").__name__
        'streaming_diloco'
    """
    key = name.replace("_", "-").lower()
    if key in RECIPES:
        return RECIPES[key]
    near = difflib.get_close_matches(key, RECIPES, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"unknown method {name!r}{hint} There are: {', '.join(RECIPES)}")


__all__ = [
    "RECIPES",
    "Method",
    "all_reduce",
    "default_outer_lr",
    "diloco",
    "local_sgd",
    "one_bit_adam",
    "one_bit_lamb",
    "recipe",
    "streaming_diloco",
    "zero_one_adam",
]
