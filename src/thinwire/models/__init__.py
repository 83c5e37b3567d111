"""The models that `thinwire train` trains: presets of a Chinchilla-style decoder, and any transformers model."""

from thinwire.models.hf import HuggingFaceModel, build_hf_model
from thinwire.models.presets import PRESETS, LanguageModel, build_model, preset
from thinwire.models.transformer import Transformer, TransformerConfig, build_transformer

__all__ = [
    "PRESETS", "HuggingFaceModel", "LanguageModel", "Transformer", "TransformerConfig", "build_hf_model", "build_model",
    "build_transformer", "preset",
]  # fmt: skip
