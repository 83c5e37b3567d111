"""Any causal language model of the transformers library, as a `LanguageModel`, and its tokenizer."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.errors import CheckpointError, MissingExtra, refusal
from thinwire.shared_random import derive_seed
from thinwire.workloads.language.streamed import StreamedModel
from thinwire.workloads.language.tokenizers import PretrainedTokenizer, Tokenizer, load_tokenizer
from thinwire.workloads.language.transformer import next_token_loss, recompute_contexts

# Files that hold a vocabulary; transformers makes an empty tokenizer of a folder without any.
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "*.tiktoken", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Names under which configurations of transformers state how many experts a layer has, and how many a token visits.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
# A part of a parameter's name under which experts lie: those that every token visits have other names.
_EXPERT_PART, _LAYER_PART = re.compile(r"\.experts\."), re.compile(r"(.*?\.\d+)\.")


class HuggingFaceModel(nn.Module):
    """A transformers model as a language model of ours.

    Args:
        model: What `AutoModelForCausalLM` returned.
        z_loss: Weight of the squared log normaliser in the loss; 0 is what these models were trained with.

    Attributes:
        keeps_attention: Whether `recompute`, when it is set, keeps what attention returned.
    """

    def __init__(self, model: nn.Module, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self._recompute = self.keeps_attention = False
        self._streamed: StreamedModel | None = None

    @property
    def vocab_size(self) -> int:
        return int(_text_config(self.model).vocab_size)

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens; without a stated limit, 2**31 - 1."""
        # GPT-2's name for it is n_positions, which its config also answers under this name.
        return int(getattr(_text_config(self.model), "max_position_embeddings", None) or 2**31 - 1)

    @property
    def recompute(self) -> bool:
        """Whether the backward pass computes a block's activations again in place of keeping them."""
        return self._recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        if wanted == self._recompute:
            return
        self._recompute = wanted
        model: Any = self.model
        # older transformers have the other name alone
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        if wanted:
            enable = getattr(model, f"{kind}_checkpointing_enable")
            contexts = recompute_contexts(keeps_attention=self.keeps_attention)
            enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False, "context_fn": contexts}})
        else:
            getattr(model, f"{kind}_checkpointing_disable")()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Read more tokens (batch, seq) of a text, and return the logits of the one that follows, (batch, vocab_size).

        The cache is for the next call; None where the model has none, and every call begins at the start of the text.
        """
        earlier = {} if cache is None else {"past_key_values": cache}
        found = self.model(input_ids=tokens, use_cache=True, **earlier)
        return found.logits[:, -1], getattr(found, "past_key_values", None)

    def stream_backward(self, chunks: int) -> None:
        """Compute the backward pass in chunks of positions; see `streamed`."""
        self._streamed = StreamedModel.install(self.model, chunks)

    def loss(self, tokens: Tensor, targets: Tensor, *, is_padded: bool = False) -> tuple[Tensor, Tensor]:
        if self._streamed is not None:
            return self._streamed.loss(targets, z_loss=self.z_loss, is_padded=is_padded, input_ids=tokens)
        return next_token_loss(self(tokens), targets, z_loss=self.z_loss, is_padded=is_padded)


def build_hf_model(
    source: str, *, seed: int = 0, device: torch.device | str = "cpu", z_loss: float = 0.0
) -> HuggingFaceModel:
    """Build a transformers model: with its weights where there are some, else from its configuration and the seed.

    A local folder has weights when it holds `.safetensors` files; a name on the hub is taken to have them. Weights are
    float32 and read from safetensors alone, because reading the older pickled files would run code that they carry.

    Args:
        source: A local folder or `config.json`, or a name on the hub.
        seed: What the first weights follow from, where none are loaded. Torch's global generator is left as it was.
        device: Where the weights are put; `meta` gives shapes without reading or making weights.
        z_loss: See `HuggingFaceModel`.

    Raises:
        MissingExtra: transformers is not installed.
        CheckpointError: The model cannot be read, or has pickled weights only.
    """
    transformers = _transformers()
    try:
        # Where only shapes are wanted, a caller checks its options and must not wait for weights.
        if torch.device(device).type != "meta" and has_weights(source):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
            )
        else:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            # weights are drawn on the CPU, so that every device starts from the same
            made_on = "meta" if torch.device(device).type == "meta" else "cpu"
            with torch.random.fork_rng(devices=[]), torch.device(made_on):
                torch.default_generator.manual_seed(derive_seed(seed, "weights"))
                model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read hf:{source}: {_first_line(error)}; it must be a folder with a transformers config.json, "
            "or the name of a causal language model on the hub"
        ) from error
    model.train()
    return HuggingFaceModel(model, z_loss=z_loss).to(device)


# LoRA through PEFT: two thin trained matrices beside each frozen linear layer (arXiv 2106.09685, section 4.1). The
# adapters' output is scaled by alpha / rank.
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


def decoder_numbers(source: str, *, seq_len: int) -> dict[str, Any]:
    """Return the numbers of a transformers model that a plan needs, without reading or making its weights.

    Returns:
        layers, width, heads, vocab_size, layer_parameters (the mean of its blocks, with what stands outside them),
        embedding_parameters, head_parameters, is_head_tied and, of a mixture of experts, "experts": count, per_token,
        parameters, width and layers.

    Raises:
        ValueError: Its sequences are shorter, or its configuration does not state the experts of a token.
        MissingExtra: transformers is not installed.
        CheckpointError: The model cannot be read.

    Example:
        >>> import json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
        >>> numbers = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 100}
        >>> _ = path.write_text(json.dumps(numbers))
        >>> decoder_numbers(str(path), seq_len=64)["embedding_parameters"]
        1600
    """
    built = build_hf_model(source, device="meta")
    model: Any = built.model
    config = _text_config(model)
    if seq_len > built.max_seq_len:
        raise refusal(f"hf:{source} takes no sequences of this length", got=f"{seq_len} tokens",
                      allowed=f"up to {built.max_seq_len}", remedy=f"--seq-len {built.max_seq_len}")  # fmt: skip
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied = head is embedding
    outside = embedding.numel() + (0 if is_tied else head.numel())
    layers, experts = int(config.num_hidden_layers), _expert_numbers(source, model, config)
    return {
        **({} if experts is None else {"experts": experts}),
        "layers": layers, "width": int(config.hidden_size), "heads": int(config.num_attention_heads),
        "vocab_size": int(config.vocab_size), "embedding_parameters": embedding.numel(),
        "head_parameters": head.numel(), "is_head_tied": is_tied,
        "layer_parameters": (sum(one.numel() for one in model.parameters()) - outside) / layers,
    }  # fmt: skip


def _expert_numbers(source: str, model: Any, config: Any) -> dict[str, Any] | None:
    """Return the numbers of a model's experts, or None of a dense model."""
    count = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 1)
    found = {name: one.numel() for name, one in model.named_parameters() if _EXPERT_PART.search(name)}
    if count <= 1 or not found:
        return None
    per_token = next((getattr(config, name) for name in _PER_TOKEN if getattr(config, name, None)), None)
    if not isinstance(per_token, int) or not 1 <= per_token <= count:
        raise refusal(f"hf:{source} does not state how many experts a token visits", got=per_token,
                      allowed=f"{_PER_TOKEN[0]} of 1 to {count} in its config.json",
                      remedy="a configuration of Mixtral or Qwen3-MoE")  # fmt: skip
    layers = len({part.group(1) for name in found if (part := _LAYER_PART.match(name)) is not None})
    return {
        "count": count, "per_token": per_token, "parameters": sum(found.values()) / (layers * count),
        "width": int(config.hidden_size), "layers": layers,
    }  # fmt: skip


