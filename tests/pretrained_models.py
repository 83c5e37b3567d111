"""Tiny pretrained models of the transformers library with tokenizers of their own."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<s>", "</s>")


def write_llama_with_weights(folder: Path, *, seed: int = 3, **sizes: int) -> Path:
    """Save a Llama with random weights; without a tokenizer."""
    shape = {
        "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, **sizes,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, *, texts: list[str], vocab_size: int = 300) -> Path:
    """Save a byte-level BPE whose ids differ from those of a tokenizer that thinwire trains on the same texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.save_pretrained(folder)
    return folder
