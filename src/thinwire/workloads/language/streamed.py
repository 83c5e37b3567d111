"""`streamed`: exact gradients of long sequences, chunk by chunk, for thinwire's decoder and models of transformers.

Nothing of a layer's arithmetic is written again here. A layer gets a chunk, the parts of its arguments that belong to
the chunk, and a cache that returns the keys up to the chunk's end, as it does when it generates text.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import refusal
from thinwire.workloads.language.chunked_backward import ChunkKeys, attend_to_end, stream_layer, stream_loss, trained
from thinwire.workloads.language.transformer import next_token_sums

_CACHE = ("past_key_values", "past_key_value", "layer_past")
_IGNORED = -100  # label of a position that counts nothing, in transformers
_ATTENTION = "thinwire_chunks"
_REMEDY = "model.gradient_checkpointing_enable()"


def streamed(model: nn.Module, *, chunks: int = 8) -> nn.Module:
    """Let a model compute its backward pass chunk by chunk; gradients stay exact, and the loop stays as it is.

    Args:
        model: A decoder of thinwire, or a causal language model of transformers, with or without PEFT's adapters. It is
            changed in place. Shard it (FSDP2) afterwards, or before.
        chunks: Parts of each sequence; more take less memory. A shorter sequence has a part for each position.

    Returns:
        The same model. A transformers model that is given `labels` returns the loss without logits.

    Raises:
        ValueError: There is no chunk, or the model is of a kind that cannot be cut.

    Example:
        >>> from thinwire.workloads.language import build_model
        >>> model = streamed(build_model("nano", vocab_size=257), chunks=4)
        >>> tokens = torch.arange(100)[None]
        >>> loss, _ = model.loss(tokens, tokens)
        >>> loss.backward()
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise refusal("a streamed backward needs chunks", got=repr(chunks), allowed="1 or more", remedy="chunks=8")
    own = getattr(model, "stream_backward", None)
    if own is not None:
        own(chunks)
    else:
        StreamedModel.install(model, chunks)
    return model