def load_hf_tokenizer(source: str) -> PretrainedTokenizer | None:
    """Load a model's own tokenizer; None where a local folder holds none.

    Raises:
        MissingExtra: transformers is not installed.
        CheckpointError: The tokenizer cannot be read, is not one of the tokenizers library, or ends no text.
    """
    path = Path(source)
    if path.is_file() or (path.is_dir() and not any(found for name in _VOCABULARIES for found in path.glob(name))):
        return None
    transformers = _transformers()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(
            f"cannot read the tokenizer of hf:{source}: {_first_line(error)}; save it again with save_pretrained of a "
            f"recent transformers"
        ) from error
    if not loaded.is_fast:
        raise CheckpointError(
            f"the tokenizer of hf:{source} is a {type(loaded).__name__} in Python; thinwire reads those with a "
            f"tokenizer.json; convert it with transformers and save it again"
        )
    if loaded.eos_token_id is None:
        raise CheckpointError(
            f"the tokenizer of hf:{source} names no eos_token, and one must follow each document; set "
            f"tokenizer.eos_token and save it again with save_pretrained"
        )
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_pretrained(folder)
        files = {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir() if file.is_file()}
    return PretrainedTokenizer(files, end_of_text=int(loaded.eos_token_id))


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that a run saved beside its model: one of ours, or a pretrained model's own."""
    own = load_hf_tokenizer(str(folder)) if (folder / "tokenizer_config.json").exists() else None
    return own or load_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))


def has_weights(source: str) -> bool:
    """Return whether a model starts from trained weights; a name on the hub is taken to have them.

    Raises:
        CheckpointError: A local folder has pickled weights only.
    """
    path = Path(source)
    if path.is_file():
        return False
    if not path.is_dir():
        return True
    if any(path.glob("*.safetensors")):
        return True
    pickled = sorted(path.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{pickled[0]} holds pickled weights, which run code when they are read; save them as .safetensors "
            "(save_pretrained of a recent transformers), or remove the file to start from the configuration"
        )
    return False


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra.of("transformers", extra="hf") from None
    return transformers


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    # A model of several kinds of input keeps the language's numbers in a part of its configuration.
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
