"""Named shapes of the decoder, decoders of a size, and models by name.

| name | layers | heads | dim | MLP | vocabulary | parameters |
| --- | --- | --- | --- | --- | --- | --- |
| `nano` | 6 | 4 | 192 | 768 | 2,048 | 3,050,496 |
| `35m` | 6 | 8 | 512 | 2,048 | 32,000 | 35,265,792 |
| `150m` | 12 | 14 | 896 | 3,584 | 32,000 | 144,301,440 |
| `400m` | 12 | 24 | 1,536 | 6,144 | 32,000 | 388,930,560 |
| `1b` | 24 | 32 | 2,048 | 8,192 | 32,000 | 1,273,598,976 |

`35m` and `1b` are rows of table 5 of arXiv 2501.18512 (heads 64 wide, the MLP four times the width). `150m` and `400m`
have the 12 layers of the models of arXiv 2311.08105, with heads 64 wide; `nano` is small enough for two processes on
two cores. With an untied head each has vocabulary * dim parameters more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.errors import CheckpointError, unknown_name
from thinwire.workloads.language.hf import build_hf_model
from thinwire.workloads.language.transformer import TransformerConfig, build_transformer

PRESETS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        "nano": TransformerConfig(vocab_size=2048, dim=192, layers=6, heads=4),
        "35m": TransformerConfig(vocab_size=32_000, dim=512, layers=6, heads=8),
        "150m": TransformerConfig(vocab_size=32_000, dim=896, layers=12, heads=14),
        "400m": TransformerConfig(vocab_size=32_000, dim=1536, layers=12, heads=24),
        "1b": TransformerConfig(vocab_size=32_000, dim=2048, layers=24, heads=32),
    }
)


class LanguageModel(Protocol):
    """Interface of a model to the training loop; it is a `torch.nn.Module` too.

    Attributes:
        recompute: Whether the backward pass computes a block's activations again in place of keeping them.
    """

    recompute: bool

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""

    def loss(self, tokens: Tensor, targets: Tensor, *, is_padded: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss to train on and the mean negative log-likelihood in nats, from (batch, seq) int64 each.

        With `is_padded` negative targets count nothing.
        """

    def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return the logits after more tokens of a text, (batch, vocab_size), and a cache for the next call."""


def preset(
    name: str, *, vocab_size: int | None = None, max_seq_len: int | None = None, tied_head: bool | None = None
) -> TransformerConfig:
    """Return a named shape, or a decoder of a size such as `7b`, with what the data decides put in.

    Raises:
        ValueError: There is no such name; the text holds the nearest ones.

    Example:
        >>> preset("35m").num_parameters, preset("7b").num_parameters
        (35265792, 6986846336)
    """
    config = PRESETS.get(name)
    if config is None:
        size = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([mbt])", name.lower())
        if size is None:
            raise unknown_name("model", name, PRESETS, others="a size such as 125m, hf:PATH")
        config = decoder_of(float(size.group(1)) * _SIZES[size.group(2)])
    return replace(
        config,
        vocab_size=config.vocab_size if vocab_size is None else vocab_size,
        max_seq_len=config.max_seq_len if max_seq_len is None else max_seq_len,
        tied_head=config.tied_head if tied_head is None else tied_head,
    )


def build_model(
    name: str,
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    tied_head: bool | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.nn.Module:
    """Build the model of a name as for `preset`, or of `hf:` and a transformers model; the result is a `LanguageModel`.

    A `hf:` model keeps its own vocabulary, longest sequence and head: the first two must be at least as large as asked
    for.

    Raises:
        ValueError: There is no such name, or the `hf:` model is too small for the vocabulary or the sequence.
        MissingExtra: `hf:` without transformers.
        CheckpointError: The `hf:` model cannot be read.

    Example:
        >>> model = build_model("nano", vocab_size=257)
        >>> sum(parameter.numel() for parameter in model.parameters())
        2706624
    """
    if not name.startswith("hf:"):
        config = preset(name, vocab_size=vocab_size, max_seq_len=max_seq_len, tied_head=tied_head)
        return build_transformer(config, seed=seed, device=device)
    model = build_hf_model(name.removeprefix("hf:"), seed=seed, device=device)
    if vocab_size is not None:
        check_vocabulary(model, name=name, vocab_size=vocab_size)
    if max_seq_len is not None and model.max_seq_len < max_seq_len:
        raise ValueError(f"{name} takes sequences of {model.max_seq_len} tokens, {max_seq_len} were asked for")
    return model


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights that a run saved in its `model/` into a preset or a size of the same shape.

    Raises:
        CheckpointError: They cannot be read, or are of another shape.
    """
    try:
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"cannot start from the weights in {folder}: {reason}; give the --out of a finished run of the same model"
        ) from error


def check_vocabulary(model: LanguageModel, *, name: str, vocab_size: int) -> None:
    """Refuse a tokenizer whose tokens a model does not all know.

    Raises:
        ValueError: Names both sizes.
    """
    if model.vocab_size < vocab_size:
        raise ValueError(f"{name} knows {model.vocab_size} tokens, the tokenizer has {vocab_size}; use a smaller one")


_VOCABULARY = 32_000
_HEAD_DIM, _MOST_LAYERS = 128, 160
# Width over layers: 128 in the larger decoders of arXiv 2005.14165 (table 2.1: 6.7B has 32 layers and 4096, 175B 96 and
# 12288) and of arXiv 2302.13971 (table 2: 32 and 4096, 40 and 5120).
_WIDTH_PER_LAYER = 128
_SIZES = {"m": 1e6, "b": 1e9, "t": 1e12}


def decoder_of(num_parameters: float) -> TransformerConfig:
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
        shape = TransformerConfig(vocab_size=_VOCABULARY, dim=width, layers=layers, heads=width // _HEAD_DIM)
        miss = abs(math.log(shape.num_parameters / num_parameters))
        if miss < 0.05:
            found.append((abs(math.log(width / layers / _WIDTH_PER_LAYER)) + 4 * miss, shape))
    if not found:
        raise ValueError(
            f"no decoder has about {num_parameters:.3g} parameters; sizes from 10m to 2t are known, and the models "
            f"{', '.join(PRESETS)}"
        )
    return min(found, key=lambda pair: pair[0])[1]
