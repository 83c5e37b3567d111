"""Servers of middle layers in threads of this process, and small decoders to cut."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import BodyServer, RemoteBody, around, connect, middle_layers
from thinwire.transport.secret import Secret
from thinwire.workloads.language.transformer import TransformerConfig, build_transformer

SECRET = Secret(key=bytes(range(32)))
EXACT = ActivationCode("float32", "float32")
VOCABULARY, WIDTH, LAYERS = 61, 16, 5


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def qwen() -> nn.Module:
    """Return a decoder whose later layers see the last three tokens only."""
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=3,
            max_window_layers=2,
        )
    )  # fmt: skip


def own() -> nn.Module:
    return build_transformer(
        TransformerConfig(vocab_size=VOCABULARY, dim=WIDTH, layers=LAYERS, heads=2, max_seq_len=32), seed=3
    )


@contextlib.contextmanager
def served(model: nn.Module, layers: range, **more: Any) -> Iterator[BodyServer]:
    """Serve layers of a model until the block ends."""
    body = more.pop("body", None) or middle_layers(copy.deepcopy(model), layers)
    server = BodyServer(body, layers=layers, secret=SECRET, **more)
    is_over = threading.Event()
    thread = threading.Thread(target=server.serve, kwargs={"until": is_over.is_set})
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join()
        server.close()


@contextlib.contextmanager
def connected(server: BodyServer, *, code: ActivationCode = EXACT, patience_s: float = 60.0) -> Iterator[RemoteBody]:
    """Connect a client until the block ends."""
    body = connect(f"127.0.0.1:{server.port}", secret=SECRET, code=code, patience_s=patience_s)
    try:
        yield body
    finally:
        body.close()


def cut(model: nn.Module, body: RemoteBody) -> Any:
    """Return a copy of a model with the server's layers in place of its own."""
    return around(copy.deepcopy(model), head=body.layers.start, tail=LAYERS - body.layers.stop, body=body)
