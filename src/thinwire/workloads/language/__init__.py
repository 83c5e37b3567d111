"""Language modelling: texts and tokens, decoders and transformers models.

Names are loaded when they are first used: which data there is shows without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.workloads.language.corpus import Corpus, open_corpus
    from thinwire.workloads.language.hf import HuggingFaceModel, build_hf_model
    from thinwire.workloads.language.presets import PRESETS, TransformerConfig, preset
    from thinwire.workloads.language.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer
    from thinwire.workloads.language.transformer import Transformer, build_transformer
    from thinwire.workloads.language.workload import LanguageModel, build_model
    from thinwire.workloads.sampler import Sampler, validation_batches

_HOMES = {
    "BpeTokenizer": "language.tokenizers", "ByteTokenizer": "language.tokenizers", "Corpus": "language.corpus",
    "HuggingFaceModel": "language.hf", "LanguageModel": "language.workload", "PRESETS": "language.presets",
    "Sampler": "sampler", "Tokenizer": "language.tokenizers", "Transformer": "language.transformer",
    "TransformerConfig": "language.presets", "build_hf_model": "language.hf", "build_model": "language.workload",
    "build_transformer": "language.transformer", "open_corpus": "language.corpus", "preset": "language.presets",
    "validation_batches": "sampler",
}  # fmt: skip

__all__ = [
    "PRESETS", "BpeTokenizer", "ByteTokenizer", "Corpus", "HuggingFaceModel", "LanguageModel", "Sampler", "Tokenizer",
    "Transformer", "TransformerConfig", "build_hf_model", "build_model", "build_transformer", "open_corpus", "preset",
    "validation_batches",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinwire.workloads.{_HOMES[name]}"), name)
