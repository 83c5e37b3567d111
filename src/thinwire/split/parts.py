"""Cuts of a decoder: head and tail for one owner, the layers between them for another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import refusal
from thinwire.split.client import RemoteBody

# Batch and tokens of the pass that compares cut layers with the whole model.
_TRIAL = 2, 9


def middle_layers(model: nn.Module, layers: range) -> nn.Module:
    """Return some layers of a decoder as a module of their own, for a `BodyServer`.

    The model is compared with the cut on random tokens. It is taken apart and is of no use afterwards.

    Args:
        model: A decoder of ours, or of transformers with `layers`, `norm` and `embed_tokens` as Llama has them.
        layers: Numbers of neighbouring layers.

    Returns:
        A module that takes hidden states (batch, seq, width) and real tokens (batch, seq) bool or None; `width` is its
        attribute.

    Raises:
        ValueError: The model is of another form, has no such layers, or its layers cannot be cut out.
    """
    decoder, held = _decoder(model)
    if not (0 <= layers.start < layers.stop <= len(held) and layers.step == 1):
        raise refusal("there are no such layers", got=f"{layers.start}:{layers.stop}", allowed=f"0:{len(held)}",
                      remedy=f"1:{max(2, len(held) - 1)}")  # fmt: skip
    decoder.eval()
    seen: list[Tensor] = []
    hooks = [
        held[layers.start].register_forward_pre_hook(
            lambda layer, given, named: seen.append(_first(given, named)), with_kwargs=True
        ),
        held[layers.stop - 1].register_forward_hook(
            lambda layer, given, output: seen.append(output[0] if isinstance(output, tuple) else output)
        ),
    ]  # fmt: skip
    device = next(decoder.parameters()).device
    embedding = next(part for part in decoder.modules() if isinstance(part, nn.Embedding))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(embedding.num_embeddings, _TRIAL, generator=generator).to(device)
    named = {"use_cache": False} if hasattr(decoder, "layers") else {}
    with torch.no_grad():
        decoder(tokens, **named)
        for hook in hooks:
            hook.remove()
        cut: Any = _OwnLayers(decoder, layers) if hasattr(decoder, "blocks") else _Layers(decoder, layers)
        found = cut(seen[0], None)
    cut.width = seen[0].shape[2]
    scale = seen[1].abs().max().clamp_min(1e-30)
    if not (found.shape == seen[1].shape and (found - seen[1]).abs().max() <= 1e-5 * scale):
        raise refusal(
            f"the layers of {type(decoder).__name__} do not compute by themselves what they do in the model",
            got=f"a difference of {(found - seen[1]).abs().max() / scale:.1e}" if found.shape == seen[1].shape
            else str(tuple(found.shape)),
            allowed="1e-5", remedy="a decoder as Llama, Qwen and Mistral are, or one of thinwire's",
        )  # fmt: skip
    cut.eval()
    return cut  # type: ignore[no-any-return]


def around(model: Any, *, head: int, tail: int, body: RemoteBody) -> Any:
    """Put layers at another host in the place of a decoder's own; return the model.

    The layers between head and tail are dropped. Generation without a cache works; with one it is refused.

    Args:
        model: As for `middle_layers`; `HuggingFaceModel` and PEFT's wrappers are looked through.
        head: Number of first layers that stay here.
        tail: Number of last layers that stay here.
        body: The layers between.

    Raises:
        ValueError: The model is of another form, or its middle is not what the server has.
    """
    decoder, held = _decoder(model)
    width = next(part for part in decoder.modules() if isinstance(part, nn.Embedding)).embedding_dim
    own = range(head, len(held) - tail)
    if head < 0 or tail < 0 or own != body.layers or width != body.width:
        raise refusal(
            "head and tail do not meet the server's layers",
            got=f"head={head}, tail={tail} of {len(held)} layers of width {width}",
            allowed=f"layers {body.layers.start}:{body.layers.stop} of width {body.width} between them",
            remedy=f"head={body.layers.start}, tail={max(0, len(held) - body.layers.stop)}",
        )  # fmt: skip
    remote = _RemoteLayer(body, held[head])
    first, last = list(held[:head]), list(held[len(held) - tail :]) if tail else []
    kept = nn.ModuleList([*first, remote, *last])
    if hasattr(decoder, "blocks"):
        decoder.blocks = kept
        return model
    numbers = [*range(head), head, *range(len(held) - tail, len(held))]
    _renumber(decoder, kept, numbers)
    decoder.register_forward_pre_hook(remote.note, with_kwargs=True)
    configs = [decoder.config, *(part.config for part in model.modules() if hasattr(part, "config"))]
    for config in configs:
        config.use_cache = False
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.use_cache = False
    return model


class _RemoteLayer(nn.Module):
    """One layer in place of several; tells the server which tokens are padding."""

    def __init__(self, body: RemoteBody, replaced: nn.Module) -> None:
        super().__init__()
        self.body = body
        self._real: Tensor | None = None
        kind = getattr(replaced, "attention_type", None)
        if kind is not None:
            self.attention_type = kind

    def note(self, decoder: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look at the arguments of the decoder's pass."""
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if named.get("use_cache") or named.get("past_key_values") is not None:
            raise refusal("layers at another host have no cache", got="use_cache=True", allowed="use_cache=False",
                          remedy="use_cache=False")  # fmt: skip
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise refusal("layers at another host take one mark a token", got="an attention mask of another form",
                          allowed="(batch, seq), 0 for padding", remedy="attention_mask of the tokenizer")  # fmt: skip
        if positions is not None and bool(
            (positions != torch.arange(positions.shape[-1], device=positions.device)).any()
        ):
            raise refusal("layers at another host count positions from 0", got="other position_ids",
                          allowed="one text a row", remedy="no packing of several texts in a row")  # fmt: skip
        self._real = None if mask is None or bool(mask.all()) else mask.bool()

    def forward(self, hidden_states: Tensor, rotation: Any = None, cache: Any = None, **named: Any) -> Tensor:
        """Return the output of the server's layers."""
        if cache is not None:
            raise refusal("layers at another host have no cache", got="a cache", allowed="none",
                          remedy="whole texts in each pass")  # fmt: skip
        found: Tensor = self.body(hidden_states, self._real)
        return found


