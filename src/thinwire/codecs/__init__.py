"""What is sent: codecs turn a tensor into bytes and bytes into a tensor.

| codec | bits an element | largest error |
| --- | --- | --- |
| `float32()` | 32 | none for float32 |
| `bfloat16()`, `float16()` | 16 | rounding to that format |
| `block_int8()` | 8.125 | 1/254 of the block's largest magnitude |
| `block_int4()` | 4.25 | about 1/14 of the block's largest magnitude |
| `e3m0()` | 4.125 | a third of the element; small elements 1/128 of the block's scale |
"""

from __future__ import annotations

from thinwire.codecs.base import Codec
from thinwire.codecs.block_int import BlockInt, block_int4, block_int8
from thinwire.codecs.dense import Dense, bfloat16, float16, float32
from thinwire.codecs.e3m0 import E3M0, e3m0
from thinwire.codecs.registry import NAMES, by_name

__all__ = [
    "E3M0",
    "NAMES",
    "BlockInt",
    "Codec",
    "Dense",
    "bfloat16",
    "block_int4",
    "block_int8",
    "by_name",
    "e3m0",
    "float16",
    "float32",
]
