"""LoRA adapters through PEFT: two thin trained matrices beside each frozen linear layer.

Reference:
    arXiv 2106.09685, section 4.1. The adapters' output is scaled by alpha / rank = 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import MissingExtra
from thinwire.shared_random import derive_seed
from thinwire.workloads.language.hf import HuggingFaceModel

_ALPHA_PER_RANK = 2


def with_adapters(model: HuggingFaceModel, *, rank: int, seed: int) -> HuggingFaceModel:
    """Freeze a model and put adapters of a rank beside all its linear layers but the head.

    The model is changed in place; torch's global generator is left as it was. No output changes before training.

    Raises:
        MissingExtra: peft is not installed.
        ValueError: The model has no linear layers that PEFT knows.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtra.of("peft", extra="peft") from None
    config = peft.LoraConfig(
        r=rank, lora_alpha=_ALPHA_PER_RANK * rank, target_modules="all-linear", lora_dropout=0.0, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "adapters"))
        adapted = peft.get_peft_model(model.model, config)
    return HuggingFaceModel(adapted, z_loss=model.z_loss)


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model was made by `with_adapters`."""
    return hasattr(getattr(model, "model", None), "merge_and_unload")


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write the adapters alone, as `peft.PeftModel.from_pretrained` reads them."""
    wrapped: Any = model.model
    wrapped.save_pretrained(str(folder), safe_serialization=True)


def merged(model: nn.Module) -> Any:
    """Add the adapters to the weights for good, and return the plain transformers model."""
    wrapped: Any = model.model
    return wrapped.merge_and_unload()