class _Layers(nn.Module):
    """Layers of a decoder of transformers, which keeps its own rotation and masks."""

    def __init__(self, decoder: Any, layers: range) -> None:
        super().__init__()
        _renumber(decoder, nn.ModuleList(decoder.layers[layers.start : layers.stop]), list(layers))
        decoder.norm = nn.Identity()
        decoder.embed_tokens = None  # inputs come as hidden states
        self.decoder = decoder

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        mask = None if real is None else real.to(torch.int64)
        found: Tensor = self.decoder(inputs_embeds=hidden, attention_mask=mask, use_cache=False).last_hidden_state
        return found


class _OwnLayers(nn.Module):
    """Blocks of a decoder of ours; causal attention lets padding behind a text change nothing."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, decoder: Any, layers: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(decoder.blocks[layers.start : layers.stop])
        self.register_buffer("cosines", decoder.cosines, persistent=False)
        self.register_buffer("sines", decoder.sines, persistent=False)

    def forward(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        seq = hidden.shape[1]
        rotation = self.cosines[:seq].to(hidden.dtype), self.sines[:seq].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, rotation, None)
        return hidden


def _decoder(model: Any) -> tuple[Any, nn.ModuleList]:
    """Return the part of a model that holds its layers, and these."""
    for part in model.modules():
        for name in ("layers", "blocks"):
            held = getattr(part, name, None)
            has_ends = hasattr(part, "norm") and hasattr(part, "embed_tokens" if name == "layers" else "embedding")
            if isinstance(held, nn.ModuleList) and len(held) and has_ends:
                return part, held
    raise refusal(
        f"{type(model).__name__} is no decoder that can be cut", got="no layers between embed_tokens and norm",
        allowed="a decoder as Llama, Qwen and Mistral are, or one of thinwire's", remedy="AutoModelForCausalLM of one",
    )  # fmt: skip


def _renumber(decoder: Any, layers: nn.ModuleList, numbers: Sequence[int]) -> None:
    """Give a decoder other layers, and a configuration that says so."""
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[number] for number in numbers]
    decoder.config, decoder.layers = config, layers


def _first(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    found: Tensor = given[0] if given else named["hidden_states"]
    return found
