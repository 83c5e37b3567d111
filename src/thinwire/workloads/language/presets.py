"""Shapes of the decoder by name or by size. Imports no torch, so that wrong names are refused at once.

| name | layers | heads | dim | MLP | vocabulary | parameters |
| --- | --- | --- | --- | --- | --- | --- |
| `nano` | 6 | 4 | 192 | 768 | 2,048 | 3,050,496 |
| `35m` | 6 | 8 | 512 | 2,048 | 32,000 | 35,265,792 |
| `150m` | 12 | 14 | 896 | 3,584 | 32,000 | 144,301,440 |
| `400m` | 12 | 24 | 1,536 | 6,144 | 32,000 | 388,930,560 |
| `1b` | 24 | 32 | 2,048 | 8,192 | 32,000 | 1,273,598,976 |
| `moe-nano` | 6 | 4 | 192 | 8 x 384 | 2,048 | 8,368,128 |
| `moe-35m` | 6 | 8 | 512 | 16 x 1,024 | 32,000 | 123,395,328 |

`35m` and `1b` are rows of table 5 of arXiv 2501.18512 (heads 64 wide, the MLP four times the width). `150m` and `400m`
have the 12 layers of the models of arXiv 2311.08105, with heads 64 wide; `nano` is small enough for two processes on
two cores. With an untied head each has vocabulary * dim parameters more. `linear-nano` and `linear-35m` have gated
linear attention (arXiv 2312.06635), whose state does not grow with the text. In `moe-nano` and `moe-35m` a
token takes 2 of the experts that stand in place of each MLP, and computes as much as in `nano` and `35m`. In
`moe-nano-r48` tokens travel to the experts in 48 dimensions, as after `thinwire experts convert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from thinwire.errors import refusal, unknown_name

GATE_RANK = 16  # inner width of the product that makes linear attention's gates; arXiv 2312.06635, section 4.4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder.

    Attributes:
        dim: Width of the residual stream.
        heads: Attention heads; each is dim / heads wide, an even number.
        mlp_dim: Inner width of the MLP; 0 stands for 4 * dim.
        max_seq_len: Longest sequence, in tokens.
        tied_head: Whether the head shares the embedding's weights.
        z_loss: Weight of the squared log normaliser in the loss.
        is_linear: Whether attention is linear and gated.
        num_experts: Experts of each layer, in place of one MLP; 0 for none. Each has the inner width `mlp_dim`.
        top_k: Experts of each token.
        expert_dim: Dimensions in which tokens travel to experts (`experts.low_rank`); 0 stands for dim.
        balance: Weight of the experts' balance loss (`experts.balance_loss`).

    Raises:
        ValueError: A size is below 1, or the heads do not divide the width evenly.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    mlp_dim: int = 0
    max_seq_len: int = 1024
    tied_head: bool = True
    z_loss: float = 1e-4
    is_linear: bool = False
    num_experts: int = 0
    top_k: int = 2
    expert_dim: int = 0
    balance: float = 0.01

    def __post_init__(self) -> None:
        if self.mlp_dim == 0:
            object.__setattr__(self, "mlp_dim", 4 * self.dim)
        if not 0 <= self.expert_dim <= self.dim:
            raise refusal("expert_dim is more than the width of tokens", got=self.expert_dim,
                          allowed=f"1 to {self.dim}", remedy=f"{max(1, self.dim // 4)}")  # fmt: skip
        for name in ("vocab_size", "dim", "layers", "heads", "mlp_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim must be a multiple of 2 * heads, so that rotary positions can turn pairs; "
                f"got dim {self.dim} with {self.heads} heads"
            )
        if not self.z_loss >= 0:
            raise ValueError(f"z_loss must be 0 or more, got {self.z_loss}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers; a tied head counts once.

        Example:
            >>> TransformerConfig(vocab_size=2048, dim=192, layers=6, heads=4).num_parameters
            3050496
        """
        width = self.expert_dim or self.dim
        block = 4 * self.dim**2 + 2 * width * self.mlp_dim * max(1, self.num_experts) + 2 * self.dim
        block += 2 * self.dim * self.expert_dim
        block += self.num_experts * self.dim + 2 * self.head_dim
        if self.is_linear:
            block += 2 * GATE_RANK * self.dim + self.head_dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return embeddings + self.layers * block + self.dim


