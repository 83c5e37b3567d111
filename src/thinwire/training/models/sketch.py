"""Models without values, for plans: the named shapes, `hf:` models, and decoders of a size such as `7b`."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from thinwire.training.models.presets import PRESETS, build_model
from thinwire.training.models.transformer import TransformerConfig, build_transformer

_VOCABULARY = 32_000
_HEAD_DIM, _MOST_LAYERS = 128, 160
# Width over layers: 128 in the larger decoders of arXiv 2005.14165 (table 2.1: 6.7B has 32 layers and 4096, 175B 96 and
# 12288) and of arXiv 2302.13971 (table 2: 32 and 4096, 40 and 5120).
_WIDTH_PER_LAYER = 128
_SIZES = {"m": 1e6, "b": 1e9, "t": 1e12}


def sketch_model(name: str, *, seq_len: int) -> tuple[nn.Module, bool]:
    """Build a model on the meta device: shapes, and no values.

    Args:
        name: As for `build_model`, or a size such as `7b` or `1.5b`: a decoder of about so many parameters.
        seq_len: Longest sequence in tokens.

    Returns:
        The model, and whether `thinwire train` takes the name.

    Raises:
        ValueError: There is no such name, and it is no size.
        MissingExtra: `hf:` without transformers.
        CheckpointError: The `hf:` model cannot be read.

    Example:
        >>> model, can_train = sketch_model("7b", seq_len=2048)
        >>> len(model.blocks), sum(p.numel() for p in model.parameters()), can_train
        (32, 6986846336, False)
    """
    size = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([mbt])", name.lower())
    if name in PRESETS or size is None:
        return build_model(name, max_seq_len=seq_len, device="meta"), True
    shape = decoder_of(float(size.group(1)) * _SIZES[size.group(2)], seq_len=seq_len)
    return build_transformer(shape, seed=0, device=torch.device("meta")), False


def decoder_of(num_parameters: float, *, seq_len: int) -> TransformerConfig:
    """Return the shape of a decoder of about so many parameters, 128 times as wide as it has layers.

    Raises:
        ValueError: No decoder of this kind is so small or so large.
    """
    found: list[tuple[float, TransformerConfig]] = []
    for layers in range(2, _MOST_LAYERS + 1):
        # 12 layers * width^2 + vocabulary * width = parameters
        root = math.sqrt(_VOCABULARY**2 + 48 * layers * num_parameters)
        width = round((root - _VOCABULARY) / (24 * layers) / _HEAD_DIM) * _HEAD_DIM
        if width < _HEAD_DIM:
            continue
        shape = TransformerConfig(
            vocab_size=_VOCABULARY, dim=width, layers=layers, heads=width // _HEAD_DIM, max_seq_len=seq_len
        )
        miss = abs(math.log(shape.num_parameters / num_parameters))
        if miss < 0.05:
            found.append((abs(math.log(width / layers / _WIDTH_PER_LAYER)) + 4 * miss, shape))
    if not found:
        raise ValueError(
            f"no decoder has about {num_parameters:.3g} parameters; sizes from 10m to 2t are known, and the models "
            f"{', '.join(PRESETS)}"
        )
    return min(found, key=lambda pair: pair[0])[1]
