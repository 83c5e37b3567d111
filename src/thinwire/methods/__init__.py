"""Methods by name: one module or package a paper, each a choice of parts.

A module in this folder that registers a function is known to `thinwire train --method` without any other change.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING, NoReturn

from thinwire.methods.all_reduce import all_reduce
from thinwire.methods.co2 import co2
from thinwire.methods.decoupled_diloco import decoupled_diloco
from thinwire.methods.demo import demo
from thinwire.methods.dgc import dgc
from thinwire.methods.diloco import default_outer_lr, diloco
from thinwire.methods.dimat import dimat
from thinwire.methods.eager import eager
from thinwire.methods.ef21 import ef21, ef21_step_size
from thinwire.methods.iso_loco import iso_loco
from thinwire.methods.local_sgd import local_sgd
from thinwire.methods.masha import masha1, masha2
from thinwire.methods.muloco import muloco
from thinwire.methods.noloco import noloco
from thinwire.methods.one_bit_adam import one_bit_adam
from thinwire.methods.one_bit_lamb import one_bit_lamb
from thinwire.methods.power_sgd import power_sgd
from thinwire.methods.registry import About, about, options_of, parse_options, register, story
from thinwire.methods.robust import robust
from thinwire.methods.slowmo import slowmo
from thinwire.methods.sparse_loco import sparse_loco
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.methods.streaming_sparse_loco import streaming_sparse_loco
from thinwire.methods.zero_one_adam import zero_one_adam
from thinwire.sync.method import RECIPES, Method, recipe

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)

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
    "iso_loco",
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
    "register",
    "robust",
    "slowmo",
    "sparse_loco",
    "story",
    "streaming_diloco",
    "streaming_sparse_loco",
    "zero_one_adam",
]


if not TYPE_CHECKING:  # a type checker then still finds a name that does not exist

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is no method, with the nearest one."""
        near = difflib.get_close_matches(name.replace("-", "_"), __all__, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