class StreamedModel:
    """`forward` of a streamed causal language model: with labels it returns the loss alone, without logits.

    Args:
        model: The causal language model.
        chunks: Parts of each sequence.
    """

    def __init__(self, model: nn.Module, chunks: int) -> None:
        self._model: Any = model
        self._plain = model.forward
        self._chunks = chunks
        self._is_checked = self._is_probed = False
        functools.update_wrapper(self, self._plain)  # the Trainer reads the names of its arguments

    @classmethod
    def install(cls, model: nn.Module, chunks: int) -> StreamedModel:
        """Cut the layers and the head of a model, which may be wrapped by PEFT; refuse one of another kind.

        Raises:
            ValueError: It is no causal language model whose layers hand their keys to a cache, or already streamed.
        """
        inner = next((one for one in model.modules() if _is_causal_model(one)), None)
        layers = [] if inner is None else _layers_of(inner)
        if inner is None or not layers:
            raise refusal(
                "this model cannot compute its backward pass in chunks", got=type(model).__name__,
                allowed="thinwire's decoder, or a causal language model of transformers whose layers take "
                        "past_key_values and whose head follows its base model", remedy=_REMEDY,
            )  # fmt: skip
        # older transformers have the other name alone
        newer = hasattr(type(inner), "is_activation_checkpointing")
        if getattr(inner, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False):
            raise refusal("a streamed backward computes layers again by itself", got="gradient checkpointing too",
                          allowed="one of them", remedy="model.gradient_checkpointing_disable()")  # fmt: skip
        if isinstance(inner.forward, StreamedModel):
            raise refusal("this model is streamed already", got="a second call of streamed", allowed="one a model",
                          remedy="to load the model again for another number of chunks")  # fmt: skip
        kind = inner.config.get_text_config()._attn_implementation  # type: ignore[operator, union-attr]
        if kind not in ("sdpa", "eager"):
            raise refusal("a streamed backward knows no such attention", got=repr(kind), allowed="sdpa or eager",
                          remedy="model.set_attn_implementation('sdpa')")  # fmt: skip
        for layer in layers:
            layer.forward = _StreamedLayer(layer, chunks)
        found = cls(inner, chunks)
        inner.forward = found
        try:
            found._check()
        except Exception:
            for module in (inner, *layers):
                del module.forward  # what its class has shows again
            raise
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _named(self._plain, args, kwargs)
        labels = given.pop("labels", None)
        if torch.is_grad_enabled() and given.get("past_key_values") is None:
            given["use_cache"] = False
        if self._is_probed and torch.is_grad_enabled():
            return self._model.get_output_embeddings()(self._hidden(given))
        if labels is None:
            return self._plain(**given)
        name = getattr(getattr(self._model, "loss_function", None), "__name__", "none")
        if name != "ForCausalLMLoss" or int(labels.min()) < _IGNORED:
            raise refusal("a streamed model computes the usual loss of the next token",
                          got=f"the loss {name}, labels from {int(labels.min())}",
                          allowed=f"ForCausalLMLoss, labels from {_IGNORED}",
                          remedy="to call it without labels, and to compute another loss from its logits")  # fmt: skip
        shift, num_items = given.pop("shift_labels", None), given.pop("num_items_in_batch", None)
        if shift is None:
            shift = nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        loss, _ = self.loss(shift, z_loss=0.0, num_targets=num_items, **given)
        if num_items is None:  # a mean of nothing is NaN, as in torch; it is added, so that gradients stay zero
            loss = loss + torch.where((shift >= 0).any(), 0.0, math.nan).to(loss.device)
        return StreamedOutput(loss=loss)

    def loss(
        self, targets: Tensor, *, z_loss: float, num_targets: Any = None, is_padded: bool = True, **given: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean nll of the targets that follow each position, (batch, seq).

        Args:
            targets: -100, or any negative number, counts nothing.
            z_loss: See `next_token_loss`.
            num_targets: What the sums are divided by; None for the number of targets that count.
            is_padded: Whether any target may be negative.
            **given: Arguments of the base model.
        """
        self._check()
        if getattr(self._model.config, "output_router_logits", False) or any(
            given.pop(name, False) for name in ("logits_to_keep", "output_hidden_states", "output_attentions")
        ):
            raise refusal("a streamed model returns the loss alone", got="a request for more",
                          allowed="labels without logits, hidden states, attentions or a router's loss",
                          remedy="to call it without labels")  # fmt: skip
        given.pop("return_dict", None)
        stream = self._hidden({**given, "use_cache": False})
        head = self._model.get_output_embeddings()
        if num_targets is None:
            num_targets = (targets >= 0).sum().clamp(min=1) if is_padded else targets.numel()

        def sums(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            return next_token_sums(head(part).float(), wanted, z_loss=z_loss)

        return stream_loss(
            sums, stream, targets.to(stream.device), chunks=self._chunks, num_targets=num_targets,
            parameters=trained([head]),
        )  # fmt: skip

    def _hidden(self, given: Mapping[str, Any]) -> Tensor:
        base = getattr(self._model, self._model.base_model_prefix)
        found = base(**{name: value for name, value in given.items() if value is not None})
        stream: Tensor = found[0] if isinstance(found, tuple) else found.last_hidden_state
        return stream

    def _check(self) -> None:
        """Run a few tokens both ways; refuse a model whose head or layers do something else besides."""
        head = self._model.get_output_embeddings()
        device = next(head.parameters()).device
        if self._is_checked or device.type == "meta":
            return
        self._is_checked = self._is_probed = True
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.inference_mode(False):  # kept for a backward pass, whatever the caller's mode
            tokens = torch.arange(_TOKENS, device=device)[None] % self._model.config.get_text_config().vocab_size
        try:
            with torch.no_grad():
                wanted = self._model(input_ids=tokens, use_cache=False).logits
            with torch.inference_mode(False), torch.enable_grad():
                found = self._model(input_ids=tokens, use_cache=False).detach()
        finally:
            self._is_probed = False
            for module, is_training in modes.items():
                module.training = is_training
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        limit = 1e-5 if wanted.dtype in (torch.float32, torch.float64) else 0.05
        if not error <= limit:
            raise refusal("the model computes its logits in another way than its layers and head in chunks do",
                          got=f"a difference of {error:.2g}", allowed=f"{limit:g} of the largest logit",
                          remedy=_REMEDY)  # fmt: skip


_TOKENS = 16  # that `_check` compares


class StreamedOutput(dict[str, Tensor]):
    """Output of a streamed model: `loss`, as an attribute, a key or the first place."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]

    @property
    def logits(self) -> Tensor:
        raise refusal("a streamed model never holds all logits", got="output.logits of a call with labels",
                      allowed="output.loss", remedy="to call it without labels, under torch.no_grad()")  # fmt: skip

    def __getitem__(self, name: str | int) -> Tensor:
        return super().__getitem__("loss" if name == 0 else name)  # type: ignore[index]


class _StreamedLayer:
    """`forward` of a streamed layer; the hooks of the module, FSDP2's among them, stay around it."""

    def __init__(self, layer: nn.Module, chunks: int) -> None:
        self._layer, self._plain, self._chunks = layer, layer.forward, chunks
        self._cache = next(name for name in _CACHE if name in inspect.signature(layer.forward).parameters)
        functools.update_wrapper(self, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _named(self._plain, args, kwargs)
        if not torch.is_grad_enabled() or given.get(self._cache) is not None:
            return self._plain(**given)
        if getattr(self._layer, "gradient_checkpointing", False) and self._layer.training:
            raise refusal("a streamed backward computes layers again by itself", got="gradient checkpointing too",
                          allowed="one of them", remedy="model.gradient_checkpointing_disable()")  # fmt: skip
        first = next(iter(given))
        stream = given.pop(first)
        is_tuple: list[bool] = []

        def run(part: Tensor, place: slice, keys: ChunkKeys) -> Tensor:
            own = {name: _part(name, value, place, stream.shape[1]) for name, value in given.items()}
            with _ChunkAttention(self._layer):
                found = self._plain(**{first: part, **own, self._cache: keys})
            is_tuple[:] = [isinstance(found, tuple)]
            output: Tensor = found[0] if is_tuple[0] else found
            return output

        found = stream_layer(
            run, stream, chunks=self._chunks, parameters=trained([self._layer]), name=type(self._layer).__name__
        )
        return (found,) if is_tuple[0] else found


class _ChunkAttention:
    """Gives the attention of a layer that has no mask the one that meets earlier keys, while a chunk runs."""

    def __init__(self, layer: nn.Module) -> None:
        self._modules = [
            one
            for one in layer.modules()
            if getattr(getattr(one, "config", None), "_attn_implementation", "") == "sdpa"
        ]
        self._before = [one.config for one in self._modules]

    def __enter__(self) -> None:
        copies: dict[int, Any] = {}
        for module, config in zip(self._modules, self._before, strict=True):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)]._attn_implementation_internal = _ATTENTION
            module.config = copies[id(config)]
        _register()

    def __exit__(self, *_: object) -> None:
        for module, config in zip(self._modules, self._before, strict=True):
            module.config = config


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        more = {name for name, one in kwargs.items() if isinstance(one, Tensor) and name != "position_ids"}
        if attention_mask is None and (not is_causal or more):
            raise refusal("a streamed backward needs causal attention", got=", ".join(more) or "is_causal=False",
                          allowed="a causal model, or a mask", remedy=_REMEDY)  # fmt: skip
        if attention_mask is not None:
            found = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
            )
            return found[0], None
        return attend_to_end(query, key, value, scale=scaling, dropout=dropout).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attend)


