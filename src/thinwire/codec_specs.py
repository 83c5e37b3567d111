"""Specifications of the codecs: names, and what makes each. Imports no torch, so wrong names are refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from thinwire.errors import unknown_name

# Function of `thinwire.codecs`, and its arguments.
CODEC_SPECS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "float32": ("float32", {}),
        "bfloat16": ("bfloat16", {}),
        "float16": ("float16", {}),
        "block-int8": ("block_int8", {}),
        "block-int4": ("block_int4", {}),
        "block-2bit": ("block_2bit", {}),
        "e3m0": ("e3m0", {}),
        "e3m0-stochastic": ("e3m0", {"rounding": "stochastic"}),
        "top-k": ("top_k", {}),
        "top-k-sampled": ("top_k", {"selection": "sampled"}),
        "chunked-top-k": ("chunked_top_k", {}),
        "chunked-top-k-2bit": ("chunked_top_k", {"values": "codebook2"}),
        "random-k": ("random_k", {}),
        "threshold": ("threshold", {}),
        "sign": ("sign", {}),
        "sign-mean": ("sign", {"scale": "mean"}),
        "dct-top-k": ("dct_top_k", {}),
    }
)


def codec_key(name: str, *, what: str = "codec") -> str:
    """Return the name of a codec as `CODEC_SPECS` has it; `_` and `-` are the same.

    Raises:
        ValueError: There is no such codec; names the nearest ones.
    """
    key = name.lower().replace("_", "-")
    if key not in CODEC_SPECS:
        raise unknown_name(what, name, CODEC_SPECS)
    return key
