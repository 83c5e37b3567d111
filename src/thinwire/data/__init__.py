"""The texts that `thinwire train` learns from: read, tokenised once, held out in part, and dealt to replicas.

Names are loaded when they are first used: which data there is shows without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.data.corpus import Corpus, open_corpus
    from thinwire.data.sampler import Sampler, validation_batches
    from thinwire.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer

_HOMES = {
    "BpeTokenizer": "tokenizers", "ByteTokenizer": "tokenizers", "Corpus": "corpus", "Sampler": "sampler",
    "Tokenizer": "tokenizers", "open_corpus": "corpus", "validation_batches": "sampler",
}  # fmt: skip

__all__ = ["BpeTokenizer", "ByteTokenizer", "Corpus", "Sampler", "Tokenizer", "open_corpus", "validation_batches"]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
