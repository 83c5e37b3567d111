"""Methods by name: one module or package a paper, each a choice of parts."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable

from thinwire.methods.about import About
from thinwire.methods.all_reduce import all_reduce
from thinwire.methods.co2 import co2
from thinwire.methods.decoupled_diloco import decoupled_diloco
from thinwire.methods.demo import demo
from thinwire.methods.dgc import dgc
from thinwire.methods.diloco import default_outer_lr, diloco
from thinwire.methods.dimat import dimat
from thinwire.methods.eager import eager
from thinwire.methods.ef21 import ef21, ef21_step_size
from thinwire.methods.local_sgd import local_sgd
from thinwire.methods.masha import masha1, masha2
from thinwire.methods.muloco import muloco
from thinwire.methods.noloco import noloco
from thinwire.methods.one_bit_adam import one_bit_adam
from thinwire.methods.one_bit_lamb import one_bit_lamb
from thinwire.methods.options import options_of, parse_options
from thinwire.methods.power_sgd import power_sgd
from thinwire.methods.robust import robust
from thinwire.methods.slowmo import slowmo
from thinwire.methods.sparse_loco import sparse_loco
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.methods.zero_one_adam import zero_one_adam
from thinwire.sync.method import Method

RECIPES: dict[str, Callable[..., Method]] = {
    "all-reduce": all_reduce,
    "local-sgd": local_sgd,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "decoupled-diloco": decoupled_diloco,
    "eager": eager,
    "muloco": muloco,
    "sparse-loco": sparse_loco,
    "power-sgd": power_sgd,
    "dgc": dgc,
    "demo": demo,
    "ef21": ef21,
    "masha1": masha1,
    "masha2": masha2,
    "robust": robust,
    "slowmo": slowmo,
    "co2": co2,
    "noloco": noloco,
    "one-bit-adam": one_bit_adam,
    "zero-one-adam": zero_one_adam,
    "one-bit-lamb": one_bit_lamb,
    "dimat": dimat,
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


def about(name: str) -> About:
    """Return the card of a method, by its name.

    Raises:
        ValueError: No method has this name; names the nearest ones.

    Example:
        >>> about("diloco").paper
        'arXiv 2311.08105'
    """
    module = sys.modules[recipe(name).__module__]
    card: About = module.ABOUT
    return card


def story(name: str) -> str:
    """Return the docstring of a method's module: the paper, its equations, what we changed.

    Raises:
        ValueError: No method has this name; names the nearest ones.
    """
    return inspect.cleandoc(sys.modules[recipe(name).__module__].__doc__ or "")


__all__ = [
    "RECIPES",
    "About",
    "Method",
    "about",
    "all_reduce",
    "co2",
    "decoupled_diloco",
    "default_outer_lr",
    "demo",
    "dgc",
    "diloco",
    "dimat",
    "eager",
    "ef21",
    "ef21_step_size",
    "local_sgd",
    "masha1",
    "masha2",
    "muloco",
    "noloco",
    "one_bit_adam",
    "one_bit_lamb",
    "options_of",
    "parse_options",
    "power_sgd",
    "recipe",
    "robust",
    "slowmo",
    "sparse_loco",
    "story",
    "streaming_diloco",
    "zero_one_adam",
]
