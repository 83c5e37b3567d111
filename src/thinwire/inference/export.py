"""Export of a run's global model: a folder for transformers, or plain safetensors.

Our decoder is the Apertus architecture of transformers with GELU: RMS norms before attention and MLP, queries and keys
normalised for each head before rotary positions, no biases, and an MLP without a gate. Weights keep their values; the
one matrix of queries, keys and values is cut into three.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from thinwire.data.tokenizers import END_OF_TEXT
from thinwire.errors import ThinwireError, refusal, unknown_name
from thinwire.files import replace_whole, write_whole
from thinwire.inference.trained_model import TrainedModel
from thinwire.models import Transformer
from thinwire.models.transformer import RMS_EPSILON, ROTARY_BASE, TransformerConfig
from thinwire.training.summary import write_model

FORMATS = ("hf", "safetensors")


def export_model(trained: TrainedModel, folder: Path, *, to: str) -> None:
    """Write a model and its tokenizer into a new or empty folder.

    Args:
        trained: The model.
        folder: Where the files go.
        to: `hf`, which `AutoModelForCausalLM` and `AutoTokenizer` of transformers open without code of ours; or
            `safetensors`, the weights under our names, as in the run's `model` folder.

    Raises:
        ValueError: The format is unknown, or the folder holds something.
        ThinwireError: The folder cannot be written.
    """
    if to not in FORMATS:
        raise unknown_name("--to", to, FORMATS)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refusal("--out is not empty", got=folder, allowed="a new or empty folder", remedy=f"--out {folder}-2")
    tokenizer_files = trained.tokenizer.files()
    model: Any = trained.model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if to == "safetensors" or not isinstance(model, Transformer):
            write_model(folder, model, tokenizer_files=tokenizer_files)
        else:
            _write_apertus(folder, model, end_of_text=trained.tokenizer.end_of_text)
            for name, content in tokenizer_files.items():
                write_whole(folder / name, content)
        if to == "hf" and not (folder / "tokenizer_config.json").exists():
            settings = tokenizer_settings(max_seq_len=model.max_seq_len)
            write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise ThinwireError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error


def _write_apertus(folder: Path, model: Transformer, *, end_of_text: int) -> None:
    tensors = apertus_tensors(model)
    replace_whole(
        folder / "model.safetensors",
        lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"}),
    )
    write_whole(
        folder / "config.json", json.dumps(apertus_config(model.config, end_of_text=end_of_text), indent=2) + "\n"
    )


def apertus_config(shape: TransformerConfig, *, end_of_text: int) -> dict[str, Any]:
    """Return the `config.json` with which transformers builds a decoder of ours.

    Args:
        shape: The decoder's.
        end_of_text: The token that ends a text.
    """
    return {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "dtype": "float32",
        "vocab_size": shape.vocab_size, "hidden_size": shape.dim, "intermediate_size": shape.mlp_dim,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads,
        "hidden_act": "gelu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": RMS_EPSILON,
        "max_position_embeddings": shape.max_seq_len, "tie_word_embeddings": shape.tied_head,
        # transformers 5 reads the first, version 4 the other two
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "rope_theta": ROTARY_BASE, "rope_scaling": None,
        "bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": None, "use_cache": True,
    }  # fmt: skip


def apertus_tensors(model: Transformer) -> dict[str, Tensor]:
    """Return a decoder's weights under the names of transformers' Apertus, on the CPU.

    Example:
        >>> from thinwire.models import build_transformer
        >>> model = build_transformer(TransformerConfig(vocab_size=16, dim=8, layers=1, heads=2))
        >>> [name for name in apertus_tensors(model) if "proj" in name][:2]
        ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight']
    """
    found = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.gain}
    if model.head is not None:
        found["lm_head.weight"] = model.head.weight
    blocks: Any = model.blocks
    for number, block in enumerate(blocks):
        attention = block.attention
        matrices = attention.query_key_value.weight.chunk(3)
        gains = attention.query_key_norm.gain.chunk(2)
        layer = {
            **{f"self_attn.{name}_proj": matrix for name, matrix in zip("qkv", matrices, strict=True)},
            **{f"self_attn.{name}_norm": gain for name, gain in zip("qk", gains, strict=True)},
            "self_attn.o_proj": attention.out.weight,
            "attention_layernorm": block.attention_norm.gain, "feedforward_layernorm": block.mlp_norm.gain,
            "mlp.up_proj": block.up.weight, "mlp.down_proj": block.down.weight,
        }  # fmt: skip
        found |= {f"model.layers.{number}.{name}.weight": value for name, value in layer.items()}
    return {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in found.items()}


def tokenizer_settings(*, max_seq_len: int) -> dict[str, Any]:
    """Return the `tokenizer_config.json` beside a `tokenizer.json` of ours.

    Args:
        max_seq_len: Longest sequence of the model, in tokens.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        # text that quotes the marker stays text, as in training
        "split_special_tokens": True,
    }  # fmt: skip
