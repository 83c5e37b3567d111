"""Codecs: each turns a tensor into bytes, and those bytes into a tensor.

| codec | bits an element | largest error |
| --- | --- | --- |
| `float32()` | 32 | none for float32 |
| `bfloat16()`, `float16()` | 16 | rounding to that format |
| `block_int8()` | 8.125 | 1/254 of the block's largest magnitude |
| `block_int4()` | 4.25 | about 1/14 of the block's largest magnitude |
| `e3m0()` | 4.125 | a third of the element; small elements 1/128 of the block's scale |
| `block_2bit()` | 2.0625 | an element becomes one of four means of its block |
| `sign()`, `sign("mean")` | 1 | the magnitude: all elements come back as one number and its opposite |

These send some elements, whose values are off by 2**-11 at most; the others come back as zero. The
numbers of bits hold for values in float16 and random positions.

| codec | bits an element | what is sent |
| --- | --- | --- |
| `top_k(density=0.01)` | 0.241 | the largest of the tensor |
| `top_k(density=0.001)` | 0.028 | the same |
| `top_k(selection="sampled")` | 0.241 | nearly the largest of the tensor |
| `chunked_top_k()` | 0.439 | the 64 largest of each 4096 |
| `chunked_top_k(values="codebook2")` | 0.234 | the same, with four values a chunk |
| `random_k(density=0.01)` | 0.16 | a random set, which costs 8 bytes |
| `threshold(value=...)` | up to 17.03 | what reaches a magnitude |
| `dct_top_k()` | 0.221 | the 32 largest coefficients of each 64 x 64 of a matrix; 11.1 of 64 of a vector |
"""

from __future__ import annotations

from thinwire.codec_specs import CODEC_SPECS, codec_key
from thinwire.codecs.base import Codec, NeedsLayout
from thinwire.codecs.block_int import BlockInt, block_int4, block_int8
from thinwire.codecs.chunked_top_k import ChunkedTopK, chunked_top_k
from thinwire.codecs.codebook2 import Block2Bit, block_2bit
from thinwire.codecs.dct_top_k import DctTopK, dct_top_k
from thinwire.codecs.dense import Dense, bfloat16, float16, float32
from thinwire.codecs.e3m0 import E3M0, e3m0
from thinwire.codecs.random_k import RandomK, random_k
from thinwire.codecs.sign import Sign, sign
from thinwire.codecs.top_k import Threshold, TopK, threshold, top_k

__all__ = [
    "E3M0",
    "NAMES",
    "Block2Bit",
    "BlockInt",
    "ChunkedTopK",
    "Codec",
    "DctTopK",
    "Dense",
    "NeedsLayout",
    "RandomK",
    "Sign",
    "Threshold",
    "TopK",
    "bfloat16",
    "block_2bit",
    "block_int4",
    "block_int8",
    "by_name",
    "chunked_top_k",
    "dct_top_k",
    "e3m0",
    "float16",
    "float32",
    "random_k",
    "sign",
    "threshold",
    "top_k",
]


NAMES: tuple[str, ...] = tuple(CODEC_SPECS)
"""The names that `by_name` knows; each is its codec's `name`."""


def by_name(name: str) -> Codec:
    """Return the codec of that name; an underscore may stand for a hyphen.

    Raises:
        ValueError: There is none; the text holds the nearest names.

    Example:
        >>> by_name("block_int8").name, by_name("e3m0").bits_per_element
        ('block-int8', 4.125)
    """
    function, arguments = CODEC_SPECS[codec_key(name)]
    codec: Codec = globals()[function](**arguments)
    return codec
