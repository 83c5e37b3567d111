"""Specifications of the codecs: names, and what makes each. Imports no torch, so wrong names are refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from thinwire.errors import refusal, unknown_name

# Function of `thinwire.codecs`, and its arguments.
CODEC_SPECS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "float32": ("float32", {}), "bfloat16": ("bfloat16", {}), "float16": ("float16", {}),
    "block-int8": ("block_int8", {}), "block-int4": ("block_int4", {}), "block-2bit": ("block_2bit", {}),
    "e3m0": ("e3m0", {}), "e3m0-stochastic": ("e3m0", {"rounding": "stochastic"}),
    "top-k": ("top_k", {}), "top-k-sampled": ("top_k", {"selection": "sampled"}),
    "chunked-top-k": ("chunked_top_k", {}), "chunked-top-k-2bit": ("chunked_top_k", {"values": "codebook2"}),
    "random-k": ("random_k", {}), "threshold": ("threshold", {}),
    "sign": ("sign", {}), "sign-mean": ("sign", {"scale": "mean"}), "dct-top-k": ("dct_top_k", {}),
}  # fmt: skip


def codec_key(name: str, *, what: str = "codec") -> str:
    """Return the name of a codec as `CODEC_SPECS` has it; `_` and `-` are the same.

    Raises:
        ValueError: There is no such codec; names the nearest ones.
    """
    key = name.lower().replace("_", "-")
    if key not in CODEC_SPECS:
        raise unknown_name(what, name, CODEC_SPECS)
    return key


# Codecs that a forward activation does without, and what each cost a byte-level model of four layers in 150 steps: nats
# more than float32's 2.077, with the same code on both ways (block-2bit: with int8 back).
_TOO_COARSE_FORWARD: Mapping[str, str] = MappingProxyType(
    {
        "e3m0": "cost 0.141 nats of 2.077 in 150 steps of four stages; block-int4, as short, cost 0.022",
        "e3m0-stochastic": "its nearest rounding cost 0.141 nats of 2.077 in 150 steps; block-int4 cost 0.022",
        "block-2bit": "2 bits cost 0.379 nats of 2.077 in 150 steps of four stages; block-int4 cost 0.022",
        "sign": "is coarser than 2 bits, which cost 0.379 nats of 2.077 in 150 steps",
        "sign-mean": "is coarser than 2 bits, which cost 0.379 nats of 2.077 in 150 steps",
    }
)
_DENSE = ("float32", "bfloat16", "float16", "block-int8", "block-int4")
DEFAULT_ACTIVATION_CODE = "block-int8/block-int4"
DEFAULT_EXPERT_CODE = "block-int4/block-int4"  # of tokens on their way to experts
# Elements and bytes of a block.
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "float32": (1, 4), "bfloat16": (1, 2), "float16": (1, 2), "block-int8": (256, 260), "block-int4": (64, 34),
        "block-2bit": (1024, 264), "e3m0": (64, 33), "e3m0-stochastic": (64, 33),
    }
)  # fmt: skip
ACTIVATION_CODECS: Mapping[str, tuple[str, ...]] = MappingProxyType({"forward": _DENSE, "backward": tuple(_BLOCKS)})


def activation_codec(name: str, *, direction: str) -> str:
    """Return the name of a codec that may carry what crosses between stages of a model.

    Args:
        name: Of the codec.
        direction: `forward` for activations, `backward` for their gradients.

    Raises:
        ValueError: There is no such codec, it drops most elements, or it is too coarse for the direction.

    Example:
        >>> activation_codec("block_int4", direction="backward")
        'block-int4'
    """
    allowed = ACTIVATION_CODECS[direction]
    key = name.lower().replace("_", "-")
    if key not in CODEC_SPECS:
        raise unknown_name("codec", name, allowed)
    if key not in allowed:
        why = _TOO_COARSE_FORWARD.get(key, "it drops elements, and each is needed once")
        raise refusal(f"{key} carries no {direction} activations: {why}", got=key, allowed=", ".join(allowed),
                      remedy="block-int8")  # fmt: skip
    return key


def activation_bytes(name: str, numel: float) -> float:
    """Return the payload's size of so many elements, as the codec itself has it; a planner has no torch to ask it.

    Example:
        >>> activation_bytes("block-int8", 1000)
        1040
    """
    block, row_bytes = _BLOCKS[name]
    return -(-numel // block) * row_bytes


def delta_memory_bytes(samples: int, numel: int) -> int:
    """Return the bytes of float16 copies of samples on each side of a border, of so many activations each.

    Example:
        >>> delta_memory_bytes(128, 64 * 256)
        4194304
    """
    return samples * numel * 2


def activation_codecs(text: str) -> tuple[str, str]:
    """Return the codecs forward and backward that a text such as `block-int8/block-int4` names; one name is for both.

    Raises:
        ValueError: See `activation_codec`.

    Example:
        >>> activation_codecs("bfloat16"), activation_codecs("block-int8/e3m0")
        (('bfloat16', 'bfloat16'), ('block-int8', 'e3m0'))
    """
    forward, slash, backward = text.partition("/")
    return (
        activation_codec(forward, direction="forward"),
        activation_codec(backward if slash else forward, direction="backward"),
    )