_NANO = TransformerConfig(vocab_size=2048, dim=192, layers=6, heads=4)
_35M = TransformerConfig(vocab_size=32_000, dim=512, layers=6, heads=8)
PRESETS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        "nano": _NANO,
        "35m": _35M,
        "150m": TransformerConfig(vocab_size=32_000, dim=896, layers=12, heads=14),
        "400m": TransformerConfig(vocab_size=32_000, dim=1536, layers=12, heads=24),
        "1b": TransformerConfig(vocab_size=32_000, dim=2048, layers=24, heads=32),
        "linear-nano": replace(_NANO, is_linear=True),
        "linear-35m": replace(_35M, is_linear=True),
        "moe-nano": replace(_NANO, mlp_dim=384, num_experts=8),
        "moe-35m": replace(_35M, mlp_dim=1024, num_experts=16),
    }
)


# Peak learning rates of AdamW. nano's was tuned: `thinwire train --replicas 2 --sync-interval 30 --overlap-steps 3
# --steps 300` on stdlib ended at 4.70, 4.55, 4.51, 4.55 for 1e-3, 3e-3, 6e-3, 1e-2. The others: the papers' scale.
USUAL_LR = {
    "nano": 6e-3, "35m": 1e-3, "150m": 6e-4, "400m": 4e-4, "1b": 3e-4, "linear-nano": 6e-3, "linear-35m": 1e-3,
    "moe-nano": 6e-3, "moe-35m": 1e-3,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([mbt])")
_OTHERS = "a size such as 125m, hf:PATH"
_LOW_RANK = re.compile(r"(moe-[a-z0-9]+)-r([0-9]{1,6})")


def base_name(name: str) -> str:
    """Return the name of the preset that a model is a variant of.

    Example:
        >>> base_name("moe-nano-r48"), base_name("nano")
        ('moe-nano', 'nano')
    """
    found = _LOW_RANK.fullmatch(name)
    return name if found is None else found[1]


def check_model(name: str) -> None:
    """Refuse a model that does not exist, as far as that shows without torch."""
    if name.startswith("hf:"):
        path = name.removeprefix("hf:")
        if not path or (path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists()):
            raise refusal("--model names no folder", got=repr(name), allowed="hf: and the path or name of a model",
                          remedy="--model nano")  # fmt: skip
    elif base_name(name) in PRESETS:
        preset(name)
    elif not _SIZE.fullmatch(name.lower()):
        raise unknown_name("--model", name, PRESETS, others=_OTHERS)


def preset(
    name: str, *, vocab_size: int | None = None, max_seq_len: int | None = None, tied_head: bool | None = None
) -> TransformerConfig:
    """Return a named shape, or a decoder of a size such as `7b`, with what the data decides put in.

    Raises:
        ValueError: There is no such name, and the text holds the nearest ones; or its variant cannot be.

    Example:
        >>> preset("35m").num_parameters, preset("7b").num_parameters
        (35265792, 6986846336)
    """
    config, low_rank = PRESETS.get(base_name(name)), _LOW_RANK.fullmatch(name)
    if config is not None and low_rank is not None:
        config = replace(config, expert_dim=int(low_rank[2]))
    if config is None:
        size = _SIZE.fullmatch(name.lower())
        if size is None:
            raise unknown_name("model", name, PRESETS, others=_OTHERS)
        config = decoder_of(float(size.group(1)) * _SIZES[size.group(2)])
    return replace(
        config,
        vocab_size=config.vocab_size if vocab_size is None else vocab_size,
        max_seq_len=config.max_seq_len if max_seq_len is None else max_seq_len,
        tied_head=config.tied_head if tied_head is None else tied_head,
    )


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
