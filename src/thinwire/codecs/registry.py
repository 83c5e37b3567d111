"""Codecs by name, as the command line and configuration files call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from thinwire.codecs.base import Codec
from thinwire.codecs.block_2bit import block_2bit
from thinwire.codecs.block_int import block_int4, block_int8
from thinwire.codecs.chunked_top_k import chunked_top_k
from thinwire.codecs.dct_top_k import dct_top_k
from thinwire.codecs.dense import bfloat16, float16, float32
from thinwire.codecs.e3m0 import e3m0
from thinwire.codecs.random_k import random_k
from thinwire.codecs.sign import sign
from thinwire.codecs.threshold import threshold
from thinwire.codecs.top_k import top_k
from thinwire.errors import unknown_name

_FACTORIES: Mapping[str, Callable[[], Codec]] = MappingProxyType(
    {
        "float32": float32,
        "bfloat16": bfloat16,
        "float16": float16,
        "block-int8": block_int8,
        "block-int4": block_int4,
        "block-2bit": block_2bit,
        "e3m0": e3m0,
        "e3m0-stochastic": lambda: e3m0("stochastic"),
        "top-k": top_k,
        "top-k-sampled": lambda: top_k(selection="sampled"),
        "chunked-top-k": chunked_top_k,
        "chunked-top-k-2bit": lambda: chunked_top_k(values="codebook2"),
        "random-k": random_k,
        "threshold": threshold,
        "sign": sign,
        "sign-mean": lambda: sign("mean"),
        "dct-top-k": dct_top_k,
    }
)

NAMES: tuple[str, ...] = tuple(_FACTORIES)
"""The names that `by_name` knows; each is its codec's `name`."""


def by_name(name: str) -> Codec:
    """Return the codec of that name; an underscore may stand for a hyphen.

    Raises:
        ValueError: There is none; the text holds the nearest names.

    Example:
        >>> by_name("block_int8").name, by_name("e3m0").bits_per_element
        ('block-int8', 4.125)
    """
    factory = _FACTORIES.get(name.lower().replace("_", "-"))
    if factory is None:
        raise unknown_name("codec", name, NAMES)
    return factory()