def _part(name: str, value: Any, place: slice, length: int) -> Any:
    """Return what of a layer's argument belongs to a chunk."""
    if name == "position_embeddings":
        return tuple(one[..., place, :] for one in value)
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask" and value.shape[-2:] == (length, length) and value.ndim == 4:
        return value[:, :, place, : place.stop]
    if name in ("position_ids", "cache_position") and value.shape[-1] == length:
        return value[..., place]
    raise refusal(f"a streamed backward does not know how to cut a layer's {name}", got=tuple(value.shape),
                  allowed="attention_mask, position_ids, position_embeddings", remedy=_REMEDY)  # fmt: skip


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    names = list(inspect.signature(function).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_causal_model(module: nn.Module) -> bool:
    kind = type(module)  # PEFT's wrappers hand on what the model in them has
    has_head = hasattr(kind, "get_output_embeddings") and hasattr(kind, "base_model_prefix")
    return bool(
        has_head and module.get_output_embeddings() is not None  # type: ignore[operator]
        and isinstance(getattr(module, str(module.base_model_prefix), None), nn.Module)
    )  # fmt: skip


def _layers_of(model: nn.Module) -> list[nn.Module]:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            parameters = [inspect.signature(layer.forward).parameters for layer in module]
            if all(any(name in own for name in _CACHE) for own in parameters):
                return list(module)
    return []
